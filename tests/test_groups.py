"""Tests of one group run on one worker of xdist."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_xdist_uses_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs a worker of pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
