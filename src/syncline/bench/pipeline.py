"""`syncline bench pipeline`: compares pipeline schedules with what was predicted for them. Each rank runs this module.

All contenders are in the same processes, with the same weights and batches, and take turns step by step as in
`bench/step.py`. Before, the ranks measure the network and profile the model. After the last turn the weights are
compared with those of one process.

The bubble of a step is measured by the formula of the prediction: largest cost and longest busy time of a worker, where
the cost lasts from the start of its first action to the end of its last one::

    worker 0   ├F0┤├F1┤············├B0┤├B1┤         busy: the sum of the actions
               ◄────────── cost ──────────►         bubble = (max. cost − max. busy) ÷ max. cost

Everything else is in the bubble: waiting, and the work for messages.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncline.bench.measuring import over_ranks, quiet_machine, ratios, summarize
from syncline.bench.pipeline_contenders import (
    DATA_PARALLEL,
    ONE_PROCESS,
    TORCH,
    DataParallel,
    OneProcess,
    PipelineContender,
    ScheduleContender,
    TorchContender,
    bench_model,
    loss_of,
    make_optimizer,
)
from syncline.bench.pipeline_plan import PipelinePlan
from syncline.bench.pipeline_prediction import (
    PipelineCosts,
    PipelinePrediction,
    measure_costs,
    predict_data_parallel,
    predict_one_process,
    predict_pipeline,
)
from syncline.bench.race.runner import parse_network
from syncline.bench.step import WARM_UP_STEPS, measure_link
from syncline.collectives.channel import barrier
from syncline.costs import calibrate
from syncline.parallel.partition import StagePartition, balanced, pipedream_for_network
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import PipelineSchedule, build_schedule
from syncline.transports import Network
from syncline.world import World, broadcast_object, init, simulate

__all__ = ["measure", "measure_simulated"]

SIMULATED_WARM_UP = 1
"""The first simulated step has other messages, because the ranks do not know their lengths."""


def measure(plan: PipelinePlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    lab = os.environ.get("SYNCLINE_LAB", "")
    with init(transport="torch_dist") as world, quiet_machine(), ExitStack() as stack:
        if plan.against:
            from syncline.bench.baselines import process_group

            stack.enter_context(process_group(world))
        link = measure_link(world, lab)
        document = _Comparison(world, plan, None).run()
        if world.rank == 0:
            about = {"hosts": list(world.hosts), "lab": lab, "link": link}
            Path(plan.out).write_text(json.dumps({**document, **about}, indent=1))


def measure_simulated(plan: PipelinePlan, workers: int) -> dict[str, Any]:
    """Profile the model in this process, then run the benchmark on simulated ranks. Returns the document."""
    with quiet_machine():
        costs = _profile(plan, workers)
        simulation = simulate(
            lambda world: _Comparison(world, plan, costs).run(), workers, parse_network(plan.simulate)
        )
    document: dict[str, Any] = {**simulation.results[0], "hosts": [], "lab": "", "link": None}
    Path(plan.out).write_text(json.dumps(document, indent=1))
    return document


def _profile(plan: PipelinePlan, workers: int) -> PipelineCosts:
    model, batch = _first_model(plan), _batch(plan, 0)
    built = [build_schedule(spec) for spec in plan.schedules]
    shares = [plan.replicas_for(schedule, workers) or (1,) for schedule in built]
    counts = [schedule.microbatches or plan.microbatches for schedule in built]
    micro_batch = max(1, plan.batch // (shares[0][0] * counts[0]))
    return measure_costs(
        model,
        batch,
        loss_of,
        make_optimizer,
        micro_batch=micro_batch,
        share=plan.batch // workers,
        splits=any(schedule.splits_backward for schedule in built),
    )


def _first_model(plan: PipelinePlan) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return bench_model(plan.model, plan.width, plan.layers, plan.batch).model()


def _batch(plan: PipelinePlan, turn: int) -> tuple[Tensor, Tensor]:
    draw = bench_model(plan.model, plan.width, plan.layers, plan.batch).batch
    return draw(torch.Generator().manual_seed(turn))


@dataclass
class _PipelineRecord:
    """A schedule, where it runs, and what was measured of it on this rank."""

    placement: PipelinePlacement
    partition: StagePartition
    micro_batches: int
    prediction: PipelinePrediction
    costs_s: list[float] = field(default_factory=list)
    """For each turn, the seconds from the start of the first action to the end of the last one."""
    busy_s: list[float] = field(default_factory=list)
    spans: list[list[tuple[str, float, float]]] = field(default_factory=list)
    """For each turn, the actions with their start and end. Zero is when the step began on this rank."""
    start_times_s: list[float] = field(default_factory=list)
    """For each turn, the time of the step's beginning on this rank's clock."""


class _Comparison:
    """All contenders, and their times."""

    def __init__(self, world: World, plan: PipelinePlan, costs: PipelineCosts | None) -> None:
        """`costs` are those of a simulation. None: they are measured."""
        self.world, self.plan = world, plan
        self.simulated = costs is not None
        self.signals = world.group()
        self.network = self._measure_network()
        self.costs = self._measure_costs() if costs is None else costs
        self.first = _first_model(plan)
        self.records = {spec: self._record(build_schedule(spec)) for spec in plan.schedules}
        self.contenders = {name: self._contender(name) for name in plan.contenders}
        self.times: dict[str, list[float]] = {name: [] for name in self.contenders}

    def run(self) -> dict[str, Any]:
        """Measure; return the document."""
        plan = self.plan
        warm_up = SIMULATED_WARM_UP if self.simulated else WARM_UP_STEPS
        for number in range(warm_up):
            self._run_turn(number)
        self._discard_warm_up()
        before = {name: each.sent_bytes for name, each in self.contenders.items()}
        turns = plan.repeats * plan.turns
        for number in range(turns):
            self._run_turn(warm_up + number)
            if (number + 1) % plan.turns == 0:
                self._report(f"repeat {(number + 1) // plan.turns} of {plan.repeats}")
        channel = self.signals.channel
        self.times = {name: over_ranks(channel, own, "max") for name, own in self.times.items()}
        sent = {name: (each.sent_bytes - before[name]) / turns for name, each in self.contenders.items()}
        rows = [self._row(name, self._gather_values(sent[name])) for name in self.contenders]
        for row, difference in zip(rows, self._differences(), strict=True):
            row["difference"] = difference
        return {
            "kind": "pipeline",
            "ranks": self.world.size,
            "simulated": plan.simulate,
            "plan": asdict(plan),
            "about": bench_model(plan.model, plan.width, plan.layers, plan.batch).about,
            "network": _describe_network(self.network),
            "costs": asdict(self.costs),
            "results": rows,
        }

    def _report(self, text: str) -> None:
        if self.world.rank == 0 and not self.simulated:
            print(text, file=sys.stderr, flush=True)

    # Before the first step.

    def _measure_network(self) -> Network:
        known = self.world.transport.timing.network
        return known or calibrate(self.world.everyone.channel).network()

    def _measure_costs(self) -> PipelineCosts:
        self._report("profiling the model")
        barrier(self.signals.channel)
        own = asdict(_profile(self.plan, self.world.size))
        return PipelineCosts.mean(self._gather_values(own))

    def _gather_values(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        return [broadcast_object(value, rank, group=self.signals) for rank in range(self.world.size)]

    def _record(self, schedule: PipelineSchedule) -> _PipelineRecord:
        partition = self._partition(schedule)
        placement = PipelinePlacement(schedule, _rank_replicas(partition, schedule))
        count = schedule.microbatches or self.plan.microbatches
        prediction = predict_pipeline(self.costs, placement, partition, count, self.network)
        return _PipelineRecord(placement, partition, count, prediction)

    def _partition(self, schedule: PipelineSchedule) -> StagePartition:
        """Where the model is cut: the same for all schedules with as many stages."""
        profile, workers = self.costs.profile, self.world.size
        replicas = self.plan.replicas_for(schedule, workers)
        if replicas is None:
            return pipedream_for_network(profile, workers, self.network, overlap=False)
        stages = len(replicas) * schedule.stages_per_rank
        cuts = self.plan.cut_names or (balanced(profile, stages).cuts if stages > 1 else ())
        return StagePartition(tuple(cuts), replicas * schedule.stages_per_rank)

    def _contender(self, name: str) -> PipelineContender:
        model = copy.deepcopy(self.first)
        if name == ONE_PROCESS:
            alone = OneProcess(name, self.world, model)
            if self.simulated:
                alone.charge(self.costs.profile.at_batch(self.plan.batch), self.costs.update_s)
            return alone
        if name == DATA_PARALLEL:
            parallel = DataParallel(name, self.world, model)
            if self.simulated:
                share = self.plan.batch // self.world.size
                parallel.charge(self.costs.profile.at_batch(share), self.costs.update_s)
            return parallel
        if name == TORCH:
            partition = self._partition(build_schedule("1f1b"))
            return TorchContender(name, self.world, model, partition, self.plan.microbatches)
        record = self.records[name]
        own = ScheduleContender(name, self.world, model, record.placement, record.partition, record.micro_batches)
        if self.simulated:
            own.charge(record.prediction)
        return own

    # Steps.

    def _run_turn(self, number: int) -> None:
        """One step of every contender."""
        batch, now = _batch(self.plan, number), self.world.runtime.now
        for name in sorted(self.contenders, key=lambda name: random.Random(f"{number} {name}").random()):
            contender = self.contenders[name]
            barrier(self.signals.channel)
            start = now()
            contender.step(batch)
            self.times[name].append(now() - start)
            if isinstance(contender, ScheduleContender):
                self._note_spans(self.records[name], contender, start)

    def _note_spans(self, record: _PipelineRecord, contender: ScheduleContender, start: float) -> None:
        spans = [span for span in contender.take_spans() if span.action.kind in "FBIW"]
        record.start_times_s.append(start)
        record.costs_s.append(spans[-1].end - spans[0].start if spans else 0.0)
        record.busy_s.append(sum(span.end - span.start for span in spans))
        every = contender.take_spans()
        record.spans.append([(str(span.action), span.start - start, span.end - start) for span in every])

    def _discard_warm_up(self) -> None:
        """Discard all measurements so far: they were the warm-up."""
        for own in self.times.values():
            own.clear()
        for record in self.records.values():
            for kept in (record.costs_s, record.busy_s, record.spans, record.start_times_s):
                kept.clear()

    # Afterwards.

    def _row(self, name: str, sent: list[float]) -> dict[str, Any]:
        own, alone = self.times[name], self.times[ONE_PROCESS]
        row = {
            "contender": name,
            "seconds": own,
            "time": asdict(summarize(own)),
            "speedup": asdict(ratios(alone, own)),
            "to_torch": asdict(ratios(own, self.times[TORCH])) if TORCH in self.times else None,
            "sent_bytes": None if name == TORCH else sent,
            "predicted_s": self._predict(name),
        }
        return {**row, "pipeline": self._pipeline_row(name) if name in self.records else None}

    def _predict(self, name: str) -> float | None:
        """The predicted seconds of a step; None for what has no prediction."""
        if name in self.records:
            return self.records[name].prediction.step_s
        if name == ONE_PROCESS:
            return predict_one_process(self.costs, self.plan.batch)
        if name == DATA_PARALLEL:
            workers = self.world.size
            return predict_data_parallel(self.costs, workers, self.plan.batch // workers, self.network)
        return None

    def _pipeline_row(self, name: str) -> dict[str, Any]:
        record, contender, channel = self.records[name], self.contenders[name], self.signals.channel
        assert isinstance(contender, ScheduleContender)
        costs, busy = (over_ranks(channel, own, "max") for own in (record.costs_s, record.busy_s))
        bubbles = [(one - other) / one for one, other in zip(costs, busy, strict=True)]
        prediction, times = record.prediction, self.times[name]
        middle = sorted(range(len(times)), key=times.__getitem__)[len(times) // 2]
        return {
            "cuts": list(record.partition.cuts),
            "replicas": list(record.placement.replicas),
            "micro_batches": record.micro_batches,
            "predicted": {
                "step_s": prediction.step_s,
                "pipeline_s": prediction.pipeline_s,
                "bubble": prediction.bubble,
                "peak_activations": list(prediction.peak_activations),
                "stages": [asdict(stage) for stage in prediction.stages],
                "actions": [[each.rank, str(each.action), each.start_s, each.end_s] for each in prediction.actions],
            },
            "bubbles": bubbles,
            "bubble": asdict(summarize(bubbles)),
            "peak_activations": self._gather_values(contender.run.peak_activations),
            "actions": self._actions(record, middle),
        }

    def _actions(self, record: _PipelineRecord, turn: int) -> list[list[Any]]:
        """The actions of all ranks in a turn. On one machine all ranks have one clock, else the barrier is zero."""
        one_clock = self.simulated or len(set(self.world.hosts)) == 1 or bool(os.environ.get("SYNCLINE_LAB"))
        began = self._gather_values(record.start_times_s[turn])
        spans = self._gather_values([list(span) for span in record.spans[turn]])
        shift = [each - min(began) if one_clock else 0.0 for each in began]
        return [
            [rank, action, start + shift[rank], end + shift[rank]]
            for rank, own in enumerate(spans)
            for action, start, end in own
        ]

    def _differences(self) -> list[float | None]:
        """The distance of each contender's weights from those of one process, relative to how far they have moved.

        None for a schedule that computes something else: it updates the weights after each micro-batch.
        """
        for contender in self.contenders.values():
            contender.close()
        alone, start = (list(each.parameters()) for each in (self.contenders[ONE_PROCESS].model, self.first))
        way = _distance(alone, start) or 1.0
        found: list[float | None] = []
        for name, contender in self.contenders.items():
            same = name not in self.records or self.records[name].placement.schedule.flushes
            found.append(_distance(list(contender.model.parameters()), alone) / way if same else None)
        self.signals.close()
        return found


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return math.sqrt(sum(float((a.detach() - b.detach()).double().square().sum()) for a, b in pairs))


def _rank_replicas(partition: StagePartition, schedule: PipelineSchedule) -> tuple[int, ...]:
    return partition.replicas[: partition.stages // schedule.stages_per_rank]


def _describe_network(network: Network) -> dict[str, float]:
    return {name: getattr(network, name) for name in ("latency", "bandwidth", "per_message")}


if __name__ == "__main__":
    measure(PipelinePlan(**json.loads(sys.argv[1])))
