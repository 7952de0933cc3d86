"""Contract tests of workloads: the same on every rank, a mean over the batch, and unchanged generators."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncline.errors import SpecError
from syncline.workloads.base import Batch, Workload, batches
from syncline.world import simulate

__all__ = ["WorkloadContract", "assert_rng_unchanged"]


@contextmanager
def assert_rng_unchanged() -> Iterator[None]:
    """Assert that the global generators of torch, NumPy and `random` do not change."""
    before = torch.get_rng_state(), _numpy_state(), random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), before[0]), "torch's generator has moved"
    assert _numpy_state() == before[1], "NumPy's generator has moved"
    assert random.getstate() == before[2], "random's generator has moved"


class WorkloadContract:
    """Inherit from it, and define `make`."""

    @classmethod
    @abstractmethod
    def make(cls) -> Workload:
        """A new workload that has not read its data."""

    @pytest.fixture(scope="class")
    @classmethod
    def workload(cls) -> Workload:
        """One workload for all tests, so that its data is read once."""
        return cls.make()

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls, workload: Workload) -> Batch:
        """The first 16 samples."""
        return next(batches(workload.splits().train, 16))

    def test_global_generators_do_not_change(self) -> None:
        with assert_rng_unchanged():
            workload = self.make()
            splits = workload.splits()
            model = workload.model(3)
            optimizer = workload.optimizer(model)
            workload.loss(model, next(batches(splits.train, 4))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            workload.evaluate(model, splits.test, batch=1024)
            workload.describe()

    def test_two_instances_have_the_same_data(self, workload: Workload) -> None:
        other = self.make()
        assert other.spec == workload.spec
        assert other.describe() == workload.describe()
        for first, second in zip(vars(workload.splits()).values(), vars(other.splits()).values(), strict=True):
            assert len(first) == len(second) > 0
            for index in (0, len(first) // 2, len(first) - 1):
                assert all(torch.equal(a, b) for a, b in zip(first[index], second[index], strict=True))

    def test_getitems_returns_the_same_samples(self, workload: Workload) -> None:
        train = workload.splits().train
        several = getattr(train, "__getitems__", None)
        if several is None:
            pytest.skip("the dataset gives one sample at a time")
        for index, (inputs, targets) in zip([5, 0, 5], several([5, 0, 5]), strict=True):
            alone: Batch = train[index]
            assert torch.equal(inputs, alone[0])
            assert torch.equal(targets, alone[1])

    def test_the_seed_decides_the_model(self, workload: Workload) -> None:
        first, again, other = (_flat(workload.model(seed)) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_the_loss_is_a_mean_over_the_batch(self, workload: Workload, batch: Batch) -> None:
        model = workload.model(0).eval()
        whole = workload.loss(model, batch)
        assert whole.shape == ()
        parts = [workload.loss(model, (batch[0][part], batch[1][part])) for part in (slice(0, 8), slice(8, 16))]
        assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-4)

    def test_training_lowers_the_loss(self, workload: Workload, batch: Batch) -> None:
        model = workload.model(0)
        optimizer = workload.optimizer(model)
        before = workload.loss(model, batch).item()
        for _ in range(20):
            optimizer.zero_grad()
            workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert workload.loss(model, batch).item() < 0.9 * before

    def test_optimizer_uses_the_learning_rate(self, workload: Workload) -> None:
        model = workload.model(0)
        assert workload.optimizer(model, 0.125).param_groups[0]["lr"] == 0.125
        assert workload.optimizer(model).param_groups[0]["lr"] == workload.defaults.learning_rate

    def test_evaluation_does_not_change_the_model(self, workload: Workload) -> None:
        model = nn.Sequential(workload.model(0), nn.Identity(), nn.Identity())
        model.train()
        model[1].eval()
        before = [value.clone() for value in model.state_dict().values()]
        measures = workload.evaluate(model, workload.splits().validation)
        assert {"loss", workload.metric} <= set(measures)
        assert all(math.isfinite(value) for value in measures.values())
        assert [module.training for module in model] == [True, False, True]
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_evaluation_does_not_depend_on_the_batch(self, workload: Workload) -> None:
        model = workload.model(0)
        some = torch.utils.data.Subset(workload.splits().validation, range(50))
        odd, whole = workload.evaluate(model, some, batch=7), workload.evaluate(model, some, batch=50)
        assert odd == pytest.approx(whole, rel=1e-4)

    def test_targets(self, workload: Workload) -> None:
        low, high = workload.metric_range
        usual = workload.defaults.target
        assert usual is None or workload.check_target(usual) == usual
        for wrong in (low, low - 1, high + 0.5, math.nan, math.inf):
            with pytest.raises(SpecError, match=workload.metric):
                workload.check_target(wrong)
        with pytest.raises(SpecError, match=f"judged by {workload.metric}"):
            workload.check_target(0.5, metric="points")
        assert workload.reached(0.6, 0.5) == workload.higher_is_better
        assert workload.reached(0.5, 0.5)

    def test_every_simulated_rank_has_the_same_data(self, workload: Workload) -> None:
        descriptions = simulate(lambda world: self.make().describe(), 2).results
        assert descriptions[0] == descriptions[1] == workload.describe()
        assert len(str(descriptions[0]["sha256"])) == 64


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state(legacy=False)
    return [state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"]]


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
