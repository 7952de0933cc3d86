"""Running statistics of batch normalisation when a batch is computed in micro-batches.

A layer normalises each micro-batch with the micro-batch's own mean and variance. Its running statistics are for
evaluation and should be those of the whole batch. Updated after each of m micro-batches, they would be
averaged over m times fewer samples, and the variance between the means of the micro-batches would be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["LAYERS", "DeferredBatchNorm"]

LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class _Moments:
    """The number of values per channel, their means, and the sums of squared differences from the means."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> _Moments:
        inputs = inputs.detach()
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        channels = wide.movedim(1, 0).flatten(1)
        variance, mean = torch.var_mean(channels, dim=1, correction=0)
        return cls(channels.shape[1], mean, variance * channels.shape[1])

    def merged(self, other: _Moments) -> _Moments:
        """The moments of both sets of values together (Chan)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        squares = self.squares + other.squares + delta.square() * (self.count * other.count / count)
        return _Moments(count, mean, squares)


class DeferredBatchNorm:
    """Updates the running statistics of `BatchNorm1d`, `2d` and `3d` layers once a step, as the whole batch would.

        n = n_a + n_b      δ = mean_b − mean_a
        mean = mean_a + δ·n_b/n      S = S_a + S_b + δ²·n_a·n_b/n      for each micro-batch b
        running_mean ← (1 − f)·running_mean + f·mean
        running_var ← (1 − f)·running_var + f·S/(n − 1)

    f is the layer's momentum, or 1/num_batches_tracked if that is None; `num_batches_tracked` counts steps. Layers in
    evaluation mode and layers without running statistics act as always. A layer that `module` calls several times
    is updated once for each call, in the order of the calls.

    Chan, Golub and LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances*, 1979.

    >>> layer = nn.BatchNorm1d(1)
    >>> deferred = DeferredBatchNorm(layer)
    >>> for micro_batch in torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]]):
    ...     _ = layer(micro_batch)
    >>> layer.running_mean, int(layer.num_batches_tracked)
    (tensor([0.]), 0)
    >>> deferred.commit()
    >>> layer.running_mean, int(layer.num_batches_tracked)          # 0.9 · 0 + 0.1 · 3
    (tensor([0.3000]), 1)
    """

    def __init__(self, module: nn.Module) -> None:
        self._pending: dict[_BatchNorm, list[_Moments]] = {}
        """For each layer, the moments of its first, second, … call in a forward of `module`."""
        self._calls: dict[_BatchNorm, int] = {}
        self._untracked: set[_BatchNorm] = set()
        self._paused = False
        self._handles = [module.register_forward_pre_hook(self._begin)]
        for layer in module.modules():
            if isinstance(layer, LAYERS):
                self._handles.append(layer.register_forward_pre_hook(self._stop_tracking))
                self._handles.append(layer.register_forward_hook(self._record, always_call=True))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, layers are called to compute activations again. Wrap every backward pass in it."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def commit(self) -> None:
        """Update the running statistics with all micro-batches since the last commit. Call it once a step."""
        with torch.no_grad():
            for layer, calls in self._pending.items():
                for moments in calls:
                    _update(layer, moments)
        self._pending.clear()

    def discard(self) -> None:
        """Forget the micro-batches since the last commit, for a step that is repeated."""
        self._pending.clear()

    def close(self) -> None:
        """Remove all hooks. What is not committed is lost."""
        self.discard()
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._calls.clear()

    def _stop_tracking(self, layer: _BatchNorm, inputs: Any) -> None:
        """A layer that does not track normalises in the same way, and updates nothing."""
        if layer.training and layer.track_running_stats and layer.running_mean is not None:
            layer.track_running_stats = False
            self._untracked.add(layer)

    def _record(self, layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor | None) -> None:
        """Runs after the forward of a layer, also if it has raised an error."""
        if layer not in self._untracked:
            return
        self._untracked.remove(layer)
        layer.track_running_stats = True
        if self._paused or output is None:
            return
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        calls = self._pending.setdefault(layer, [])
        moments = _Moments.of(inputs[0])
        if call < len(calls):
            calls[call] = calls[call].merged(moments)
        else:
            calls.append(moments)


def _update(layer: _BatchNorm, moments: _Moments) -> None:
    """One update of a layer's running statistics, as its own forward makes it."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = layer.momentum or 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        factor = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    variance = moments.squares / (moments.count - 1)
    for running, value in ((layer.running_mean, moments.mean), (layer.running_var, variance)):
        running.copy_((1 - factor) * running.to(value.dtype) + factor * value)
