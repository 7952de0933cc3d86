"""How the tensors of one run are reduced: a team of its own, and the collective that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.codecs import Codec
from syncline.collectives import NATIVE, Schedule, build, run
from syncline.costs import AUTO
from syncline.reduction.stats import Stats
from syncline.reduction.ways import CompressedCollectives
from syncline.transports import Handle
from syncline.world import Group, Pending, World, allreduce, broadcast

__all__ = ["Communicator", "Reduction"]

AUTO_SECONDS = 1.5
"""What choosing may take for each class of sizes, about; after that the prediction decides."""
PREFER_NATIVE = 1.15
"""The engine's own needs no thread of ours beside backward: another must be faster by more than this."""
CROWDED = "no processor is to spare for another's Python beside backward"
"""A schedule of ours may win alone and still lose here: 1.15 times the step with two ranks on two cores."""


class Reduction(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        ...


class Communicator:
    """World, team and collective of one run. Reductions start in the same order on every rank."""

    def __init__(self, world: World, collective: str, codec: Codec | None = None, team: Group | None = None) -> None:
        """`team`: one of some ranks, made for this exchange alone; None: all ranks, on a new one."""
        self.world = world
        self.codec = codec
        self.ways = CompressedCollectives(collective, codec)
        """How payloads that do not sum on the wire are reduced."""
        told = self.ways.told is not None or collective in (NATIVE, AUTO)
        self.collective = collective if told else build("allreduce", collective).spec
        self.team = world.group() if team is None else team
        self.stats = Stats(world.events, world.runtime.lock(), alone=self.team.size == 1)
        self._schedules: dict[str, Schedule] = {}

    @property
    def overlap_encoding(self) -> bool:
        """Whether encoding has a processor beside backward, and an engine that moves the bytes by itself."""
        return self.world.spare and self.size > 1 and self.team.transport.native.available

    @property
    def size(self) -> int:
        return self.team.size

    @property
    def rank(self) -> int:
        return self.team.rank

    def prepare_coded(self, buckets: Sequence[tuple[Codec, Sequence[int]]]) -> None:
        """Choose now how payloads of parts of these sizes are reduced."""
        if self.size > 1:
            for codec, sizes in buckets:
                self.ways.choose(codec, sizes, self.size, self.team.auto.network)

    def prepare(self, sizes: list[tuple[int, torch.dtype, torch.device]]) -> None:
        """Choose now how tensors like these are reduced: a choice during training would change its rounding."""
        if self.collective != AUTO or self.size == 1:
            return
        auto, native = self.team.auto, self.team.transport.native
        for numel, dtype, device in sizes:
            scratch = torch.empty(numel, dtype=dtype, device=device)
            if auto.chosen(scratch) is not None:
                continue
            if native.reduces(dtype, "sum") and not self.world.spare:
                auto.decide(scratch, NATIVE, CROWDED)
            else:
                auto.settle(scratch, "sum", budget=AUTO_SECONDS, prefer_native=PREFER_NATIVE)

    @property
    def choices(self) -> dict[str, str]:
        """What `auto` has chosen, by class of sizes."""
        if self.collective != AUTO or self.size == 1:
            return {}
        return self.team.choices | self.ways.chosen

    def adopt(self, choices: dict[str, str]) -> None:
        """Go the way of an earlier run."""
        if self.collective == AUTO and self.size > 1:
            self.team.auto.adopt(self.ways.adopt(choices))

    def start(self, flat: Tensor, what: str, here: bool = False) -> Reduction:
        """Begin to sum `flat` over the ranks, in place. `here`: in the comm task itself, so a schedule runs now."""
        nbytes = flat.numel() * flat.element_size()
        self.stats.sent(nbytes, nbytes)
        return self.begin_sum(flat, what, here)

    def begin_sum(self, flat: Tensor, what: str, here: bool = False) -> Reduction:
        """As `start`, uncounted."""
        if self.size == 1:
            return _Done()
        algorithm = self._algorithm(flat)
        native = self.team.transport.native
        if algorithm == NATIVE and native.reduces(flat.dtype, "sum"):
            begun = self.world.runtime.now()
            return _Native(self, native.allreduce(flat, "sum"), begun, what)
        schedule = self._schedules.setdefault(algorithm, build("allreduce", algorithm))
        if here:
            run.allreduce(self.team.channel, flat, "sum", schedule)
            return _Done()
        return _Scheduled(self._spawn(flat, schedule, what))

    def sum_now(self, flat: Tensor, what: str) -> None:
        """Sum `flat` in place before anything else is begun: by the comm task, where that begins the others."""
        nbytes = flat.numel() * flat.element_size()
        self.stats.sent(nbytes, nbytes)
        if not self.overlap_encoding:
            self.begin_sum(flat, what).wait()
            return
        self.team.call(f"the sum of {what}", lambda: self.begin_sum(flat, what, here=True).wait(), async_=False)

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        reduced = allreduce(torch.tensor([value], dtype=torch.float64), op="mean", group=self.team)
        return float(reduced)

    def from_root(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor. By way of the CPU: it is rare, and works where ranks share a GPU, which NCCL refuses."""
        if self.size == 1:
            return tensor
        result: Tensor = broadcast(tensor.cpu(), root=root, group=self.team).to(tensor.device)
        return result

    @property
    def gathering(self) -> str:
        """The algorithm for all-gathers: the engine's own, unless a schedule was asked for."""
        return NATIVE if self.ways.told or self.collective in (NATIVE, AUTO) else "ring"

    def close(self) -> None:
        """Let go of the team."""
        if not self.world.closed:
            self.team.close()

    def _algorithm(self, flat: Tensor) -> str:
        if self.ways.told:
            return NATIVE
        if self.collective != AUTO:
            return self.collective
        chosen = self.team.auto.chosen(flat)
        return NATIVE if chosen is None else chosen.algorithm

    def _spawn(self, flat: Tensor, schedule: Schedule, what: str) -> Pending[None]:
        now = self.world.runtime.now
        channel, watched, begun = self.team.channel, self.stats.watching, now()

        def work() -> None:
            run.allreduce(channel, flat, "sum", schedule)
            if watched:
                self.stats.reduced(begun, now(), what)

        pending: Any = self.team.call(f"the sum of {what}", work, async_=True)
        return pending  # type: ignore[no-any-return]


class _Done:
    def wait(self) -> None:
        return


class _Scheduled:
    def __init__(self, pending: Pending[None]) -> None:
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()


class _Native:
    """The engine's own; its end is told by the engine's thread where it can, else when it is waited for."""

    def __init__(self, exchange: Communicator, handle: Handle, begun: float, what: str) -> None:
        self._exchange = exchange
        self._handle = handle
        self._begun = begun
        self._what = what
        self._watched = exchange.stats.watching
        notify = getattr(handle, "notify", None) if self._watched else None
        self._told = notify is not None
        if notify is not None:
            notify(self._ended)

    def wait(self) -> None:
        self._handle.wait()
        if self._watched and not self._told:
            self._ended()

    def _ended(self) -> None:
        self._exchange.stats.reduced(self._begun, self._exchange.world.runtime.now(), self._what)
