"""One client of a replicated space under a drawn case: whatever servers are killed, it reads the same bits.

The client runs twice: on replicated servers that are killed, and on servers without replicas that live. It sends the
same requests both times, in the same order. So every reply must be the same: weights, the optimizer's state, values
that a codec has changed, and what a handler keeps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.server import Client, Future, handler, open_space, protocol, replication
from syncline.server.filters import build_filter
from syncline.transports.faults import Drop, Duplicate, Fault
from tests.server.hunts.harness import ReplacementPlan, Servers

RULES = ("add", "adam(0.1)", "momentum(0.1)", "torch('Rprop')", "handler('counts_pushes')")


@handler("counts_pushes", state={"pushes": 0.0})
def counts_pushes(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
    """Add the values, more often with every push: the result depends on the state."""
    state["pushes"] += 1
    weights += values * state["pushes"]


@dataclass(frozen=True)
class ReplicaCase:
    """One draw."""

    seed: int
    numel: int
    rule: str
    codec: str | None
    filters: str | None
    servers: int
    replicas: int
    chaos: bool
    faults: tuple[Fault, ...]
    dooms: tuple[tuple[int, int], ...]
    """Servers that are killed, each with the request of the client before which it happens."""
    waits: bool
    """Whether the client waits for each reply: a request that is lost may arrive after a later one."""
    requests: int = 12
    plan: ReplacementPlan = field(default_factory=ReplacementPlan)

    @staticmethod
    def draw(seed: int) -> ReplicaCase:
        draw = random.Random(f"replica/{seed}")
        servers = draw.randint(2, 4)
        replicas = draw.randint(2, min(3, servers))
        rule = draw.choice(RULES)
        large = draw.random() < 0.4
        elementwise = rule.startswith(("add", "adam", "momentum"))
        faults: list[Fault] = []
        if draw.random() < 0.4:
            faults = [Drop(0.15), Duplicate(0.2)]
        killed = draw.sample(range(servers), draw.randint(1, replicas - 1))
        return ReplicaCase(
            seed=seed,
            numel=servers * (protocol.MAX_INLINE_BYTES // 4 + 100) if large else 24,
            rule=rule,
            codec=draw.choice((None, "quantize(8)", "topk(0.25)")) if elementwise else None,
            filters=draw.choice((None, "cache", "significant(0.5)")) if rule == "add" else None,
            servers=servers,
            replicas=replicas,
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
            dooms=tuple((server, draw.randrange(12)) for server in killed),
            waits=bool(faults),
        )


class OnlyClient:
    """The client, and what it has read."""

    def __init__(self, case: ReplicaCase, servers: Servers) -> None:
        self.case, self.servers = case, servers
        self.draw = random.Random(case.seed)
        self.values = torch.Generator().manual_seed(case.seed)
        self.found: list[Any] = []
        self.futures: list[Future] = []

    def run(self, world: sl.World) -> list[Any]:
        case = self.case
        client = open_space(
            world, "same", case.numel, rules=(case.rule,), codec=case.codec, replicas=case.replicas, piece=20_000,
            filters=None if case.filters is None else build_filter(case.filters),
            retry_s=world.transport.retry_after_s,
        )  # fmt: skip
        for number in range(case.requests):
            for server, before in case.dooms:
                if before == number:
                    self.servers.kill_soon(server)
            if number == 2:
                self.servers.begin_round()
            if number in (case.requests // 2, case.requests - 1):
                self.await_round(world, 1 if number == case.requests // 2 else len(case.plan.rounds))
            self.ask(client)
            if case.waits or self.draw.random() < 0.5:
                self.finish()
        self.finish()
        names = client.optimizer_state()
        self.found += [names, *(client.read_state(1 + slot) for slot in range(len(names))), client.get()]
        client.close()
        return self.found

    def await_round(self, world: sl.World, rounds: int) -> None:
        """Wait until so many servers were replaced, with reads under way."""
        for _ in range(3000):
            if self.servers.rounds >= min(rounds, len(self.case.plan.rounds)):
                return
            world.compute(0.02)
        raise AssertionError(f"{self.servers.rounds} rounds of {self.case.plan} have ended")

    def ask(self, client: Client) -> None:
        draw, numel = self.draw, self.case.numel
        values = torch.randn(numel, generator=self.values)
        sparse = self.case.rule != "torch('Rprop')"
        way = draw.choice(("push", "both", "pull", "keys", "read keys", "put"))
        if way == "push":
            self.futures.append(client.push(None, values, tick=draw.random() < 0.5))
        elif way == "both":
            encoded = self.case.codec is not None and draw.random() < 0.5
            self.futures.append(client.push_pull(None, values, encoded=encoded))
        elif way == "pull":
            self.futures.append(client.pull(encoded=self.case.codec is not None and draw.random() < 0.5))
        elif way in ("keys", "read keys") and sparse:
            keys = torch.tensor(sorted(random.Random(draw.randrange(2)).sample(range(numel), numel // 3)))
            future = client.pull(keys) if way == "read keys" else client.push(keys, values[: keys.numel()])
            self.futures.append(future)
        else:
            self.finish()
            client.put((0, 5), values[:5])

    def finish(self) -> None:
        self.found += [future.wait() for future in self.futures]
        self.futures.clear()


def play(case: ReplicaCase) -> tuple[list[Any], tuple[int, ...]]:
    servers = Servers(1, case.servers, case.replicas, case.plan)
    run = sl.simulate(
        OnlyClient(case, servers).run, 1, faults=case.faults, seed=case.seed, chaos=case.chaos, extra=servers.members,
        network=sl.Network(latency=1e-4, jitter=0.5),
        timeout=2000.0 if case.plan.rounds else 20.0,  # in chaos mode a new server's questions take much virtual time
    )  # fmt: skip
    servers.weights(run.killed)
    return run.results[0], run.killed


def check_same_replies(seed: int) -> tuple[int, ...]:
    """Run a case and compare the replies; return who was killed."""
    return _compare(ReplicaCase.draw(seed))


def check_replaced(seed: int) -> tuple[int, ...]:
    """The same with servers that are replaced, and killed after the new ones have joined."""
    case = ReplicaCase.draw(seed)
    plan = ReplacementPlan.draw(random.Random(f"plan/{seed}"), case.servers, case.replicas)
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr(replication, "SNAPSHOT_PIECE_BYTES", 1000 if case.numel < 100 else 20_000)
        if seed % 3 == 0:
            patch.setattr(replication, "MAX_BACKLOG_BYTES", 100)
        return _compare(replace(case, dooms=(), plan=plan))


def _compare(case: ReplicaCase) -> tuple[int, ...]:
    undisturbed = replace(case, replicas=1, dooms=(), faults=(), chaos=False, plan=ReplacementPlan())
    expected, _ = play(undisturbed)
    found, killed = play(case)
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"reply {place} of {len(expected)} differs: {one} instead of {other}"
    return killed
