"""Compiles numba's kernels in one process, before several processes need them."""

from __future__ import annotations

import syncline as sl
from syncline.codecs.kernels.dispatch import needs_compiling
from tests.strategies.cases import train

CODECS = {
    "cast('bf16', stochastic=True)": "auto",
    "quantize(4)": "auto",
    "onebit": "split",
    "threshold(0.01)": "auto",
    "powersgd(2)": "auto",
    "topk(0.1)": "sparse_doubling",
    "topk(0.5)": "sparse_split",
    "topk(0.1)|quantize(4)": "auto",
}
"""Codecs of the tests on gloo, and the algorithms that reduce them."""


def compile_kernels() -> None:
    """Fill an empty cache of numba with the kernels that `CODECS` call.

    Compiling takes half a minute of CPU. Without the cache each process of a pool compiles the same kernels.
    """
    if needs_compiling():
        sl.simulate(use_codecs, ranks=2)


def use_codecs(world: sl.World) -> None:
    """Train two steps with each codec."""
    for codec, algorithm in CODECS.items():
        train(world, "sgd", 2, codec=codec, algorithm=algorithm)
