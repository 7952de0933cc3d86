"""The reducer itself: what the policy decides, and passes that come from no backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, GradientReducer, ReducerOptions, ReductionPass, ReductionPolicy, Scaling


class Averaged:
    """A layer whose gradients are reduced when backward is over."""

    def __init__(self, world: sl.World, options: ReducerOptions | None = None, **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.passes: list[ReductionPass] = []
        communicator = Communicator(world, "auto", None if options is None else options.codec)
        decided = ReductionPolicy(after_backward=self.after_backward, **policy)
        named = dict(self.model.named_parameters())
        self.reducer = GradientReducer(named, communicator, decided, options or ReducerOptions())

    def after_backward(self, found: ReductionPass) -> None:
        found.complete()
        self.passes.append(found)
        self.reducer.release(found)

    def backward(self, value: float) -> list[float]:
        """The gradient of the weight, after a backward pass on this value."""
        self.model(torch.full((1, 2), value)).sum().backward()
        return self.gradient()

    def gradient(self) -> list[float]:
        gradient = self.model.weight.grad
        return [] if gradient is None else [float(each) for each in gradient.view(-1)]


def test_gradients_are_means_when_backward_returns() -> None:
    def case(world: sl.World) -> list[float]:
        return Averaged(world).backward(float(world.rank))

    assert sl.simulate(case, ranks=3).results == ([1.0, 1.0],) * 3


def test_scaling_replaces_the_division() -> None:
    def case(world: sl.World) -> list[float]:
        return Averaged(world, scaling=Scaling(0.5, 4.0)).backward(1.0)

    assert sl.simulate(case, ranks=3).results == ([6.0, 6.0],) * 3


def test_a_policy_may_accumulate_passes() -> None:
    def case(world: sl.World) -> tuple[list[float], int, list[float], int]:
        seen: list[int] = []

        def reduces_pass(index: int) -> bool:
            seen.append(index)
            return len(seen) == 2

        averaged = Averaged(world, reduces_pass=reduces_pass)
        first, waiting = averaged.backward(float(world.rank)), averaged.reducer.accumulated(0)
        return first, waiting, averaged.backward(float(world.rank)), len(averaged.passes)

    results = sl.simulate(case, ranks=2).results
    assert results == (([0.0, 0.0], 1, [1.0, 1.0], 1), ([1.0, 1.0], 1, [1.0, 1.0], 1))


def test_paused_passes_are_reduced_with_the_next() -> None:
    def case(world: sl.World) -> tuple[bool, list[float]]:
        averaged = Averaged(world)
        with averaged.reducer.paused():
            averaged.backward(float(world.rank))
        waiting = averaged.reducer.accumulating
        return waiting, averaged.backward(float(world.rank))

    assert sl.simulate(case, ranks=2).results == ((True, [1.0, 1.0]),) * 2


@pytest.mark.parametrize(("weight", "mean"), [(0.0, 2.0), (1.0, 1.0)])
def test_an_idle_rank_takes_part(weight: float, mean: float) -> None:
    def case(world: sl.World) -> list[float]:
        averaged = Averaged(world)
        averaged.reducer.uneven = True
        if world.rank == 1:
            averaged.reducer.release(averaged.reducer.join_idle(weight))
            return []
        return averaged.backward(2.0)

    assert sl.simulate(case, ranks=2).results == ([mean, mean], [])


def test_tensors_of_no_backward_are_reduced() -> None:
    def case(world: sl.World) -> list[float]:
        averaged = Averaged(world, ReducerOptions(attach_hooks=False))
        tensors = [torch.full((1, 2), float(world.rank)), torch.zeros(1)]
        found = averaged.reducer.reduce(tensors)
        found.install()
        averaged.reducer.release(found)
        return averaged.gradient()

    assert sl.simulate(case, ranks=2).results == ([0.5, 0.5],) * 2


def test_present_gradients_are_reduced_on_request() -> None:
    def case(world: sl.World) -> list[float]:
        averaged = Averaged(world)
        averaged.model.weight.grad = torch.full((1, 2), float(world.rank))
        averaged.model.bias.grad = torch.zeros(1)
        found = averaged.reducer.reduce_now()
        found.complete()
        averaged.reducer.release(found)
        return averaged.gradient()

    assert sl.simulate(case, ranks=2).results == ([0.5, 0.5],) * 2


def test_the_layout_is_restored_by_name() -> None:
    def case(world: sl.World) -> tuple[dict[str, Any], dict[str, Any]]:
        averaged, other = Averaged(world), Averaged(world)
        averaged.backward(1.0)
        averaged.backward(1.0)
        other.reducer.load_layout(averaged.reducer.layout())
        with pytest.raises(IncompatibleError, match="another model"):
            other.reducer.load_layout({"order": ["head"], "used": [], "observed": True, "anew": False})
        return averaged.reducer.layout(), other.reducer.layout()

    for saved, loaded in sl.simulate(case, ranks=2).results:
        assert saved["observed"]
        assert saved == loaded


def test_a_codec_with_feedback_sends_the_rest_later() -> None:
    def case(world: sl.World) -> list[list[float]]:
        averaged = Averaged(world, ReducerOptions(codec=sl.codecs.TopK(1)))
        found = []
        for _ in range(2):
            averaged.model.zero_grad()
            found.append(averaged.backward(1.0))
        return found

    first, second = sl.simulate(case, ranks=2).results[0]
    assert first == [1.0, 0.0]
    assert second == [0.0, 2.0]


def test_hooks_are_removed() -> None:
    def case(world: sl.World) -> list[float]:
        averaged = Averaged(world)
        averaged.reducer.close()
        return averaged.backward(float(world.rank))

    assert sl.simulate(case, ranks=2).results == ([0.0, 0.0], [1.0, 1.0])


def test_predicted_seconds_count_every_bucket() -> None:
    def case(world: sl.World) -> dict[str, float]:
        return Averaged(world).reducer.predict()

    network = sl.Network(latency=1e-3, bandwidth=1e9)
    predicted = sl.simulate(case, ranks=2, network=network).results[0]
    assert predicted["communication"] >= 2e-3
    assert predicted["buckets"] == 1
    assert predicted["codec"] == 0
