"""Each simulated rank has its own random-number state of torch, NumPy and `random`, as a process would."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

__all__ = ["RandomStates"]

_numpy_state: Any = np.random  # the generators behind np.random can be swapped, which its type hints do not say
_python: Any = random.getrandbits.__self__  # type: ignore[attr-defined]  # the generator behind random's functions
MERSENNE_WORDS = 625
"""Words of 32 bits in the state of `random.Random`: the position, then the state of the Mersenne Twister."""


_State = tuple[torch.Tensor, Any, Any]
"""The states of torch, NumPy and `random`."""


def _words_of(generator: random.Random) -> memoryview:
    """The memory that holds the state of a generator."""
    words = (ctypes.c_uint32 * MERSENNE_WORDS).from_address(id(generator) + object.__basicsize__)
    return memoryview(words).cast("B")


def _knows_layout() -> bool:
    """Whether this Python keeps the state of a generator as CPython does."""
    if random.Random.__basicsize__ < object.__basicsize__ + 4 * MERSENNE_WORDS:
        return False
    generator = random.Random(0)
    position, *words = _words_of(generator).cast("I")
    return bool(generator.getstate()[1] == (*words, position))


_words = _words_of(_python) if _knows_layout() else None
"""Copying the words takes 1 µs. `getstate` makes an object of each of them, which takes 20 µs."""


def _take_python(generator: Any = _python, words: memoryview | None = _words) -> Any:
    return generator.getstate() if words is None else (bytes(words), generator.gauss_next)


def _put_python(state: Any) -> None:
    if _words is None:
        random.setstate(state)
    else:
        _words[:], _python.gauss_next = state


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
        self._outside = self._rank = None

    def switch(self, rank: int) -> None:
        """Make the generators those of `rank`. After `leave` this does nothing."""
        if rank == self._rank or self._outside is None:
            return
        if self._rank is not None:
            self._states[self._rank] = self._take()
        self._put(self._states.pop(rank) if rank in self._states else self._fresh(rank))
        self._rank = rank

    def _fresh(self, rank: int) -> _State:
        torch_seed, numpy_seed, python_seed = np.random.SeedSequence([abs(self.seed), rank]).generate_state(3)
        python = random.Random(int(python_seed))
        return (
            torch.Generator().manual_seed(int(torch_seed)).get_state(),
            np.random.MT19937(int(numpy_seed)),
            _take_python(python, None if _words is None else _words_of(python)),
        )

    @staticmethod
    def _take() -> _State:
        return (torch.default_generator.get_state(), _numpy_state.get_bit_generator(), _take_python())

    @staticmethod
    def _put(state: _State) -> None:
        of_torch, of_numpy, of_python = state
        torch.default_generator.set_state(of_torch)
        _numpy_state.set_bit_generator(of_numpy)
        _put_python(of_python)
