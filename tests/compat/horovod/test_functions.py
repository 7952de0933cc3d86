"""Parameters, optimizer states and objects of one rank, on all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.compat.horovod.context import ProcessSet, init, shutdown
from syncline.compat.horovod.errors import NotInitializedError
from syncline.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from syncline.errors import IncompatibleError
from syncline.testing import Pool
from tests.compat.horovod.training import loss_of, wrapped
from tests.strategies.cases import backward, flat, mlp, on_gloo


class Rich(nn.Module):
    """Parameters of several kinds, buffers, and state that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.body = mlp(seed)
        self.norm = nn.BatchNorm1d(3)
        self.narrow = nn.Parameter(torch.randn(4, generator=draw).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(2, 3, generator=draw).double().t())
        self.register_buffer("count", torch.tensor(seed))
        self.seed = seed

    def get_extra_state(self) -> Any:
        return {"seed": self.seed}

    def set_extra_state(self, state: Any) -> None:
        self.seed = state["seed"]


@pytest.mark.parametrize("how", ["state_dict", "named", "list", "generator"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters(how: str, ranks: int) -> None:
    root = ranks - 1

    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = Rich(world.rank)
        given: Any = model.state_dict() if how == "state_dict" else list(model.named_parameters())
        if how == "list":
            given = list(model.parameters())
        broadcast_parameters(model.named_parameters() if how == "generator" else given, root_rank=root)
        return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}

    wanted = Rich(root).state_dict()
    for found in sl.simulate(case, ranks=ranks).results:
        for name, value in found.items():
            if how == "state_dict" or name in dict(Rich(0).named_parameters()):
                assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("given", [torch.ones(2), "weights", 7, [(1, 2, 3)], None])
def test_what_are_no_parameters(given: Any) -> None:
    def case(world: sl.World) -> None:
        init()
        broadcast_parameters(given, root_rank=0)

    for found in sl.simulate(case, ranks=2, return_exceptions=True).results:
        assert isinstance(found, IncompatibleError)
        assert "broadcast_parameters" in str(found)


KINDS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), betas=(0.8, 0.9), amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def advance(model: nn.Module, optimizer: Any, rank: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        backward(loss)
        return loss

    optimizer.step(closure)


def same_tree(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same_tree(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same_tree(a, b) for a, b in zip(first, second, strict=True))
    return type(first) is type(second) and bool(first == second)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", [[0], [1], [0, 1, 2], []], ids=str)
def test_optimizer_state_whatever_the_others_hold(kind: str, who: list[int]) -> None:
    def case(world: sl.World) -> Any:
        init()
        model = mlp()
        optimizer = KINDS[kind](model.parameters())
        if world.rank in who:
            for _ in range(1 + world.rank):
                advance(model, optimizer, world.rank)
        optimizer.param_groups[0]["lr"] = 0.25 * (1 + world.rank)
        if world.rank == 0:
            before = optimizer.state_dict()
            broadcast_optimizer_state(optimizer, root_rank=0)
            assert same_tree(optimizer.state_dict(), before)
        else:
            broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
        return optimizer.state_dict()

    results = sl.simulate(case, ranks=3).results
    assert results[0]["param_groups"][0]["lr"] == 0.25
    assert bool(results[0]["state"]) == (0 in who and kind != "sgd") or kind == "adagrad"
    for found in results[1:]:
        assert same_tree(found, results[0])


def test_optimizer_state_that_only_the_root_has() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if world.rank == 0:  # as after a checkpoint that the root alone reads
            backward(loss_of(model, 0, 0))
            plain.step()
        optimizer = wrapped(model, plain)
        broadcast_parameters(model.state_dict(), root_rank=0)
        broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(found, results[0]) for found in results)


def test_the_state_is_sent_again_after_a_new_init() -> None:
    """The root loads nothing, and yet must meet those who do."""

    def case(world: sl.World) -> float:
        init()
        model = mlp()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1 + world.rank, momentum=0.9))
        optimizer.zero_grad()
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        shutdown()
        init()
        broadcast_optimizer_state(optimizer, root_rank=0)
        broadcast_object(None, root_rank=0)
        return float(optimizer.param_groups[0]["lr"])

    assert sl.simulate(case, ranks=3).results == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_objects(ranks: int) -> None:
    root = ranks // 2

    def case(world: sl.World) -> tuple[Any, Any, Any]:
        init()
        mine = {"rank": world.rank, "long": "x" * (1000 * world.rank), "set": {world.rank}}
        first = broadcast_object(mine if world.rank == root else None, root_rank=root)
        second = broadcast_object_fn(root_rank=root, name="again")(mine)
        return first, second, allgather_object(mine, name="all")

    for first, second, gathered in sl.simulate(case, ranks=ranks).results:
        assert first == second == {"rank": root, "long": "x" * (1000 * root), "set": {root}}
        assert [found["rank"] for found in gathered] == list(range(ranks))
        assert [len(found["long"]) for found in gathered] == [1000 * rank for rank in range(ranks)]


def test_objects_within_a_process_set() -> None:
    def case(world: sl.World) -> Any:
        pair = ProcessSet([0, 2])
        init(process_sets=[pair])
        if not pair.included():
            return None
        return broadcast_object(world.rank, 2, process_set=pair), allgather_object(world.rank, process_set=pair)

    assert sl.simulate(case, ranks=3).results == ((2, [0, 2]), None, (2, [0, 2]))


def test_what_cannot_be_sent_is_refused_on_every_rank() -> None:
    def case(world: sl.World, gather: bool) -> Any:
        init()
        mine: Any = nn.Linear(1, 1) if world.rank == 1 else 3
        with pytest.raises(IncompatibleError, match=r"rank 1: .*Linear.*state_dict"):
            allgather_object(mine) if gather else broadcast_object(mine, root_rank=1)
        return allgather_object(world.rank)  # all goes on

    for gather in (False, True):
        assert sl.simulate(partial(case, gather=gather), ranks=3).results == ([0, 1, 2],) * 3


def test_before_init() -> None:
    def case(world: sl.World) -> None:
        for call in (broadcast_object, allgather_object):
            with pytest.raises(NotInitializedError):
                call(1)
        with pytest.raises(NotInitializedError):
            broadcast_parameters({"a": torch.ones(1)}, root_rank=0)

    sl.simulate(case, ranks=2)


@pytest.mark.xdist_group("gloo")
def test_on_gloo(gloo: Pool) -> None:
    for found, gathered in gloo.run(on_gloo, 3, _on_gloo):
        assert torch.equal(found["w"], torch.full((3, 2), 1.0))
        assert gathered == [0, 1, 2]


def _on_gloo(world: sl.World) -> tuple[Any, list[Any]]:
    init()
    found = broadcast_object({"w": torch.full((3, 2), float(world.rank))}, root_rank=1)
    gathered = allgather_object(world.rank)
    shutdown()
    return found, gathered
