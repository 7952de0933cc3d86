"""The contract of a pipeline schedule: the order in which each rank computes, as a pure generator of actions.

A model is cut into stages 0, 1, … and a batch into micro-batches 0, 1, …. An action computes one part of one stage on
one micro-batch::

    F   forward of a stage
    B   backward of a stage: gradients of its inputs and of its weights
    I   the first half of B: gradients of the inputs only
    W   the second half of B: gradients of the weights
    R   all gradients of the stage's weights are complete: its replicas may reduce them
    U   the optimizer updates the stage's weights (only if the pipeline is never emptied: `flushes` is False)

Schedules name no messages: the executor derives them. The output of F goes to the F of later stages, the gradients of
B or I to the B or I of earlier ones. The executor, the cost player and the pictures use the same generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from syncline.errors import SpecError
from syncline.specs import spec_of

__all__ = ["Action", "Kind", "PipelineSchedule", "PipelineSetting", "with_reductions"]

Kind = Literal["F", "B", "I", "W", "R", "U"]
NO_MICRO_BATCH = -1
"""The micro-batch of an action that belongs to none (R)."""


class Action(NamedTuple):
    """One computation of one rank.

    >>> print(Action("F", stage=2, micro_batch=7), Action("R", 2))
    2F7 2R
    """

    kind: Kind
    stage: int
    micro_batch: int = NO_MICRO_BATCH

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch != NO_MICRO_BATCH else ''}"


@dataclass(frozen=True)
class PipelineSetting:
    """Where a schedule runs: the number of pipeline ranks, and of micro-batches of a step.

    With `replicas` of different sizes, such as (3, 1), pipeline rank s stands for replicas[s] workers. Micro-batches
    are then numbered over all workers of the first rank: worker q of pipeline rank s computes the micro-batches j with
    j mod replicas[s] = q. Empty: the pipelines of all replicas are independent of each other, and each numbers its own.
    """

    ranks: int
    micro_batches: int
    replicas: tuple[int, ...] = ()

    def assigned(self, rank: int, replica: int = 0) -> range:
        """The micro-batches that a worker computes, in order.

        >>> PipelineSetting(2, 8, replicas=(3, 1)).assigned(rank=0, replica=1)
        range(1, 8, 3)
        """
        return range(replica, self.micro_batches, self.replicas[rank]) if self.replicas else range(self.micro_batches)


@dataclass(frozen=True, repr=False, kw_only=True)
class PipelineSchedule(ABC):
    """A pipeline schedule. A frozen dataclass whose fields are its arguments; its repr is its spec."""

    name: ClassVar[str]
    splits_backward: ClassVar[bool] = False
    """Whether it uses I and W instead of B."""
    flushes: ClassVar[bool] = True
    """Whether each step ends with an empty pipeline, so that it equals training without a pipeline."""
    unequal_replicas: ClassVar[bool] = False
    """Whether the ranks may have different numbers of replicas."""

    microbatches: int | None = None
    """Micro-batches of a step; None: four for each pipeline rank."""

    def __post_init__(self) -> None:
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise SpecError(f"{self.name}(microbatches={count!r}): it must be a whole number, at least 1")

    @property
    def stages_per_rank(self) -> int:
        """The number of stages that each rank computes."""
        return 1

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank that computes a stage."""
        return stage % ranks

    def check(self, setting: PipelineSetting) -> None:
        """Raise a `SpecError` with the values if the schedule cannot run in this setting."""
        for what, count in (("ranks", setting.ranks), ("micro-batches", setting.micro_batches)):
            if count < 1:
                raise SpecError(f"{self}: a pipeline with {count} {what}; it needs at least 1")
        replicas = setting.replicas
        if replicas and (len(replicas) != setting.ranks or min(replicas) < 1):
            raise SpecError(
                f"{self}: replicas {replicas} of {setting.ranks} ranks; give one number for each rank, at least 1"
            )
        if len(set(replicas)) > 1 and not self.unequal_replicas:
            raise SpecError(
                f"{self} needs the same number of replicas at each rank, not {replicas}: make them equal, or use "
                "'gpipe', '1f1b' or 'pipedream'"
            )
        if replicas and set(replicas) != {1} and not self.unequal_replicas:
            raise SpecError(
                f"{self} numbers the micro-batches of each pipeline on their own: with equal replicas {replicas}, "
                "leave `replicas` empty"
            )

    @abstractmethod
    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        """The actions of a rank in one step, in order; of a pipeline that is never emptied: of the whole training."""

    def __repr__(self) -> str:
        return str(spec_of(self.name, self))


def with_reductions(actions: Iterable[Action], stages: Iterable[int] = ()) -> Iterator[Action]:
    """The same actions, and R(stage) after the last one that adds to the gradients of a stage's weights.

    Each of `stages` without any action has its R at the end. A replica that computes no micro-batch takes part in the
    reduction too, because the others wait for it.

    >>> print(*with_reductions([Action("F", 0, 0), Action("B", 0, 0)]))
    0F0 0B0 0R
    """
    planned = list(actions)
    last = {action.stage: place for place, action in enumerate(planned) if action.kind in "BW"}
    for place, action in enumerate(planned):
        yield action
        if last.get(action.stage) == place:
            yield Action("R", action.stage)
    yield from (Action("R", stage) for stage in stages if stage not in last)
