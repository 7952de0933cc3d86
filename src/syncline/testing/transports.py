"""The contract of transports: cases that every transport must pass, with one to nine ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from syncline.errors import PeerLostError, ProtocolError, SynclineError, UnsupportedError, WorldError
from syncline.runtime import Event
from syncline.transports import Transport

__all__ = ["CASES", "TransportContract"]

Case = Callable[[Transport], Any]
SIZES = (0, 1, 7, 8, 9, 1013, 300_000)


def exchange_with_everyone(transport: Transport) -> None:
    """All pairs of ranks, also a rank with itself; sizes from zero to large; known and unknown lengths."""
    rank, size = transport.rank, transport.size
    for exact in (False, True):
        for tag, numel in enumerate(SIZES):
            sent = [torch.full((numel,), 100 * rank + to, dtype=torch.int32) for to in range(size)]
            received = [torch.full((numel,), -1, dtype=torch.int32) for _ in range(size)]
            handles = [transport.recv(received[peer], peer, tag, exact=exact) for peer in range(size)]
            handles += [transport.send(sent[peer], peer, tag, exact=exact) for peer in range(size)]
            for handle in handles:
                handle.wait()
            for peer in range(size):
                assert bool((received[peer] == 100 * peer + rank).all()), (exact, numel, peer)
                assert handles[peer].source == peer
                assert handles[peer].nbytes == 4 * numel


def keep_order_and_tags(transport: Transport) -> None:
    """Messages with one tag arrive in order; tags do not mix; handles may be waited for in any order."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [
        transport.send(torch.tensor([number, tag], dtype=torch.int64), to, tag) for number in range(5) for tag in (3, 4)
    ]
    received = {tag: [torch.zeros(2, dtype=torch.int64) for _ in range(5)] for tag in (4, 3)}
    handles = [transport.recv(buffer, source, tag) for tag, buffers in received.items() for buffer in buffers]
    for handle in reversed(handles):
        handle.wait()
    for handle in sends:
        handle.wait()
    for tag, buffers in received.items():
        assert [buffer.tolist() for buffer in buffers] == [[number, tag] for number in range(5)]


def send_and_receive_bytes(transport: Transport) -> None:
    """Short messages that consist of several parts; one that is too long is refused."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    handles = [transport.recv_bytes(64, source, 21) for _ in range(4)]
    for number in range(3):
        transport.send_bytes((bytes([transport.rank, number]), memoryview(bytes(number))), to, 21)
    transport.send_bytes((bytes(65),), to, 21)
    for number in range(3):
        handles[number].wait()
    assert [bytes(each.data) for each in handles[:3]] == [bytes([source, n]) + bytes(n) for n in range(3)]
    with pytest.raises(ProtocolError):
        handles[3].wait()


def receive_from_any_rank(transport: Transport) -> None:
    """Rank 0 receives from any rank, also itself, with sender and length; receives with a source still work."""
    rank, size = transport.rank, transport.size
    handle = transport.send(torch.full((rank + 1,), rank, dtype=torch.int16), 0, 11)
    if rank == 0:
        seen = {}
        for _ in range(size):
            buffer = torch.zeros(64, dtype=torch.int16)
            receipt = transport.recv(buffer, None, 11)
            receipt.wait()
            seen[receipt.source] = buffer[: receipt.nbytes // 2].tolist()
        assert seen == {peer: [peer] * (peer + 1) for peer in range(size)}
    handle.wait()
    if rank == 0:
        transport.send(torch.zeros(1), size - 1, 13)  # only now: before, anyone's receive could take it
    if rank == size - 1:
        transport.recv(torch.zeros(1), 0, 13).wait()
    for exact in (False, True):
        directed = torch.zeros(2, dtype=torch.int64)
        handles = [transport.recv(directed, size - 1, 11, exact=exact)] if rank == 0 else []
        if rank == size - 1:
            handles.append(transport.send(torch.tensor([rank, 5]), 0, 11, exact=exact))
        for handle in handles:
            handle.wait()
        assert rank != 0 or directed.tolist() == [size - 1, 5]


def wake_a_receive_of_another_task(transport: Transport) -> None:
    """A message to oneself wakes a task of the same rank that waits for any rank."""
    runtime = transport.runtime
    heard: list[int] = []
    ready = runtime.event()

    def listen() -> None:
        buffer = torch.zeros(1)
        handle = transport.recv(buffer, None, 12)
        ready.set()
        handle.wait()
        heard.append(handle.source)

    task = runtime.spawn(listen, name="listener")
    assert ready.wait(60)
    transport.send(torch.ones(1), transport.rank, 12).wait()
    assert task.join(60)
    assert heard == [transport.rank]


def wait_without_a_deadline(transport: Transport) -> None:
    """A message ends an idle wait in another task: from a neighbour, from any rank, and for sends."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    runtime = transport.runtime
    heard: list[tuple[int, float]] = []
    ready = runtime.event()

    def listen() -> None:
        buffers = [torch.zeros(3), torch.zeros(3)]
        handles = [transport.recv(buffers[0], source, 14), transport.recv(buffers[1], None, 15)]
        ready.set()
        for buffer, handle in zip(buffers, handles, strict=True):
            handle.wait(timeout=math.inf)
            heard.append((handle.source, float(buffer[0])))

    task = runtime.spawn(listen, name="idle")
    assert ready.wait(60)
    for tag in (14, 15):
        transport.send(torch.full((3,), float(tag + transport.rank)), to, tag).wait(timeout=math.inf)
    assert task.join(60)
    assert heard == [(source, 14.0 + source), (source, 15.0 + source)]
    assert transport.lost() == {}


def end_an_idle_wait(transport: Transport) -> None:
    """Closing or aborting a channel ends the idle waits of this rank."""
    for give_up in (False, True):
        channel = transport.split([transport.rank])
        assert channel is not None
        ended: list[SynclineError] = []
        ready = transport.runtime.event()
        task = transport.runtime.spawn(_wait_for_nothing, channel, ready, ended, name="idle")
        assert ready.wait(60)
        if give_up:
            channel.abort()
        channel.close()
        assert task.join(60)
        assert len(ended) == 1


def _wait_for_nothing(channel: Transport, ready: Event, ended: list[SynclineError]) -> None:
    handle = channel.recv(torch.zeros(1), None, 3)
    ready.set()
    try:
        handle.wait(timeout=math.inf)
    except SynclineError as error:
        ended.append(error)


def refuse_a_long_message(transport: Transport) -> None:
    """A message longer than its buffer is a ProtocolError that names the peer; the channel stays usable."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    handle = transport.send(torch.zeros(100, dtype=torch.uint8), to, 20)
    with pytest.raises(ProtocolError, match=rf"rank {source} sent 100 B .*at most 40 B") as caught:
        transport.recv(torch.zeros(40, dtype=torch.uint8), source, 20).wait()
    assert caught.value.peer == source
    handle.wait()
    following = transport.send(torch.ones(3), to, 20)
    buffer = torch.zeros(3)
    transport.recv(buffer, source, 20).wait()
    following.wait()
    assert buffer.tolist() == [1, 1, 1]


def split_into_parts(transport: Transport) -> None:
    """Splits are independent of each other and of their parent, in the order given."""
    evens = transport.split(range(0, transport.size, 2))
    backwards = transport.split(range(transport.size - 1, -1, -1))
    assert backwards is not None
    assert backwards.rank == transport.size - 1 - transport.rank
    assert (evens is None) == (transport.rank % 2 == 1)
    for channel, word in ((transport, 1), (backwards, 2), (evens, 3)):
        if channel is not None:
            channel.send(torch.tensor([word]), (channel.rank + 1) % channel.size, 0)
    for channel, word in ((evens, 3), (backwards, 2), (transport, 1)):
        if channel is not None:
            buffer = torch.zeros(1, dtype=torch.int64)
            channel.recv(buffer, (channel.rank - 1) % channel.size, 0).wait()
            assert int(buffer) == word


def split_by_halves(transport: Transport) -> None:
    """Each half may split at the same call: the two channels do not mix."""
    half = transport.size // 2 or 1
    mine = range(half) if transport.rank < half else range(half, transport.size)
    channel = transport.split(mine)
    assert channel is not None
    handle = channel.send(torch.tensor([transport.rank]), (channel.rank + 1) % channel.size, 0)
    buffer = torch.zeros(1, dtype=torch.int64)
    channel.recv(buffer, (channel.rank - 1) % channel.size, 0).wait()
    handle.wait()
    assert int(buffer) == mine[(channel.rank - 1) % channel.size]


def withdraw_a_receive(transport: Transport) -> None:
    """A receive from oneself that timed out is withdrawn: a later message goes to the next receive."""
    with pytest.raises(PeerLostError):
        transport.recv(torch.zeros(1), transport.rank, 40).wait(timeout=0.01)
    handle = transport.send(torch.ones(1), transport.rank, 40)
    buffer = torch.zeros(1)
    transport.recv(buffer, transport.rank, 40).wait()
    handle.wait()
    assert float(buffer) == 1.0


def refuse_unknown_ranks(transport: Transport) -> None:
    """Unknown ranks, repeated ranks and bad tags are refused before anything is sent."""
    size = transport.size
    with pytest.raises(WorldError, match="is not a rank"):
        transport.send(torch.zeros(1), size)
    with pytest.raises(WorldError, match="is not a rank"):
        transport.recv(torch.zeros(1), -1)
    with pytest.raises(WorldError, match="tag=-1"):
        transport.send(torch.zeros(1), 0, -1)
    with pytest.raises(WorldError, match="cannot be exact"):
        transport.recv(torch.zeros(1), None, exact=True)
    for ranks, message in (([], "empty"), ([0, 0], "more than once"), ([0, size], "not in the world")):
        with pytest.raises(WorldError, match=message):
            transport.split(ranks)


def reduce_natively(transport: Transport) -> None:
    """The results of native collectives are right, if there are any."""
    native, rank, size = transport.native, transport.rank, transport.size
    if not native.available:
        return
    values = torch.arange(12.0) + rank
    native.allreduce(values, "sum").wait()
    assert torch.equal(values, size * torch.arange(12.0) + sum(range(size)))
    gathered = torch.zeros(size)
    native.allgather(gathered, torch.tensor([float(rank)])).wait()
    assert gathered.tolist() == list(range(size))
    copied = torch.tensor([rank])
    native.broadcast(copied, size - 1).wait()
    assert int(copied) == size - 1
    part = torch.zeros(1)
    native.reduce_scatter(part, torch.arange(float(size)), "max").wait()
    assert float(part) == rank
    output = torch.zeros(size, dtype=torch.int64)
    native.alltoall(output, torch.full((size,), rank), [1] * size, [1] * size).wait()
    assert output.tolist() == list(range(size))
    native.barrier().wait()


def access_windows(transport: Transport) -> None:
    """put, accumulate and get of windows; a clear error if there are none."""
    rank, size = transport.rank, transport.size
    try:
        window = transport.memory.window(size + 1, torch.float32)
    except UnsupportedError as error:
        if "simulator" not in str(error):
            raise
        return
    for peer in range(size):
        window.put(torch.tensor([float(rank)]), peer, offset=rank)
        window.accumulate(torch.ones(1), peer, offset=size)
    window.flush()
    token = torch.zeros(1)
    for peer in range(size):  # everyone has flushed
        transport.send(token, peer, 30)
    for peer in range(size):
        transport.recv(token, peer, 30).wait()
    assert window.local.tolist() == [*map(float, range(size)), float(size)]
    copy = torch.zeros(size)
    window.get(copy, (rank + 1) % size).wait()
    assert copy.tolist() == list(map(float, range(size)))
    with pytest.raises(WorldError, match="do not lie in a window"):
        window.put(torch.zeros(2), 0, offset=size)
    window.close()


CASES: tuple[Case, ...] = (
    exchange_with_everyone,
    keep_order_and_tags,
    send_and_receive_bytes,
    receive_from_any_rank,
    wake_a_receive_of_another_task,
    wait_without_a_deadline,
    end_an_idle_wait,
    refuse_a_long_message,
    split_into_parts,
    split_by_halves,
    refuse_unknown_ranks,
    reduce_natively,
    access_windows,
)


class TransportContract:
    """Inherit and define `run`: it runs `case(transport)` on each of `size` ranks and raises the error of any rank."""

    sizes: Sequence[int] = range(1, 10)

    def run(self, case: Case, size: int) -> None:
        raise UnsupportedError("a contract test says how its transport is run: define run(case, size)")

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_contract(self, case: Case) -> None:
        for size in self.sizes:
            self.run(case, size)
