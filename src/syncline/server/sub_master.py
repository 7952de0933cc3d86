"""A sub-master: its shard adds up the pushes of its workers, and a task relays each sum to the parent.

In a synchronous space a step's sum is relayed when enough workers have pushed it. In an asynchronous one the pushes
that arrive while a sum is in flight make the next sum::

    workers    0 ──g──┐     1 ──g──┐          3 ──g──┐
    sums              └─ [g0] ─►   └────── [g1 + g3] ┴─►        one is in flight at a time
    parent               ◄─ w ─┘              ◄─ w ─┘           a worker reads when its own gradient is applied
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
from syncline.server.network import ServerNetwork
from syncline.server.shard import NO_CLOCK, ParameterShard, Push, add_pushes
from syncline.server.space import SpaceDescription

if TYPE_CHECKING:
    from syncline.server.request_handler import OutgoingReply, RequestHandler

__all__ = ["AggregatedPush", "AggregatingShard", "Relay"]

logger = logging.getLogger("syncline")


@dataclass
class AggregatedPush:
    """A sum that is relayed to the parent."""

    pushes: list[Push]
    weight: float = 1.0
    """Its number of gradients, if the space takes means."""


class AggregatingShard(ParameterShard):
    """The shard of a sub-master. It has no rule: the parent applies its own."""

    def __init__(self, description: SpaceDescription, server: int) -> None:
        super().__init__(description, server)
        self.sums: list[AggregatedPush] = []
        """The sum that is in flight or ready to be relayed: at most one."""
        self._unfinished: dict[int, list[Push]] = {}
        """In an asynchronous space: pushes of steps that have not ended, by worker."""
        self._waiting: list[tuple[int, list[Push]]] = []
        """Steps that are not in a sum yet, with their workers."""
        self._unanswered: set[int] = set()
        """Workers whose gradients are not yet applied by the parent."""
        self.away = False
        """Whether the parent does not wait for this group, because all its workers pause."""
        self.returning = False
        """Whether one of them asks to continue, and none has continued since."""

    def push(self, worker: int, clock: int, push: Push, write_back: bool = False) -> bool:
        by_rule = push.handler is None and push.state_slot == 0 and worker in self.clocks.of
        if self.description.synchronous or not by_rule:
            return super().push(worker, clock, push, write_back)
        self._unfinished.setdefault(worker, []).append(push)
        return False

    def tick(self, worker: int, clock: int, weight: float = 0.0) -> None:
        super().tick(worker, clock, weight)
        pushes = self._unfinished.pop(worker, [])
        if pushes:
            self._waiting.append((worker, pushes))
            self._unanswered.add(worker)
            self._add_waiting()

    def leave(self, worker: int, lost: bool = False) -> bool:
        self._unfinished.pop(worker, None)  # an incomplete step is dropped
        return super().leave(worker, lost)

    def finish_step(self, pushes: list[Push], weight: float) -> None:
        """Make the sum of a synchronous step ready for the parent."""
        if self.description.mean:
            for push in pushes:
                push.scale = weight
        self.sums.append(AggregatedPush(pushes, weight))

    def may_read(self, min_clock: int, worker: int = -1) -> bool:
        if self.description.synchronous:
            return super().may_read(min_clock)
        return self.stopping or (worker not in self._unanswered and worker not in self._unfinished)

    @property
    def min_clock(self) -> int:
        if not self.description.synchronous:
            return self.clocks.slowest
        return NO_CLOCK if self.clocks.live == 0 and not self.sums else self.open_step - bool(self.sums)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to relay, now and later."""
        return not self.sums and self.clocks.present == 0

    @property
    def all_paused(self) -> bool:
        """Whether no worker trains, and some continue later."""
        return not self.sums and self.clocks.live == 0 < self.clocks.present

    def join(self, worker: int, clock: int) -> int:
        self.returning = False
        return super().join(worker, clock)

    def come_back(self, weights: Tensor, missed: int) -> None:
        """Continue with the parent's weights, after so many steps of the parent without this group."""
        self.weights.copy_(weights)
        for _ in range(missed):
            self._sync_steps.pop(self.open_step, None)
            self.open_step += 1
        self.away = False

    def finish_sum(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """Take the parent's weights, each range with its first key, and prepare the next sum."""
        for first, part in values:
            self.weights[first - self.first : first - self.first + part.numel()].copy_(part)
        self.sums.pop(0)
        self._unanswered = {worker for worker, _ in self._waiting}
        self._add_waiting()
        self.close_steps()

    def _add_waiting(self) -> None:
        if self.sums or not self._waiting:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda each: each[0]), []
        self.sums.append(AggregatedPush(add_pushes([pushes for _, pushes in waiting])))

    def _is_complete(self, clock: int) -> bool:
        return not self.sums and super()._is_complete(clock)


class Relay:
    """Relays the sums of one shard to its parent, one at a time, until all workers have left.

    `act` calls the request handler alone and sends the replies. `client` is a client of the parent that this process
    already has, and closes itself.
    """

    def __init__(
        self,
        handler: RequestHandler,
        shard: AggregatingShard,
        act: Callable[[Callable[[], list[OutgoingReply]]], None],
        network: ServerNetwork,
        parent: SpaceDescription,
        client: Client | None = None,
    ) -> None:
        runtime = network.transport.runtime
        self._handler = handler
        self._shard = shard
        self._act = act
        self._network = network
        self._parent = parent
        self._client = client
        self._wakened = runtime.event()
        self._ended = runtime.event()
        self._stopped = False
        self._finished = False

    def wake(self) -> None:
        """Look for a sum now: a request has arrived, or a worker has left."""
        self._wakened.set()

    def stop(self) -> None:
        """Relay nothing any more."""
        self._stopped = True
        self._wakened.set()

    @property
    def ended(self) -> bool:
        return bool(self._ended.is_set())

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until every sum is relayed; False after the timeout."""
        return bool(self._ended.wait(timeout_s, "a sub-master to relay its last sum", hang=True))

    def run(self) -> None:
        """The task."""
        try:
            client = self._client or Client(self._network, self._parent, retry_s=self._network.transport.retry_after_s)
            if self._client is None:
                client.hello()
            while self._await_sum(client):
                total = self._shard.sums[0]
                values = self._push_to_parent(client, total)
                self._act(lambda: self._handler.finish_sum(self._shard, values, client.status.stop))  # noqa: B023
            if self._client is None and not self._stopped:
                client.close()
        except Exception as error:  # whatever it is, the workers must not wait for it
            if not self._stopped:
                reason = str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
                logger.debug("a sub-master of %r has lost its parent: %s", self._shard.description.name, reason)
                self._act(lambda: self._handler.orphan(self._shard, reason))
        finally:
            self._ended.set()

    def _await_sum(self, client: Client) -> bool:
        """Wait for a sum; False if there will be none any more."""
        shard = self._shard
        while not self._stopped:
            self._wakened.clear()
            if shard.sums:
                return True
            if shard.idle and not self._finished:
                self._finished = True
                client.finish_training()
                continue
            if self._pauses_or_continues(client):
                continue
            if self._handler.shards.get(shard.description.space_id) is not shard:
                return False
            self._wakened.wait(None, f"a step of the workers of {shard.description.name!r}")
        return False

    def _pauses_or_continues(self, client: Client) -> bool:
        """If all workers of a synchronous group pause, let the parent not wait for it; True if that has changed."""
        shard = self._shard
        if shard.away and shard.returning:
            before = client.clock
            client.join()
            weights = client.get()
            self._act(lambda: self._handler.continue_group(shard, weights, client.clock - before))
            return True
        if shard.description.synchronous and shard.all_paused and not (shard.away or shard.returning):
            self._act(lambda: self._handler.pause_group(shard))
            if shard.away:
                client.pause()
            return True
        return False

    def _push_to_parent(self, client: Client, total: AggregatedPush) -> list[tuple[int, Tensor]]:
        """Push a sum to the parent and read the new weights, each range with its first key."""
        min_clock = client.clock + 1 if client.description.synchronous else -1
        encoded, pushes = client.description.codec is not None, total.pushes
        if not self._is_whole(total) or len(pushes) > protocol.MAX_INFLIGHT_REQUESTS // 2:
            return [(0, self._push_then_pull(client, total, min_clock, encoded))]
        futures: list[tuple[int, Future]] = []
        for number, push in enumerate(pushes):
            future = client.push_pull(
                (push.first, push.first + push.count),
                push.values,
                rate=push.rate,
                scale=push.scale,
                min_clock=min_clock,
                tick=number == len(pushes) - 1,
                encoded=encoded,
            )
            futures.append((push.first, future))
        self._report_steps(client)
        return [(first, _values(future)) for first, future in futures]

    def _is_whole(self, total: AggregatedPush) -> bool:
        """Whether a sum covers all parameters, so that its replies contain all that the workers read."""
        parent, at = self._parent, 0
        for push in total.pushes:
            if push.keys is not None or push.first != at:
                return False
            at += push.count
        # Buffers may follow the parameters. No worker pushes them in a step.
        return at == (parent.bounds[-1] if parent.rules[-1] == "assign" else parent.numel)

    def _push_then_pull(self, client: Client, total: AggregatedPush, min_clock: int, encoded: bool) -> Tensor:
        """Push first and read afterwards: waiting reads could reach the in-flight limit before the step ends."""
        pushes = total.pushes
        if not pushes:  # a step without values still advances the clock
            client.push((0, 0), torch.empty(0, dtype=torch.float32), scale=total.weight, tick=True).wait()
        for number, push in enumerate(pushes):
            keys = (push.first, push.first + push.count) if push.keys is None else push.keys
            last = number == len(pushes) - 1
            future = client.push(keys, push.values, rate=push.rate, scale=push.scale, tick=last)
            if last:
                future.wait()
        self._report_steps(client)
        # A read that belongs to a step names a clock, at least 0.
        return _values(client.pull(None, min_clock=max(0, min_clock), encoded=encoded))

    def _report_steps(self, client: Client) -> None:
        clocks, late = self._shard.clocks.of, self._shard.late_steps
        steps = {str(worker): [clock, late.get(worker, 0)] for worker, clock in clocks.items()}
        client.control({"do": "below", "below": steps})


def _values(future: Future) -> Tensor:
    values = future.wait()
    assert values is not None
    return values
