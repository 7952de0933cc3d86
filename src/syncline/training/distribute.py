"""`distribute`: attaches a synchronisation strategy to a model and its optimizer."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from syncline.codecs import Codec, build_codec, check_optimizer_momentum
from syncline.collectives.compressed import CompressedCollectives
from syncline.errors import IncompatibleError, SpecError, warn_deprecated
from syncline.reduction import BUCKET_BYTES, Communicator, broadcast_tensors, check_same
from syncline.strategies import AutoStrategy, Run, RunSettings, Strategy, build_strategy
from syncline.strategies.model_watch import refuse_wrapped, refuse_wrapper_around
from syncline.training.last_checkpoint import save_for_later
from syncline.training.signals import leave_on_signals
from syncline.world import Group, World, current_world

if TYPE_CHECKING:
    from syncline.parallel.division_specs import DivisionSpec
    from syncline.training.mesh import DivisionPlan
    from syncline.training.mesh_run import MeshRun

__all__ = [
    "check_model",
    "check_optimizers",
    "check_options",
    "check_parameters",
    "describe_model",
    "describe_optimizer",
    "distribute",
    "momentum_of",
]

logger = logging.getLogger("syncline")

OVERLAPS = 1
"""Torch's code for a tensor whose elements share memory."""
SHARED_SETTINGS = ("bucket_bytes", "check_finite", "seed", "diagnose", "find_unused_parameters")
"""Settings that must be the same on all ranks."""


def distribute(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: str | Strategy | None = None,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    bucket_bytes: int | None = None,
    check_finite: bool = False,
    schedulers: Sequence[Any] = (),
    seed: int = 0,
    diagnose: int = 0,
    find_unused_parameters: bool = False,
    on_resize: Callable[[int, int], None] | None = None,
    collective: str | None = None,
    *,
    parallel: str | DivisionSpec | Sequence[str | DivisionSpec] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
) -> Run:
    """Train `model` on all workers of the current world with a synchronisation strategy, by default "allreduce".

    Attaches hooks to the model and the optimizer, gives every worker rank 0's parameters and buffers, and refuses
    models that differ between the ranks. Every worker calls it. Gradients are final when `backward()` returns.

    `codec` compresses gradients: "quantize(4)", "topk(0.01)|quantize(4)", …; None sends them uncompressed. The error of
    a biased codec is stored and sent later. `seed` seeds its random bits. With `diagnose=n` every n-th step records its
    error in each layer.
    `algorithm` is "auto" (chosen for this network and these sizes), "native" (the backend's own) or a schedule; with a
    codec whose payloads cannot be summed it is "gather", "split" and others.
    With `check_finite` NaN or Inf in a gradient raises a `DivergedError` with rank, parameter and step; do not use it
    with a GradScaler, which needs to see them.
    `strategy="auto"` takes what the planner predicts to be fastest: see `sl.strategies.AutoStrategy`.
    A worker that has no more data gets the state of the objects that are stepped after every batch: of PyTorch's
    learning-rate schedulers, which are detected, and of the objects in `schedulers`, such as your own schedules and a
    GradScaler. Several optimizers of one model are passed as a list, with strategy allreduce.
    With `find_unused_parameters` a parameter that only some workers use in a step (an expert, a task's head) gets the
    mean over all workers, in which the others count as zeros; without it, `allreduce` raises an error.
    `on_resize(old, new)` is called on every worker when the number of workers of an elastic job has changed, for
    example to set the learning rate. Strategies with parameter servers call it before each worker's next batch.
    `parallel="pipeline(2) x allreduce"` splits the model into two stages, and synchronises the workers of each stage by
    a strategy. The result is the `PipelineRun` of `sl.pipeline(model, optimizer, loss_fn, stages=2)`, which has
    `run.step(x, y)`. The arguments of `pipeline(…)` are stages, schedule, microbatches and recompute.
    `parallel=sl.parallel.tensor(plan, size=2)` divides layers over teams of two workers, which read the same batches;
    the other workers are data-parallel. `sl.parallel.spatial`, `experts` and `weird_trick` divide images, experts and
    dense layers. A list of these, or a text such as "pipeline(2) x tensor(2)", combines them.

    >>> import torch, syncline as sl
    >>> def train(world):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     with sl.distribute(model, optimizer, algorithm="ring"):
    ...         model(torch.tensor([[float(world.rank)]])).sum().backward()
    ...     return model.weight.grad.item()          # the mean of 0 and 1
    >>> sl.simulate(train, ranks=2).results
    (0.5, 0.5)
    """
    if collective is not None:
        warn_deprecated("collective= of distribute", "algorithm=")
        algorithm = collective
    _check_kinds(model, optimizer)
    check_options(bucket_bytes, schedulers, seed, diagnose)
    divisions: tuple[DivisionSpec, ...] = ()
    if parallel is not None:
        from syncline.training.parallel_spec import distribute_pipeline, read_parallel

        named = read_parallel(parallel)
        if named.strategy is not None and strategy is not None:
            raise SpecError(f"parallel={parallel!r} names a strategy, and so does strategy={strategy!r}: leave one out")
        strategy, divisions = named.strategy or strategy, named.divisions
        if named.pipeline is not None:
            refused = {"diagnose": diagnose, "on_resize": on_resize}
            options: dict[str, Any] = {"algorithm": algorithm, "bucket_bytes": bucket_bytes, "seed": seed}
            options |= {"check_finite": check_finite, "schedulers": schedulers, "parallel": divisions}
            options["find_unused_parameters"] = find_unused_parameters
            return distribute_pipeline(
                named.pipeline, model, optimizer, loss_fn, strategy or "allreduce", codec, refused, **options
            )
    world = current_world()
    coder = build_codec(codec)
    built = build_strategy(strategy or "allreduce")
    if parallel is None and world.elastic is None and not built.asynchronous:
        divisions = automatic_divisions(model)
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    check_model(model, world)
    check_parameters(model, world.size)
    check_optimizers(model, optimizers, built)
    group, chosen_by_auto = None, None
    if isinstance(built, AutoStrategy):
        if divisions:
            built.refuse_division()
        group = world.group()
        built, coder, chosen_by_auto = _choose(group, model, optimizers, built, coder, algorithm)
        check_optimizers(model, optimizers, built)
    settings = RunSettings(
        auto=chosen_by_auto,
        bucket_bytes=BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
        check_finite=check_finite,
        schedulers=tuple(schedulers),
        seed=seed,
        diagnose=diagnose,
        more_optimizers=optimizers[1:],
        find_unused_parameters=find_unused_parameters,
        on_resize=on_resize,
    )
    if coder is not None:
        check_optimizer_momentum(coder, max(map(momentum_of, optimizers)))
        built.check_codec(coder)
    _prepare_elastic(world, model, optimizers, built, coder)
    communicator = Communicator(world, algorithm, coder, group)
    check_same(communicator, "models", describe_model(model))
    for each in optimizers:
        check_same(communicator, "optimizers", describe_optimizer(each))
    plan = None
    if divisions:
        from syncline.training.mesh import check_division, check_optimizer_of_slices, plan_mesh

        plan = plan_mesh(model, divisions, world.size)
        if plan.divisions:
            check_division(built, world)
            check_optimizer_of_slices(optimizers, plan.tensors)
    chosen = {"strategy": repr(built), "collective": communicator.collective, "codec": repr(coder)}
    chosen |= {} if plan is None else plan.describe()
    shared = {name: str(getattr(settings, name)) for name in SHARED_SETTINGS}
    check_same(communicator, "settings", {**chosen, **shared})
    broadcast_tensors(communicator, [*model.parameters(), *model.buffers()])
    _warn_of_local_norms(model, world)
    if plan is not None and plan.divisions:
        return _divide(model, optimizers, plan, communicator, built, algorithm, coder, settings)
    run = built.attach(model, optimizers[0], communicator, settings)
    try:
        run.start_in_team()
    except BaseException:  # no hook of a run that is refused stays behind
        run.release()
        raise
    world.runs.append(run)
    return run


def _choose(
    group: Group,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    auto: AutoStrategy,
    codec: Codec | None,
    algorithm: str,
) -> tuple[Strategy, Codec | None, dict[str, Any]]:
    """The strategy and the codec that the planner chooses, and why. In an elastic job the first team chooses."""
    from syncline.planner.choice import StrategyChoice, choose_strategy

    for candidate in auto.candidates(None if codec is None else repr(codec)):  # all, before anything is measured
        strategy = build_strategy(candidate.strategy)
        coder = codec if codec is not None else build_codec(candidate.codec)
        CompressedCollectives(algorithm, coder)  # raises if they do not fit
        check_optimizers(model, optimizers, strategy)
        if coder is not None:
            check_optimizer_momentum(coder, max(map(momentum_of, optimizers)))
            strategy.check_codec(coder)
    elastic = group.world.elastic
    if elastic is not None and elastic.joining:
        choice = StrategyChoice.from_json(json.loads(elastic.share_choice("")))
    else:
        choice = choose_strategy(group, model, auto, optimizers, codec)
        if elastic is not None:
            elastic.share_choice(json.dumps(choice.as_json()))
    if group.rank == 0:
        logger.info("auto %s %s", "keeps" if choice.kept else "takes", choice.reason)
    coder = codec if codec is not None else build_codec(choice.codec)
    return build_strategy(choice.strategy), coder, choice.as_json()


def _divide(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: DivisionPlan,
    everyone: Communicator,
    strategy: Strategy,
    algorithm: str,
    codec: Codec | None,
    settings: RunSettings,
) -> MeshRun:
    """Divide the layers of a model that all workers have whole, and attach the strategy to the parts."""
    from syncline.training.mesh import MeshGroups
    from syncline.training.mesh_run import MeshRun
    from syncline.training.team_runs import attach_teams

    world, optimizer = everyone.world, optimizers[0]
    groups = MeshGroups.make(world, plan, algorithm)
    divided = plan.divide(model, optimizer, groups, world)
    assert divided is not None, "there are divisions"
    teams = None
    try:
        teams = attach_teams(strategy, model, optimizer, divided, groups.data, world, algorithm, codec, settings)
        run = MeshRun(model, plan, groups, teams, everyone, divided)
    except BaseException:  # no hook of a run that does not exist stays behind
        if teams is not None:
            teams.release()
        divided.roll_back()
        raise
    divided.commit()
    world.mesh = plan.mesh
    world.runs.append(run)
    return run


def automatic_divisions(model: nn.Module) -> tuple[DivisionSpec, ...]:
    """What `distribute` divides if `parallel` is not given: the experts of `sl.parallel.Experts`, if there are any."""
    experts = sys.modules.get("syncline.parallel.expert_layers.experts")  # not imported: the model has none
    if experts is None or not any(True for _ in experts.find_experts(model)):
        return ()
    from syncline.parallel.division_specs import ExpertParallel

    return (ExpertParallel(),)


def _prepare_elastic(
    world: World, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, codec: Codec | None
) -> None:
    """In an elastic job: refuse a newcomer that differs from the others, and let this worker leave on SIGTERM."""
    if world.elastic is None:
        return
    kinds = ", ".join(type(each).__name__ for each in optimizers)  # rates may depend on the number of workers
    chosen = {"the strategy": repr(strategy), "the codec": repr(codec), "the optimizer": kinds}
    world.elastic.compare_run(world, {**chosen, **describe_model(model)})
    world.elastic.save_for_later = partial(save_for_later, world)
    leave_on_signals(world)


def check_model(model: nn.Module, world: World) -> None:
    """Refuse a model that another run or a wrapper already synchronises."""
    if not any(True for _ in model.parameters()):
        raise IncompatibleError(f"the model ({type(model).__name__}) has no parameters to train")
    refuse_wrapped(model)
    refuse_wrapper_around(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for run in world.runs:
        shared = [names[id(each)] for each in run.model.parameters() if id(each) in names]
        if shared:
            raise IncompatibleError(
                f"{shared[0]} (and {len(shared) - 1} more of {len(names)} parameters) is synchronised by another run "
                f"of sl.distribute already ({run.strategy!r}), and would be averaged twice: close that run first, or "
                "give several optimizers of one model at once, as sl.distribute(model, [first, second])"
            )


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Refuse optimizers that the strategy cannot use, or with other parameters than the model's."""
    if len(optimizers) > 1 and not strategy.several_optimizers:
        raise IncompatibleError(
            f"{strategy!r} takes one optimizer, and there are {len(optimizers)}: give one with several parameter "
            "groups, or take strategy allreduce"
        )
    owned = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = [tuple(parameter.shape) for parameter in held if id(parameter) not in owned]
        if strangers:
            raise IncompatibleError(
                f"the optimizer holds {len(strangers)} of {len(held)} parameters that are not the model's (the first "
                f"has shape {strangers[0]}): make it from model.parameters() after the model is on its device"
            )


def _check_kinds(model: object, optimizer: object) -> None:
    """Refuse arguments in the wrong order or of the wrong type."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise SpecError(
            f"distribute({type(model).__name__}, {type(optimizer).__name__}) has its arguments in the wrong order: "
            "write sl.distribute(model, optimizer)"
        )
    if not isinstance(model, nn.Module):
        raise SpecError(f"distribute(model, optimizer): the first is a torch.nn.Module, not {_kind(model)}")
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    other = next((each for each in given or [optimizer] if not isinstance(each, Optimizer)), None)
    if other is not None:
        hint = ": give schedulers by schedulers=[…]" if isinstance(other, LRScheduler) else ""
        raise SpecError(
            "distribute(model, optimizer): the second is a torch.optim.Optimizer, or a list of them, not "
            f"{_kind(other)}{hint}"
        )


def _kind(given: object) -> str:
    return f"the class {given.__name__}: call it" if isinstance(given, type) else type(given).__name__


def check_options(bucket_bytes: int | None, schedulers: Sequence[Any], seed: int, diagnose: int = 0) -> None:
    """Refuse options of wrong kinds."""
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes < 1):
        raise SpecError(f"bucket_bytes={bucket_bytes!r}: a number of bytes, at least 1")
    if not isinstance(diagnose, int) or diagnose < 0:
        raise SpecError(f"diagnose={diagnose!r}: a number of steps; 0 for never")
    if not isinstance(seed, int):
        raise SpecError(f"seed={seed!r}: a whole number")
    if not isinstance(schedulers, Sequence):
        raise SpecError(f"schedulers=[…] is a list, not {type(schedulers).__name__}: write schedulers=[scheduler]")


def check_parameters(model: nn.Module, size: int, allow_meta: bool = False) -> None:
    """Refuse parameters without values, or that workers could not exchange."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise IncompatibleError(
                f"{name} has no shape yet (a lazy module makes it in the first forward): run the model on one batch, "
                "make the optimizer, then call distribute"
            )
        if tensor.is_meta and not allow_meta:
            raise IncompatibleError(
                f"{name} is on the meta device and holds no numbers: allocate it by model.to_empty(device=…) and set "
                "its values, make the optimizer, then call distribute; sl.pipeline makes them stage by stage"
            )
        if size > 1 and not tensor.is_meta and torch._debug_has_internal_overlap(tensor) == OVERLAPS:
            raise IncompatibleError(
                f"several elements of {name} lie in one place in memory (as expand() makes them), so that it cannot be "
                "written to: give each its own by .contiguous(), then make the optimizer and call distribute"
            )
        if hasattr(tensor, "_in_backward_optimizers"):
            raise IncompatibleError(
                f"{name} has an optimizer that steps in backward (_apply_optimizer_in_backward), before the workers "
                "have averaged its gradient: step one optimizer after backward, and give that to distribute"
            )


def _warn_of_local_norms(model: nn.Module, world: World) -> None:
    """Warn of SyncBatchNorm without torch.distributed's default group: it then normalises each worker's own batch."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if not names or world.size == 1 or world.rank != 0:
        return
    if not importlib.import_module("syncline.transports.torch_dist.process_groups").has_default_group():
        logger.warning(
            "SyncBatchNorm (%s) stays local to each worker, because torch.distributed has no default process group: "
            "call sl.init(process_group=True), or take BatchNorm, whose statistics run.agreed() averages",
            ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        )


def momentum_of(optimizer: Optimizer) -> float:
    """The largest momentum of an optimizer, with Adam's first moment."""
    found = [0.0]
    for group in optimizer.param_groups:
        found.append(float(group.get("momentum", 0.0) or 0.0))
        betas = group.get("betas")
        found.append(float(betas[0]) if betas else 0.0)
    return max(found)


def describe_model(model: nn.Module) -> dict[str, str]:
    """Parameters and buffers, to compare between workers."""

    def kind(tensor: Any) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    parameters = {
        name: kind(parameter) + ("" if parameter.requires_grad else " (frozen)")
        for name, parameter in model.named_parameters()
    }
    return parameters | {f"buffer {name}": kind(buffer) for name, buffer in model.named_buffers()}


def describe_optimizer(optimizer: Optimizer) -> dict[str, str]:
    """Class and options of an optimizer, to compare between workers."""
    description = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                description[f"group {number}: parameters"] = str(len(value))
            elif value is None or isinstance(value, (bool, int, float, str, tuple)):
                description[f"group {number}: {key}"] = repr(value)
    return description
