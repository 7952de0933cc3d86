"""Tests that share processes share a worker of xdist."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_a_group_reaches_the_one_who_deals_tests_out(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs a worker of pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
