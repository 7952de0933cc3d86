"""Experts on several workers: equal to the undivided layer, with any number of tokens on any worker."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.errors import IncompatibleError, SpecError, SynclineError
from syncline.parallel.division import take_share
from syncline.parallel.expert_layers import (
    ExpertGate,
    Experts,
    ExpertsDivision,
    NoisyTopK,
    Routing,
    expert_loss,
)
from syncline.parallel.expert_layers.dispatch import TeamExchange, build_row_codec
from syncline.parallel.team import LayerTeam
from syncline.reduction import Stats
from syncline.testing import Pool
from tests.hunting import hunted, seeds
from tests.strategies.cases import on_gloo

FEATURES = 5


class FirstFeatures(ExpertGate):
    """A gate without parameters: the values of the first `count` features decide. The importance is that of softmax."""

    def forward(self, x: Tensor) -> Routing:
        values, experts = x[:, : self.count].topk(self.top, dim=-1)
        weights = values.softmax(-1)
        sums = torch.zeros_like(x[:, : self.count]).scatter(1, experts, weights).sum(0, keepdim=True)
        return Routing(experts, weights, sums)

    def balance_loss(self, sums: Tensor) -> Tensor:
        return sums.square().sum()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3))


def make(count: int = 4, gate: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> Experts:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gate = NoisyTopK(FEATURES, count, min(2, count), noisy=False) if gate is None else gate
        layer = Experts(mlp(), count=count, gate=gate, **{"capacity": None, **options}).to(dtype)
        with torch.no_grad():
            for parameter in layer.gate.parameters():
                parameter.normal_()
    return layer


def divide(layer: Experts, world: sl.World) -> LayerTeam:
    """Leave this worker its experts."""
    team = LayerTeam(world.group())
    division = ExpertsDivision("layer", layer)
    division.check(team.size)
    take_share(layer, division.share(team.rank, team.size))
    division.attach(team)
    return team


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(layer: Experts) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}


def joined(results: tuple[dict[str, Tensor], ...]) -> dict[str, Tensor]:
    """The gradients of all workers: of an expert from the worker that has it; sums of the gate's."""
    found: dict[str, Tensor] = {}
    for each in results:
        for name, gradient in each.items():
            assert name.startswith("gate") or name not in found, name
            found[name] = found[name] + gradient if name in found else gradient
    return found


@pytest.mark.parametrize("gate", ["noisy", "switch"])
@pytest.mark.parametrize("counts", [(6,), (5, 2), (3, 0, 4, 1), (0, 9)])
def test_divided_equals_undivided(counts: tuple[int, ...], gate: str) -> None:
    size = len(counts)

    def new() -> Experts:
        return make(gate="switch" if gate == "switch" else None)

    def work(world: sl.World) -> Any:
        layer = new()
        divide(layer, world)
        x = tokens(counts[world.rank], seed=world.rank).requires_grad_()
        y = layer(x)
        (y.square().sum() + expert_loss(layer)).backward()
        return y.detach(), x.grad, gradients(layer), layer.loss.detach(), layer.statistics

    results = sl.simulate(work, ranks=size).results
    layer = new()
    x = torch.cat([tokens(count, seed=rank) for rank, count in enumerate(counts)]).requires_grad_()
    y = layer(x)
    # The gradients of a run are means over the workers, so the balance loss counts once for each of them.
    (y.square().sum() + size * layer.loss).backward()
    torch.testing.assert_close(torch.cat([each[0] for each in results]), y)
    torch.testing.assert_close(torch.cat([each[1] for each in results]), x.grad)
    found, wanted = joined(tuple(each[2] for each in results)), gradients(layer)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, msg=name)
    for each in results:
        torch.testing.assert_close(each[3], layer.loss.detach())
        assert each[4].tokens == layer.statistics.tokens


def test_capacities_are_those_of_each_worker() -> None:
    def work(world: sl.World) -> Any:
        layer, alone = make(capacity=0.5), make(capacity=0.5)
        divide(layer, world)
        x = tokens(8 + 3 * world.rank, seed=world.rank)
        torch.testing.assert_close(layer(x), alone(x))
        return layer.statistics, alone.statistics

    results = sl.simulate(work, ranks=2).results
    for name in ("tokens", "dropped"):
        whole = [getattr(each[0], name) for each in results]
        alone = [getattr(each[1], name) for each in results]
        assert whole[0] == whole[1] == tuple(map(sum, zip(*alone, strict=True)))
        assert sum(whole[0]) > 0


@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_to_one_expert(expert: int) -> None:
    def work(world: sl.World) -> Any:
        layer = make(gate=FirstFeatures(FEATURES, 4, 1))
        team = divide(layer, world)
        x = tokens(6, seed=world.rank)
        x[:, expert] = 9.0
        y = layer(x)
        y.sum().backward()
        return y.detach(), gradients(layer), team.sent_bytes, layer.statistics

    results = sl.simulate(work, ranks=4).results
    found = joined(tuple(each[1] for each in results))
    assert len(found) == 4 * 4
    for name, each in found.items():
        assert bool(each.any()) == name.startswith(f"experts.{expert}."), name
    assert results[0][3].tokens[expert] == 24
    alone = make(gate=FirstFeatures(FEATURES, 4, 1))
    x = torch.cat([tokens(6, seed=rank) for rank in range(4)])
    x[:, expert] = 9.0
    torch.testing.assert_close(torch.cat([each[0] for each in results]), alone(x))


def test_exactly_four_exchanges_and_their_bytes() -> None:
    def work(world: sl.World) -> Any:
        layer = make(gate=FirstFeatures(FEATURES, 4, 2), dtype=torch.float32)
        team = divide(layer, world)
        team.stats = Stats(world.events, world.runtime.lock())
        routed = torch.zeros(8, FEATURES)
        for token in range(8):  # two choices for each expert, from each worker
            routed[token, token % 4], routed[token, (token + 1) % 4] = 5.0, 4.0
        layer(routed.requires_grad_()).sum().backward()
        return dict(team.calls), team.sent_bytes, team.stats.bytes_wire

    tokens_sent, counts = 2 * 8 * 3 // 4, 3 * 3 * 8
    rows = 4 * tokens_sent * (FEATURES + 3 + 3 + FEATURES)
    reduced = 4 * 3 * 4
    """The importance, and the tokens that each expert has computed and dropped."""
    for each in sl.simulate(work, ranks=4).results:
        assert each == ({"alltoall": 5, "allreduce": 1}, rows + counts + reduced, rows + counts + reduced)


@pytest.mark.parametrize("case", ["frozen experts", "input", "gate only", "no_grad", "eval"])
def test_backward_takes_part_where_nothing_needs_it(case: str) -> None:
    """Only one worker's tokens need a gradient, or none: all run the same exchanges."""

    def work(world: sl.World) -> Any:
        layer = make()
        team = divide(layer, world)
        if case != "eval":
            layer.experts.requires_grad_(False)
        x = tokens(4, seed=world.rank)
        if case == "input":
            layer.gate.requires_grad_(False)
            x.requires_grad_(world.rank == 1)
        if case == "eval":
            layer.eval()
        with torch.set_grad_enabled(case != "no_grad"):
            y = layer(x)
        if y.requires_grad:
            y.square().sum().backward()
        return team.calls["alltoall"], x.grad, y.requires_grad, gradients(layer)

    results = sl.simulate(work, ranks=2).results
    exchanges = {"frozen experts": 3, "input": 5, "gate only": 3, "no_grad": 3, "eval": 5}[case]
    assert [each[0] for each in results] == [exchanges] * 2
    assert [each[1] is not None for each in results] == [False, case == "input"]
    if case == "input":
        layer, x = make(), tokens(4, seed=1).requires_grad_()
        layer(x).square().sum().backward()
        torch.testing.assert_close(results[1][1], x.grad)
    if case == "frozen experts":
        assert set(results[0][3]) == {"gate.weight"}


def test_an_expert_that_ignores_its_input_takes_part() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), FEATURES)

    def work(world: sl.World) -> Any:
        torch.manual_seed(0)
        layer = make()
        layer.experts = nn.ModuleList(
            Constant() if number < 2 else nn.Linear(FEATURES, FEATURES) for number in range(4)
        )
        layer.double()
        team = LayerTeam(world.group())
        layer.team = team
        x = tokens(4, seed=world.rank).requires_grad_()
        layer(x).sum().backward()
        return team.calls["alltoall"]

    assert sl.simulate(work, ranks=2).results == (5, 5)


def test_one_worker_without_gradients_is_refused_by_all() -> None:
    def work(world: sl.World) -> Any:
        layer = make(3)
        divide(layer, world)
        with torch.set_grad_enabled(world.rank != 1):
            layer(tokens(4, seed=world.rank))

    for error in sl.simulate(work, ranks=3, return_exceptions=True).results:
        assert isinstance(error, IncompatibleError)
        assert "workers 0 and 1 of a team of 3" in str(error)


def test_one_worker_in_evaluation_mode_is_refused_by_all() -> None:
    def work(world: sl.World) -> Any:
        layer = make().train(world.rank == 1)
        divide(layer, world)
        layer(tokens(4, seed=world.rank))

    for error in sl.simulate(work, ranks=2, return_exceptions=True).results:
        assert isinstance(error, IncompatibleError)
        assert "workers 1 and 0 of a team of 2" in str(error)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant: bool) -> None:
    def work(world: sl.World) -> Any:
        results = []
        for recompute in (False, True):
            layer = make(gate="noisy", codec="quantize(8)")
            divide(layer, world)
            x = tokens(5 * world.rank, seed=world.rank).requires_grad_()
            torch.manual_seed(world.rank)
            y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            y.square().sum().backward()
            results.append({**gradients(layer), "x": x.grad})
            forwards = layer.statistics.forwards
            assert forwards == 1
        return results

    for plain, recomputed in sl.simulate(work, ranks=2).results:
        assert plain.keys() == recomputed.keys()
        for name, each in plain.items():
            torch.testing.assert_close(recomputed[name], each, msg=name, rtol=0, atol=0)


def test_two_layers_and_copies_of_the_model() -> None:
    def work(world: sl.World) -> Any:
        layers = [make(), make()]
        for layer in layers:
            divide(layer, world)
        model = nn.Sequential(layers[0], nn.Linear(3, FEATURES).double(), layers[1])
        twin = copy.deepcopy(model)
        x = tokens(3 + world.rank, seed=world.rank)
        found = []
        for each in (model, twin):
            y = each(x)
            (y.sum() + expert_loss(each)).backward()
            found.append(torch.cat([p.grad.reshape(-1) for p in each.parameters() if p.grad is not None]))
        return torch.equal(*found)

    assert sl.simulate(work, ranks=2).results == (True, True)


def test_whole_between_divided_passes() -> None:
    """While `team.divided` is False a worker computes alone, with the whole layer."""

    def work(world: sl.World) -> Any:
        layer, alone = make(), make()
        team = divide(layer, world)
        layer.load_state_dict(alone.state_dict()) if team.size == 1 else None
        team.divided = False
        for ours, theirs in zip(layer.parameters(), alone.parameters(), strict=True):
            ours.data = theirs.data.clone()
        x = tokens(4, seed=world.rank)
        torch.testing.assert_close(layer(x), alone(x))
        return sum(team.calls.values())

    assert sl.simulate(work, ranks=2).results == (0, 0)


def test_detaching_and_a_world_of_one() -> None:
    layer, alone = make(), make()
    division = ExpertsDivision("layer", layer)

    def work(world: sl.World) -> int:
        team = LayerTeam(world.group())
        division.check(1)
        assert not division.share(0, 1).absent
        division.attach(team)
        torch.testing.assert_close(layer(tokens(4, 0)), alone(tokens(4, 0)))
        division.detach()
        return sum(team.calls.values())

    assert sl.simulate(work, ranks=1).results == (0,)
    assert layer.team is None


def test_shares_name_the_experts_of_others() -> None:
    layer = make(count=4)
    division = ExpertsDivision("layer", layer)
    for rank in range(2):
        share = division.share(rank, 2)
        own = {f"experts.{number}." for number in range(2 * rank, 2 * rank + 2)}
        present = {name for name in layer.state_dict() if name not in share.absent}
        assert {name for name in present if name.startswith("experts")} == {
            name for name in layer.state_dict() if any(name.startswith(each) for each in own)
        }
        assert "gate.weight" in present


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["quantize(8)", "cast('fp16')", "cast('bf16', stochastic=True)"])
def test_codecs_encode_what_is_sent(codec: str, dtype: torch.dtype) -> None:
    def work(world: sl.World) -> Any:
        results = []
        for each in (None, codec):
            layer = make(6, codec=each, dtype=dtype)
            team = divide(layer, world)
            team.stats = Stats(world.events, world.runtime.lock())
            x = tokens((0, 40, 17)[world.rank], world.rank, dtype).requires_grad_()
            y = layer(x)
            y.sum().backward()
            assert x.grad is not None
            values = torch.cat([y.detach(), x.grad], dim=1)
            results.append((values, team.sent_bytes, team.stats.bytes_logical, team.stats.bytes_wire))
        return results

    for rank, (plain, coded) in enumerate(sl.simulate(work, ranks=3).results):
        assert plain[1] == coded[1] == plain[2] == coded[2] == plain[3]
        torch.testing.assert_close(coded[0], plain[0], rtol=0.05, atol=0.05)
        if rank == 1:
            assert dtype != torch.float32 or coded[3] < 0.8 * plain[3]


def test_a_codec_sends_random_bits_of_its_own() -> None:
    """Quantised rows are right on average, and the rows of a worker itself are exact."""

    def work(world: sl.World) -> Any:
        team = LayerTeam(world.group())
        rows = torch.linspace(-1, 1, 32).repeat(2, 1)
        codec = build_row_codec("quantize(2)")
        total = torch.zeros(2, 32)
        for _ in range(200):
            exchange = TeamExchange(team, [1, 1], codec=codec)
            received = exchange.to_experts(rows)
            torch.testing.assert_close(received[world.rank], rows[0], rtol=0, atol=0)
            total += received
        return (total / 200 - rows).abs().max()

    for worst in sl.simulate(work, ranks=2).results:
        assert 0 < float(worst) < 0.15


def test_a_codec_passes_nan_on() -> None:
    def work(world: sl.World) -> Any:
        layer = make(codec="quantize(8)", gate=FirstFeatures(FEATURES, 4, 1))
        divide(layer, world)
        x = torch.zeros(4, FEATURES, dtype=torch.float64)
        x[range(4), range(4)] = 1.0
        if world.rank == 0:
            x[:, 4] = float("inf")
        return layer(x).isnan().any(1).tolist(), layer.statistics

    results = sl.simulate(work, ranks=2).results
    assert results[0][0] == [False, False, True, True]  # tanh(±inf) is finite
    assert results[1][0] == [False] * 4


def skewed(count: int) -> NoisyTopK:
    """A gate that sends equal tokens to one expert, and so to one worker."""
    return NoisyTopK(FEATURES, count, 1, noisy=False)


def forward_and_backward(world: sl.World) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens on some workers only, with and without a codec, and all tokens to one worker."""
    for codec, gate in (("quantize(8)", None), (None, None), (None, skewed(4))):
        layer = make(codec=codec, gate=gate)
        divide(layer, world)
        y = layer(tokens(7 * world.rank, seed=world.rank) if gate is None else tokens(1, 0).expand(9, -1))
        (y.square().sum() + layer.loss).backward()
        if codec is None and gate is None:
            found = gradients(layer), layer.loss.detach()
    assert sorted(layer.statistics.tokens) == [0, 0, 0, 18]
    return found


@pytest.mark.xdist_group("gloo")
def test_gloo_exchanges_what_the_simulator_does(gloo: Pool) -> None:
    expected = sl.simulate(forward_and_backward, ranks=2).results
    for (found, loss), (wanted, its_loss) in zip(gloo.run(on_gloo, 2, forward_and_backward), expected, strict=True):
        torch.testing.assert_close(loss, its_loss)
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            torch.testing.assert_close(found[name], each, msg=name)


def run_with_seed(seed: int) -> None:
    """Any number of workers, experts and tokens, any capacity, all tokens to one worker, in any order of events."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    size = number(1, 5)
    count, counts = size * number(1, 3), [number(0, 6) for _ in range(size)]
    capacity = (None, 0.5, 1.25)[number(0, 3)]
    codec = (None, None, "cast('bf16')")[number(0, 3)]
    to_one_worker = number(0, 3) == 0
    network = sl.Network(eager=0.0) if number(0, 2) else None
    """Without buffers: a send ends only when its receive is there."""

    def new(codec: str | None = None) -> Experts:
        return make(count, gate=skewed(count) if to_one_worker else None, capacity=capacity, codec=codec)

    def own_tokens(rank: int) -> Tensor:
        return tokens(1, seed).repeat(counts[rank], 1) if to_one_worker else tokens(counts[rank], seed=rank)

    def work(world: sl.World) -> Any:
        layer = new(codec)
        divide(layer, world)
        x = own_tokens(world.rank).requires_grad_(counts[world.rank] % 2 == 0)
        y = layer(x)
        (y.square().sum() + layer.loss).backward()
        return y.detach(), gradients(layer)

    results = sl.simulate(work, ranks=size, seed=seed, chaos=True, network=network).results
    layer = new()
    outputs = [layer(own_tokens(rank)) for rank in range(size)]
    torch.autograd.backward([y.square().sum() for y in outputs])
    close = 1e-6 if codec is None else 0.1
    for result, y in zip(results, outputs, strict=True):
        torch.testing.assert_close(result[0], y.detach(), rtol=close, atol=close)
    found = joined(tuple(each[1] for each in results))
    for name, each in gradients(layer).items():
        if name.startswith("experts"):
            torch.testing.assert_close(found[name], each, msg=name, rtol=close, atol=close)


@pytest.mark.hunt
def test_any_order_of_events() -> None:
    hunted(run_with_seed, seeds(12))


def twisted(change: Any) -> Experts:
    layer = make()
    change(layer)
    return layer


def first(layer: Experts, number: int) -> nn.Linear:
    """The first linear layer of an expert."""
    found = layer.experts[number].get_submodule("0")
    assert isinstance(found, nn.Linear)
    return found


def share_a_weight(layer: Experts) -> None:
    first(layer, 2).weight = first(layer, 1).weight


def other_shape(layer: Experts) -> None:
    layer.experts[3] = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


def other_dtype(layer: Experts) -> None:
    first(layer, 3).float()


@pytest.mark.parametrize(
    ("build", "size", "kind", "match"),
    [
        (lambda: make(4), 3, SpecError, "'?blocks.1 has 4 experts, which cannot be divided equally over 3 workers"),
        (lambda: make(2), 4, SpecError, "2 experts, .* over 4 workers"),
        (lambda: twisted(other_shape), 2, IncompatibleError, "experts 0 and 3 of blocks.1 .*2.bias.* not there"),
        (lambda: twisted(other_dtype), 2, IncompatibleError, "float64.*float32"),
        (lambda: twisted(share_a_weight), 2, IncompatibleError, "experts.2.0.weight and experts.1.0.weight"),
    ],
)
def test_refusals(build: Any, size: int, kind: type[SynclineError], match: str) -> None:
    with pytest.raises(kind, match=match):
        ExpertsDivision("blocks.1", build()).check(size)


def test_parameters_that_the_model_uses_elsewhere_are_refused() -> None:
    layer = make()
    outside = nn.Linear(FEATURES, 7)
    model = nn.Sequential(outside, layer)
    ExpertsDivision("1", layer, model).check(2)
    outside.weight = first(layer, 1).weight
    with pytest.raises(IncompatibleError, match=r"experts.1.0.weight of 1 is also 0.weight"):
        ExpertsDivision("1", layer, model).check(2)
