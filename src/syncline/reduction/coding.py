"""What a codec remembers of each parameter, by its name: residuals, velocities, warm starts. Buckets come and go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import Codec, RngKey, TensorSlice
from syncline.errors import IncompatibleError

__all__ = ["CodecState"]

logger = logging.getLogger("syncline")

DOUBLE = (torch.float64, torch.complex128)
ALIKE = "q"
"""What is the same on every rank, and must be: a warm start."""


class CodecState:
    """The codec of a run and its state on this rank."""

    def __init__(
        self, codec: Codec, names: Sequence[str], parameters: Sequence[Tensor], rank: int, size: int, seed: int
    ) -> None:
        self.codec = codec
        self.step = 0
        """Rounds so far: they decide the random bits."""
        self.picked = [
            codec.codec_for(name, parameter.numel()) for name, parameter in zip(names, parameters, strict=True)
        ]
        self.owned: dict[tuple[str, int], Tensor] = {}
        """Of a shard's owner: what its second encoding has left, by parameter and first element."""
        self._names = list(names)
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._rows = [_row(parameter) for parameter in parameters]
        self._rank = rank
        self._size = size
        self._seed = seed
        self._residuals: dict[str, Tensor] = {}
        self._memories: dict[str, dict[str, Tensor]] = {}
        self._reduced: dict[int, tuple[Callable[[], Tensor | None], int, int]] = {}
        """The latest reduced gradients of codecs that count steps: the tensor, its version, and the number of steps."""
        self._double = [
            name
            for name, parameter, picked in zip(names, parameters, self.picked, strict=True)
            if picked is not None and parameter.dtype in DOUBLE
        ]

    @property
    def residual_needs_sum(self) -> bool:
        """Whether a step may only begin when the sums of the one before are back."""
        return any(codec.traits.residual_needs_sum for codec in self.picked if codec is not None)

    @property
    def rng(self) -> RngKey:
        """This step's random bits."""
        return RngKey(self._seed, self.step, self._rank)

    def warn_of_rounding(self) -> None:
        """Log on rank 0 that parameters of double precision are sent as float32."""
        if self._double and self._rank == 0:
            logger.warning(
                "%d parameters are of double precision (the first is %s), and codecs encode float32: what %r sends of "
                "them is rounded to float32; leave the codec out to keep all digits",
                *(len(self._double), self._double[0], self.codec),
            )

    def part(self, index: int, flat: Tensor, present: bool) -> TensorSlice:
        """A gradient for the codec. One that is not there adds nothing, and leaves the residual for another step."""
        name, codec = self._names[index], self.picked[index]
        assert codec is not None, f"{name} goes as it is"
        residual = None
        if present and codec.keeps_residual:
            if name not in self._residuals:
                self._residuals[name] = self._zeros(index)
            residual = self._residuals[name]
        # What the sums decide is the same on every rank, also on those that had nothing to add.
        memory = self._memories.setdefault(name, {}) if present or codec.traits.allreducible else {}
        return TensorSlice(flat, name, shape=self._shapes[index], residual=residual, memory=memory)

    def note_reduced(self, index: int, gradient: Tensor, steps: int) -> None:
        """Record that a parameter's gradient is now the mean over the ranks, after `steps` steps of the optimizer."""
        codec = self.picked[index]
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
                f"{self.picked[index]!r} takes every pass for a step of its momentum: wrap all backward passes of a "
                "step but the last in run.no_sync(), or give the momentum to the optimizer"
            )

    def shared_state(self) -> dict[str, Any]:
        """What is the same on every rank."""
        warm = {name: memory[ALIKE] for name, memory in self._memories.items() if ALIKE in memory}
        return {"step": self.step, "warm": warm}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.step, self._memories = int(state.get("step", 0)), {}
        for name, start in state.get("warm", {}).items():
            device = self._rows[self._number(name)][1]
            self._memories.setdefault(name, {})[ALIKE] = start.to(device, copy=True)

    def state(self) -> dict[str, Any]:
        """This rank's own: tensors by parameter name."""
        memories = {
            name: {key: value for key, value in memory.items() if key != ALIKE}
            for name, memory in self._memories.items()
        }
        return {
            "size": self._size,
            "residuals": dict(self._residuals),
            "memories": {name: memory for name, memory in memories.items() if memory},
            "owned": [{"name": name, "start": start, "left": left} for (name, start), left in self.owned.items()],
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take back what this rank has kept, and what ranks have that are gone: what was not sent yet is still sent.

        What an owner of a shard had left finds its piece again, or goes into this rank's next gradient. A mean over
        another number of ranks divides by another number, and residuals are scaled so that they count as before.
        """
        self._residuals, self.owned = {}, {}
        for number, state in enumerate(states):
            scale = self._size / int(state.get("size", self._size))
            for name, left in state.get("residuals", {}).items():
                self._add(name, 0, left * scale)
            for name, memory in state.get("memories", {}).items() if number == 0 else ():
                device = self._rows[self._number(name)][1]
                own = self._memories.setdefault(name, {})
                own.update({key: value.to(device, copy=True) for key, value in memory.items()})
            for piece in state.get("owned", []):
                self._take_over(piece["name"], int(piece["start"]), piece["left"] * scale)

    def _take_over(self, name: str, start: int, left: Tensor) -> None:
        if (name, start) in self.owned:
            self._add(name, start, left)
        else:
            self.owned[name, start] = left.to(self._rows[self._number(name)][1])

    def _number(self, name: str) -> int:
        if name not in self._names:
            raise IncompatibleError(f"the state is of another model: it has {name}, which this one has not")
        return self._names.index(name)

    def _add(self, name: str, start: int, left: Tensor) -> None:
        index = self._number(name)
        codec = self.picked[index]
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


def _row(parameter: Tensor) -> tuple[int, torch.device]:
    """How many real numbers a parameter has, and where they lie."""
    return parameter.numel() * (2 if parameter.is_complex() else 1), parameter.device
