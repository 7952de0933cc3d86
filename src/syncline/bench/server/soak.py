"""A soak: random requests for minutes, each answer checked, and an eye on the memory (`syncline bench server --soak`).

Every worker keeps its own account of what it pushed (`accounts.py`). From time to time all meet, flush, and compare
every key with the sum of their accounts; the memory of all processes is read at the same moments.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.bench.server.accounts import Account
from syncline.bench.server.end import Orders, attend, resident
from syncline.bench.server.raw import open_raw
from syncline.server.client import Client, Future
from syncline.server.filters import build_filter
from syncline.server.network import server_network
from syncline.server.opening import open_space
from syncline.world import World, allgather, allreduce, broadcast, init

__all__ = ["SPACES", "Patient", "SoakPlan", "checkpoint", "describe", "soak"]

UNDER_WAY = 6
LISTS = 24
"""Lists of keys that are used again and again, where they are cached."""
EXACT = float(1 << 22)
"""Where a key has grown so far, all begin at 0 again: float32 has whole numbers up to four times that."""
KINDS = ("push", "pull", "push_pull", "add", "keys compared")
SPACES: dict[str, dict[str, Any]] = {
    "plain": {"numel": 300_000, "piece": 1 << 14},
    "small": {"numel": 5_000},
    "cast": {"numel": 60_000, "codec": "cast('fp16')", "piece": 1 << 13},
    "lossless": {"numel": 20_000, "codec": "lossless"},
    "cached": {"numel": 40_000, "filters": "cache"},
    "filtered": {"numel": 20_000, "filters": "significant(3)|cache"},
    "skipped": {"numel": 20_000, "filters": "skip(0.5)"},
}


@dataclass(frozen=True)
class SoakPlan:
    """What to do."""

    out: str
    engine: str = "zeromq"
    seconds: float = 600.0
    seed: int = 0
    checkpoints: int = 30
    """How often all meet and compare, at least every ten seconds."""


class Patient:
    """One space, the account of it, and what is under way."""

    def __init__(self, world: World, name: str, settings: dict[str, Any], rng: random.Random) -> None:
        told = {key: value for key, value in settings.items() if key not in ("numel", "filters")}
        filters = build_filter(settings.get("filters"))
        self.client: Client = open_space(world, name, settings["numel"], filters=filters, **told)
        holds = filters is not None and filters.chooses
        self.account = Account(name, settings["numel"], world.rank, world.size, prompt=not holds)
        self.coded = "codec" in told
        self._rng = rng
        self._lists = [self._draw_list() for _ in range(LISTS)] if filters is not None and filters.caches else []
        self._under_way: deque[Callable[[], None]] = deque()
        self._last: list[int] = []

    def request(self) -> str:
        """Send something; its kind."""
        while len(self._under_way) >= UNDER_WAY:
            self._under_way.popleft()()
        rng = self._rng
        kind = rng.choice(("push", "push", "pull", "push_pull", "push_pull", "add"))
        keys = rng.choice(self._lists) if self._lists and rng.random() < 0.7 else self._draw_keys()
        places = keys if isinstance(keys, Tensor) else torch.arange(*keys)
        if not places.numel():
            return "none"
        values = torch.randint(1, 4, (places.numel(),)).float()
        if kind == "pull":
            claim = self.account.reading(places, kind)
            self._expect(self.client.pull(keys, after=self._last), claim)
            return kind
        self.account.pushed(places, values)
        if kind == "push":
            future = self.client.push(keys, values)
            self._last = [future.timestamp]
            self._under_way.append(lambda: _finish(future))
        elif kind == "add":
            self.client.add(keys, values)
        else:
            claim = self.account.reading(places, kind)
            future = self.client.push_pull(keys, values, after=self._last)
            self._last = [future.timestamp]
            self._expect(future, claim)
        return kind

    def _expect(self, future: Future, claim: Any) -> None:
        def check() -> None:
            found = future.wait()
            assert found is not None
            self.account.check(claim, found)

        self._under_way.append(check)

    def _draw_keys(self) -> tuple[int, int] | Tensor:
        """A range, or a list: of all keys but the others' lanes."""
        rng, account = self._rng, self.account
        if rng.random() < 0.3:
            return self._draw_list()
        first, after = account.lane if rng.random() < 0.3 else (0, account.shared)
        ends = sorted((rng.randint(first, after), rng.randint(first, after)))
        longest = rng.choice((10, 1000, account.numel))
        return ends[0], min(ends[1], ends[0] + longest)

    def _draw_list(self) -> Tensor:
        first, after = self.account.lane
        own = torch.randint(first, after, (self._rng.randint(1, 40),))
        shared = torch.randint(0, self.account.shared, (self._rng.randint(1, 400),))
        found: Tensor = torch.unique(torch.cat([shared, own]))
        return found

    def drain(self) -> None:
        """Wait for all that is under way, and send what filters hold back."""
        while self._under_way:
            self._under_way.popleft()()
        self.client.flush()

    def settle(self) -> float:
        """Compare every key with what all workers' accounts say; the largest value."""
        total = allreduce(self.account.ledger, "sum")
        self.account.settle(total, self.client.get(), "checkpoint")
        if self.coded:  # the first tells all but what the codec loses, the others the rest
            for _ in range(3):
                found = self.client.pull(None, coded=True).wait()
            assert found is not None
            self.account.settle(total, found, "coded checkpoint")
        return float(total.max())

    def restart(self, world: World) -> None:
        """Begin at 0 again."""
        if world.rank == 0:
            self.client.put(None, torch.zeros(self.account.numel))
        self.account.reset()


def soak(plan: SoakPlan) -> None:
    """Run on this worker; worker 0 writes what came of it. A mismatch is raised."""
    with init(transport=plan.engine) as world:
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed + world.rank)
        rng = random.Random(f"{plan.seed} {world.rank}")
        network = server_network(world)
        raw = open_raw(network)
        orders = Orders(raw, network.servers)
        end = None if network.dedicated else world.runtime.spawn(attend, raw, name="end")
        patients = [Patient(world, name, settings, rng) for name, settings in SPACES.items()]
        counts: Counter[str] = Counter()
        samples: list[dict[str, Any]] = []
        start = world.runtime.now()
        until = start
        pause = min(10.0, plan.seconds / plan.checkpoints)
        while not _over(world, until - start >= plan.seconds):
            until += pause
            while world.runtime.now() < until:
                counts[rng.choice(patients).request()] += 1
            settled = checkpoint(world, patients)
            samples.append(_memory(world, orders, network.dedicated) | {"seconds": world.runtime.now() - start})
            counts["keys compared"] += settled
            until = max(until, world.runtime.now())
        world.barrier()
        told = allreduce(torch.tensor([counts[kind] for kind in KINDS], dtype=torch.float64), "sum").tolist()
        for patient in patients:
            patient.client.close()
        world.barrier()
        if world.rank == 0:
            orders.end()
            document = {
                "kind": "soak",
                "plan": asdict(plan),
                "workers": world.size,
                "servers": len(network.servers) if network.dedicated else 0,
                "counts": dict(zip(KINDS, map(int, told), strict=True)),
                "samples": samples,
            }
            Path(plan.out).write_text(json.dumps(document, indent=1))
        if end is not None:
            end.join(world.transport.timeout)
        world.barrier()
        raw.close()


def _finish(future: Future) -> None:
    future.wait()


def _over(world: World, mine: bool) -> bool:
    """Whether worker 0's time is up: all end at the same checkpoint."""
    return bool(int(broadcast(torch.tensor([int(mine)]))))


def checkpoint(world: World, patients: list[Patient]) -> int:
    """All meet; every key of every space is compared. How many keys that were."""
    for patient in patients:
        patient.drain()
    world.barrier()
    largest = max(patient.settle() for patient in patients)
    world.barrier()
    if largest > EXACT:
        for patient in patients:
            patient.restart(world)
        world.barrier()
    return sum(patient.account.numel for patient in patients)


def _memory(world: World, orders: Orders, dedicated: bool) -> dict[str, list[int]]:
    """Resident bytes of every worker and every dedicated server."""
    workers = allgather(torch.tensor([resident()])).tolist()
    servers = [found for found, _ in orders.usage()] if world.rank == 0 and dedicated else []
    return {"workers": workers, "servers": servers}


def describe(document: dict[str, Any]) -> str:
    """What the soak found, for the terminal."""
    counts, samples = document["counts"], document["samples"]
    asked = {kind: count for kind, count in counts.items() if kind != KINDS[-1]}
    warm = samples[len(samples) // 5 :]
    lines = [
        f"soak of {samples[-1]['seconds']:.0f} s, {document['workers']} workers, "
        + (f"{document['servers']} servers" if document["servers"] else "co-located servers"),
        f"  requests     {sum(asked.values())}, all as due: " + ", ".join(f"{n} {kind}" for kind, n in asked.items()),
        f"  checkpoints  {len(samples)}, {counts[KINDS[-1]]} keys compared with the journals, none differs",
    ]
    for who in ("workers", "servers"):
        rows = [[each[who][place] for each in warm] for place in range(len(warm[0][who]))]
        if rows:
            grown = ", ".join(f"{(row[-1] - row[0]) / 1e6:+.1f}" for row in rows)
            most = max(max(row) for row in rows) / 1e6
            lines.append(f"  memory       {who} grew by {grown} MB after the first fifth (the largest: {most:.0f} MB)")
    return "\n".join(lines)


if __name__ == "__main__":
    soak(SoakPlan(**json.loads(sys.argv[1])))
