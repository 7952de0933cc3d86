"""The options of `syncline bench pipeline`, and what is refused before a process starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch
from torch import nn

from syncline.bench.measuring import check_options
from syncline.bench.pipeline_contenders import DATA_PARALLEL, ONE_PROCESS, TORCH, bench_model
from syncline.bench.race.runner import parse_network
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.partition import StagePartition
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import PipelineSchedule, build_schedule
from syncline.parallel.splitting import layer_names, split

__all__ = ["PipelinePlan"]

AUTO = "auto"


@dataclass(frozen=True)
class PipelinePlan:
    """The options of the benchmark."""

    out: str
    schedules: list[str] = field(default_factory=lambda: ["1f1b"])
    model: str = "mlp"
    width: int = 512
    layers: int = 8
    batch: int = 512
    """Samples of a step, of all workers together."""
    microbatches: int = 8
    """Of each pipeline."""
    stages: str = ""
    """Their number, the names of the modules with which they begin, or "auto". Empty: as many as pipeline ranks."""
    replicas: str = ""
    """Workers of each stage: one number, or one for each stage, such as 3-1."""
    against: list[str] = field(default_factory=list)
    repeats: int = 5
    turns: int = 20
    simulate: str = ""
    """The simulated network."""

    @property
    def contenders(self) -> list[str]:
        """Names of all contenders."""
        return [*self.schedules, ONE_PROCESS, DATA_PARALLEL, *([TORCH] if self.against else [])]

    @property
    def cut_names(self) -> tuple[str, ...]:
        """The cuts, if they are given by name."""
        named = self.stages not in ("", AUTO) and not re.fullmatch(r"-?\d+", self.stages)
        return tuple(part.strip() for part in self.stages.split(",") if part.strip()) if named else ()

    def check(self, workers: int) -> None:
        """Refuse impossible settings with a sentence, before a process starts."""
        check_options(
            width=self.width,
            layers=self.layers,
            batch=self.batch,
            microbatches=self.microbatches,
            rounds=self.repeats,
            turns=self.turns,
        )
        if workers < 2:
            raise SpecError(f"-n {workers}: give at least 2 ranks")
        if self.batch % workers:
            raise SpecError(
                f"--batch {self.batch}: {workers} workers of data parallelism cannot divide it evenly; take a multiple "
                f"of {workers}"
            )
        if self.simulate:
            parse_network(self.simulate)
        with torch.device("meta"):
            model = bench_model(self.model, self.width, self.layers, self.batch).model()
        for spec in self.schedules:
            self._check_schedule(build_schedule(spec), workers, model)
        self._check_against(workers)

    def _check_schedule(self, schedule: PipelineSchedule, workers: int, model: nn.Module) -> None:
        replicas = self.replicas_for(schedule, workers)
        if replicas is None:
            if schedule.stages_per_rank > 1 or not schedule.unequal_replicas:
                raise IncompatibleError(
                    f"--stages auto may give each stage another number of workers, which {schedule!r} cannot use: take "
                    "1f1b, gpipe or pipedream, or give --stages a number"
                )
            return
        placement = PipelinePlacement(schedule, replicas)
        count = schedule.microbatches or self.microbatches
        placement.check(count)
        parts = replicas[0] * count
        if self.batch % parts:
            raise SpecError(
                f"--batch {self.batch}: {count} micro-batches of {replicas[0]} workers of the first stage cannot "
                f"divide it evenly; take a multiple of {math.lcm(workers, parts)}"
            )
        names = layer_names(model, stages=placement.stages)
        if self.cut_names:
            StagePartition(self.cut_names, (1,) * placement.stages).check(names)
            split(model, self.cut_names)

    def _check_against(self, workers: int) -> None:
        if not self.against:
            return
        if self.against != ["torch"]:
            raise SpecError(f"--against {','.join(self.against)}: the only baseline is torch")
        if self.simulate:
            raise IncompatibleError("--against torch runs on gloo: leave --simulate out")
        if self.replicas_for(build_schedule("1f1b"), workers) != (1,) * workers:
            raise IncompatibleError(
                f"--against torch: its 1F1B reduces nothing between replicas; use {workers} stages, one for each worker"
            )
        if self.microbatches < workers:
            raise IncompatibleError(
                f"--against torch: its 1F1B needs at least as many micro-batches as stages; give --microbatches "
                f"{workers} or more"
            )

    def replicas_for(self, schedule: PipelineSchedule, workers: int) -> tuple[int, ...] | None:
        """The workers of each pipeline rank; None if the partitioner decides."""
        chunks = schedule.stages_per_rank
        if self.stages == AUTO:
            if self.replicas:
                raise IncompatibleError("--stages auto chooses the replicas, too: leave --replicas out")
            return None
        given = self._given_replicas()
        if self.cut_names:
            stages = len(self.cut_names) + 1
        elif self.stages:
            stages = int(self.stages)
        else:
            stages = chunks * (len(given) if len(given) > 1 else workers // (given or (1,))[0])
        if stages < 1 or stages % chunks:
            raise SpecError(
                f"{stages} stages: {schedule!r} has {chunks} on each pipeline rank; take a multiple of {chunks}"
            )
        ranks = stages // chunks
        each = given[0] if given else max(1, workers // ranks)
        replicas = given if len(given) > 1 else (each,) * ranks
        if len(replicas) != ranks or sum(replicas) != workers:
            raise SpecError(
                f"{stages} stages of {schedule!r} with {'-'.join(map(str, replicas))} workers, and there are {workers} "
                f"workers for {ranks} pipeline ranks: change -n, --stages or --replicas"
            )
        return replicas

    def _given_replicas(self) -> tuple[int, ...]:
        if not self.replicas:
            return ()
        try:
            found = tuple(int(part) for part in self.replicas.split("-"))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            raise SpecError(f"--replicas {self.replicas}: workers of each stage, as in 2, or 3-1 for two stages")
        return found
