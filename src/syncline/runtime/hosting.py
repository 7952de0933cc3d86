"""What a simulation asks of the process it runs in, and gives back afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["calm_collector", "one_processor", "one_torch_thread"]


@contextmanager
def one_processor() -> Iterator[None]:
    """Keep this thread, and those it starts, on the processor it runs on now; where the system cannot, do nothing.

    Only one task of a simulation runs at a time, and waking a thread on another processor takes longer.
    """
    try:
        allowed = os.sched_getaffinity(0)
        # The 39th field of stat; the 2nd is a name in brackets that may hold spaces.
        here = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
        os.sched_setaffinity(0, {here} & allowed or {min(allowed)})
    except (AttributeError, OSError, ValueError, IndexError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A pool of threads per virtual rank would starve the machine, and sums would vary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def calm_collector() -> Iterator[None]:
    """Millions of small objects come and go without cycles: look for cycles less often."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100 * max(700, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
