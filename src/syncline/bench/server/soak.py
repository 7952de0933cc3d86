"""`syncline bench server --soak`: sends random requests for minutes, checks each answer, and records the memory.

Every worker keeps a `PushLedger` of what it pushed. At each checkpoint all workers flush, and compare every key with
the sum of their ledgers. All pushes are positive whole numbers, so a key only grows. The first keys are shared; each
of the others is written by one worker only::

    keys        0 ─────────── shared ───────────┬─ worker 0 ─┬─ worker 1 ─┬─ … ─ n
    a read      own, last seen ≤ value          │ value = own
    checkpoint  Σ of all ledgers                │ the same
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.bench.server.echo import ServerCommands, echo_processes, resident_bytes
from syncline.errors import ProtocolError
from syncline.server.client import Client, Future
from syncline.server.filters import build_filter
from syncline.server.opening import open_space
from syncline.world import World, allgather, allreduce, broadcast, init

__all__ = ["SPACES", "ExpectedRead", "PushLedger", "SoakPlan", "SoakedSpace", "checkpoint", "describe", "soak"]

MAX_INFLIGHT_REQUESTS = 6
KEY_LISTS = 24
"""Lists of keys that are reused, for the cache filter."""
MAX_VALUE = float(1 << 22)
"""If a key exceeds this, all keys restart at 0: float32 represents whole numbers up to four times that."""
COUNTED = ("push", "pull", "push_pull", "add", "keys compared")
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
    """The options of the soak."""

    out: str
    engine: str = "zeromq"
    seconds: float = 600.0
    seed: int = 0
    checkpoints: int = 30
    """Number of checkpoints; there is one at least every ten seconds."""


class SoakedSpace:
    """One parameter space with its ledger and its requests in flight."""

    def __init__(self, world: World, name: str, settings: dict[str, Any], rng: random.Random) -> None:
        options = {key: value for key, value in settings.items() if key not in ("numel", "filters")}
        filters = build_filter(settings.get("filters"))
        self.client: Client = open_space(world, name, settings["numel"], filters=filters, **options)
        holds = filters is not None and filters.chooses
        self.ledger = PushLedger(name, settings["numel"], world.rank, world.size, prompt=not holds)
        self.coded = "codec" in options
        self._rng = rng
        self._lists = [self._draw_list() for _ in range(KEY_LISTS)] if filters is not None and filters.caches else []
        self._in_flight: deque[Callable[[], object]] = deque()
        self._last: list[int] = []

    def request(self) -> str:
        """Send a random request; return its kind."""
        while len(self._in_flight) >= MAX_INFLIGHT_REQUESTS:
            self._in_flight.popleft()()
        rng = self._rng
        kind = rng.choice(("push", "push", "pull", "push_pull", "push_pull", "add"))
        keys = rng.choice(self._lists) if self._lists and rng.random() < 0.7 else self._draw_keys()
        places = keys if isinstance(keys, Tensor) else torch.arange(*keys)
        if not places.numel():
            return "none"
        values = torch.randint(1, 4, (places.numel(),)).float()
        if kind == "pull":
            expected = self.ledger.expect(places, kind)
            self._expect(self.client.pull(keys, after=self._last), expected)
            return kind
        self.ledger.push(places, values)
        if kind == "push":
            future = self.client.push(keys, values)
            self._last = [future.timestamp]
            self._in_flight.append(future.wait)
        elif kind == "add":
            self.client.add(keys, values)
        else:
            expected = self.ledger.expect(places, kind)
            future = self.client.push_pull(keys, values, after=self._last)
            self._last = [future.timestamp]
            self._expect(future, expected)
        return kind

    def _expect(self, future: Future, expected: ExpectedRead) -> None:
        def check() -> None:
            found = future.wait()
            assert found is not None
            self.ledger.check(expected, found)

        self._in_flight.append(check)

    def _draw_keys(self) -> tuple[int, int] | Tensor:
        """A range or a list of keys that this worker may write."""
        rng, ledger = self._rng, self.ledger
        if rng.random() < 0.3:
            return self._draw_list()
        first, after = ledger.own_keys if rng.random() < 0.3 else (0, ledger.shared)
        ends = sorted((rng.randint(first, after), rng.randint(first, after)))
        longest = rng.choice((10, 1000, ledger.numel))
        return ends[0], min(ends[1], ends[0] + longest)

    def _draw_list(self) -> Tensor:
        first, after = self.ledger.own_keys
        own = torch.randint(first, after, (self._rng.randint(1, 40),))
        shared = torch.randint(0, self.ledger.shared, (self._rng.randint(1, 400),))
        found: Tensor = torch.unique(torch.cat([shared, own]))
        return found

    def drain(self) -> None:
        """Wait for all requests in flight, and send what filters have held back."""
        while self._in_flight:
            self._in_flight.popleft()()
        self.client.flush()

    def check_all(self) -> float:
        """Compare every key with the sum of all ledgers; return the largest value."""
        total = allreduce(self.ledger.pushed, "sum")
        self.ledger.check_total(total, self.client.get(), "checkpoint")
        if self.coded:  # the second and third pull return what the codec lost in the first
            for _ in range(3):
                found = self.client.pull(None, encoded=True).wait()
            assert found is not None
            self.ledger.check_total(total, found, "coded checkpoint")
        return float(total.max())

    def restart(self, world: World) -> None:
        """Set every key to 0."""
        if world.rank == 0:
            self.client.put(None, torch.zeros(self.ledger.numel))
        self.ledger.reset()


def soak(plan: SoakPlan) -> None:
    """Run on this worker; worker 0 writes the results to `plan.out`. A wrong answer is a `ProtocolError`."""
    with init(transport=plan.engine) as world, echo_processes(world) as (network, _, commands):
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed + world.rank)
        rng = random.Random(f"{plan.seed} {world.rank}")
        spaces = [SoakedSpace(world, name, settings, rng) for name, settings in SPACES.items()]
        counts: Counter[str] = Counter()
        samples: list[dict[str, Any]] = []
        start = world.runtime.now()
        until = start
        pause = min(10.0, plan.seconds / plan.checkpoints)
        while not _over(world, until - start >= plan.seconds):
            until += pause
            while world.runtime.now() < until:
                counts[rng.choice(spaces).request()] += 1
            compared = checkpoint(world, spaces)
            samples.append(_memory(world, commands, network.dedicated) | {"seconds": world.runtime.now() - start})
            counts["keys compared"] += compared
            until = max(until, world.runtime.now())
        world.barrier()
        totals = allreduce(torch.tensor([counts[kind] for kind in COUNTED], dtype=torch.float64), "sum").tolist()
        for space in spaces:
            space.client.close()
        document = {
            "kind": "soak",
            "plan": asdict(plan),
            "workers": world.size,
            "servers": len(network.servers) if network.dedicated else 0,
            "counts": dict(zip(COUNTED, map(int, totals), strict=True)),
            "samples": samples,
        }
        if world.rank == 0:
            Path(plan.out).write_text(json.dumps(document, indent=1))


def _over(world: World, mine: bool) -> bool:
    """True if the time of worker 0 is over: all workers end at the same checkpoint."""
    return bool(int(broadcast(torch.tensor([int(mine)]))))


def checkpoint(world: World, spaces: list[SoakedSpace]) -> int:
    """Compare every key of every space; return the number of keys. A collective call."""
    for space in spaces:
        space.drain()
    world.barrier()
    largest = max(space.check_all() for space in spaces)
    world.barrier()
    if largest > MAX_VALUE:
        for space in spaces:
            space.restart(world)
        world.barrier()
    return sum(space.ledger.numel for space in spaces)


def _memory(world: World, commands: ServerCommands, dedicated: bool) -> dict[str, list[int]]:
    """Resident bytes of all workers and dedicated servers."""
    workers = allgather(torch.tensor([resident_bytes()])).tolist()
    servers = [found for found, _ in commands.usage()] if world.rank == 0 and dedicated else []
    return {"workers": workers, "servers": servers}


def describe(document: dict[str, Any]) -> str:
    """The results as text."""
    counts, samples = document["counts"], document["samples"]
    asked = {kind: count for kind, count in counts.items() if kind != COUNTED[-1]}
    warm = samples[len(samples) // 5 :]
    lines = [
        f"soak of {samples[-1]['seconds']:.0f} s, {document['workers']} workers, "
        + (f"{document['servers']} servers" if document["servers"] else "co-located servers"),
        f"  requests     {sum(asked.values())}, all answers correct: "
        + ", ".join(f"{n} {kind}" for kind, n in asked.items()),
        f"  checkpoints  {len(samples)}, {counts[COUNTED[-1]]} keys compared with the ledgers, none differs",
    ]
    for who in ("workers", "servers"):
        rows = [[each[who][place] for each in warm] for place in range(len(warm[0][who]))]
        if rows:
            grown = ", ".join(f"{(row[-1] - row[0]) / 1e6:+.1f}" for row in rows)
            most = max(max(row) for row in rows) / 1e6
            lines.append(f"  memory       {who} grew by {grown} MB after the first fifth (the largest: {most:.0f} MB)")
    return "\n".join(lines)


OWN_KEYS_SHARE = 4
"""One of this many keys is written by one worker only."""


@dataclass
class ExpectedRead:
    """The smallest possible values of a read, known when it was sent."""

    keys: Tensor
    least: Tensor
    what: str


@dataclass
class PushLedger:
    """What one worker has pushed to one space, and what it may read there.

    >>> ledger = PushLedger("demo", numel=8, rank=0, workers=2)
    >>> ledger.push(torch.tensor([0, 6]), torch.tensor([2.0, 1.0]))
    >>> expected = ledger.expect(torch.tensor([0, 6]), "pull")
    >>> ledger.check(expected, torch.tensor([5.0, 1.0]))
    >>> ledger.check(expected, torch.tensor([1.0, 1.0]))
    Traceback (most recent call last):
    ...
    syncline.errors.ProtocolError: demo: pull of worker 0 says 1 for key 0, where at least 2 was due
    """

    name: str
    numel: int
    rank: int
    workers: int
    prompt: bool = True
    """True if a push is visible at once. A filter may hold it back."""
    pushed: Tensor = field(init=False)
    seen: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.pushed = torch.zeros(self.numel, dtype=torch.float64)
        self.seen = torch.zeros(self.numel, dtype=torch.float64)

    @property
    def shared(self) -> int:
        """Number of keys that all workers write."""
        return self.numel - self.numel // OWN_KEYS_SHARE

    @property
    def own_keys(self) -> tuple[int, int]:
        """The range of keys that only this worker writes."""
        each = (self.numel - self.shared) // self.workers
        first = self.shared + self.rank * each
        return first, first + each

    def push(self, keys: Tensor, values: Tensor) -> None:
        """Record a push."""
        self.pushed[keys] += values.double()

    def expect(self, keys: Tensor, what: str) -> ExpectedRead:
        """A read that is sent now, after all recorded pushes."""
        least = self.pushed[keys] if self.prompt else torch.zeros(len(keys), dtype=torch.float64)
        return ExpectedRead(keys, torch.maximum(least, self.seen[keys]), what)

    def check(self, expected: ExpectedRead, found: Tensor) -> None:
        """Check an answer; a `ProtocolError` if it is impossible."""
        values = found.double()
        self._refuse(expected, values, values < expected.least, expected.least, "at least")
        first, after = self.own_keys
        most = torch.where((expected.keys >= first) & (expected.keys < after), self.pushed[expected.keys], torch.inf)
        self._refuse(expected, values, values > most, most, "at most")
        self._refuse(expected, values, values != values.round(), values.round(), "a whole number such as")
        self.seen[expected.keys] = torch.maximum(self.seen[expected.keys], values)

    def check_total(self, total: Tensor, found: Tensor, what: str) -> None:
        """After all workers have flushed: every key is the sum of all ledgers."""
        expected = ExpectedRead(torch.arange(self.numel), total, what)
        self._refuse(expected, found.double(), found.double() != total, total, "exactly")
        self._refuse(expected, total, self.seen > total, self.seen, "the value of an earlier read, ")

    def reset(self) -> None:
        """Every key is 0 again."""
        self.pushed.zero_()
        self.seen.zero_()

    def _refuse(self, expected: ExpectedRead, values: Tensor, wrong: Tensor, due: Tensor, how: str) -> None:
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            others = f" ({int(wrong.sum())} keys are wrong)" if int(wrong.sum()) > 1 else ""
            raise ProtocolError(
                f"{self.name}: {expected.what} of worker {self.rank} says {float(values[at]):g} for key "
                f"{int(expected.keys[at])}, where {how} {float(due[at]):g} was due{others}"
            )


if __name__ == "__main__":
    soak(SoakPlan(**json.loads(sys.argv[1])))
