"""Which workers divide which layers: the mesh of a run, and its groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.optim import LAMB, LARS
from syncline.parallel.divided_model import DividedModel, DividedTensor, divided_tensors
from syncline.parallel.division import LayerDivision
from syncline.parallel.division_specs import DivisionSpec
from syncline.parallel.team import LayerTeam
from syncline.strategies import Ensemble, Strategy
from syncline.training.team_runs import make_data_groups
from syncline.world import Group, World
from syncline.world.mesh import Mesh

__all__ = ["DivisionPlan", "MeshGroups", "check_division", "check_optimizer_of_slices", "plan_mesh"]

logger = logging.getLogger("syncline")

WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "Muon", "LBFGS")
"""Names of torch's optimizers whose update of an element depends on the whole tensor, or on all parameters."""


@dataclass(frozen=True)
class DivisionPlan:
    """How the layers of a model are divided, before anything is changed."""

    mesh: Mesh
    divisions: tuple[LayerDivision, ...] = ()
    tensors: tuple[DividedTensor, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """The kinds of parameters that are reduced separately."""
        mesh = self.mesh
        several = mesh.data * mesh.shared > 1
        return ["whole", *(["tensor"] if mesh.tensor > 1 and several else []), *(["shared"] if mesh.shared > 1 else [])]

    def describe(self) -> dict[str, str]:
        """For config.json, and to compare between workers."""
        return {"mesh": str(self.mesh), **{each.name: type(each).__name__ for each in self.divisions}}

    def divide(
        self, model: nn.Module, optimizer: Optimizer, groups: MeshGroups, world: World, stage: nn.Module | None = None
    ) -> DividedModel | None:
        """Divide the layers. With a pipeline only those of this worker's `stage`, a container of its parameters."""
        divisions, tensors = self.divisions, self.tensors
        if stage is not None:
            here = {id(each) for each in (*stage.parameters(), *stage.buffers())}
            divisions = tuple(each for each in divisions if any(id(p) in here for p in each.module.parameters()))
            tensors = tuple(each for each in tensors if id(each.tensor) in here)
        if not self.divisions:
            return None
        places = dict(zip(("tensor", "shared"), self.mesh.position(world.rank)[:1:-1], strict=True))
        divided = DividedModel(model, optimizer, divisions, tensors, groups.layer_teams, places)
        divided.scale_shared_gradients()
        return divided


@dataclass(frozen=True)
class MeshGroups:
    """The groups of one worker in a mesh. All workers make all groups, in the same order."""

    data: Mapping[str, Group]
    """The workers that reduce a kind of parameters. See `DivisionPlan.kinds`."""
    layer_teams: Mapping[str, LayerTeam]
    """The workers that divide layers, by axis."""
    model_parallel: Group
    """The model-parallel group: the workers that together have one copy of the model."""
    pipeline: Group
    """The workers of a pipeline; this worker alone without one."""

    @classmethod
    def make(cls, world: World, plan: DivisionPlan, algorithm: str) -> MeshGroups:
        """Make the groups. Every worker calls it."""
        mesh = plan.mesh
        data = make_data_groups(world, mesh, plan.kinds)
        teams = {
            axis: LayerTeam(_make_own_group(world, mesh.teams(axis)), algorithm)
            for axis in ("tensor", "shared")
            if any(division.axis == axis for division in plan.divisions)
        }
        pipeline = _make_own_group(world, mesh.teams("pipeline"))
        model_parallel = _make_own_group(world, mesh.teams("pipeline", "shared", "tensor")) if teams else pipeline
        return cls(data, teams, model_parallel, pipeline)


def _make_own_group(world: World, teams: Sequence[tuple[int, ...]]) -> Group:
    """Make the groups of all teams. Returns the group of this worker."""
    groups = [world.group(ranks) for ranks in teams]
    return next(group for group, ranks in zip(groups, teams, strict=True) if world.rank in ranks)


def plan_mesh(model: nn.Module, specs: Sequence[DivisionSpec], workers: int, pipeline: int = 1) -> DivisionPlan:
    """Arrange the workers, and check that every layer can be divided. Sends nothing. One worker divides nothing.

    There may be several specs along "tensor", such as images and dense layers over the same workers.
    """
    if workers == 1:
        logger.info("one worker: no layer is divided, and the model trains as it is")
        return DivisionPlan(Mesh())
    sizes: dict[str, int] = {}
    available = workers // pipeline
    for spec in sorted(specs, key=lambda each: each.axis, reverse=True):  # "tensor" before "shared"
        left = available if spec.axis == "tensor" else available // sizes.get("tensor", 1)
        size = spec.workers(model, left)
        if sizes.setdefault(spec.axis, size) != size:
            raise SpecError(
                f"{type(spec).__name__} is for {size} workers, and another division of the same axis of the mesh for "
                f"{sizes[spec.axis]}: give both the same size"
            )
    mesh = Mesh.fit(workers, pipeline=pipeline, shared=sizes.get("shared", 1), tensor=sizes.get("tensor", 1))
    used = [spec for spec in specs if sizes[spec.axis] > 1]
    divisions = [division for spec in used for division in spec.divisions(model, sizes[spec.axis])]
    _check_overlaps(divisions)
    for division in divisions:
        division.check(sizes[division.axis])
    return DivisionPlan(mesh, tuple(divisions), tuple(divided_tensors(divisions, sizes)))


def _check_overlaps(divisions: Sequence[LayerDivision]) -> None:
    """Refuse a module that two specs divide."""
    known: dict[int, LayerDivision] = {}
    for division in divisions:
        other = known.setdefault(id(division.module), division)
        if other is not division:
            raise SpecError(
                f"{division.name} would be divided twice, by {type(other).__name__} and {type(division).__name__}: "
                "leave it out of one plan"
            )


def check_division(strategy: Strategy, world: World) -> None:
    """Refuse what cannot work with divided layers."""
    if world.elastic is not None:
        raise IncompatibleError(
            "no other worker has the part of a layer that a lost one had: leave --elastic out, or train without "
            "divided layers"
        )
    if strategy.asynchronous:
        raise IncompatibleError(
            f"{strategy!r} lets each worker train at its own pace, and the workers that divide a layer compute it "
            "together: take a synchronous strategy such as allreduce, local or diloco"
        )
    if isinstance(strategy, Ensemble):
        raise IncompatibleError(
            f"{strategy!r} evaluates the models of all workers, and no worker has a whole one: take average, which has "
            "one model at the end"
        )


def check_optimizer_of_slices(optimizers: Sequence[Optimizer], tensors: Sequence[DividedTensor]) -> None:
    """Refuse an optimizer whose update of a slice is not a slice of its update of the whole."""
    if len(optimizers) > 1:
        raise IncompatibleError(
            f"a model with divided layers takes one optimizer, and there are {len(optimizers)}: give one with several "
            "parameter groups"
        )
    optimizer = optimizers[0]
    sliced = next((each.name for each in tensors if any(each.cuts)), None)
    kind = type(optimizer).__name__
    if sliced is not None and (isinstance(optimizer, (LARS, LAMB)) or kind in WHOLE_TENSOR_OPTIMIZERS):
        raise IncompatibleError(
            f"{kind} computes an update from the whole of a parameter, and each worker has only a slice of {sliced}: "
            "take an optimizer that treats each element alone, such as SGD or AdamW"
        )
