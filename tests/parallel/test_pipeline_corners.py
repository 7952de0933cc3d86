"""Pipelines with activation recomputation, mixed precision, frozen layers, uneven data, and bad arguments."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.errors import DivergedError, IncompatibleError, PeerLostError, SpecError
from syncline.parallel.partition import StagePartition
from syncline.parallel.player import StageCost, play
from syncline.parallel.schedules import PipelineSetting, build_schedule
from syncline.parallel.stage_runner import MAX_CLONED_ELEMENTS, MicroBatch, StageRunner
from syncline.testing import Pool
from syncline.world import World
from tests.parallel.models import MODELS, ModelCase, loss_of
from tests.strategies.cases import on_gloo

Weights = dict[str, Tensor]


def train(world: World, case: ModelCase, steps: int = 3, **options: Any) -> tuple[list[float], Weights]:
    """Losses, and the weights and buffers at the end."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cuts = {1: (), 2: case.cuts[1:2], 4: case.cuts}[world.size]
    run = sl.pipeline(model, optimizer, loss_of, **{"stages": cuts, "microbatches": 4, **options})
    losses = [run.step(*case.batch(10, step)).item() for step in range(steps)]
    run.close()
    return losses, {name: each.detach().clone() for name, each in model.state_dict().items()}


def same(one: tuple[list[float], Weights], other: tuple[list[float], Weights]) -> None:
    """The same bits."""
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


@pytest.mark.parametrize("model", ["unet", "dropout"])
@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_recomputed_activations_change_nothing(model: str, recompute: str) -> None:
    case = MODELS[model]
    expected = sl.simulate(lambda world: train(world, case), 2).results[0]
    for found in sl.simulate(lambda world: train(world, case, recompute=recompute), 2).results:
        same(found, expected)


@pytest.mark.parametrize("samples", [8, MAX_CLONED_ELEMENTS])
def test_a_stage_may_change_its_input_in_place(samples: int) -> None:
    x = torch.linspace(-1.0, 1.0, 4 * samples).view(samples, 4)

    def train(world: World) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cuts = ["1"] if world.size > 1 else []
        with sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=cuts, microbatches=2) as run:
            for _ in range(2):
                run.step(x, x[:, :2])
        return [each.detach().clone() for each in model.parameters()]

    (alone,), both = sl.simulate(train, 1).results, sl.simulate(train, 2).results
    assert all(torch.allclose(one, other) for found in both for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize(("samples", "sizes"), [(9, [3, 2, 2, 2]), (3, [3]), (2, [2])])
def test_micro_batches_of_batch_norm_have_two_samples(samples: int, sizes: list[int]) -> None:
    """As the whole batch has. Batch norm refuses one value for a channel."""
    case = MODELS["batch norm"]

    def cut(world: World) -> list[int]:
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[int] = []

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            found.append(len(labels))
            return loss_of(output, labels)

        with sl.pipeline(model, optimizer, loss, stages=["4"], microbatches=4) as run:
            run.step(*case.batch(samples, 0))
        return found

    assert sl.simulate(cut, 2).results == ([], sizes)


def train_scaled(world: World) -> tuple[Weights, float, Weights]:
    """The weights after a step, the scale and the weights after a step whose loss is NaN."""
    case = MODELS["mlp"]
    model = case.model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    cuts = case.cuts_into(world.size)
    run = sl.pipeline(model, optimizer, loss_of, stages=cuts, microbatches=2, scaler=scaler, clip_norm=100.0)
    x, y = case.batch(8, 0)
    run.step(x.float(), y)
    with run.agreed():
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
    run.step(x.float() * math.inf, y)  # nobody steps
    run.close()
    return before, float(scaler.get_scale()), {name: each.detach() for name, each in model.named_parameters()}


def check_scaled(results: Sequence[tuple[Weights, float, Weights]]) -> None:
    """The first step is that of one process, and the second changes nothing but the scale."""
    case = MODELS["mlp"]
    model = case.model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = case.batch(8, 0)
    torch.autograd.backward(loss_of(model(x.float()), y))
    optimizer.step()
    for before, scale, after in results:
        assert scale == 512.0
        for name, value in model.named_parameters():
            torch.testing.assert_close(before[name], value.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(before[name], after[name])


def test_a_grad_scaler_skips_a_step_on_all_stages() -> None:
    check_scaled(sl.simulate(train_scaled, 4).results)


def train_in_bfloat16(world: World) -> list[float]:
    """Losses under autocast."""
    case = MODELS["mlp"]
    model = case.model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    run = sl.pipeline(model, optimizer, loss_of, stages=case.cuts_into(world.size), microbatches=2)
    x, y = case.batch(8, 0)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(run.step(x.float(), y).item())
    return losses


def test_autocast_reaches_all_stages() -> None:
    first, *others = sl.simulate(train_in_bfloat16, 4).results
    assert first[-1] < first[0]
    assert all(losses == first for losses in others)


@pytest.mark.xdist_group("gloo")
def test_mixed_precision_on_gloo(gloo: Pool) -> None:
    check_scaled(gloo.run(on_gloo, 2, train_scaled))
    (expected, _) = sl.simulate(train_in_bfloat16, 2).results
    assert gloo.run(on_gloo, 2, train_in_bfloat16) == [expected] * 2


def test_a_stage_may_be_frozen_or_have_no_parameters() -> None:
    def run_frozen(world: World) -> Weights:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.1)
        run = sl.pipeline(model, optimizer, loss_of, stages=["1", "2", "3"], microbatches=2, clip_norm=1.0)
        for step in range(3):
            torch.manual_seed(step)
            run.step(torch.randn(6, 4), torch.randint(2, (6,)))
        run.close()
        return {name: each.detach() for name, each in model.named_parameters()}

    alone = sl.simulate(lambda world: train_frozen_alone(), 1).results[0]
    for weights in sl.simulate(run_frozen, 4).results:
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def train_frozen_alone() -> Weights:
    """The same without a pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(6, 4), torch.randint(2, (6,))
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model(x), y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("samples", [48, 53])
def test_a_loader_is_shared_by_the_replicas(samples: int) -> None:
    """All samples are trained once, also if the replicas have different numbers of batches."""
    x = torch.arange(samples, dtype=torch.float32).view(-1, 1)

    def run_epochs(world: World) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run = sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=["1"], microbatches=2)
        seen = []
        for _ in range(2):
            for batch, target in run.shard(DataLoader(TensorDataset(x, x), batch_size=8, shuffle=True)):
                run.step(batch, target)
                seen += batch.view(-1).int().tolist()
            scheduler.step()
        run.close()
        return seen

    found = sl.simulate(run_epochs, 4).results
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert sorted(found[0] + found[1]) == sorted([*range(samples), *range(samples)])


class Branch(nn.Module):
    """Its forward depends on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layers[1](self.layers[0](x) if x.sum() > 0 else x)
        return value


class Pair(NamedTuple):
    """What a layer may return, and no stage may send."""

    x: Tensor


class Holder:
    """The same as an object of a script."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wrapped(nn.Module):
    """A layer that returns a value that is no tensor."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.norm, self.wrap = nn.Linear(2, 2), nn.BatchNorm1d(2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.norm(self.layer(x)))


class Unwrapped(nn.Module):
    """A layer that takes such a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, value: Any) -> Any:
        return self.layer(value["x"] if isinstance(value, dict) else value.x)


def returning(wrap: Callable[[Tensor], Any]) -> nn.Module:
    """A model in which a layer gives the next one a value that is no tensor. They are the children 0 … 2."""
    return nn.Sequential(nn.Linear(2, 2), Wrapped(wrap), Unwrapped())


def four_layers(device: str = "cpu") -> nn.Module:
    """Four layers."""
    return nn.Sequential(*(nn.Linear(2, 2, device=device) for _ in range(4)))


def refused(
    words: str, kind: type[Exception], ranks: int = 2, make: Callable[[], nn.Module] = four_layers, **options: Any
) -> None:
    """One rank alone refuses the options with a message that has these words. It sends nothing."""

    def attempt(world: World) -> str:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.rank == ranks - 1:
            with pytest.raises(kind) as caught:
                sl.pipeline(model, optimizer, loss_of, **{"stages": ["2"], **options})
            return str(caught.value)
        return words

    found = sl.simulate(attempt, ranks)
    assert words in found.results[-1]
    assert not found.messages


@pytest.mark.parametrize(
    ("words", "kind", "options"),
    [
        ("more than the model can be split", IncompatibleError, {"stages": 8, "ranks": 8}),
        ("more than the model can be split", IncompatibleError, {"stages": 8, "ranks": 8, "example": torch.ones(4, 2)}),
        ("must be a multiple of", SpecError, {"ranks": 3}),
        (
            "stages=3, and the schedule gives each worker of a pipeline 2 of them: use 2 or 4 stages with 2 workers",
            SpecError,
            {"stages": 3, "schedule": "interleaved"},
        ),
        ("use 4 or 6 stages with 6 workers", SpecError, {"stages": 5, "schedule": "zbv", "ranks": 6}),
        ("2 cuts make 3 stages, and the schedule", SpecError, {"stages": ["1", "2"], "schedule": "zbv"}),
        ("the schedule needs at least one: use 1 stage with 2 workers", SpecError, {"stages": 0}),
        (
            "is a Pair, and only tensors are passed",
            IncompatibleError,
            {"make": lambda: returning(Pair), "example": torch.ones(1, 2)},
        ),
        (
            "is a dict, and only tensors are passed",
            IncompatibleError,
            {"make": lambda: returning(lambda x: {"x": x}), "example": torch.ones(1, 2)},
        ),
        (
            "is a Holder, and only tensors are passed from stage to stage (here to stage 1)",
            IncompatibleError,
            {"make": lambda: returning(Holder), "example": (torch.ones(1, 2),)},
        ),
        ("must be a multiple of", SpecError, {"ranks": 3, "stages": 2, "example": torch.ones(4, 2)}),
        ("did you mean", SpecError, {"stages": ["22"]}),
        ("at its own pace", IncompatibleError, {"strategy": "ssp"}),
        ("evaluates the models of all workers", IncompatibleError, {"strategy": "ensemble"}),
        ("no gradients of the whole model", IncompatibleError, {"schedule": "pipedream", "clip_norm": 1.0}),
        ("keeps none", IncompatibleError, {"schedule": "zero_bubble", "recompute": "always"}),
        ("autograd graph", IncompatibleError, {"schedule": "zero_bubble", "compile": True}),
        (
            "same number of workers for every stage",
            SpecError,
            {"schedule": "zero_bubble", "ranks": 3, "stages": StagePartition(("2",), (2, 1))},
        ),
        ("a norm above 0", SpecError, {"clip_norm": -1.0}),
        ("one of 'always'", SpecError, {"recompute": "sometimes"}),
        ("whole number", SpecError, {"microbatches": 0}),
        ("give the number once", SpecError, {"microbatches": 3, "schedule": "gpipe(microbatches=4)"}),
        ("use 4 or 6 micro-batches", SpecError, {"microbatches": 5, "stages": 4, "schedule": "interleaved"}),
        (
            "use 4 or 6 micro-batches",
            SpecError,
            {"microbatches": 5, "stages": 4, "schedule": "interleaved", "example": torch.ones(4, 2)},
        ),
        ("unknown algorithm", SpecError, {"algorithm": "circle"}),
        ("a number of bytes", SpecError, {"bucket_bytes": 0}),
        ("unknown tracer", SpecError, {"tracer": "dynamo"}),
        ("unknown tracer", SpecError, {"tracer": "dynamo", "stages": "auto", "example": torch.ones(4, 2)}),
        ("cannot trace", IncompatibleError, {"make": Branch, "stages": ["layers.1"]}),
        ("cannot trace", IncompatibleError, {"make": Branch, "stages": "auto", "example": torch.ones(4, 2)}),
        (
            "is used by stages [0, 1], and pipedream updates each stage at another time",
            IncompatibleError,
            {"make": MODELS["tied"].model, "stages": ["blocks.2"], "schedule": "pipedream"},
        ),
        ("has no values", SpecError, {"make": lambda: four_layers("meta"), "stages": "auto", "example": torch.ones(1)}),
        ("no-such-file.json", SpecError, {"stages": "no-such-file.json"}),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    words: str, kind: type[Exception], options: dict[str, Any]
) -> None:
    refused(words, kind, **options)


def test_gradients_that_are_not_finite_name_the_worker() -> None:
    """By its number among all workers, not among those of its stage."""

    def attempt(world: World) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, loss_of, stages=["1"], microbatches=2, check_finite=True)
        x = torch.full((4, 2), math.nan) if world.rank % 2 else torch.ones(4, 2)
        with pytest.raises(DivergedError) as caught:
            run.step(x, torch.zeros(4, dtype=torch.int64))
        return str(caught.value)

    found = sl.simulate(attempt, 4).results
    for stage in (0, 1):
        for message in found[2 * stage : 2 * stage + 2]:
            assert f"in the gradients of rank {2 * stage + 1}: {stage}.bias" in message


class Failing(nn.Module):
    """A layer whose third forward raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("of the user")
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved(chunks=2)", "zero_bubble", "zbv", "pipedream"])
def test_an_error_of_the_model_is_raised_there_and_named_elsewhere(schedule: str) -> None:
    """The others name the rank that failed and its stages, and where they are themselves."""
    chunks = build_schedule(schedule).stages_per_rank
    names = [str(number) for number in range(1, 3 * chunks)]

    def attempt(world: World) -> None:
        model = nn.Sequential(*(Failing() if number == 1 else nn.Linear(2, 2) for number in range(3 * chunks)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=names, schedule=schedule, microbatches=6)
        run.step(torch.ones(6, 2), torch.ones(6, 2))

    first, failed, last = sl.simulate(attempt, 3, return_exceptions=True).results
    assert isinstance(failed, ZeroDivisionError)
    for found in (first, last):
        assert isinstance(found, PeerLostError), repr(found)
        assert found.peer == 1
        assert f"rank 1 computes stage{'s' * (chunks > 1)} 1" in str(found)
        assert "micro-batch" in str(found)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_step_leaves_the_random_numbers_of_the_script(schedule: str) -> None:
    def step(world: World) -> tuple[Tensor, Tensor]:
        case = MODELS["mlp"]
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, loss_of, stages=case.cuts_into(2), schedule=schedule, microbatches=2)
        x, y = case.batch(8, 0)
        before = torch.get_rng_state()
        run.step(x, y)
        after = torch.get_rng_state()
        run.close()
        return before, after

    for before, after in sl.simulate(step, 2).results:
        assert torch.equal(before, after)


def test_wrong_batches_are_refused_with_their_shapes() -> None:
    def attempt(world: World) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        run = sl.pipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, stages=["1"], microbatches=2)
        messages = []
        for x, y in ((torch.ones(4, 2), torch.zeros(3)), (torch.ones(0, 2), torch.zeros(0)), ("text", None)):
            with pytest.raises(IncompatibleError) as caught:
                run.step(x, y)
            messages.append(str(caught.value))
        if world.rank == 1:
            with pytest.raises(IncompatibleError, match="needs no gradient"), torch.no_grad():
                StageRunner(run.graph, loss_of, lambda number: MicroBatch((), torch.zeros(2).long(), 1.0, 1.0)).forward(
                    1, 0, [torch.ones(2, 2)]
                )
        with pytest.raises(IncompatibleError, match="split over workers"):
            model(torch.ones(1, 2))
        run.close()
        return messages

    first, second, third = sl.simulate(attempt, 2).results[0]
    assert "[4, 2]" in first
    assert "[3]" in first
    assert "no samples" in second
    assert "tensors" in third


class Kept:
    """A tensor that autograd keeps. The object lives as long as autograd needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output would keep its graph alive


class KeptActivations:
    """Counts the activations that autograd keeps inside, now and at most. Parameters do not count."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def watch(self, parameters: Sequence[Tensor] = ()) -> saved_tensors_hooks:
        """A context for a forward."""
        memory = {each.untyped_storage().data_ptr() for each in parameters}

        def keep(tensor: Tensor) -> Kept:
            kept = Kept(tensor)
            if tensor.untyped_storage().data_ptr() not in memory:
                self.now += 1
                self.peak = max(self.peak, self.now)
                weakref.finalize(kept, self.forget)
            return kept

        return saved_tensors_hooks(keep, lambda kept: kept.tensor)

    def forget(self) -> None:
        """Autograd has freed one."""
        self.now -= 1


class Watched(nn.Module):
    """A layer that autograd keeps the input of, for its weights, and an activation of which it keeps the result."""

    def __init__(self, inputs: KeptActivations, results: KeptActivations) -> None:
        super().__init__()
        self.layer, self.inputs, self.results = nn.Linear(6, 6), inputs, results

    def forward(self, x: Tensor) -> Tensor:
        with self.inputs.watch((self.layer.weight, self.layer.bias)):
            value = self.layer(x)
        with self.results.watch():
            return torch.tanh(value)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved(chunks=2)", "zero_bubble", "zbv", "pipedream"])
def test_kept_activations_are_the_predicted_ones_and_are_freed(schedule: str, ranks: int) -> None:
    """By what autograd keeps. What B or W of a micro-batch needs lives until then, and not longer."""
    plan = build_schedule(schedule)
    predicted = play(plan, PipelineSetting(ranks, 8), StageCost(0.01, 0.01, 0.01)).peak_activations
    stages = ranks * plan.stages_per_rank

    def measure(world: World) -> dict[str, int]:
        inputs, results = KeptActivations(), KeptActivations()
        model = nn.Sequential(*(Watched(inputs, results) for _ in range(stages)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cuts = [str(stage) for stage in range(1, stages)]
        with sl.pipeline(
            model, optimizer, nn.functional.mse_loss, stages=cuts, schedule=schedule, microbatches=8
        ) as run:
            for _ in range(2):
                run.step(torch.ones(8, 6), torch.zeros(8, 6))
            between = inputs.now
        return {
            "counted by the run": run.peak_activations,
            "inputs": inputs.peak,
            "results": results.peak,
            "between steps": between,
            "at the end": inputs.now + results.now,
        }

    for found, most in zip(sl.simulate(measure, ranks).results, predicted, strict=True):
        assert found["counted by the run"] == found["inputs"] == most
        # With a divided backward I frees what only the gradients of inputs need.
        assert found["results"] == most or (plan.splits_backward and found["results"] <= most)
        assert found["between steps"] == (0 if plan.flushes else most - 1)
        assert found["at the end"] == 0


def test_ranks_with_other_optimizers_are_refused() -> None:
    def attempt(world: World) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + world.rank)
        with pytest.raises(IncompatibleError) as caught:
            sl.pipeline(model, optimizer, loss_of, stages=["1"])
        return str(caught.value)

    assert all("optimizers" in message for message in sl.simulate(attempt, 2).results)


def test_a_nan_names_the_rank_and_the_parameter() -> None:
    def attempt(world: World) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=["1"], microbatches=2, check_finite=True)
        with pytest.raises(DivergedError) as caught:
            run.step(torch.full((4, 2), math.nan), torch.ones(4, 2))
        return str(caught.value)

    for message in sl.simulate(attempt, 2).results:
        assert "NaN" in message
        assert "weight" in message
