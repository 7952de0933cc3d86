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
from syncline.compat.horovod.ops import allreduce_async_, synchronize
from syncline.compat.horovod.parameters import PassesError, after_gradient, below
from syncline.compat.horovod.process_sets import ProcessSet
from syncline.errors import IncompatibleError, UnsupportedError

__all__ = ["AdasumOptimizer", "adasum_optimizer"]


class AdasumOptimizer(Optimizer):
    """What `DistributedOptimizer(op=Adasum)` puts before the class of the script's optimizer."""

    _deltas: _Deltas | None = None
    """None in a copy: a plain optimizer."""
    _origin: Optimizer

    @property
    def backward_passes_per_step(self) -> int:
        """Passes whose gradients add up before a step."""
        return 1 if self._deltas is None else self._deltas.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, add up the gradients of so many passes."""
        if self._deltas is not None:
            self._deltas.passes = passes

    def synchronize(self) -> None:
        """Nothing: gradients are not exchanged, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: a step that is not exchanged would part the ranks."""
        raise PassesError("with op=Adasum the steps are exchanged, and none can skip it: call optimizer.step() alone")
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


class _Deltas:
    """What each step of this rank adds to its parameters, and how the ranks' are combined."""

    def __init__(
        self, named: Mapping[str, Parameter], compressor: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        self.passes = passes
        self.stepping = False
        self._named = {name: named[name] for name in sorted(named) if named[name].requires_grad}
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._compressor = compressor
        self._set = process_set
        self._counts: dict[int, int] = {}
        self._hooks = [after_gradient(parameter, self._arrived) for parameter in self._named.values()]

    def starts(self) -> dict[str, Tensor]:
        """The parameters before a step."""
        return {name: parameter.detach().clone() for name, parameter in self._named.items()}

    def combine(self, starts: Mapping[str, Tensor]) -> None:
        """Make the parameters what they were, plus all ranks' steps. A rank that had no gradient adds zeros."""
        self._counts.clear()
        under_way = []
        for name, parameter in self._named.items():
            delta = parameter.detach() - starts[name]
            sent, kept = self._compressor.compress(delta)
            handle = allreduce_async_(sent, name=f"adasum.{name}", op=Adasum, process_set=self._set)
            under_way.append((name, parameter, handle, kept))
        for name, parameter, handle, kept in under_way:
            delta = self._compressor.decompress(synchronize(handle), kept)
            parameter.detach().copy_(starts[name] + delta)

    def zero(self) -> None:
        """The gradients are about to be dropped."""
        if self._counts and not self.stepping:
            raise PassesError(
                "optimizer.zero_grad() after loss.backward() and before optimizer.step() would drop gradients that no "
                "step has used: call it before backward(), or after step()"
            )
        self._counts.clear()

    def _arrived(self, parameter: Tensor) -> None:
        count = self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if count > self.passes and not self.stepping:
            raise PassesError(
                f"{self._names[id(parameter)]} got gradients in more than backward_passes_per_step={self.passes} "
                "backward passes before optimizer.step(): make backward_passes_per_step larger, or call "
                "optimizer.step() after each"
            )


def adasum_optimizer(
    optimizer: Optimizer, named: Mapping[str, Parameter], compression: Any, passes: int, process_set: ProcessSet
) -> AdasumOptimizer:
    """The optimizer, as one whose steps are combined by Adasum."""
    if process_set.process_set_id != 0:
        raise UnsupportedError(f"op=Adasum on {process_set!r}: it works on the global process set")
    compressor = _compressor(compression)
    size = process_set.size()
    if size & (size - 1):
        raise IncompatibleError(f"Adasum combines pairs of ranks: it needs a power of two of them, not {size}")
    made = below(AdasumOptimizer, optimizer)
    made._origin = optimizer
    made._deltas = _Deltas(named, compressor, passes, process_set)
    return made


def _compressor(compression: Any) -> type[Compressor]:
    """Adasum weighs whole tensors, so that a step must travel as one: as it is, or in half precision."""
    for known in (NoneCompressor, FP16Compressor):
        if compression is known or (compression is None and known is NoneCompressor):
            return known
    codec = codec_of(compression)
    raise IncompatibleError(f"op=Adasum with {codec!r}: it takes Compression.none or Compression.fp16")
