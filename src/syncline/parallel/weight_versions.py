"""Versions of the weights of a stage, for pipelines that update the weights while micro-batches are under way.

A backward pass must use the weights of its forward pass (weight stashing). Without vertical synchronisation a forward
uses the present weights. With it, all stages use the version that the first stage has used for this micro-batch::

    stage s of n (from 0), micro-batch j     updates that its forward has seen
    weight stashing                          j − (n−1−s)
    vertical synchronisation                 j − (n−1)

PipeDream (Harlap et al. 2018; Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["WeightVersions"]


class WeightVersions:
    """Copies of the weights of one stage. A copy lives until the backward pass of its micro-batch, or its last use."""

    def __init__(self, module: nn.Module, lag: int, first_stage_lag: int, vertical_sync: bool) -> None:
        """`lag`: updates by which a forward on this stage is behind; `first_stage_lag`: on the first stage."""
        self._module, self._lag, self._first_lag, self._vertical = module, lag, first_stage_lag, vertical_sync
        self.updates = 0
        self._oldest = 0
        """The version at the latest moment when the pipeline was empty: no stage uses an older one since."""
        self._history: dict[int, dict[str, Tensor]] = {}
        """With vertical synchronisation: the weights before each of the latest updates, by their number."""
        self.used: list[tuple[int, int]] = []
        """The last micro-batches, and how many updates their forward has seen. For tests and diagnosis."""

    def weights_for(self, micro_batch: int) -> dict[str, Tensor] | None:
        """The weights for a forward pass; None: the present ones, which do not change before its backward pass."""
        version = self.updates
        if self._vertical:
            version = min(version, max(self._oldest, micro_batch - self._first_lag))
        self.used = [*self.used[-63:], (micro_batch, version)]
        if version != self.updates:
            return dict(self._history[version])
        return None if self._lag == 0 else self._copy()

    def before_update(self, micro_batch: int) -> None:
        """The weights are about to change."""
        if self._vertical and self._first_lag > self._lag:
            self._history[self.updates] = self._copy()
            for version in [each for each in self._history if each < self.updates - self._first_lag]:
                del self._history[version]
        self.updates += 1

    def forget(self) -> None:
        """The pipeline is empty: no version is in use."""
        self._history.clear()
        self._oldest = self.updates

    def _copy(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {
                name: each.detach().clone().requires_grad_(each.requires_grad)
                for name, each in self._module.named_parameters()
            }
