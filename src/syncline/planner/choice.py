"""`strategy="auto"`: measures a step and the network of a world, predicts the candidates, and takes the fastest.

```text
all ranks   network             its calibration, kept for the next run on the same hosts; a small all-reduce
            forward, backward   the time at which each gradient is ready
            optimizer           steps of a copy
            codecs              encoding and decoding of numbers like these gradients, all ranks at once
rank 0      predicts a step of every candidate, chooses, and sends the choice to the others
```

A candidate other than all-reduce changes the result of training. It is chosen only if its step is shorter by more than
the planner can tell apart (`search.INDISTINCT`).
"""

from __future__ import annotations

import copy
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec, build_codec
from syncline.errors import SpecError
from syncline.parallel.partition import LayerCost, ModelProfile
from syncline.parallel.profile import restoring_state
from syncline.planner.calibration import LAB, MEASURED
from syncline.planner.cluster import STEP_NOISE, Cluster, RankGroup
from syncline.planner.layer_costs import MeasuredCosts
from syncline.planner.limits import find_limit
from syncline.planner.measured_cluster import UNLIMITED, describe_network, measured_device
from syncline.planner.plans import OPTIMIZERS, TrainingPlan, read_strategy
from syncline.planner.prediction import PredictedStep, StepPredictor
from syncline.planner.quantities import format_duration
from syncline.planner.search import INDISTINCT
from syncline.reduction import check_same_in, codec_seconds
from syncline.strategies import AutoCandidate, AutoStrategy
from syncline.world import Group, allgather, allreduce, barrier, broadcast_object

__all__ = ["StrategyChoice", "choose_strategy", "measure_gradients"]

logger = logging.getLogger("syncline")

WARM_UP_STEPS = 2
MIN_STEPS, MAX_STEPS = 3, 15
"""Steps that are timed."""
TIMED_S = 1.0
"""Seconds that these steps take together, about."""
MIN_STEP_S = 1e-9
"""On the simulator a step may take no time."""
CALLS = 21
"""All-reduces of one number."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class StrategyChoice:
    """What was chosen, and why. `predicted` has the seconds of each candidate's step, none if they are not known."""

    strategy: str
    codec: str | None
    reason: str
    workers: int
    candidates: tuple[str, ...]
    step_s: float | None = None
    interval_s: tuple[float, float] | None = None
    parts_s: Mapping[str, float] | None = None
    predicted: Mapping[str, float] | None = None
    limit: str | None = None
    kept: bool = False
    """Whether it was made for an earlier run that this one continues."""

    def as_json(self) -> dict[str, Any]:
        """The choice for config.json."""
        found = {**vars(self), "candidates": list(self.candidates)}
        found["interval_s"] = None if self.interval_s is None else list(self.interval_s)
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StrategyChoice:
        """The inverse of `as_json`.

        Raises:
            SpecError: if it is no choice.
        """
        try:
            interval = found["interval_s"]
            names = [name for name in cls.__dataclass_fields__ if name not in ("candidates", "interval_s", "kept")]
            return cls(
                **{name: found[name] for name in names},
                candidates=tuple(found["candidates"]),
                interval_s=None if interval is None else (float(interval[0]), float(interval[1])),
                kept=bool(found.get("kept")),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SpecError(f"the earlier choice of auto cannot be read ({error!r})") from None


def choose_strategy(
    group: Group,
    model: nn.Module,
    auto: AutoStrategy,
    optimizers: Sequence[Optimizer],
    codec: Codec | None,
) -> StrategyChoice:
    """Choose for this model and the ranks of a group. All ranks call it, and get rank 0's choice.

    The model stays as it is.

    Raises:
        SpecError: if the profile is of another model, or `step` gives no gradient.
        IncompatibleError: if the ranks ask for different choices.
    """
    candidates = auto.candidates(None if codec is None else repr(codec))
    names = tuple(map(str, candidates))
    if group.size == 1:
        reason = f"{names[0]}: one worker exchanges nothing"
        return StrategyChoice("allreduce", candidates[0].codec, reason, 1, names)
    asked = {"strategy": repr(auto), "codec": repr(codec), "step to time": str(auto.step is not None)}
    check_same_in(group, "strategies", asked)
    kept = broadcast_object(_kept(auto, group.size, names) if group.rank == 0 else None, group=group)
    if kept is not None:
        return StrategyChoice.from_json(kept)
    profile = _profile(group, model, auto)
    if profile is None:
        reason = f"{names[0]}: nothing else is allowed, and the step time is not known"
        if len(candidates) > 1:
            reason = (
                f"{names[0]}: the step time is not known, so whether {' or '.join(names[1:])} would be faster "
                "is not known either; give step= or profile="
            )
        return StrategyChoice("allreduce", candidates[0].codec, reason, group.size, names)
    predictor = _predictor(group, model, profile, candidates, optimizers)
    found: dict[str, Any] | None = None
    if group.rank == 0:
        optimizer = _optimizer_name(optimizers[0])
        plans = [_plan(each, group.size, profile.batch_size, optimizer) for each in candidates]
        found = _fastest(predictor, candidates, plans).as_json()
    return StrategyChoice.from_json(broadcast_object(found, group=group))


def _kept(auto: AutoStrategy, workers: int, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The earlier choice, if it was made for the same candidates and as many workers, and with no less known."""
    if auto.earlier is None:
        return None
    try:
        earlier = StrategyChoice.from_json(auto.earlier)
    except SpecError as error:
        logger.warning("auto chooses again: %s", error)
        return None
    same = (earlier.workers, earlier.candidates) == (workers, names)
    knows_more = earlier.step_s is None and (auto.step is not None or auto.profile is not None)
    return replace(earlier, kept=True).as_json() if same and not knows_more else None


def _fastest(
    predictor: StepPredictor, candidates: Sequence[AutoCandidate], plans: Sequence[TrainingPlan]
) -> StrategyChoice:
    """The choice. The first candidate is all-reduce."""
    steps = [predictor.predict(plan) for plan in plans]
    usual = steps[0]
    place = min(range(len(steps)), key=lambda each: steps[each].seconds)
    if steps[place].seconds * (1 + INDISTINCT) > usual.seconds:
        place = 0
    best, names = steps[place], tuple(map(str, candidates))
    limit = find_limit(predictor, best)
    has_limit = limit.kind == "compute" or limit.gain > INDISTINCT
    return StrategyChoice(
        strategy=candidates[place].strategy,
        codec=candidates[place].codec,
        reason=f"{names[place]}: {_reason(names, steps, place)}" + (f"; {limit.sentence}" if has_limit else ""),
        workers=best.plan.ranks,
        candidates=names,
        step_s=best.seconds,
        interval_s=best.interval,
        parts_s=dict(best.parts),
        predicted={name: step.seconds for name, step in zip(names, steps, strict=True)},
        limit=limit.kind,
    )


def _reason(names: Sequence[str], steps: Sequence[PredictedStep], place: int) -> str:
    """Why the candidate at `place` was taken."""
    low, high = steps[place].interval
    head = f"a step of {format_duration(steps[place].seconds)} is predicted"
    head += f" ({format_duration(low)} to {format_duration(high)})"
    if len(steps) == 1:
        return f"{head}, and nothing else is allowed"
    rival = 0 if place else min(range(1, len(steps)), key=lambda each: steps[each].seconds)
    return f"{head}, and {format_duration(steps[rival].seconds)} with {names[rival]}"


def _plan(candidate: AutoCandidate, ranks: int, batch: int, optimizer: str) -> TrainingPlan:
    fields = read_strategy(candidate.strategy)
    return TrainingPlan(data=ranks, micro_batch=batch, codec=candidate.codec, optimizer=optimizer, **fields)


# What is measured.


def _profile(group: Group, model: nn.Module, auto: AutoStrategy) -> ModelProfile | None:
    """The times of a step on the slowest rank. None: they are not known."""
    if auto.profile is not None:
        from syncline.planner.profile import TrainingProfile

        measured = TrainingProfile.read(auto.profile)
        measured.check_model(model)
        return measured.layers
    if auto.step is None:
        return None

    def slowest(seconds: float) -> float:
        return float(allgather(torch.tensor([seconds], dtype=torch.float64), group=group).max())

    own = measure_gradients(model, auto.step, group.world.runtime.now, lambda: barrier(group=group), slowest)
    scale = slowest(own.seconds) / own.seconds
    layers = tuple(
        LayerCost(
            name=each.name,
            forward_s=scale * each.forward_s,
            backward_s=scale * each.backward_s,
            activation_bytes=each.activation_bytes,
            parameter_bytes=each.parameter_bytes,
        )
        for each in own.layers
    )
    return ModelProfile(layers=layers, batch_size=own.batch_size, model=own.model)


def measure_gradients(
    model: nn.Module,
    step: Callable[[], Any],
    now: Callable[[], float],
    begin_together: Callable[[], None] = lambda: None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
) -> ModelProfile:
    """Time `step`, which computes forward and backward. Each parameter becomes a layer.

    The backward of a layer ends when the gradient is ready. What `step` does before the first gradient and after the
    last one counts as forward. The model, its gradients and the random generators stay as they are.

    Several workers pass `begin_together`, a barrier, and `slowest`, the maximum over the workers. They begin each step
    together, as in training: where they share processors, one that has ended leaves its processor to the others.

    Raises:
        SpecError: if no parameter gets a gradient.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    gradients = {name: each.grad for name, each in trained.items()}
    ready: dict[str, float] = {}
    runs: list[tuple[float, dict[str, float]]] = []
    clock = _clock_of(model, now)

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: ready.__setitem__(name, now())

    hooks = [
        each.register_post_accumulate_grad_hook(note(name))  # type: ignore[no-untyped-call]
        for name, each in trained.items()
    ]
    try:
        with restoring_state(model), torch.enable_grad():
            model.train()
            count = WARM_UP_STEPS + MIN_STEPS
            while len(runs) < count:
                for each in trained.values():
                    each.grad = None
                ready.clear()
                begin_together()
                start = clock()
                step()
                runs.append((clock() - start, {name: at - start for name, at in ready.items()}))
                if len(runs) == WARM_UP_STEPS and (typical := slowest(runs[-1][0])) > 0:
                    count = WARM_UP_STEPS + max(MIN_STEPS, min(MAX_STEPS, int(TIMED_S / typical)))
    finally:
        for hook in hooks:
            hook.remove()
        for name, each in trained.items():
            each.grad = gradients[name]
    return _as_profile(type(model).__name__, trained, runs[WARM_UP_STEPS:])


def _as_profile(
    model: str, trained: Mapping[str, nn.Parameter], runs: Sequence[tuple[float, Mapping[str, float]]]
) -> ModelProfile:
    """Medians of the runs, as layers in the order of forward."""
    names = [name for name in trained if all(name in ready for _, ready in runs)]
    if not names:
        raise SpecError("auto: step() gave no parameter of the model a gradient; it must call backward() on a loss")
    seconds = max(MIN_STEP_S, statistics.median(each for each, _ in runs))
    ready = {name: min(seconds, statistics.median(each[name] for _, each in runs)) for name in names}
    order = sorted(names, key=lambda name: ready[name])
    first, last = ready[order[0]], ready[order[-1]]
    layers = []
    before = first
    for name in order:
        layers.append(
            LayerCost(
                name=name,
                forward_s=0.0 if name != order[-1] else seconds - (last - first),
                backward_s=ready[name] - before,
                activation_bytes=0.0,
                parameter_bytes=float(trained[name].nbytes),
            )
        )
        before = ready[name]
    return ModelProfile(layers=tuple(reversed(layers)), batch_size=1, model=model)


def _update_rate(optimizers: Sequence[Optimizer], nbytes: float, clock: Callable[[], float]) -> float:
    """Bytes per second of the optimizers' steps, if an update moves `nbytes`. Copies take the steps.

    Gradients are zeros: their values do not change how long a step takes. An optimizer that cannot be timed this way
    counts as taking no time: its `step` needs a closure or sparse gradients, or its class keeps more than a copy has.
    """
    seconds = []
    try:
        copies = copy.deepcopy(list(optimizers))
        for group in (group for each in copies for group in each.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        for _ in range(1 + MIN_STEPS):
            begin = clock()
            for each in copies:
                each.step()
            seconds.append(clock() - begin)
    except Exception as error:
        names = ", ".join(type(each).__name__ for each in optimizers)
        logger.warning("auto cannot time a step of %s, and counts no time for it: %s", names, error)
        return UNLIMITED
    least = statistics.median(seconds[1:])
    return nbytes / least if least > 0 else UNLIMITED


def _call_s(group: Group, device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of an all-reduce of one number: the median on the slowest rank."""
    number, seconds = torch.zeros(1, device=device), []
    for _ in range(CALLS):
        begin = clock()
        allreduce(number, "sum", group=group)
        seconds.append(clock() - begin)
    own = torch.tensor([statistics.median(seconds[1:])], dtype=torch.float64)
    return float(allgather(own, group=group).max())


def _predictor(
    group: Group,
    model: nn.Module,
    profile: ModelProfile,
    candidates: Sequence[AutoCandidate],
    optimizers: Sequence[Optimizer],
) -> StepPredictor:
    """Every rank measures; the result is used on rank 0."""
    world, network = group.world, group.auto.network()
    exact = world.transport.timing.virtual
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    nbytes = sum(each.nbytes for each in trained.values())
    update_bytes = OPTIMIZERS[_optimizer_name(optimizers[0])].update * nbytes / FLOAT_BYTES
    clock = _clock_of(model, world.runtime.now)
    device = measured_device(_update_rate(optimizers, update_bytes, clock))
    cluster = describe_network(
        network, group.size, len(set(world.hosts)), device, step_noise=0.0 if exact else STEP_NOISE
    )
    rates: dict[str, tuple[float, float]] = {}
    for each in candidates:
        if each.codec is not None and each.codec not in rates:
            codec = build_codec(each.codec)
            assert codec is not None
            sending, working = codec_seconds(group, codec, trained)
            rates[each.codec] = (sending / nbytes, working / nbytes)
    shared = len(set(world.hosts)) < group.size or "SYNCLINE_LAB" in world.environ
    factors = (1.0, 1.0) if exact else LAB.factors if shared else MEASURED.factors
    call_s = _call_s(group, next(iter(trained.values())).device, clock)
    return _MeasuredPredictor(MeasuredCosts(profile), cluster, rates, call_s, factors)


class _MeasuredPredictor(StepPredictor):
    """Predicts codecs by their measured seconds for each byte of gradients: of sending, and of their work.

    Every message takes as much longer than on the modelled network as an all-reduce of one number does: the work in
    Python, and waking up those that wait.
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        cluster: Cluster,
        rates: Mapping[str, tuple[float, float]],
        call_s: float,
        factors: tuple[float, float],
    ) -> None:
        super().__init__(costs, cluster, factors=factors)
        self._rates = rates
        group = cluster.group(cluster.size, stride=1)
        self._call_work_s = max(0.0, call_s - self.allreduce_s(group, FLOAT_BYTES, "native"))

    def _messages(
        self, plan: TrainingPlan, group: RankGroup
    ) -> tuple[Callable[[float], float], Callable[[float], float]]:
        if plan.codec is None or plan.strategy != "allreduce":
            message, codec_s = super()._messages(plan, group)
        else:
            sending, working = self._rates[plan.codec]
            message, codec_s = (lambda nbytes: sending * nbytes), (lambda nbytes: working * nbytes)
        return (lambda nbytes: self._call_work_s + message(nbytes)), codec_s


def _optimizer_name(optimizer: Optimizer) -> str:
    """The kind of optimizer whose state has as many bytes."""
    groups = optimizer.param_groups
    if any(group.get("betas") for group in groups):
        return "adam"
    return "momentum" if any(group.get("momentum") for group in groups) else "sgd"


def _clock_of(model: nn.Module, now: Callable[[], float]) -> Callable[[], float]:
    """The time when all that was started on the model's device is done."""
    device = next(iter(model.parameters())).device

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now()

    return clock
