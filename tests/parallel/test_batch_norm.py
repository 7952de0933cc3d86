"""Running statistics after micro-batches equal those of nn.BatchNorm after the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncline.parallel.batch_norm import DeferredBatchNorm
from syncline.parallel.splitting import split
from tests.parallel.split_models import CASES

SHAPES = {nn.BatchNorm1d: (11, 3), nn.BatchNorm2d: (11, 3, 4, 2), nn.BatchNorm3d: (11, 3, 2, 1, 3)}
UNEVEN = (4, 2, 5)


def statistics(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def feed(layer: nn.Module, batch: Tensor, sizes: Sequence[int] = UNEVEN) -> DeferredBatchNorm:
    """Run a batch in micro-batches, with deferred statistics."""
    deferred = DeferredBatchNorm(layer)
    for micro_batch in torch.split(batch, list(sizes)):
        layer(micro_batch)
    return deferred


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics_equal_those_of_the_whole_batch(kind: type[Any], momentum: float | None, affine: bool) -> None:
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        layer = kind(3, momentum=momentum, affine=affine, dtype=dtype)
        whole = copy.deepcopy(layer)
        deferred = DeferredBatchNorm(layer)
        for _ in range(3):
            batch = torch.randn(SHAPES[kind], dtype=dtype) * 2 + torch.randn(1, dtype=dtype)
            whole(batch)
            for micro_batch in torch.split(batch, list(UNEVEN)):
                layer(micro_batch)
            deferred.commit()
            torch.testing.assert_close(statistics(layer), statistics(whole), rtol=tolerance, atol=tolerance)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    torch.manual_seed(0)
    batch = torch.randn(11, 3) * 0.1 + 100
    layer, whole = nn.BatchNorm1d(3, momentum=1.0), nn.BatchNorm1d(3, momentum=1.0).double()
    whole(batch.double())
    feed(layer, batch).commit()
    expected = whole.get_buffer("running_var")
    torch.testing.assert_close(layer.get_buffer("running_var").double(), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(512, 2, 16, 16) + 30).to(dtype)
    layer, whole = nn.BatchNorm2d(2, momentum=1.0), nn.BatchNorm2d(2, momentum=1.0)
    whole(batch.float())
    feed(layer, batch, (200, 312)).commit()
    torch.testing.assert_close(statistics(layer), statistics(whole), rtol=1e-5, atol=1e-5)


def test_micro_batches_are_normalised_by_their_own_statistics() -> None:
    batch = torch.randn(6, 3)
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    deferred = DeferredBatchNorm(layer)
    assert torch.equal(layer(batch[:2]), plain(batch[:2]))
    deferred.commit()
    deferred.close()
    plain(batch)
    layer(batch)
    assert [int(each.get_buffer("num_batches_tracked")) for each in (layer, plain)] == [2, 2]


def test_nothing_is_updated_before_the_commit() -> None:
    layer = nn.BatchNorm1d(3)
    before = statistics(layer)
    deferred = feed(layer, torch.randn(11, 3))
    torch.testing.assert_close(statistics(layer), before, rtol=0.0, atol=0.0)
    assert layer.track_running_stats
    deferred.discard()
    deferred.commit()
    torch.testing.assert_close(statistics(layer), before, rtol=0.0, atol=0.0)


def test_recomputed_activations_are_not_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    whole = copy.deepcopy(model)
    batch = torch.randn(11, 3).double()
    whole(batch)
    deferred = DeferredBatchNorm(model)
    for micro_batch in torch.split(batch, list(UNEVEN)):
        result = checkpoint(model, micro_batch.requires_grad_(), use_reentrant=False)
        with deferred.pause():
            torch.autograd.backward(result.sum())
    deferred.commit()
    torch.testing.assert_close(statistics(model), statistics(whole), rtol=1e-12, atol=1e-12)


def test_a_layer_called_twice_is_updated_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.norm(x).detach() * 0 + x.square())
            return result

    torch.manual_seed(0)
    model = Twice().double()
    whole = copy.deepcopy(model)
    batch = torch.randn(11, 3).double()
    whole(batch)
    feed(model, batch).commit()
    torch.testing.assert_close(statistics(model), statistics(whole), rtol=1e-12, atol=1e-12)


def test_evaluation_and_untracked_layers_are_left_alone() -> None:
    batch = torch.randn(11, 3)
    frozen = nn.BatchNorm1d(3).eval()
    frozen.running_mean.fill_(2.0)  # type: ignore[union-attr]
    expected = frozen(batch)
    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    for layer in (frozen, untracked):
        before = statistics(layer)
        deferred = DeferredBatchNorm(layer)
        output = layer(batch)
        deferred.commit()
        torch.testing.assert_close(statistics(layer), before, rtol=0.0, atol=0.0)
        assert layer is untracked or torch.equal(output, expected)
    assert not untracked.track_running_stats


def test_an_error_in_the_layer_leaves_it_tracking() -> None:
    layer = nn.BatchNorm1d(3)
    deferred = DeferredBatchNorm(layer)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        layer(torch.randn(2, 3, 4, 5))
    assert layer.track_running_stats
    deferred.commit()
    assert int(layer.num_batches_tracked or 0) == 0


def test_stages_of_both_front_ends_defer() -> None:
    case = CASES[1]
    batch = case.inputs(6)[0]
    for tracer in ("fx", "export"):
        model = case.model()
        whole = copy.deepcopy(model)
        graph = split(model, ["0.1"], example=(batch,), tracer=tracer)
        whole(batch)
        all_deferred = [DeferredBatchNorm(stage.module) for stage in graph.stages]
        for micro_batch in torch.split(batch, [4, 2]):
            (middle,) = graph.stages[0].module(micro_batch)
            graph.stages[1].module(middle)
        for deferred in all_deferred:
            deferred.commit()
        first = {name: each for name, each in statistics(whole).items() if name.startswith("0.0.")}
        assert first
        ours = {name: each for name, each in statistics(model).items() if name in first}
        torch.testing.assert_close(ours, first, rtol=1e-12, atol=1e-12)
        assert int(model.get_buffer("0.1.1.0.num_batches_tracked")) == 1
