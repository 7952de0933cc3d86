"""Means over the workers of what lies beside the weights: the same shapes, by the run's collective and codec.

Gradients are reduced while backward runs; differences of weights are not of any backward pass. They go the same way:
in buckets, encoded, with error feedback by the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.reduction import Communicator, GradientReducer, ReducerOptions, ReductionPass, ReductionPolicy
from syncline.strategies.base import RunSettings, trained, wide_dtype

__all__ = ["DeltaReducer", "coding_here", "coding_of_all", "load_coding_of_all"]


def coding_of_all(gradients: GradientReducer) -> dict[str, Any]:
    """What the codec has that is the same on all workers, and the order of summation."""
    coding = gradients.codec_state
    return {"layout": gradients.layout(), **({} if coding is None else {"coding": coding.shared_state()})}


def load_coding_of_all(gradients: GradientReducer, state: Mapping[str, Any]) -> None:
    """Take it back."""
    if "layout" in state:
        gradients.load_layout(state["layout"])
    if gradients.codec_state is not None:
        gradients.codec_state.load_shared_state(state.get("coding", {}))


def coding_here(gradients: GradientReducer) -> dict[str, Any]:
    """What the codec has kept back on this worker."""
    return {} if gradients.codec_state is None else gradients.codec_state.state()


class DeltaReducer:
    """Reduces tensors like the model's parameters.

    `begin` and `finish` may stand steps apart: the exchange goes on beside them.
    """

    def __init__(self, model: nn.Module, exchange: Communicator, settings: RunSettings, wide: bool = False) -> None:
        """`wide`: the tensors are float32 where the model is in half precision."""
        self._exchange = exchange
        # Parameters of their own, for their gradients; the memory is the model's.
        shadows = {
            name: nn.Parameter(each.detach().to(wide_dtype(each.dtype)) if wide else each.detach())
            for name, each in trained(model).items()
        }
        self._gradients = GradientReducer(
            shadows,
            exchange,
            ReductionPolicy(subject="changes of the weights"),
            ReducerOptions(
                codec=exchange.codec if exchange.size > 1 else None,
                bucket_bytes=settings.bucket_bytes,
                check_finite=settings.check_finite,
                attach_hooks=False,
                seed=settings.seed,
                diagnose_every=settings.diagnose,
            ),
        )

    def prepare(self) -> None:
        """Choose now how tensors are sent: that takes seconds, which are none of the first round's."""
        if self._exchange.size > 1:
            self._gradients.lay_out()

    def begin(self, tensors: Sequence[Tensor], weight: float = 1.0, active: bool = True) -> ReductionPass:
        """Begin to average tensors, one for each trained parameter; they are scratch from now on."""
        return self._gradients.reduce(tensors, weight, active)

    def finish(self, begun: ReductionPass) -> tuple[list[Tensor], int]:
        """The means, to be used before the next `begin`; and how many workers are active.

        Where nobody's weight counted the means are nothing.
        """
        control = begun.complete()
        begun.install()
        means = [self._given(shadow) for shadow in self._gradients.parameters]
        self._gradients.release(begun)
        return means, control.active

    def forget(self) -> None:
        """Drop what the codec has kept back: what comes next is of another kind."""
        coding = self._gradients.codec_state
        if coding is not None:
            coding.load_shared_state({"step": coding.step})
            coding.load([])

    def close(self) -> None:
        """Let go of it."""
        self._gradients.close()

    def shared_state(self) -> dict[str, Any]:
        """What the codec has that is the same on all workers, and the order of summation."""
        return coding_of_all(self._gradients)

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        load_coding_of_all(self._gradients, state)

    def local_state(self) -> dict[str, Any]:
        """What the codec has kept back here."""
        return coding_here(self._gradients)

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take it back, that of workers that are gone too."""
        if self._gradients.codec_state is not None:
            self._gradients.codec_state.load(states)

    @staticmethod
    def _given(shadow: nn.Parameter) -> Tensor:
        found, shadow.grad = shadow.grad, None
        return torch.zeros_like(shadow) if found is None else found.detach()
