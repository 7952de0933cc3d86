"""Connection attempts that tell a cut link from a slow or silent process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from syncline.environment import Rendezvous
from syncline.runtime import RealRuntime
from syncline.transports.link_probe import LinkProbe, elastic_address, probe_links
from syncline.transports.memory_store import MemoryStore
from tests.transports.zeromq_worlds import until


@contextmanager
def unanswered_port() -> Iterator[int]:
    """A port whose connection requests the kernel drops, as a cut link does: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])


def test_only_a_host_that_does_not_answer_is_unreachable() -> None:
    """A process that does not read, and one that has ended, are on hosts that answer."""
    store = MemoryStore()
    probe, silent = (LinkProbe(store, rank, "127.0.0.1", RealRuntime(), 0.2) for rank in (0, 1))
    with socket.create_server(("127.0.0.1", 0)) as ended:
        store.set("probe/2", f'["127.0.0.1", {ended.getsockname()[1]}]')
    with unanswered_port() as port:
        store.set("probe/3", f'["127.0.0.1", {port}]')
        probe.start(range(5))  # rank 4 has no address yet
        assert not probe.unreachable
        until(lambda: probe.poll() == [3], "the time has passed")
        assert probe.unreachable == {3: "its host (127.0.0.1) has not answered for 0.2 s"}
        assert not probe.pending
        probe.start([1, 3])
        until(lambda: probe.poll() == [] and not probe.pending, "rank 1 answers, and rank 3 is not tried again")
    probe.close()
    silent.close()


def test_links_are_probed_between_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elastic_address(Rendezvous("localhost", 1)) == "127.0.0.1"
    assert probe_links(MemoryStore(), 0, "127.0.0.1", RealRuntime()) is None
    monkeypatch.setenv("SYNCLINE_LOST_AFTER", "0")
    assert probe_links(MemoryStore(), 0, "10.0.0.1", RealRuntime()) is None
