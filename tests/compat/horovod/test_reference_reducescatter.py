"""Reduce and share out, against NumPy: each dtype, op, number of rows and factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.compat.horovod.reference import (
    DTYPES,
    Array,
    numbers,
    reduced,
    run_all,
    same,
    shared_out,
    simulated,
    tensor,
)
from tests.strategies.cases import on_gloo

SHAPES: tuple[tuple[int, ...], ...] = ((0,), (1,), (4,), (7, 3), (12,), (5, 2, 2), (6, 0), (0, 2))


def part(arrays: list[Array], members: hvd.ProcessSet, op: int, dtype: torch.dtype, **factors: float) -> Array:
    """This member's rows of what all give."""
    return shared_out(reduced(arrays, op, dtype, **factors), members.size())[members.rank()]


def every_dtype_op_and_shape(members: hvd.ProcessSet) -> None:
    """Rows that divide, that do not, fewer than members, none; all in flight at once."""
    waiting = []
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum):
            for seed, shape in enumerate(SHAPES):
                arrays = numbers(members, shape, dtype, seed)
                own = tensor(arrays[members.rank()], dtype)
                handle = hvd.reducescatter_async(own, op=op, process_set=members)
                waiting.append((handle, own, arrays, op, dtype))
    for handle, own, arrays, op, dtype in waiting:
        same(hvd.synchronize(handle), part(arrays, members, op, dtype), dtype, (op, own.shape))
        same(own, arrays[members.rank()], dtype, "what reducescatter_async was given")


def every_form(members: hvd.ProcessSet) -> None:
    """Alone and grouped, waiting or not; averages unless told otherwise."""
    for dtype in DTYPES:
        drawn = [numbers(members, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
        own = [tensor(arrays[members.rank()], dtype) for arrays in drawn]
        waited = [hvd.reducescatter(each, process_set=members) for each in own]
        grouped = hvd.grouped_reducescatter(own, process_set=members)
        begun = hvd.synchronize(hvd.grouped_reducescatter_async(own, process_set=members))
        for name, found in (("alone", waited), ("grouped", grouped), ("grouped, begun", begun)):
            for result, arrays in zip(found, drawn, strict=True):
                same(result, part(arrays, members, hvd.Average, dtype), dtype, name)


def factors(members: hvd.ProcessSet) -> None:
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum):
            for before, after in ((0.5, 1.0), (2.5, 0.3)):
                arrays = numbers(members, (5, 2), dtype)
                wanted = part(arrays, members, op, dtype, before=before, after=after)
                own = tensor(arrays[members.rank()], dtype)
                told: dict[str, Any] = {"op": op, "prescale_factor": before, "postscale_factor": after}
                found = [
                    hvd.reducescatter(own, **told, process_set=members),
                    hvd.synchronize(hvd.reducescatter_async(own, **told, process_set=members)),
                    *hvd.grouped_reducescatter([own, own], **told, process_set=members),
                    *hvd.synchronize(hvd.grouped_reducescatter_async([own], **told, process_set=members)),
                ]
                for result in found:
                    same(result, wanted, dtype, told)


def groups_of_many_dtypes(members: hvd.ProcessSet) -> None:
    drawn = [(numbers(members, (5, 2), dtype), dtype) for dtype in DTYPES]
    own = [tensor(arrays[members.rank()], dtype) for arrays, dtype in drawn]
    for result, (arrays, dtype) in zip(hvd.grouped_reducescatter(own, process_set=members), drawn, strict=True):
        same(result, part(arrays, members, hvd.Average, dtype), dtype)


def not_contiguous(members: hvd.ProcessSet) -> None:
    for dtype in DTYPES:
        arrays = numbers(members, (4, 6), dtype)
        views: list[Callable[[Any], Any]] = [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1, ::6]]
        for view in views:
            own = view(tensor(arrays[members.rank()], dtype))
            found = hvd.reducescatter(own, op=hvd.Sum, process_set=members)
            same(found, part([view(array) for array in arrays], members, hvd.Sum, dtype), dtype)


def by_name(members: hvd.ProcessSet) -> None:
    for turn in range(3):
        arrays = numbers(members, (5,), torch.float32, turn)
        own = tensor(arrays[members.rank()], torch.float32)
        found = hvd.reducescatter(own, name="w", op=hvd.Sum, process_set=members)
        same(found, part(arrays, members, hvd.Sum, torch.float32), torch.float32, turn)


CASES = (every_dtype_op_and_shape, every_form, factors, groups_of_many_dtypes, not_contiguous, by_name)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated(case: Callable[[hvd.ProcessSet], None], ranks: int) -> None:
    simulated(ranks, case)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, run_all, *CASES)
