"""Predicts when each action of a pipeline schedule runs, from the durations of the stages and of the transfers.

An action starts when its rank is free and what it needs has arrived::

    F(s, j)  ≥  F(s−1, j) + c            c: seconds of the transfer between two ranks, 0 on the same rank
    B(s, j)  ≥  F(s, j),  B(s+1, j) + c  of a stage with a split backward, I instead of B
    W(s, j)  ≥  I(s, j)

Messages travel in the background. R and U take no time. If a message occupies its sender, later ones wait for it::

    sender    F0  ├── message of F0 ──┤── message of F1 ──┤
                    F1 ─ ends here ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncline.errors import DeadlockError, SpecError
from syncline.parallel.schedules import Action, PipelineSchedule, PipelineSetting

__all__ = ["PipelineTimeline", "StageCost", "TimedAction", "play"]

Key = tuple[str, int, int]
"""A result that actions wait for: "F", "B" or "W", the stage and the micro-batch. The result of I counts as "B"."""
RELEASES = {"B", "W"}
"""The kinds of actions after which the activations of a micro-batch are not needed."""
MAX_BLOCKED_SHOWN = 8
"""Workers that the message about a deadlock lists."""


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage for one micro-batch: seconds of its forward and of the two halves of its backward, and bytes.

    >>> StageCost(forward_s=0.5, input_s=0.5, weight_s=0.25).seconds("B")
    0.75
    """

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: int = 0
    """Bytes that the forward keeps for the backward."""
    output_bytes: int = 0
    """Bytes of the output, which is sent to the next stage. The gradient that comes back has as many."""

    def seconds(self, kind: str) -> float:
        """The duration of an action."""
        match kind:
            case "F":
                return self.forward_s
            case "B":
                return self.input_s + self.weight_s
            case "I":
                return self.input_s
            case "W":
                return self.weight_s
            case _:
                return 0.0


class TimedAction(NamedTuple):
    """An action of a rank, with its start and its end in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The times of all actions of each worker. With replicas, the workers of the first pipeline rank come first."""

    workers: tuple[tuple[int, int], ...]
    """Pipeline rank and replica of each worker."""
    rows: tuple[tuple[TimedAction, ...], ...]
    """The actions of each worker in order; `rank` in them is the number of the worker."""
    peak_activations: tuple[int, ...]
    """For each worker, the most forwards (of one stage, one micro-batch) at a time whose B or W has not ended."""
    peak_activation_bytes: tuple[int, ...]
    """For each worker, the most bytes that forwards keep for backwards at a time."""

    @property
    def actions(self) -> tuple[TimedAction, ...]:
        """The actions of all workers."""
        return tuple(each for row in self.rows for each in row)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first action to the end of the last one."""
        ends = [row[-1].end_s for row in self.rows if row]
        return max(ends) - min(row[0].start_s for row in self.rows if row)

    @property
    def costs_s(self) -> tuple[float, ...]:
        """For each worker, the seconds from the start of its first action to the end of its last one."""
        return tuple(row[-1].end_s - row[0].start_s if row else 0.0 for row in self.rows)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each worker, the seconds in which it computes."""
        return tuple(sum(each.end_s - each.start_s for each in row) for row in self.rows)

    @property
    def bubble_rate(self) -> float:
        """(largest cost − m·(F + B + W) of the busiest worker) ÷ largest cost."""
        cost = max(self.costs_s)
        return max(0.0, cost - max(self.busy_s)) / cost if cost else 0.0


def play(
    schedule: PipelineSchedule,
    setting: PipelineSetting,
    costs: StageCost | Sequence[StageCost],
    transfer_s: float | Callable[[int], float] = 0.0,
    port_s: float | Callable[[int], float] = 0.0,
) -> PipelineTimeline:
    """Predict one step. `costs` is that of each stage, or one for all stages.

    `transfer_s` is the seconds of a transfer between two ranks, or a function of its bytes, such as
    ``lambda nbytes: 1e-4 + nbytes / 1e9``. `port_s`, a part of them, is how long it keeps the next transfer of the
    same sender waiting, such as ``lambda nbytes: nbytes / 1e9``.

    >>> from syncline.parallel.schedules import OneFOneB
    >>> timeline = play(OneFOneB(), PipelineSetting(ranks=4, micro_batches=8), StageCost(1.0, 1.0, 1.0))
    >>> timeline.makespan_s, timeline.bubble_rate, timeline.peak_activations
    (33.0, 0.2727272727272727, (4, 3, 2, 1))
    """
    schedule.check(setting)
    stages = schedule.stages_per_rank * setting.ranks
    per_stage = [costs] * stages if isinstance(costs, StageCost) else list(costs)
    if len(per_stage) != stages:
        raise SpecError(
            f"{schedule} on {setting.ranks} ranks has {stages} stages, but there are {len(per_stage)} costs"
        )
    return _Player(schedule, setting, per_stage, transfer_s, port_s).run()


class _Player:
    """Runs each worker until it has to wait for a result, and again when that result is there."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        setting: PipelineSetting,
        costs: list[StageCost],
        transfer_s: float | Callable[[int], float],
        port_s: float | Callable[[int], float],
    ) -> None:
        self.schedule, self.setting, self.costs = schedule, setting, costs
        replicas = setting.replicas or (1,) * setting.ranks
        self.workers = [(rank, replica) for rank, count in enumerate(replicas) for replica in range(count)]
        self.orders = [list(schedule.actions(rank, setting, replica)) for rank, replica in self.workers]
        self.rows: list[list[TimedAction]] = [[] for _ in self.workers]
        self.ends: dict[Key, float] = {}
        self.departures: dict[Key, float] = {}
        """When the message with a result leaves: at the end of the action, or when the sender's port is free."""
        self.ports_free_s = [0.0] * len(self.workers)
        self.delays = [self._delay(stage, transfer_s) for stage in range(len(costs) - 1)]
        self.occupied = [self._delay(stage, port_s) for stage in range(len(costs) - 1)]
        self.waiting: defaultdict[Key, list[int]] = defaultdict(list)

    def _delay(self, stage: int, transfer_s: float | Callable[[int], float]) -> float:
        """Seconds from the end of an action of a stage to the start of one of the next stage, and back."""
        ranks = self.setting.ranks
        if self.schedule.rank_of(stage, ranks) == self.schedule.rank_of(stage + 1, ranks):
            return 0.0
        return transfer_s(self.costs[stage].output_bytes) if callable(transfer_s) else transfer_s

    def run(self) -> PipelineTimeline:
        ready = list(range(len(self.workers)))
        while ready:
            ready += self._run_worker(ready.pop())
        if any(len(row) < len(order) for row, order in zip(self.rows, self.orders, strict=True)):
            raise DeadlockError(self._blocked())
        peaks = [self._peaks(order) for order in self.orders]
        return PipelineTimeline(
            tuple(self.workers),
            tuple(map(tuple, self.rows)),
            tuple(count for count, _ in peaks),
            tuple(nbytes for _, nbytes in peaks),
        )

    def _run_worker(self, worker: int) -> list[int]:
        """Run a worker until it waits. Returns the workers that waited for one of its results."""
        row, order = self.rows[worker], self.orders[worker]
        woken: list[int] = []
        free_s = row[-1].end_s if row else 0.0
        while len(row) < len(order):
            action = order[len(row)]
            start_s = free_s
            for key, delay_s in self._needs(action):
                if key not in self.ends:
                    self.waiting[key].append(worker)
                    return woken
                ready_s = self.ends[key] if key[1] == action.stage else self.departures[key]
                start_s = max(start_s, ready_s + delay_s)
            free_s = start_s + self.costs[action.stage].seconds(action.kind)
            row.append(TimedAction(worker, action, start_s, free_s))
            if action.kind in "FBIW":
                result = ("B" if action.kind == "I" else action.kind, action.stage, action.micro_batch)
                self.ends[result] = free_s
                self._send(worker, result)
                woken += self.waiting.pop(result, [])
        return woken

    def _send(self, worker: int, result: Key) -> None:
        """Send a result to the next or the previous stage, after the earlier messages of its worker."""
        kind, stage, _ = result
        link = stage if kind == "F" else stage - 1
        departure_s = self.ends[result]
        if kind != "W" and 0 <= link < len(self.occupied) and self.occupied[link]:
            departure_s = max(departure_s, self.ports_free_s[worker])
            self.ports_free_s[worker] = departure_s + self.occupied[link]
        self.departures[result] = departure_s

    def _needs(self, action: Action) -> list[tuple[Key, float]]:
        """The results that an action needs, with the seconds after which they arrive."""
        kind, stage, number = action
        if kind == "F":
            return [(("F", stage - 1, number), self.delays[stage - 1])] if stage else []
        if kind in "BI":
            own: list[tuple[Key, float]] = [(("F", stage, number), 0.0)]
            following = stage + 1 < len(self.costs)
            return [*own, (("B", stage + 1, number), self.delays[stage])] if following else own
        return [(("B", stage, number), 0.0)] if kind in "WU" else []

    def _peaks(self, order: list[Action]) -> tuple[int, int]:
        """The most forwards at a time whose activations are needed, and the most bytes of them."""
        count = most = nbytes = most_bytes = 0
        for action in order:
            step = 1 if action.kind == "F" else -1 if action.kind in RELEASES else 0
            count += step
            nbytes += step * self.costs[action.stage].activation_bytes
            most, most_bytes = max(most, count), max(most_bytes, nbytes)
        return most, most_bytes

    def _blocked(self) -> str:
        """The message about a deadlock: each worker that waits, its next action and what that needs."""
        lines = []
        for (rank, replica), row, order in zip(self.workers, self.rows, self.orders, strict=True):
            if len(row) == len(order):
                continue
            action = order[len(row)]
            kind, stage, number = next(key for key, _ in self._needs(action) if key not in self.ends)
            name = f"rank {rank}" + (f", replica {replica}" if self.setting.replicas else "")
            lines.append(f"{name}: {action} waits for {kind} of micro-batch {number} from stage {stage}")
        shown = "; ".join(lines[:MAX_BLOCKED_SHOWN])
        more = f"; and {len(lines) - MAX_BLOCKED_SHOWN} more" if len(lines) > MAX_BLOCKED_SHOWN else ""
        return f"the order of {self.schedule} deadlocks in {self.setting}: {shown}{more}"
