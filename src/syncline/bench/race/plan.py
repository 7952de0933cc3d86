"""What a race is to be, fixed before the first run: entries, seeds, target, cadence, budget, place."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from syncline.errors import ProtocolError, SpecError
from syncline.scaling import scale_factor
from syncline.training.settings import Settings

__all__ = ["FORMAT", "Entry", "Kind", "Place", "Plan", "Run", "Tuning"]

FORMAT = 1
LONGEST = 80
"""Letters of a folder's name."""

Kind = Literal["race", "scaling", "tuning"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way of agreeing, with its learning rate. `None` is the workload's default.

    >>> Entry(name="top 1 %", strategy="allreduce", codec="topk(0.01)").slug
    'top-1'
    """

    name: str
    strategy: str = "allreduce"
    codec: str | None = None
    collective: str = "auto"
    learning_rate: float | None = None
    """Of one worker; `scaling` makes it that of all."""
    scaling: str = "none"
    warmup: float = 0.0
    decay: str = "none"
    momentum: float | None = None
    engine: Literal["mpi"] | None = None
    """What starts its workers and carries their bytes: mpiexec and MPI, or, as a rule, ourselves and gloo."""
    baseline: bool = False
    """Somebody else's, to compare with."""
    rate_from: Literal["workload", "preset", "given", "tuned"] = "workload"

    @property
    def slug(self) -> str:
        """The name of its folder."""
        plain = re.sub(r"[^A-Za-z0-9.=]+", "-", self.name).strip("-.")
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return mark if not plain else plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}-{mark}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the workers are."""

    kind: Literal["local", "lab", "simulated"] = "local"
    detail: str = ""
    """`4@100mbit`, or the network of a simulation."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The same budget for every entry: so many rates, for so many epochs, on one seed that the race does not use."""

    factors: tuple[float, ...]
    """Of the entry's own learning rate."""
    epochs: int
    seed: int


@dataclass(frozen=True)
class Run:
    """One run of a race: where it is in the folder, and what it is."""

    folder: str
    kind: Kind
    entry: Entry
    workers: int
    seed: int
    factor: float | None = None
    """In tuning: what the entry's rate is multiplied with."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A race. Everything that decides who wins is written down here before anybody runs."""

    workload: str
    workers: int
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    target: float
    metric: str
    higher_is_better: bool
    epochs: int
    batch: int
    """Samples of each worker in a step."""
    evaluate_samples: int
    """Samples, of all workers together, between two evaluations."""
    evaluations_after: int = 2
    """Evaluations that follow the one which finds the target reached."""
    limit: float = 600.0
    """Seconds of wall clock after which a run counts as hung."""
    place: Place = field(default_factory=Place)
    tuning: Tuning | None = None
    scaling: Literal["weak", "strong"] | None = None
    """What the runs on fewer workers keep: the batch of each worker, or that of all."""
    scaling_workers: tuple[int, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Entries that cannot run here, and why."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the workload tells of its data and, where it is a script, of its file."""
    seconds_a_sample: float | None = None
    """What a worker computes for one sample; for simulations alone."""
    order_seed: int = 0
    command: str = ""
    code_version: str = ""
    code_digest: str = ""
    created_ms: int = 0
    format: int = FORMAT

    def __post_init__(self) -> None:
        slugs: dict[str, str] = {}
        for entry in self.entries:
            if entry.slug in slugs:
                raise SpecError(
                    f"entries {slugs[entry.slug]!r} and {entry.name!r} would share the folder {entry.slug!r}: give one "
                    "of them another name"
                )
            slugs[entry.slug] = entry.name

    def settings(self, run: Run) -> Settings:
        """How a run trains."""
        entry = run.entry
        factor = 1.0 if run.factor is None else run.factor
        strong = self.scaling == "strong"
        together = self.batch * self.workers if strong else self.batch * run.workers
        rate = None if entry.learning_rate is None else entry.learning_rate * factor
        if strong and rate is not None:  # the same batch of all wants the same rate, however many they are
            rate *= scale_factor(entry.scaling, self.workers)
        tuning = self.tuning if run.kind == "tuning" else None
        return Settings(
            strategy=entry.strategy,
            codec=entry.codec,
            collective=entry.collective,
            batch=-(-together // run.workers),
            global_batch=together if strong else None,
            epochs=self.epochs if tuning is None else tuning.epochs,
            learning_rate=rate,
            scaling="none" if strong else entry.scaling,
            warmup=entry.warmup,
            decay=entry.decay,
            momentum=entry.momentum,
            target=self.target if tuning is None else None,
            evaluate_every=max(1, round(self.evaluate_samples / together)),
            evaluations_after=self.evaluations_after,
            seed=run.seed,
            checkpoint_every=0,
        )

    def tuning_runs(self) -> list[Run]:
        """Every entry with every rate, in an order drawn once."""
        if self.tuning is None:
            return []
        seed, workers = self.tuning.seed, self.workers
        runs = [
            Run(f"tuning/{entry.slug}/rate-times-{factor:g}", "tuning", entry, workers, seed, factor)
            for entry in self.entries
            for factor in self.tuning.factors
        ]
        random.Random(self.order_seed).shuffle(runs)
        return runs

    def runs(self, rates: Mapping[str, float] | None = None) -> list[Run]:
        """Seed after seed all entries, each time in another order: a machine that drifts, drifts for all of them.

        `rates` are what tuning has found.
        """
        draw = random.Random(self.order_seed + 1)
        found: list[Run] = []
        for seed in self.seeds:
            turn = [self._run(entry, workers, seed) for entry in self.tuned(rates) for workers in self._sizes()]
            draw.shuffle(turn)
            found += turn
        return found

    def tuned(self, rates: Mapping[str, float] | None = None) -> tuple[Entry, ...]:
        """The entries, with the learning rates that tuning has found."""
        rates = rates or {}
        return tuple(
            replace(entry, learning_rate=rates[entry.name], rate_from="tuned") if entry.name in rates else entry
            for entry in self.entries
        )

    def _sizes(self) -> tuple[int, ...]:
        return tuple(sorted({self.workers, *self.scaling_workers}))

    def _run(self, entry: Entry, workers: int, seed: int) -> Run:
        kind: Kind = "race" if workers == self.workers else "scaling"
        return Run(f"runs/{entry.slug}/{workers}w-seed{seed}", kind, entry, workers, seed)

    def as_json(self) -> str:
        """For `race.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "race.json") -> Plan:
        """What `as_json` wrote; `where` is for the errors."""
        try:
            found: dict[str, Any] = json.loads(text)
            version = found.get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"{where} is not a race's plan: {error}") from None
        if version != FORMAT:
            raise ProtocolError(f"{where} has format {version!r}, and this version of syncline reads {FORMAT}")
        try:
            return Plan(
                **{
                    **found,
                    "entries": tuple(Entry(**entry) for entry in found["entries"]),
                    "seeds": tuple(found["seeds"]),
                    "place": Place(**found["place"]),
                    "tuning": found["tuning"]
                    and Tuning(**{**found["tuning"], "factors": tuple(found["tuning"]["factors"])}),
                    "scaling_workers": tuple(found["scaling_workers"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"{where} is not a race's plan: {error}") from None
