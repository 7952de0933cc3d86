"""What autograd can do, and the model as an object."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.reduction.ddp.parameters import Heads
from tests.reduction.ddp.sides import STEPS, Side, after_gradient, applied, case, gradients, net
from tests.strategies.cases import backward


@case("Tensor hooks on parameters")
def tensor_hooks(side: Side) -> Any:
    module = side.attach(model := net())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    return side.passes(module)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


@case("Post-accumulate hooks that change the gradient, registered before")
def hooks_before(side: Side) -> Any:
    model = net()
    for parameter in model.parameters():
        after_gradient(parameter, double)
    return side.passes(side.attach(model))


@case("Post-accumulate hooks that change the gradient, registered after")
def hooks_after(side: Side) -> Any:
    module = side.attach(model := net(), ddp={"bucket_cap_mb": 1e-5}, syncline={"bucket_bytes": 1})
    for parameter in model.parameters():
        after_gradient(parameter, double)
    return side.passes(module)


@case("Forward and backward hooks of modules")
def module_hooks(side: Side) -> Any:
    model: Any = net()
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    return side.passes(side.attach(model))


@case("An optimizer that steps in backward, in a post-accumulate hook")
def stepping_hooks(side: Side) -> Any:
    module = side.attach(model := net())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        after_gradient(parameter, step)
    backward(module(side.batch()).square().mean())
    return model.state_dict()


class ReturnsNone(torch.autograd.Function):
    """Its second argument gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class WithNone(nn.Module):
    def __init__(self, none: bool) -> None:
        super().__init__()
        self.net = net()
        self.weight = nn.Parameter(torch.ones(3))
        self.none = none

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return applied(ReturnsNone, y, self.weight) if self.none else y * self.weight


@case("A Function that returns None for a parameter")
def returns_none(side: Side) -> Any:
    return side.passes(side.attach(WithNone(True)))


@case("A Function that returns None on one rank")
def returns_none_on_one(side: Side) -> Any:
    return side.passes(side.attach(WithNone(side.rank == 0)))


@case("A Function that returns None on one rank, find_unused_parameters=True")
def returns_none_found(side: Side) -> Any:
    return side.passes(side.attach(WithNone(side.rank == 0), find_unused_parameters=True))


@case("torch.autograd.grad", alike=False)
def autograd_grad(side: Side) -> Any:
    module = side.attach(model := net())
    return torch.autograd.grad(module(side.batch()).square().mean(), list(model.parameters()))


@case("backward(inputs=) with some of the parameters")
def some_inputs(side: Side) -> Any:
    module = side.attach(model := net())
    for step in range(2):
        side.optimizer.zero_grad()
        module(side.batch(step)).square().mean().backward(inputs=[model[2].weight])
    return gradients(model)


@case("backward(inputs=) with the input alone", alike=False)
def input_alone(side: Side) -> Any:
    module = side.attach(model := net())
    x = side.batch().requires_grad_()
    module(x).square().mean().backward(inputs=[x])
    return x.grad, gradients(model)


@case("A gradient penalty: double backward through the input")
def penalty(side: Side) -> Any:
    module = side.attach(model := net())
    x = side.batch().requires_grad_()
    y = module(x)
    [inner] = torch.autograd.grad(y.sum(), x, create_graph=True)
    backward(y.square().mean() + inner.square().sum())
    return gradients(model)


@case("backward(create_graph=True)")
def create_graph(side: Side) -> Any:
    module = side.attach(model := net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            side.optimizer.zero_grad()
            module(side.batch(step)).square().mean().backward(create_graph=True)
    return gradients(model)


@case("retain_graph: a second backward of one forward")
def retained(side: Side) -> Any:
    module = side.attach(model := net())
    loss = module(side.batch()).square().mean()
    loss.backward(retain_graph=True)
    backward(loss)
    return gradients(model)


@case("Two forwards, then two backwards")
def two_losses(side: Side) -> Any:
    module = side.attach(model := net())
    first, second = (module(side.batch(step)).square().mean() for step in range(2))
    backward(first)
    backward(second)
    return gradients(model)


@case("Two forwards, one backward")
def two_forwards(side: Side) -> Any:
    module = side.attach(model := net())
    backward(module(side.batch()).square().mean() + module(side.batch(1)).square().mean())
    return gradients(model)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        result: Tensor = self.head(x)
        return result


@case("Activation checkpointing, use_reentrant=False")
def checkpointing(side: Side) -> Any:
    return side.passes(side.attach(Checkpointed(False, 1)))


@case("The same, a layer that runs twice")
def checkpointing_twice(side: Side) -> Any:
    return side.passes(side.attach(Checkpointed(False, 2)))


@case("Activation checkpointing, use_reentrant=True")
def reentrant(side: Side) -> Any:
    return side.passes(side.attach(Checkpointed(True, 1)))


@case("The same with use_reentrant=True, a layer that runs twice")
def reentrant_twice(side: Side) -> Any:
    return side.passes(side.attach(Checkpointed(True, 2)))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ValueError("in the middle of backward")


@case("An error in backward, and training goes on")
def broken_off(side: Side) -> Any:
    module = side.attach(model := net())
    handle = model[1].register_forward_hook(lambda module, inputs, output: applied(Fails, output))
    with_error = None
    try:
        backward(module(side.batch()).square().mean())
    except ValueError as error:
        with_error = error
    handle.remove()
    assert with_error is not None
    return side.passes(module)


@case("Compiled autograd")
def compiled_autograd(side: Side) -> Any:
    module = side.attach(net())
    enable: Any = torch._dynamo.compiled_autograd._enable
    with enable(torch.compile(backend="eager")):
        backward(module(side.batch()).square().mean())


@case("torch.compile")
def compiled(side: Side) -> Any:
    model = net()
    module: Any = torch.compile(side.attach(model), backend="aot_eager")
    for step in range(2):
        side.optimizer.zero_grad()
        backward(module(side.batch(step)).square().mean())
    return gradients(model)


@case("static_graph=True")
def static_graph(side: Side) -> Any:
    return side.passes(side.attach(net(), ddp={"static_graph": True}))


@case("gradient_as_bucket_view=True")
def bucket_view(side: Side) -> Any:
    return side.passes(side.attach(net(), ddp={"gradient_as_bucket_view": True}), zero=False)


@case("Two models at once")
def two_models(side: Side) -> Any:
    maker, judge = net(), nn.Linear(3, 1)
    make = side.attach(maker)
    made_by = side.optimizer
    judged = side.attach(judge)
    backward(judged(make(side.batch())).square().mean())
    made_by.step()
    return gradients(maker), gradients(judge), maker.state_dict()


@case("Two optimizers of one model")
def two_optimizers(side: Side) -> Any:
    model: Any = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)]
    module = side.attach(model, optimizers if side.ours else None)
    for step in range(STEPS):
        model.zero_grad()
        backward(module(side.batch(step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


@case("The same model wrapped a second time")
def wrapped_twice(side: Side) -> Any:
    model = net()
    side.attach(model)
    return side.passes(side.attach(model))


@case("The keys of the state dict")
def keys(side: Side) -> Any:
    return list(side.attach(net()).state_dict())


@case("Attributes and methods of the model")
def attributes(side: Side) -> Any:
    model = Heads()
    return side.attach(model).heads is model.heads


@case("deepcopy of the model, and its gradients", alike=False)
def copied(side: Side) -> Any:
    side.attach(model := net())
    other = copy.deepcopy(model)
    backward(other(side.batch()).square().mean())
    return gradients(other)


@case("pickle and torch.save of the model", alike=False)
def pickled(side: Side) -> Any:
    side.attach(model := net())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    backward(other(side.batch()).square().mean())
    return gradients(other)


@case("An averaged model (EMA) beside it")
def averaged(side: Side) -> Any:
    module = side.attach(model := net())
    averaging: Any = torch.optim.swa_utils
    mean = averaging.AveragedModel(model, multi_avg_fn=averaging.get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(module(side.batch(step)).square().mean())
        side.optimizer.step()
        mean.update_parameters(model)
    return mean.module.state_dict()


@case("torch.func.functional_call with other weights", alike=False)
def functional(side: Side) -> Any:
    module = side.attach(model := net())
    others = {name: each.detach().clone().requires_grad_() for name, each in module.named_parameters()}
    backward(torch.func.functional_call(module, others, (side.batch(),)).square().mean())
    return [each.grad for each in others.values()], gradients(model)


@case("Ranks with different numbers of batches")
def uneven(side: Side) -> Any:
    module = side.attach(model := net())
    batches = [side.batch(step) for step in range(3 - side.rank)]
    together: Any = nullcontext() if side.ours else module.join(divide_by_initial_world_size=False)
    with together:
        for x in side.runs[-1].shard(batches, split=False) if side.ours else batches:
            side.optimizer.zero_grad()
            backward(module(x).square().mean())
            side.optimizer.step()
    return model.state_dict()
