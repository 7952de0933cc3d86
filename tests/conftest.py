"""Fixtures that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from syncline.testing import Pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Nine processes joined by gloo. Tests that use it share one xdist worker: `pytest.mark.xdist_group("gloo")`."""
    with Pool(9) as pool:
        yield pool


@pytest.fixture(scope="session")
def zeromq() -> Iterator[Pool]:
    """Nine processes joined by ZeroMQ. Tests that use it share a worker: `pytest.mark.xdist_group("zeromq")`."""
    with Pool(9, engine="zeromq") as pool:
        yield pool
