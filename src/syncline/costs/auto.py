"""`algorithm="auto"`: a choice by prediction, refined by measurement, made by rank 0 and then kept.

For each class of sizes (powers of two) the first call asks the network's model which schedules may win. Rank 0 names
them, the engine's own always among them, and the next calls try them in turn: each is a call like any other, so
nothing is wasted but the difference. After some rounds the slow ones drop out; after the last one is chosen, for good::

    calls    a b c d │ a b c d │ a b c  a b c  a b c │ a c  a c  a c … │ a a a a a a a …
             warm-up │ 1 each  │ 5 each              │ 12, then 32     │ the choice
                               └ drop > 4 × best     └ > 1.4, 1.12 ×   └ the fastest

Ranks that share a host share its processors too, which the model does not know: there all schedules have their try.

On a simulated network without jitter and faults every call takes the predicted time. There only candidates
within 10 % of the best prediction are tried, once each.

While trying, the ranks meet before and after a call, and its time is the shortest over the ranks: that of the last to
begin until the last has ended. A rank's own time alone would leave out what others still wait for, or put in what it
waited for them. Small tensors are reduced a few times more, on a copy, so that the meetings count for less.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.collectives import NATIVE, Channel, Schedule, build, names
from syncline.collectives.run import allreduce, broadcast, meet
from syncline.costs.cache import recall, remember
from syncline.costs.calibration import Calibration, calibrate
from syncline.costs.prediction import predict_on
from syncline.transports import Network, Op

__all__ = ["AUTO", "Auto", "Choice"]

logger = logging.getLogger("syncline")

AUTO = "auto"
MOST_TRIED = 5
WORTH_A_TRY = 2.0
"""A schedule is tried when its prediction is at most so many times the best."""
EXACT_MAX_RATIO = 1.1
"""A schedule is tried when its prediction is at most so many times the best, where `Timing.exact` holds."""
LOOKS = ((1, 4.0), (5, 1.4), (12, 1.12), (32, 1.0))
"""The stages of a trial: samples of each candidate, and the ratio to the best time above which one is dropped."""
EXACT_TRIAL_STAGES = ((1, 1.0),)
"""The stages of a trial where `Timing.exact` holds: one sample of each candidate decides."""
LONGEST = 60.0
"""Seconds: where going on to the last look would take longer, the second one decides."""
SMALL = 1 << 17
MORE = 3
"""Times that a tensor of up to so many bytes is reduced again while trying."""
PREFER_NATIVE = 1.03
"""The engine's own is kept unless another is faster by more than this: it needs no help from Python."""


@dataclass
class Choice:
    """What was chosen for one class of sizes, and why."""

    algorithm: str
    reason: str
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


class _Trial:
    """Candidates and the times of their calls."""

    def __init__(self, candidates: list[str], predicted: dict[str, float], exact: bool = False) -> None:
        self.candidates = candidates
        self.predicted = predicted
        self.schedule = EXACT_TRIAL_STAGES if exact else LOOKS
        self.warm_up = 0 if exact else 1
        """Calls of each candidate that do not count: the first makes connections and buffers."""
        self.times: dict[str, list[float]] = {name: [] for name in candidates}
        self.looks = 0
        self.turn = 0
        self.medians: dict[str, float] = {}
        self.prefer_native = PREFER_NATIVE

    def next(self) -> str:
        """Whose turn it is."""
        return self.candidates[self.turn % len(self.candidates)]

    def told(self, seconds: float) -> bool:
        """Note a time; True when it is time for a look at them."""
        self.times[self.next()].append(seconds)
        self.turn += 1
        wanted = self.schedule[self.looks][0] + self.warm_up
        return all(len(self.times[name]) >= wanted for name in self.candidates)

    def look(self, shared: Callable[[Tensor], Tensor]) -> str | None:
        """Drop the slow ones; the winner when it is the last look. `shared` gives each call's shortest time."""
        table = shared(
            torch.tensor([self.times[name][self.warm_up :] for name in self.candidates], dtype=torch.float64)
        )
        medians = {name: statistics.median(row) for name, row in zip(self.candidates, table.tolist(), strict=True)}
        best = min(medians.values())
        keep = self.schedule[self.looks][1]
        self.looks += 1
        self.candidates = [name for name in self.candidates if medians[name] <= keep * best]
        self.turn = 0
        self.medians = medians
        going_on = sum(medians[name] for name in self.candidates) * self.schedule[-1][0]
        patient = self.looks < 2 or going_on <= LONGEST
        if len(self.candidates) > 1 and self.looks < len(self.schedule) and patient:
            return None
        if medians.get(NATIVE, float("inf")) <= self.prefer_native * best:
            return NATIVE
        return min(medians, key=lambda name: medians[name])

    def cost_of_next_look(self) -> float:
        """Seconds until then, about: by what was measured, before that by the prediction."""
        known = self.medians or self.predicted
        others = sum(known.get(name, 0.0) for name in self.candidates)
        done = self.schedule[self.looks - 1][0] if self.looks else -self.warm_up
        calls = self.schedule[self.looks][0] - done
        return calls * others

    def best_guess(self) -> Choice:
        """What to take where there is no time to try on."""
        known, reason = (self.medians, "measured, in little time") if self.medians else (self.predicted, "predicted")
        best = min(self.candidates, key=lambda name: known.get(name, float("inf")))
        own = known.get(NATIVE)
        keep = own is not None and NATIVE in self.candidates and own <= self.prefer_native * known[best]
        return Choice(NATIVE if keep else best, reason, self.predicted, self.medians)


class Auto:
    """The choices of one channel. Every rank of it makes the same calls, and so the same choices.

    `where` names the network under which its calibration is remembered; without a name it is measured each time.
    """

    def __init__(
        self,
        channel: Channel,
        where: str = "",
        record: Callable[..., Any] = lambda *_, **__: None,
    ) -> None:
        self.choices: dict[str, Choice] = {}
        """By class of sizes: what was chosen and why."""
        self._channel = channel
        self._where = where
        self._record = record
        self._trials: dict[str, _Trial] = {}
        self._schedules: dict[str, Schedule] = {}
        self._network: Network | None = None

    def network(self) -> Network:
        """The model of this network: the simulator's own, remembered, or measured now."""
        if self._network is None:
            self._network = self._channel.transport.timing.network or self.calibration().network()
        return self._network

    def calibration(self, fresh: bool = False) -> Calibration:
        """What this network measures, remembered or, if it must be `fresh` or is unknown, measured now by all ranks."""
        known = None if fresh or self._channel.rank or not self._where else recall(self._where)
        numbers = self._share(None if known is None else known.numbers())
        if numbers is not None:
            return Calibration.of(numbers)
        logger.info("measuring the network of %d ranks, once", self._channel.size)
        found = calibrate(self._channel)
        if self._where and self._channel.rank == 0 and self._channel.size > 1:
            remember(self._where, found)
        return found

    def allreduce(self, tensor: Tensor, op: Op) -> None:
        """Reduce in place by what is best for tensors of this size, as far as is known by now."""
        key = _class(tensor)
        chosen = self.choices.get(key)
        if chosen is not None:
            self._run(chosen.algorithm, tensor, op)
            return
        if key not in self._trials:
            self._begin(key, tensor, op)
            self.allreduce(tensor, op)
            return
        trial = self._trials[key]
        if trial.told(self._timed(trial.next(), tensor, op)):
            winner = trial.look(self._shortest)
            if winner is not None:
                self._settle(key, Choice(winner, "measured", trial.predicted, trial.medians))

    def settle(self, tensor: Tensor, op: Op, budget: float, prefer_native: float = PREFER_NATIVE) -> Choice:
        """Choose now for tensors like this one, whose values do not count and are lost.

        Candidates are tried for about `budget` seconds, as far as that reaches; where it does not, the prediction
        decides. Every rank calls it. The engine's own wins unless another is faster by `prefer_native`.
        """
        key = _class(tensor)
        if key not in self.choices and key not in self._trials:
            self._begin(key, tensor, op)
        spent = 0.0
        while key not in self.choices:
            trial = self._trials[key]
            trial.prefer_native = prefer_native
            cost = trial.cost_of_next_look()  # from times that all ranks share, so that all decide alike
            if spent + cost > budget:
                self._settle(key, trial.best_guess())
                break
            spent += cost
            tensor.zero_()
            while not trial.told(self._timed(trial.next(), tensor, op)):
                tensor.zero_()
            winner = trial.look(self._shortest)
            if winner is not None:
                self._settle(key, Choice(winner, "measured", trial.predicted, trial.medians))
        self._channel.buffers.clear()  # those of the ones that lost are not needed again
        return self.choices[key]

    def decide(self, tensor: Tensor, algorithm: str, reason: str) -> None:
        """Take what the caller knows to be best for tensors like this one. Every rank calls it."""
        self._settle(_class(tensor), Choice(algorithm, reason))

    def adopt(self, algorithms: Mapping[str, str]) -> None:
        """Take what an earlier run has chosen, as {class of sizes: algorithm}: a resumed run goes the same way."""
        for key, algorithm in algorithms.items():
            if algorithm != NATIVE:
                build("allreduce", algorithm)
            self._trials.pop(key, None)
            self.choices[key] = Choice(algorithm, "adopted")

    def _timed(self, algorithm: str, tensor: Tensor, op: Op) -> float:
        now = self._channel.transport.runtime.now
        copies = [tensor.clone() for _ in range(MORE if tensor.numel() * tensor.element_size() <= SMALL else 0)]
        meet(self._channel)
        start = now()
        for each in (tensor, *copies):
            self._run(algorithm, each, op)
        meet(self._channel)
        return (now() - start) / (1 + len(copies))

    def chosen(self, tensor: Tensor) -> Choice | None:
        """What is taken for tensors of this size from now on; None while that is being tried."""
        return self.choices.get(_class(tensor))

    def _begin(self, key: str, tensor: Tensor, op: Op) -> None:
        """Rank 0 says which are worth a try."""
        channel = self._channel
        native = channel.transport.native
        own = [NATIVE] if native.reduces(tensor.dtype, op) else []
        if channel.size == 1 or (own and tensor.is_cuda):
            self._settle(key, Choice(own[0] if own else "ring", "nothing else is worth a try here"))
            return
        network, nbytes = self.network(), tensor.numel() * tensor.element_size()
        known = network is channel.transport.timing.network
        exact = known and channel.transport.timing.exact
        plan = None
        if channel.rank == 0:
            predicted = {name: predict_on(channel, name, nbytes, network).seconds for name in names("allreduce")}
            ranked = sorted(predicted, key=lambda name: predicted[name])
            most = (EXACT_MAX_RATIO if exact else WORTH_A_TRY) * predicted[ranked[0]]
            worth = [name for name in ranked if predicted[name] <= most][:MOST_TRIED]
            alone = len(set(channel.hosts)) == channel.size or known
            predicted |= {name: predict_on(channel, name, nbytes, network).seconds for name in own}
            plan = [own + (worth if alone else ranked), predicted]
        candidates, predicted = self._share(plan)
        if len(candidates) == 1:
            self._settle(key, Choice(candidates[0], "predicted", predicted))
        else:
            self._trials[key] = _Trial(candidates, predicted, exact)

    def _settle(self, key: str, choice: Choice) -> None:
        """From now on for good."""
        choice.algorithm = self._share(choice.algorithm)
        self.choices[key] = choice
        self._trials.pop(key, None)
        logger.info("auto: %s for %s (%s)", choice.algorithm, key, choice.reason)
        self._record(
            "sl_collective",
            choice.algorithm,
            size=key,
            reason=choice.reason,
            predicted=choice.predicted,
            measured=choice.measured,
        )

    def _run(self, algorithm: str, tensor: Tensor, op: Op) -> None:
        native = self._channel.transport.native
        if algorithm == NATIVE and native.reduces(tensor.dtype, op):
            native.allreduce(tensor, op).wait()
        else:
            if algorithm not in self._schedules:
                self._schedules[algorithm] = build("allreduce", algorithm)
            allreduce(self._channel, tensor, op, self._schedules[algorithm])

    def _shortest(self, times: Tensor) -> Tensor:
        allreduce(self._channel, times, "min", build("allreduce", "recursive_doubling"))
        return times

    def _share(self, word: Any) -> Any:
        """Rank 0's word, on every rank: what is decided by measuring must not differ between them."""
        channel = self._channel
        if channel.size == 1:
            return word
        text = json.dumps(word).encode() if channel.rank == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        tree = build("broadcast", "tree")
        broadcast(channel, length.view(torch.uint8), 0, tree)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if channel.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        broadcast(channel, data, 0, tree)
        return json.loads(bytes(data.tolist()))


def _class(tensor: Tensor) -> str:
    """Tensors of one class are taken for alike: the same dtype and kind of device, sizes between powers of two."""
    nbytes = tensor.numel() * tensor.element_size()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} on {tensor.device.type}, under {1 << nbytes.bit_length()} bytes"
