"""The plan of a race, fixed before the first run: entries, seeds, target, evaluation interval, budget and place."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from syncline.errors import ProtocolError, SpecError
from syncline.lr_scaling import scale_factor
from syncline.training.settings import Settings

__all__ = ["FORMAT", "PlannedRun", "RaceEntry", "RacePlace", "RacePlan", "RateTuning", "RunKind"]

FORMAT = 1
MAX_FOLDER_NAME_CHARS = 80

RunKind = Literal["race", "scaling", "tuning"]


@dataclass(frozen=True, kw_only=True)
class RaceEntry:
    """A strategy or codec that takes part, with its learning rate. `None` stands for the workload's default.

    >>> RaceEntry(name="top 1 %", strategy="allreduce", codec="topk(0.01)").slug
    'top-1'
    """

    name: str
    strategy: str = "allreduce"
    codec: str | None = None
    collective: str = "auto"
    learning_rate: float | None = None
    """For one worker; `scaling` adapts it to the number of workers."""
    scaling: str = "none"
    warmup: float = 0.0
    decay: str = "none"
    momentum: float | None = None
    engine: Literal["mpi"] | None = None
    """"mpi": mpiexec starts the workers, and MPI carries their messages. None: Syncline's launcher and gloo."""
    baseline: bool = False
    """True for the implementation of another library."""
    rate_from: Literal["workload", "preset", "given", "tuned"] = "workload"

    @property
    def slug(self) -> str:
        """The name of the entry's folder."""
        plain = re.sub(r"[^A-Za-z0-9.=]+", "-", self.name).strip("-.")
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        if len(plain) > MAX_FOLDER_NAME_CHARS:
            return f"{plain[:MAX_FOLDER_NAME_CHARS]}-{mark}"
        return plain or mark


@dataclass(frozen=True, kw_only=True)
class RacePlace:
    """Where the workers run."""

    kind: Literal["local", "lab", "simulated"] = "local"
    detail: str = ""
    """`4@100mbit` for the lab, or the network of a simulation."""


@dataclass(frozen=True, kw_only=True)
class RateTuning:
    """The tuning budget, equal for all entries: learning rates, epochs, and a seed that the race does not use."""

    factors: tuple[float, ...]
    """Multiples of the entry's learning rate."""
    epochs: int
    seed: int


@dataclass(frozen=True)
class PlannedRun:
    """One run of a race, and its folder."""

    folder: str
    kind: RunKind
    entry: RaceEntry
    workers: int
    seed: int
    factor: float | None = None
    """In tuning: the multiple of the entry's learning rate."""

    @property
    def key(self) -> tuple[str, str, int, int, float | None]:
        """What identifies the run in the registry, whichever attempt it is."""
        return self.kind, self.entry.name, self.workers, self.seed, self.factor


@dataclass(frozen=True, kw_only=True)
class RacePlan:
    """Everything that decides the result of a race."""

    workload: str
    workers: int
    entries: tuple[RaceEntry, ...]
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
    """Evaluations after the first one that reaches the target."""
    limit: float = 600.0
    """Seconds of wall clock after which a run counts as hung."""
    place: RacePlace = field(default_factory=RacePlace)
    tuning: RateTuning | None = None
    scaling: Literal["weak", "strong"] | None = None
    """What runs on fewer workers keep: the batch of each worker (weak), or the global batch (strong)."""
    scaling_workers: tuple[int, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Entries that cannot run here, with the reason."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Checksums of the workload's data and, for a script, of its file."""
    seconds_a_sample: float | None = None
    """Seconds of computation for one sample, for simulations only."""
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

    def settings(self, run: PlannedRun) -> Settings:
        """The training settings of a run."""
        entry = run.entry
        factor = 1.0 if run.factor is None else run.factor
        strong = self.scaling == "strong"
        together = self.batch * self.workers if strong else self.batch * run.workers
        rate = None if entry.learning_rate is None else entry.learning_rate * factor
        if strong and rate is not None:  # the same global batch needs the same rate on any number of workers
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

    def tuning_runs(self) -> list[PlannedRun]:
        """Every entry with every rate, in random order."""
        if self.tuning is None:
            return []
        seed, workers = self.tuning.seed, self.workers
        runs = [
            PlannedRun(f"tuning/{entry.slug}/rate-times-{factor:g}", "tuning", entry, workers, seed, factor)
            for entry in self.entries
            for factor in self.tuning.factors
        ]
        random.Random(self.order_seed).shuffle(runs)
        return runs

    def runs(self, rates: Mapping[str, float] | None = None) -> list[PlannedRun]:
        """For each seed all entries, each time in another order: slow changes of the machine affect all of them.

        `rates` are the tuned learning rates.
        """
        draw = random.Random(self.order_seed + 1)
        runs: list[PlannedRun] = []
        for seed in self.seeds:
            turn = [self._run(entry, workers, seed) for entry in self.tuned(rates) for workers in self._sizes()]
            draw.shuffle(turn)
            runs += turn
        return runs

    def tuned(self, rates: Mapping[str, float] | None = None) -> tuple[RaceEntry, ...]:
        """The entries with their tuned learning rates."""
        rates = rates or {}
        return tuple(
            replace(entry, learning_rate=rates[entry.name], rate_from="tuned") if entry.name in rates else entry
            for entry in self.entries
        )

    def _sizes(self) -> tuple[int, ...]:
        return tuple(sorted({self.workers, *self.scaling_workers}))

    def _run(self, entry: RaceEntry, workers: int, seed: int) -> PlannedRun:
        kind: RunKind = "race" if workers == self.workers else "scaling"
        return PlannedRun(f"runs/{entry.slug}/{workers}w-seed{seed}", kind, entry, workers, seed)

    def as_json(self) -> str:
        """The content of `race.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "race.json") -> RacePlan:
        """Read what `as_json` wrote; errors name `where`."""
        try:
            values: dict[str, Any] = json.loads(text)
            version = values.get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"{where} is not a race's plan: {error}") from None
        if version != FORMAT:
            raise ProtocolError(f"{where} has format {version!r}, and this version of syncline reads {FORMAT}")
        try:
            return RacePlan(
                **{
                    **values,
                    "entries": tuple(RaceEntry(**entry) for entry in values["entries"]),
                    "seeds": tuple(values["seeds"]),
                    "place": RacePlace(**values["place"]),
                    "tuning": values["tuning"]
                    and RateTuning(**{**values["tuning"], "factors": tuple(values["tuning"]["factors"])}),
                    "scaling_workers": tuple(values["scaling_workers"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"{where} is not a race's plan: {error}") from None
