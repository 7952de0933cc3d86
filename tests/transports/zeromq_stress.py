"""Random messages among processes that come and go: what each process does, and what the test tells them.

The k-th message from one rank to another has a length and a content that both can compute. So a message that is lost,
doubled, late or damaged is found when it, or the next one of its sender, is received.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.transports.zeromq_worlds import TIMEOUT, Crew, Member, Pipe, come_later, enter, forget_the_peak, peak

MAX_MESSAGE_BYTES = 4 << 20
SPARE = 1 << 16
TAG = 1
LAUNCHED = 6
SLOW = 1
"""The rank that receives nothing before the first round is sent."""
LEAVERS = {1: 4, 2: 5}
"""Who leaves after which round; another joins at the same time."""
ROUNDS = 4


def block() -> Tensor:
    """What all messages are cut from."""
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, MAX_MESSAGE_BYTES + SPARE, dtype=np.uint8))


def cut(seed: int, sender: int, receiver: int, number: int) -> tuple[int, int]:
    """Where a message begins in the block and where it ends: 1 B to 4 MB, as many of each magnitude."""
    draw = random.Random(f"{seed}/{sender}/{receiver}/{number}")
    first = draw.randrange(SPARE)
    return first, first + int(math.exp(draw.uniform(0, math.log(MAX_MESSAGE_BYTES))))


class Worker:
    """One process in the storm. The main thread sends, a task receives."""

    def __init__(self, pipe: Pipe, port: int, rank: int | None, seed: int) -> None:
        self.pipe, self.seed = pipe, seed
        self.transport = come_later(port) if rank is None else enter(port, rank, LAUNCHED)
        self.rank = self.transport.node.rank
        self.block = block()
        self.buffer = torch.zeros(MAX_MESSAGE_BYTES, dtype=torch.uint8)
        self.sent: Counter[int] = Counter()
        self.got: Counter[int] = Counter()
        self.due: Counter[int] | None = None
        self.handles: list[Any] = []
        self.task: Any = None
        self.before = forget_the_peak()

    def obey(self) -> tuple[dict[int, int], int]:
        """Do what the test says until it says `finish`; what was received from whom, and how memory grew."""
        self.pipe.say(self.rank)
        while True:
            order, *values = self.pipe.hear()
            if order == "finish":
                return self.finish(*values)
            self.pipe.say(getattr(self, order)(*values))

    def send(self, targets: list[int]) -> None:
        for to in targets:
            first, after = cut(self.seed, self.rank, to, self.sent[to])
            self.sent[to] += 1
            self.handles.append(self.transport.send(self.block[first:after], to, TAG))

    def receive(self) -> None:
        self.task = self.transport.runtime.spawn(self.take)

    def take(self) -> None:
        while self.due is None or self.got != self.due:
            handle = self.transport.recv(self.buffer, None, TAG)
            handle.wait()
            if handle.source == self.rank:
                continue  # the main thread: it knows now what is due
            number = self.got[handle.source]
            first, after = cut(self.seed, handle.source, self.rank, number)
            assert handle.nbytes == after - first, f"message {number} of rank {handle.source}: {handle.nbytes} bytes"
            assert torch.equal(self.buffer[: handle.nbytes], self.block[first:after]), (handle.source, number)
            self.got[handle.source] += 1

    def pile(self, messages: int) -> int:
        """Wait until so many messages lie here unreceived, or are offered; how memory has grown."""
        runtime = self.transport.runtime
        until = runtime.now() + TIMEOUT
        while (
            sum(
                peer.connection.arrived[0] + peer.connection.offered
                for peer in list(self.transport.node.peers.values())
            )
            < messages
        ):
            assert runtime.now() < until, f"fewer than {messages} have come: {self.transport.node.peers}"
            runtime.sleep(0.005)
        return peak() - self.before

    def finish(self, due: dict[int, int]) -> tuple[dict[int, int], int]:
        self.due = Counter(due)
        self.transport.send(torch.zeros(0, dtype=torch.uint8), self.rank, TAG).wait()
        assert self.task.join(TIMEOUT), f"rank {self.rank} has {self.got}, and {self.due} are due"
        for handle in self.handles:
            handle.wait()
        grown = peak() - self.before
        self.transport.close()
        return dict(self.got), grown


def work(pipe: Pipe, port: int, rank: int | None, seed: int) -> tuple[dict[int, int], int]:
    return Worker(pipe, port, rank, seed).obey()


@dataclass
class Storm:
    """How it went."""

    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    piled: int = 0
    """Bytes that lay with their senders, or unreceived, before the slow rank began."""
    grown_by_the_pile: int = 0
    grown: dict[int, int] = field(default_factory=dict)
    """Bytes by which each process's memory grew at most."""


def rage(crew: Crew, messages: int, seed: int) -> Storm:
    """Rounds of messages; two ranks leave and two join between them, while what was sent is still on its way."""
    storm, draw = Storm(), random.Random(seed)
    members = {rank: crew.start(work, crew.port, rank, seed) for rank in range(LAUNCHED)}
    everyone = dict(members)
    for member in members.values():
        member.hear()
    _tell([member for rank, member in members.items() if rank != SLOW], "receive")
    for turn in range(ROUNDS):
        _send(storm, draw, members, messages // ROUNDS // LAUNCHED)
        if turn == 0:
            _pile(storm, seed, members[SLOW])
        if turn in LEAVERS:
            _finish(storm, LEAVERS[turn], members.pop(LEAVERS[turn]))
            joined = crew.start(work, crew.port, None, seed)
            rank = joined.hear()
            members[rank] = everyone[rank] = joined
            _tell([joined], "receive")
    for rank, member in members.items():
        _finish(storm, rank, member)
    for rank, member in everyone.items():
        got, storm.grown[rank] = member.hear()
        storm.received.update({(source, rank): count for source, count in got.items()})
    return storm


def _tell(members: list[Member], *order: Any) -> list[Any]:
    for member in members:
        member.say(order)
    return [member.hear() for member in members]


def _send(storm: Storm, draw: random.Random, members: dict[int, Member], each: int) -> None:
    for rank, member in members.items():
        targets = [draw.choice([to for to in members if to != rank]) for _ in range(each)]
        storm.sent.update((rank, to) for to in targets)
        member.say(("send", targets))
    for member in members.values():
        member.hear()


def _pile(storm: Storm, seed: int, slow: Member) -> None:
    counts = {sender: count for (sender, to), count in storm.sent.items() if to == SLOW}
    spans = [cut(seed, sender, SLOW, number) for sender, count in counts.items() for number in range(count)]
    storm.piled = sum(after - first for first, after in spans)
    (storm.grown_by_the_pile,) = _tell([slow], "pile", len(spans))
    _tell([slow], "receive")


def _finish(storm: Storm, rank: int, member: Member) -> None:
    member.say(("finish", {sender: count for (sender, to), count in storm.sent.items() if to == rank}))
