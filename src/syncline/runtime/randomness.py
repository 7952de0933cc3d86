"""Each simulated rank has its own random-number state of torch, NumPy and `random`, as a process would."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["RandomStates"]

_numpy_state: Any = np.random  # the generators behind np.random can be swapped, which its type hints do not say


@dataclass
class _State:
    torch: torch.Tensor
    numpy: Any
    python: Any


class RandomStates:
    """Swaps the global generators whenever the baton goes from one rank to another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._outside: _State | None = None
        self._rank: int | None = None
        self._states: dict[int, _State] = {}

    def enter(self) -> None:
        """Keep the caller's state."""
        self._outside = self._take()

    def leave(self) -> None:
        """Give the caller's state back."""
        assert self._outside is not None
        self._put(self._outside)
        self._rank = None

    def switch(self, rank: int | None) -> None:
        """Make the generators those of `rank`."""
        if rank is None or rank == self._rank:
            return
        if self._rank is not None:
            self._states[self._rank] = self._take()
        self._put(self._states.pop(rank) if rank in self._states else self._fresh(rank))
        self._rank = rank

    def _fresh(self, rank: int) -> _State:
        torch_seed, numpy_seed, python_seed = np.random.SeedSequence([abs(self.seed), rank]).generate_state(3)
        return _State(
            torch.Generator().manual_seed(int(torch_seed)).get_state(),
            np.random.MT19937(int(numpy_seed)),
            random.Random(int(python_seed)).getstate(),
        )

    @staticmethod
    def _take() -> _State:
        return _State(torch.get_rng_state(), _numpy_state.get_bit_generator(), random.getstate())

    @staticmethod
    def _put(state: _State) -> None:
        torch.set_rng_state(state.torch)
        _numpy_state.set_bit_generator(state.numpy)
        random.setstate(state.python)
