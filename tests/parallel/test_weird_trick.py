"""A head that is divided over workers with different examples computes as the undivided one does on all of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.divided_head import HeadDivision, weird_trick_divisions
from syncline.parallel.division import take_share
from syncline.parallel.head_layout import CUTS, SCHEMES, Cut, HeadExchange, Scheme, choose_layout, rows_of_turns
from syncline.parallel.team import LayerTeam
from syncline.testing import Pool
from syncline.workloads.vgg import VGG
from syncline.world import World
from tests.strategies.cases import on_gloo

CLASSES = 5
COLUMNS: tuple[Cut, ...] = ("columns", "columns", "columns")
MIXED: tuple[Cut, ...] = ("columns", "rows", "rows")
Gradients = dict[str, Tensor]
Build = Callable[[], nn.Module]


def seeded(build: Build) -> nn.Module:
    """A model in float64, the same on each call. Other random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def cnn() -> nn.Module:
    """Numbers of units that no number of workers divides."""
    features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    classifier = nn.Sequential(
        nn.Linear(48, 13), nn.ReLU(inplace=True), nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, CLASSES)
    )
    return nn.Sequential(features, nn.Flatten(), classifier)


def batch_norm_inside() -> nn.Module:
    """Modules that mix examples or units, in one flat Sequential."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 11, bias=False), nn.BatchNorm1d(11),
        nn.ReLU(), nn.Linear(11, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, CLASSES),
        nn.LogSoftmax(1),
    )  # fmt: skip


class LeNet(nn.Module):
    """Dense layers that are no Sequential, with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3)
        self.first = nn.Linear(48, 11)
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(11, 8), nn.SiLU()), nn.Sequential(nn.Linear(8, 7)))
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(self.convolution(x).flatten(1)))
        output: Tensor = self.last(self.blocks(x).sigmoid() + 1.0)
        return output


def batch(rank: int, samples: int, step: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(samples, 1, 6, 6, generator=draw, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (samples,), generator=draw)


def gradients_of(model: nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def divide(
    model: nn.Module, world: World, scheme: Scheme, head: Sequence[str] | None = None, **options: Any
) -> tuple[LayerTeam, dict[str, Any]]:
    """Divide a model over all ranks. Returns the slices of its parameters, by their names in the model."""
    team = LayerTeam(world.group())
    slices = {}
    for division in weird_trick_divisions(model, head, scheme, world.size, **options):
        division.check(team.size)
        share = division.share(team.rank, team.size)
        slices.update({f"{division.name}.{name}".lstrip("."): cut for name, cut in share.slices.items()})
        take_share(division.module, share)
        division.attach(team)
    return team, slices


def whole(world: World, named: Gradients, slices: dict[str, Any]) -> Gradients:
    """Tensors of all workers: the parts of divided ones put together, and the mean of the others."""
    results = {}
    for name, part in named.items():
        if name not in slices:
            results[name] = sl.allreduce(part, op="mean")
            continue
        shape = list(part.shape)
        shape[slices[name].dimension] = slices[name].size
        full = part.new_zeros(shape)
        slices[name].put(part, full)
        results[name] = sl.allreduce(full, op="sum")
    return results


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y)


def train_divided(
    world: World, build: Build, scheme: Scheme, sizes: Sequence[int], steps: int = 1, **options: Any
) -> tuple[list[Tensor], Gradients, Gradients]:
    """The outputs of each step, the gradients of the first and the weights after the last."""
    model = seeded(build)
    _, slices = divide(model, world, scheme, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs: list[Any] = []
    first: Gradients = {}
    for step in range(steps):
        x, y = batch(world.rank, sizes[world.rank], step)
        output = model(x)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(output, y))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if name in slices:
                parameter.grad /= world.size
            else:
                parameter.grad = sl.allreduce(parameter.grad, op="mean")
        first = first or gradients_of(model)
        optimizer.step()
        outputs.append(output.detach())
    weights = {name: each.detach() for name, each in model.named_parameters()}
    return outputs, whole(world, first, slices), whole(world, weights, slices)


def train_undivided(
    build: Build, sizes: Sequence[int], steps: int = 1
) -> tuple[list[list[Tensor]], Gradients, Gradients]:
    """The same in one process: the loss is the mean of the losses of all workers' batches."""
    model = seeded(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs: list[Any] = []
    first: Gradients = {}
    for step in range(steps):
        batches = [batch(rank, samples, step) for rank, samples in enumerate(sizes)]
        output = [model(x) for x, _ in batches]
        optimizer.zero_grad()
        losses = [loss_of(each, y) for each, (_, y) in zip(output, batches, strict=True)]
        torch.autograd.backward(torch.stack(losses).mean())
        first = first or gradients_of(model)
        optimizer.step()
        outputs.append([each.detach() for each in output])
    return outputs, first, {name: each.detach() for name, each in model.named_parameters()}


def on_ranks(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[World], Any]:
    """A function of the world alone."""
    return lambda world: function(world, *arguments, **options)


def compare(found: Sequence[Any], expected: tuple[Any, Gradients, Gradients]) -> None:
    for rank, (outputs, first, weights) in enumerate(found):
        for step, output in enumerate(outputs):
            torch.testing.assert_close(output, expected[0][step][rank], rtol=1e-9, atol=1e-12)
        for got, want in ((first, expected[1]), (weights, expected[2])):
            assert list(got) == list(want)
            for name in want:
                torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [5, 2])
def test_each_scheme_trains_as_the_undivided_model(workers: int, samples: int) -> None:
    sizes = [samples] * workers
    expected = train_undivided(cnn, sizes, steps=10)
    for scheme in SCHEMES:
        found = sl.simulate(on_ranks(train_divided, cnn, scheme, sizes, steps=10), workers)
        compare(found.results, expected)


@pytest.mark.parametrize("build", [batch_norm_inside, LeNet])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_modules_that_mix_units_or_examples_see_those_of_their_worker(build: Build, scheme: Scheme) -> None:
    sizes = [4, 4, 4]
    found = sl.simulate(lambda world: train_divided(world, build, scheme, sizes, steps=2), 3).results
    compare(found, train_undivided(build, sizes, steps=2))


@pytest.mark.parametrize("cuts", [COLUMNS, MIXED])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_cuts_give_the_same(scheme: Scheme, cuts: Sequence[str]) -> None:
    """Also if workers have batches of different sizes, one of them empty in some turns."""
    sizes = [5, 1, 3]
    found = sl.simulate(lambda world: train_divided(world, cnn, scheme, sizes, cuts=cuts), 3).results
    compare(found, train_undivided(cnn, sizes))


@pytest.mark.parametrize("seed", range(6))
def test_orders_of_messages_change_nothing(seed: int) -> None:
    scheme, sizes = SCHEMES[seed % 3], [3, 3, 3]
    run = sl.simulate(lambda world: train_divided(world, cnn, scheme, sizes, steps=2), 3, seed=seed, chaos=True)
    compare(run.results, train_undivided(cnn, sizes, steps=2))


@pytest.mark.xdist_group("gloo")
def test_two_gloo_processes_train_as_the_undivided_model(gloo: Pool) -> None:
    for scheme in SCHEMES:
        found = gloo.run(on_gloo, 2, train_divided, cnn, scheme, [5, 5], 3)
        compare(found, train_undivided(cnn, [5, 5], steps=3))


# Bytes and time.


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cuts", [None, COLUMNS, MIXED])
def test_the_predicted_bytes_are_sent(scheme: Scheme, cuts: Sequence[Any] | None) -> None:
    from syncline.bench.weird_trick_prediction import head_sent_bytes

    workers, samples = 3, 5

    def step(world: World) -> int:
        model = seeded(cnn)
        team, _ = divide(model, world, scheme, cuts=cuts)
        x, y = batch(world.rank, samples)
        torch.autograd.backward(loss_of(model(x), y))
        return team.sent_bytes

    run = sl.simulate(step, workers)
    predicted = head_sent_bytes(choose_layout([48, 13, 9, CLASSES], workers, cuts=cuts), samples, scheme, itemsize=8)
    assert list(run.results) == predicted
    assert [sum(each.nbytes for each in run.messages if each.source == rank) for rank in range(workers)] == predicted


def test_the_published_layout_sends_more() -> None:
    """Columns with all-gather, as in the paper: (K−1)·b·(9216 + 2·4096 + 1000/K) numbers forward, and so many back."""
    from syncline.bench.weird_trick_prediction import head_sent_bytes

    widths, workers, samples = [9216, 4096, 4096, 1000], 4, 128
    counts = 8 * (workers - 1)
    published = head_sent_bytes(choose_layout(widths, workers, cuts=COLUMNS), samples, "a")
    assert published == [counts + 2 * 4 * (workers - 1) * samples * (9216 + 2 * 4096 + 1000 // 4)] * workers
    chosen = head_sent_bytes(choose_layout(widths, workers), samples, "a")
    assert chosen == [counts + 2 * 4 * (workers - 1) * samples * (9216 // 4 + 2 * 4096 + 1000)] * workers


def test_the_layout_sends_the_fewest_of_all() -> None:
    from itertools import product

    for widths, workers in (([9, 30, 4, 7], 3), ([50, 5, 40, 3], 2), ([4, 80, 4], 4)):
        costs = []
        for cuts in product(CUTS, repeat=len(widths) - 1):
            try:
                costs.append(choose_layout(widths, workers, cuts=cuts).cost[0])
            except SpecError:
                continue
        assert choose_layout(widths, workers).cost[0] == min(costs)


def test_parts_of_scheme_c_spread_over_the_turns() -> None:
    for count, workers in ((7, 3), (2, 4), (9, 4)):
        turns = rows_of_turns("c", [count] * workers)
        assert [sum(turn) for turn in turns] == [count] * workers
        assert [sum(turn[rank] for turn in turns) for rank in range(workers)] == [count] * workers


def test_the_adjoint_of_the_adjoint_is_the_exchange() -> None:
    for layer in choose_layout([8, 8, 8], 2, cuts=["columns", "rows"]).exchanges:
        assert layer[0].adjoint.adjoint == layer[0] != HeadExchange("rows", "rows")


class _Busy(Function):
    """Takes time for each example, twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, seconds: float) -> Tensor:
        ctx.work = world, seconds * len(x)
        world.compute(seconds * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        world, seconds = ctx.work
        world.compute(2 * seconds)
        return gradients[0], None, None


class BusyTanh(nn.Tanh):
    """An activation that takes time."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__()
        self.world, self.seconds = world, seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Busy.apply(super().forward(x), self.world, self.seconds)  # type: ignore[no-untyped-call]
        return result


@pytest.mark.parametrize("cuts", [None, COLUMNS])
def test_schemes_b_and_c_overlap_transfers_and_computation(cuts: Sequence[Any] | None) -> None:
    from syncline.bench.weird_trick_measurement import HeadSeconds, measure_head
    from syncline.bench.weird_trick_prediction import CnnCosts, play_head, predict_weird_trick
    from syncline.parallel.partition import LayerCost

    workers, samples, seconds = 4, 16, 1e-5
    network = sl.Network(latency=1e-5, bandwidth=1e7)
    busy = workers * samples * seconds * 2 * 3  # two layers, forward and backward, all examples

    def busy_model(world: World) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 32), BusyTanh(world, seconds), nn.Linear(32, 32), BusyTanh(world, seconds), nn.Linear(32, 8)
        )

    def step(world: World, scheme: Scheme) -> None:
        model = busy_model(world)
        divide(model, world, scheme, [""], cuts=cuts)
        torch.autograd.backward(model(torch.randn(samples, 64, requires_grad=True)).sum())

    def cost(name: str, whole_s: float) -> LayerCost:
        return LayerCost(name=name, forward_s=whole_s, backward_s=2 * whole_s, activation_bytes=0, parameter_bytes=0)

    undivided_s = seconds * workers * samples
    costs = CnnCosts(
        convolutions=(),
        dense=(cost("0", undivided_s), cost("2", undivided_s), cost("4", 0.0)),
        layout=choose_layout([64, 32, 32, 8], workers, cuts=cuts),
    )
    times = {scheme: sl.simulate(on_ranks(step, scheme), workers, network).time for scheme in SCHEMES}
    idle = {scheme: time - busy for scheme, time in times.items()}
    assert idle["b"] < 0.65 * idle["a"]
    assert idle["c"] < 0.4 * idle["a"]
    for scheme, time in times.items():
        assert time == pytest.approx(play_head(costs, samples, scheme, network), rel=0.03)

    def measure(world: World, scheme: Scheme) -> HeadSeconds:
        model = busy_model(world)
        divisions = weird_trick_divisions(model, [""], scheme, world.size, cuts=cuts)
        x = torch.randn(samples, 64, requires_grad=True)
        heads = [each for each in divisions if isinstance(each, HeadDivision)]
        return measure_head(model, heads, (x, x), lambda output, _: output.sum(), world.group())

    for scheme, time in times.items():
        measured = sl.simulate(on_ranks(measure, scheme), workers, network).results[0]
        assert sum((*measured.forward_s, *measured.backward_s)) == pytest.approx(busy, rel=0.01)
        assert measured.is_complete(costs.layout.entries)
        prediction = predict_weird_trick(costs, samples, scheme, network, measured)
        assert prediction.step_s == pytest.approx(time, rel=0.03)
        woken_late = replace(measured, delivery_s=measured.delivery_s + 1e-3)
        assert predict_weird_trick(costs, samples, scheme, network, woken_late).step_s > prediction.step_s + 5e-3
        with pytest.raises(SpecError, match="same head"):
            predict_weird_trick(costs, samples, "b" if scheme == "a" else "a", network, measured)


def test_a_slow_network_favours_the_trick_over_data_parallelism() -> None:
    from syncline.bench.pipeline_prediction import PipelineCosts
    from syncline.bench.weird_trick_prediction import cnn_costs, predict_weird_trick
    from syncline.parallel.profile import profile_model

    model = VGG(width=2, dense=64).model()
    x, y = torch.randn(4, 1, 16, 16), torch.zeros(4, dtype=torch.int64)
    profile = profile_model(model, x, functional.cross_entropy, targets=y, batch_sizes=(4, 8))
    costs = PipelineCosts(profile, (), 0.0, 0.0)
    divisions = [each for each in weird_trick_divisions(model, size=4) if isinstance(each, HeadDivision)]
    cnn_of_4 = cnn_costs(costs, divisions, 4)
    assert [layer.name for layer in cnn_of_4.dense] == ["classifier.0", "classifier.2", "classifier.4"]
    total = sum(each.numel() * each.element_size() for each in model.parameters())
    slow, fast = (sl.Network(latency=1e-6, bandwidth=rate) for rate in (1e5, 1e12))
    for scheme in SCHEMES:
        prediction = predict_weird_trick(cnn_of_4, 4, scheme, slow)
        assert prediction.data_parallel_bytes == 2 * 3 * total // 4
        assert prediction.bytes < prediction.data_parallel_bytes
        assert prediction.speedup > 2
        assert predict_weird_trick(cnn_of_4, 4, scheme, fast).speedup == pytest.approx(1.0, abs=0.2)


# Modes.


def forward_alone(build: Build, rank: int, samples: int = 4) -> Tensor:
    output: Tensor = seeded(build).eval()(batch(rank, samples)[0])
    return output.detach()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_evaluation_copies_and_the_whole_model(scheme: Scheme) -> None:
    def outputs(world: World) -> list[Tensor]:
        model = seeded(cnn).eval()
        x, _ = batch(world.rank, 4)
        plain = copy.deepcopy(model)
        division = weird_trick_divisions(plain, None, scheme, world.size)[0]
        division.attach(team := LayerTeam(world.group()))
        team.divided = False
        found = [plain(x)]
        division.detach()
        assert type(plain.get_submodule("2")) is nn.Sequential
        divide(model, world, scheme)
        with torch.no_grad():
            found += [plain(x), model(x), copy.deepcopy(model)(x)]
            other = copy.deepcopy(model)
            for parameter in other.parameters():
                parameter.zero_()
            assert not other(x).any()  # a copy computes with its own weights
        with torch.inference_mode():
            found.append(model(x).clone())
        return [each.detach() for each in found]

    for rank, found in enumerate(sl.simulate(outputs, 3).results):
        for output in found:
            torch.testing.assert_close(output, forward_alone(cnn, rank), rtol=1e-9, atol=1e-12)


def test_frozen_layers_and_accumulated_gradients() -> None:
    """The convolution and the middle dense layer are frozen, and two batches add up."""

    def frozen() -> nn.Module:
        model = cnn()
        model[0].requires_grad_(False)  # type: ignore[index]
        model[2][2].requires_grad_(False)  # type: ignore[index]
        return model

    def step(world: World, scheme: Scheme) -> tuple[Gradients, Gradients]:
        model, alone = seeded(frozen), seeded(frozen)
        _, slices = divide(model, world, scheme)
        for number in range(2):
            x, y = batch(world.rank, 3, number)
            torch.autograd.backward(loss_of(model(x), y))
            for rank in range(world.size):
                x, y = batch(rank, 3, number)
                torch.autograd.backward(loss_of(alone(x), y) / world.size)
        found = {name: each / (world.size if name in slices else 1) for name, each in gradients_of(model).items()}
        return whole(world, found, slices), gradients_of(alone)

    for scheme in SCHEMES:
        for found, expected in sl.simulate(on_ranks(step, scheme), 2).results:
            assert list(found) == ["2.0.weight", "2.0.bias", "2.4.weight", "2.4.bias"] == list(expected)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_and_bfloat16_are_close(scheme: Scheme) -> None:
    def outputs(world: World) -> list[Tensor]:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            model = seeded(cnn).to(dtype)
            team, _ = divide(model, world, scheme)
            x, y = batch(world.rank, 4)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                output = model(x.to(dtype))
            torch.autograd.backward(loss_of(output.float(), y))
            assert output.dtype == torch.bfloat16
            assert all(each.grad is not None and each.grad.dtype == dtype for each in model.parameters())
            found += [output.detach().double(), torch.tensor(team.sent_bytes)]
        return found

    for rank, found in enumerate(sl.simulate(outputs, 2).results):
        assert found[1] == found[3]  # autocast sends bfloat16 too
        for output in (found[0], found[2]):
            torch.testing.assert_close(output, forward_alone(cnn, rank), rtol=0.05, atol=0.05)


def test_inputs_with_more_dimensions() -> None:
    def outputs(world: World) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()
        plain = copy.deepcopy(model)
        divide(model, world, "c", [""])
        found = []
        for shape in ((2, 3, 6), (6,), (0, 6)):
            x = torch.randn(shape, dtype=torch.float64)
            found += [model(x).detach(), plain(x).detach()]
        return found

    for found in sl.simulate(outputs, 3).results:
        for got, want in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def dropped(world: World, inside: bool) -> tuple[Tensor, bool]:
    """The mask of a dropout on 64 units, as each worker's identity layers let it through."""
    torch.manual_seed(3)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Dropout(0.5), layers[1])
    for layer in layers:
        nn.init.eye_(layer.weight)
    divide(model, world, "a", [""], cuts=["columns", "rows"])
    before = torch.get_rng_state()
    x = torch.ones(2, 64, requires_grad=True)
    output = checkpoint(model, x, use_reentrant=False) if inside else model(x)
    untouched = torch.equal(before, torch.get_rng_state())
    torch.autograd.backward(output.sum())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, output.detach())  # backward has the same mask
    model.eval()
    torch.testing.assert_close(model(x), x)
    return output.detach(), untouched


def test_dropout_differs_between_divided_units() -> None:
    results = sl.simulate(lambda world: dropped(world, inside=False), 2).results
    masks = torch.cat([output for output, _ in results])
    assert all(untouched for _, untouched in results)
    assert set(masks.flatten().tolist()) == {0.0, 2.0}
    assert 0.3 < masks.bool().double().mean() < 0.7
    assert not torch.equal(masks[:, :32], masks[:, 32:])
    assert len({tuple(row) for row in masks.tolist()}) == 4


def test_checkpointed_dropout_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="other masks: leave the head out"):
        sl.simulate(lambda world: dropped(world, inside=True), 2)


def test_compiled_models_compute_the_same() -> None:
    def outputs(world: World) -> Tensor:
        model = seeded(cnn).eval()
        divide(model, world, "b")
        compiled = torch.compile(model, backend="eager")
        output = compiled(batch(world.rank, 4)[0])
        torch.autograd.backward(output.sum())
        return output.detach()  # type: ignore[no-any-return]

    for rank, output in enumerate(sl.simulate(outputs, 2).results):
        torch.testing.assert_close(output, forward_alone(cnn, rank), rtol=1e-9, atol=1e-12)


# What is found, and what is refused.


def test_the_head_is_found(caplog: pytest.LogCaptureFixture) -> None:
    def names(model: nn.Module) -> list[str]:
        return [each.name for each in weird_trick_divisions(model, size=2)]

    assert names(cnn()) == ["2"]
    assert names(batch_norm_inside()) == [""]
    assert names(LeNet()) == ["first", "blocks", "last"]
    with caplog.at_level(logging.INFO):
        assert names(VGG(width=1, dense=8).model()) == ["classifier"]
    assert "classifier: 16 → 8 → 8 → 10 units" in caplog.text


def tied() -> nn.Module:
    model = cnn()
    model[2].append(nn.Linear(9, CLASSES))  # type: ignore[index]
    model[2][-1].weight = model[2][4].weight  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (cnn, {"scheme": "d"}, "schemes a, b, c"),
        (cnn, {"head": ["fc"]}, r"no module \['fc'\]; its dense layers are \['2.0', '2.2', '2.4'\]"),
        (cnn, {"head": ["0"]}, r"'0' has no nn.Linear after its last convolution \(Conv2d, ReLU\)"),
        (cnn, {"head": ["1"]}, "'1' is a Flatten"),
        (cnn, {"head": ["2", "2.0"]}, "2.0 is also 2.0: name it once"),
        (cnn, {"size": 64}, "48 inputs and 13 outputs: it cannot be divided over 64 workers"),
        (cnn, {"cuts": ["columns"]}, "has 3 dense layers, and cuts"),
        (tied, {}, "2.4.weight and 2.5.weight are one parameter"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "has no convolution"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)), {}, "no nn.Linear follows"),
    ],
)
def test_wrong_heads_are_refused(build: Build, options: dict[str, Any], says: str) -> None:
    with pytest.raises((SpecError, IncompatibleError), match=says):
        weird_trick_divisions(build(), **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda layer: nn.utils.parametrizations.weight_norm(layer), "2.0 is computed from other parameters"),
        (lambda layer: layer.register_forward_hook(print), "2.0 has hooks"),
    ],
)
def test_layers_with_other_weights_are_refused(change: Callable[[nn.Module], Any], says: str) -> None:
    model = cnn()
    change(model[2][0])  # type: ignore[index]
    with pytest.raises(IncompatibleError, match=says):
        weird_trick_divisions(model)
    with pytest.raises(SpecError, match="divided for 2 workers, and the team has 3"):
        weird_trick_divisions(cnn())[0].check(3)


def test_a_layer_of_unknown_size_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.LazyLinear(4))
    with pytest.raises(IncompatibleError, match="call the model with one batch first"):
        weird_trick_divisions(model)


def test_workers_that_disagree_are_told() -> None:
    def other_dtype(world: World) -> None:
        model = seeded(cnn).to(torch.float32 if world.rank else torch.float64)
        divide(model, world, "a")
        model(batch(world.rank, 2)[0].to(next(model.parameters()).dtype))

    with pytest.raises(IncompatibleError, match=r"torch.float32.*torch.float64|torch.float64.*torch.float32"):
        sl.simulate(other_dtype, 2)

    def wrong_width(world: World) -> None:
        model = seeded(cnn)
        divide(model, world, "a")
        model[2](torch.zeros(2, 47, dtype=torch.float64))  # type: ignore[index]

    with pytest.raises(IncompatibleError, match="takes 48 units, and its input has 47"):
        sl.simulate(wrong_width, 2)

    def a_part(world: World) -> None:
        model = seeded(cnn)
        divide(model, world, "a")
        model[2][:2](torch.zeros(2, 48, dtype=torch.float64))  # type: ignore[index]

    with pytest.raises(IncompatibleError, match="call the whole head"):
        sl.simulate(a_part, 2)


def test_a_second_derivative_is_refused() -> None:
    def twice(world: World) -> None:
        model = seeded(cnn)
        divide(model, world, "a")
        x = batch(world.rank, 2)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        torch.autograd.backward(gradient.sum())

    with pytest.raises(RuntimeError, match="once_differentiable"):
        sl.simulate(twice, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_backward_passes_and_recomputation(scheme: Scheme) -> None:
    """The second pass over one graph adds the same gradients, and so does a head that is computed again."""

    def step(world: World) -> list[Gradients]:
        model = seeded(cnn)
        divide(model, world, scheme)
        x, y = batch(world.rank, 4)
        found = []
        loss = loss_of(model(x), y)
        for last in (False, True):
            torch.autograd.backward(loss, retain_graph=not last)
            found.append(gradients_of(model))
        for reentrant in (False, True):
            model.zero_grad()
            features = model.get_submodule("0")(x).flatten(1)
            output = checkpoint(model.get_submodule("2"), features, use_reentrant=reentrant)
            torch.autograd.backward(loss_of(output, y))
            found.append(gradients_of(model))
        return found

    for once, twice, *recomputed in sl.simulate(step, 3).results:
        torch.testing.assert_close(twice, {name: 2 * each for name, each in once.items()})
        for each in recomputed:
            torch.testing.assert_close(each, once)
