"""`pipeline`: splits a model over the workers and trains it in micro-batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec, build_codec, check_optimizer_momentum
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.division_specs import DivisionSpec, read_divisions
from syncline.parallel.meta_model import check_initializers, has_meta_tensors, make_values
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import PipeDream, PipelineSchedule, build_schedule
from syncline.parallel.splitting import split, stage_container
from syncline.parallel.stage_runner import Recompute, check_split_backward
from syncline.parallel.stages import StageGraph
from syncline.parallel.tied_parameters import tied_ranks
from syncline.parallel.whole_model import WholeModel
from syncline.reduction import BUCKET_BYTES, Communicator, broadcast_tensors, check_collective, check_same
from syncline.strategies import Ensemble, RunSettings, Strategy, build_strategy
from syncline.training.distribute import (
    check_model,
    check_optimizers,
    check_options,
    check_parameters,
    describe_model,
    describe_optimizer,
    momentum_of,
)
from syncline.training.mesh import DivisionPlan, MeshGroups, check_division, check_optimizer_of_slices, plan_mesh
from syncline.training.pipeline_run import PipelineGroups, PipelineOptions, PipelineRun
from syncline.training.pipeline_stages import (
    Stages,
    as_tuple,
    cuts_of_one_worker,
    measure_stages,
    plan_stages,
)
from syncline.training.team_runs import attach_teams
from syncline.world import World, allreduce, broadcast_object, current_world
from syncline.world.mesh import Mesh

__all__ = ["check_strategy", "default_micro_batches", "pipeline"]

EXTRA_STATE = "_extra_state"
"""The last part of a name in a state dict: what `get_extra_state()` of the module returns."""
MICRO_BATCHES_PER_RANK = 4
"""The default number of micro-batches per pipeline rank. With equal stages the bubble of 1f1b is then below 1/5."""


def pipeline(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    stages: Stages = "auto",
    schedule: str | PipelineSchedule = "1f1b",
    microbatches: int | None = None,
    strategy: str | Strategy = "allreduce",
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    example: Any = None,
    recompute: Recompute = "never",
    clip_norm: float | None = None,
    scaler: Any = None,
    compile: bool = False,
    tracer: Literal["fx", "export"] = "fx",
    check_finite: bool = False,
    find_unused_parameters: bool = False,
    bucket_bytes: int | None = None,
    seed: int = 0,
    schedulers: Sequence[Any] = (),
    initialize: Callable[[nn.Module], object] | None = None,
    parallel: str | DivisionSpec | Sequence[str | DivisionSpec] = (),
) -> PipelineRun:
    """Train `model` with its layers split over the workers of the current world. Every worker calls it.

    Each batch is cut into `microbatches`, which pass through the stages one after another. `loss_fn(output, y)`
    returns the mean loss of a micro-batch. `stages` says where the model is cut:

    - a number of stages; each worker of a pipeline has several of them with interleaved and zbv. They are balanced by
      measured time with `example`, one input of the model, or a tuple of them; else by their numbers of parameters
    - the names of the modules with which stages 1, 2, … begin, such as ["blocks.4"] for two stages
    - a `StagePartition`, or the path of its file
    - a function that takes the measured `ModelProfile` and returns a `StagePartition`; it needs `example`
    - "auto": with `example` PipeDream's partition for this network, which may replicate stages; else as many stages as
      workers, balanced by their numbers of parameters

    If there are more workers than stages, each stage has several, which `strategy` and `codec` synchronise as in
    `distribute`. `schedule` is "1f1b", "gpipe", "interleaved(chunks=2)", "zero_bubble", "zbv" or "pipedream".
    `recompute` is "always", "except_last" or "never": whether activations are computed again instead of kept.
    `clip_norm` limits the norm of the gradients of the whole model. `scaler` is a GradScaler. `compile=True` compiles
    each stage by torch.compile. `tracer="export"` traces the model by torch.export instead of torch.fx. With
    `find_unused_parameters` a parameter that only some workers of a stage use in a step gets the mean over all of them;
    otherwise it is refused.

    `parallel` divides layers of the stages too, such as `sl.parallel.tensor(plan, size=2)`.

    A model that was made on the meta device never exists as a whole: each worker makes the values of its stages, by the
    `reset_parameters()` of each module or by `initialize(module)`, from `seed`.

    >>> import torch, syncline as sl
    >>> def train(world):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with sl.pipeline(model, optimizer, torch.nn.functional.mse_loss, stages=["2"], microbatches=2) as run:
    ...         return round(run.step(torch.ones(4, 4), torch.ones(4, 1)).item(), 4)
    >>> len(set(sl.simulate(train, ranks=2).results))
    1
    """
    world = current_world()
    plan = build_schedule(schedule)
    coder, built = build_codec(codec), build_strategy(strategy)
    _check_arguments(model, optimizer, loss_fn, microbatches, clip_norm, recompute)
    check_options(bucket_bytes, schedulers, seed)
    _check_combination(world, plan, built, optimizer, clip_norm, scaler, recompute, compile)
    check_model(model, world)
    check_parameters(model, world.size, allow_meta=True)
    check_optimizers(model, (optimizer,), built)
    made_values = has_meta_tensors(model)
    if made_values:
        check_initializers(model, initialize)
    if coder is not None:
        check_optimizer_momentum(coder, momentum_of(optimizer))
        built.check_codec(coder)
    check_collective(algorithm, coder)
    if microbatches is not None and plan.microbatches not in (None, microbatches):
        raise SpecError(f"microbatches={microbatches}, and the schedule is {plan!r}: give the number once")
    specs = read_divisions(parallel)
    division = _divide(model, stages, plan, microbatches, example, tracer, world.size)
    layers = None if division is None else _plan_layers(model, specs, division, world, built, optimizer)
    everyone = Communicator(world, "auto")  # until here nothing is sent
    check_same(everyone, "models", describe_model(model))
    check_same(everyone, "optimizers", describe_optimizer(optimizer))
    broadcast_tensors(everyone, [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta])
    if division is None:
        measured = measure_stages(model, stages, plan, everyone, example)
        division = _divide(model, measured, plan, microbatches, example, tracer, world.size)
        assert division is not None, "a measured partition needs no measurement"
        layers = _plan_layers(model, specs, division, world, built, optimizer)
    graph, placement, wanted = division
    chosen = {
        "cuts": ", ".join(graph.cuts),
        "replicas": str(placement.replicas),
        "schedule": repr(plan),
        "micro-batches": str(wanted),
        "strategy": repr(built),
        "codec": repr(coder),
        **({} if layers is None else layers.describe()),
        "algorithm": algorithm,
        "options": f"recompute={recompute}, clip_norm={clip_norm}, seed={seed}, check_finite={check_finite}, "
        f"find_unused_parameters={find_unused_parameters}, bucket_bytes={bucket_bytes}, scaler={type(scaler).__name__}",
    }
    check_same(everyone, "pipeline settings", chosen)
    settings = RunSettings(
        bucket_bytes=BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
        check_finite=check_finite,
        schedulers=tuple(schedulers),
        seed=seed,
        # With different numbers of workers per stage, one may have no micro-batch of a step.
        find_unused_parameters=find_unused_parameters or placement.unequal,
    )
    options = PipelineOptions(
        micro_batches=wanted,
        recompute=recompute,
        clip_norm=clip_norm,
        scaler=scaler,
        seed=seed,
        compile=compile,
        made_values=made_values,
        initialize=initialize,
        codec=None if coder is None else repr(coder),
        description=graph.describe(),
    )
    return _attach(
        model, optimizer, loss_fn, graph, placement, everyone, built, coder, algorithm, settings, options, layers
    )


def _plan_layers(
    model: nn.Module,
    specs: Sequence[DivisionSpec],
    division: tuple[StageGraph, PipelinePlacement, int],
    world: World,
    strategy: Strategy,
    optimizer: Optimizer,
) -> DivisionPlan | None:
    """How layers of the stages are divided; None: they are not. Nothing is sent."""
    cuts, replicas = division[0].cuts, division[1].replicas
    if not specs:
        return None
    if len(set(replicas)) > 1:
        raise IncompatibleError(
            f"stages with {list(replicas)} workers cannot divide layers, for which each stage needs as many: give a "
            "number of stages, or a partition with equal replicas"
        )
    found = plan_mesh(model, specs, world.size, pipeline=len(replicas))
    check_division(strategy, world)
    check_optimizer_of_slices((optimizer,), found.tensors)
    for layer in found.divisions:
        inside = next((cut for cut in cuts if cut.startswith(f"{layer.name}.")), None)
        if inside is not None:
            raise IncompatibleError(
                f"the cut {inside} lies inside {layer.name}, whose layers are divided together: cut before or after it"
            )
    return found if found.divisions else None


def _divide(
    model: nn.Module,
    stages: Stages,
    schedule: PipelineSchedule,
    microbatches: int | None,
    example: Any,
    tracer: Literal["fx", "export"],
    size: int,
) -> tuple[StageGraph, PipelinePlacement, int] | None:
    """The stages, their workers and the number of micro-batches; None if a measurement decides where to cut.

    It refuses what cannot work. Nothing is sent.
    """
    cuts, replicas = plan_stages(model, stages, schedule, size, example)
    inputs = None if example is None else as_tuple(example)
    graph = split(model, cuts or (), example=inputs, tracer=tracer)
    if replicas is None:
        return None
    placement = PipelinePlacement(schedule, replicas)
    wanted = microbatches or schedule.microbatches or default_micro_batches(placement)
    placement.check(wanted)
    if cuts is None:
        return None
    if size == 1 and len(graph.stages) > placement.stages:  # the cuts for several workers are checked, and not made
        graph = split(model, cuts_of_one_worker(cuts, placement.stages), example=inputs, tracer=tracer)
    _check_tied(graph, placement)
    return graph, placement, wanted


def _attach(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    graph: StageGraph,
    placement: PipelinePlacement,
    everyone: Communicator,
    strategy: Strategy,
    codec: Codec | None,
    algorithm: str,
    settings: RunSettings,
    options: PipelineOptions,
    plan: DivisionPlan | None,
) -> PipelineRun:
    world = everyone.world
    rank, replica = placement.position(world.rank)
    containers = [stage_container(graph, placement.stages_of(each)) for each in range(placement.ranks)]
    owners = _owners(model, containers)
    groups = _make_groups(world, placement, plan, algorithm)
    mine = {id(each) for each in (*containers[rank].parameters(), *containers[rank].buffers())}
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine |= {id(each) for name, each in tensors if name in graph.unused}
    if options.made_values:
        with _failing_together(everyone, "make the values of its stages"):
            make_values(model, mine, options.initialize, options.seed, world.device)
        team = Communicator(world, "auto", group=groups.stage)
        broadcast_tensors(team, [*containers[rank].parameters(), *containers[rank].buffers()])
    roots = [placement.team(each)[0] for each in range(placement.ranks)]
    saves = replica == 0 if groups.mesh is None else groups.mesh.position(world.rank)[1] == 0
    whole = WholeModel(model, optimizer, everyone, owners, mine, roots, rank, saves)
    divided, teams = None, None
    # In teams of different sizes, a stage with one worker sends no gradients, so it encodes none.
    encoded = codec if placement.replicas[rank] > 1 or not placement.unequal else None
    try:
        if plan is not None and groups.layers is not None:
            divided = plan.divide(model, optimizer, groups.layers, world, containers[rank])
        teams = attach_teams(
            strategy, containers[rank], optimizer, divided, groups.data, world, algorithm, encoded, settings
        )
        run = PipelineRun(whole, graph, placement, teams, everyone, groups, containers[rank], loss_fn, options, divided)
    except BaseException:
        if teams is not None:
            teams.release()
        if divided is not None:
            divided.roll_back()
        whole.roll_back()
        raise
    whole.commit()
    if divided is not None:
        divided.commit()
    if groups.mesh is not None:
        world.mesh = groups.mesh
    world.runs.append(run)
    return run


def _make_groups(
    world: World, placement: PipelinePlacement, plan: DivisionPlan | None, algorithm: str
) -> PipelineGroups:
    """This worker's groups. Every worker makes all of them, in the same order."""
    rank, replica = placement.position(world.rank)
    if plan is None:
        teams = [world.group(placement.team(each)) for each in range(placement.ranks)]
        count = 1 if placement.unequal else placement.replicas[0]
        pipelines = [world.group(placement.pipeline(each)) for each in range(count)]
        own = pipelines[0 if placement.unequal else replica]
        mesh = None if placement.unequal else Mesh(pipeline=placement.ranks, data=placement.replicas[0])
        seed = 0 if placement.unequal else replica
        return PipelineGroups(teams[rank], {"whole": teams[rank]}, own, own, seed, mesh)
    layers = MeshGroups.make(world, plan, algorithm)
    stages = [world.group(placement.team(each)) for each in range(placement.ranks)]
    _, data, shared, _ = plan.mesh.position(world.rank)
    seed = data * plan.mesh.shared + shared
    return PipelineGroups(stages[rank], layers.data, layers.pipeline, layers.model_parallel, seed, plan.mesh, layers)


@contextmanager
def _failing_together(everyone: Communicator, what: str) -> Iterator[None]:
    """If one worker fails inside, all raise its error. Every worker enters it."""
    found: IncompatibleError | None = None
    try:
        yield
    except Exception as error:
        found = IncompatibleError(f"rank {everyone.rank} could not {what}: {error}")
        found.__cause__ = error
    failed = torch.tensor(-1 if found is None else everyone.rank)
    first = int(allreduce(failed, op="max", group=everyone.group)) if everyone.size > 1 else int(failed)
    if first >= 0:
        text = broadcast_object(str(found), first, group=everyone.group) if everyone.size > 1 else str(found)
        raise found or IncompatibleError(text)


def _owners(model: nn.Module, containers: Sequence[nn.Module]) -> dict[str, int]:
    """The pipeline rank that owns each tensor, by the first of its names, and each module's extra state."""
    owners: dict[str, int] = {}
    for rank, container in enumerate(containers):
        for name, _ in (*container.named_parameters(remove_duplicate=False), *container.named_buffers()):
            owners.setdefault(name, rank)
    found = _owners_by_first_name(model, owners)
    for rank, container in enumerate(containers):
        for name, _ in container.named_modules():
            found.setdefault(f"{name}.{EXTRA_STATE}".lstrip("."), rank)
    return found


def _owners_by_first_name(model: nn.Module, owners: dict[str, int]) -> dict[str, int]:
    """The owner of each tensor by the first of its names: a tied parameter has several."""
    found: dict[str, int] = {}
    names: dict[int, list[str]] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    for several in names.values():
        ranks = [owners[name] for name in several if name in owners]
        found[several[0]] = min(ranks) if ranks else 0  # no stage uses it: all workers keep it
    return found


def _check_arguments(
    model: object, optimizer: object, loss_fn: object, microbatches: object, clip_norm: object, recompute: object
) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer) or not callable(loss_fn):
        kinds = ", ".join(type(each).__name__ for each in (model, optimizer, loss_fn))
        raise SpecError(f"pipeline(model, optimizer, loss_fn) takes a module, an optimizer and a function, not {kinds}")
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        raise SpecError(f"microbatches must be a whole number, at least 1, not {microbatches!r}")
    if clip_norm is not None and (not isinstance(clip_norm, (int, float)) or not clip_norm > 0):
        raise SpecError(f"clip_norm={clip_norm!r}: a norm above 0, or None")
    if recompute not in ("always", "except_last", "never"):
        raise SpecError(f"recompute={recompute!r}: one of 'always', 'except_last', 'never'")


def _check_combination(
    world: World,
    schedule: PipelineSchedule,
    strategy: Strategy,
    optimizer: Optimizer,
    clip_norm: float | None,
    scaler: Any,
    recompute: str,
    compile: bool,
) -> None:
    """Refuse what cannot work together, before anything is sent."""
    if world.elastic is not None:
        raise IncompatibleError("a pipeline needs the same workers from its start to its end: leave --elastic out")
    check_strategy(strategy)
    step = inspect.signature(type(optimizer).step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise IncompatibleError(
            f"{type(optimizer).__name__} calls the loss function several times in a step, and a pipeline computes each "
            "batch once: take an optimizer whose step() needs no closure"
        )
    if isinstance(schedule, PipeDream) and (clip_norm is not None or scaler is not None):
        what = "clip_norm" if clip_norm is not None else "scaler"
        raise IncompatibleError(
            f"{schedule!r} updates each stage at another time, so that {what}= has no gradients of the whole model to "
            "look at: take 1f1b or another schedule that empties the pipeline"
        )
    if schedule.splits_backward and recompute != "never":
        raise IncompatibleError(
            f"{schedule!r} divides the backward pass of kept activations, and recompute={recompute!r} keeps none: take "
            "1f1b, gpipe or interleaved"
        )
    if compile and (schedule.splits_backward or not schedule.flushes):
        raise IncompatibleError(
            f"compile=True: {schedule!r} needs the autograd graph of each layer, which torch.compile merges: take "
            "1f1b, gpipe or interleaved"
        )
    if schedule.splits_backward:
        check_split_backward()


def default_micro_batches(placement: PipelinePlacement) -> int:
    """The number of micro-batches if none is given: four for each pipeline rank, or more if the schedule needs it."""
    least = MICRO_BATCHES_PER_RANK * placement.ranks
    for count in range(least, least + math.lcm(*placement.replicas)):
        try:
            placement.check(count)
        except SpecError:
            continue
        return count
    return least


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy that cannot synchronise the workers of a stage."""
    if strategy.asynchronous:
        raise IncompatibleError(
            f"{strategy!r} lets each worker train at its own pace, and the stages of a pipeline wait for each other: "
            "take a synchronous strategy such as allreduce, local or diloco"
        )
    if isinstance(strategy, Ensemble):
        raise IncompatibleError(
            f"{strategy!r} evaluates the models of all workers, and no worker of a pipeline has one: take average, "
            "which has one model at the end"
        )


def _check_tied(graph: StageGraph, placement: PipelinePlacement) -> None:
    apart = [tie for tie in graph.tied if len(tied_ranks(tie, placement)) > 1]
    if apart and not placement.schedule.flushes:
        raise IncompatibleError(
            f"{apart[0].names[0]} is used by stages {list(apart[0].stages)}, and {placement.schedule!r} updates each "
            "stage at another time: cut the model so that one stage uses it, or take another schedule"
        )
