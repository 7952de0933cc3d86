"""Functions that the processes of the ZeroMQ tests run: on the shared pool, or in separate processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.errors import PeerLostError
from syncline.transports import Transport
from syncline.transports.zeromq import ZmqTransport, connection
from tests.transports.zeromq_worlds import TIMEOUT, Pipe, enter, forget_the_peak, peak

LARGE = 3_000_000


def swap(transport: Transport, peers: list[int], tag: int) -> None:
    """A small and a large message to and from each peer."""
    for length in (5, LARGE):
        mine = torch.full((length,), 10 + transport.rank, dtype=torch.uint8)
        theirs = {peer: torch.zeros(length, dtype=torch.uint8) for peer in peers}
        handles = [transport.recv(theirs[peer], peer, tag) for peer in peers]
        handles += [transport.send(mine, peer, tag) for peer in peers]
        for handle in handles:
            handle.wait()
        for peer in peers:
            assert bool((theirs[peer] == 10 + peer).all()), (peer, length)


# On the pool.


def serve_two_threads(transport: Transport, rounds: int, seed: int) -> None:
    """Two threads of rank 0 wait for two peers at once; each is served, in whatever order the peers answer."""
    draw = random.Random(f"{seed}/{transport.rank}")
    token = torch.zeros(8, dtype=torch.uint8)
    if transport.rank > 0:
        for number in range(rounds):
            transport.recv(token, 0, 1).wait()
            answer = torch.full((draw.choice((1, 8, 200_000)),), number % 256, dtype=torch.uint8)
            transport.send(answer, 0, 1).wait()
        return
    tasks = [transport.runtime.spawn(_ask, transport, peer, rounds, f"{seed}/{peer}") for peer in (1, 2)]
    for task in tasks:
        assert task.join(TIMEOUT), "a thread was not served"


def _ask(transport: Transport, peer: int, rounds: int, seed: str) -> None:
    draw = random.Random(f"asking {seed}")
    for number in range(rounds):
        buffer = torch.zeros(200_000, dtype=torch.uint8)
        early = transport.recv(buffer, peer, 1) if draw.random() < 0.5 else None
        transport.send(torch.zeros(8, dtype=torch.uint8), peer, 1).wait()
        handle = early or transport.recv(buffer, peer, 1)
        handle.wait()
        assert bool((buffer[: handle.nbytes] == number % 256).all()), (peer, number)


def deliver_while_it_computes(transport: Transport, flag: Path) -> int:
    """The receiver of a large message leaves its loop only when the sender has seen the message taken."""
    length = 30_000_000
    if transport.rank == 0:
        transport.recv(torch.zeros(1), 1, 1).wait()  # the receive is posted
        transport.send(torch.full((length,), 3, dtype=torch.uint8), 1, 2).wait()
        flag.touch()
        return 0
    buffer = torch.zeros(length, dtype=torch.uint8)
    handle = transport.recv(buffer, 0, 2)
    transport.send(torch.zeros(1), 0, 1).wait()
    until, turns = transport.runtime.now() + TIMEOUT, 0
    while not flag.exists():
        turns += sum(range(100))
        assert transport.runtime.now() < until, "nothing moved while this process computed"
    handle.wait()
    assert bool((buffer == 3).all())
    return turns


def press(transport: ZmqTransport, messages: int) -> int:
    """Rank 0 sends more than rank 1 has room for before it receives; how rank 1's memory grew."""
    if transport.rank == 0:
        for number in range(messages):
            transport.send(torch.tensor([number], dtype=torch.int64).repeat(100), 1, 1)
        transport.recv(torch.zeros(1), 1, 2).wait()
        return 0
    before = forget_the_peak()
    link, runtime = transport.node.connection(transport.members[0]), transport.runtime
    until = runtime.now() + TIMEOUT
    while link.offered < connection.MAX_OFFERS:  # as many as may be: now the sender waits
        assert runtime.now() < until, f"the sender is not yet stopped: {link}"
        runtime.sleep(0.005)
    grown = peak() - before
    buffer = torch.zeros(100, dtype=torch.int64)
    for number in range(messages):
        transport.recv(buffer, 0, 1).wait()
        assert bool((buffer == number).all()), (number, buffer[0])
    transport.send(torch.zeros(1), 0, 2).wait()
    return grown


# In separate processes.


def lose_one(pipe: Pipe, port: int, rank: int) -> str:
    """Four ranks; rank 3 is killed while 0 waits for it and 1 has a message offered to it; then rank 2 leaves."""
    transport = enter(port, rank, 4)
    others = [peer for peer in range(4) if peer != rank]
    if rank != 1:
        swap(transport, [peer for peer in others if peer != 1], 1)  # 1 and 3 have not spoken before
    pipe.say("ready")
    if rank in (2, 3):
        pipe.hear()
    word = str(_broken(transport, 3)) if rank < 2 else ""
    alive = [peer for peer in others if peer != 3]
    swap(transport, alive, 2)
    pipe.say(word)
    if rank == 2:
        transport.close()
        return ""
    left = str(_broken(transport, 2))
    swap(transport, [peer for peer in alive if peer != 2], 3)
    transport.close()
    return left


def _broken(transport: ZmqTransport, peer: int) -> PeerLostError:
    """The error of a wait for this peer: a send by rank 1, a receive by the others."""
    start = transport.send if transport.rank == 1 else transport.recv
    with pytest.raises(PeerLostError) as caught:
        start(torch.zeros(LARGE, dtype=torch.uint8), peer, 9).wait()
    assert (caught.value.peer, caught.value.seconds) == (peer, 0.0), "it was the timeout that ended it"
    return caught.value


def hold_out(pipe: Pipe, port: int, rank: int, rounds: int) -> int:
    """Two honest ranks go on talking while rank 0 is flooded; how its memory grew."""
    transport = enter(port, rank, 2)
    swap(transport, [1 - rank], 1)
    before = forget_the_peak()
    pipe.say(transport.node.endpoint)
    pipe.hear()
    for number in range(rounds):
        swap(transport, [1 - rank], number)
    grown = peak() - before
    pipe.say(grown)
    pipe.hear()
    transport.close()
    return grown


def leave_at_once(pipe: Pipe, port: int, rank: int) -> Any:
    """Rank 0 sends, keeps no handle, closes and ends; rank 1 receives only when rank 0 waits in close."""
    transport = enter(port, rank, 2)
    lengths = (1, LARGE, 70_000, 10, LARGE)
    if rank == 0:
        for number, length in enumerate(lengths):
            transport.send(torch.full((length,), number, dtype=torch.uint8), 1, number % 2)
        transport.close()
        return None
    link, runtime = transport.node.connection(0), transport.runtime
    until = runtime.now() + TIMEOUT
    while link.arrived[0] + link.offered < len(lengths):
        assert runtime.now() < until, f"not all have been sent: {link}"
        runtime.sleep(0.005)
    got = []
    for number in range(len(lengths)):
        buffer = torch.zeros(LARGE, dtype=torch.uint8)
        handle = transport.recv(buffer, 0, number % 2)
        handle.wait()
        assert bool((buffer[: handle.nbytes] == number).all())
        got.append(handle.nbytes)
    transport.close()
    return got == list(lengths)
