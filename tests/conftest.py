"""Fixtures that several tests share."""

from __future__ import annotations

import signal
import threading
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


def pytest_configure() -> None:
    """Let signals be signals: a shell's background job ignores Ctrl-C, nohup a hang-up, and so would what we start."""
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, usual)
