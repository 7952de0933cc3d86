"""`DistributedOptimizer(op=Adasum)`: every rank steps by itself, and the steps are combined.

w ← w + adasum(Δ_0, …, Δ_{p−1}), where Δ_i is what rank i's own optimizer would add to w. Gradients stay as they are on
each rank, so learning rates need no scaling by the number of ranks. Maleki et al., MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.compat.horovod.basics import Adasum
from syncline.compat.horovod.compression import Compressor, FP16Compressor, NoneCompressor, codec_of
from syncline.compat.horovod.errors import UnsupportedAdasumError
from syncline.compat.horovod.ops import allreduce_async_, check_adasum, synchronize
from syncline.compat.horovod.parameters import (
    NO_NEW_GROUPS,
    TOO_MANY_PASSES,
    ZEROED_TOO_SOON,
    PassesError,
    after_gradient,
    below,
    loading_in_place,
)
from syncline.compat.horovod.process_sets import ProcessSet
from syncline.errors import IncompatibleError

__all__ = ["AdasumOptimizer", "adasum_optimizer"]


class AdasumOptimizer(Optimizer):
    """What `DistributedOptimizer(op=Adasum)` puts before the class of the script's optimizer."""

    _deltas: _Deltas | None = None
    """None in a copy: a plain optimizer."""
    _origin: Optimizer
    _parameter_names: dict[Parameter, str]
    op = Adasum
    process_set: ProcessSet

    @property
    def backward_passes_per_step(self) -> int:
        """Passes whose gradients add up before a step."""
        return 1 if self._deltas is None else self._deltas.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, add up the gradients of so many passes."""
        if self._deltas is not None:
            self._deltas.passes = passes

    def synchronize(self) -> None:
        """Nothing: gradients are not exchanged, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: a step that is not exchanged would part the ranks."""
        raise PassesError(
            "Skipping synchronization is not supported when using Adasum optimizer: the steps are exchanged, and none "
            "can skip it; call optimizer.step() alone"
        )
        yield

    def step(self, closure: Any = None) -> Any:
        """Step on this rank, and combine the step with those of the others."""
        deltas = self._deltas
        if deltas is None:
            return super().step(closure)
        self._origin._opt_called = True  # type: ignore[attr-defined]  # a scheduler may have been made for it
        starts = deltas.starts()
        deltas.stepping = True
        try:
            loss = super().step() if closure is None else super().step(closure)
        finally:
            deltas.stepping = False
        deltas.combine(starts)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch: hooks around a step run in the class below

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; refused between a backward pass and the step that it was for."""
        if self._deltas is not None:
            self._deltas.zero()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's."""
        with loading_in_place(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; refused once the ranks have agreed on the parameters."""
        if self._deltas is not None:
            raise IncompatibleError(NO_NEW_GROUPS)
        super().add_param_group(param_group)


class _Deltas:
    """What each step of this rank adds to its parameters, and how the ranks' are combined."""

    def __init__(
        self, named: Mapping[str, Parameter], compressor: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        self.passes = passes
        self.stepping = False
        self._named = {name: named[name] for name in sorted(named)}
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._compressor = compressor
        self._set = process_set
        self._counts: dict[int, int] = {}
        self._hooks = [
            after_gradient(parameter, self._arrived) for parameter in self._named.values() if parameter.requires_grad
        ]

    def starts(self) -> dict[str, Tensor]:
        """The parameters before a step, without those that are frozen."""
        return {name: parameter.detach().clone() for name, parameter in self._named.items() if parameter.requires_grad}

    def combine(self, starts: Mapping[str, Tensor]) -> None:
        """Make the parameters what they were, plus all ranks' steps. A rank that had no gradient adds zeros."""
        self._counts.clear()
        under_way = []
        for name, start in starts.items():
            parameter = self._named[name]
            delta = parameter.detach() - start
            sent, kept = self._compressor.compress(delta)
            handle = allreduce_async_(sent, name=f"adasum.{name}", op=Adasum, process_set=self._set)
            under_way.append((name, parameter, handle, kept))
        for name, parameter, handle, kept in under_way:
            delta = self._compressor.decompress(synchronize(handle), kept)
            parameter.detach().copy_(starts[name] + delta)

    def zero(self) -> None:
        """The gradients are about to be dropped."""
        if self._counts and not self.stepping:
            raise PassesError(f"{ZEROED_TOO_SOON}: it would drop gradients that no step has used")
        self._counts.clear()

    def _arrived(self, parameter: Tensor) -> None:
        count = self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if count > self.passes and not self.stepping:
            raise PassesError(
                f"{TOO_MANY_PASSES} ({self._names[id(parameter)]}, backward_passes_per_step={self.passes}), or call "
                "optimizer.step() after each pass"
            )


def adasum_optimizer(
    optimizer: Optimizer, named: Mapping[str, Parameter], compression: Any, passes: int, process_set: ProcessSet
) -> AdasumOptimizer:
    """The optimizer, as one whose steps are combined by Adasum."""
    if process_set.process_set_id != 0:
        raise UnsupportedAdasumError(f"op=Adasum on {process_set!r}: it works on the global process set")
    compressor = _compressor(compression)
    check_adasum(process_set)
    made = below(AdasumOptimizer, optimizer)
    made._origin = optimizer
    made._parameter_names = {parameter: name for name, parameter in named.items()}
    made.process_set = process_set
    made._deltas = _Deltas(named, compressor, passes, process_set)
    return made


def _compressor(compression: Any) -> type[Compressor]:
    """Adasum weighs whole tensors, so that a step must travel as one: as it is, or in half precision."""
    for known in (NoneCompressor, FP16Compressor):
        if compression is known or (compression is None and known is NoneCompressor):
            return known
    codec = codec_of(compression)
    raise IncompatibleError(f"op=Adasum with {codec!r}: it takes Compression.none or Compression.fp16")
