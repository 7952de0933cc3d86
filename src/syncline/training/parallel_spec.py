"""`parallel="pipeline(2) x allreduce"` of `distribute`: how the workers divide the training, as one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.stage_runner import Recompute
from syncline.specs import Registry, factors, nearest, parse
from syncline.strategies import OTHER_NAMES, Strategy, build_strategy, strategy_names
from syncline.training.pipeline import pipeline
from syncline.training.pipeline_run import PipelineRun
from syncline.training.pipeline_stages import AUTO, Stages

__all__ = ["PipelineSpec", "distribute_pipeline", "read_parallel"]

FORM = 'write "pipeline(2) x allreduce"'


@dataclass(frozen=True)
class PipelineSpec:
    """The arguments of `pipeline(…)` in such a text. See `sl.pipeline`."""

    stages: Stages = AUTO
    schedule: str = "1f1b"
    microbatches: int | None = None
    recompute: Recompute = "never"


_PIPELINES = Registry[PipelineSpec]("kind of parallelism")
_PIPELINES.add("pipeline", PipelineSpec)
_OTHER_NAMES = {
    **OTHER_NAMES,
    **dict.fromkeys(("pp", "pipelineparallel", "gpipe", "1f1b", "pipedream"), "pipeline"),
}


def read_parallel(text: str) -> tuple[PipelineSpec | None, Strategy | None]:
    """The pipeline and the strategy that a text names; None for what it does not name.

    >>> read_parallel("pipeline(2, microbatches=8) x local(period=4)")
    (PipelineSpec(stages=2, schedule='1f1b', microbatches=8, recompute='never'), local(period=4))
    >>> read_parallel("pipline(2)")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: parallel='pipline(2)': unknown name 'pipline'; did you mean 'pipeline'? available: \
'adacomm', 'allreduce', 'average', 'bsp', 'diloco', 'downpour', 'easgd', 'ensemble', 'gossip', 'hogwild', 'local', \
'master', 'onesided', 'pipeline', 'ssp'
    """
    pipelines: list[PipelineSpec] = []
    strategies: list[Strategy] = []
    for factor in factors(text):
        try:
            first, *more = parse(factor)
        except SpecError as error:
            raise SpecError(f"parallel={text!r}: {error}; for example, {FORM}") from None
        if more:
            raise SpecError(f"parallel={text!r}: {factor!r} is a chain; {FORM}, and name codecs by codec=")
        if first.name == "pipeline":
            pipelines.append(_PIPELINES.make(first))
        elif first.name in strategy_names():
            strategies.append(build_strategy(factor))
        else:
            known = ["pipeline", *strategy_names()]
            raise SpecError(
                f"parallel={text!r}: unknown name {first.name!r}; {nearest(first.name, known, _OTHER_NAMES)}"
            )
    for found, what in ((pipelines, "pipelines"), (strategies, "strategies")):
        if len(found) > 1:
            raise SpecError(f"parallel={text!r} has {len(found)} {what}, and at most one is possible; {FORM}")
    return (pipelines[0] if pipelines else None), (strategies[0] if strategies else None)


def distribute_pipeline(
    spec: PipelineSpec,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    strategy: str | Strategy,
    codec: str | Codec | None,
    refused: dict[str, Any],
    **options: Any,
) -> PipelineRun:
    """`sl.pipeline` for `distribute`. `refused` are options that a pipeline does not have, by name."""
    if loss_fn is None:
        raise SpecError(
            "a pipeline computes the loss on its last stage: give loss_fn=, a function of the model's output and the "
            "target, and train by run.step(x, y)"
        )
    for name, value in refused.items():
        if value:
            raise IncompatibleError(f"{name}={value!r}: a pipeline does not have this option; leave it out")
    if not isinstance(optimizer, Optimizer):
        raise IncompatibleError("a pipeline takes one optimizer: give one with several parameter groups")
    return pipeline(
        model,
        optimizer,
        loss_fn,
        stages=spec.stages,
        schedule=spec.schedule,
        microbatches=spec.microbatches,
        recompute=spec.recompute,
        strategy=strategy,
        codec=codec,
        **options,
    )
