"""The signals that stop a run, in workers and in servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import syncline.server.__main__ as server
from syncline.environment.base import SAVES
from syncline.training.signals import StopSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers of this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_repeated_sigterm_only_requests_a_stop() -> None:
    stop = StopSignals(terminated=True)
    assert not stop()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # the launcher passes on what it is sent
        os.kill(os.getpid(), number)
    assert stop()


def test_sigterm_ends_a_worker_that_does_not_save() -> None:
    StopSignals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("saves", [True, False])
def test_servers_of_workers_that_save_leave_signals_alone(monkeypatch: pytest.MonkeyPatch, saves: bool) -> None:
    """They are needed until all workers have saved; then the launcher ends them."""

    def joined() -> None:
        ignored = [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)]
        assert ignored == [saves, saves]
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_join", joined)
    monkeypatch.setenv(SAVES, "1" if saves else "")
    assert server.main() == 130
