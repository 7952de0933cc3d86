"""torch.distributed.pipelining on gloo, for `syncline bench pipeline`.

Its module is imported only when it is needed: the import of torch.distributed.pipelining takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from syncline.errors import IncompatibleError
from syncline.parallel.stages import StageGraph

__all__ = ["TorchPipeline"]


class TorchPipeline:
    """Torch's 1F1B among all ranks of the default process group, with stage s of a model on rank s.

    `loss_fn` returns the mean loss of a micro-batch. Gradients are scaled by torch to those of the mean loss.
    """

    def __init__(self, graph: StageGraph, rank: int, micro_batches: int, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        _check_chain(graph)
        self.module: nn.Module = graph.stages[rank].module
        """This rank's stage. Its parameters have their names in the whole model."""
        self._first, self._last = rank == 0, rank == len(graph.stages) - 1
        stage = PipelineStage(self.module, rank, len(graph.stages), torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_fn)

    def forward_backward(self, x: Tensor, y: Tensor) -> None:
        """Compute the gradients of a batch. The outputs are not collected, which is torch's faster setting."""
        inputs = (x,) if self._first else ()
        target = {"target": y, "losses": []} if self._last else {}
        self._schedule.step(*inputs, **target, return_outputs=False)  # type: ignore[arg-type]


def _check_chain(graph: StageGraph) -> None:
    """Refuse values that skip a stage: torch's stages send only to their neighbours."""
    for value in graph.values:
        if value.consumers != (value.source + 1,):
            raise IncompatibleError(
                f"torch's stages pass values only to the next stage, and {value.name} of stage {value.source} is used "
                f"by {list(value.consumers)}: leave --against torch out, or cut the model elsewhere"
            )
