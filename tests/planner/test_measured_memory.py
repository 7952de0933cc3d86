"""The predicted peak memory of a step is that of torch's own MemTracker, which sees every tensor of the step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.errors import SpecError
from syncline.parallel.profile import TrainingStep, profile_model
from syncline.parallel.weight_versions import WeightVersions
from syncline.planner.measured_memory import (
    MemoryMeasurement,
    StorageTracker,
    measure_memory,
    measure_optimizer,
    predict_memory,
)
from tests.planner.memory_models import MEMORY_MODELS, mlp

MAX_ERROR = 0.05
MEASURED = (16, 32)
PREDICTED = 24
"""Another batch size than those that are measured."""


@pytest.fixture(scope="module", autouse=True)
def only_objects_of_these_tests() -> None:
    """The collections below then pass over the objects of other tests in this process, as after `tests/conftest.py`."""
    gc.collect()
    gc.freeze()


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, 0.01),
    "momentum": lambda parameters: SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, 1e-3),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[sl.World]:
    with sl.init() as made:
        yield made


def labels(count: int) -> Tensor:
    return torch.randint(10, (count,))


def layer_names(name: str) -> tuple[str, ...]:
    make, inputs = MEMORY_MODELS[name]
    return profile_model(make(), inputs(4), F.cross_entropy, targets=labels(4), repeats=1).names


def measurement(name: str, sizes: tuple[int, int] = MEASURED) -> tuple[MemoryMeasurement, tuple[str, ...]]:
    make, inputs = MEMORY_MODELS[name]
    model, names = make(), layer_names(name)
    steps = {each: TrainingStep(model, (inputs(each),), labels(each), F.cross_entropy, each) for each in sizes}
    return measure_memory(steps, {each: model.get_submodule(each) for each in names}), names


def tracked_peak(
    name: str, optimizer: str, *, recomputed: tuple[str, ...] = (), codec: str | None = None, reduce: bool = False
) -> int:
    """The peak of two steps by MemTracker: the second has the state that the first one makes."""
    make, inputs = MEMORY_MODELS[name]
    model = make()
    for each in recomputed:
        recompute(model.get_submodule(each))
    made, x, y = OPTIMIZERS[optimizer](model.parameters()), inputs(PREDICTED), labels(PREDICTED)
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(model, made, x, y)
    with tracker:
        run = sl.distribute(model, made, codec=codec, check_finite=True) if codec or reduce else None
        for _ in range(2):
            tracker.reset_mod_stats()
            made.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            made.step()
        if run is not None:
            run.close()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def recompute(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


@pytest.mark.parametrize("name", MEMORY_MODELS)
def test_predicted_peak_is_within_five_percent(name: str) -> None:
    memory, names = measurement(name)
    errors = {}
    for optimizer in OPTIMIZERS:
        for case in ("as it is", "top-k with a residual", "recomputation"):
            codec = "topk(0.01)" if case.startswith("top-k") else None
            recomputed = names if case == "recomputation" else ()
            predicted = predict_memory(
                memory, batch_size=PREDICTED, optimizer=optimizer, codec=codec, recompute=bool(recomputed)
            )
            tracked = tracked_peak(name, optimizer, recomputed=recomputed, codec=codec)
            errors[optimizer, case] = predicted.peak_bytes / tracked - 1
    assert all(abs(error) < MAX_ERROR for error in errors.values()), errors


@pytest.mark.parametrize(
    ("name", "codec"), [("MLP", None), ("large embedding", "quantize(4)"), ("VGG", "cast('bf16')")]
)
def test_buckets_and_payloads_are_within_five_percent(name: str, codec: str | None) -> None:
    memory, _ = measurement(name)
    predicted = predict_memory(memory, batch_size=PREDICTED, optimizer="momentum", codec=codec, buckets=True)
    tracked = tracked_peak(name, "momentum", codec=codec, reduce=True)
    assert abs(predicted.peak_bytes / tracked - 1) < MAX_ERROR, (predicted, tracked)


def test_powersgd_keeps_the_gradients_of_the_step_before() -> None:
    memory, _ = measurement("transformer")
    predicted = predict_memory(memory, batch_size=PREDICTED, optimizer="sgd", codec="powersgd(2)")
    tracked = tracked_peak("transformer", "sgd", codec="powersgd(2)")
    assert abs(predicted.peak_bytes / tracked - 1) < MAX_ERROR, (predicted, tracked)
    assert predicted.gradients == memory.gradient_bytes
    assert "backward of head" in predicted.moment


def test_kinds_sum_to_the_peak_and_are_named() -> None:
    memory, _ = measurement("large embedding")
    predicted = predict_memory(memory, batch_size=PREDICTED, optimizer="adam")
    table = 10_000 * 16 * 4
    assert predicted.moment == "in the update"
    assert predicted.temporary == 2 * table
    assert sum(predicted.kinds.values()) == predicted.peak_bytes
    assert str(predicted).startswith("3.86 MB in the update: optimizer state")


def test_versions_count_as_the_copies_that_a_pipeline_makes() -> None:
    memory, _ = measurement("MLP")
    copies = WeightVersions(mlp(), lag=1, first_stage_lag=1, vertical_sync=False).weights_for(0)
    assert copies is not None
    one, three = (predict_memory(memory, batch_size=8, optimizer="sgd", weight_versions=count) for count in (0, 2))
    assert three.peak_bytes - one.peak_bytes == 2 * sum(each.nbytes for each in copies.values())


def test_more_workers_receive_more_payloads() -> None:
    memory, _ = measurement("large embedding")
    few, many = (
        predict_memory(memory, batch_size=8, optimizer="sgd", codec="quantize(8)", workers=count) for count in (2, 16)
    )
    assert few.payloads * (1 + 2 * 16) == many.payloads * (1 + 2 * 2)
    assert few.residuals == many.residuals == 0


def test_measured_optimizer_has_the_memory_of_its_formula() -> None:
    memory, _ = measurement("MLP")
    for name, make in OPTIMIZERS.items():
        model = mlp()
        F.cross_entropy(model(torch.randn(4, 64)), labels(4)).backward()  # type: ignore[no-untyped-call]
        found = measure_optimizer(name, make(model.parameters()))
        predicted = predict_memory(memory, batch_size=1, optimizer=name)
        assert found.state_bytes == predicted.optimizer_state
        assert found.temporary_bytes == pytest.approx(2 * 256 * 256 * 4 if name == "adam" else 0, rel=0.01)


def test_a_measurement_leaves_weights_as_they_were_and_no_gradients() -> None:
    make, inputs = MEMORY_MODELS["MLP"]
    model = make()
    before = [each.detach().clone() for each in model.parameters()]
    steps = {each: TrainingStep(model, (inputs(each),), labels(each), F.cross_entropy, each) for each in (2, 4)}
    measure_memory(steps, {each: model.get_submodule(each) for each in "01234"})
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert all("forward" not in vars(each) for each in model.modules())


def test_fake_tensors_have_the_same_memory_and_allocate_none() -> None:
    real, names = measurement("ResNet")
    with FakeTensorMode():
        make, inputs = MEMORY_MODELS["ResNet"]
        model = make()
        steps = {each: TrainingStep(model, (inputs(each),), labels(each), F.cross_entropy, each) for each in MEASURED}
        fake = measure_memory(steps, {each: model.get_submodule(each) for each in names})
    assert fake == real


def test_a_model_that_cannot_be_recomputed_is_measured_without() -> None:
    class Changing(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = super().forward(x)
            return torch.relu(y).exp() if self.calls % 2 else y

    model = nn.Sequential(Changing(4, 4), nn.Linear(4, 4))
    steps = {each: TrainingStep(model, (torch.randn(each, 4),), None, None, each) for each in (2, 4)}
    memory = measure_memory(steps, {each: model.get_submodule(each) for each in "01"})
    assert not memory.recomputed
    with pytest.raises(SpecError, match="does not compute the same"):
        predict_memory(memory, batch_size=2, optimizer="sgd", recompute=True)


def test_tracker_counts_shared_memory_once_and_sparse_gradients() -> None:
    table = nn.Embedding(100, 4, sparse=True)
    rows = torch.arange(10)
    with StorageTracker([table.weight, rows]) as tracker:
        loss = table(rows).sum()
        loss.backward()
        kept = tracker.live_bytes
    assert table.weight.grad is not None
    sparse = 10 * 4 * 4 + 10 * 8
    assert kept <= sparse + 2 * 4, "indices, values, the loss and its gradient"
    assert kept >= 10 * 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adan"}, "unknown optimizer 'adan'; did you mean 'adam'"),
        ({}, "no optimizer was measured; name one: sgd"),
        ({"optimizer": "sgd", "batch_size": 0}, "batch_size 0"),
        ({"optimizer": "sgd", "workers": 0}, "workers 0"),
        ({"optimizer": "sgd", "codec": "tpk(0.1)"}, "tpk"),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    memory, _ = measurement("MLP", (2, 4))
    with pytest.raises(SpecError, match=words.replace("(", r"\(").replace(")", r"\)")):
        predict_memory(memory, **{"batch_size": 2, **options})  # type: ignore[arg-type]
