"""The runs on emulated hosts that docs/planner.md reports: every recorded run is in its tables, as it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planner.lab_runs import RECORD, choices, recorded, summary, table

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


@pytest.mark.parametrize("name", list(json.loads(RECORD.read_text())))
def test_page_has_every_run_and_miss(name: str) -> None:
    rows = recorded(name)
    assert rows
    for line in [*table(rows), summary(rows), *(choices(rows) if name == "choice" else [])]:
        assert line in PAGE
