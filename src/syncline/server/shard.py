"""One server's shard of a space: its weights, what a push does to them, and who may read when.

push ─► held?  no ─► the rule, at once
        yes ─► kept, by step and worker ─► a quorum has pushed the step ─► sum, in the order of the workers ─► rule
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
from syncline.server.rules import Sgd, TorchRule, UpdateRule, build_rule
from syncline.server.rules.handlers import HandlerRule
from syncline.server.space import SpaceDescription, group_of

__all__ = ["ParameterShard", "Push", "WorkerClocks", "add_up"]

logger = logging.getLogger("syncline")

PLAIN = ("add", "assign")
AHEAD = 1024
"""Steps that a held push may be ahead of the step that is open: clients wait for reads long before."""
MOST_HELD = 64
"""How many times the bytes of a shard are kept of one worker's held pushes, at most."""
BLOCK = 1 << 16
"""Elements that a rule changes at once."""
ROOM = 1 << 16
"""Bytes that a shard counts as for that, at least."""


@dataclass
class Push:
    """Values for a range of keys, or for a list of them."""

    first: int
    values: Tensor
    keys: Tensor | None = None
    rate: float | None = None
    scale: float = 1.0
    handler: str | None = None
    """In place of the rule."""
    plane: int = 0

    @property
    def count(self) -> int:
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        return 4 * self.count + (0 if self.keys is None else 8 * self.keys.numel())


@dataclass
class _Step:
    """Held pushes of one step, by worker."""

    of: dict[int, list[Push]] = field(default_factory=dict)
    ticked: set[int] = field(default_factory=set)
    """Who has pushed all of it."""
    weights: dict[int, float] = field(default_factory=dict)
    """The number of gradients in each; parts of them may be on other servers."""


class ParameterShard:
    """The shard of one server. Its caller sees to it that one task at a time is inside."""

    def __init__(self, description: SpaceDescription, server: int) -> None:
        self.description = description
        self.first, self.after = description.layout.shard(server)
        self.weights = torch.zeros(self.after - self.first, dtype=torch.float32)
        self.clocks = WorkerClocks(description.workers)
        self.round = 0
        """Of held pushes: the step that is open."""
        self.stopping = False
        self.orphaned = ""
        """Of a sub-master whose parent is lost: what is known of it."""
        self.below: dict[str, list[int]] = {}
        """What sub-masters tell of their children: steps, and how many of them came late."""
        self.late: dict[int, int] = {}
        self._speaks = server == 0
        """Whether this is the one server of the space that logs events which all of them see."""
        self._left_at: dict[int, int] = {}
        """Workers that have left by themselves, each with its clock then."""
        self._rules = description.build_rules()
        self._states: list[dict[str, Tensor]] = [
            rule.state(self.after - self.first) if rule.elementwise else {} for rule in self._rules
        ]
        self._appliers: dict[tuple[int, int], Any] = {}
        self._handlers: dict[str, tuple[UpdateRule, dict[str, Tensor]]] = {}
        self._planes: list[str] = []
        self._loading: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._steps: dict[int, _Step] = {}
        self._held = dict.fromkeys(description.workers, 0)
        """Bytes that are kept of each worker's pushes."""
        self.edition = 0
        """Counts how often the weights were replaced. Each time the clients' copies become invalid."""
        self._read_at = dict.fromkeys(description.workers, 0)
        self._begun: dict[int, int] = {}
        """How stale the steps are that have begun, by worker: all parts of a step are as stale as its first."""

    # Pushing.

    def check(self, first: int, count: int) -> None:
        """Refuse keys that are not this shard's, or lie in two groups."""
        if not self.first <= first <= first + count <= self.after:
            raise ProtocolError(
                f"keys {first} to {first + count} are not this server's: it has {self.first} to {self.after} of "
                f"{self.description.numel}"
            )
        bounds = self.description.bounds
        if count and group_of(bounds, first) != group_of(bounds, first + count - 1):
            raise ProtocolError(f"keys {first} to {first + count} lie in two groups (they begin at {list(bounds)})")

    def push(self, worker: int, clock: int, push: Push, answer: bool = False) -> bool:
        """Take an update: apply it, or keep it until its step is closed. Where `answer` is wanted and it is a range
        that was applied, it becomes what the weights are then; whether it did.
        """
        ruled = push.handler is None and push.plane == 0
        synchronous = self.description.synchronous and ruled and worker in self.clocks.of
        if not synchronous or clock < 0:
            answer = answer and ruled and push.keys is None
            self.apply(push, self.staleness(worker) if self.description.damped and ruled else 0, answer)
            return answer
        if clock < self.round or self.is_far(clock):
            raise ProtocolError(f"a push of step {clock} by worker {worker}, and step {self.round} is open")
        most = MOST_HELD * max(ROOM, 4 * (self.after - self.first))
        if self._held[worker] + push.nbytes > most:
            raise ProtocolError(
                f"{self._held[worker]} B of worker {worker}'s pushes wait for their steps to close, and {most} B are "
                "the most: end the step with tick=True, and read before going on"
            )
        self._held[worker] += push.nbytes
        self._steps.setdefault(clock, _Step()).of.setdefault(worker, []).append(push)
        return False

    def expect(self, worker: int, clock: int) -> None:
        """Refuse a step that is not this worker's next. One that came late elsewhere goes on with a later step."""
        free = self.description.synchronous and (self.description.quorum < 1.0 or not self.clocks.trains(worker))
        if free and self.clocks.of.get(worker, clock) < clock <= self.round + AHEAD:
            self.clocks.set(worker, clock)
        self.clocks.check(worker, clock)

    def is_far(self, clock: int) -> bool:
        """Whether a held step is further ahead than any that is kept."""
        return self.description.synchronous and clock > self.round + AHEAD

    def skip(self, worker: int) -> None:
        """A worker's step came late: it goes on with the one that is open."""
        self.clocks.set(worker, max(self.clocks.of[worker], self.round))
        self.late[worker] = self.late.get(worker, 0) + 1
        self._begun.pop(worker, None)

    def is_late(self, worker: int, clock: int) -> bool:
        """Whether the step of a held push is closed already: a quorum did without it."""
        return self.description.synchronous and worker in self.clocks.of and 0 <= clock < self.round

    def tick(self, worker: int, clock: int, weight: float = 0.0) -> None:
        """A worker has pushed all of its step, which counts as `weight` gradients in a mean. An error of a rule is
        raised for the worker that completes the step.
        """
        self.clocks.tick(worker, clock)
        self._begun.pop(worker, None)
        if self._left_at:
            self._warn_of_early_leavers(clock + 1)
        if self.description.synchronous:
            step = self._steps.setdefault(clock, _Step())
            step.ticked.add(worker)
            step.weights[worker] = weight
        self.close_rounds()

    def _warn_of_early_leavers(self, clock: int) -> None:
        """Warn once of workers that left by themselves long before the clock that another has reached."""
        for worker, at in list(self._left_at.items()):
            if clock > at + max(1, at // 10):
                del self._left_at[worker]
                if self._speaks:
                    logger.warning(
                        "worker %d has left at clock %d, and the others continue: it has taken fewer steps than they "
                        "have. Did its script end too early?",
                        worker,
                        at,
                    )

    def leave(self, worker: int, lost: bool = False) -> bool:
        """A worker is lost or through: it holds nobody back."""
        left = self.clocks.leave(worker)
        if left and not lost and not self.stopping:
            self._left_at[worker] = self.clocks.of[worker]
        if left:
            try:
                self.close_rounds()
            except Exception as error:  # of a user's rule: nobody is there to be told
                logger.warning("space %r: step %d is not applied: %s", self.description.name, self.round - 1, error)
        return left

    def set_clocks(self, clocks: Sequence[int]) -> None:
        """Go on from a checkpoint: one clock for each worker, in their order."""
        if self.description.synchronous and max(clocks) - min(clocks) > AHEAD:
            raise ProtocolError(f"clocks from {min(clocks)} to {max(clocks)}, and {AHEAD} steps apart are the most")
        self.edition += 1
        self._steps.clear()
        self._held = dict.fromkeys(self._held, 0)
        for worker, clock in zip(sorted(self.clocks.of), clocks, strict=True):
            self.clocks.set(worker, clock)
            for done in range(min(clocks), clock) if self.description.synchronous else ():
                self._steps.setdefault(done, _Step()).ticked.add(worker)
        self.round = min(clocks) if self.description.synchronous else 0
        self._begun.clear()
        for worker in self.clocks.of:
            self.note_read(worker)

    def close_rounds(self) -> None:
        """Apply the steps that enough workers have pushed."""
        if not self.description.synchronous:
            return
        while self._closes(self.round):
            step = self._steps.pop(self.round, _Step())
            for worker, pushes in step.of.items():
                self._held[worker] -= sum(push.nbytes for push in pushes)
            ready = [(worker, pushes) for worker, pushes in sorted(step.of.items()) if worker in step.ticked]
            weight = 1.0
            if self.description.mean:
                weight = sum(step.weights.values())
                for _, pushes in ready:
                    for push in pushes:
                        push.scale = 1.0
            total = add_up([pushes for _, pushes in ready], self.description.layout.edges)
            self.round += 1
            self.settle(total, weight)

    def settle(self, pushes: list[Push], weight: float) -> None:
        """A step's sum, and how many gradients it adds up where a mean is wanted."""
        for push in pushes:
            if self.description.mean:
                push.scale = 1.0 / weight if weight else 0.0
            self.apply(push)

    def _closes(self, clock: int) -> bool:
        if self.clocks.live and self.clocks.least > clock:
            return True  # nobody is left who could push it: some came late elsewhere and skipped it, or are lost
        step = self._steps.get(clock)
        if step is None or not step.ticked:
            return False
        needed = max(1, math.ceil(self.description.quorum * self.clocks.live - 1e-9)) if self.clocks.live else 0
        return sum(self.clocks.trains(worker) for worker in step.ticked) >= needed

    def apply(self, push: Push, staleness: int = 0, answer: bool = False) -> None:
        """Change the weights; with `answer` the update becomes what they are then."""
        rate, scale = push.rate, push.scale
        if staleness > 1:
            rate, scale = (None, scale / staleness) if rate is None else (rate / staleness, scale)
        values = push.values if scale == 1.0 else push.values.mul_(scale)
        if push.plane:
            self._put_plane(push.plane, push.first, values)
        elif push.handler is not None:
            self._handle(push.handler, push, values)
        elif push.keys is None:
            self._apply_range(push.first, values, rate, answer)
        else:
            self._apply_keys(push.first, push.keys - self.first, values, rate)

    def _handle(self, name: str, push: Push, values: Tensor) -> None:
        """What a user's handler does, or plainly `add` and `assign`."""
        if name not in self._handlers:
            rule = build_rule(name if name in PLAIN else f"handler({name!r})")
            self._handlers[name] = rule, rule.state(self.after - self.first)
        rule, state = self._handlers[name]
        if push.keys is None:
            low, high = push.first - self.first, push.first - self.first + push.count
            rows = {slot: kept[low:high] for slot, kept in state.items()}
            _run(rule, self.weights[low:high], values, rows, push.rate)
        else:
            self._scattered(rule, state, push.keys - self.first, values, push.rate)

    def _apply_range(self, first: int, values: Tensor, rate: float | None, answer: bool) -> None:
        low, high = first - self.first, first - self.first + values.numel()
        number = group_of(self.description.bounds, first)
        rule, rows = self._rules[number], self._states[number]
        if not rule.elementwise:
            piece = self._piece_of(low, high)
            self._applier(number, *piece).apply(values, rate, low - piece[0])
            if answer:
                values.copy_(self.weights[low:high])
            return
        step = max(1, high - low) if isinstance(rule, HandlerRule) else BLOCK  # a user's sees the whole
        for at in range(low, high, step):  # a block at a time, as it stays in the cache between the passes
            part = slice(at, min(at + step, high))
            weights, update = self.weights[part], values[at - low : part.stop - low] if high - low > step else values
            _run(rule, weights, update, {name: kept[part] for name, kept in rows.items()}, rate)
            if answer:
                update.copy_(weights)

    def _piece_of(self, low: int, high: int) -> tuple[int, int]:
        """The piece of one optimizer in which a range lies; the range itself if the parameters are unknown."""
        if not self.description.starts:
            return low, high
        edges = self.description.layout.edges
        at = bisect_right(edges, low + self.first) - 1
        return edges[at] - self.first, edges[at + 1] - self.first

    def _applier(self, number: int, low: int, high: int) -> Any:
        applier = self._appliers.get((low, high))
        if applier is None:
            clash = next((span for span in self._appliers if span[0] < high and low < span[1]), None)
            if clash is not None:
                raise ProtocolError(
                    f"{self._rules[number]!r} takes whole pieces: keys {low + self.first} to {high + self.first} cut "
                    f"across {clash[0] + self.first} to {clash[1] + self.first}; push the same ranges each time, or "
                    "use a rule like sgd or adam"
                )
            starts = [start - self.first - low for start in self.description.starts]
            applier = self._appliers[low, high] = self._rules[number].open(self.weights[low:high], starts)
        return applier

    def use_rules(self, specs: Sequence[str]) -> None:
        """Continue with other settings of the rules, such as a momentum that a schedule has changed; state stays."""
        rules = [build_rule(spec) for spec in specs]
        for old, new in zip(self._rules, rules, strict=True):
            if old != new and not (isinstance(new, TorchRule) and _optimizer_of(old) == new.optimizer):
                raise ProtocolError(f"{new!r} in place of {old!r}: only the settings of an optimizer may change")
        bounds = self.description.bounds
        for (low, _), applier in self._appliers.items():
            new = rules[group_of(bounds, low + self.first)]
            if isinstance(new, TorchRule):
                applier.use(new)
        self._rules = rules

    def _apply_keys(self, first: int, places: Tensor, values: Tensor, rate: float | None) -> None:
        number = group_of(self.description.bounds, first)
        rule = self._rules[number]
        if not rule.elementwise:
            raise ProtocolError(f"{rule!r} takes whole pieces, not lists of keys; use a rule like sgd or adagrad")
        self._scattered(rule, self._states[number], places, values, rate)

    def _scattered(
        self, rule: UpdateRule, state: dict[str, Tensor], places: Tensor, values: Tensor, rate: float | None
    ) -> None:
        weights = self.weights[places]
        rows = {name: kept[places] for name, kept in state.items()}
        _run(rule, weights, values, rows, rate)
        self.weights[places] = weights
        for name, kept in rows.items():
            state[name][places] = kept

    # Reading.

    def may_read(self, wanted: int, worker: int = -1) -> bool:
        """Whether everyone's steps before `wanted` are in."""
        return wanted < 0 or self.stopping or self.least >= wanted

    @property
    def least(self) -> int:
        """The step that is open, or the slowest worker's."""
        if not self.description.synchronous:
            return self.clocks.least
        return FOREVER if self.clocks.live == 0 else self.round

    def staleness(self, worker: int) -> int:
        """Steps of others since a worker has read, up to where its own step began."""
        if worker not in self._read_at:
            return 0
        return self._begun.get(worker, self._others(worker) - self._read_at[worker])

    def begin_step(self, worker: int) -> None:
        """A part of a worker's step comes, perhaps not the first."""
        if worker in self._read_at:
            self._begun.setdefault(worker, self.staleness(worker))

    def note_read(self, worker: int) -> None:
        """A worker reads now what its next step begins with."""
        if worker in self._read_at:
            self._read_at[worker] = self._others(worker)

    def _others(self, worker: int) -> int:
        return self.clocks.steps - self.clocks.of[worker]

    # State: what the rules remember, as planes beside the weights.

    def name_planes(self, names: Sequence[str] | None = None) -> list[str]:
        """The names of the planes that are here; or number all of them, those of other servers or a checkpoint too."""
        if names is not None:
            self._planes, self._loading = list(names), {}
            return self._planes
        # A question changes no numbers: several workers read at once, and another may be between the two calls.
        found = {name for state in self._states for name in state}
        for applier in self._appliers.values():
            found |= set(applier.state_dict())
        return sorted(found)

    def _plane(self, number: int) -> str:
        if not 1 <= number <= len(self._planes):
            raise ProtocolError(f"plane {number} of a rule's state, which has {len(self._planes)}: {self._planes}")
        return self._planes[number - 1]

    def read(self, number: int, first: int, count: int) -> Tensor:
        """Keys of the weights, or of a plane."""
        low, high = first - self.first, first - self.first + count
        if number == 0:
            return self.weights[low:high]
        name, group = self._plane(number), group_of(self.description.bounds, first)
        if self._rules[group].elementwise:
            rows = self._states[group].get(name)
            return torch.zeros(count, dtype=torch.float32) if rows is None else rows[low:high]
        applier = self._appliers.get((low, high))  # one that is not there has nothing, and a read makes none
        kept = None if applier is None else applier.state_dict().get(name)
        # NaN, as zeros are no beginning: NAdam's product begins at 1, Rprop's steps at its rate.
        return (
            torch.full((count,), math.nan, dtype=torch.float32)
            if kept is None
            else kept.to(torch.float32).expand(count).contiguous()
        )

    def _put_plane(self, number: int, first: int, values: Tensor) -> None:
        name, group = self._plane(number), group_of(self.description.bounds, first)
        low, high = first - self.first, first - self.first + values.numel()
        if self._rules[group].elementwise:
            if name in self._states[group]:
                self._states[group][name][low:high] = values
            return
        loading = self._loading.setdefault((low, high), {})
        loading[name] = values.clone()
        if len(loading) < len(self._planes):  # a piece's state is taken over when all of it is there
            return
        state = self._loading.pop((low, high))
        if not all(bool(each.isnan().all()) for each in state.values()):  # else nobody had pushed to it
            self._applier(group, low, high).load_state_dict(state)
        elif (low, high) in self._appliers:
            self._appliers[low, high].load_state_dict({})


def _optimizer_of(rule: UpdateRule) -> str | None:
    """The optimizer of torch whose steps a rule takes."""
    return "SGD" if isinstance(rule, Sgd) else rule.optimizer if isinstance(rule, TorchRule) else None


def _run(rule: UpdateRule, weights: Tensor, values: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
    """Apply a rule. A user's may raise halfway, or put new tensors into its state: it works on copies."""
    if not isinstance(rule, HandlerRule):
        rule.apply(weights, values, state, rate)
        return
    changed, rows = weights.clone(), {name: kept.clone() for name, kept in state.items()}
    rule.apply(changed, values, rows, rate)
    shapes = {name: kept.shape for name, kept in rows.items()}
    if changed.shape != weights.shape or shapes != {name: kept.shape for name, kept in state.items()}:
        raise ProtocolError(
            f"{rule!r} left weights of {list(changed.shape)} and a state of {sorted(rows)}, where "
            f"{list(weights.shape)} and {sorted(state)} were due: change them in place"
        )
    weights.copy_(changed)
    for name, kept in rows.items():
        state[name].copy_(kept)


def add_up(workers: Sequence[list[Push]], edges: Sequence[int] = ()) -> list[Push]:
    """The sum of what workers have pushed, added in their order. `edges`: where pieces begin."""
    cuts = [[(push.first, push.count, push.keys is None) for push in pushes] for pushes in workers]
    if not workers:
        return []
    dense = all(is_range for cut in cuts for _, _, is_range in cut)
    if dense and all(cut == cuts[0] for cut in cuts):
        return [_sum_dense([pushes[number] for pushes in workers]) for number in range(len(cuts[0]))]
    everything = [push for pushes in workers for push in pushes]
    return _sum_ranges(everything) if dense else _sum_sparse(everything, edges)


def _sum_ranges(pushes: Sequence[Push]) -> list[Push]:
    """Add pushes whose ranges differ because workers leave out parameters without a gradient: cut alike, then add."""
    marks = sorted({mark for push in pushes for mark in (push.first, push.first + push.count)})
    found = []
    for first, after in pairwise(marks):
        parts = [
            Push(first, push.values[first - push.first : after - push.first], rate=push.rate, scale=push.scale)
            for push in pushes
            if push.first <= first and after <= push.first + push.count
        ]
        if parts:
            found.append(_sum_dense(parts))
    return found


def _sum_dense(pushes: Sequence[Push]) -> Push:
    total, alike = pushes[0].values, len({push.scale for push in pushes}) == 1
    if not alike and pushes[0].scale != 1.0:
        total.mul_(pushes[0].scale)
    for push in pushes[1:]:
        total.add_(push.values, alpha=1.0 if alike else push.scale)
    return Push(pushes[0].first, total, rate=pushes[0].rate, scale=pushes[0].scale if alike else 1.0)


def _sum_sparse(pushes: Sequence[Push], edges: Sequence[int]) -> list[Push]:
    """By piece: whatever the workers' cuts are, a rule sees each key once."""
    pieces: dict[int, list[Push]] = {}
    for push in pushes:
        pieces.setdefault(edges[bisect_right(edges, push.first) - 1] if edges else push.first, []).append(push)
    found = []
    for first, same in sorted(pieces.items()):
        lists = [torch.arange(p.first, p.first + p.count) if p.keys is None else p.keys for p in same]
        keys, places = torch.unique(torch.cat(lists), return_inverse=True)
        total = torch.zeros(keys.numel(), dtype=torch.float32)
        total.index_add_(0, places, torch.cat([push.values * push.scale for push in same]))
        found.append(Push(first, total, keys=keys, rate=same[0].rate))
    return found


FOREVER = 1 << 62
"""The least clock where nobody trains any more."""


class WorkerClocks:
    """One clock for each worker.

    >>> clocks = WorkerClocks([0, 1])
    >>> clocks.tick(0, 0)
    >>> clocks.least, clocks.steps
    (0, 1)
    >>> clocks.leave(1)
    True
    >>> clocks.least
    1
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.of = dict.fromkeys(workers, 0)
        self.steps = 0
        """That all have taken together."""
        self.least = 0
        """The slowest's."""
        self._there = set(self.of)
        self._look()

    @property
    def live(self) -> int:
        """Workers that are there and still train."""
        return len(self._there)

    def _look(self) -> None:
        self.steps = sum(self.of.values())
        self.least = min((self.of[worker] for worker in self._there), default=FOREVER)

    def trains(self, worker: int) -> bool:
        """Whether a worker is there and still trains."""
        return worker in self._there

    def check(self, worker: int, clock: int) -> None:
        """Refuse a step that is not this worker's next."""
        if worker not in self.of:
            raise ProtocolError(f"member {worker} has no clock here: workers are {sorted(self.of)}")
        if clock != self.of[worker]:
            raise ProtocolError(f"worker {worker} is at clock {self.of[worker]}, and sends a step of clock {clock}")

    def tick(self, worker: int, clock: int) -> None:
        """A worker has pushed all it had for its step."""
        self.check(worker, clock)
        self.of[worker] = clock + 1
        self._look()

    def set(self, worker: int, clock: int) -> None:
        """A worker goes on from another step: it was late, or comes out of a checkpoint."""
        self.of[worker] = clock
        self._look()

    def leave(self, worker: int) -> bool:
        """A worker is lost, or through; whether it was there."""
        if worker not in self._there:
            return False
        self._there.discard(worker)
        self._look()
        return True
