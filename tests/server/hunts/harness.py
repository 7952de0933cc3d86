"""Journals and invariants for hunts over the parameter server; for the store itself, and for strategies on it.

Every client keeps a journal of its own: what it pushed under which tag, what was acknowledged, what each read returned.
An update is a one at a key that is its own, on each server; so what a read saw is a set of updates::

    shard of a server    │ worker 0: 0 1 2 …  │ worker 1: 0 1 2 …  │ …         a one: that step is in, once
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import syncline as sl
from syncline.errors import WorldError
from syncline.runtime import Event
from syncline.server import Server, network_of, protocol
from syncline.server.shard import ParameterShard
from syncline.server.space import SpaceLayout
from syncline.transports import Transport
from syncline.transports.faults import Fault
from syncline.transports.simulated import kill_rank
from syncline.world.simulation import ExtraProcess

ACKED, LATE = "acked", "late"


@dataclass(frozen=True)
class Tags:
    """Which key stands for a worker's step at a server."""

    workers: int
    steps: int
    servers: int
    piece: int = protocol.MAX_PIECE_ELEMENTS
    """Keys that a server reads at once: what lies in two pieces may be of two moments."""

    @property
    def shard(self) -> int:
        return self.workers * self.steps

    @property
    def numel(self) -> int:
        return self.servers * self.shard

    def keys(self, worker: int, clock: int, servers: Sequence[int] | None = None) -> Tensor:
        """The keys of one step, on these servers (all)."""
        chosen = range(self.servers) if servers is None else servers
        return torch.tensor([server * self.shard + worker * self.steps + clock for server in chosen])

    def one_hot(self, worker: int, clock: int) -> Tensor:
        """The same as a row of all keys."""
        row = torch.zeros(self.numel)
        row[self.keys(worker, clock)] = 1.0
        return row

    def has_gaps(self, server: int, worker: int, steps: Sequence[int]) -> bool:
        """Whether a step is in without an earlier one of the same worker, in the same piece."""
        edges, first = SpaceLayout(self.numel, self.servers, piece=self.piece).edges, server * self.shard
        places = [bisect_right(edges, first + worker * self.steps + clock) for clock in range(self.steps)]
        return any(places[later] == places[earlier] for later in steps for earlier in set(range(later)) - set(steps))

    def seen(self, values: Tensor, server: int) -> Tensor:
        """What one server's part of a read says: a row for each worker, a column for each of its steps."""
        return values[server * self.shard : (server + 1) * self.shard].view(self.workers, self.steps)


@dataclass
class Pushed:
    """One step that a client has sent."""

    clock: int
    fate: dict[int, str] = field(default_factory=dict)
    """For each server that has answered: was it taken, or late?"""


@dataclass
class Read:
    """What a read returned, and what it had to hold."""

    wanted: int
    own: list[int]
    """This client's steps that it had pushed when it asked."""
    sent: list[list[int]]
    """Steps that each worker had pushed when the answer was here: more cannot be in it."""
    values: Tensor


@dataclass
class Journal:
    """What one client has done and seen; written by the client alone."""

    worker: int
    pushed: list[Pushed] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    opened: bool = False
    ended: bool = False

    def clocks(self) -> list[int]:
        return [push.clock for push in self.pushed]

    def late_at(self, server: int) -> set[int]:
        return {push.clock for push in self.pushed if push.fate.get(server) == LATE}

    def acked_at(self, server: int) -> set[int]:
        return {push.clock for push in self.pushed if push.fate.get(server) == ACKED}


class Remembered(dict[int, ParameterShard]):
    """The spaces of a server; what it forgets is kept here, for the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[ParameterShard] = []

    def __setitem__(self, space_id: int, space: ParameterShard) -> None:
        self.all.append(space)
        super().__setitem__(space_id, space)


@dataclass(frozen=True)
class Replacement:
    """One round of a plan: servers are killed, and a new one takes the place of one of them."""

    kills: tuple[int, ...]
    """Numbers of servers. The new server of the first round has the number after the last of the first servers, …"""
    number: int
    """The number of the server whose place it takes."""
    start_after: float = 0.0
    killed_after: float | None = None
    """Virtual seconds after which the new server is killed. Then the next one takes the same place."""


@dataclass(frozen=True)
class ReplacementPlan:
    """Which servers are killed and replaced, one after the other. Enough replicas are left at all times."""

    rounds: tuple[Replacement, ...] = ()

    @staticmethod
    def draw(draw: random.Random, servers: int, replicas: int) -> ReplacementPlan:
        """One to three servers are replaced; the second may be the other server of the same shard."""
        holders, rounds = {each: each for each in range(servers)}, []
        pending: int | None = None
        for number in range(draw.randint(1, 3)):
            place = draw.choice(sorted(holders)) if pending is None else pending
            kills = [holders[place]] if pending is None else []
            if not number and replicas > 2 and draw.random() < 0.4:
                second = draw.choice([each for each in holders if each != place])
                kills.append(holders.pop(second))
            ends = draw.random() < 0.3
            holders[place], pending = servers + number, place if ends else None
            after = draw.random() * 0.1 if draw.random() < 0.5 else 0.0
            rounds.append(Replacement(tuple(kills), place, after, draw.random() * 0.05 if ends else None))
        return ReplacementPlan(tuple(rounds))


class Servers:
    """Dedicated servers of a simulation, `extra=servers.members`; their spaces can be looked at afterwards."""

    def __init__(
        self,
        workers: int,
        servers: int,
        replicas: int = 1,
        plan: ReplacementPlan | None = None,
        elastic: bool = False,
    ) -> None:
        """`elastic`: workers may join later."""
        self._workers, self._servers, self._replicas = workers, servers, replicas
        self._elastic = elastic
        self._plan = plan or ReplacementPlan()
        self.rounds = 0
        """Rounds of the plan that have ended: the new server has joined, or was killed."""
        self.shards: dict[int, Remembered] = {}
        """By server: its own shards."""
        self._held: dict[tuple[int, int], Remembered] = {}
        """By server, and by the server whose shards they are."""
        newcomers = [ExtraProcess(partial(self._serve_new, each), "new server") for each in self._plan.rounds]
        self.members: list[ExtraProcess | Callable[[Transport], None]] = [*[self._serve] * servers, *newcomers]
        self._transports: dict[int, Transport] = {}
        self._running: dict[int, Server] = {}
        self._silent: set[int] = set()
        """Servers that were frozen or cut off."""
        self._started: set[int] = set()
        self._start_events: dict[int, Event] = {}

    def _serve(self, transport: Transport, replaces: int | None = None) -> None:
        newcomers = len(self._plan.rounds)
        network = network_of(
            transport, self._workers, self._servers, replicas=self._replicas, newcomers=newcomers, replaces=replaces,
            elastic=self._elastic,
        )  # fmt: skip
        server, me = Server(network), network.me - self._workers
        self._transports[me] = transport
        self._running[me] = server
        handlers = {shard: chain.handler for shard, chain in server.chains.items()} or {me: server.handler}
        for shard, handler in handlers.items():
            handler.shards = self._held[me, shard] = Remembered()
        self.shards[me] = self._held[me, me if replaces is None else replaces]
        try:
            server.start().join()
        except WorldError as error:
            if me not in self._silent or "declared this server lost" not in str(error):
                raise

    def _serve_new(self, one: Replacement, transport: Transport) -> None:
        """Serve in the place of a lost server, as soon as the plan says so."""
        me, runtime = transport.rank - self._workers, transport.runtime
        event = self._start_events[me] = runtime.event()
        if me not in self._started:
            event.wait(why="the plan")
        runtime.sleep(one.start_after)
        runtime.spawn(self._end_round, one, me, transport, name="plan")
        self._serve(transport, one.number)

    def _end_round(self, one: Replacement, me: int, transport: Transport) -> None:
        """Begin the next round when the new server has joined, or kill it before."""
        if one.killed_after is None:
            while me not in self._running or not all(each.joined for each in self._running[me].chains.values()):
                transport.runtime.sleep(0.01)
        else:
            transport.runtime.sleep(one.killed_after)
        self.rounds += 1
        self.begin_round()
        if one.killed_after is not None:
            kill_rank(transport)

    def begin_round(self) -> None:
        """Kill the server of the next round, and let the new one start."""
        if self.rounds < len(self._plan.rounds):
            one = self._plan.rounds[self.rounds]
            for server in one.kills:
                self.kill_soon(server)
            newcomer = self._servers + self.rounds
            self._started.add(newcomer)
            if newcomer in self._start_events:
                self._start_events[newcomer].set()

    def kill_soon(self, server: int) -> None:
        """Kill a server, at a moment that the seed draws in chaos mode."""
        if server in self._transports:
            kill_rank(self._transports[server])

    def silence_soon(self, server: int, how: Callable[[Transport, float], None], seconds: float) -> None:
        """Freeze a server or cut it off, by `freeze_rank` or `cut_off_rank`. It may be declared lost."""
        if server in self._transports:
            self._silent.add(server)
            how(self._transports[server], seconds)

    def weights(self, killed: Sequence[int] = (), shards: int | None = None) -> Tensor:
        """What the servers that live hold of the first space.

        All replicas hold the same, unless a worker was killed: nobody waits until all have its last requests.
        """
        found, complete = [], not any(member < self._workers for member in killed)
        for shard in range(self._servers if shards is None else shards):
            holders = [each for each, server in self._running.items() if each + self._workers not in killed]
            living = [
                self._held[each, shard].all[-1]
                for each in holders
                if (each, shard) in self._held
                and (self._running[each].chains[shard].joined if self._running[each].chains else True)
            ]
            for replica in living[1:] if complete else ():
                assert torch.equal(replica.weights, living[0].weights), f"the replicas of shard {shard} differ"
                assert replica.clocks.of == living[0].clocks.of, f"the clocks of shard {shard} differ"
            found.append(living[0].weights)
        return torch.cat(found)


def steps_in(row: Tensor) -> list[int]:
    """The steps of one worker that are in, each exactly once."""
    found = row.nonzero().view(-1).tolist()
    assert bool(((row == 0) | (row == 1)).all()), f"an update counts more than once, or not wholly: {row.tolist()}"
    return found


def check_read(tags: Tags, read: Read, worker: int, killed: Sequence[int], *, prefix: bool = True) -> None:
    """A read is explained by a set of updates that were pushed, one's own among them, and is as fresh as it must be."""
    for server in range(tags.servers):
        rows = [steps_in(row) for row in tags.seen(read.values, server)]
        for other, steps in enumerate(rows):
            strange = sorted(set(steps) - set(read.sent[other]))
            assert not strange, f"server {server}: steps {strange} of worker {other} are in, and were not pushed"
            if not prefix:
                continue
            assert not tags.has_gaps(server, other, steps), f"server {server}: {steps} of worker {other}: gaps"
            fresh = set(range(max(0, read.wanted))) <= set(steps)
            assert fresh or other in killed, (
                f"server {server}: worker {worker} reads {steps} of worker {other}, and wanted {read.wanted} steps"
            )
        missing = sorted(set(read.own) - set(rows[worker]))
        assert not missing, f"server {server}: worker {worker} does not see its own steps {missing}: {rows[worker]}"


def check_growth(tags: Tags, journal: Journal) -> None:
    """What a client has seen once stays there."""
    for before, after in zip(journal.reads, journal.reads[1:], strict=False):
        lost = (before.values > after.values).nonzero().view(-1).tolist()
        assert not lost, f"worker {journal.worker} sees keys {lost} go back from one read to the next"


def check_rounds(tags: Tags, read: Read, killed: Sequence[int]) -> None:
    """Synchronous steps are all or nothing: at each server every worker that lives is at the same step."""
    for server in range(tags.servers):
        counts = {other: int(row.sum()) for other, row in enumerate(tags.seen(read.values, server))}
        alive = {count for other, count in counts.items() if other not in killed}
        assert len(alive) <= 1, f"server {server}: half a step is in: {counts}"
        assert all(counts[other] <= max(alive, default=tags.steps) for other in killed), f"server {server}: {counts}"


def check_final(tags: Tags, journals: Sequence[Journal], weights: Tensor) -> None:
    """At the end all that was acknowledged is in, once; nothing that came late is, and nothing that nobody pushed."""
    for server in range(tags.servers):
        for journal, row in zip(journals, tags.seen(weights, server), strict=True):
            steps = set(steps_in(row))
            lost = sorted(journal.acked_at(server) - steps)
            assert not lost, f"server {server} has lost steps {lost} of worker {journal.worker}, which it acknowledged"
            strange = sorted(steps - set(journal.clocks()))
            assert not strange, f"server {server} has steps {strange} of worker {journal.worker}, who pushed none such"
            late = sorted(steps & journal.late_at(server))
            assert not late, (
                f"server {server} has applied steps {late} of worker {journal.worker}, and called them late"
            )


def play(
    work: Callable[[sl.World], object],
    journals: Sequence[Journal],
    servers: Servers,
    *,
    faults: Sequence[Fault],
    seed: int,
    chaos: bool,
    timeout: float,
) -> tuple[sl.Simulation, bool]:
    """Simulate one case; and whether every worker has come as far as its space. Who was not killed comes to its end."""
    run = sl.simulate(
        work, len(journals), faults=faults, seed=seed, chaos=chaos, timeout=timeout, extra=servers.members,
        return_exceptions=True, network=sl.Network(latency=1e-4, jitter=0.5),
    )  # fmt: skip
    opened = all(journal.opened for journal in journals)
    for worker, result in enumerate(run.results):
        if isinstance(result, BaseException) and (opened or not run.killed):
            raise AssertionError(f"worker {worker} (killed: {run.killed}): {result!r}") from result
    assert not opened or all(journal.ended or journal.worker in run.killed for journal in journals)
    return run, opened
