"""Which worker computes which stage on which micro-batch.

```text
equal replicas (2, 2)                      unequal replicas (3, 1): one pipeline
worker 0   stage 0, pipeline 0             worker 0   stage 0, micro-batches 0, 3, …
worker 1   stage 0, pipeline 1             worker 1   stage 0, micro-batches 1, 4, …
worker 2   stage 1, pipeline 0             worker 2   stage 0, micro-batches 2, 5, …
worker 3   stage 1, pipeline 1             worker 3   stage 1, all micro-batches
```

The replicas of a pipeline rank are neighbours, so that their all-reduce stays on one host where that is possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from syncline.errors import SpecError
from syncline.parallel.schedules import PipelineSchedule, PipelineSetting

__all__ = ["PipelinePlacement"]


@dataclass(frozen=True)
class PipelinePlacement:
    """The workers of a pipeline. `replicas` has the number of workers of each pipeline rank.

    >>> from syncline.parallel.schedules import build_schedule
    >>> PipelinePlacement(build_schedule("1f1b"), (3, 1)).team(0)
    (0, 1, 2)
    """

    schedule: PipelineSchedule
    replicas: tuple[int, ...]

    @cached_property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.replicas)

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return self.ranks * self.schedule.stages_per_rank

    @property
    def workers(self) -> int:
        """The number of workers."""
        return sum(self.replicas)

    @cached_property
    def unequal(self) -> bool:
        """Whether pipeline ranks have different numbers of workers, so that micro-batches change between pipelines."""
        return len(set(self.replicas)) > 1

    @property
    def whole_batches(self) -> bool:
        """Whether all workers of the first stage must train on the same number of micro-batches in each step."""
        return self.unequal or (not self.schedule.flushes and max(self.replicas) > 1)

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """The first worker of each pipeline rank."""
        return tuple(sum(self.replicas[:rank]) for rank in range(self.ranks))

    def position(self, worker: int) -> tuple[int, int]:
        """The pipeline rank of a worker, and its number among the replicas."""
        rank = max(rank for rank in range(self.ranks) if self._first[rank] <= worker)
        return rank, worker - self._first[rank]

    def team(self, rank: int) -> tuple[int, ...]:
        """The workers that are replicas of a pipeline rank."""
        return tuple(range(self._first[rank], self._first[rank] + self.replicas[rank]))

    def pipeline(self, replica: int) -> tuple[int, ...]:
        """The workers of one of several independent pipelines; all workers if the replicas are unequal."""
        if self.unequal:
            return tuple(range(self.workers))
        return tuple(first + replica for first in self._first)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank."""
        return tuple(stage for stage in range(self.stages) if self.schedule.rank_of(stage, self.ranks) == rank)

    def worker_of(self, stage: int, micro_batch: int, replica: int) -> int:
        """The worker that computes a stage on a micro-batch of the pipeline of `replica`."""
        rank = self.schedule.rank_of(stage, self.ranks)
        return self._first[rank] + (micro_batch % self.replicas[rank] if self.unequal else replica)

    def gradient_factor(self, stage: int, source: int) -> float:
        """The factor of a gradient that a stage gives to an earlier one.

        Each team takes the mean over its workers, and each worker has only some of the micro-batches. So a worker of a
        team of r workers computes with r times the loss.
        """
        team, earlier = (self.schedule.rank_of(each, self.ranks) for each in (stage, source))
        return self.replicas[earlier] / self.replicas[team]

    def setting(self, micro_batches: int) -> PipelineSetting:
        """The setting of the schedule. `micro_batches` are those of one worker of the first pipeline rank."""
        if self.unequal:
            return PipelineSetting(self.ranks, micro_batches * self.replicas[0], self.replicas)
        return PipelineSetting(self.ranks, micro_batches)

    def check(self, micro_batches: int) -> None:
        """Refuse what the schedule cannot run."""
        if self.unequal and not self.schedule.unequal_replicas:
            raise SpecError(
                f"{self.schedule!r} needs the same number of workers for every stage, not {list(self.replicas)}: take "
                "1f1b, gpipe or pipedream, or equal numbers"
            )
        for rank, replicas in enumerate(self.replicas if self.unequal else ()):
            total = micro_batches * self.replicas[0]
            if not self.schedule.flushes and total % replicas:
                raise SpecError(
                    f"{self.schedule!r} with {list(self.replicas)} workers per rank: the {total} micro-batches of a "
                    f"step cannot be divided evenly among the {replicas} of rank {rank}, which update together after "
                    f"each: use a multiple of {replicas}"
                )
        self.schedule.check(self.setting(micro_batches))
