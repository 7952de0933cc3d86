"""A sub-master's way up: one task that takes each sum to the parent and brings its weights back.

children ─► space ─► sum ─► relay ─── push and pull, as a client of the parent ───► parent
         ◄─ weights ◄────── relay ◄─────────────────────────────────────────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from syncline.errors import SynclineError
from syncline.server import protocol
from syncline.server.client import Client, Future
from syncline.server.description import Description
from syncline.server.desk import Answer, Desk
from syncline.server.gathering import Gathering, Sum
from syncline.server.network import ServerNetwork

__all__ = ["Relay"]

logger = logging.getLogger("syncline")

Act = Callable[[Callable[[], list[Answer]]], None]
"""Does something at the desk, alone, and sends what it answers."""


class Relay:
    """Carries the sums of one space to its parent, one at a time, until everybody has left."""

    def __init__(
        self,
        desk: Desk,
        space: Gathering,
        act: Act,
        network: ServerNetwork,
        parent: Description,
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
            door = self._door or Client(self._network, self._parent, retry=self._network.transport.retry)
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
            if self._desk.spaces.get(space.description.mark) is not space:
                return False
            self._awake.wait(None, f"a step of the children of {space.description.name!r}")
        return False

    def _carry(self, door: Client, found: Sum) -> None:
        answered = self._exchange(door, found)
        self._act(lambda: self._desk.answered(self._space, answered, door.told.stop))

    def _exchange(self, door: Client, found: Sum) -> list[tuple[int, Tensor]]:
        """Push a sum, and read what the parent makes of it."""
        wanted = door.clock + 1 if door.description.held else -1
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

    def _whole(self, found: Sum) -> bool:
        """Whether a sum covers all parameters, so that its answers hold all that the children read."""
        parent, at = self._parent, 0
        for push in found.pushes:
            if push.keys is not None or push.first != at:
                return False
            at += push.count
        # Buffers may follow the parameters; no worker pushes them in a step.
        return at == (parent.bounds[-1] if parent.rules[-1] == "assign" else parent.numel)

    def _push_then_pull(self, door: Client, found: Sum, wanted: int, coded: bool) -> Tensor:
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
