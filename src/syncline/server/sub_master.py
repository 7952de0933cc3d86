"""A sub-master's space: it adds up what its children push, and its weights are the parent's.

Synchronous: a step's sum goes up when enough children have pushed it. Asynchronous: what came while the last sum was
under way goes up next::

    children   0 ──g──┐     1 ──g──┐          3 ──g──┐
    sums              └─ [g0] ─►   └────── [g1 + g3] ┴─►        one is under way at a time
    parent               ◄─ w ─┘              ◄─ w ─┘           a child reads when its own gradient is in
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.errors import SynclineError
from syncline.server import protocol
from syncline.server.client import Client, Future
from syncline.server.client_session import OutgoingReply
from syncline.server.network import ServerNetwork
from syncline.server.shard import FOREVER, ParameterShard, Push, add_up
from syncline.server.space import SpaceDescription

if TYPE_CHECKING:
    from syncline.server.request_handler import RequestHandler

__all__ = ["AggregatedPush", "AggregatingShard", "Relay"]


@dataclass
class AggregatedPush:
    """What goes to the parent at once."""

    pushes: list[Push]
    weight: float = 1.0
    """The number of gradients that it adds up, if that scales its pushes."""


class AggregatingShard(ParameterShard):
    """The space of one sub-master. It has no rule: the parent's applies."""

    def __init__(self, description: SpaceDescription, server: int) -> None:
        super().__init__(description, server)
        self.sums: list[AggregatedPush] = []
        """Under way, or waiting to go: one at most."""
        self._open: dict[int, list[Push]] = {}
        """Pushes of steps that have not ended, by child. Only where children go at their own pace."""
        self._came: list[tuple[int, list[Push]]] = []
        self._away: set[int] = set()
        """Children whose gradients have not come back as weights."""

    def push(self, worker: int, clock: int, push: Push, answer: bool = False) -> bool:
        gathers = push.handler is None and push.plane == 0 and worker in self.clocks.of
        if self.description.synchronous or not gathers:
            return super().push(worker, clock, push, answer)
        self._open.setdefault(worker, []).append(push)
        return False

    def tick(self, worker: int, clock: int, weight: float = 0.0) -> None:
        super().tick(worker, clock, weight)
        pushes = self._open.pop(worker, [])
        if pushes:
            self._came.append((worker, pushes))
            self._away.add(worker)
            self._gather()

    def leave(self, worker: int, lost: bool = False) -> bool:
        self._open.pop(worker, None)  # half a step is no step
        return super().leave(worker, lost)

    def settle(self, pushes: list[Push], weight: float) -> None:
        """A step of all: its sum waits to go up, with how many gradients it adds up."""
        if self.description.mean:
            for push in pushes:
                push.scale = weight
        self.sums.append(AggregatedPush(pushes, weight))

    def may_read(self, wanted: int, worker: int = -1) -> bool:
        if self.description.synchronous:
            return super().may_read(wanted)
        return self.stopping or (worker not in self._away and worker not in self._open)

    @property
    def least(self) -> int:
        if not self.description.synchronous:
            return self.clocks.least
        return FOREVER if self.clocks.live == 0 and not self.sums else self.round - bool(self.sums)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send up, and never will be."""
        return not self.sums and self.clocks.live == 0

    def answered(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """The parent has answered with its weights."""
        for first, part in values:
            self.weights[first - self.first : first - self.first + part.numel()].copy_(part)
        self.sums.pop(0)
        self._away = {worker for worker, _ in self._came}
        self._gather()
        self.close_rounds()

    def _gather(self) -> None:
        if self.sums or not self._came:
            return
        came, self._came = sorted(self._came, key=lambda each: each[0]), []
        self.sums.append(AggregatedPush(add_up([pushes for _, pushes in came])))

    def _closes(self, clock: int) -> bool:
        return not self.sums and super()._closes(clock)


logger = logging.getLogger("syncline")

Act = Callable[[Callable[[], list[OutgoingReply]]], None]
"""Does something at the desk, alone, and sends what it answers."""


class Relay:
    """Carries the sums of one space to its parent, one at a time, until everybody has left."""

    def __init__(
        self,
        desk: RequestHandler,
        space: AggregatingShard,
        act: Act,
        network: ServerNetwork,
        parent: SpaceDescription,
        door: Client | None = None,
    ) -> None:
        runtime = network.transport.runtime
        self._desk = desk
        self._space = space
        self._act = act
        self._network = network
        self._parent = parent
        self._door = door
        """A client of the parent that this process has already, and closes itself."""
        self._awake = runtime.event()
        self._through = runtime.event()
        self._stopped = False
        self._finished = False

    def wake(self) -> None:
        """Something has come, or somebody has left."""
        self._awake.set()

    def stop(self) -> None:
        """Carry nothing any more."""
        self._stopped = True
        self._awake.set()

    @property
    def through(self) -> bool:
        """Whether it has ended."""
        return bool(self._through.is_set())

    def wait_through(self, timeout: float) -> bool:
        """Wait until it has carried everything; False when the timeout came first."""
        return bool(self._through.wait(timeout, "a sub-master to carry its last sum", hang=True))

    def run(self) -> None:
        """The task."""
        try:
            door = self._door or Client(self._network, self._parent, retry=self._network.transport.retry_after_s)
            if self._door is None:
                door.hello()
            while self._await_sum(door):
                self._carry(door, self._space.sums[0])
            if self._door is None and not self._stopped:
                door.close()
        except Exception as error:  # whatever it is, the children must not wait for it
            if not self._stopped:
                reason = str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
                logger.debug("a sub-master of %r is cut off: %s", self._space.description.name, reason)
                self._act(lambda: self._desk.orphan(self._space, reason))
        finally:
            self._through.set()

    def _await_sum(self, door: Client) -> bool:
        """Wait for a sum; False when there will be none any more."""
        space = self._space
        while not self._stopped:
            self._awake.clear()
            if space.sums:
                return True
            if space.idle and not self._finished:
                self._finished = True  # its clock holds nobody back from now on
                door.finish_training()
                continue
            if self._desk.spaces.get(space.description.space_id) is not space:
                return False
            self._awake.wait(None, f"a step of the children of {space.description.name!r}")
        return False

    def _carry(self, door: Client, found: AggregatedPush) -> None:
        answered = self._exchange(door, found)
        self._act(lambda: self._desk.answered(self._space, answered, door.told.stop))

    def _exchange(self, door: Client, found: AggregatedPush) -> list[tuple[int, Tensor]]:
        """Push a sum, and read what the parent makes of it."""
        wanted = door.clock + 1 if door.description.synchronous else -1
        coded = door.description.codec is not None
        if not self._whole(found) or len(found.pushes) > protocol.WINDOW // 2:
            return [(0, self._push_then_pull(door, found, wanted, coded))]
        futures: list[tuple[int, Future]] = []
        for number, push in enumerate(found.pushes):
            last = number == len(found.pushes) - 1
            future = door.push_pull(
                (push.first, push.first + push.count), push.values, rate=push.rate, scale=push.scale, wanted=wanted,
                tick=last, coded=coded,
            )  # fmt: skip
            futures.append((push.first, future))
        self._tell_steps(door)
        return [(first, _tensor(future)) for first, future in futures]

    def _whole(self, found: AggregatedPush) -> bool:
        """Whether a sum covers all parameters, so that its answers hold all that the children read."""
        parent, at = self._parent, 0
        for push in found.pushes:
            if push.keys is not None or push.first != at:
                return False
            at += push.count
        # Buffers may follow the parameters; no worker pushes them in a step.
        return at == (parent.bounds[-1] if parent.rules[-1] == "assign" else parent.numel)

    def _push_then_pull(self, door: Client, found: AggregatedPush, wanted: int, coded: bool) -> Tensor:
        """So many pieces that reads which wait would fill the window before the last of them ends the step."""
        pushes = found.pushes
        if not pushes:  # a step without values: its clock advances all the same
            door.push((0, 0), torch.empty(0, dtype=torch.float32), scale=found.weight, tick=True).wait()
        for number, push in enumerate(pushes):
            keys = (push.first, push.first + push.count) if push.keys is None else push.keys
            last = number == len(pushes) - 1
            future = door.push(keys, push.values, rate=push.rate, scale=push.scale, tick=last)
            if last:
                future.wait()
        self._tell_steps(door)
        # A read that belongs to a step names a clock, if only the first.
        return _tensor(door.pull(None, wanted=max(0, wanted), coded=coded))

    def _tell_steps(self, door: Client) -> None:
        clocks, late = self._space.clocks.of, self._space.late
        door.control({"do": "below", "below": {str(each): [clocks[each], late.get(each, 0)] for each in clocks}})


def _tensor(future: Future) -> Tensor:
    found = future.wait()
    assert found is not None
    return found
