"""Every way to reduce, against NumPy: each dtype, op, shape and factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.compat.horovod.reference import (
    DTYPES,
    OPS,
    REALS,
    SHAPES,
    WHOLES,
    Array,
    adasum,
    close,
    draw,
    numbers,
    reduced,
    run_all,
    same,
    simulated,
    tensor,
)
from tests.strategies.cases import on_gloo

Form = Callable[..., Sequence[Tensor]]


def _each(call: Callable[..., Tensor]) -> Form:
    return lambda tensors, **told: [call(each, **told) for each in tensors]


def _awaited(call: Callable[..., int]) -> Form:
    """All are begun before the first is waited for."""

    def form(tensors: Sequence[Tensor], **told: Any) -> list[Tensor]:
        return [hvd.synchronize(handle) for handle in [call(each, **told) for each in tensors]]

    return form


def _group(call: Callable[..., int]) -> Form:
    return lambda tensors, **told: hvd.synchronize(call(tensors, **told))


FORMS: dict[str, Form] = {
    "allreduce": _each(hvd.allreduce),
    "allreduce_": _each(hvd.allreduce_),
    "allreduce_async": _awaited(hvd.allreduce_async),
    "allreduce_async_": _awaited(hvd.allreduce_async_),
    "grouped_allreduce": hvd.grouped_allreduce,
    "grouped_allreduce_": hvd.grouped_allreduce_,
    "grouped_allreduce_async": _group(hvd.grouped_allreduce_async),
    "grouped_allreduce_async_": _group(hvd.grouped_allreduce_async_),
}


def small(op: int) -> int:
    """Numbers whose products are exact too."""
    return 3 if op == hvd.Product else 9


def every_dtype_op_and_shape(members: hvd.ProcessSet) -> None:
    """All of them in flight at once."""
    waiting = []
    for dtype in DTYPES:
        for op in OPS:
            for seed, shape in enumerate(SHAPES):
                arrays = numbers(members, shape, dtype, seed, small(op))
                own = tensor(arrays[members.rank()], dtype)
                handle = hvd.allreduce_async(own, op=op, process_set=members)
                waiting.append((handle, reduced(arrays, op, dtype), dtype, (op, shape)))
    for handle, wanted, dtype, note in waiting:
        same(hvd.synchronize(handle), wanted, dtype, note)


def every_form(members: hvd.ProcessSet) -> None:
    """The result, and whose memory it is in; each form with all dtypes, and with all ops by turns."""
    for number, (name, form) in enumerate(FORMS.items()):
        for count, dtype in enumerate(DTYPES, start=number):
            op = OPS[count % len(OPS)]
            shapes: tuple[tuple[int, ...], ...] = ((), (4,), (2, 3))
            drawn = [numbers(members, shape, dtype, seed, small(op)) for seed, shape in enumerate(shapes)]
            own = [tensor(arrays[members.rank()], dtype) for arrays in drawn]
            found = form(own, op=op, process_set=members)
            for result, mine, arrays in zip(found, own, drawn, strict=True):
                same(result, reduced(arrays, op, dtype), dtype, (name, op))
                if name.endswith("_"):
                    assert result is mine, name
                else:
                    same(mine, arrays[members.rank()], dtype, f"what {name} was given")


def factors(members: hvd.ProcessSet) -> None:
    """Whole numbers are cut off twice, before and after; products stay exact only with the small factor."""
    waiting = []
    for dtype in DTYPES:
        for op in OPS:
            scales = [(0.5, 1.0), (1.0, 0.3), (0.5, 0.3)] + [(2.5, 1.0), (2.5, 0.3)] * (op != hvd.Product)
            for seed, (before, after) in enumerate(scales):
                arrays = numbers(members, (3, 4), dtype, seed, small(op))
                one, two = (tensor(arrays[members.rank()], dtype) for _ in range(2))
                told: dict[str, Any] = {"op": op, "prescale_factor": before, "postscale_factor": after}
                alone = hvd.allreduce_async_(one, **told, process_set=members)
                grouped = hvd.grouped_allreduce_async([two, two[0]], **told, process_set=members)
                waiting.append((alone, grouped, reduced(arrays, op, dtype, before, after), dtype, told))
    for alone, grouped, wanted, dtype, note in waiting:
        same(hvd.synchronize(alone), wanted, dtype, note)
        both, row = hvd.synchronize(grouped)
        same(both, wanted, dtype, note)
        same(row, wanted[0], dtype, note)


def factors_that_wait(members: hvd.ProcessSet) -> None:
    """The forms that wait take the same factors."""
    for dtype in (torch.int32, torch.bfloat16, torch.float32):
        arrays = numbers(members, (5,), dtype)
        wanted = reduced(arrays, hvd.Average, dtype, 2.5, 0.3)
        for name, form in FORMS.items():
            own = tensor(arrays[members.rank()], dtype)
            (found,) = form([own], prescale_factor=2.5, postscale_factor=0.3, process_set=members)
            same(found, wanted, dtype, name)


def averages_of_whole_numbers(members: hvd.ProcessSet) -> None:
    """Cut off towards zero, negative ones too: a result that the average, not its floor, gives."""
    for dtype in WHOLES:
        ones = [np.full(3, -1 if dtype != torch.uint8 else 1, dtype=draw((), dtype, 0, 0).dtype)] * members.size()
        ones[0] = ones[0] * 2
        found = hvd.allreduce(tensor(ones[members.rank()], dtype), op=hvd.Average, process_set=members)
        total = int(sum(int(each[0]) for each in ones))
        wanted = int(total * (1.0 / members.size()))  # by a factor, as Horovod does: not a division
        same(found, np.full(3, wanted, dtype=ones[0].dtype), dtype, total)


def wraps_around(members: hvd.ProcessSet) -> None:
    """Sums and products of whole numbers are taken in their dtype."""
    for dtype in WHOLES:
        most = torch.iinfo(dtype).max
        arrays = [np.full(4, most - place, dtype=draw((), dtype, 0, 0).dtype) for place in range(members.size())]
        for op in (hvd.Sum, hvd.Product):
            found = hvd.allreduce(tensor(arrays[members.rank()], dtype), op=op, process_set=members)
            same(found, reduced(arrays, op, dtype), dtype, op)


def not_contiguous(members: hvd.ProcessSet) -> None:
    """Turned, every second, a column, and one element, which torch calls contiguous. In place the gaps stay."""
    for dtype in DTYPES:
        arrays = numbers(members, (4, 6), dtype)
        mine = arrays[members.rank()]
        total = reduced(arrays, hvd.Sum, dtype)
        for name, form in FORMS.items():
            views: list[Callable[[Any], Any]] = [
                lambda x: x.T,
                lambda x: x[:, ::2],
                lambda x: x[1:, 3],
                lambda x: x[1, ::6],
            ]
            whole = [tensor(mine, dtype) for _ in views]
            own = [view(each) for view, each in zip(views, whole, strict=True)]
            assert [each.is_contiguous() for each in own] == [False, False, False, True]
            found = form(own, op=hvd.Sum, process_set=members)
            for view, result, each in zip(views, found, whole, strict=True):
                same(result, view(total), dtype, name)
                wanted: Array = mine.copy()
                if name.endswith("_"):
                    view(wanted)[...] = view(total)
                same(each, wanted, dtype, f"around what {name} has changed")


def by_name(members: hvd.ProcessSet) -> None:
    """The same names again and again, with other numbers, in another order on each rank."""
    dtypes = [torch.int16, torch.float16, torch.float32]
    for turn in range(4):
        drawn = {f"w{n}": (numbers(members, (n + 1,), dtype, 10 * turn + n), dtype) for n, dtype in enumerate(dtypes)}
        names = list(drawn)
        shift = (members.rank() + turn) % len(names)
        handles = {}
        for name in names[shift:] + names[:shift]:
            arrays, dtype = drawn[name]
            own = tensor(arrays[members.rank()], dtype)
            handles[name] = hvd.allreduce_async_(own, name=name, process_set=members)
        for name in names:
            arrays, dtype = drawn[name]
            same(hvd.synchronize(handles[name]), reduced(arrays, hvd.Average, dtype), dtype, (turn, name))


def the_old_word(members: hvd.ProcessSet) -> None:
    """`average` still says sum or average, and that it is old."""
    arrays = numbers(members, (3,), torch.float32)
    for old, op in ((True, hvd.Average), (False, hvd.Sum)):
        for form in FORMS.values():
            own = tensor(arrays[members.rank()], torch.float32)
            (found,) = form([own], average=old, process_set=members)
            same(found, reduced(arrays, op, torch.float32), torch.float32)


def real_numbers(members: hvd.ProcessSet) -> None:
    """Where the order of a sum shows, within the rounding."""
    for dtype in (torch.float32, torch.float64):
        draws = [np.random.default_rng(place).normal(size=(257, 3)) for place in range(members.size())]
        arrays = [drawn.astype(str(dtype).removeprefix("torch.")) for drawn in draws]
        for op in OPS:
            found = hvd.allreduce(tensor(arrays[members.rank()], dtype), op=op, process_set=members)
            close(found, reduced(arrays, op, dtype), dtype, op)


def adaptive_sums(members: hvd.ProcessSet) -> None:
    """Adasum of each tensor by itself; not on a number of ranks that makes no pairs."""
    if members.size() & (members.size() - 1):
        return
    for name, form in FORMS.items():
        for dtype in REALS:
            drawn = [numbers(members, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
            own = [tensor(arrays[members.rank()], dtype) for arrays in drawn]
            found = form(own, op=hvd.Adasum, process_set=members)
            for result, arrays in zip(found, drawn, strict=True):
                close(result, adasum(arrays, dtype), dtype, name)


def adaptive_sums_with_factors(members: hvd.ProcessSet) -> None:
    if members.size() & (members.size() - 1):
        return
    arrays = numbers(members, (2, 3), torch.float32)
    arrays[-1][...] = 0  # nothing has no direction
    own = tensor(arrays[members.rank()], torch.float32).T
    found = hvd.allreduce(own, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0, process_set=members)
    close(found, adasum([array.T / 2 for array in arrays], torch.float32) * 3, torch.float32)


CASES = (
    every_dtype_op_and_shape,
    every_form,
    factors,
    factors_that_wait,
    averages_of_whole_numbers,
    wraps_around,
    not_contiguous,
    by_name,
    real_numbers,
    adaptive_sums,
    adaptive_sums_with_factors,
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated(case: Callable[[hvd.ProcessSet], None], ranks: int) -> None:
    simulated(ranks, case)


def test_adasum_takes_two_rounds_on_four_ranks() -> None:
    simulated(4, adaptive_sums, adaptive_sums_with_factors)


def test_the_old_word_warns() -> None:
    with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
        simulated(3, the_old_word)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, run_all, *CASES)
