"""How gradients flow through the operations, against NumPy.

Each rank sends a gradient of its own back through a result: the sum of result × gradient is what is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.compat.horovod.reference import (
    OPS,
    Array,
    adasum,
    close,
    draw,
    gathered,
    numbers,
    reduced,
    run_all,
    same,
    shared_out,
    simulated,
    tensor,
    traded,
)
from tests.strategies.cases import backward, on_gloo

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def leaf(array: Array, dtype: torch.dtype) -> Tensor:
    return tensor(array, dtype).requires_grad_()


def send_back(results: Sequence[Tensor], gradients: Sequence[Array]) -> None:
    """One backward pass over all of them."""
    told = [tensor(gradient, result.dtype) for result, gradient in zip(results, gradients, strict=True)]
    torch.autograd.backward(list(results), told)


def gradient_of(own: Tensor) -> Tensor:
    assert own.grad is not None, "no gradient has arrived"
    return own.grad


def of_allreduce(members: hvd.ProcessSet) -> None:
    """Combined as the tensors were, factors included."""
    for dtype, before, after in zip(REAL, (1.0, 0.5, 1.0, 0.5), (1.0, 0.3, 0.3, 1.0), strict=True):
        for op in OPS:
            arrays = numbers(members, (2, 3), dtype, 0, 3)
            gradients = numbers(members, (2, 3), dtype, 1, 3)
            own = leaf(arrays[members.rank()], dtype)
            found = hvd.allreduce(own, op=op, prescale_factor=before, postscale_factor=after, process_set=members)
            same(found, reduced(arrays, op, dtype, before, after), dtype, op)
            send_back([found], [gradients[members.rank()]])
            same(gradient_of(own), reduced(gradients, op, dtype, before, after), dtype, op)


def of_single_numbers(members: hvd.ProcessSet) -> None:
    """0 dimensions, forth and back: allreduce, allgather and broadcast."""
    root = (members.ranks or [])[0]
    arrays, gradients = (numbers(members, (), torch.float32, seed) for seed in (0, 1))
    mine = members.rank()
    own = leaf(arrays[mine], torch.float32)
    send_back([hvd.allreduce(own, process_set=members)], [gradients[mine]])
    same(gradient_of(own), reduced(gradients, hvd.Average, torch.float32), torch.float32)
    own = leaf(arrays[mine], torch.float32)
    rows = [draw((members.size(),), torch.float32, 2, place) for place in range(members.size())]
    send_back([hvd.allgather(own, process_set=members)], [rows[mine]])
    same(gradient_of(own), reduced(rows, hvd.Average, torch.float32)[mine], torch.float32)
    own = leaf(arrays[mine], torch.float32)
    send_back([hvd.broadcast(own, root, process_set=members)], [gradients[mine]])
    total = reduced(gradients, hvd.Average, torch.float32)
    same(gradient_of(own), total if mine == 0 else np.zeros_like(total), torch.float32)


def of_grouped_allreduce(members: hvd.ProcessSet) -> None:
    for op in OPS:
        drawn = [numbers(members, shape, torch.float32, seed, 3) for seed, shape in enumerate(((), (4,), (2, 3)))]
        back = [numbers(members, arrays[0].shape, torch.float32, 7, 3) for arrays in drawn]
        own = [leaf(arrays[members.rank()], torch.float32) for arrays in drawn]
        found = hvd.grouped_allreduce(own, op=op, process_set=members)
        send_back(found, [gradients[members.rank()] for gradients in back])
        for each, gradients in zip(own, back, strict=True):
            same(gradient_of(each), reduced(gradients, op, torch.float32), torch.float32, op)


def of_adasum(members: hvd.ProcessSet) -> None:
    if members.size() & (members.size() - 1):
        return
    arrays, gradients = (numbers(members, (2, 3), torch.float32, seed) for seed in (0, 1))
    own = leaf(arrays[members.rank()], torch.float32)
    send_back([hvd.allreduce(own, op=hvd.Adasum, process_set=members)], [gradients[members.rank()]])
    close(gradient_of(own), adasum(gradients, torch.float32), torch.float32)


def of_compressed(members: hvd.ProcessSet) -> None:
    """Through half precision there and back."""
    arrays, gradients = (numbers(members, (5,), torch.float32, seed) for seed in (0, 1))
    own = leaf(arrays[members.rank()], torch.float32)
    found = hvd.allreduce(own, compression=hvd.Compression.fp16, process_set=members)
    half = [array.astype(np.float16) for array in arrays]
    same(found, reduced(half, hvd.Average, torch.float16).astype(np.float32), torch.float32, "fp16")
    send_back([found], [gradients[members.rank()]])
    half = [gradient.astype(np.float16) for gradient in gradients]
    same(gradient_of(own), reduced(half, hvd.Average, torch.float16).astype(np.float32), torch.float32, "fp16")


def of_allgather(members: hvd.ProcessSet) -> None:
    """Each rank's rows get the average of what comes back for them. Members have different numbers of rows."""
    for dtype in REAL:
        for tail in ((), (3,), (2, 2)):
            rows = [(place + 1) % 3 for place in range(members.size())]
            arrays = [draw((count, *tail), dtype, 0, place) for place, count in enumerate(rows)]
            gradients = numbers(members, (sum(rows), *tail), dtype, 1)
            own = leaf(arrays[members.rank()], dtype)
            send_back([hvd.allgather(own, process_set=members)], [gradients[members.rank()]])
            start = sum(rows[: members.rank()])
            wanted = reduced(gradients, hvd.Average, dtype)[start : start + rows[members.rank()]]
            same(gradient_of(own), wanted, dtype, rows)


def of_grouped_allgather(members: hvd.ProcessSet) -> None:
    rows = [place + 1 for place in range(members.size())]
    drawn = [[draw((count, 2), torch.float64, seed, place) for place, count in enumerate(rows)] for seed in range(3)]
    back = [numbers(members, (sum(rows), 2), torch.float64, 10 + seed) for seed in range(3)]
    own = [leaf(arrays[members.rank()], torch.float64) for arrays in drawn]
    found = hvd.grouped_allgather(own, process_set=members)
    send_back(found, [gradients[members.rank()] for gradients in back])
    start = sum(rows[: members.rank()])
    for each, gradients in zip(own, back, strict=True):
        wanted = reduced(gradients, hvd.Average, torch.float64)[start : start + rows[members.rank()]]
        same(gradient_of(each), wanted, torch.float64)


def of_broadcast(members: hvd.ProcessSet) -> None:
    """The root gets the average, the others zeros."""
    for dtype in REAL:
        for place, root in enumerate(members.ranks or ()):
            arrays, gradients = (numbers(members, (2, 3), dtype, seed) for seed in (0, 1))
            own = leaf(arrays[members.rank()], dtype)
            send_back([hvd.broadcast(own, root, process_set=members)], [gradients[members.rank()]])
            total = reduced(gradients, hvd.Average, dtype)
            same(gradient_of(own), total if members.rank() == place else np.zeros_like(total), dtype, root)


def of_alltoall(members: hvd.ProcessSet) -> None:
    """Back the way they came, with splits and without."""
    size, rank = members.size(), members.rank()
    splits = [[(source + 2 * to) % 3 for to in range(size)] for source in range(size)]
    came = [[split[to] for split in splits] for to in range(size)]
    for dtype in REAL:
        arrays = [draw((sum(split), 2), dtype, 0, place) for place, split in enumerate(splits)]
        gradients = [draw((sum(row), 2), dtype, 1, place) for place, row in enumerate(came)]
        own = leaf(arrays[rank], dtype)
        output, received = hvd.alltoall(own, splits[rank], process_set=members)
        assert not received.requires_grad
        send_back([output], [gradients[rank]])
        same(gradient_of(own), traded(gradients, came)[rank], dtype, splits)
        even, back = (numbers(members, (2 * size,), dtype, seed) for seed in (2, 3))
        own = leaf(even[rank], dtype)
        whole = hvd.alltoall(own, process_set=members)
        assert isinstance(whole, Tensor)
        send_back([whole], [back[rank]])
        same(gradient_of(own), traded(back, [[2] * size] * size)[rank], dtype)


def of_reducescatter(members: hvd.ProcessSet) -> None:
    """Every rank's rows come back to all; after a sum times the number of ranks, as Horovod has it."""
    size, rank = members.size(), members.rank()
    for dtype in REAL:
        for op in (hvd.Average, hvd.Sum):
            for before, after in ((1.0, 1.0), (0.5, 4.0)):
                arrays = numbers(members, (5, 2), dtype, 0, 3)
                shares = shared_out(np.zeros((5, 2)), size)
                gradients = [draw(share.shape, dtype, 1, place, 3) for place, share in enumerate(shares)]
                own = leaf(arrays[rank], dtype)
                found = hvd.reducescatter(
                    own, op=op, prescale_factor=before, postscale_factor=after, process_set=members
                )
                send_back([found], [gradients[rank]])
                times = before * after * (size if op == hvd.Sum else 1)
                same(gradient_of(own), gathered(gradients) * gradients[0].dtype.type(times), dtype, op)


def of_grouped_reducescatter(members: hvd.ProcessSet) -> None:
    size, rank = members.size(), members.rank()
    drawn = [numbers(members, (rows,), torch.float32, rows) for rows in (3, 5, 8)]
    back = [
        [draw(share.shape, torch.float32, 9, place) for place, share in enumerate(shared_out(arrays[0], size))]
        for arrays in drawn
    ]
    own = [leaf(arrays[rank], torch.float32) for arrays in drawn]
    found = hvd.grouped_reducescatter(own, op=hvd.Sum, process_set=members)
    send_back(found, [gradients[rank] for gradients in back])
    for each, gradients in zip(own, back, strict=True):
        same(gradient_of(each), gathered(gradients) * np.float32(size), torch.float32)


def of_a_whole_model(members: hvd.ProcessSet) -> None:
    """Through several operations and something between them."""
    arrays = numbers(members, (3,), torch.float64)
    own = leaf(arrays[members.rank()], torch.float64)
    mean = hvd.allreduce(own * own, process_set=members)
    backward((hvd.allgather(mean * 2.0, process_set=members) * 0.5).sum())
    # The gradient of each row is 1 on every rank, and averages of that are 1 too.
    same(gradient_of(own), arrays[members.rank()] * 2.0, torch.float64)


CASES = (
    of_allreduce,
    of_single_numbers,
    of_grouped_allreduce,
    of_adasum,
    of_compressed,
    of_allgather,
    of_grouped_allgather,
    of_broadcast,
    of_alltoall,
    of_reducescatter,
    of_grouped_reducescatter,
    of_a_whole_model,
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated(case: Callable[[hvd.ProcessSet], None], ranks: int) -> None:
    simulated(ranks, case)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, run_all, *CASES)
