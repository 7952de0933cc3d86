"""Each rank computes v chunks of the model, so the pipeline fills v times as fast (Narayanan et al., 2021).

Two ranks, two chunks, four micro-batches; rank 0 has stages 0 and 2, rank 1 stages 1 and 3 (one column is the time of F
or of B of one stage)::

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

The micro-batches pass the chunks in rounds: those of a round through the first chunk of each rank, then those through
the second, …. A round has m / max(1, ⌊m/p⌋) micro-batches, which is p if p divides m. Rank s computes
(v − 1)·round + 2(p − 1 − s) forwards, then forwards and backwards in turn. The share of idle time is
(p − 1) / (v·m + p − 1), and there are v times the transfers.

D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from syncline.errors import SpecError
from syncline.parallel.schedules.base import Action, Kind, PipelineSchedule, PipelineSetting, with_reductions
from syncline.parallel.schedules.one_f_one_b import alternate

__all__ = ["ChunkedSchedule", "Interleaved", "in_rounds", "round_size"]


@dataclass(frozen=True, repr=False)
class ChunkedSchedule(PipelineSchedule):
    """A schedule with `chunks` stages on each rank: rank s has the stages s, s + p, s + 2p, …."""

    chunks: int = 1
    """Stages of each rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chunks = self.chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise SpecError(f"{self.name}(chunks={chunks!r}): it must be a whole number, at least 1")

    @property
    def stages_per_rank(self) -> int:
        """The number of stages that each rank computes."""
        return self.chunks

    def check(self, setting: PipelineSetting) -> None:
        """Raise a `SpecError`, with the nearest numbers that work, if the rounds are not of one size."""
        super().check(setting)
        ranks, total = setting.ranks, setting.micro_batches
        if self.chunks > 1 and not _rounds_are_equal(total, ranks):
            fewer = next(number for number in range(total, 0, -1) if _rounds_are_equal(number, ranks))
            more = next(number for number in count(total) if _rounds_are_equal(number, ranks))
            raise SpecError(
                f"{self}: {total} micro-batches on {ranks} ranks do not divide into {total // ranks} rounds of one "
                f"size; use {fewer} or {more} micro-batches, or '1f1b'"
            )

    def ordered(self, rank: int, setting: PipelineSetting, backward: Kind, warmup: int) -> Iterator[Action]:
        """Forwards and backwards in rounds: the forwards that precede the last chunk and `warmup` more come first."""
        stages = [rank + chunk * setting.ranks for chunk in range(self.chunks)]
        forwards = (Action("F", *each) for each in in_rounds(stages, setting))
        backwards = (Action(backward, *each) for each in in_rounds(stages[::-1], setting))
        return alternate(forwards, backwards, (self.chunks - 1) * round_size(setting) + warmup)


@dataclass(frozen=True, repr=False)
class Interleaved(ChunkedSchedule):
    """One forward and one backward in turn, with several stages on each rank.

    >>> print(*Interleaved(chunks=2).actions(1, PipelineSetting(ranks=2, micro_batches=2)))
    1F0 1F1 3F0 3B0 3F1 3B1 3R 1B0 1B1 1R
    """

    name = "interleaved"

    chunks: int = 2
    """Stages of each rank."""

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of a rank in one step."""
        yield from with_reductions(self.ordered(rank, setting, "B", 2 * (setting.ranks - 1 - rank)))


def _rounds_are_equal(micro_batches: int, ranks: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


def round_size(setting: PipelineSetting) -> int:
    """The micro-batches of a round. It is p if p divides m; ⌊m/p⌋ rounds have one size if ⌊m/p⌋ divides m.

    >>> round_size(PipelineSetting(ranks=4, micro_batches=10))
    5
    """
    return setting.micro_batches // max(1, setting.micro_batches // setting.ranks)


def in_rounds(stages: Sequence[int], setting: PipelineSetting) -> Iterator[tuple[int, int]]:
    """Stage and micro-batch of each computation: all micro-batches of a round through one stage, then the next.

    >>> list(in_rounds([1, 3], PipelineSetting(ranks=2, micro_batches=4)))
    [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]
    """
    size, total = round_size(setting), setting.micro_batches
    for first in range(0, total, size):
        for stage in stages:
            yield from ((stage, number) for number in range(first, min(first + size, total)))
