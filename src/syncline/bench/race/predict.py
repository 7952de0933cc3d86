"""Predictions of a race, made and written before its first run: the seconds of a step of every entry.

```text
computation   a profile of the workload on one thread here; on the simulator the given seconds of a sample
network       the rate of the lab or of the simulation; measured: machine.json of syncline bench machine
              │
              ├─ planner       allreduce and local without a codec: their formulas are exact
              └─ simulator     the other ones: some steps of the strategy itself, in virtual time
predictions.json ── its checksum is in the registry's first line, before the first run
```

Nothing in it comes from a run of the race, so it cannot be tuned afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from syncline.bench.race.entries import build_race_strategy, is_baseline
from syncline.bench.race.plan import PlannedRun, RaceEntry, RacePlan
from syncline.bench.race.predictions import EntryPrediction, RacePredictions
from syncline.collectives import names
from syncline.costs import predict
from syncline.errors import SpecError, SynclineError
from syncline.launch.lab import parse_lab
from syncline.launch.link_rate import parse_rate
from syncline.launch.machine import cores
from syncline.parallel.partition import LayerCost, ModelProfile
from syncline.planner.calibration import MEASURED
from syncline.planner.cluster import NETWORK_LATENCY_S, STEP_NOISE
from syncline.planner.layer_costs import MeasuredCosts
from syncline.planner.machine import MachineMeasurement
from syncline.planner.measured_cluster import UNLIMITED, describe_network, measured_device
from syncline.planner.plans import TrainingPlan, read_strategy
from syncline.planner.prediction import StepPredictor
from syncline.planner.profile import TrainingProfile, profile_training
from syncline.planner.quantities import format_duration
from syncline.planner.run_prediction import predict_run
from syncline.training.loop import train
from syncline.training.stragglers import FORWARD_SHARE
from syncline.transports import Network
from syncline.workloads.base import Workload
from syncline.world import simulate

__all__ = ["predict_race"]

PROFILE_REPEATS = 10
"""Steps for each measured time of the profile."""
EXACT_STRATEGIES = ("allreduce", "local")
"""Their formulas are exact, without a codec."""
MIN_SIMULATED_STEPS, MAX_SIMULATED_STEPS = 32, 64
"""Steps of a strategy without a formula: whole epochs if they are short."""
SIMULATION_FACTORS = (0.965, 1.01)
"""The interval of predictions on the simulator, whose network and computation are exact."""
SIMULATION_SOURCE = "residuals of 24 simulated runs of the default entries, on 100 Mbit/s and 1 Gbit/s"
INTERVAL_OF_RUNS = "of the planner's predictions of runs on measured machines"
NOT_MEASURED = (
    "the network between the workers is neither described nor measured: syncline bench machine writes machine.json, "
    "and --machine takes it"
)


def predict_race(
    plan: RacePlan, workload: Workload, *, machine: MachineMeasurement | None = None, network: Network | None = None
) -> RacePredictions:
    """Predict the step of every entry on every number of workers of the plan. Nothing of the race runs.

    Args:
        machine: what `syncline bench machine` measured with as many workers in the same place.
        network: of a simulated race.
    """
    source = _source(plan, workload, machine, network)
    runs = {(run.entry.name, run.workers): run for run in plan.runs()}
    order = {entry.name: place for place, entry in enumerate(plan.entries)}
    ordered = sorted(runs.values(), key=lambda run: (order[run.entry.name], run.workers))
    return RacePredictions(
        entries=tuple(source.predict(run) for run in ordered),
        inputs=source.inputs,
        batch_fixed_share=None if source.profile is None else _fixed_share(source.profile.layers),
    )


def _fixed_share(layers: ModelProfile) -> float:
    """The share of the computation that does not depend on the batch."""
    fixed = sum(layer.forward_fixed_s + layer.backward_fixed_s for layer in layers.layers)
    return fixed / layers.seconds if layers.seconds > 0 else 0.0


def _source(plan: RacePlan, workload: Workload, machine: MachineMeasurement | None, network: Network | None) -> _Source:
    if network is not None:
        return _Simulation(plan, workload, network)
    try:
        if machine is not None:
            return _Machine(plan, workload, machine)
        if plan.place.kind == "lab" and (shape := parse_rate(parse_lab(plan.place.detail)[1])) is not None:
            return _DescribedLab(plan, workload, shape.rate / 8)
    except Exception as error:  # of the workload's code, too: the race itself will report it
        return _Unknown(plan, workload, f"the workload cannot be profiled: {type(error).__name__}: {error}")
    return _Unknown(plan, workload, NOT_MEASURED)


class _CannotPredictError(Exception):
    """Why an entry has no prediction."""


class _NoFormulaError(_CannotPredictError):
    """The planner has no formula for the entry."""


class _Source(ABC):
    """Predicts entries from one kind of description."""

    inputs: Mapping[str, Any]
    profile: TrainingProfile | None = None

    def __init__(self, plan: RacePlan, workload: Workload) -> None:
        self.plan, self.workload = plan, workload

    def predict(self, run: PlannedRun) -> EntryPrediction:
        """The prediction of an entry, or the reason why there is none."""
        try:
            return self._predict(run)
        except (_CannotPredictError, SpecError) as error:
            return EntryPrediction(entry=run.entry.name, workers=run.workers, why=str(error))

    @abstractmethod
    def _predict(self, run: PlannedRun) -> EntryPrediction:
        """The same; `_CannotPredictError` or `SpecError` has the reason."""

    def training_plan(self, run: PlannedRun, network: Network) -> TrainingPlan:
        """The entry as a plan of the planner."""
        entry = run.entry
        strategy = self.strategy_of(entry)
        if entry.codec is not None:
            raise _NoFormulaError(f"the planner's formula for {entry.codec} is an approximation")
        try:
            fields = read_strategy(strategy)
            if fields["strategy"] not in EXACT_STRATEGIES:
                raise SpecError(f"{strategy} has no exact formula")
            collective = entry.collective if entry.collective != "auto" else self._fastest(run.workers, network)
            return TrainingPlan(
                data=run.workers,
                micro_batch=self.samples_of_rank(run),
                collective=collective,
                optimizer="sgd",
                **fields,
            )
        except SpecError as error:
            raise _NoFormulaError(f"the planner has no formula for it: {error}") from None

    def _fastest(self, workers: int, network: Network) -> str:
        """The schedule that `auto` takes for all gradients together."""
        nbytes = sum(each.nbytes for each in self.workload.model(0).parameters() if each.requires_grad)
        return min(names("allreduce"), key=lambda name: predict(name, workers, nbytes, network).seconds)

    @staticmethod
    def strategy_of(entry: RaceEntry) -> str:
        """The strategy whose messages the entry has."""
        if not is_baseline(entry.strategy):
            return entry.strategy
        if entry.strategy != "ddp":
            raise _CannotPredictError(f"the planner does not predict {entry.strategy}, which is another library's")
        return "allreduce"  # the same messages, in buckets of the same size

    def samples_of_rank(self, run: PlannedRun) -> int:
        """Samples of a worker in a step, on average: the last step of an epoch may be short."""
        settings = self.plan.settings(run)
        steps = settings.steps_per_epoch(self.workload, run.workers)
        return max(1, round(settings.samples_per_epoch(self.workload, run.workers) / steps / run.workers))

    @staticmethod
    def by_formula(
        run: PlannedRun, plan: TrainingPlan, predictor: StepPredictor, changes: Mapping[str, float]
    ) -> EntryPrediction:
        """The planner's prediction. `changes` are parts that are known better than the planner knows them."""
        try:
            found = predictor.predict(plan)
        except SynclineError as error:
            raise _CannotPredictError(str(error)) from None
        found = replace(found, parts={**found.parts, **changes})
        return EntryPrediction(
            entry=run.entry.name,
            workers=run.workers,
            step_s=found.seconds,
            interval_s=found.interval,
            parts_s=dict(found.parts),
        )

    def by_simulation(
        self,
        run: PlannedRun,
        network: Network,
        seconds_a_sample: float,
        factors: tuple[float, float],
        added_s: float = 0.0,
    ) -> EntryPrediction:
        """Some steps of the strategy itself on the simulator, and `added_s` of what takes no time there."""
        settings = self.plan.settings(run)
        steps = MIN_SIMULATED_STEPS
        per_epoch = settings.steps_per_epoch(self.workload, run.workers)
        if per_epoch <= MAX_SIMULATED_STEPS:
            steps = -(-steps // per_epoch) * per_epoch
        settings = replace(settings, steps=steps, epochs=None, target=None, evaluate_every=steps)
        try:
            results = simulate(
                lambda world: train(
                    self.workload,
                    settings,
                    world=world,
                    strategy=build_race_strategy(settings.strategy),
                    seconds_a_sample=seconds_a_sample,
                ),
                ranks=run.workers,
                network=network,
                seed=settings.seed,
            ).results
        except Exception as error:
            raise _CannotPredictError(f"simulated steps of it fail: {type(error).__name__}: {error}") from None
        seconds = results[0].seconds / max(1, results[0].steps) + added_s
        return EntryPrediction(
            entry=run.entry.name,
            workers=run.workers,
            step_s=seconds,
            interval_s=(factors[0] * seconds, factors[1] * seconds),
            made_by=f"{results[0].steps} simulated steps",
        )


class _Simulation(_Source):
    """A simulated race: network and computation are exactly what they are said to be."""

    def __init__(self, plan: RacePlan, workload: Workload, network: Network) -> None:
        super().__init__(plan, workload)
        self.network = network
        self.seconds_a_sample = plan.seconds_a_sample or 0.0
        self.inputs = {
            "computation": f"{self.seconds_a_sample:.4g} s a sample",
            "network": f"simulated: {plan.place.detail}",
            "interval": SIMULATION_SOURCE,
        }

    def _predict(self, run: PlannedRun) -> EntryPrediction:
        try:
            plan = self.training_plan(run, self.network)
            if not self.seconds_a_sample:
                raise _NoFormulaError("computation takes no time")
        except _NoFormulaError:
            return self.by_simulation(run, self.network, self.seconds_a_sample, SIMULATION_FACTORS)
        costs = MeasuredCosts(self._profile(plan.micro_batch))
        cluster = describe_network(self.network, run.workers, run.workers, measured_device(UNLIMITED), step_noise=0.0)
        predictor = StepPredictor(costs, cluster, factors=SIMULATION_FACTORS)
        return self.by_formula(run, plan, predictor, {"codec": 0.0, "optimizer": 0.0, "input": 0.0})

    def _profile(self, batch: int) -> ModelProfile:
        """A layer for each parameter, whose backward takes as long as a simulated worker's."""
        trained = [(name, each) for name, each in self.workload.model(0).named_parameters() if each.requires_grad]
        elements = sum(each.numel() for _, each in trained)
        whole = self.seconds_a_sample * batch
        layers = tuple(
            LayerCost(
                name=name,
                forward_s=FORWARD_SHARE * whole * each.numel() / elements,
                backward_s=(1 - FORWARD_SHARE) * whole * each.numel() / elements,
                activation_bytes=0.0,
                parameter_bytes=float(each.nbytes),
            )
            for name, each in trained
        )
        return ModelProfile(layers=layers, batch_size=batch)


class _Machine(_Source):
    """Real processes on a machine that was measured: its network, its codecs, and how its processors are shared."""

    def __init__(self, plan: RacePlan, workload: Workload, machine: MachineMeasurement) -> None:
        super().__init__(plan, workload)
        self.machine = machine
        self.measured = self.profile = _profile_on_one_thread(workload, plan.batch)
        network = machine.network
        self.inputs = {
            "computation": describe_computation(self.measured),
            "network": f"measured with {machine.workers} workers on {machine.hosts} hosts: "
            f"{8e-6 * network.bandwidth:.4g} Mbit/s, {format_duration(network.latency + network.per_message)} a "
            f"message; {len(machine.exchanges)} exchanges of gradients",
            "interval": INTERVAL_OF_RUNS,
        }

    def _predict(self, run: PlannedRun) -> EntryPrediction:
        entry = run.entry
        if entry.engine == "mpi":
            raise _CannotPredictError("MPI carries its messages, and MPI was not measured")
        found = predict_run(
            self.measured,
            self.machine,
            strategy=self.strategy_of(entry),
            codec=entry.codec,
            workers=run.workers,
            batch=self.samples_of_rank(run),
            reads_data=True,
        )
        return EntryPrediction(
            entry=entry.name,
            workers=run.workers,
            step_s=found.seconds,
            interval_s=found.interval,
            parts_s=dict(found.parts),
            made_by="planner",
        )


class _DescribedLab(_Source):
    """A lab of which only the rate is known. These predictions leave out the work of Python and thread wake-ups."""

    def __init__(self, plan: RacePlan, workload: Workload, bytes_per_s: float) -> None:
        super().__init__(plan, workload)
        self.network = Network(latency=NETWORK_LATENCY_S, bandwidth=bytes_per_s)
        self.cores = cores()
        self.measured = self.profile = _profile_on_one_thread(workload, plan.batch)
        self.inputs = {
            "computation": describe_computation(self.measured),
            "network": f"described: {plan.place.detail}. What Python and thread wake-ups cost is not known, and "
            "steps of small models may take twice as long: measure it with syncline bench machine, and give "
            "--machine machine.json",
            "interval": MEASURED.source,
        }

    def _predict(self, run: PlannedRun) -> EntryPrediction:
        entry = run.entry
        if entry.codec is not None:
            raise _CannotPredictError(
                f"{entry.codec} was not measured: syncline bench machine writes machine.json, and --machine takes it"
            )
        layers, scale = self.measured.layers, max(1.0, run.workers / self.cores)
        update_s = scale * self.measured.update_s
        input_s = scale * self.samples_of_rank(run) / self.measured.samples_per_s
        try:
            plan = self.training_plan(run, self.network)
        except _NoFormulaError:
            seconds_a_sample = scale * layers.seconds / layers.batch_size
            return self.by_simulation(run, self.network, seconds_a_sample, MEASURED.factors, update_s + input_s)
        cluster = describe_network(
            self.network, run.workers, run.workers, measured_device(UNLIMITED), step_noise=STEP_NOISE
        )
        predictor = StepPredictor(MeasuredCosts(layers), cluster, factors=MEASURED.factors, compute_scale=scale)
        return self.by_formula(run, plan, predictor, {"optimizer": update_s, "input": input_s})


class _Unknown(_Source):
    """Nothing is known about the network between the workers, or about the workload."""

    def __init__(self, plan: RacePlan, workload: Workload, why: str) -> None:
        super().__init__(plan, workload)
        self.why, self.inputs = why, {}

    def _predict(self, run: PlannedRun) -> EntryPrediction:
        raise _CannotPredictError(self.why)


def describe_computation(profile: TrainingProfile) -> str:
    """One line about a profile."""
    layers = profile.layers
    return (
        f"{format_duration(layers.seconds)} for {layers.batch_size} samples on one thread, "
        f"{format_duration(profile.update_s)} an update, {profile.samples_per_s:.4g} samples read a second"
    )


def _profile_on_one_thread(workload: Workload, batch: int) -> TrainingProfile:
    """The profile of a worker, which has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return profile_training(workload, batch=batch, repeats=PROFILE_REPEATS)
    finally:
        torch.set_num_threads(threads)
