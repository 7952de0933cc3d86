"""A strategy on servers under a drawn case: who takes part, how far a step is cut, what goes wrong.

Each worker's step is a one at keys of its own, as in the hunts over the store. Each worker's tags at a server are a
parameter group, so that a step goes in several parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.server import Future, open_space, protocol, server_network
from syncline.strategies.parameter_server import ParameterServerRun
from syncline.testing.hunting import kill_soon
from syncline.transports.faults import Delay, Drop, Duplicate, Fault, Slow
from tests.server.hunts import harness
from tests.server.hunts.harness import ACKED, LATE, Journal, Pushed, Read, Servers, Tags
from tests.server.hunts.store_cases import PATIENCE, Outcome
from tests.strategies.cases import backward

STRATEGIES = (
    "bsp",
    "ssp(slack=3)",
    "downpour",
    "master",
    "master(fraction=0.5)",
    "master(masters=2)",
    "master(sync=False)",
    "master(sync=False, masters=2)",
)


@dataclass(frozen=True)
class Case:
    """One draw."""

    strategy: str
    spec: str
    seed: int
    tags: Tags
    servers: int
    chaos: bool
    faults: tuple[Fault, ...]
    doomed: int | None
    """The worker that is killed."""
    doom: int
    """In which of its steps."""
    push: int = 1
    fetch: int = 1
    replicas: int = 1
    doomed_server: int = -1

    @staticmethod
    def draw_replicated(strategy: str, seed: int) -> Case:
        """A case in which each shard is on two servers, of which one is killed."""
        case, draw = Case.draw(strategy, seed), random.Random(f"replicas/{strategy}/{seed}")
        servers = draw.randint(2, 3)
        return replace(
            case,
            servers=servers,
            tags=replace(case.tags, servers=1 if "master" in strategy else servers),
            replicas=2,
            doomed_server=draw.randrange(servers),
        )

    @staticmethod
    def draw(strategy: str, seed: int) -> Case:
        draw = random.Random(f"{strategy}/{seed}")
        workers, steps = draw.randint(2, 4), draw.randint(3, 6)
        tree, master = "masters" in strategy, strategy.startswith("master")
        servers = 3 if tree else 1 if master else draw.randint(1, 3)
        faults: list[Fault] = []
        if draw.random() < 0.5:
            faults.append(Slow(draw.randrange(workers), draw.choice((3.0, 10.0)), start=draw.random() * 0.01))
        if draw.random() < 0.5:
            faults.append(Delay(draw.random() * 0.01, probability=0.3))
        if draw.random() < 0.6:
            faults.append(Duplicate(0.3))
        if draw.random() < 0.5:
            faults.append(Drop(0.15))
        push, fetch = (draw.randint(1, 3), draw.randint(1, 3)) if strategy == "downpour" else (1, 1)
        prefetch = draw.random() < 0.5
        own = f"(push={push}, fetch={fetch}, rule='sgd(lr=1.0)', prefetch={prefetch})"
        return Case(
            strategy=strategy,
            spec=strategy + own if strategy == "downpour" else strategy,
            seed=seed,
            tags=Tags(workers, steps, 1 if master else servers),
            servers=servers,
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
            doomed=draw.randrange(workers) if draw.random() < 0.4 else None,
            doom=draw.randrange(steps),
            push=push,
            fetch=fetch,
        )

    @property
    def quorum(self) -> bool:
        return "fraction" in self.strategy

    def wanted(self, clock: int) -> int:
        """Steps of everybody that a read after so many own ones must have in it."""
        if self.strategy in ("bsp", "master", "master(masters=2)"):
            return clock
        return max(0, clock - 3) if self.strategy.startswith("ssp") else -1


class Marks(nn.Module):
    """A parameter for each worker at each server; they lie as `Tags` says."""

    def __init__(self, tags: Tags) -> None:
        super().__init__()
        rows = [nn.Parameter(torch.zeros(tags.steps)) for _ in range(tags.servers * tags.workers)]
        self.rows = nn.ParameterList(rows)
        self._workers = tags.workers

    def forward(self, worker: int, step: int) -> Tensor:
        """A step down this loss adds one to the step's own weights."""
        mine = list(self.rows)[worker :: self._workers]
        return -torch.stack([row[step] for row in mine]).sum()

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [row]} for row in self.rows]


class Worker:
    """One worker, which writes its journal as it goes."""

    def __init__(self, case: Case, world: sl.World, journals: list[Journal], servers: Servers) -> None:
        self.case, self.world, self.journals, self.servers = case, world, journals, servers
        self.journal = journals[world.rank]
        self.draw = random.Random(f"{case.seed}/{world.rank}")

    def run(self) -> None:
        case = self.case
        server_network(self.world, case.replicas)
        model = Marks(case.tags)
        optimizer = torch.optim.SGD(model.groups(), lr=1.0)
        run = sl.distribute(model, optimizer, strategy=case.spec, algorithm="ring")
        assert isinstance(run, ParameterServerRun)
        self.journal.opened = True
        taken = 0
        while (taken if case.strategy == "downpour" else run.client.clock) < case.tags.steps:
            step = taken if case.strategy == "downpour" else run.client.clock
            if case.doomed == self.world.rank and step >= case.doom:
                kill_soon(self.world)
            if (self.world.rank, taken) == (0, case.doom):
                self.servers.kill_soon(case.doomed_server)
            self.world.compute(self.draw.random() * 1e-3)
            self.journal.pushed.append(Pushed(step))
            optimizer.zero_grad()
            backward(model(self.world.rank, step))
            optimizer.step()
            taken += 1
            self.note_replica(run, taken) if case.strategy == "downpour" else self.note(run, step)
        board = run.control_channel()
        board.finish()
        if case.strategy == "downpour":
            self.acknowledge(taken)
        run.close()
        self.journal.ended = True

    def note(self, run: ParameterServerRun, step: int) -> None:
        """All of the step is answered."""
        pushed = self.journal.pushed[-1]
        for future in heard(run):
            for flight in future.requests:
                late = flight.reply is not None and flight.reply.status == protocol.LATE
                if pushed.fate.get(flight.connection.index) != LATE:
                    pushed.fate[flight.connection.index] = LATE if late else ACKED
        own = [push.clock for push in self.journal.pushed if LATE not in push.fate.values()]
        self.read(run, self.case.wanted(step + 1) if LATE not in pushed.fate.values() else -1, own)

    def note_replica(self, run: ParameterServerRun, taken: int) -> None:
        """A push is in when the next one goes; a fetch was asked for after this step or the one before."""
        case = self.case
        self.acknowledge((taken // case.push - 1) * case.push)
        if taken % case.fetch == 0:
            self.read(run, -1, list(range((taken - 1) // case.push * case.push)))

    def acknowledge(self, steps: int) -> None:
        for pushed in self.journal.pushed[: max(0, steps)]:
            pushed.fate = dict.fromkeys(range(self.case.tags.servers), ACKED)

    def read(self, run: ParameterServerRun, wanted: int, own: list[int]) -> None:
        sent = [journal.clocks() for journal in self.journals]
        self.journal.reads.append(Read(wanted, own, sent, run.weights.clone()))


def heard(run: ParameterServerRun) -> list[Future]:
    """What the run's latest step was answered."""
    found: list[Future] = run.__dict__["heard"]
    return found


@contextmanager
def whole_updates() -> Iterator[None]:
    """Updates count as they are, not as part of a mean, and what a step asked for is kept to be looked at."""
    talk: Callable[[ParameterServerRun], list[Future]] = ParameterServerRun.push_and_pull

    def listen(run: ParameterServerRun) -> list[Future]:
        run.__dict__["heard"] = found = talk(run)
        return found

    def without_mean(*args: Any, **options: Any) -> Any:
        return open_space(*args, **{**options, "mean": False})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ParameterServerRun, "push_and_pull", listen))
        stack.enter_context(mock.patch.object(ParameterServerRun, "scale", return_value=1.0))
        stack.enter_context(mock.patch("syncline.strategies.parameter_server.open_space", without_mean))
        stack.enter_context(mock.patch("syncline.strategies.master.open_space", without_mean))
        stack.enter_context(mock.patch("syncline.server.opening.open_space", without_mean))
        yield


def check_strategy(strategy: str, seed: int) -> Outcome:
    """Run one case and check its invariants."""
    return check_case(Case.draw(strategy, seed))


def check_replicated_strategy(strategy: str, seed: int) -> Outcome:
    """The same on replicated servers, of which one is killed."""
    return check_case(Case.draw_replicated(strategy, seed))


def check_case(case: Case) -> Outcome:
    """Run a case and check its invariants."""
    tags, strategy, seed = case.tags, case.strategy, case.seed
    journals = [Journal(worker) for worker in range(tags.workers)]
    servers = Servers(tags.workers, case.servers, case.replicas)
    with whole_updates():
        run, opened = harness.play(
            lambda world: Worker(case, world, journals, servers).run(), journals, servers, faults=case.faults,
            seed=seed, chaos=case.chaos, timeout=PATIENCE,
        )  # fmt: skip
    lost = [each for each in run.killed if each < tags.workers]
    for journal in journals:
        for read in journal.reads:
            harness.check_read(tags, read, journal.worker, lost, prefix=not case.quorum)
            if strategy in ("bsp", "master", "master(masters=2)"):
                harness.check_rounds(tags, read, lost)
        harness.check_growth(tags, journal)
    if opened:
        harness.check_final(tags, journals, servers.weights(run.killed, tags.servers))
    return Outcome(opened, run.killed, sum(len(journal.reads) for journal in journals))
