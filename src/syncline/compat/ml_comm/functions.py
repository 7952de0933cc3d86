"""The functions of Cray's plugin on lists of arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from syncline.compat.ml_comm.arrays import ScriptArray, import_arrays, join_arrays, split_buffers
from syncline.compat.ml_comm.config import TeamConfig
from syncline.compat.ml_comm.context import PluginContext, context
from syncline.errors import PeerLostError, SpecError
from syncline.world import Group, allgather, allreduce
from syncline.world import barrier as barrier_of
from syncline.world import broadcast as broadcast_array

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "get_n_ranks",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
]


def init(threads_per_team: int = 1, teams: int = 1, max_elements: int = 0, framework: str = "") -> None:
    """Make the teams. Every rank calls it.

    `max_elements` bounds the elements of a call of `gradients`. `threads_per_team` and `framework` have no effect.
    """
    if teams < 1:
        raise SpecError(f"init(teams={teams}): the number of teams, at least 1")
    if max_elements < 1:
        raise SpecError(f"init(max_elements={max_elements}): the most elements of one call of gradients, at least 1")
    context().make_teams(teams, max_elements)


def config_team(team: int, algorithm: int, ksteps: int, max_steps: int, verbosity: int = 0, perf_freq: int = 0) -> None:
    """Set which calls of `gradients` are pipelined, and what rank 0 prints. Every rank calls it; rank 0's values count.

    With `ksteps >= max_steps` every call is synchronous. With fewer, calls are pipelined after `ksteps`: each returns
    the means of the call before. With a negative number all are pipelined but the last `-ksteps`. `algorithm` has no
    effect. With `verbosity` 1 rank 0 prints this choice, with 2 also the performance of every `perf_freq` calls.
    """
    context().team(team).configure(TeamConfig(algorithm, ksteps, max_steps, verbosity, perf_freq))


def get_rank() -> int:
    """The number of this rank."""
    return context().world.rank


def get_nranks() -> int:
    """The number of ranks."""
    return context().world.size


get_n_ranks = get_nranks


def broadcast(values: Sequence[Any], root: int = 0) -> list[Any]:
    """Copy the root's arrays into those of all ranks. Returns them too, for arrays that cannot be changed.

    >>> import numpy as np, syncline as sl
    >>> import syncline.compat.ml_comm as mc
    >>> def start(world):
    ...     weights = np.full(2, float(mc.get_rank()))
    ...     mc.broadcast([weights], 1)
    ...     return weights.tolist()
    >>> sl.simulate(start, ranks=3).results
    ([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    """
    here = context()
    arrays, _ = import_arrays(values, "broadcast")
    buffers = [broadcast_array(buffer, root, group=here.group) for buffer in join_arrays(arrays)]
    parts = split_buffers(arrays, buffers)
    return [
        None if array is None or part is None else array.fill(part) for array, part in zip(arrays, parts, strict=True)
    ]


def gradients(values: Sequence[Any], team: int = 0) -> list[Any]:
    """The means of the arrays over all ranks, as new arrays. An entry that is None stays None.

    In pipelined calls they are the means of the call before: see `config_team`.

    >>> import numpy as np, syncline as sl
    >>> import syncline.compat.ml_comm as mc
    >>> def step(world):
    ...     mc.init(1, 1, 1000)
    ...     [mean, _] = mc.gradients([np.full(2, mc.get_rank() + 1.0), None], 0)
    ...     return mean.tolist()
    >>> sl.simulate(step, ranks=2).results
    ([1.5, 1.5], [1.5, 1.5])
    """
    return context().team(team).gradients(values)


def average(array: Any) -> Any:
    """Replace an array by its mean over the ranks. Returns it too, for values that cannot be changed."""
    here = context()
    found = ScriptArray(array, "average")
    return found.fill(allreduce(found.tensor, op="mean", group=here.group))


def barrier() -> None:
    """Wait until every rank has called it."""
    barrier_of(context().group)


def check_buffers_match(values: Sequence[Any], verbosity: int = 0) -> int:
    """0 if the arrays have the same bits on all ranks, otherwise 1. Every rank calls it, and gets the same answer.

    With `verbosity` rank 0 prints the answer. A rank that waits for ranks that do not call it gets a `PeerLostError`
    with their numbers after the timeout of the world.

    >>> import numpy as np, syncline as sl
    >>> import syncline.compat.ml_comm as mc
    >>> sl.simulate(lambda world: mc.check_buffers_match([np.zeros(2), np.ones(1) * world.rank]), ranks=2).results
    (1, 1)
    """
    here = context()
    arrays, _ = import_arrays(values, "check_buffers_match")
    digests = torch.tensor([_digest(array) for array in arrays], dtype=torch.int64)
    whole = torch.tensor([[len(arrays), _digest_of(digests.numpy().tobytes())]])
    own_key = _count_key(here.world.rank)
    number = here.world.control_store().add(own_key, 1)
    try:
        table = allgather(whole, group=here.checks)
        differing = _differing(table, digests, here.checks)
    except PeerLostError as error:
        raise _explain(here, number, error) from error
    if verbosity and here.world.rank == 0:
        print(f"ml_comm: check_buffers_match: {differing or 'all ranks have the same buffers'}", flush=True)
    return int(bool(differing))


def _count_key(rank: int) -> str:
    """Where a rank counts its calls of `check_buffers_match`."""
    return f"ml_comm/checks/{rank}"


def _explain(here: PluginContext, number: int, error: PeerLostError) -> PeerLostError:
    """Say which ranks have not called `check_buffers_match`, if it is for them that this rank has waited."""
    store, ranks = here.world.control_store(), range(here.world.size)
    missing = [rank for rank in ranks if rank != here.world.rank and store.add(_count_key(rank), 0) < number]
    if not missing:
        return error
    named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return PeerLostError(
        f"check_buffers_match: {named} did not call it within {error.seconds:.3g} s: every rank must call it, also "
        "where only rank 0 uses the answer",
        peer=missing[0],
        pending="check_buffers_match",
        seconds=error.seconds,
    )


def _differing(table: torch.Tensor, digests: torch.Tensor, group: Group) -> str:
    """How the buffers differ, in words; empty if they are the same. All ranks get the same text."""
    rows = table.tolist()
    rank = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if rank is None:
        return ""
    if rows[rank][0] != rows[0][0]:
        return f"rank 0 has {rows[0][0]} buffers, and rank {rank} has {rows[rank][0]}"
    if len({count for count, _ in rows}) > 1:  # another rank has fewer or more
        return f"rank {rank} differs from rank 0"
    each = allgather(digests.view(1, -1), group=group)
    place = int((each[rank] != each[0]).nonzero()[0])
    return f"buffer {place} of {len(digests)} on rank {rank} differs from rank 0's"


def _digest(array: ScriptArray | None) -> int:
    if array is None:
        return 0
    tensor = array.tensor.detach().cpu().contiguous()
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return _digest_of(kind + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def _digest_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
