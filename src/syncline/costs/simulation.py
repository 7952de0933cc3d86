"""Simulates a schedule on a network model, without tasks and tensors.

It follows the executor: a rank posts a round, waits for its receives, waits for sends of data that it will overwrite,
combines, and continues; lanes take turns round by round. Messages pass the ports in the order in which their first
bytes arrive. Equal links give many equal times, so arrivals are grouped by time: one heap entry serves all of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from syncline.collectives import Move, Round, Schedule
from syncline.collectives.executor import LARGE_SEND_BYTES, chunk_edges
from syncline.runtime.simulator import rare_garbage_collection
from syncline.transports import Network

__all__ = ["Cost", "play"]


@dataclass(frozen=True)
class Cost:
    """The cost of a schedule: virtual seconds, rounds, bytes of the busiest sender, maximum receives per round,
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
    lanes: int = 1,
) -> Cost:
    """Simulate one call of a schedule on `nbytes` bytes.

    >>> from syncline.collectives import build
    >>> cost = play(build("allreduce", "ring"), 64, 1 << 20, Network(latency=1e-6, bandwidth=1e9))
    >>> cost.rounds, cost.messages
    (126, 8064)
    """
    setting = schedule.setting(size, root, hosts)
    parts = chunk_edges(nbytes // itemsize, lanes)
    edges = [
        [edge * itemsize for edge in chunk_edges(after - first, setting.chunks)] for first, after in pairwise(parts)
    ]
    if schedule.operation == "alltoall":  # chunk i·p + j: `nbytes` is what each rank holds
        row = [edge * itemsize for edge in chunk_edges(nbytes // itemsize, size)]
        edges = [[source * row[-1] + edge for source in range(size) for edge in row[:-1]] + [size * row[-1]]]
    with rare_garbage_collection():
        ranks = [[schedule.rounds(rank, setting) for _ in edges] for rank in range(size)]
        return _Player(network, edges, ranks).run()


class _Player:
    """All ranks, each a generator that yields when it has to wait.

    The loops are written inline: a ring of 1,024 ranks has two million messages.
    """

    def __init__(self, network: Network, edges: list[list[int]], schedules: list[list[Iterator[Round]]]) -> None:
        size = len(schedules)
        self.network = network
        self.edges = edges
        self.lanes = len(edges)
        self.slow = [network.slow.get(rank, 1.0) for rank in range(size)]
        equal = not network.links and network.inside is None
        self.alpha_beta = (network.latency, 1.0 / network.bandwidth) if equal else None
        # By sender and lane, as source · lanes + lane: early arrivals, and receives that are still missing.
        self.early: list[dict[int, deque[float]]] = [{} for _ in range(size)]
        self.wanted: list[dict[int, int]] = [{} for _ in range(size)]
        self.latest = [0.0] * size  # arrival of the last receive of the round
        self.arrivals: dict[
            float, list[tuple[int, int, float]]
        ] = {}  # by time: (from and lane, to, seconds at the port)
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

    def _follow(self, rank: int, schedules: list[Iterator[Round]]) -> Iterator[None]:
        """One rank, round by round. Yields while receives are missing."""
        wanted, early, latest, lanes = self.wanted[rank], self.early[rank], self.latest, self.lanes
        gamma = self.network.combine * self.slow[rank]
        port = _Port(self, rank)
        now = 0.0
        active = []
        for number, schedule in enumerate(schedules):
            lane = _Lane(number, schedule, self.edges[number])
            now = port.post(lane, now)
            active.append(lane)
        while active:
            for lane in [lane for lane in active if lane.recvs is not None]:
                edges, combined = lane.edges, 0
                latest[rank] = now
                for peer, chunk, width, combine in lane.recvs or ():
                    nbytes = edges[chunk + width] - edges[chunk]
                    if nbytes:
                        if combine:
                            combined += nbytes
                        key = peer * lanes + lane.number
                        if early and early.get(key):
                            latest[rank] = max(latest[rank], early[key].popleft())
                        else:
                            wanted[key] = wanted.get(key, 0) + 1
                if wanted:
                    yield
                now = latest[rank]
                if combined:
                    if port.free > now:
                        for move in lane.recvs or ():
                            if move.combine:
                                now = _after_sends(lane.sending, move, now)
                    now += combined * gamma
                now = port.post(lane, now)
            active = [lane for lane in active if lane.recvs is not None]
        self.counts[rank] = (port.rounds, port.sent, port.fan_in, port.messages)
        self.end = max(self.end, now, port.free)

    def _link(self, source: int, to: int) -> tuple[float, float]:
        link = self.network.link(source, to)
        return link.latency, 1.0 / link.bandwidth


class _Sent(NamedTuple):
    """A message at the port: its chunks, and when it has left."""

    first: int
    after: int
    left: float
    peer: int
    large: bool


class _Lane:
    """One execution of the schedule by one rank."""

    def __init__(self, number: int, schedule: Iterator[Round], edges: list[int]) -> None:
        self.number = number
        self.schedule = schedule
        self.edges = edges
        self.recvs: tuple[Move, ...] | None = ()
        self.sending: list[_Sent] = []


class _Port:
    """The outgoing port of one rank."""

    def __init__(self, player: _Player, rank: int) -> None:
        self.player = player
        self.rank = rank
        self.free = 0.0
        self.rounds = self.sent = self.fan_in = self.messages = 0

    def post(self, lane: _Lane, now: float) -> float:
        """Start the lane's next round; `lane.recvs` None: there is none. Returns the time after it."""
        following = next(lane.schedule, None)
        if following is None:
            lane.recvs = None
            return now
        sends, lane.recvs = following
        player, rank, free, edges, sending = self.player, self.rank, self.free, lane.edges, lane.sending
        arrivals, times, alpha_beta, slow = player.arrivals, player.times, player.alpha_beta, player.slow
        per_message, own_slow = player.network.per_message, player.slow[rank]
        self.rounds += lane.number == 0
        if free > now:
            for move in lane.recvs:
                if not move.combine:
                    now = _after_sends(sending, move, now)
            now = _after_large_sends(sending, sends, now)
        else:
            sending.clear()  # all earlier messages have left
        for peer, chunk, width, _ in sends:
            nbytes = edges[chunk + width] - edges[chunk]
            if nbytes:
                alpha, beta = alpha_beta or player._link(rank, peer)
                start = now if now > free else free
                seconds = per_message + nbytes * beta
                free = start + seconds * own_slow
                sending.append(_Sent(chunk, chunk + width, free, peer, nbytes >= LARGE_SEND_BYTES))
                self.sent += nbytes
                self.messages += 1
                head = start + alpha
                entry = (rank * player.lanes + lane.number, peer, seconds * slow[peer])
                if head in arrivals:
                    arrivals[head].append(entry)
                else:
                    arrivals[head] = [entry]
                    heapq.heappush(times, head)
        self.free = free
        if len(lane.recvs) > self.fan_in:
            self.fan_in = len(lane.recvs)
        return now


def _step(resume: Callable[[], None]) -> None:
    with suppress(StopIteration):
        resume()


def _after_large_sends(sending: list[_Sent], sends: tuple[Move, ...], now: float) -> float:
    """The time when large sends to peers that are not the next ones have left."""
    for sent in sending if sends else ():
        if sent.large and sent.left > now and all(sent.peer != move.peer for move in sends):
            now = sent.left
    return now


def _after_sends(sending: list[_Sent], move: Move, now: float) -> float:
    """The time when the sends that a move would overwrite have left."""
    for first, after, left, _, _ in sending:
        if left > now and first < move.chunk + move.width and move.chunk < after:
            now = left
    return now
