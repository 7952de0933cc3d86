"""Experts on one worker: gates, capacity, losses, statistics, copies."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.expert_layers import (
    Experts,
    ExpertStatistics,
    NoisyTopK,
    Routing,
    SwitchGate,
    expert_loss,
    expert_statistics,
)
from syncline.parallel.expert_layers.dispatch import dispatch, expert_capacity
from syncline.parallel.expert_layers.gate import expected_load, squared_variation

FEATURES = 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, FEATURES))


def make(count: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Experts:
    """A layer whose gate has learned something, so that its choices differ."""
    torch.manual_seed(seed)
    layer = Experts(mlp(), count=count, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter.normal_()
    return layer


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(layer: Experts, x: Tensor) -> Tensor:
    """Every expert on every token, with weights that are zero where the gate has not chosen it."""
    flat = x.reshape(-1, FEATURES)
    routing = layer.gate(flat)
    masked = torch.zeros(len(flat), layer.count, dtype=x.dtype).scatter(1, routing.experts, routing.weights)
    outputs = torch.stack([expert(flat) for expert in layer.experts], dim=1)
    return (outputs * masked.unsqueeze(-1)).sum(1).reshape(*x.shape[:-1], -1)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("count", "top", "gate"), [(4, 2, "noisy"), (5, 3, "noisy"), (3, 3, "noisy"), (4, 1, "switch")]
)
def test_without_a_limit_it_equals_dense_dispatch(count: int, top: int, gate: Any) -> None:
    layer = make(count, top=top, gate=gate, capacity=None)
    x, other = tokens(3, 7).requires_grad_(), tokens(3, 7).requires_grad_()
    torch.manual_seed(5)
    y = layer(x)
    y.square().sum().backward()
    found = gradients(layer)
    layer.zero_grad()
    torch.manual_seed(5)
    expected = dense(layer, other)
    torch.autograd.backward(expected.square().sum())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, other.grad)
    for name, each in gradients(layer).items():
        torch.testing.assert_close(found[name], each, msg=name)


def test_noise_follows_the_formula() -> None:
    gate = NoisyTopK(FEATURES, count=4, top=2).double()
    with torch.no_grad():
        gate.weight.normal_()
        gate.noise.normal_()
    x = tokens(5)
    gate.requires_grad_(False)
    torch.manual_seed(3)
    routing = gate(x)
    torch.manual_seed(3)
    noise = torch.randn(5, 4, dtype=torch.float64)
    noisy = x @ gate.weight + noise * (torch.log1p(torch.exp(x @ gate.noise)) + 1e-2)
    for row, experts, weights in zip(noisy, routing.experts, routing.weights, strict=True):
        order = sorted(range(4), key=lambda i: -float(row[i]))[:2]
        assert experts.tolist() == order
        powers = [math.exp(float(row[i])) for i in order]
        assert weights.tolist() == pytest.approx([each / sum(powers) for each in powers])


def test_expected_load_uses_the_kth_largest_of_the_others() -> None:
    torch.manual_seed(0)
    clean, noisy, std = torch.randn(6, 5), torch.randn(6, 5), torch.rand(6, 5) + 0.1
    for top in (1, 2, 4):
        wanted = [0.0] * 5
        for row in range(6):
            for i in range(5):
                others = sorted((float(noisy[row, j]) for j in range(5) if j != i), reverse=True)
                z = (float(clean[row, i]) - others[top - 1]) / float(std[row, i])
                wanted[i] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
        assert expected_load(clean, noisy, std, top).tolist() == pytest.approx(wanted, rel=1e-5)
    assert expected_load(clean, noisy, std, 5).tolist() == [6.0] * 5


def test_variation_has_the_biased_variance() -> None:
    assert float(squared_variation(torch.tensor([2.0, 4.0, 9.0]))) == pytest.approx((9 + 1 + 16) / 3 / 25)
    assert float(squared_variation(torch.zeros(3))) == 0.0


@pytest.mark.parametrize("top", [1, 2])
def test_the_gradient_of_the_balance_loss_by_finite_differences(top: int) -> None:
    layer = make(4, top=top)
    x = tokens(9)

    def loss() -> Tensor:
        torch.manual_seed(11)
        layer(x)
        return layer.loss

    torch.autograd.backward(loss())
    assert isinstance(layer.gate, NoisyTopK)
    for parameter in (layer.gate.weight, layer.gate.noise):
        assert parameter.grad is not None
        flat, found = parameter.data.view(-1), parameter.grad.view(-1)
        for place in range(0, len(flat), 5):
            middle, step = float(flat[place]), 1e-6
            flat[place] = middle + step
            above = float(loss().detach())
            flat[place] = middle - step
            below = float(loss().detach())
            flat[place] = middle
            assert float(found[place]) == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-9)


def test_the_switch_loss() -> None:
    gate = SwitchGate(FEATURES, count=3).double()
    x = tokens(8)
    probabilities = (x @ gate.weight).softmax(1).detach()
    fractions = [sum(int(row.argmax()) == i for row in probabilities) / 8 for i in range(3)]
    means = probabilities.mean(0)
    wanted = 1e-2 * 3 * sum(fraction * float(mean) for fraction, mean in zip(fractions, means, strict=True))
    routing = gate(x)
    assert gate.balance_loss(routing.sums).item() == pytest.approx(wanted)
    torch.testing.assert_close(routing.weights[:, 0], probabilities.max(1).values)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("capacity", [0.3, 0.8, 1.0, 1.25])
def test_dropped_tokens_are_counted_exactly(capacity: float, top: int) -> None:
    layer = make(4, top=top, capacity=capacity)
    x = tokens(13)
    torch.manual_seed(2)
    y = layer(x)
    torch.manual_seed(2)
    routing = layer.gate(x)
    limit = math.ceil(round(top * 13 * capacity / 4, 9))
    taken, dropped, expected = [0] * 4, [0] * 4, torch.zeros_like(x)
    for choice in range(top):
        for token in range(13):
            expert = int(routing.experts[token, choice])
            if taken[expert] == limit:
                dropped[expert] += 1
                continue
            taken[expert] += 1
            expected[token] += routing.weights[token, choice] * layer.experts[expert](x[token : token + 1])[0]
    assert sum(dropped) > 0 or capacity > 1
    assert layer.statistics.tokens == tuple(taken)
    assert layer.statistics.dropped == tuple(dropped)
    assert sum(layer.statistics.importance) == pytest.approx(13)
    torch.testing.assert_close(y, expected)


def test_the_capacity_is_that_of_decimal_arithmetic() -> None:
    assert math.ceil(2 * 50 * 1.1 / 2) == 56
    assert expert_capacity(50, 2, 2, 1.1) == 55
    assert expert_capacity(41, 2, 8, 1.1) == 12
    assert expert_capacity(0, 2, 8, 1.1) == 0
    assert expert_capacity(7, 2, 8, None) == 14


def test_first_choices_go_before_second_ones() -> None:
    found = dispatch(torch.tensor([[1, 0], [0, 1], [0, 1]]), count=2, capacity=2)
    assert found.tokens.tolist() == [1, 2, 0, 1]
    assert found.counts == [2, 2]
    assert found.dropped == [1, 1]


def test_statistics_are_totals_of_training() -> None:
    model = nn.Sequential(nn.Identity(), make(4, top=2, capacity=None))
    model(tokens(5))
    before = expert_statistics(model)["1"]
    model(tokens(7))
    model.eval()
    model(tokens(9))
    after = expert_statistics(model)["1"]
    assert (after - before).forwards == 1
    assert sum((after - before).tokens) == 14
    assert after.dropped == (0, 0, 0, 0)


def test_evaluation_has_no_noise_and_no_loss() -> None:
    layer = make(4, top=2).eval()
    x = tokens(5)
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    assert float(layer.loss.detach()) == 0.0
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    assert float(layer.loss.detach()) > 0.0


def test_experts_without_tokens_have_zero_gradients() -> None:
    layer = make(4, top=1, capacity=None, gate="switch")
    layer(tokens(1)).sum().backward()
    found = gradients(layer.experts)
    assert len(found) == 4 * 4
    busy = {name.split(".")[0] for name, each in found.items() if bool(each.any())}
    assert len(busy) == 1


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_few_tokens(shape: tuple[int, ...]) -> None:
    layer = make(4, top=2)
    x = tokens(*shape).requires_grad_()
    y = layer(x)
    (y.sum() + layer.loss).backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_the_last_size_may_change() -> None:
    layer = Experts(nn.Linear(FEATURES, 3), count=2, top=1)
    assert layer(torch.randn(2, 5, FEATURES)).shape == (2, 5, 3)


def test_experts_start_different_and_the_template_stays() -> None:
    template = mlp()
    before = copy.deepcopy(template.state_dict())
    layer = Experts(template, count=3)
    state = layer.state_dict()
    assert not torch.equal(state["experts.0.0.weight"], state["experts.1.0.weight"])
    for name, value in template.state_dict().items():
        assert torch.equal(value, before[name])


def test_names_are_stable() -> None:
    names = list(Experts(nn.Linear(FEATURES, 3, bias=False), count=2).state_dict())
    assert names == ["experts.0.weight", "experts.1.weight", "gate.weight", "gate.noise"]


def test_copies_and_pickles_after_a_forward() -> None:
    model = nn.Sequential(make(4, top=2, capacity=1.0, codec="quantize(8)"))
    model(tokens(5))
    assert float(expert_loss(model).detach()) > 0
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        torch.testing.assert_close(other.eval()(tokens(5)), model.eval()(tokens(5)))
        assert expert_statistics(other) == expert_statistics(model)


def test_the_gate_computes_in_float32_under_autocast() -> None:
    class Watching(NoisyTopK):
        def forward(self, x: Tensor) -> Routing:
            self.dtype = (x.dtype, (x @ self.weight.to(x.dtype)).dtype)
            return super().forward(x)

    gate = Watching(FEATURES, 4)
    layer = Experts(mlp(), count=4, gate=gate)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(5, FEATURES))
    assert gate.dtype == (torch.float32, torch.float32)
    assert y.dtype == torch.bfloat16
    layer.bfloat16()
    y = layer(torch.randn(5, FEATURES, dtype=torch.bfloat16))
    (y.float().sum() + layer.loss).backward()
    assert gate.dtype[0] == torch.float32
    assert y.dtype == torch.bfloat16
    assert all(each.grad is not None and each.grad.dtype == torch.bfloat16 for each in layer.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant: bool) -> None:
    layer, twin = make(4, top=2), make(4, top=2)
    x, other = tokens(9).requires_grad_(), tokens(9).requires_grad_()
    torch.manual_seed(4)
    layer(x).sum().backward()
    torch.manual_seed(4)
    checkpoint(twin, other, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    for name, each in gradients(layer).items():
        torch.testing.assert_close(gradients(twin)[name], each, msg=name)
    assert twin.statistics == layer.statistics


def test_the_balance_loss_of_recomputed_activations() -> None:
    layer, twin = make(4, top=2), make(4, top=2)
    torch.manual_seed(4)
    (layer(tokens(9)).sum() + layer.loss).backward()
    torch.manual_seed(4)
    y = checkpoint(twin, tokens(9), use_reentrant=False)
    (y.sum() + expert_loss(twin)).backward()
    assert gradients(twin).keys() == gradients(layer).keys()
    for name, each in gradients(layer).items():
        torch.testing.assert_close(gradients(twin)[name], each, msg=name)
    checkpoint(twin, tokens(9).requires_grad_(), use_reentrant=True)
    with pytest.raises(IncompatibleError, match="use_reentrant=False"):
        expert_loss(twin)


def test_frozen_gates_and_models_without_experts_have_a_loss() -> None:
    layer = make(4, top=2)
    layer.gate.requires_grad_(False)
    layer(tokens(5)).sum().backward()
    assert not expert_loss(layer).requires_grad
    assert all(each.grad is None for each in layer.gate.parameters())
    assert float(expert_loss(nn.Linear(2, 2))) == 0.0


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, at every graph break
def test_it_compiles_with_a_graph_break() -> None:
    model = nn.Sequential(nn.Tanh(), make(4, top=2))
    compiled = torch.compile(model, backend="eager")
    copy.deepcopy(compiled)
    for count in (5, 8):
        torch.manual_seed(3)
        found = compiled(tokens(count))
        (found.sum() + expert_loss(model)).backward()
        torch.manual_seed(3)
        torch.testing.assert_close(found, model(tokens(count)))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


SHARED = nn.Linear(FEATURES, FEATURES)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Experts(mlp(), count=0), "count=0"),
        (lambda: Experts(mlp(), count=True), "count=True"),
        (lambda: Experts(mlp(), count=2, top=3), "3 of 2 experts"),
        (lambda: Experts(mlp(), count=2, top=0), "top=0"),
        (lambda: Experts(mlp(), capacity=0.0), "capacity=0.0"),
        (lambda: Experts(mlp(), capacity=math.inf), "capacity=inf"),
        (lambda: Experts(mlp(), capacity=True), "capacity=True"),
        (lambda: Experts(mlp(), gate="soft"), "gate='soft'"),  # type: ignore[arg-type]
        (lambda: Experts(mlp(), top=2, gate="switch"), "top=2"),
        (lambda: Experts(mlp(), count=4, gate=NoisyTopK(FEATURES, 8)), "count=8, and the layer count=4"),
        (lambda: Experts(mlp(), count=8, top=1, gate=NoisyTopK(FEATURES, 8)), "top=2, and the layer top=1"),
        (lambda: Experts(Bare()), "reset_parameters"),
        (lambda: Experts(Bare, count=2), "features="),
        (lambda: Experts(lambda: SHARED, count=2), "experts 0 and 1 share 'weight'"),
        (lambda: Experts(lambda: 3, count=2), "no module"),  # type: ignore[arg-type,return-value]
        (lambda: Experts("mlp", count=2), "expert='mlp'"),  # type: ignore[arg-type]
        (lambda: Experts(nn.Sequential(mlp(), nn.BatchNorm1d(FEATURES))), r"batch norm \(1\)"),
        (lambda: Experts(lambda: Experts(mlp()), features=FEATURES), "experts of its own"),
        (lambda: Experts(mlp(), codec="topk(0.1)"), "lengths must be known"),
        (lambda: Experts(mlp(), codec="lossless"), "lengths must be known"),
        (lambda: Experts(mlp(), codec="powersgd(2)"), "lengths must be known"),
        (lambda: Experts(mlp(), codec="by_size(dense='none')"), "codec"),
        (lambda: Experts(mlp(), codec="onebit"), "keeps state"),
        (lambda: Experts(mlp(), codec="quantize(8, stochastic=False)"), "keeps state"),
        (lambda: Experts(mlp())(torch.randn(3, FEATURES + 1)), r"shape \[3, 7\]"),
        (lambda: Experts(mlp())(torch.zeros(3, FEATURES, dtype=torch.int64)), "floating-point"),
        (lambda: Experts(nn.Sequential(mlp(), nn.Flatten(0)))(torch.randn(3, FEATURES)), "a row for each"),
    ],
)
def test_refusals(build: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        build()


def test_public_names() -> None:
    assert sl.parallel.Experts is Experts
    assert sl.parallel.expert_loss is expert_loss
    assert set(sl.parallel.__all__) <= set(dir(sl.parallel))
    assert ExpertStatistics(1, (2,), (0,), (1.0,)).tokens == (2,)
