"""A random-number state apart from the program's, for what all ranks must draw alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["Randomness", "reseed"]

_numpy: Any = np.random  # the generators behind np.random can be swapped, which its type hints do not say


class Randomness:
    """The state of torch's, NumPy's and Python's generators that one seed begins; swapped in while it is used.

    What was in place before is in place after, so that reading data does not change what the model draws. Only the
    CPU's generator of torch: samplers and datasets draw there.

    >>> before = torch.get_rng_state()
    >>> mine = Randomness(seed=3)
    >>> with mine.used():
    ...     first = torch.rand(2)
    >>> with mine.used():
    ...     second = torch.rand(2)
    >>> torch.equal(torch.cat([first, second]), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    True
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = (torch.default_generator, *generators)
        fresh = torch.Generator().manual_seed(seed).get_state()
        self._torch = [
            fresh if each.device.type == "cpu" else torch.Generator(each.device).manual_seed(seed).get_state()
            for each in self._generators
        ]
        self._numpy: Any = np.random.MT19937(seed)
        self._python = random.Random(seed).getstate()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from this state inside, and go on where it stopped the next time."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, generator in enumerate(self._generators):
            state = generator.get_state()
            generator.set_state(self._torch[place])
            self._torch[place] = state
        numpy = _numpy.get_bit_generator()
        _numpy.set_bit_generator(self._numpy)
        self._numpy = numpy
        python = random.getstate()
        random.setstate(self._python)
        self._python = python


def reseed(seed: int) -> None:
    """Begin the generators of this process anew: for a loader's own processes, which have no other use for them."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
