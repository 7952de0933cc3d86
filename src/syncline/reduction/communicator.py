"""How the ranks of one run communicate: a group of its own, and the collective that the user asked for.

Also checks that all ranks hold the same values, and broadcasts of one rank's tensors and state.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.codecs import Codec
from syncline.collectives import AUTO, NATIVE, Schedule, build, channel
from syncline.collectives.compressed import CompressedCollectives, RequestExecutor
from syncline.collectives.compressed.requests import WaitableReduction
from syncline.errors import IncompatibleError
from syncline.reduction.stats import Stats
from syncline.transports import Handle, Transport
from syncline.transports.messages import CompletedHandle
from syncline.world import Group, World, allgather, allreduce, broadcast_from, broadcast_object

__all__ = ["Communicator", "broadcast_tensors", "broadcast_tree", "check_same", "check_same_in"]

BATCH_BYTES = 1 << 20
"""Small tensors are broadcast together, up to about this size."""
AUTO_BUDGET_S = 1.5
"""Seconds that a trial of algorithms may take for each class of sizes, about. Then the prediction decides."""
PREFER_NATIVE_RATIO = 1.15
"""The engine's own needs no thread of ours beside backward: another must be faster by this ratio."""
NO_SPARE_PROCESSOR = "there is no spare processor for our Python beside backward"
"""A schedule of ours may win alone and still lose here: 1.15 times the step with two ranks on two cores."""


class Communicator:
    """World, group and collective of one run. Reductions start in the same order on every rank."""

    def __init__(
        self,
        world: World,
        collective: str,
        codec: Codec | None = None,
        group: Group | None = None,
        stats: Stats | None = None,
        peers: Group | None = None,
    ) -> None:
        """`group`: some ranks, created for this communicator alone. None: all ranks, in a new group.

        `stats`: of the run that counts what is sent here. None: new ones.
        `peers`: one rank of each group that reduces the same values as this one, such as the whole parameters of the
        workers of a tensor team. Choices by measurement are those of the first peer's group, so that all round alike.
        """
        self.world = world
        self.codec = codec
        self.compressed = CompressedCollectives(collective, codec)
        """Which collective reduces payloads that the wire cannot sum."""
        known = self.compressed.fixed is not None or collective in (NATIVE, AUTO)
        self.collective = collective if known else build("allreduce", collective).spec
        self.group = world.group() if group is None else group
        self.peers = peers if peers is not None and peers.size > 1 else None
        self.now = world.runtime.now
        alone = self.group.size == 1 and world.elastic is None
        self.stats = stats or Stats(world.events, world.runtime.lock(), alone=alone)
        self._choices_of_teams: dict[str, str] = {}
        """The choices of earlier teams of an elastic world."""
        self._use_group()
        if world.elastic is not None:
            world.elastic.communicators.append(self)

    def _use_group(self) -> None:
        """Set everything that depends on the ranks of the group."""
        self.rank, self.size = self.group.rank, self.group.size
        self._native = self.group.transport.native
        self._schedules: dict[tuple[int, torch.dtype, torch.device], Schedule | None] = {}
        """The schedule of each size and kind of tensor. None: the engine's own algorithm."""
        self.requests = RequestExecutor(
            self.group.channel, self.gather_algorithm == NATIVE, self._start_sum, self._call_in_comm_task
        )
        self.overlap_encoding = self.world.spare and self.size > 1 and self._native.available
        """Encoding has a processor beside backward, and an engine that sends without our help."""

    def rebind(self, transport: Transport) -> None:
        """Continue with the present team of an elastic world, on this channel. Choices of `auto` stay as they are."""
        if self.size > 1:
            self._choices_of_teams = self.choices
        self.world.rebind_group(self.group, transport)
        self._use_group()
        self.adopt(self._choices_of_teams)

    def prepare_compressed(self, buckets: Sequence[tuple[Codec, tuple[int, ...]]]) -> None:
        """Choose now how payloads of slices of these sizes are reduced."""
        if self.size > 1:
            for codec, sizes in buckets:
                self.compressed.choose(codec, sizes, self.size, self.group.auto.network)
            self._take_choices_of_peers()

    def prepare(self, sizes: list[tuple[int, torch.dtype, torch.device]]) -> None:
        """Choose now how tensors like these are reduced: a choice during training would change its rounding."""
        if self.collective != AUTO or self.size == 1:
            return
        auto, native = self.group.auto, self._native
        for numel, dtype, device in sizes:
            scratch = torch.empty(numel, dtype=dtype, device=device)
            if auto.chosen(scratch) is not None:
                continue
            if native.reduces(dtype, "sum") and not self.world.spare:
                auto.decide(scratch, NATIVE, NO_SPARE_PROCESSOR)
            else:
                auto.settle(scratch, "sum", budget=AUTO_BUDGET_S, prefer_native=PREFER_NATIVE_RATIO)
        self._take_choices_of_peers()

    def _take_choices_of_peers(self) -> None:
        if self.peers is not None:
            found = self.first_of_peers({**self.group.choices, **self.compressed.choices})
            self._schedules.clear()
            self.group.auto.adopt(self.compressed.adopt(found))

    def first_of_peers(self, value: Any) -> Any:
        """The first peer's value (dicts, lists and plain values): of what its group has decided by a clock."""
        return value if self.peers is None else broadcast_object(value, 0, group=self.peers)

    @property
    def choices(self) -> dict[str, str]:
        """What `auto` has chosen, by class of sizes."""
        if self.collective != AUTO or self.size == 1:
            return {}
        return self.group.choices | self.compressed.choices

    def adopt(self, choices: dict[str, str]) -> None:
        """Use the choices of an earlier run."""
        if self.collective == AUTO and self.size > 1:
            self._schedules.clear()
            self.group.auto.adopt(self.compressed.adopt(choices))

    def launch_sum(self, flat: Tensor, what: str, in_comm_task: bool = False) -> WaitableReduction:
        """Start to sum `flat` over the ranks, in place. `in_comm_task`: the caller is the comm task itself."""
        nbytes = flat.numel() * flat.element_size()
        self.stats.sent(nbytes, nbytes)
        return self._start_sum(flat, what, in_comm_task)

    def _start_sum(self, flat: Tensor, what: str, in_comm_task: bool) -> WaitableReduction:
        if self.size == 1:
            return _COMPLETE
        kind = (flat.numel(), flat.dtype, flat.device)
        schedule = self._schedules[kind] if kind in self._schedules else self._schedule_of(flat)
        if schedule is None:
            return _NativeSum(self, self._native.allreduce(flat, "sum"), what)
        if in_comm_task:
            channel.allreduce(self.group.channel, flat, "sum", schedule)
            return _COMPLETE
        return self._spawn(flat, schedule, what)

    def sum_now(self, flat: Tensor, what: str) -> None:
        """Sum `flat` in place before anything else starts: in the comm task, if that starts the others."""
        nbytes = flat.numel() * flat.element_size()
        self.stats.sent(nbytes, nbytes)
        if not self.overlap_encoding:
            self._start_sum(flat, what, False).wait()
            return
        self.group.call(f"the sum of {what}", lambda: self._start_sum(flat, what, True).wait(), async_=False)

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        reduced = allreduce(torch.tensor([value], dtype=torch.float64), op="mean", group=self.group)
        return float(reduced)

    def from_root(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor. It is sent through the CPU: ranks may share a GPU, which NCCL refuses.

        In an elastic world rank 0 may be lost; the next rank 0 is then the root.
        """
        if self.size == 1:
            return tensor
        sent: Tensor = broadcast_from(tensor.cpu(), root, group=self.group, replaceable=root == 0)
        return sent.to(tensor.device)

    @property
    def gather_algorithm(self) -> str:
        """The algorithm of all-gathers: the engine's own, unless the user asked for a schedule."""
        return NATIVE if self.compressed.fixed or self.collective in (NATIVE, AUTO) else "ring"

    def close(self) -> None:
        """Close the group."""
        if self.world.elastic is not None and self in self.world.elastic.communicators:
            self.world.elastic.communicators.remove(self)
        if not self.world.closed:
            self.group.close()

    def _schedule_of(self, flat: Tensor) -> Schedule | None:
        """The schedule for tensors like this one, remembered once it is decided. None: the engine's own."""
        algorithm, decided = self.collective, True
        if self.compressed.fixed:
            algorithm = NATIVE
        elif algorithm == AUTO:
            chosen = self.group.auto.chosen(flat)
            algorithm, decided = (NATIVE, False) if chosen is None else (chosen.algorithm, True)
        own = algorithm == NATIVE and self._native.reduces(flat.dtype, "sum")
        schedule = None if own else build("allreduce", algorithm)
        if decided:
            self._schedules[flat.numel(), flat.dtype, flat.device] = schedule
        return schedule

    def _spawn(self, flat: Tensor, schedule: Schedule, what: str) -> WaitableReduction:
        team_channel, watched, start = self.group.channel, self.stats.watching, self.now()

        def work() -> None:
            channel.allreduce(team_channel, flat, "sum", schedule)
            if watched:
                self.stats.reduced(start, self.now(), what)

        return self._call_in_comm_task(f"the sum of {what}", work)

    def _call_in_comm_task(self, what: str, work: Callable[[], Any]) -> WaitableReduction:
        pending: Any = self.group.call(what, work, async_=True)
        return pending  # type: ignore[no-any-return]


_COMPLETE = CompletedHandle(0)


class _NativeSum:
    """A sum by the engine. The engine's thread reports its end if it can; otherwise it counts when it is waited for."""

    def __init__(self, communicator: Communicator, handle: Handle, what: str) -> None:
        self._handle = handle
        self._stats = communicator.stats
        self._unreported = False
        if self._stats.watching:
            self._start, self._now, self._what = communicator.now(), communicator.now, what
            notify = getattr(handle, "notify", None)
            self._unreported = notify is None
            if notify is not None:
                notify(self._report)

    def wait(self) -> None:
        self._handle.wait()
        if self._unreported:
            self._report()

    def _report(self) -> None:
        self._stats.reduced(self._start, self._now(), self._what)


def check_same(communicator: Communicator, what: str, mine: Mapping[str, str]) -> None:
    """Compare text entries between the ranks. Raises the same error on every rank: the first difference from rank 0."""
    check_same_in(communicator.group, what, mine)


def check_same_in(group: Group, what: str, mine: Mapping[str, str]) -> None:
    """`check_same` in a group."""
    if group.size == 1:
        return
    text = json.dumps(list(mine.items())).encode()
    digests = allgather(torch.tensor([zlib.crc32(text), len(text)], dtype=torch.int64).view(1, 2), group=group)
    if bool((digests == digests[0]).all()):
        return
    lengths = digests[:, 1].tolist()
    everything = allgather(torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group)
    parts = torch.split(everything, lengths)
    tables = [dict(json.loads(bytes(part.tolist()))) for part in parts]
    ranks = group.ranks
    for rank, table in zip(ranks, tables, strict=True):
        difference = _difference(tables[0], table, ranks[0], rank)
        if difference:
            raise IncompatibleError(f"the ranks hold different {what}: {difference}")
    orders = [list(table) for table in tables]
    rank = next((rank for rank, order in zip(ranks, orders, strict=True) if order != orders[0]), ranks[0])
    raise IncompatibleError(f"the ranks hold different {what}: rank {rank} has the same entries in another order")


def _difference(first: Mapping[str, str], other: Mapping[str, str], root: int, rank: int) -> str:
    for name in first:
        if name not in other:
            return f"{name} is {first[name]} on rank {root} and missing on rank {rank}"
        if first[name] != other[name]:
            return f"{name} is {first[name]} on rank {root} and {other[name]} on rank {rank}"
    extra = next((name for name in other if name not in first), None)
    return "" if extra is None else f"{extra} is {other[extra]} on rank {rank} and missing on rank {root}"


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Copy the root's tensors into those of all ranks."""
    if communicator.size == 1:
        return
    for group in _batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        flat = communicator.from_root(flat, root)
        offset = 0
        for tensor in group:
            tensor.detach().copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        batches = kinds.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(other.numel() for other in batches[-1]) * tensor.element_size() > BATCH_BYTES:
            batches.append([])
        batches[-1].append(tensor)
    return [batch for batches in kinds.values() for batch in batches if batch]


def broadcast_tree(communicator: Communicator, tree: Any, root: int) -> Any:
    """The root's state tree (dicts, lists, tensors and plain values), on every rank."""
    return tree if communicator.size == 1 else broadcast_object(tree, root, group=communicator.group)
