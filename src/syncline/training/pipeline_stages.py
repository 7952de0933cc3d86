"""How `pipeline` chooses where a model is cut, and how many workers each stage has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any

from torch import nn

from syncline.errors import SpecError, SynclineError
from syncline.parallel.meta_model import has_meta_tensors
from syncline.parallel.partition import LayerCost, ModelProfile, StagePartition, balanced, pipedream_for_network
from syncline.parallel.profile import profile_model
from syncline.parallel.schedules import PipelineSchedule
from syncline.parallel.splitting import layer_names
from syncline.reduction import Communicator
from syncline.world import broadcast_object

__all__ = [
    "AUTO",
    "Partitioner",
    "Stages",
    "as_tuple",
    "cuts_of_one_worker",
    "measure_stages",
    "open_partition",
    "parse_stages",
    "plan_stages",
    "planned_replicas",
]

logger = logging.getLogger("syncline")

AUTO = "auto"
Partitioner = Callable[[ModelProfile], StagePartition]
"""A function that chooses the stages by the measured costs of the layers."""
Stages = int | str | Sequence[str] | StagePartition | PathLike[str] | Partitioner


def plan_stages(
    model: nn.Module, stages: Stages, schedule: PipelineSchedule, size: int, example: Any
) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
    """The cuts, and the workers of each pipeline rank; None for what a measurement decides. Nothing is sent.

    It refuses stages that do not fit, and a model that cannot be traced for a measurement.
    """
    stages, meta = open_partition(stages), has_meta_tensors(model)
    if callable(stages) and (example is None or meta):
        why = "example= is missing" if example is None else "a model on the meta device cannot be measured"
        raise SpecError(
            f"stages={stages!r} chooses by the measured costs of the layers, and {why}: give an example of the input "
            "of a model that has values, or the file of a partition"
        )
    if meta and stages == AUTO and example is not None:
        raise SpecError(
            'stages="auto" with an example measures the layers, and this model on the meta device has no values: '
            "leave example out, or give a number of stages, names of modules or the file of a partition"
        )
    inputs = None if example is None or meta else as_tuple(example)  # on the meta device nothing can be measured
    if inputs is not None and _chooses_replicas(stages, schedule, size):
        layer_names(model, example=inputs)
        return None, None
    replicas = planned_replicas(stages, schedule, size)
    if isinstance(stages, StagePartition):
        return stages.cuts, replicas
    if not isinstance(stages, (int, str, PathLike)):
        assert not callable(stages), "a function chooses the replicas too"
        return tuple(stages), replicas
    count = len(replicas) * schedule.stages_per_rank
    if count == 1:
        return (), replicas
    names = layer_names(model, stages=count, example=inputs)
    if inputs is not None:
        return None, replicas
    found = balanced(_parameter_costs(model, names), count)
    return found.cuts, replicas


def measure_stages(
    model: nn.Module, stages: Stages, schedule: PipelineSchedule, everyone: Communicator, example: Any
) -> StagePartition:
    """The partition where a measurement decides. Every worker calls it; rank 0 measures and decides."""
    size, inputs = everyone.size, as_tuple(example)
    if callable(stages):
        partitioner = stages
        return _decide(everyone, lambda: _ask(partitioner, _profile(model, inputs, 1)))
    if _chooses_replicas(stages, schedule, size):
        network = everyone.group.auto.network()  # every worker asks for it, because it may be measured now
        return _decide(
            everyone, lambda: pipedream_for_network(_profile(model, inputs, 1), size, network, overlap=False)
        )
    replicas = planned_replicas(stages, schedule, size)
    count = len(replicas) * schedule.stages_per_rank
    return _decide(everyone, lambda: balanced(_profile(model, inputs, count), count))


def _chooses_replicas(stages: Stages, schedule: PipelineSchedule, size: int) -> bool:
    """Whether a measurement, if there is an example, decides how many workers each stage has."""
    return callable(stages) or (
        stages == AUTO and schedule.stages_per_rank == 1 and schedule.unequal_replicas and size > 1
    )


def _ask(partitioner: Partitioner, profile: ModelProfile) -> StagePartition:
    """The partition that a function of the user chooses."""
    found = partitioner(profile)
    if not isinstance(found, StagePartition):
        raise SpecError(f"stages={partitioner!r} must return a StagePartition, not {type(found).__name__}")
    return found


def planned_replicas(stages: Stages, schedule: PipelineSchedule, size: int) -> tuple[int, ...]:
    """The workers of each pipeline rank, if no measurement decides. Refuses what does not fit `size` workers."""
    chunks, stages = schedule.stages_per_rank, open_partition(stages)
    if isinstance(stages, StagePartition) and size > 1:
        return _replicas_of(stages, schedule, size)
    if isinstance(stages, StagePartition):
        stages = stages.cuts
    if isinstance(stages, bool) or not isinstance(stages, (int, str, Sequence)):
        raise SpecError(
            "stages must be a number of stages, a list of module names, a partition or its file, a function that makes "
            f"a partition, or 'auto', not {stages!r}"
        )
    if not isinstance(stages, (int, str)):
        count, what = len(stages) + 1, f"{len(stages)} cuts make {len(stages) + 1} stages"
    else:
        count, what = size * chunks if stages == AUTO else int(stages), f"stages={stages!r}"
    if size == 1 and count > chunks:
        logger.info("one worker: it trains the model in %d stage%s, although %s", chunks, "s" * (chunks > 1), what)
        count = chunks
    return _equal_replicas(count, chunks, size, what)


def cuts_of_one_worker(cuts: Sequence[str], stages: int) -> tuple[str, ...]:
    """Of the cuts for several workers, those that make as many stages as the schedule needs on one worker.

    >>> cuts_of_one_worker(["a", "b", "c"], 2), cuts_of_one_worker(["a", "b", "c"], 1)
    (('b',), ())
    """
    return tuple(cuts[place * (len(cuts) + 1) // stages - 1] for place in range(1, stages))


def parse_stages(text: str) -> Stages:
    """Stages as a command line names them: a number, names of modules, the file of a partition, or "auto".

    >>> parse_stages("2"), parse_stages("blocks.2,head"), parse_stages("4,"), parse_stages("plan.json")
    (2, ['blocks.2', 'head'], ['4'], 'plan.json')
    """
    text = text.strip()
    if text == AUTO or text.endswith(".json"):
        return text
    if text.isdecimal():
        return int(text)
    names = [name.strip() for name in text.split(",")]
    names = names[:-1] if len(names) > 1 and not names[-1] else names  # "4," is the module 4, not four stages
    if not all(names):
        raise SpecError(f"stages {text!r}: write a number, names of modules with commas between them, or a .json file")
    return names


def open_partition(stages: Stages) -> Stages:
    """A partition instead of its file."""
    if isinstance(stages, (str, PathLike)) and stages != AUTO:
        return StagePartition.read(fspath(stages))
    return stages


def _equal_replicas(stages: int, chunks: int, size: int, what: str) -> tuple[int, ...]:
    if stages < 1 or stages % chunks:
        possible = [chunks * ranks for ranks in range(1, size + 1) if size % ranks == 0]
        near = [each for each in possible if each < stages][-1:] + [each for each in possible if each > stages][:1]
        each = f"gives each worker of a pipeline {chunks} of them" if chunks > 1 else "needs at least one"
        raise SpecError(
            f"{what}, and the schedule {each}: use {' or '.join(map(str, near))} stage{'s' * (near != [1])} with "
            f"{size} worker{'s' * (size > 1)}"
        )
    if size % (stages // chunks):
        each = f", {chunks} for each worker of a pipeline" if chunks > 1 else ""
        ranks = stages // chunks
        raise SpecError(
            f"{what}{each}: the number of workers must be a multiple of {ranks}, and there are {size}: start them by "
            f"syncline run -n {ranks} script.py, or use a number of stages that divides {size * chunks}"
            f"{f' and is a multiple of {chunks}' if chunks > 1 else ''}"
        )
    ranks = stages // chunks
    return (size // ranks,) * ranks


def _replicas_of(partition: StagePartition, schedule: PipelineSchedule, size: int) -> tuple[int, ...]:
    if partition.workers != size or schedule.stages_per_rank != 1:
        if len(set(partition.replicas)) == 1:  # the same cuts serve other numbers of workers
            return _equal_replicas(partition.stages, schedule.stages_per_rank, size, f"the partition {partition}")
        raise SpecError(
            f"the partition {partition} is for {partition.workers} workers with one stage each, and there are {size}, "
            f"with {schedule.stages_per_rank} each: change its replicas, or start {partition.workers} workers"
        )
    if partition.layers or list(partition.placement) != sorted(partition.placement):
        raise SpecError(
            f"the partition {partition} has its own placement or branches that run side by side: remove 'layers' and "
            "'placement' from its file, so that stages follow each other"
        )
    return partition.replicas


def _profile(model: nn.Module, inputs: tuple[Any, ...], stages: int) -> ModelProfile:
    """The measured costs of the layers."""
    return profile_model(model, inputs, names=layer_names(model, stages=stages, example=inputs))


def _parameter_costs(model: nn.Module, names: Sequence[str]) -> ModelProfile:
    """Costs of the layers in proportion to their parameters."""
    sizes = {name: sum(each.nbytes for each in model.get_submodule(name).parameters()) for name in names}
    layers = tuple(
        LayerCost(name=name, forward_s=float(size), backward_s=0.0, activation_bytes=0.0, parameter_bytes=size)
        for name, size in sizes.items()
    )
    return ModelProfile(layers=layers, batch_size=1)


def _decide(everyone: Communicator, choose: Callable[[], StagePartition]) -> StagePartition:
    """The partition that rank 0 chooses by its measurement: another rank would measure other times."""
    chosen: dict[str, Any] = {}
    if everyone.rank == 0:
        try:
            found = choose()
            chosen = {name: list(getattr(found, name)) for name in ("cuts", "replicas", "placement", "layers")}
            chosen["text"] = found.describe()
        except SynclineError as error:
            chosen = {"error": str(error)}
        except Exception as error:  # the others wait for the answer
            logger.exception("the stages could not be chosen")
            chosen = {"error": f"the stages could not be chosen on rank 0: {type(error).__name__}: {error}"}
    shared: dict[str, Any] = broadcast_object(chosen, 0, group=everyone.group) if everyone.size > 1 else chosen
    if "error" in shared:
        raise SpecError(shared["error"])
    if everyone.rank == 0:
        logger.info("%s", shared["text"])
    layers = tuple(tuple(names) for names in shared["layers"])
    return StagePartition(tuple(shared["cuts"]), tuple(shared["replicas"]), tuple(shared["placement"]), layers)


def as_tuple(example: Any) -> tuple[Any, ...]:
    """The inputs of a model as a tuple."""
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)
