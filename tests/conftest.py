"""Fixtures that several tests share."""

from __future__ import annotations

import gc
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syncline.testing import Pool
from tests.codecs.compiling import compile_kernels
from tests.launch.runs import Runs

STARTING_PROCESSES = {"runs", "gloo", "zeromq", "mpi", "lab", "launch", "killed", "browser", "baselines", "race"}
"""Fixtures and groups of tests that start processes."""
LONG_S = 60.0
"""Seconds of tests from which the slowest files are listed."""


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """Nine processes joined by gloo. Tests that use it share one xdist worker: `pytest.mark.xdist_group("gloo")`."""
    compile_kernels()
    with Pool(9) as pool:
        yield pool


@pytest.fixture(scope="session")
def zeromq() -> Iterator[Pool]:
    """Nine processes joined by ZeroMQ. Tests that use it share a worker: `pytest.mark.xdist_group("zeromq")`."""
    with Pool(9, engine="zeromq") as pool:
        yield pool


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Runs of the real command in a folder of their own. Processes that are left at the end are killed."""
    made = Runs(tmp_path)
    yield made
    made.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that start processes, by their fixture or by the group that they share with others."""
    group = item.get_closest_marker("xdist_group")
    named = set(getattr(item, "fixturenames", ())) | set(group.args if group is not None else ())
    if named & STARTING_PROCESSES:
        item.add_marker("processes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make `xdist_group` work: xdist 3.8 appends the group to an attribute that pytest 9.2 no longer reads.

    Otherwise the tests of a group are spread over all workers, and each worker starts the pools that they share.
    """
    for item in items:
        named = vars(item).get("_nodeid")
        if named is not None and named != item.nodeid:
            item._id = type(item._id).parse(named)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """After a long session, list the ten files that took longest, in seconds of one xdist worker."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if sum(seconds.values()) > LONG_S:
        terminalreporter.section("slowest files")
        for name, spent in sorted(seconds.items(), key=lambda each: -each[1])[:10]:
            terminalreporter.write_line(f"{spent:7.1f} s  {name}")


def pytest_collection(session: pytest.Session) -> None:
    """Disable garbage collection while tests are collected: it makes half a million objects that all stay."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze collected modules and tests, so that the garbage collector skips them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, collect garbage and freeze what is left, such as modules that tests have imported.

    Otherwise the collector, and `sl.distribute` in its search for schedulers, visit millions of objects of other files.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_configure() -> None:
    """Restore default signal handlers: background jobs ignore SIGINT, nohup ignores SIGHUP, and children inherit it."""
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, usual)
