"""One server's shard of a space: its weights, the effect of a push, and when a read is allowed.

::

    push ─► synchronous?  no ──► rule, at once
                          yes ─► kept by step and worker ─► quorum reached ─► sum in the order of workers ─► rule
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server.rules import HandlerRule, PieceOptimizer, Sgd, TorchRule, UpdateRule, build_rule
from syncline.server.space import SpaceDescription

__all__ = ["ParameterShard", "Push", "WorkerClocks", "add_pushes"]

logger = logging.getLogger("syncline")

BUILTIN_HANDLERS = ("add", "assign")
MAX_STEPS_AHEAD = 1024
"""Steps by which a synchronous push may be ahead of the open step. Clients wait for reads long before that."""
MAX_KEPT_SHARDS = 64
"""Limit of the bytes kept of one worker's synchronous pushes, as a multiple of the shard's bytes."""
MIN_SHARD_BYTES = 1 << 16
"""A smaller shard counts as this many bytes in that limit."""
BLOCK_ELEMENTS = 1 << 16
"""Elements that a rule updates at once, so that they stay in the cache."""
NO_CLOCK = 1 << 62
"""The slowest clock when no worker trains any more."""


@dataclass
class Push:
    """Values for a range of keys, or for a list of them."""

    first: int
    values: Tensor
    keys: Tensor | None = None
    rate: float | None = None
    scale: float = 1.0
    handler: str | None = None
    """The handler that replaces the rule."""
    state_slot: int = 0
    """0: the weights; above 0: a tensor of the optimizer state."""

    @property
    def count(self) -> int:
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        return 4 * self.count + (0 if self.keys is None else 8 * self.keys.numel())


class WorkerClocks:
    """One clock for each worker: the number of steps that it has pushed.

    >>> clocks = WorkerClocks([0, 1])
    >>> clocks.tick(0, 0)
    >>> clocks.slowest, clocks.total_steps
    (0, 1)
    >>> clocks.leave(1)
    True
    >>> clocks.slowest
    1
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.of = dict.fromkeys(workers, 0)
        """The clock of each worker."""
        self.total_steps = 0
        """Steps of all workers together."""
        self.slowest = 0
        """The smallest clock of the workers that still train."""
        self._skipped: dict[int, int] = {}
        """Steps before the clocks at which workers have joined: no worker has taken them."""
        self._training = set(self.of)
        self._paused: set[int] = set()
        self._update()

    @property
    def live(self) -> int:
        """Workers that train now."""
        return len(self._training)

    @property
    def present(self) -> int:
        """Workers that still train, with those that pause."""
        return len(self._training) + len(self._paused)

    def trains(self, worker: int) -> bool:
        return worker in self._training

    def check(self, worker: int, clock: int) -> None:
        """Raise a `ProtocolError` if this is not the worker's next step."""
        if worker not in self.of:
            raise ProtocolError(f"member {worker} has no clock here: workers are {sorted(self.of)}")
        if clock != self.of[worker]:
            raise ProtocolError(f"worker {worker} is at clock {self.of[worker]}, and sends a step of clock {clock}")

    def tick(self, worker: int, clock: int) -> None:
        """Record that a worker has pushed all of its step."""
        self.check(worker, clock)
        self.set(worker, clock + 1)

    def set(self, worker: int, clock: int) -> None:
        """Set a worker's clock, after a late step or from a checkpoint."""
        self.of[worker] = clock
        self._update()

    def join(self, worker: int, clock: int) -> None:
        """Add a worker, or one that has left, at a clock that is not before its own."""
        own = self.of.get(worker, 0)
        clock = max(own, clock)
        self._skipped[worker] = self._skipped.get(worker, 0) + clock - own
        self._training.add(worker)
        self._paused.discard(worker)
        self.set(worker, clock)

    def pause(self, worker: int) -> None:
        """No longer wait for a worker that continues later."""
        if worker in self._training:
            self._training.discard(worker)
            self._paused.add(worker)
            self._update()

    def leave(self, worker: int) -> bool:
        """Remove a worker that is lost or has finished; return whether it was there."""
        self._paused.discard(worker)
        if worker not in self._training:
            return False
        self._training.discard(worker)
        self._update()
        return True

    def snapshot(self) -> dict[str, Any]:
        """The clocks, and the workers that still train or pause, for a copy on another server."""
        return {
            "of": dict(self.of),
            "skipped": dict(self._skipped),
            "training": sorted(self._training),
            "paused": sorted(self._paused),
        }

    def load_snapshot(self, state: dict[str, Any]) -> None:
        self.of, self._skipped = dict(state["of"]), dict(state["skipped"])
        self._training, self._paused = set(state["training"]), set(state["paused"])
        self._update()

    def _update(self) -> None:
        self.total_steps = sum(self.of.values()) - sum(self._skipped.values())
        self.slowest = min(map(self.of.__getitem__, self._training), default=NO_CLOCK)


@dataclass
class _SyncStep:
    """The kept pushes of one synchronous step."""

    pushes: dict[int, list[Push]] = field(default_factory=dict)
    ticked: set[int] = field(default_factory=set)
    """The workers that have pushed all of it."""
    weights: dict[int, float] = field(default_factory=dict)
    """The number of gradients of each worker; parts of them may be on other servers."""


COPIED = ("open_step", "stopping", "orphan_reason", "group_steps", "late_steps", "version", "_left_at", "_states",
          "_state_names", "_loading", "_kept_bytes", "_others_at_read", "_step_staleness")  # fmt: skip
"""Fields of a shard that a snapshot has as they are: numbers, texts, tensors, and dicts of them."""


class ParameterShard:
    """The shard of one server. The caller lets one task in at a time."""

    def __init__(self, description: SpaceDescription, server: int) -> None:
        self.description = description
        self.first, self.end = description.layout.shard(server)
        self.weights = torch.zeros(self.end - self.first, dtype=torch.float32)
        self.clocks = WorkerClocks(description.workers)
        self.open_step = 0
        """In a synchronous space: the step that is not yet applied."""
        self.stopping = False
        self.orphan_reason = ""
        """For a sub-master that has lost its parent: the error."""
        self.group_steps: dict[str, list[int]] = {}
        """From sub-masters, for each of their workers: its steps, and how many of them were late."""
        self.late_steps: dict[int, int] = {}
        self.version = 0
        """Counts how often the weights were replaced. Each time the clients' views become invalid."""
        self._logs_events = server == 0
        """One server logs the events that all servers of the space see."""
        self._left_at: dict[int, int] = {}
        """The clocks of workers that have left by themselves."""
        self._rules = description.build_rules()
        self._states: list[dict[str, Tensor]] = [
            rule.state(self.end - self.first) if rule.elementwise else {} for rule in self._rules
        ]
        self._pieces: dict[tuple[int, int], PieceOptimizer] = {}
        self._handlers: dict[str, tuple[UpdateRule, dict[str, Tensor]]] = {}
        self._state_names: list[str] = []
        self._loading: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._sync_steps: dict[int, _SyncStep] = {}
        self._kept_bytes = dict.fromkeys(description.workers, 0)
        self._others_at_read = dict.fromkeys(description.workers, 0)
        """For each worker, the steps of all others when it read last."""
        self._step_staleness: dict[int, int] = {}
        """The staleness of each worker's current step. All its parts have the staleness of the first."""

    # Pushes.

    def check(self, first: int, count: int) -> None:
        """Raise a `ProtocolError` if a range is not in this shard, or is in two groups."""
        if not self.first <= first <= first + count <= self.end:
            raise ProtocolError(
                f"keys {first} to {first + count} are not this server's: it has {self.first} to {self.end} of "
                f"{self.description.numel}"
            )
        group_of = self.description.group_of
        if count and group_of(first) != group_of(first + count - 1):
            bounds = list(self.description.bounds)
            raise ProtocolError(f"keys {first} to {first + count} lie in two groups (they begin at {bounds})")

    def push(self, worker: int, clock: int, push: Push, write_back: bool = False) -> bool:
        """Apply a push, or keep it until its step is closed.

        With `write_back`, the new weights replace the values of a range that was applied; return whether they did.
        """
        by_rule = push.handler is None and push.state_slot == 0
        if clock < 0 or not (self.description.synchronous and by_rule and worker in self.clocks.of):
            write_back = write_back and by_rule and push.keys is None
            self.apply(push, self.staleness(worker) if self.description.damped and by_rule else 0, write_back)
            return write_back
        if clock < self.open_step or self.is_far_ahead(clock):
            raise ProtocolError(f"a push of step {clock} by worker {worker}, and step {self.open_step} is open")
        limit = MAX_KEPT_SHARDS * max(MIN_SHARD_BYTES, 4 * (self.end - self.first))
        if self._kept_bytes[worker] + push.nbytes > limit:
            raise ProtocolError(
                f"{self._kept_bytes[worker]} B of worker {worker}'s pushes wait for their steps to close, and the "
                f"limit is {limit} B: end the step with tick=True, and read before the next push"
            )
        self._kept_bytes[worker] += push.nbytes
        self._sync_steps.setdefault(clock, _SyncStep()).pushes.setdefault(worker, []).append(push)
        return False

    def check_step(self, worker: int, clock: int) -> None:
        """Raise a `ProtocolError` if this is not the worker's next step. A worker may skip steps it was late for."""
        may_skip = self.description.synchronous and (self.description.quorum < 1.0 or not self.clocks.trains(worker))
        if may_skip and self.clocks.of.get(worker, clock) < clock <= self.open_step + MAX_STEPS_AHEAD:
            self.clocks.set(worker, clock)
        self.clocks.check(worker, clock)

    def skip_to(self, worker: int, clock: int) -> None:
        """Note that a worker reads at a clock. It pushes no earlier step any more: it was late at another server."""
        may_skip = self.description.synchronous and self.description.quorum < 1.0
        if may_skip and self.clocks.of.get(worker, clock) < clock <= self.open_step + MAX_STEPS_AHEAD:
            self.clocks.set(worker, clock)
            self.close_steps()

    def is_far_ahead(self, clock: int) -> bool:
        """Whether a synchronous step is too far ahead of the open one to be kept."""
        return self.description.synchronous and clock > self.open_step + MAX_STEPS_AHEAD

    def is_late(self, worker: int, clock: int) -> bool:
        """Whether a quorum has closed a synchronous step without this worker."""
        return self.description.synchronous and worker in self.clocks.of and 0 <= clock < self.open_step

    def skip(self, worker: int) -> None:
        """Drop a worker's late step: the worker continues with the open one."""
        self.clocks.set(worker, max(self.clocks.of[worker], self.open_step))
        self.late_steps[worker] = self.late_steps.get(worker, 0) + 1
        self._step_staleness.pop(worker, None)

    def tick(self, worker: int, clock: int, weight: float = 0.0) -> None:
        """End a worker's step, which counts as `weight` gradients in a mean.

        The worker that completes a synchronous step gets the errors of the rule.
        """
        self.clocks.tick(worker, clock)
        self._step_staleness.pop(worker, None)
        if self._left_at:
            self._warn_of_early_leavers(clock + 1)
        if self.description.synchronous:
            step = self._sync_steps.setdefault(clock, _SyncStep())
            step.ticked.add(worker)
            step.weights[worker] = weight
        self.close_steps()

    def _warn_of_early_leavers(self, clock: int) -> None:
        """Warn once of a worker that left long before the clock that another worker has reached."""
        for worker, left_at in list(self._left_at.items()):
            if clock > left_at + max(1, left_at // 10):
                del self._left_at[worker]
                if self._logs_events:
                    logger.warning(
                        "worker %d has left at clock %d, and the others continue: it has taken fewer steps than they "
                        "have. Did its script end too early?",
                        worker,
                        left_at,
                    )

    def leave(self, worker: int, lost: bool = False) -> bool:
        """Remove a worker that is lost or has finished; return whether it was there."""
        left = self.clocks.leave(worker)
        if left and not lost and not self.stopping:
            self._left_at[worker] = self.clocks.of[worker]
        if left:
            self._close_steps_without(worker)
        return left

    def pause(self, worker: int) -> None:
        """No read waits for a worker's clock until it joins again."""
        self.clocks.pause(worker)
        self._close_steps_without(worker)

    def _close_steps_without(self, worker: int) -> None:
        """Apply the steps that waited for a worker."""
        try:
            self.close_steps()
        except Exception as error:  # of a user's rule; no client can receive it
            step = self.open_step - 1
            logger.warning(
                "space %r: step %d, without worker %d, is not applied: %s", self.description.name, step, worker, error
            )

    def join(self, worker: int, clock: int) -> int:
        """Add a worker at the slowest clock, or at `clock` if that is later. Returns its clock.

        No read that was allowed before becomes forbidden, because the slowest clock does not go back.
        """
        clocks = self.clocks
        start = clocks.slowest if clocks.live else max(clocks.of.values(), default=0)
        if self.description.synchronous:
            start = self.open_step
            if clock - start > MAX_STEPS_AHEAD:
                raise ProtocolError(f"worker {worker} joins at clock {clock}, and step {start} is open")
        clocks.join(worker, max(start, clock))
        self._kept_bytes.setdefault(worker, 0)
        self._others_at_read.setdefault(worker, 0)
        self._step_staleness.pop(worker, None)
        self._left_at.pop(worker, None)
        self.note_read(worker)
        if self.description.synchronous:
            for step in range(self.open_step, clocks.of[worker]):  # it takes no part in these
                self._sync_steps.setdefault(step, _SyncStep()).ticked.add(worker)
            self.close_steps()
        return clocks.of[worker]

    def set_clocks(self, clocks: Sequence[int]) -> None:
        """Continue from a checkpoint: one clock for each worker, in their order."""
        synchronous = self.description.synchronous
        if synchronous and max(clocks) - min(clocks) > MAX_STEPS_AHEAD:
            raise ProtocolError(
                f"clocks from {min(clocks)} to {max(clocks)} may differ by at most {MAX_STEPS_AHEAD} steps"
            )
        self.version += 1
        self._sync_steps.clear()
        self._kept_bytes = dict.fromkeys(self._kept_bytes, 0)
        for worker, clock in zip(sorted(self.clocks.of), clocks, strict=True):
            self.clocks.set(worker, clock)
            for step in range(min(clocks), clock) if synchronous else ():
                self._sync_steps.setdefault(step, _SyncStep()).ticked.add(worker)
        self.open_step = min(clocks) if synchronous else 0
        self._step_staleness.clear()
        for worker in self.clocks.of:
            self.note_read(worker)

    # Synchronous steps.

    def close_steps(self) -> None:
        """Apply the synchronous steps that enough workers have pushed."""
        while self.description.synchronous and self._is_complete(self.open_step):
            step = self._sync_steps.pop(self.open_step, _SyncStep())
            for worker, pushes in step.pushes.items():
                self._kept_bytes[worker] -= sum(push.nbytes for push in pushes)
            complete = [pushes for worker, pushes in sorted(step.pushes.items()) if worker in step.ticked]
            weight = 1.0
            if self.description.mean:
                weight = sum(step.weights.values())
                for push in (push for pushes in complete for push in pushes):
                    push.scale = 1.0
            self.open_step += 1
            self.finish_step(add_pushes(complete, self.description.layout.edges), weight)

    def finish_step(self, pushes: list[Push], weight: float) -> None:
        """Apply the sum of a step. `weight` is its number of gradients, if the space takes means."""
        for push in pushes:
            if self.description.mean:
                push.scale = 1.0 / weight if weight else 0.0
            self.apply(push)

    def _is_complete(self, clock: int) -> bool:
        if self.clocks.live and self.clocks.slowest > clock:
            return True  # no worker can push it any more: some were late elsewhere and skipped it, or are lost
        step = self._sync_steps.get(clock)
        if step is None or not step.ticked:
            return False
        needed = max(1, math.ceil(self.description.quorum * self.clocks.live - 1e-9)) if self.clocks.live else 0
        return sum(self.clocks.trains(worker) for worker in step.ticked) >= needed

    # Updates.

    def apply(self, push: Push, staleness: int = 0, write_back: bool = False) -> None:
        """Update the weights; with `write_back` the new weights replace the values of the push."""
        rate, scale = push.rate, push.scale
        if staleness > 1:
            rate, scale = (None, scale / staleness) if rate is None else (rate / staleness, scale)
        values = push.values if scale == 1.0 else push.values.mul_(scale)
        if push.state_slot:
            self._write_state(push.state_slot, push.first, values)
            return
        group = self.description.group_of(push.first)
        rule, state = (self._rules[group], self._states[group]) if push.handler is None else self._handler(push.handler)
        if push.keys is not None:
            self._apply_keys(rule, state, push.keys - self.first, values, rate)
        elif rule.elementwise:
            self._apply_range(rule, state, push.first - self.first, values, rate, write_back)
        else:
            low, high = push.first - self.first, push.first - self.first + push.count
            start, stop = self._piece_of(low, high)
            self._piece(group, start, stop).apply(values, rate, low - start)
            if write_back:
                values.copy_(self.weights[low:high])

    def _handler(self, name: str) -> tuple[UpdateRule, dict[str, Tensor]]:
        """The rule of a handler, or of the built-in `add` and `assign`, and its state."""
        if name not in self._handlers:
            rule = build_rule(name if name in BUILTIN_HANDLERS else f"handler({name!r})")
            self._handlers[name] = rule, rule.state(self.end - self.first)
        return self._handlers[name]

    def _apply_range(
        self, rule: UpdateRule, state: dict[str, Tensor], low: int, values: Tensor, rate: float | None, write_back: bool
    ) -> None:
        high = low + values.numel()
        if high - low <= BLOCK_ELEMENTS:
            whole = high - low == self.weights.numel()  # a slice of a small tensor takes as long as the update
            weights = self.weights if whole else self.weights[low:high]
            _run_rule(rule, weights, values, {name: each[low:high] for name, each in state.items()}, rate)
            if write_back:
                values.copy_(weights)
            return
        block = high - low if isinstance(rule, HandlerRule) else BLOCK_ELEMENTS  # a handler gets the whole push
        for at in range(low, high, block):
            part = slice(at, min(at + block, high))
            weights, update = self.weights[part], values[at - low : part.stop - low] if high - low > block else values
            _run_rule(rule, weights, update, {name: each[part] for name, each in state.items()}, rate)
            if write_back:
                update.copy_(weights)

    def _apply_keys(
        self, rule: UpdateRule, state: dict[str, Tensor], places: Tensor, values: Tensor, rate: float | None
    ) -> None:
        if not rule.elementwise:
            raise ProtocolError(f"{rule!r} takes whole pieces, not lists of keys; use a rule like sgd or adagrad")
        weights = self.weights[places]
        rows = {name: each[places] for name, each in state.items()}
        _run_rule(rule, weights, values, rows, rate)
        self.weights[places] = weights
        for name, row in rows.items():
            state[name][places] = row

    def _piece_of(self, low: int, high: int) -> tuple[int, int]:
        """The piece that contains a range; the range itself if the parameters are unknown."""
        if not self.description.parameter_starts:
            return low, high
        edges = self.description.layout.edges
        at = bisect_right(edges, low + self.first) - 1
        return edges[at] - self.first, edges[at + 1] - self.first

    def _piece(self, group: int, low: int, high: int) -> PieceOptimizer:
        """The optimizer of a piece, for a rule that is not elementwise."""
        piece = self._pieces.get((low, high))
        if piece is None:
            other = next((span for span in self._pieces if span[0] < high and low < span[1]), None)
            if other is not None:
                raise ProtocolError(
                    f"{self._rules[group]!r} takes whole pieces: keys {low + self.first} to {high + self.first} cut "
                    f"across {other[0] + self.first} to {other[1] + self.first}; push the same ranges each time, or "
                    "use a rule like sgd or adam"
                )
            starts = [start - self.first - low for start in self.description.parameter_starts]
            piece = self._pieces[low, high] = self._rules[group].open(self.weights[low:high], starts)
        return piece

    def change_rules(self, specs: Sequence[str]) -> None:
        """Continue with other settings of the rules, for example a momentum that a schedule has changed."""
        rules = [build_rule(spec) for spec in specs]
        for old, new in zip(self._rules, rules, strict=True):
            if old != new and not (isinstance(new, TorchRule) and _torch_optimizer(old) == new.optimizer):
                raise ProtocolError(f"{new!r} in place of {old!r}: only the settings of an optimizer may change")
        for (low, _), piece in self._pieces.items():
            new = rules[self.description.group_of(low + self.first)]
            if isinstance(new, TorchRule):
                piece.use(new)
        self._rules = rules

    # Reads.

    def may_read(self, min_clock: int, worker: int = -1) -> bool:
        """Whether the steps of all workers before `min_clock` are applied."""
        return min_clock < 0 or self.stopping or self.min_clock >= min_clock

    @property
    def min_clock(self) -> int:
        """The open step of a synchronous space; otherwise the slowest worker's clock."""
        if not self.description.synchronous:
            return self.clocks.slowest
        return NO_CLOCK if self.clocks.live == 0 else self.open_step

    def staleness(self, worker: int) -> int:
        """Steps of other workers between a worker's last read and the first push of its current step."""
        if worker not in self._others_at_read:
            return 0
        steps_of_others = self.clocks.total_steps - self.clocks.of[worker]
        return self._step_staleness.get(worker, steps_of_others - self._others_at_read[worker])

    def begin_step(self, worker: int) -> None:
        """Record the staleness of a step at its first push; later pushes of the same step change nothing."""
        if worker in self._others_at_read:
            self._step_staleness.setdefault(worker, self.staleness(worker))

    def note_read(self, worker: int) -> None:
        """Record that a worker reads the weights for its next step."""
        if worker in self._others_at_read:
            self._others_at_read[worker] = self.clocks.total_steps - self.clocks.of[worker]

    # The optimizer state: the tensors that the rules keep.

    def state_names(self) -> list[str]:
        """The names of the tensors that the rules of this shard keep."""
        names = {name for state in self._states for name in state}
        for piece in self._pieces.values():
            names |= set(piece.state_dict())
        return sorted(names)

    def number_state(self, names: Sequence[str]) -> None:
        """Number the tensors for reads and writes, including those of other servers or a checkpoint."""
        self._state_names, self._loading = list(names), {}

    def _state_name(self, slot: int) -> str:
        if not 1 <= slot <= len(self._state_names):
            raise ProtocolError(f"state slot {slot} of a rule that has {len(self._state_names)}: {self._state_names}")
        return self._state_names[slot - 1]

    def read(self, state_slot: int, first: int, count: int) -> Tensor:
        """A range of the weights, or of a tensor of the optimizer state."""
        low, high = first - self.first, first - self.first + count
        if state_slot == 0:
            return self.weights[low:high]
        name, group = self._state_name(state_slot), self.description.group_of(first)
        if self._rules[group].elementwise:
            rows = self._states[group].get(name)
            return torch.zeros(count, dtype=torch.float32) if rows is None else rows[low:high]
        piece = self._pieces.get((low, high))  # a read creates no optimizer
        value = None if piece is None else piece.state_dict().get(name)
        if (
            value is None
        ):  # NaN, because zeros are a valid state: NAdam's product begins at 1, Rprop's steps at its rate
            return torch.full((count,), math.nan, dtype=torch.float32)
        return value.to(torch.float32).expand(count).contiguous()

    def _write_state(self, slot: int, first: int, values: Tensor) -> None:
        name, group = self._state_name(slot), self.description.group_of(first)
        low, high = first - self.first, first - self.first + values.numel()
        if self._rules[group].elementwise:
            if name in self._states[group]:
                self._states[group][name][low:high] = values
            return
        loading = self._loading.setdefault((low, high), {})
        loading[name] = values.clone()
        if len(loading) < len(self._state_names):  # a piece loads its state when all tensors have arrived
            return
        state = self._loading.pop((low, high))
        if not all(bool(each.isnan().all()) for each in state.values()):  # else no push had reached the piece
            self._piece(group, low, high).load_state_dict(state)
        elif (low, high) in self._pieces:
            self._pieces[low, high].load_state_dict({})

    # Snapshots: all of the above, for a server that takes part in the chain from now on.

    def snapshot(self) -> dict[str, Any]:
        """The state of the shard. Its tensors are those of the shard: copy them before the next request."""
        steps = {
            clock: {
                "pushes": {worker: list(map(_push_fields, pushes)) for worker, pushes in step.pushes.items()},
                "ticked": sorted(step.ticked),
                "weights": step.weights,
            }
            for clock, step in self._sync_steps.items()
        }
        return {
            "weights": self.weights,
            "clocks": self.clocks.snapshot(),
            "fields": {name: getattr(self, name) for name in COPIED},
            "rules": [repr(rule) for rule in self._rules],
            "pieces": {span: piece.snapshot() for span, piece in self._pieces.items()},
            "handlers": {name: state for name, (_, state) in self._handlers.items()},
            "steps": steps,
        }

    def load_snapshot(self, state: dict[str, Any]) -> None:
        """Continue like the shard whose `snapshot` this is. The tensors belong to this shard from now on."""
        self.weights = state["weights"]
        self.clocks.load_snapshot(state["clocks"])
        for name in COPIED:
            setattr(self, name, state["fields"][name])
        self._rules = [build_rule(spec) for spec in state["rules"]]
        self._pieces = {}
        for (low, high), piece in state["pieces"].items():
            group = self.description.group_of(low + self.first)
            self._piece(group, low, high).load_snapshot(piece)
        for name, rows in state["handlers"].items():
            self._handlers[name] = self._handler(name)[0], rows
        self._sync_steps = {
            clock: _SyncStep(
                {worker: [Push(*fields) for fields in pushes] for worker, pushes in step["pushes"].items()},
                set(step["ticked"]),
                step["weights"],
            )
            for clock, step in state["steps"].items()
        }


def _push_fields(push: Push) -> tuple[Any, ...]:
    return push.first, push.values, push.keys, push.rate, push.scale, push.handler, push.state_slot


def _torch_optimizer(rule: UpdateRule) -> str | None:
    """The name of the torch optimizer that a rule corresponds to."""
    return "SGD" if isinstance(rule, Sgd) else rule.optimizer if isinstance(rule, TorchRule) else None


def _run_rule(rule: UpdateRule, weights: Tensor, values: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
    """Apply a rule. A handler works on copies, because it may raise halfway or put new tensors into its state."""
    if type(rule) is not HandlerRule:  # isinstance() takes longer for an abstract class
        rule.apply(weights, values, state, rate)
        return
    changed, rows = weights.clone(), {name: each.clone() for name, each in state.items()}
    rule.apply(changed, values, rows, rate)
    shapes = {name: each.shape for name, each in rows.items()}
    if changed.shape != weights.shape or shapes != {name: each.shape for name, each in state.items()}:
        raise ProtocolError(
            f"{rule!r} left weights of {list(changed.shape)} and a state of {sorted(rows)}, where "
            f"{list(weights.shape)} and {sorted(state)} were due: change them in place"
        )
    weights.copy_(changed)
    for name, row in rows.items():
        state[name].copy_(row)


def add_pushes(workers: Sequence[list[Push]], edges: Sequence[int] = ()) -> list[Push]:
    """Add the pushes of several workers in their order. `edges` are the first keys of pieces."""
    ranges = [[(push.first, push.count, push.keys is None) for push in pushes] for pushes in workers]
    if not workers:
        return []
    dense = all(is_range for each in ranges for _, _, is_range in each)
    if dense and all(each == ranges[0] for each in ranges):
        return [_add_dense([pushes[number] for pushes in workers]) for number in range(len(ranges[0]))]
    everything = [push for pushes in workers for push in pushes]
    return _add_ranges(everything) if dense else _add_sparse(everything, edges)


def _add_ranges(pushes: Sequence[Push]) -> list[Push]:
    """Add pushes of different ranges: workers may leave out parameters that have no gradient."""
    edges = sorted({edge for push in pushes for edge in (push.first, push.first + push.count)})
    sums = []
    for first, end in pairwise(edges):
        parts = [
            Push(first, push.values[first - push.first : end - push.first], rate=push.rate, scale=push.scale)
            for push in pushes
            if push.first <= first and end <= push.first + push.count
        ]
        if parts:
            sums.append(_add_dense(parts))
    return sums


def _add_dense(pushes: Sequence[Push]) -> Push:
    total, alike = pushes[0].values, len({push.scale for push in pushes}) == 1
    if not alike and pushes[0].scale != 1.0:
        total.mul_(pushes[0].scale)
    for push in pushes[1:]:
        total.add_(push.values, alpha=1.0 if alike else push.scale)
    return Push(pushes[0].first, total, rate=pushes[0].rate, scale=pushes[0].scale if alike else 1.0)


def _add_sparse(pushes: Sequence[Push], edges: Sequence[int]) -> list[Push]:
    """Add pushes of lists of keys by piece, so that a rule gets each key once."""
    pieces: dict[int, list[Push]] = {}
    for push in pushes:
        pieces.setdefault(edges[bisect_right(edges, push.first) - 1] if edges else push.first, []).append(push)
    sums = []
    for first, same in sorted(pieces.items()):
        lists = [torch.arange(p.first, p.first + p.count) if p.keys is None else p.keys for p in same]
        keys, places = torch.unique(torch.cat(lists), return_inverse=True)
        total = torch.zeros(keys.numel(), dtype=torch.float32)
        total.index_add_(0, places, torch.cat([push.values * push.scale for push in same]))
        sums.append(Push(first, total, keys=keys, rate=same[0].rate))
    return sums
