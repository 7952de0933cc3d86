"""`parallel=` of `distribute`: how the workers divide the training.

A text such as "pipeline(2) x tensor(2) x allreduce", a `DivisionSpec` such as `sl.parallel.tensor(plan, size=2)`, or a
list of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.division_specs import DIVISIONS, DivisionSpec
from syncline.parallel.stage_runner import Recompute
from syncline.specs import Registry, factors, nearest, parse
from syncline.strategies import OTHER_NAMES, Strategy, build_strategy, strategy_names
from syncline.training.pipeline import pipeline
from syncline.training.pipeline_run import PipelineRun
from syncline.training.pipeline_stages import AUTO, Stages

__all__ = ["ParallelPlan", "PipelineSpec", "distribute_pipeline", "read_parallel"]

FORM = 'write "pipeline(2) x tensor(2) x allreduce"'


@dataclass(frozen=True)
class PipelineSpec:
    """The arguments of `pipeline(…)` in such a text. See `sl.pipeline`."""

    stages: Stages = AUTO
    schedule: str = "1f1b"
    microbatches: int | None = None
    recompute: Recompute = "never"


@dataclass(frozen=True)
class ParallelPlan:
    """What `parallel=` names."""

    pipeline: PipelineSpec | None = None
    divisions: tuple[DivisionSpec, ...] = ()
    strategy: Strategy | None = None


_PIPELINES = Registry[PipelineSpec]("kind of parallelism")
_PIPELINES.add("pipeline", PipelineSpec)
_OTHER_NAMES = {
    **OTHER_NAMES,
    **dict.fromkeys(("pp", "pipeline", "pipelineparallel", "gpipe", "1f1b", "pipedream"), "pipeline"),
    **dict.fromkeys(("tp", "tensor", "tensorparallel", "megatron", "columns", "rows"), "tensor"),
    **dict.fromkeys(("ep", "moe", "expert", "experts", "expertparallel"), "experts"),
    **dict.fromkeys(("owt", "weirdtrick", "oneweirdtrick", "hybrid"), "weird_trick"),
    "spatial": "spatial",
}


def read_parallel(parallel: str | DivisionSpec | Sequence[str | DivisionSpec]) -> ParallelPlan:
    """What `parallel=` names.

    >>> plan = read_parallel("pipeline(2, microbatches=8) x tensor(2) x local(period=4)")
    >>> plan.pipeline, plan.divisions
    (PipelineSpec(stages=2, schedule='1f1b', microbatches=8, recompute='never'), (TensorParallel(plan=None, size=2),))
    >>> plan.strategy
    local(period=4)
    >>> read_parallel("pipline(2)")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: parallel='pipline(2)': unknown name 'pipline'; did you mean 'pipeline'? available: \
'adacomm', 'allreduce', 'auto', 'average', 'bsp', 'diloco', 'downpour', 'easgd', 'ensemble', 'experts', 'gossip', \
'hogwild', 'local', 'master', 'onesided', 'pipeline', 'spatial', 'ssp', 'tensor', 'weird_trick'
    """
    pipelines: list[PipelineSpec] = []
    divisions: list[DivisionSpec] = []
    strategies: list[Strategy] = []
    for part in [parallel] if isinstance(parallel, (str, DivisionSpec)) else list(parallel):
        if isinstance(part, DivisionSpec):
            divisions.append(part)
            continue
        if not isinstance(part, str):
            raise SpecError(f"parallel={part!r}: a text, the result of sl.parallel.tensor(…), or a list of these")
        for factor in factors(part):
            found = _read_factor(part, factor)
            kind: list[Any] = (
                pipelines
                if isinstance(found, PipelineSpec)
                else divisions
                if isinstance(found, DivisionSpec)
                else strategies
            )
            kind.append(found)
    for several, what in ((pipelines, "pipelines"), (strategies, "strategies")):
        if len(several) > 1:
            raise SpecError(f"parallel={parallel!r} has {len(several)} {what}, and at most one is possible; {FORM}")
    return ParallelPlan(pipelines[0] if pipelines else None, tuple(divisions), strategies[0] if strategies else None)


def _read_factor(text: str, factor: str) -> PipelineSpec | DivisionSpec | Strategy:
    try:
        first, *more = parse(factor)
    except SpecError as error:
        raise SpecError(f"parallel={text!r}: {error}; for example, {FORM}") from None
    if more:
        raise SpecError(f"parallel={text!r}: {factor!r} is a chain; {FORM}, and name codecs by codec=")
    if first.name in DIVISIONS.names():
        return DIVISIONS.make(first)
    if first.name == "pipeline":
        return _PIPELINES.make(first)
    if first.name in strategy_names():
        return build_strategy(factor)
    known = sorted(["pipeline", *DIVISIONS.names(), *strategy_names()])
    raise SpecError(f"parallel={text!r}: unknown name {first.name!r}; {nearest(first.name, known, _OTHER_NAMES)}")


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
