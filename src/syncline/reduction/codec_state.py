"""The codec's state of each parameter, by name: residuals, velocities, warm starts. And its diagnosis.

The diagnosis is recorded in the run log. It is off by default, because it also sums the gradients densely.

sl_codec_error     ‖e − C(e)‖ / ‖e‖ on rank 0, where e is what it encodes: gradient and residual
sl_codec_xi        ‖C(mean e) − mean C(e)‖ / ‖mean g‖ of codecs that select elements: the ξ of top-k SGD's
                   convergence assumption (Alistarh et al. 2018), which must stay bounded
sl_codec_density   the share of nonzero elements after the reduction
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.base import SHARED_MEMORY_KEY
from syncline.collectives.compressed.sparse import is_sparse
from syncline.errors import IncompatibleError
from syncline.reduction.buckets import real_numel
from syncline.reduction.communicator import Communicator

__all__ = ["CodecDiagnosis", "CodecState"]

logger = logging.getLogger("syncline")

DOUBLE_DTYPES = (torch.float64, torch.complex128)


class CodecState:
    """The codec of a run and its state on this rank."""

    def __init__(
        self, codec: Codec, names: Sequence[str], parameters: Sequence[Tensor], rank: int, size: int, seed: int
    ) -> None:
        self.codec = codec
        self.step = 0
        """Number of passes so far: it decides the random bits."""
        self.codecs = [
            codec.codec_for(name, parameter.numel()) for name, parameter in zip(names, parameters, strict=True)
        ]
        traits = [codec.traits for codec in self.codecs if codec is not None]
        self.residual_needs_sum = any(each.residual_needs_sum for each in traits)
        """A pass may begin only when the sums of the previous one are complete."""
        self.applies_momentum = any(each.momentum for each in traits)
        self.owner_residuals: dict[tuple[str, int], Tensor] = {}
        """What the owner of a shard did not send of its sums, by parameter and first element."""
        self._names = list(names)
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._rows = [(real_numel(parameter), parameter.device) for parameter in parameters]
        self._rank = rank
        self._size = size
        self._seed = seed
        self._residuals: dict[str, Tensor] = {}
        self._memories: dict[str, dict[str, Tensor]] = {}
        self._reduced: dict[int, tuple[Callable[[], Tensor | None], int, int]] = {}
        """The latest reduced gradients of codecs with momentum: the tensor, its version, and the number of steps."""
        self._double = [
            name
            for name, parameter, codec_of_it in zip(names, parameters, self.codecs, strict=True)
            if codec_of_it is not None and parameter.dtype in DOUBLE_DTYPES
        ]

    @property
    def rng(self) -> RngKey:
        """The key of this step's random bits."""
        return RngKey(self._seed, self.step, self._rank)

    def warn_of_rounding(self) -> None:
        """Log on rank 0 that parameters of double precision are sent as float32."""
        if self._double and self._rank == 0:
            logger.warning(
                "%d parameters are of double precision (the first is %s), and codecs encode float32: what %r sends of "
                "them is rounded to float32; leave the codec out to keep all digits",
                *(len(self._double), self._double[0], self.codec),
            )

    def slice_of(self, index: int, flat: Tensor, present: bool) -> TensorSlice:
        """A gradient with its codec state. A missing gradient adds nothing and keeps the residual for another step."""
        name, codec = self._names[index], self.codecs[index]
        assert codec is not None, f"{name} is sent unencoded"
        residual = None
        if present and codec.keeps_residual:
            if name not in self._residuals:
                self._residuals[name] = self._zeros(index)
            residual = self._residuals[name]
        # State that depends on the sums is the same on every rank, also on ranks without a gradient.
        memory = self._memories.setdefault(name, {}) if present or codec.traits.allreducible else {}
        return TensorSlice(flat, name, shape=self._shapes[index], residual=residual, memory=memory)

    def note_reduced(self, index: int, gradient: Tensor, steps: int) -> None:
        """Record that a parameter's gradient is now the mean over the ranks, after `steps` steps of the optimizer."""
        codec = self.codecs[index]
        if codec is not None and codec.traits.momentum:
            self._reduced[index] = (weakref.ref(gradient), gradient._version, steps)

    def check_whole_step(self, index: int, gradient: Tensor, steps: int) -> None:
        """Refuse a gradient to which a pass has added since it was reduced, with no step between.

        The codec would take the mean that it contains for a gradient, and apply its momentum to it again.
        """
        before, version, then = self._reduced.get(index, (lambda: None, 0, 0))
        # Adding is one change in place; a gradient that was set to zero, clipped or unscaled has had another.
        if before() is gradient and gradient._version == version + 1 and steps == then:
            raise IncompatibleError(
                f"{self._names[index]} got its gradient in a second backward pass before optimizer.step(), and "
                f"{self.codecs[index]!r} takes every pass for a step of its momentum: wrap all backward passes of a "
                "step but the last in run.no_sync(), or give the momentum to the optimizer"
            )

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A copy of the state before a pass, which `restore` takes back if a lost worker interrupts the pass."""
        shared, own = self.shared_state(), self.state()
        copies: tuple[dict[str, Any], dict[str, Any]] = _copy_tensors(shared), _copy_tensors(own)
        return copies

    def restore(self, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Take a snapshot back. Its residuals are scaled to the present number of ranks."""
        shared, own = snapshot
        self.load_shared_state(shared)
        self.load([own])

    def adopt_shared(self, shared: Mapping[str, Any]) -> None:
        """Take the part of the state that is the same on every rank from another rank. This rank's own stays."""
        for name, start in shared["warm"].items():
            device = self._rows[self._index_of(name)][1]
            self._memories.setdefault(name, {})[SHARED_MEMORY_KEY] = start.to(device, copy=True)

    def use_ranks(self, rank: int, size: int) -> None:
        """Continue with another number of ranks. Residuals are scaled, because means divide by another number."""
        if (rank, size) != (self._rank, self._size):
            snapshot = self.snapshot()
            self._rank, self._size = rank, size
            self.restore(snapshot)

    def shared_state(self) -> dict[str, Any]:
        """The state that is the same on every rank."""
        warm = {
            name: memory[SHARED_MEMORY_KEY] for name, memory in self._memories.items() if SHARED_MEMORY_KEY in memory
        }
        return {"step": self.step, "warm": warm}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.step, self._memories = int(state.get("step", 0)), {}
        for name, start in state.get("warm", {}).items():
            device = self._rows[self._index_of(name)][1]
            self._memories.setdefault(name, {})[SHARED_MEMORY_KEY] = start.to(device, copy=True)

    def state(self) -> dict[str, Any]:
        """The state of this rank: tensors by parameter name."""
        memories = {
            name: {key: value for key, value in memory.items() if key != SHARED_MEMORY_KEY}
            for name, memory in self._memories.items()
        }
        return {
            "size": self._size,
            "residuals": dict(self._residuals),
            "memories": {name: memory for name, memory in memories.items() if memory},
            "owned": [
                {"name": name, "start": start, "left": left} for (name, start), left in self.owner_residuals.items()
            ],
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of this rank, and of ranks that no longer exist: their residuals are still sent.

        The residual of a shard's owner stays with its shard, or is added to this rank's next gradient. A mean over
        another number of ranks divides by another number, so residuals are scaled.
        """
        self._residuals, self.owner_residuals = {}, {}
        for number, state in enumerate(states):
            scale = self._size / int(state.get("size", self._size))
            for name, left in state.get("residuals", {}).items():
                self._add_residual(name, 0, left * scale)
            for name, memory in state.get("memories", {}).items() if number == 0 else ():
                device = self._rows[self._index_of(name)][1]
                own = self._memories.setdefault(name, {})
                own.update({key: value.to(device, copy=True) for key, value in memory.items()})
            for piece in state.get("owned", []):
                self._load_owner_residual(piece["name"], int(piece["start"]), piece["left"] * scale)

    def _load_owner_residual(self, name: str, start: int, left: Tensor) -> None:
        if (name, start) in self.owner_residuals:
            self._add_residual(name, start, left)
        else:
            self.owner_residuals[name, start] = left.to(self._rows[self._index_of(name)][1])

    def _index_of(self, name: str) -> int:
        if name not in self._names:
            raise IncompatibleError(f"the state is of another model: it has {name}, which this one has not")
        return self._names.index(name)

    def _add_residual(self, name: str, start: int, left: Tensor) -> None:
        index = self._index_of(name)
        codec = self.codecs[index]
        if codec is None or not codec.keeps_residual:
            logger.warning("%s goes without error feedback now: what a step before had left of it is dropped", name)
            return
        if name not in self._residuals:
            self._residuals[name] = self._zeros(index)
        own = self._residuals[name][start : start + left.numel()]
        own += left.to(own.device)

    def _zeros(self, index: int) -> Tensor:
        numel, device = self._rows[index]
        return torch.zeros(numel, dtype=torch.float32, device=device)


class CodecDiagnosis:
    """The diagnosis of one step: `copy_before` a bucket is encoded, `record` when all are reduced."""

    def __init__(self, communicator: Communicator, rng: RngKey) -> None:
        self._communicator = communicator
        self._rng = rng
        self._copies: list[tuple[Codec, TensorSlice, TensorSlice]] = []
        """Each slice, which will hold the mean, and a copy from before."""

    def copy_before(self, codec: Codec, parts: Sequence[TensorSlice]) -> None:
        """Copy slices that are about to be encoded. They may hold NaN, which is reported elsewhere."""
        for part in parts:
            residual = torch.zeros_like(part.flat) if part.residual is None else part.residual.clone()
            memory = {key: value.clone() for key, value in part.memory.items()}
            self._copies.append((codec, part, replace(part, flat=part.flat.clone(), residual=residual, memory=memory)))

    def record(self) -> None:
        """Compute and record. Every rank calls it at the same point, because it sums tensors."""
        point, size = self._communicator.world.events.point, self._communicator.size
        for codec, part, then in self._copies:
            still = {key: value.clone() for key, value in then.memory.items() if key != "velocity"}
            gradient = then.flat.clone()
            sent = self._sent(codec, then)
            left = then.residual
            assert left is not None, "it was given one"
            whole = sent + left
            where = {"layer": part.name, "step": self._rng.step}
            point("sl_codec_error", _ratio(left, whole), **where)
            point("sl_codec_density", float(torch.count_nonzero(part.flat)) / max(1, part.numel), **where)
            if is_sparse(codec):
                mean_sent, mean = sent / size, whole / size
                for tensor in (mean_sent, mean, gradient):
                    self._communicator.sum_now(tensor, f"the diagnosis of {part.name}")
                of_mean = self._sent(codec, replace(then, flat=mean, residual=torch.zeros_like(mean), memory=still))
                point("sl_codec_xi", _ratio(of_mean - mean_sent, gradient / size), **where)

    def _sent(self, codec: Codec, probe: TensorSlice) -> Tensor:
        """Encode and decode a slice. Its residual then holds the rest."""
        if codec.traits.allreducible:
            for _ in codec.reduce_rounds([probe], self._rng, 1):
                pass
            return probe.flat
        assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
        out, rng = torch.empty_like(probe.flat), self._rng.for_slice(probe.name, probe.start)
        body = torch.zeros(codec.body_bytes(probe.numel, rng.step), dtype=torch.uint8, device=out.device)
        codec.read(body[: codec.write(probe, body, rng)], out, False)
        return out


def _copy_tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copy_tensors(value) for value in tree]
    return tree.clone() if isinstance(tree, Tensor) else tree


def _ratio(part: Tensor, whole: Tensor) -> float:
    norm = float(whole.norm())
    return float(part.norm()) / norm if norm else 0.0
