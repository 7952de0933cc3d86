"""Answers `syncline plan`: ranks the plans, says what limits the best one, and names what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import SpecError
from syncline.planner.calibration import DESCRIBED, LAB, DeviceCalibration, calibration_for
from syncline.planner.cluster import Cluster, read_cluster
from syncline.planner.layer_costs import DescribedCosts, MeasuredCosts, ModelCosts
from syncline.planner.limits import Limit, codec_sentence, find_limits
from syncline.planner.machine import MachineMeasurement
from syncline.planner.models import ModelWork, build_model
from syncline.planner.plans import TrainingPlan
from syncline.planner.prediction import PredictedStep, StepPredictor
from syncline.planner.quantities import format_duration, format_size
from syncline.planner.search import USABLE_MEMORY, PlanSearch, RankedPlans, SearchSettings
from syncline.planner.target import EpochCurve

if TYPE_CHECKING:
    from syncline.parallel.partition import ModelProfile

__all__ = ["PlanAnswer", "PlanRequest", "answer_request", "format_answer"]

DEFAULT_SAMPLES_PER_RANK = 8
MAX_PIPEDREAM_WORKERS = 64
"""PipeDream's partitioner takes long for more."""
PRECISION_REFUSAL = "a profile was measured in one precision: leave out --precision"
FILE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked. Either `model` or `profile` is given."""

    cluster: str | None = None
    model: str | None = None
    profile: Path | None = None
    machine: Path | None = None
    """A measurement by `syncline bench machine`, in the place of `cluster`. It needs `profile`."""
    batch: int | None = None
    optimizer: str | None = None
    precision: str | None = None
    strategies: tuple[str, ...] = ("allreduce",)
    codecs: tuple[str, ...] = ()
    curve: EpochCurve | None = None
    samples: int | None = None


@dataclass(frozen=True)
class PlanAnswer:
    """The ranked plans, the limit of the best one, and notes."""

    request: PlanRequest
    predictor: StepPredictor
    settings: SearchSettings
    ranked: RankedPlans
    limits: tuple[Limit, ...]
    """Of the best plan, the largest first."""
    remarks: tuple[str, ...]
    """One sentence for each codec, and one about PipeDream for a measured profile."""
    notes: tuple[str, ...]
    calibration: DeviceCalibration
    batch: int

    @property
    def limit(self) -> Limit:
        """What limits the best plan most."""
        return self.limits[0]

    def to_target(self, prediction: PredictedStep) -> tuple[float, float | None] | None:
        """Seconds to the target, and its price if one is given."""
        curve, samples = self.request.curve, self.request.samples
        if curve is None or samples is None:
            return None
        seconds = curve.steps(prediction.plan.batch, samples) * prediction.seconds
        price = self.predictor.cluster.device.price_per_hour
        return seconds, None if price is None else seconds / 3600 * price * prediction.plan.ranks

    def as_json(self) -> dict[str, Any]:
        """The answer for a file."""
        return {
            "format": "answer of the planner",
            "version": FILE_VERSION,
            "model": self.predictor.costs.text,
            "cluster": self.predictor.cluster.describe(),
            "batch": self.batch,
            "calibration": self.calibration.source,
            "limit": {"kind": self.limit.kind, "share": self.limit.share, "sentence": self.limit.sentence},
            "remarks": list(self.remarks),
            "notes": list(self.notes),
            "tried": self.ranked.tried,
            "do_not_fit": self.ranked.refused,
            "not_predicted": self.ranked.unpredicted,
            "plans": [self._plan_json(each) for each in self.ranked.plans],
        }

    def _plan_json(self, prediction: PredictedStep) -> dict[str, Any]:
        target = self.to_target(prediction)
        found: dict[str, Any] = {
            "plan": str(prediction.plan),
            "step_s": prediction.seconds,
            "interval_s": list(prediction.interval),
            "parts_s": dict(prediction.parts),
            "memory_bytes": prediction.memory.total,
            "memory_by_kind": dict(prediction.memory.by_kind()),
            "efficiency": prediction.efficiency,
        }
        if target is not None:
            found["target_s"], found["target_price"] = target
        return found


def answer_request(request: PlanRequest) -> PlanAnswer:
    """Search the plans and explain the best one.

    Raises:
        SpecError: for a model, cluster or batch that cannot be planned, or if no plan fits.
    """
    if (request.model is None) == (request.profile is None):
        raise SpecError("give a profile, or --model with a description: one of them")
    if (request.curve is None) != (request.samples is None):
        raise SpecError("the time to a target needs both: --epochs, the curve, and --samples, the samples of an epoch")
    if (request.cluster is None) == (request.machine is None):
        raise SpecError("give --cluster with a description, or --machine with a measurement: one of them")
    predictor, model, calibration = _predictor(request)
    costs, cluster = predictor.costs, predictor.cluster
    batch = request.batch if request.batch is not None else DEFAULT_SAMPLES_PER_RANK * cluster.size
    half = model is not None and model.precision == "half"
    optimizer = request.optimizer or predictor.optimizer or ("adam-mixed" if half else "momentum")
    settings = SearchSettings(
        batch=batch,
        optimizer=optimizer,
        strategies=request.strategies,
        codecs=request.codecs,
        base=TrainingPlan(sequence=False),
    )
    ranked = PlanSearch(predictor, settings).run()
    notes = _notes(request, cluster, ranked, model, optimizer, batch)
    remarks = [codec_sentence(predictor, ranked.best, codec) for codec in request.codecs]
    if isinstance(costs, MeasuredCosts) and 1 < cluster.size <= MAX_PIPEDREAM_WORKERS:
        remarks.append(pipedream_sentence(costs.profile, cluster))
    limits = find_limits(predictor, ranked.best)
    return PlanAnswer(request, predictor, settings, ranked, limits, tuple(remarks), tuple(notes), calibration, batch)


def pipedream_sentence(profile: ModelProfile, cluster: Cluster) -> str:
    """What PipeDream's partitioner would choose on this cluster, by the formula of its code and by that of the paper.

    PipeDream never empties the pipeline: stages have their own numbers of workers, and weights are some steps old.
    """
    from syncline.parallel.partition import pipedream

    levels = [level for level in cluster.levels if level.members > 1]
    found = []
    for overlap, form in ((False, "all-reduce after the backward"), (True, "all-reduce during the backward")):
        try:
            partition = pipedream(
                profile,
                [level.members for level in levels],
                [level.bandwidth * level.efficiency for level in levels],
                overlap=overlap,
                memory_bytes=USABLE_MEMORY * cluster.device.memory_bytes,
            )
        except SpecError:
            found.append(f"nothing that fits the memory ({form})")
            continue
        assert partition.prediction is not None
        rate = profile.batch_size / partition.prediction.time_s
        stages = "-".join(map(str, partition.replicas))
        cuts = f", cut before {', '.join(partition.cuts)}" if partition.cuts else ", data parallelism"
        found.append(f"{stages}{cuts}: {rate:.4g} samples/s ({form})")
    return f"pipedream's partitioner, with mini-batches of {profile.batch_size}, chooses {'; or '.join(found)}"


def _predictor(request: PlanRequest) -> tuple[StepPredictor, ModelWork | None, DeviceCalibration]:
    """The predictor of the question, the described model if there is one, and where the interval is from."""
    if request.cluster is None:
        from syncline.planner.machine_prediction import MachinePredictor
        from syncline.planner.profile import TrainingProfile

        if request.profile is None or request.machine is None:
            raise SpecError(
                "--machine needs a profile that was measured there: syncline profile, then "
                "syncline plan profile.json --machine machine.json"
            )
        if request.precision is not None:
            raise SpecError(PRECISION_REFUSAL)
        machine = MachineMeasurement.read(request.machine)
        return MachinePredictor(TrainingProfile.read(request.profile), machine, factors=LAB.factors), None, LAB
    cluster = read_cluster(request.cluster)
    costs, model = _costs(request, cluster)
    calibration = calibration_for(cluster, None if model is None else model.transformer is not None)
    if model is not None:
        cluster = calibration.apply(cluster)
        costs = DescribedCosts(model, cluster.device)
    return StepPredictor(costs, cluster, factors=calibration.factors), model, calibration


def _costs(request: PlanRequest, cluster: Cluster) -> tuple[ModelCosts, ModelWork | None]:
    if request.model is not None:
        model = build_model(request.model)
        if request.precision is not None:
            model = model.at_precision("half" if request.precision == "half" else "single")
        return DescribedCosts(model, cluster.device), model
    from syncline.parallel.partition import ModelProfile

    assert request.profile is not None
    if request.precision is not None:
        raise SpecError(PRECISION_REFUSAL)
    return MeasuredCosts(ModelProfile.read(request.profile)), None


def _notes(
    request: PlanRequest,
    cluster: Cluster,
    ranked: RankedPlans,
    model: ModelWork | None,
    optimizer: str,
    batch: int,
) -> list[str]:
    """What was assumed, and what is not known, with what it would change."""
    notes = []
    if request.batch is None:
        notes.append(f"batch {batch}: {DEFAULT_SAMPLES_PER_RANK} samples a rank; --batch chooses another")
    if request.optimizer is None and request.machine is None:
        notes.append(f"optimizer {optimizer}; --optimizer chooses another: it changes the memory")
    if cluster.storage_bytes_per_s is None and request.machine is None:
        size = model.sample_bytes if model is not None else 0.0
        need = (
            f": {format_size(batch / cluster.hosts * size / ranked.best.seconds)}/s a host are needed" if size else ""
        )
        notes.append(f"storage is not described, so the input is not counted{need}")
    if request.machine is not None:
        notes.append(
            "the profile must have been measured on a machine like the measured one; each worker reads its data in the "
            "process that trains, so that reading takes time of the step"
        )
    elif model is None:
        notes.append(
            "the profile's times count as they are: they must have been measured on this cluster's device; tensor "
            "teams are not planned, because a profile does not say how they divide its layers"
        )
    if request.codecs and request.machine is None:
        notes.append(
            "the speed of codecs is estimated from passes over memory: measure it with syncline bench codecs; it "
            "changes whether compression pays"
        )
    if request.curve is not None and not request.curve.inside(batch):
        notes.append(
            f"batch {batch} lies outside the curve's batch sizes, {request.curve.smallest:g} to "
            f"{request.curve.largest:g}: its epochs are extrapolated"
        )
    if request.curve is not None and cluster.device.price_per_hour is None and request.machine is None:
        notes.append("no price is given, so there is no cost: add '$2.5 an hour' to the cluster")
    return notes


def format_answer(answer: PlanAnswer, top: int) -> str:
    """The table and the sentences.

    Several lines of text for a terminal.
    """
    predictor, ranked = answer.predictor, answer.ranked
    head = f"{predictor.costs.text} on {predictor.cluster.describe()}, batch {answer.batch}"
    rows = [["plan", "step", "80 % interval", "memory", "efficiency"]]
    best = ranked.best
    target = answer.to_target(best) is not None
    if target:
        rows[0] += ["to target", "cost"]
    for each in ranked.plans[:top]:
        low, high = each.interval
        row = [
            str(each.plan),
            format_duration(each.seconds),
            f"{format_duration(low)} – {format_duration(high)}",
            format_size(each.memory.total),
            f"{each.efficiency:.0%}",
        ]
        if (reached := answer.to_target(each)) is not None:
            row += [format_duration(reached[0]), "–" if reached[1] is None else f"${reached[1]:,.0f}"]
        rows.append(row)
    lines = [head, "", *_aligned(rows), ""]
    fit = f"; {ranked.refused} do not fit the memory" if ranked.refused else ""
    if ranked.unpredicted:
        fit += f"; {ranked.unpredicted} have chunks that are shorter than their transfers, and no formula"
    lines += [f"{len(ranked.plans)} of {ranked.tried} plans are ranked{fit}", ""]
    lines += [f"limit: {answer.limit.sentence}", f"memory of a rank: {best.memory}"]
    lines += [f"step: {_parts(best)}", *answer.remarks, f"interval: {answer.calibration.source}"]
    if answer.calibration is DESCRIBED:
        lines[-1] += "; measure one step to narrow it"
    return "\n".join([*lines, *(f"note: {note}" for note in answer.notes)])


def _parts(prediction: PredictedStep) -> str:
    known = sorted((part for part in prediction.parts.items() if part[1] > 0), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in known)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
