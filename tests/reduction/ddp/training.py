"""Steps, models and dtypes; gradients between backward and step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.reduction.ddp.sides import STEPS, Side, case, gradients, net
from tests.strategies.cases import backward


@case("A few steps of SGD with momentum")
def plain(side: Side) -> Any:
    model = net()
    side.steps(side.attach(model))
    return model.state_dict()


@case("The same in a world of one", ranks=1)
def plain_alone(side: Side) -> Any:
    model = net()
    side.steps(side.attach(model))
    return model.state_dict()


@case("The same on three ranks", ranks=3)
def plain_of_three(side: Side) -> Any:
    model = net()
    side.steps(side.attach(model))
    return model.state_dict()


@case("Adam, foreach")
def adam(side: Side) -> Any:
    model = net()
    side.steps(side.attach(model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)))
    return model.state_dict()


@case("Adam, fused")
def fused(side: Side) -> Any:
    model = net()
    side.steps(side.attach(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True)))
    return model.state_dict()


@case("A scheduler that steps every batch")
def scheduler(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    steps = torch.optim.lr_scheduler.StepLR(side.optimizer, 1, 0.5)
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(module(side.batch(step)).square().mean())
        side.optimizer.step()
        steps.step()
    return model.state_dict()


@case("Ranks begin with different weights and buffers")
def beginning(side: Side) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(side.rank + 1)
    side.attach(model)
    return model.state_dict()


@case("Shared weights")
def shared(side: Side) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    side.steps(side.attach(model))
    return model.state_dict()


@case("One layer is used twice in a forward")
def used_twice(side: Side) -> Any:
    model = nn.Sequential(layer := nn.Linear(4, 4), nn.Tanh(), layer)
    side.steps(side.attach(model))
    return model.state_dict()


@case("Parameters of zero elements, and scalars")
def zero_elements(side: Side) -> Any:
    model = net()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    model.register_forward_hook(lambda module, inputs, output: output * module.scalar + module.empty.sum())
    return side.passes(side.attach(model))


@case("channels_last")
def channels_last(side: Side) -> Any:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module = side.attach(model)
    backward(module(side.batch(0, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)).square().mean())
    return gradients(model), model.weight.grad.stride()


@case("A transposed parameter")
def transposed(side: Side) -> Any:
    model: Any = net()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return side.passes(side.attach(model)), model[0].weight.grad.stride()


@case("channels_last_3d")
def channels_last_3d(side: Side) -> Any:
    model = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    module = side.attach(model)
    backward(module(side.batch(0, 1, 2, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)).square().mean())
    return gradients(model), model.weight.grad.stride()


for dtype in (torch.float16, torch.bfloat16, torch.float64):

    @case(f"{str(dtype).removeprefix('torch.')} weights")
    def of_dtype(side: Side, dtype: torch.dtype = dtype) -> Any:
        model = net().to(dtype)
        module = side.attach(model)
        backward(module(side.batch().to(dtype)).square().sum())
        return gradients(model)


@case("complex64 weights")
def complex_weights(side: Side) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that such modules are new
        model = net().to(torch.complex64)
    module = side.attach(model)
    backward(torch.view_as_real(module(side.batch().to(torch.complex64))).square().sum())
    return gradients(model)


@case("float32, bfloat16 and float64 in one model")
def mixed(side: Side) -> Any:
    model = net()
    model[0].to(torch.float64)
    model[2].to(torch.bfloat16)
    model[1].register_forward_hook(lambda module, inputs, output: output.to(torch.bfloat16))
    module = side.attach(model)
    backward(module(side.batch().double()).float().square().mean())
    return gradients(model)


@case("autocast to bfloat16")
def autocast(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(side.batch()).square().mean()
    backward(loss)
    return gradients(model)


@case("An integer and a boolean parameter")
def whole_numbers(side: Side) -> Any:
    model = net()
    model.register_parameter("count", nn.Parameter(torch.tensor([side.rank + 3]), requires_grad=False))
    model.register_parameter("mask", nn.Parameter(torch.tensor([side.rank == 0]), requires_grad=False))
    side.steps(side.attach(model))
    return model.state_dict()


@case("Large gradients and small ones")
def large(side: Side) -> Any:
    model = net()
    return side.passes(side.attach(model, ddp={"bucket_cap_mb": 1e-5}, syncline={"bucket_bytes": 64}))


@case("An LSTM, and a transformer's layer")
def recurrent(side: Side) -> Any:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(self.lstm(x)[0])
            return result

    module = side.attach(model := Sequences())
    backward(module(side.batch(0, 2, 3, 4)).square().mean())
    return gradients(model)


@case("An embedding with max_norm", alike=False)
def max_norm(side: Side) -> Any:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 2))
    module = side.attach(model)
    backward(module(torch.tensor([side.rank, 3])).square().mean())
    return model.state_dict()


@case("Spectral norm and other parametrizations")
def parametrized(side: Side) -> Any:
    model = net()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    return side.passes(side.attach(model, ddp={"forward_sync_buffers": False}))


@case("Outputs in a dict, of which one needs no gradient", alike=False)
def outputs(side: Side) -> Any:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Any:
            y = self.net(x)
            return {"loss": y.square().mean(), "shown": [y.detach()]}

    module = side.attach(model := Outputs())
    found = module(side.batch())
    backward(found["loss"])
    return found["shown"], gradients(model)


@case("An output that the loss changes in place")
def in_place(side: Side) -> Any:
    module = side.attach(model := net())
    y = module(side.batch())
    y += 1
    y /= 10
    backward(y.square().mean())
    return gradients(model)


@case("Clipping by norm")
def clipping(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    backward(module(side.batch()).square().mean())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return gradients(model), norm


@case("Clipping by value")
def clipping_values(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    backward(module(side.batch()).square().mean())
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return gradients(model)


@case("no_sync around forward and backward")
def accumulation(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    for step in range(2):
        with side.no_sync():
            backward(module(side.batch(step)).square().mean())
    backward(module(side.batch(2)).square().mean())
    return gradients(model)


@case("no_sync around the backward alone")
def accumulation_of_backward(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    loss = module(side.batch()).square().mean()
    with side.no_sync():
        backward(loss)
    backward(module(side.batch(1)).square().mean())
    return gradients(model)


@case("no_sync around the forward alone")
def accumulation_of_forward(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    with side.no_sync():
        loss = module(side.batch()).square().mean()
    backward(loss)
    return gradients(model)


@case("Ranks with different numbers of passes under no_sync")
def uneven_accumulation(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    for step in range(side.rank + 1):
        with side.no_sync():
            backward(module(side.batch(step)).square().mean())
    backward(module(side.batch(3)).square().mean())
    return gradients(model)


@case("A step after passes under no_sync alone", alike=False)
def accumulation_alone(side: Side) -> Any:
    module = side.attach(model := net())
    with side.no_sync():
        side.steps(module)
    return model.state_dict()


@case("Several backwards without zero_grad")
def several_backwards(side: Side) -> Any:
    return side.passes(side.attach(net()), zero=False)


@case("zero_grad(set_to_none=False)")
def zeroed(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    for step in range(STEPS):
        side.optimizer.zero_grad(set_to_none=False)
        backward(module(side.batch(step)).square().mean())
    return gradients(model)


@case("A gradient that is kept over a step")
def kept(side: Side) -> Any:
    model = net()
    module = side.attach(model, ddp={"gradient_as_bucket_view": True})
    side.passes(module)
    before = model[0].weight.grad
    side.passes(module)
    return before


@case("grad.detach_()")
def detached(side: Side) -> Any:
    model: Any = net()
    module = side.attach(model, ddp={"gradient_as_bucket_view": True})
    backward(module(side.batch()).square().mean())
    model[0].weight.grad.detach_()


@case("GradScaler, with a step that one rank's Inf makes all skip")
def scaler(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        side.optimizer.zero_grad()
        loss = module(side.batch(step)).square().mean() * (float("inf") if step == 2 and side.rank else 1.0)
        backward(scaler.scale(loss))
        scaler.unscale_(side.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(side.optimizer)
        scaler.update()
    return model.state_dict(), scaler.get_scale()


@case("GradScaler with a fused optimizer")
def fused_scaler(side: Side) -> Any:
    model = net()
    module = side.attach(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        side.optimizer.zero_grad()
        backward(scaler.scale(module(side.batch(step)).square().mean()))
        scaler.step(side.optimizer)
        scaler.update()
    return model.state_dict()


@case("A gradient that the script has set before backward")
def set_by_hand(side: Side) -> Any:
    module = side.attach(model := net())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, side.rank + 1.0)
    backward(module(side.batch()).square().mean())
    return gradients(model)


@case("Gradients set by hand, without a backward", alike=False)
def by_hand(side: Side) -> Any:
    side.attach(model := net())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, side.rank + 1.0)
    side.optimizer.step()
    return model.state_dict()


@case("NaN on one rank")
def not_a_number(side: Side) -> Any:
    model = net()
    module = side.attach(model)
    backward(module(side.batch()).square().mean() * (float("nan") if side.rank else 1.0))
    return {name: gradient.isnan() for name, gradient in gradients(model).items()}


@case("L-BFGS with a line search", hangs=True)
def closure(side: Side) -> Any:
    model = net()
    module = side.attach(
        model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    )

    def evaluate() -> Tensor:
        side.optimizer.zero_grad()
        loss: Tensor = (module(side.batch()) - 1).square().mean()
        backward(loss)
        return loss

    side.optimizer.step(evaluate)  # type: ignore[arg-type]
    return model.state_dict()
