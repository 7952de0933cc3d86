"""Playing a schedule on a network without running it: the simulator's arithmetic, no tasks, no tensors.

It follows the executor: a rank posts a round, waits for its receives, waits for sends of what it will
overwrite, combines, goes on. Messages go through the ports in the order in which their first bytes arrive.
Equal networks give many equal times, so arrivals are kept by time: one heap entry serves all that happen at
once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
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
    >>> cost = play(build("allreduce", "ring"), 1024, 1 << 20, Network(latency=1e-6, bandwidth=1e9))
    >>> cost.rounds, cost.messages
    (2046, 2095104)
    """
    setting = schedule.setting(size, root, hosts)
    edges = [edge * itemsize for edge in bounds(nbytes // itemsize, setting.chunks)]
    if schedule.operation == "alltoall":  # chunk i·p + j: `nbytes` is what each rank holds
        row = [edge * itemsize for edge in bounds(nbytes // itemsize, size)]
        edges = [source * row[-1] + edge for source in range(size) for edge in row[:-1]] + [size * row[-1]]
    with calm_collector():
        return _Player(network, edges, [schedule.rounds(rank, setting) for rank in range(size)]).run()


class _Player:
    """All ranks at once. Its inner loop is written out: a ring of 1,024 ranks has two million messages."""

    def __init__(self, network: Network, edges: list[int], schedules: list[Iterator[Round]]) -> None:
        size = len(schedules)
        self.network = network
        self.edges = edges
        self.schedules = schedules
        self.slow = [network.slow.get(rank, 1.0) for rank in range(size)]
        equal = not network.links and network.inside is None
        self.alpha_beta = (network.latency, 1.0 / network.bandwidth) if equal else None
        self.out_free = [0.0] * size
        self.missing = [0] * size  # receives of the round under way that have not come
        self.latest = [0.0] * size  # when the last of them came
        self.recvs: list[tuple[Move, ...]] = [()] * size
        self.sending: list[list[tuple[int, int, float]]] = [[] for _ in range(size)]
        self.early: list[dict[int, deque[float]]] = [{} for _ in range(size)]  # came before its round, by source
        self.wanted: list[dict[int, int]] = [{} for _ in range(size)]  # still to come this round, by source
        self.arrivals: dict[float, list[tuple[int, int, float]]] = {}  # by time: (from, to, seconds at the port)
        self.times: list[float] = []
        self.sent = [0] * size
        self.rounds = [0] * size
        self.fan_in = 0
        self.messages = 0
        self.end = 0.0

    def run(self) -> Cost:
        for rank in range(len(self.schedules)):
            self._post(rank, 0.0)
        arrivals, times, in_free = self.arrivals, self.times, [0.0] * len(self.schedules)
        missing, latest, all_wanted, post, merge = self.missing, self.latest, self.wanted, self._post, self._merge
        while times:
            head = heapq.heappop(times)
            for source, to, seconds in arrivals.pop(head):
                free = in_free[to]
                done = in_free[to] = (head if head > free else free) + seconds
                wanted = all_wanted[to]
                if source not in wanted:
                    self.early[to].setdefault(source, deque()).append(done)
                    continue
                if wanted[source] == 1:
                    del wanted[source]
                else:
                    wanted[source] -= 1
                if done > latest[to]:
                    latest[to] = done
                missing[to] -= 1
                if not missing[to]:
                    post(to, merge(to))
        waiting = [rank for rank, count in enumerate(missing) if count]
        assert not waiting, f"the schedule leaves ranks {waiting} waiting"
        return Cost(self.end, max(self.rounds), max(self.sent), self.fan_in, self.messages)

    def _merge(self, rank: int) -> float:
        """When the round's receives are combined and the next round can begin."""
        now = self.latest[rank]
        edges, combined = self.edges, 0
        for move in self.recvs[rank]:
            _, chunk, width, combine = move
            if combine:
                if self.out_free[rank] > now:
                    now = self._sent_by(rank, move, now)
                combined += edges[chunk + width] - edges[chunk]
        return now + combined * self.network.combine * self.slow[rank] if combined else now

    def _sent_by(self, rank: int, move: Move, now: float) -> float:
        """When the sends that a move would overwrite have left."""
        for first, after, left in self.sending[rank]:
            if left > now and first < move.chunk + move.width and move.chunk < after:
                now = left
        return now

    def _post(self, rank: int, now: float) -> None:
        """Start rounds until one has something to wait for."""
        edges, early, slow, arrivals = self.edges, self.early[rank], self.slow, self.arrivals
        sending, free, sent, wanted = self.sending[rank], self.out_free[rank], 0, self.wanted[rank]
        for sends, recvs in self.schedules[rank]:
            self.rounds[rank] += 1
            if free > now:
                for move in recvs:
                    if not move.combine:
                        now = self._sent_by(rank, move, now)
            else:
                sending.clear()  # all earlier ones have left
            for peer, chunk, width, _ in sends:
                nbytes = edges[chunk + width] - edges[chunk]
                if nbytes:
                    alpha, beta = self.alpha_beta or self._link(rank, peer)
                    start = now if now > free else free
                    seconds = nbytes * beta
                    free = start + seconds * slow[rank]
                    sending.append((chunk, chunk + width, free))
                    sent += nbytes
                    self.messages += 1
                    head = start + alpha
                    if head in arrivals:
                        arrivals[head].append((rank, peer, seconds * slow[peer]))
                    else:
                        arrivals[head] = [(rank, peer, seconds * slow[peer])]
                        heapq.heappush(self.times, head)
            self.out_free[rank] = free
            missing, latest = 0, now
            for peer, chunk, width, _ in recvs:
                if edges[chunk + width] > edges[chunk]:
                    if early.get(peer):
                        latest = max(latest, early[peer].popleft())
                    else:
                        wanted[peer] = wanted.get(peer, 0) + 1
                        missing += 1
            if len(recvs) > self.fan_in:
                self.fan_in = len(recvs)
            self.missing[rank], self.latest[rank], self.recvs[rank] = missing, latest, recvs
            if missing:
                self.sent[rank] += sent
                return
            now = self._merge(rank)
        self.sent[rank] += sent
        self.end = max(self.end, now, free)

    def _link(self, source: int, to: int) -> tuple[float, float]:
        link = self.network.link(source, to)
        return link.latency, 1.0 / link.bandwidth
