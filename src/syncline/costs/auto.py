"""`algorithm="auto"`: chooses the fastest algorithm by prediction, then by measurement. The choice is final.

For each class of sizes (powers of two) the first call predicts which schedules may win. Rank 0 selects the candidates,
always with the engine's own algorithm. The next calls use them in turn; each is a normal call, so only the difference
in time is lost. After some calls the slow ones are dropped, and after the last stage the fastest is chosen::

    calls    a b c d │ a b c d │ a b c  a b c  a b c │ a c  a c  a c … │ a a a a a a a …
             warm-up │ 1 each  │ 5 each              │ 12, then 32     │ the choice
                               └ drop > 4 × best     └ > 1.4, 1.12 ×   └ the fastest

Ranks on one host share its processors, which the model does not know: there all schedules are candidates.

On a simulated network without jitter and faults every call takes the predicted time. There only candidates
within 10 % of the best prediction are measured, once each.

During measurements there is a barrier before and after a call. Its time is the minimum over the ranks: from the start
of the last rank to the end of the last rank. Small tensors are reduced several times, on copies, so that the barriers
count less.
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

from syncline.collectives import AUTO, NATIVE, Channel, Schedule, build, names
from syncline.collectives.channel import allreduce, barrier, broadcast
from syncline.costs.calibration import Calibration, calibrate, load_calibration, store_calibration
from syncline.costs.prediction import predict_on
from syncline.transports import Network, Op

__all__ = ["AUTO", "AlgorithmChoice", "AlgorithmTrial", "Auto"]

logger = logging.getLogger("syncline")

MAX_CANDIDATES = 5
MAX_PREDICTED_RATIO = 2.0
"""A schedule is a candidate if its prediction is at most this many times the best."""
EXACT_MAX_RATIO = 1.1
"""The same if every call takes the predicted time (`Timing.exact`)."""
TRIAL_STAGES = ((1, 4.0), (5, 1.4), (12, 1.12), (32, 1.0))
"""The stages of a trial: samples of each candidate, and the ratio to the best time above which one is dropped."""
EXACT_TRIAL_STAGES = ((1, 1.0),)
"""The stages of a trial where `Timing.exact` holds: one sample of each candidate decides."""
MAX_TRIAL_S = 60.0
"""If the remaining stages would take longer, the second stage decides."""
SMALL_TENSOR_BYTES = 1 << 17
SMALL_TENSOR_REPEATS = 3
"""Tensors of up to `SMALL_TENSOR_BYTES` are reduced this many more times in a measurement."""
PREFER_NATIVE_RATIO = 1.03
"""The engine's own is kept unless another is faster by this ratio: it needs no help from Python."""


@dataclass
class AlgorithmChoice:
    """The algorithm of one class of sizes, and why it was chosen."""

    algorithm: str
    reason: str
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


class AlgorithmTrial:
    """Candidates and their measured times."""

    def __init__(self, candidates: list[str], predicted: dict[str, float], exact: bool = False) -> None:
        self.candidates = candidates
        self.predicted = predicted
        self.stages = EXACT_TRIAL_STAGES if exact else TRIAL_STAGES
        self.warm_up = 0 if exact else 1
        """Calls of each candidate that do not count: the first creates connections and buffers."""
        self.times: dict[str, list[float]] = {name: [] for name in candidates}
        self.stage = 0
        self.turn = 0
        self.medians: dict[str, float] = {}
        self.prefer_native = PREFER_NATIVE_RATIO

    def next(self) -> str:
        """The candidate of the next call."""
        return self.candidates[self.turn % len(self.candidates)]

    def record(self, seconds: float) -> bool:
        """Record a time. Returns True if the stage is complete."""
        self.times[self.next()].append(seconds)
        self.turn += 1
        wanted = self.stages[self.stage][0] + self.warm_up
        return all(len(self.times[name]) >= wanted for name in self.candidates)

    def finish_stage(self, shared: Callable[[Tensor], Tensor]) -> str | None:
        """Drop slow candidates. Returns the winner after the last stage. `shared` takes the minimum over the ranks."""
        table = shared(
            torch.tensor([self.times[name][self.warm_up :] for name in self.candidates], dtype=torch.float64)
        )
        medians = {name: statistics.median(row) for name, row in zip(self.candidates, table.tolist(), strict=True)}
        best = min(medians.values())
        keep = self.stages[self.stage][1]
        self.stage += 1
        self.candidates = [name for name in self.candidates if medians[name] <= keep * best]
        self.turn = 0
        self.medians = medians
        going_on = sum(medians[name] for name in self.candidates) * self.stages[-1][0]
        in_time = self.stage < 2 or going_on <= MAX_TRIAL_S
        if len(self.candidates) > 1 and self.stage < len(self.stages) and in_time:
            return None
        if medians.get(NATIVE, float("inf")) <= self.prefer_native * best:
            return NATIVE
        return min(medians, key=lambda name: medians[name])

    def seconds_of_next_stage(self) -> float:
        """Estimated seconds of the next stage, by measurement or prediction."""
        known = self.medians or self.predicted
        others = sum(known.get(name, 0.0) for name in self.candidates)
        done = self.stages[self.stage - 1][0] if self.stage else -self.warm_up
        calls = self.stages[self.stage][0] - done
        return calls * others

    def best_guess(self) -> AlgorithmChoice:
        """The choice if there is no time for another stage."""
        known, reason = (self.medians, "measured, in little time") if self.medians else (self.predicted, "predicted")
        best = min(self.candidates, key=lambda name: known.get(name, float("inf")))
        own = known.get(NATIVE)
        keep = own is not None and NATIVE in self.candidates and own <= self.prefer_native * known[best]
        return AlgorithmChoice(NATIVE if keep else best, reason, self.predicted, self.medians)


class Auto:
    """The choices of one channel. Every rank makes the same calls, and so the same choices.

    `where` names the network in the cache of calibrations. Empty: it is measured each time.
    """

    def __init__(
        self,
        channel: Channel,
        where: str = "",
        record: Callable[..., Any] = lambda *_, **__: None,
    ) -> None:
        self.choices: dict[str, AlgorithmChoice] = {}
        """The choice of each class of sizes."""
        self._channel = channel
        self._where = where
        self._record = record
        self._trials: dict[str, AlgorithmTrial] = {}
        self._schedules: dict[str, Schedule] = {}
        self.known_network: Network | None = None
        """The network that predictions are made for; None: it is measured when it is first needed."""

    def network(self) -> Network:
        """The model of this network: the simulator's, cached, or measured now."""
        if self.known_network is None:
            self.known_network = self._channel.transport.timing.network or self.calibration().network()
        return self.known_network

    def calibration(self, fresh: bool = False) -> Calibration:
        """The calibration of this network, from the cache or, if `fresh` or unknown, measured now by all ranks."""
        known = None if fresh or self._channel.rank or not self._where else load_calibration(self._where)
        numbers = self._from_rank_0(None if known is None else known.numbers())
        if numbers is not None:
            return Calibration.of(numbers)
        logger.info("measuring the network of %d ranks, once", self._channel.size)
        found = calibrate(self._channel)
        if self._where and self._channel.rank == 0 and self._channel.size > 1:
            store_calibration(self._where, found)
        return found

    def allreduce(self, tensor: Tensor, op: Op) -> None:
        """Reduce in place by the best algorithm for this size that is known so far."""
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
        if trial.record(self._timed(trial.next(), tensor, op)):
            winner = trial.finish_stage(self._minimum)
            if winner is not None:
                self._settle(key, AlgorithmChoice(winner, "measured", trial.predicted, trial.medians))

    def settle(
        self, tensor: Tensor, op: Op, budget: float, prefer_native: float = PREFER_NATIVE_RATIO
    ) -> AlgorithmChoice:
        """Choose now for tensors like this one. Its values are overwritten. Every rank calls it.

        Candidates are measured for about `budget` seconds; then the prediction decides. The engine's own algorithm
        wins unless another is faster by the ratio `prefer_native`.
        """
        key = _class(tensor)
        if key not in self.choices and key not in self._trials:
            self._begin(key, tensor, op)
        spent = 0.0
        while key not in self.choices:
            trial = self._trials[key]
            trial.prefer_native = prefer_native
            cost = trial.seconds_of_next_stage()  # from shared times, so that all ranks decide alike
            if spent + cost > budget:
                self._settle(key, trial.best_guess())
                break
            spent += cost
            tensor.zero_()
            while not trial.record(self._timed(trial.next(), tensor, op)):
                tensor.zero_()
            winner = trial.finish_stage(self._minimum)
            if winner is not None:
                self._settle(key, AlgorithmChoice(winner, "measured", trial.predicted, trial.medians))
        self._channel.buffers.clear()  # those of dropped candidates are not needed again
        return self.choices[key]

    def decide(self, tensor: Tensor, algorithm: str, reason: str) -> None:
        """Use the caller's algorithm for tensors like this one. Every rank calls it."""
        self._settle(_class(tensor), AlgorithmChoice(algorithm, reason))

    def adopt(self, algorithms: Mapping[str, str]) -> None:
        """Use the choices of an earlier run, as {class of sizes: algorithm}: a resumed run rounds alike."""
        for key, algorithm in algorithms.items():
            if algorithm != NATIVE:
                build("allreduce", algorithm)
            self._trials.pop(key, None)
            self.choices[key] = AlgorithmChoice(algorithm, "adopted")

    def _timed(self, algorithm: str, tensor: Tensor, op: Op) -> float:
        now = self._channel.transport.runtime.now
        copies = [
            tensor.clone()
            for _ in range(SMALL_TENSOR_REPEATS if tensor.numel() * tensor.element_size() <= SMALL_TENSOR_BYTES else 0)
        ]
        barrier(self._channel)
        start = now()
        for each in (tensor, *copies):
            self._run(algorithm, each, op)
        barrier(self._channel)
        return (now() - start) / (1 + len(copies))

    def chosen(self, tensor: Tensor) -> AlgorithmChoice | None:
        """The final choice for tensors of this size. None: not decided yet."""
        return self.choices.get(_class(tensor))

    def _begin(self, key: str, tensor: Tensor, op: Op) -> None:
        """Rank 0 selects the candidates."""
        channel = self._channel
        native = channel.transport.native
        own = [NATIVE] if native.reduces(tensor.dtype, op) else []
        if channel.size == 1 or (own and tensor.is_cuda):
            self._settle(key, AlgorithmChoice(own[0] if own else "ring", "nothing else is worth a try here"))
            return
        network, nbytes = self.network(), tensor.numel() * tensor.element_size()
        known = network is channel.transport.timing.network
        exact = known and channel.transport.timing.exact
        plan = None
        if channel.rank == 0:
            predicted = {name: predict_on(channel, name, nbytes, network).seconds for name in names("allreduce")}
            ranked = sorted(predicted, key=lambda name: predicted[name])
            most = (EXACT_MAX_RATIO if exact else MAX_PREDICTED_RATIO) * predicted[ranked[0]]
            worth = [name for name in ranked if predicted[name] <= most][:MAX_CANDIDATES]
            alone = len(set(channel.hosts)) == channel.size or known
            predicted |= {name: predict_on(channel, name, nbytes, network).seconds for name in own}
            plan = [own + (worth if alone else ranked), predicted]
        candidates, predicted = self._from_rank_0(plan)
        if len(candidates) == 1:
            self._settle(key, AlgorithmChoice(candidates[0], "predicted", predicted))
        else:
            self._trials[key] = AlgorithmTrial(candidates, predicted, exact)

    def _settle(self, key: str, choice: AlgorithmChoice) -> None:
        """Make a choice final."""
        choice.algorithm = self._from_rank_0(choice.algorithm)
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

    def _minimum(self, times: Tensor) -> Tensor:
        allreduce(self._channel, times, "min", build("allreduce", "recursive_doubling"))
        return times

    def _from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank: decisions by measurement must not differ."""
        channel = self._channel
        if channel.size == 1:
            return value
        text = json.dumps(value).encode() if channel.rank == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        tree = build("broadcast", "tree")
        broadcast(channel, length.view(torch.uint8), 0, tree)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if channel.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        broadcast(channel, data, 0, tree)
        return json.loads(bytes(data.tolist()))


def _class(tensor: Tensor) -> str:
    """The class of a tensor: dtype, kind of device, and size between powers of two."""
    nbytes = tensor.numel() * tensor.element_size()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} on {tensor.device.type}, under {1 << nbytes.bit_length()} bytes"
