"""A profile has the time and bytes of each layer, and measuring it leaves the model as it was."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncline.errors import SpecError
from syncline.parallel.partition import pipedream
from syncline.parallel.profile import profile_model


class FakeClock:
    """A clock that moves only when a layer says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


class Tick(torch.autograd.Function):
    """Takes some seconds of the fake clock in forward, and others in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeClock, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward_s
        clock.seconds += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.seconds += ctx.seconds
        return gradients[0], None, None, None


def tick(x: Tensor, clock: FakeClock, forward_s: float, backward_s: float) -> Tensor:
    ticked: Tensor = Tick.apply(x, clock, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return ticked


class TickingLayer(nn.Module):
    """A linear layer that takes a + c·b seconds forward and half of it backward."""

    def __init__(self, clock: FakeClock, fixed: float, each: float, features: int = 4) -> None:
        super().__init__()
        self.clock, self.fixed, self.each = clock, fixed, each
        self.fc = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.fixed + self.each * len(x)
        return tick(self.fc(x), self.clock, seconds, seconds / 2)


class Recomputable(TickingLayer):
    """Takes a second before it computes what backward needs."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock, 1.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(tick(x, self.clock, self.fixed, 0.0))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two layers, and the input added to their result."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(torch.relu(self.first(x)))
        return x + change


def test_the_times_are_those_of_the_layers(clock: FakeClock) -> None:
    model = nn.Sequential(
        TickingLayer(clock, 1.0, 0.5),
        nn.Sequential(nn.ReLU(inplace=True), TickingLayer(clock, 3.0, 0.0)),
        nn.Identity(),
    )
    profile = profile_model(model, torch.randn(8, 4))
    assert profile.names == ("0", "1.0", "1.1", "2")
    assert profile.batch_size == 8
    assert profile.measured_batch_sizes == (4, 8)
    assert profile.edges is None
    assert [layer.forward_s for layer in profile.layers] == pytest.approx([5.0, 0.0, 3.0, 0.0])
    assert [layer.backward_s for layer in profile.layers] == pytest.approx([2.5, 0.0, 1.5, 0.0])
    assert [layer.forward_fixed_s for layer in profile.layers] == pytest.approx([1.0, 0.0, 3.0, 0.0])
    assert [layer.seconds for layer in profile.at_batch(32).layers] == pytest.approx([25.5, 0.0, 4.5, 0.0])


def test_batch_sizes_can_be_given(clock: FakeClock) -> None:
    model = nn.Sequential(TickingLayer(clock, 1.0, 0.5))
    profile = profile_model(model, torch.randn(8, 4), batch_sizes=(16, 2), repeats=1)
    assert profile.measured_batch_sizes == (2, 16)
    assert profile.batch_size == 8
    assert profile.layers[0].forward_s == pytest.approx(5.0)
    assert profile.layers[0].activation_bytes == 8 * 4 * 4
    assert profile_model(model, torch.randn(1, 4), repeats=1).measured_batch_sizes == (1, 2)


def test_layers_sum_to_the_step_without_hooks(clock: FakeClock) -> None:
    """A layer that is slower while hooks are there: the layers keep their shares of the true step."""

    class SlowWithHooks(TickingLayer):
        def forward(self, x: Tensor) -> Tensor:
            hooked = 2.0 if self._forward_pre_hooks else 1.0
            return tick(self.fc(x), self.clock, hooked * self.fixed, hooked * self.fixed)

    model = nn.Sequential(SlowWithHooks(clock, 1.0, 0.0), SlowWithHooks(clock, 3.0, 0.0))
    profile = profile_model(model, torch.randn(4, 4))
    assert profile.seconds == pytest.approx(8.0)
    assert [layer.seconds for layer in profile.layers] == pytest.approx([2.0, 6.0])


def test_the_median_of_the_repeats_counts(clock: FakeClock) -> None:
    class Jitter(TickingLayer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.fixed = 100.0 if self.calls % 7 == 0 else 1.0
            return super().forward(x)

    profile = profile_model(nn.Sequential(Jitter(clock, 1.0, 0.0)), torch.randn(4, 4), repeats=9)
    assert profile.seconds == pytest.approx(1.5)


def test_code_between_layers_belongs_to_the_layer_before(clock: FakeClock) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = TickingLayer(clock, 1.0, 0.0), TickingLayer(clock, 1.0, 0.0)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = tick(self.one(x) * self.scale, clock, 10.0, 20.0)
            return self.two(hidden)  # type: ignore[no-any-return]

    profile = profile_model(Between(), torch.randn(4, 4), lambda y: tick(y, clock, 5.0, 7.0).sum())
    assert [layer.forward_s for layer in profile.layers] == pytest.approx([11.0, 6.0])
    assert [layer.backward_s for layer in profile.layers] == pytest.approx([20.5, 7.5])
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * (20 + 4), 4 * 20]


def test_bytes_of_outputs_parameters_and_saved_tensors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 5))
    model[4].bias.requires_grad_(False)
    profile = profile_model(model, torch.randn(4, 3, 8, 8), repeats=1)
    image = 4 * 4 * 8 * 36
    assert [layer.activation_bytes for layer in profile.layers] == [image, image, image, image, 4 * 4 * 5]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 224, 4 * 16, 0, 0, 4 * 1440]
    # The convolution keeps its input, batch norm its input and two statistics, the linear layer the output of ReLU.
    assert [layer.kept_bytes for layer in profile.layers] == [4 * 4 * 3 * 64, image + 2 * 32, image, 0, 0]


def test_skips_are_found_as_edges() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), Residual(nn.Linear(4, 4), nn.Linear(4, 4)), Residual(nn.Linear(4, 4), nn.Linear(4, 4))
    )
    names = ["0", "1.first", "1.second", "2.first", "2.second"]
    profile = profile_model(model, torch.randn(4, 4), names=names, repeats=1)
    assert profile.names == tuple(names)
    # The sum after 1.second is computed before 2.first begins, so it belongs to 1.second.
    assert profile.edges == (
        ("0", "1.first"),
        ("0", "1.second"),
        ("1.first", "1.second"),
        ("1.second", "2.first"),
        ("1.second", "2.second"),
        ("2.first", "2.second"),
    )
    assert profile_model(model, torch.randn(4, 4), repeats=1).edges is None
    assert pipedream(profile, 2, 1e9, overlap=True).workers == 2


def test_layers_are_found_in_the_order_of_execution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.unused = nn.Linear(4, 4)
            self.relu = nn.ReLU()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.parts = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))})

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts["a"](x)
            for block in self.blocks:
                x = self.relu(block(x))
            return self.head(x)  # type: ignore[no-any-return]

    profile = profile_model(Net(), torch.randn(4, 4), repeats=1)
    assert profile.names == ("parts.a.0", "parts.a.1", "blocks.0", "blocks.1", "head")


def test_layers_without_gradients_are_measured(clock: FakeClock) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (TickingLayer(clock, 1.0, 0.0) for _ in range(3))
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.second(self.first(x))
            return self.third(x)  # type: ignore[no-any-return]

    profile = profile_model(Frozen(), torch.randn(4, 4))
    assert [layer.forward_s for layer in profile.layers] == pytest.approx([1.0, 1.0, 1.0])
    assert [layer.backward_s for layer in profile.layers] == pytest.approx([0.0, 0.0, 0.5])
    assert [layer.parameter_bytes for layer in profile.layers] == [0, 80, 80]
    assert profile.edges is None


def test_recomputation_counts_for_the_backward(clock: FakeClock) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Recomputable(clock), TickingLayer(clock, 4.0, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(checkpoint(self.one, x, use_reentrant=False))  # type: ignore[no-any-return]

    profile = profile_model(Recomputed(), torch.randn(4, 4))
    assert [layer.forward_s for layer in profile.layers] == pytest.approx([1.0, 4.0])
    assert [layer.backward_s for layer in profile.layers] == pytest.approx([1.0, 2.0])


class Everything(nn.Module):
    """A model with all that a step changes: statistics, random numbers, buffers that are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.eval()
        self.fc.train()

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + random.random() + np.random.rand()
        self.register_buffer("cache", x.detach())
        return self.fc(self.drop(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that must not change, to be compared by ==."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "tensors": [(name, id(tensor), tensor.tolist()) for name, tensor in tensors],
        "gradients": [(id(each.grad), each.grad if each.grad is None else each.grad.tolist()) for _, each in tensors],
        "needs": [tensor.requires_grad for _, tensor in tensors],
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
    }


def test_the_model_stays_as_it_is() -> None:
    model = Everything()
    x = torch.randn(4, 3, 8, 8)
    model(x).sum().backward()
    model.conv.bias.grad = None  # type: ignore[union-attr]
    del model.cache
    fired: list[str] = []
    model.fc.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("once"))  # type: ignore[no-untyped-call]
    before = snapshot(model)
    profile = profile_model(model, x, repeats=2)
    assert len(profile.layers) == 4
    assert snapshot(model) == before
    assert fired == []
    assert torch.is_grad_enabled()


def test_the_model_stays_as_it_is_after_an_error() -> None:
    model, x = Everything(), torch.randn(4, 3, 8, 8)
    before = snapshot(model)

    def fail(output: Tensor) -> Tensor:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        profile_model(model, x, fail)
    assert snapshot(model) == before


def test_arguments_targets_and_outputs_of_any_kind() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4)
            self.image = nn.Linear(3, 4)
            self.join = nn.LSTM(4, 4)

        def forward(self, words: Tensor, image: Tensor, scale: float) -> dict[str, Any]:
            hidden, state = self.join(self.words(words) + scale * self.image(image))
            return {"hidden": hidden, "state": [state], "words": words}

    arguments = [torch.randint(0, 10, (6,)), torch.randn(6, 3), 2.0]
    profile = profile_model(TwoTowers(), arguments, repeats=1)
    assert profile.names == ("words", "image", "join")
    assert profile.layers[2].activation_bytes == 6 * 4 * 4 + 2 * 4 * 4
    assert profile.edges is None  # the sum is computed before the LSTM begins, so it belongs to the second tower

    def loss(output: dict[str, Any], targets: tuple[Tensor, Tensor]) -> Tensor:
        assert len(targets[0]) == len(targets[1]) == len(output["hidden"])
        return nn.functional.cross_entropy(output["hidden"], targets[0])

    targets = (torch.randint(0, 4, (6,)), torch.zeros(6))
    assert profile_model(TwoTowers(), arguments, loss, targets=targets, repeats=1).batch_size == 6


def twice() -> nn.Module:
    shared = nn.Linear(4, 4)
    return Residual(shared, shared)


def unused() -> nn.Module:
    model = Residual(nn.Linear(4, 4), nn.Linear(4, 4))
    model.third = nn.Linear(4, 4)
    return model


REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a name that does not exist": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"names": ["1"]},
        "names has '1', which is no module",
    ),
    "the model itself as a layer": (lambda: nn.Sequential(nn.Linear(4, 4)), {"names": [""]}, "names has ''"),
    "a layer inside another": (
        lambda: nn.Sequential(Residual(nn.Linear(4, 4), nn.Linear(4, 4))),
        {"names": ["0", "0.first"]},
        "'0.first' and '0', which contains it",
    ),
    "a name twice": (lambda: nn.Sequential(nn.Linear(4, 4)), {"names": ["0", "0"]}, "names has '0' twice"),
    "a layer that runs twice": (twice, {}, "layer 'first' is called 2 times"),
    "a layer that does not run": (unused, {"names": ["first", "third"]}, "layer 'third' is not called in forward"),
    "no layers": (lambda: nn.Linear(4, 4), {}, "Linear has no modules inside"),
    "nothing to train": (lambda: nn.Sequential(nn.ReLU()), {}, "no parameter of the model requires a gradient"),
    "a loss of many numbers": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"loss_fn": lambda y: y},
        r"the loss is a tensor of shape \(2, 4\)",
    ),
    "a loss that is no tensor": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"loss_fn": lambda y: 1.0},
        "the loss is float",
    ),
    "a loss without a gradient": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"loss_fn": lambda y: y.detach().sum()},
        "depends on the parameters",
    ),
    "no repeats": (lambda: nn.Sequential(nn.Linear(4, 4)), {"repeats": 0}, "repeats is 0"),
    "one batch size": (lambda: nn.Sequential(nn.Linear(4, 4)), {"batch_sizes": (4, 4)}, "two different whole numbers"),
    "an empty batch size": (lambda: nn.Sequential(nn.Linear(4, 4)), {"batch_sizes": (0, 4)}, "at least 1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_profiled_is_refused(name: str) -> None:
    make, options, message = REFUSALS[name]
    with pytest.raises(SpecError, match=message):
        profile_model(make(), torch.randn(4, 4), **options)


def test_inputs_need_one_batch_size() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for inputs, message in [
        ((torch.randn(2, 4), torch.randn(3, 4)), r"the sizes \[2, 3\]"),
        ((1.0,), "no tensor"),
        (torch.zeros(0, 4), r"the sizes \[0\]"),
    ]:
        with pytest.raises(SpecError, match=message):
            profile_model(model, inputs)  # type: ignore[arg-type]
