"""The store under a drawn case: who takes part, how values travel, what goes wrong. The seed draws all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.server import Client, Future, open_space, protocol, replication
from syncline.server.filters import build_filter
from syncline.testing.hunting import kill_soon
from syncline.transports.faults import Delay, Drop, Duplicate, Fault, Slow
from tests.server.hunts import harness
from tests.server.hunts.harness import ACKED, LATE, Journal, Pushed, Read, ReplacementPlan, Servers, Tags

SLACK = {"sequential": 0, "quorum": 0, "ssp": 2, "eventual": None}
PATIENCE = 20.0
"""Virtual seconds: who gives up does so because something is broken."""


@dataclass(frozen=True)
class Case:
    """One draw."""

    consistency: str
    seed: int
    tags: Tags
    chaos: bool
    faults: tuple[Fault, ...]
    doomed: int | None
    """The worker that is killed."""
    doom: int
    """In which of its steps, and whether its push is in by then."""
    pushed: bool
    retry: float | None
    caches: bool
    replicas: int = 1
    dooms: tuple[tuple[int, int, int], ...] = ()
    """Servers that are killed, each in which step of which worker."""
    plan: ReplacementPlan = field(default_factory=ReplacementPlan)
    """Servers that are killed and replaced. The first round begins in worker 0's second step."""

    @staticmethod
    def draw_replaced(consistency: str, seed: int) -> Case:
        """A case in which servers are killed, replaced, and killed again."""
        case = Case.draw_replicated(consistency, seed)
        draw = random.Random(f"replaced/{consistency}/{seed}")
        plan = ReplacementPlan.draw(draw, case.tags.servers, case.replicas)
        return replace(case, dooms=(), plan=plan, doomed=case.doomed or None)  # worker 0 follows the plan

    @staticmethod
    def draw_replicated(consistency: str, seed: int) -> Case:
        """A case in which each shard has replicas, of which one survives."""
        case, draw = Case.draw(consistency, seed), random.Random(f"replicas/{consistency}/{seed}")
        servers = draw.randint(2, 4)
        replicas = draw.randint(2, min(3, servers))
        killed = draw.sample(range(servers), draw.randint(1, replicas - 1))
        dooms = [(each, draw.randrange(case.tags.steps), draw.randrange(case.tags.workers)) for each in killed]
        return replace(case, tags=replace(case.tags, servers=servers), replicas=replicas, dooms=tuple(dooms))

    @staticmethod
    def draw(consistency: str, seed: int) -> Case:
        draw = random.Random(f"{consistency}/{seed}")
        workers, servers, steps = draw.randint(2, 4), draw.randint(1, 3), draw.randint(3, 6)
        faults: list[Fault] = []
        if draw.random() < 0.5:
            faults.append(Slow(draw.randrange(workers), draw.choice((3.0, 10.0)), start=draw.random() * 0.01))
        if draw.random() < 0.5:
            faults.append(Delay(draw.random() * 0.01, probability=0.3))
        if draw.random() < 0.6:
            faults.append(Duplicate(0.3))
        drops = draw.random() < 0.5
        if drops:
            faults.append(Drop(0.15))
        return Case(
            consistency=consistency,
            seed=seed,
            tags=Tags(workers, steps, servers, draw.choice((3, 7, protocol.MAX_PIECE_ELEMENTS))),
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
            doomed=draw.randrange(workers) if draw.random() < 0.4 else None,
            doom=draw.randrange(steps),
            pushed=draw.random() < 0.5,
            retry=0.05 if drops else None,
            caches=draw.random() < 0.4,
        )

    @property
    def synchronous(self) -> bool:
        return self.consistency in ("sequential", "quorum")

    @property
    def quorum(self) -> float:
        return 0.5 if self.consistency == "quorum" else 1.0

    def wanted(self, clock: int) -> int:
        """What a read after so many own steps waits for."""
        slack = SLACK[self.consistency]
        return -1 if slack is None else max(0, clock - slack)


class Worker:
    """One client, which writes its journal as it goes."""

    def __init__(self, case: Case, world: sl.World, journals: list[Journal], servers: Servers) -> None:
        self.case, self.world, self.journals, self.servers = case, world, journals, servers
        self.journal = journals[world.rank]
        self.draw = random.Random(f"{case.seed}/{world.rank}")
        self.reading: list[tuple[Future, int, list[int]]] = []

    def run(self) -> None:
        case, tags = self.case, self.case.tags
        client = open_space(
            self.world, "hunt", tags.numel, synchronous=case.synchronous, quorum=case.quorum, piece=tags.piece,
            retry_s=case.retry, filters=build_filter("cache") if case.caches else None, replicas=case.replicas,
        )  # fmt: skip
        self.journal.opened = True
        while client.clock < tags.steps:
            if not case.pushed:
                self.meet_doom(client.clock)
            self.world.compute(self.draw.random() * 1e-3)
            self.step(client)
        client.finish_training()
        for found in self.reading:
            self.note(*found)
        client.close()
        self.journal.ended = True

    def meet_doom(self, clock: int) -> None:
        if self.case.doomed == self.world.rank and clock >= self.case.doom:
            kill_soon(self.world)

    def step(self, client: Client) -> None:
        """Push one step in one of several ways, and read in one of several ways."""
        clock, me, tags = client.clock, self.world.rank, self.case.tags
        for server, step, worker in self.case.dooms:
            if (step, worker) == (clock, me):
                self.servers.kill_soon(server)
        if me == 0:
            self.follow_plan(clock)
        pushed = Pushed(clock)
        self.journal.pushed.append(pushed)
        way = self.draw.choice(("dense", "keys", "parts", "both"))
        if way == "both":
            out = client.push_pull(None, tags.one_hot(me, clock), tick=True, min_clock=self.case.wanted(clock + 1))
            self.acknowledge(pushed, out)
            self.note(out, self.case.wanted(clock + 1), self.own())
            return
        future = self.push(client, way, clock)
        lazy = self.draw.random() < 0.4 and self.case.consistency != "quorum"
        if not lazy:
            self.acknowledge(pushed, future)
        if self.case.pushed:
            self.meet_doom(clock)
        wanted = self.case.wanted(client.clock)
        asked = client.pull(min_clock=wanted), wanted, self.own()
        if lazy:
            self.acknowledge(pushed, future)
        if self.draw.random() < 0.3 and self.case.consistency == "eventual":
            self.reading.append(asked)  # several reads under way
        else:
            self.note(*asked)

    def follow_plan(self, clock: int) -> None:
        """Begin the first round of the plan in the second step, and wait for all rounds before the last step."""
        rounds = len(self.case.plan.rounds)
        if clock == 1:
            self.servers.begin_round()
        for _ in range(3000 if clock == self.case.tags.steps - 1 else 0):
            if self.servers.rounds >= rounds:
                break
            self.world.compute(0.02)

    def push(self, client: Client, way: str, clock: int) -> Future:
        me, tags = self.world.rank, self.case.tags
        if way == "dense":
            return client.push(None, tags.one_hot(me, clock), tick=True)
        if way == "keys" or tags.servers == 1:
            keys = tags.keys(me, clock)
            return client.push(keys, torch.ones(keys.numel()), tick=True)
        first, rest = tags.keys(me, clock, range(1)), tags.keys(me, clock, range(1, tags.servers))
        return client.push(first, torch.ones(1)).join(client.push(rest, torch.ones(rest.numel()), tick=True))

    def acknowledge(self, pushed: Pushed, future: Future) -> None:
        future.wait()
        for request in future.requests:
            late = request.reply is not None and request.reply.status == protocol.LATE
            if pushed.fate.get(request.connection.index) != LATE:
                pushed.fate[request.connection.index] = LATE if late else ACKED

    def own(self) -> list[int]:
        """Steps that a read of now must see. A late one is not in."""
        return [push.clock for push in self.journal.pushed if LATE not in push.fate.values()]

    def note(self, future: Future, wanted: int, own: list[int]) -> None:
        values = future.wait()
        assert isinstance(values, Tensor)
        late = {push.clock for push in self.journal.pushed if LATE in push.fate.values()}
        own = [clock for clock in own if clock not in late]
        sent = [journal.clocks() for journal in self.journals]
        self.journal.reads.append(Read(wanted, own, sent, values.clone()))


@dataclass
class Outcome:
    """What a case came to."""

    opened: bool
    """Whether all workers had the space: a kill before that ends the others as well, by their barrier."""
    killed: tuple[int, ...]
    reads: int


def check_eventful(outcomes: Sequence[Outcome]) -> None:
    """The hunt was about something: workers were killed in the middle of it, and there was much to read."""
    assert sum(bool(outcome.killed) and outcome.opened for outcome in outcomes) >= len(outcomes) // 10
    assert sum(outcome.reads for outcome in outcomes) >= 4 * len(outcomes)


def check_store(consistency: str, seed: int) -> Outcome:
    """Run one case and check its invariants."""
    return check_case(Case.draw(consistency, seed))


def check_replicated_store(consistency: str, seed: int) -> Outcome:
    """The same with replicas, and servers that are killed."""
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:  # most values are large then, and slots are soon used again
            for name, limit in (("MAX_INLINE_BYTES", 40), ("REPLY_SLOTS", 3), ("MAX_INFLIGHT_REQUESTS", 3)):
                patch.setattr(protocol, name, limit)
        return check_case(Case.draw_replicated(consistency, seed))


def check_replaced_store(consistency: str, seed: int) -> Outcome:
    """The same with servers that are replaced, and killed after the new ones have joined."""
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            for name, limit in (("MAX_INLINE_BYTES", 40), ("REPLY_SLOTS", 3), ("MAX_INFLIGHT_REQUESTS", 3)):
                patch.setattr(protocol, name, limit)
            patch.setattr(replication, "SNAPSHOT_PIECE_BYTES", 1000)
        if seed % 3 == 0:
            patch.setattr(replication, "MAX_BACKLOG_BYTES", 100)
        return check_case(Case.draw_replaced(consistency, seed))


def check_case(case: Case) -> Outcome:
    """Run a case and check its invariants."""
    tags, consistency, seed = case.tags, case.consistency, case.seed
    journals = [Journal(worker) for worker in range(tags.workers)]
    servers = Servers(tags.workers, tags.servers, case.replicas, case.plan)
    run, opened = harness.play(
        lambda world: Worker(case, world, journals, servers).run(), journals, servers, faults=case.faults, seed=seed,
        chaos=case.chaos, timeout=100 * PATIENCE if case.plan.rounds else PATIENCE,
    )  # fmt: skip
    ordered, lost = consistency != "quorum", [each for each in run.killed if each < tags.workers]
    for journal in journals:
        for read in journal.reads:
            harness.check_read(tags, read, journal.worker, lost, prefix=ordered)
            if consistency == "sequential":
                harness.check_rounds(tags, read, lost)
        if consistency != "eventual":
            harness.check_growth(tags, journal)
    if opened:
        harness.check_final(tags, journals, servers.weights(run.killed))
    return Outcome(opened, run.killed, sum(len(journal.reads) for journal in journals))
