"""Which parameters take part, and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reduction.ddp.sides import STEPS, Side, case, gradients, net
from tests.strategies.cases import backward


class Heads(nn.Module):
    """A body, and heads of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        result: Tensor = self.heads[head](self.body(x))
        return result


@case("A parameter that no rank uses")
def unused(side: Side) -> Any:
    return side.passes(side.attach(Heads()), 0)


@case("A parameter that no rank uses, find_unused_parameters=True")
def unused_found(side: Side) -> Any:
    return side.passes(side.attach(Heads(), find_unused_parameters=True), 0)


@case("A parameter that some ranks use", hangs=True)
def partly_used(side: Side) -> Any:
    return side.passes(side.attach(Heads()), side.rank)


@case("A parameter that some ranks use, find_unused_parameters=True")
def partly_used_found(side: Side) -> Any:
    module = side.attach(model := Heads(), find_unused_parameters=True)
    found = []
    for step in range(5):
        side.optimizer.zero_grad()
        backward(module(side.batch(step), (step * side.rank) % 3).square().mean())
        found.append(gradients(model))
        side.optimizer.step()
    return found, model.state_dict()


@case("The same without zero_grad between passes")
def partly_used_added(side: Side) -> Any:
    module = side.attach(model := Heads(), find_unused_parameters=True)
    found = []
    for step in range(5):
        backward(module(side.batch(step), (step * side.rank) % 3).square().mean())
        found.append(gradients(model))
    return found


@case("The same under no_sync")
def partly_used_accumulated(side: Side) -> Any:
    module = side.attach(model := Heads(), find_unused_parameters=True)
    with side.no_sync():
        backward(module(side.batch(), side.rank).square().mean())
    backward(module(side.batch(1), 2).square().mean())
    return gradients(model)


@case("Layers change from step to step, on all ranks alike")
def dynamic(side: Side) -> Any:
    module = side.attach(Heads())
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(module(side.batch(step), step).square().mean())
    return gradients(getattr(module, "module", module))


@case("An output of forward that the loss leaves out")
def output_left_out(side: Side) -> Any:
    class AllHeads(Heads):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return [head(self.body(x)) for head in self.heads]

    model = AllHeads()
    module = side.attach(model)
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(module(side.batch(step))[0].square().mean())
    return gradients(model)


@case("Frozen from the start")
def frozen(side: Side) -> Any:
    model = net()
    model[0].requires_grad_(False)
    side.steps(side.attach(model))
    return model.state_dict()


@case("Frozen later")
def frozen_later(side: Side) -> Any:
    module = side.attach(model := net())
    for step in range(STEPS):
        model[0].requires_grad_(step == 0)
        side.optimizer.zero_grad()
        backward(module(side.batch(step)).square().mean())
    return gradients(model)


@case("Unfrozen later")
def thawed(side: Side) -> Any:
    model = net()
    model[0].requires_grad_(False)
    module = side.attach(model)
    model[0].requires_grad_(True)
    return side.passes(module)


@case("Every parameter is frozen")
def all_frozen(side: Side) -> Any:
    side.attach(net().requires_grad_(False))


@case("Parameters added to model and optimizer later")
def added(side: Side) -> Any:
    module = side.attach(model := net())
    model.append(extra := nn.Linear(3, 1))
    side.optimizer.add_param_group({"params": list(extra.parameters())})
    side.steps(module)
    return gradients(model)


@case("requires_grad differs between ranks")
def frozen_on_one(side: Side) -> Any:
    model = net()
    model[0].weight.requires_grad_(side.rank == 0)
    side.attach(model)


@case("Shapes differ between ranks", hangs=True)
def shapes(side: Side) -> Any:
    side.attach(nn.Linear(4, 2 + side.rank))


@case("The names of parameters differ between ranks")
def names(side: Side) -> Any:
    model = nn.Module()
    for name in "ab" if side.rank else "ba":
        model.register_parameter(name, nn.Parameter(torch.full((1,), float(ord(name)))))
    side.attach(model)
    return dict(model.named_parameters())


@case("Sparse gradients of an embedding")
def sparse(side: Side) -> Any:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    module = side.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(module(torch.tensor([step, 2 + side.rank, 2])).square().mean())
        side.optimizer.step()
    return model.state_dict()


@case("A part of the model, the rest local", alike=False)
def part(side: Side) -> Any:
    model = net()
    first = side.attach(model[0])
    backward(model[2](torch.tanh(first(side.batch()))).square().mean())
    return gradients(model)


@case("Lazy modules")
def lazy(side: Side) -> Any:
    model = nn.Sequential(nn.LazyLinear(3))
    side.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@case("Parameters on the meta device")
def meta(side: Side) -> Any:
    side.attach(nn.Linear(4, 2, device="meta"))


@case("A parametrization after wrapping")
def parametrized_later(side: Side) -> Any:
    module = side.attach(model := net())
    nn.utils.parametrizations.weight_norm(model[0])
    return side.passes(module)


@case("load_state_dict(assign=True) and a new optimizer after wrapping")
def assigned(side: Side) -> Any:
    module = side.attach(model := net())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    side.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.steps(module)
    for run in side.runs:
        with run.agreed():
            pass
    return model.state_dict()


@case("load_state_dict after wrapping, with torch.__future__.set_swap_module_params_on_conversion(True)")
def swapped(side: Side) -> Any:
    module = side.attach(model := net())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    side.steps(module)
    return model.state_dict()


@case("model.double() after wrapping")
def converted(side: Side) -> Any:
    module = side.attach(model := net())
    model.double()
    backward(module(side.batch().double()).square().mean())
    return gradients(model)


def normed(side: Side, **options: Any) -> nn.Module:
    model = net(nn.BatchNorm1d(6))
    side.steps(side.attach(model, **options))
    return model


@case("Batch norm's statistics while training", alike=False)
def buffers(side: Side) -> Any:
    return dict(normed(side).named_buffers())


@case("Batch norm's statistics, forward_sync_buffers=False", alike=False)
def local_buffers(side: Side) -> Any:
    return dict(normed(side, ddp={"forward_sync_buffers": False}).named_buffers())


@case("Gradients with batch norm, forward_sync_buffers=False")
def normed_gradients(side: Side) -> Any:
    return gradients(normed(side, ddp={"forward_sync_buffers": False}))


@case("One rank alone runs the model with buffers", hangs=True)
def alone(side: Side) -> Any:
    module = side.attach(net(nn.BatchNorm1d(6)))
    if side.rank == 0:
        module(side.batch())
