"""Playing a schedule on a network without running it: the simulator's arithmetic, no tasks, no tensors.

It follows the executor: a rank posts a round, waits for its receives, waits for sends of what it will
overwrite, combines, goes on. Messages go through the ports in the order in which their first bytes arrive.
Equal networks give many equal times, so arrivals are kept by time: one heap entry serves all that happen at
once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from syncline.collectives import Move, Round, Schedule
from syncline.collectives.carriers import bounds
from syncline.runtime.hosting import calm_collector
from syncline.transports import Network

__all__ = ["Cost", "play"]


@dataclass(frozen=True)
class Cost:
    """What a schedule takes: virtual seconds, rounds, bytes sent by the busiest rank, most receives a round,
    messages."""

    time: float
    rounds: int
    busiest_bytes: int
    fan_in: int
    messages: int


def play(
    schedule: Schedule,
    size: int,
    nbytes: int,
    network: Network,
    *,
    itemsize: int = 1,
    root: int = 0,
    hosts: tuple[int, ...] = (),
) -> Cost:
    """Count and time one call of a schedule on `nbytes` bytes.

    >>> from syncline.collectives import build
    >>> cost = play(build("allreduce", "ring"), 64, 1 << 20, Network(latency=1e-6, bandwidth=1e9))
    >>> cost.rounds, cost.messages
    (126, 8064)
    """
    setting = schedule.setting(size, root, hosts)
    edges = [edge * itemsize for edge in bounds(nbytes // itemsize, setting.chunks)]
    if schedule.operation == "alltoall":  # chunk i·p + j: `nbytes` is what each rank holds
        row = [edge * itemsize for edge in bounds(nbytes // itemsize, size)]
        edges = [source * row[-1] + edge for source in range(size) for edge in row[:-1]] + [size * row[-1]]
    with calm_collector():
        return _Player(network, edges, [schedule.rounds(rank, setting) for rank in range(size)]).run()


class _Player:
    """All ranks at once, each a generator that yields when it has to wait.

    The loops are written out: a ring of 1,024 ranks has two million messages.
    """

    def __init__(self, network: Network, edges: list[int], schedules: list[Iterator[Round]]) -> None:
        size = len(schedules)
        self.network = network
        self.edges = edges
        self.slow = [network.slow.get(rank, 1.0) for rank in range(size)]
        equal = not network.links and network.inside is None
        self.alpha_beta = (network.latency, 1.0 / network.bandwidth) if equal else None
        self.early: list[dict[int, deque[float]]] = [{} for _ in range(size)]  # came before its round, by source
        self.wanted: list[dict[int, int]] = [{} for _ in range(size)]  # still to come this round, by source
        self.latest = [0.0] * size  # when the last receive of the round came
        self.arrivals: dict[float, list[tuple[int, int, float]]] = {}  # by time: (from, to, seconds at the port)
        self.times: list[float] = []
        self.counts = [(0, 0, 0, 0)] * size
        self.end = 0.0
        self.resume = [self._follow(rank, rounds).__next__ for rank, rounds in enumerate(schedules)]

    def run(self) -> Cost:
        for resume in self.resume:
            _step(resume)
        arrivals, times, in_free = self.arrivals, self.times, [0.0] * len(self.resume)
        latest, all_wanted, resumes, early = self.latest, self.wanted, self.resume, self.early
        while times:
            head = heapq.heappop(times)
            for source, to, seconds in arrivals.pop(head):
                free = in_free[to]
                done = in_free[to] = (head if head > free else free) + seconds
                wanted = all_wanted[to]
                if source not in wanted:
                    early[to].setdefault(source, deque()).append(done)
                    continue
                if wanted[source] == 1:
                    del wanted[source]
                else:
                    wanted[source] -= 1
                if done > latest[to]:
                    latest[to] = done
                if not wanted:
                    _step(resumes[to])
        waiting = [rank for rank, wanted in enumerate(all_wanted) if wanted]
        assert not waiting, f"the schedule leaves ranks {waiting} waiting"
        rounds, sent, fan_in, messages = zip(*self.counts, strict=True)
        return Cost(self.end, max(rounds), max(sent), max(fan_in), sum(messages))

    def _follow(self, rank: int, schedule: Iterator[Round]) -> Iterator[None]:
        """One rank, round by round; yields while receives are missing."""
        edges, wanted, early, latest = self.edges, self.wanted[rank], self.early[rank], self.latest
        slow, arrivals, times, alpha_beta = self.slow, self.arrivals, self.times, self.alpha_beta
        gamma, own_slow = self.network.combine * self.slow[rank], self.slow[rank]
        now = free = 0.0
        sending: list[tuple[int, int, float]] = []
        rounds = sent = fan_in = messages = 0
        for sends, recvs in schedule:
            rounds += 1
            if free > now:
                for move in recvs:
                    if not move.combine:
                        now = _after_sends(sending, move, now)
            else:
                sending.clear()  # all earlier ones have left
            for peer, chunk, width, _ in sends:
                nbytes = edges[chunk + width] - edges[chunk]
                if nbytes:
                    alpha, beta = alpha_beta or self._link(rank, peer)
                    start = now if now > free else free
                    seconds = nbytes * beta
                    free = start + seconds * own_slow
                    sending.append((chunk, chunk + width, free))
                    sent += nbytes
                    messages += 1
                    head = start + alpha
                    if head in arrivals:
                        arrivals[head].append((rank, peer, seconds * slow[peer]))
                    else:
                        arrivals[head] = [(rank, peer, seconds * slow[peer])]
                        heapq.heappush(times, head)
            if len(recvs) > fan_in:
                fan_in = len(recvs)
            latest[rank] = now
            combined = 0
            for peer, chunk, width, combine in recvs:
                nbytes = edges[chunk + width] - edges[chunk]
                if nbytes:
                    if combine:
                        combined += nbytes
                    if early and early.get(peer):
                        latest[rank] = max(latest[rank], early[peer].popleft())
                    else:
                        wanted[peer] = wanted.get(peer, 0) + 1
            if wanted:
                yield
            now = latest[rank]
            if combined:
                if free > now:
                    for move in recvs:
                        if move.combine:
                            now = _after_sends(sending, move, now)
                now += combined * gamma
        self.counts[rank] = (rounds, sent, fan_in, messages)
        self.end = max(self.end, now, free)

    def _link(self, source: int, to: int) -> tuple[float, float]:
        link = self.network.link(source, to)
        return link.latency, 1.0 / link.bandwidth


def _step(resume: Callable[[], None]) -> None:
    with suppress(StopIteration):
        resume()


def _after_sends(sending: list[tuple[int, int, float]], move: Move, now: float) -> float:
    """When the sends that a move would overwrite have left."""
    for first, after, left in sending:
        if left > now and first < move.chunk + move.width and move.chunk < after:
            now = left
    return now
