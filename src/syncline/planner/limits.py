"""Says in one sentence what limits a plan, what would have to change, and what the change would gain.

Each candidate remedy is predicted as a changed plan or a changed cluster. The limit is the kind whose share of the step
is the largest avoidable one:

| limit | its seconds | remedy |
|---|---|---|
| communication | reduction, tensor, transfer | a network of twice the bandwidth, a codec |
| skinny matrix products | compute · (1 − reached ÷ possible share of the peak) | four times the batch |
| input | input | storage that delivers enough |
| bubble | bubble | twice the micro-batches |
| memory | the time of recomputation | memory without recomputation |
| straggler | waiting | ranks of equal speed |
| server | reduction, with parameter servers | twice the servers |
| optimizer | optimizer | a smaller state |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster
from syncline.planner.plans import SERVED, TrainingPlan
from syncline.planner.prediction import PredictedStep, StepPredictor
from syncline.planner.quantities import format_duration, format_size

__all__ = [
    "MIN_SHARE",
    "Limit",
    "bubble_cause",
    "codec_sentence",
    "communication_cause",
    "compute_limit",
    "find_limit",
    "find_limits",
    "input_cause",
    "limit_of",
    "optimizer_cause",
    "server_cause",
    "skinny_cause",
    "straggler_cause",
]

SKINNY_SHARE = 0.6
"""Matrix products below this share of what large ones reach are called skinny."""
MIN_SHARE = 0.05
"""Kinds below this share of the step limit nothing."""
BATCH_FACTOR = 4


@dataclass(frozen=True)
class Limit:
    """What limits a plan. `sentence` names the remedy; `gain` is the share of the step that it would save."""

    kind: str
    share: float
    gain: float
    sentence: str


def find_limit(predictor: StepPredictor, prediction: PredictedStep) -> Limit:
    """The largest limit of a plan."""
    return find_limits(predictor, prediction)[0]


def find_limits(predictor: StepPredictor, prediction: PredictedStep) -> tuple[Limit, ...]:
    """The limits of a plan, the largest first. If there is none, the computation."""
    costs = limit_seconds(predictor, prediction)
    kinds = [kind for kind, seconds in costs.items() if seconds >= MIN_SHARE * prediction.seconds]
    if not kinds:
        busy = prediction.parts["compute"] / prediction.seconds
        return (compute_limit(busy, predictor.cluster.device.name),)
    found = []
    for kind in sorted(kinds, key=lambda each: -costs[each]):
        remedy, faster = _remedy(predictor, prediction, kind)
        cause = _described(predictor, prediction, kind)
        found.append(limit_of(kind, cause, costs[kind], prediction.seconds, remedy, faster))
    return tuple(found)


def compute_limit(busy: float, device: str) -> Limit:
    """The limit of a step in which nothing else takes a notable share. `busy` is the share of the computation."""
    sentence = (
        f"the computation itself limits it: {busy:.0%} of the step; only faster devices than {device}, or more of "
        "them, would help"
    )
    return Limit("compute", busy, 0.0, sentence)


def limit_of(kind: str, cause: str, cost_s: float, step_s: float, remedy: str, remedied_s: float) -> Limit:
    """A limit that costs `cost_s` of a step, and the sentence about it. With the remedy the step takes `remedied_s`.

    >>> limit_of("input", "the input limits it: too slow", 0.02, 0.1, "twice as many readers", 0.09).sentence
    'the input limits it: too slow: 20 ms of 100 ms a step (20%); with twice as many readers the step would be 10 ms \
(10%) shorter'
    """
    saved = max(0.0, step_s - remedied_s)
    sentence = (
        f"{cause}: {format_duration(cost_s)} of {format_duration(step_s)} a step ({cost_s / step_s:.0%}); with "
        f"{remedy} the step would be {format_duration(saved)} ({saved / step_s:.0%}) shorter"
    )
    return Limit(kind, cost_s / step_s, saved / step_s, sentence)


def limit_seconds(predictor: StepPredictor, prediction: PredictedStep) -> dict[str, float]:
    """For each kind of limit, the seconds of the step that it costs."""
    parts, plan = prediction.parts, prediction.plan
    served = plan.strategy in SERVED
    skinny = 0.0
    if prediction.matrix_share is not None:
        reached = prediction.matrix_share / predictor.cluster.device.matrix_efficiency
        if reached < SKINNY_SHARE:
            skinny = parts["compute"] * (1 - reached)
    memory = 0.0
    if plan.recomputation != "none":
        memory = prediction.seconds - predictor.predict(replace(plan, recomputation="none")).seconds
    return {
        "communication": parts["tensor"] + parts["transfer"] + (0.0 if served else parts["reduction"]),
        "server": parts["reduction"] if served else 0.0,
        "skinny matrix products": skinny,
        "input": parts["input"],
        "bubble": parts["bubble"],
        "memory": memory,
        "straggler": parts["waiting"],
        "optimizer": parts["optimizer"],
    }


def _described(predictor: StepPredictor, prediction: PredictedStep, kind: str) -> str:
    plan, cluster = prediction.plan, predictor.cluster
    match kind:
        case "communication":
            parts = prediction.parts
            name = max(("reduction", "tensor", "transfer"), key=lambda each: parts[each])
            stride, size = (plan.tensor, plan.data) if name == "reduction" else (1, plan.tensor)
            # Without data ranks, what is reduced are the weights that the first and the last stage share.
            between = name == "transfer" or size == 1
            level = cluster.levels[-1].name if between else cluster.group(size, stride=stride).slowest
            return communication_cause(name, level)
        case "skinny matrix products":
            share = prediction.matrix_share or 0.0
            reached = f"they reach {share:.0%} of the peak, large ones {cluster.device.matrix_efficiency:.0%}"
            return skinny_cause(f"{plan.micro_batch} {predictor.costs.unit}", reached)
        case "input":
            return input_cause(f"storage delivers {format_size(cluster.storage_bytes_per_s or 0)}/s to a host")
        case "bubble":
            return bubble_cause(plan.micro_batches, plan.pipeline)
        case "memory":
            return f"memory limits it: {plan.recomputation} recomputation is needed to fit {cluster.device.name}"
        case "straggler":
            if not cluster.slow:
                return "stragglers limit it: noise of the ranks"
            rank = max(cluster.slow, key=lambda each: cluster.slow[each])
            return straggler_cause(rank, cluster.slow[rank])
        case "server":
            return server_cause(plan.servers or cluster.hosts)
        case _:
            return optimizer_cause(f"{plan.optimizer} reads and writes {_update_size(predictor, plan)}")


# The words for the causes, of predicted and of measured steps.

EXCHANGES = {
    "reduction": "the exchange of gradients",
    "tensor": "the all-reduces of tensor teams",
    "transfer": "transfers between stages",
}


def communication_cause(part: str, level: str) -> str:
    """`part` is the kind of seconds that most of it belongs to, and `level` the level of the network."""
    return f"communication limits it, most of it {EXCHANGES[part]} over the {level}"


def skinny_cause(amount: str, reached: str) -> str:
    """`amount` is what is computed at a time, and `reached` compares its speed with that of large amounts."""
    return f"skinny matrix products limit it: with {amount} at a time {reached}; it loses"


def input_cause(rate: str) -> str:
    """`rate` says what delivers how much."""
    return f"the input limits it: {rate}"


def bubble_cause(micro_batches: int, stages: int) -> str:
    """Of a pipeline."""
    return f"the pipeline's bubble limits it, with {micro_batches} micro-batches for {stages} stages"


def straggler_cause(rank: int, times: float) -> str:
    """`times` is how many times as long the rank computes."""
    return f"a straggler limits it: all wait for rank {rank}, {times:.3g} times as slow"


def server_cause(servers: int) -> str:
    """Of strategies with parameter servers."""
    return f"the parameter servers limit it ({servers} server{'s' * (servers != 1)})"


def optimizer_cause(work: str) -> str:
    """`work` says what the update does."""
    return f"the optimizer limits it: {work}"


def _update_size(predictor: StepPredictor, plan: TrainingPlan) -> str:
    parameters = max(stage.parameters for stage in predictor.stages(plan))
    return format_size(plan.bytes_per_parameter.update * parameters)


def _remedy(predictor: StepPredictor, prediction: PredictedStep, kind: str) -> tuple[str, float]:
    """What would have to change, and the predicted seconds of a step (of as many samples) then."""
    plan, cluster = prediction.plan, predictor.cluster
    match kind:
        case "communication":
            levels = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in cluster.levels)
            return "twice the bandwidth", _on(predictor, replace(cluster, levels=levels), plan)
        case "skinny matrix products":
            larger = _larger(predictor, plan)
            seconds = predictor.predict(larger).seconds * plan.batch / larger.batch
            return f"{larger.micro_batch} {predictor.costs.unit} at a time, for as many {predictor.costs.unit}", seconds
        case "input":
            needed = predictor.input_s(plan) / max(1e-12, prediction.seconds - prediction.parts["input"])
            rate = (cluster.storage_bytes_per_s or 0.0) * needed
            faster = _on(predictor, replace(cluster, storage_bytes_per_s=rate), plan)
            return f"{format_size(rate)}/s a host", faster
        case "bubble":
            if plan.micro_batch % 2 == 0:
                more = replace(plan, micro_batch=plan.micro_batch // 2, micro_batches=2 * plan.micro_batches)
                return f"{more.micro_batches} micro-batches of {more.micro_batch}", predictor.predict(more).seconds
            more = replace(plan, micro_batches=2 * plan.micro_batches)
            return f"{more.micro_batches} micro-batches (a batch of {more.batch})", predictor.predict(more).seconds / 2
        case "memory":
            whole = replace(plan, recomputation="none")
            need = format_size(predictor.memory(whole).total)
            return f"{need} of memory a device, and no recomputation,", predictor.predict(whole).seconds
        case "straggler":
            return "ranks of equal speed", _on(predictor, replace(cluster, slow={}, step_noise=0.0), plan)
        case "server":
            servers = 2 * (plan.servers or cluster.hosts)
            more = replace(plan, servers=servers)
            reduced = replace(plan, strategy="allreduce")
            candidates = {f"{servers} servers": more, "allreduce instead of servers": reduced}
            step_s = {text: predictor.predict(each).seconds for text, each in candidates.items()}
            best = min(step_s, key=lambda text: step_s[text])
            return best, step_s[best]
        case _:
            return "plain SGD", predictor.predict(replace(plan, optimizer="sgd")).seconds


def _on(predictor: StepPredictor, cluster: Cluster, plan: TrainingPlan) -> float:
    """Seconds of the plan on a changed cluster."""
    return predictor.on(cluster).predict(plan).seconds


def _larger(predictor: StepPredictor, plan: TrainingPlan) -> TrainingPlan:
    """The plan with a micro-batch that is four times as large, of fewer micro-batches if there are enough."""
    if plan.micro_batches % BATCH_FACTOR == 0:
        return replace(
            plan, micro_batch=BATCH_FACTOR * plan.micro_batch, micro_batches=plan.micro_batches // BATCH_FACTOR
        )
    return replace(plan, micro_batch=BATCH_FACTOR * plan.micro_batch)


def codec_sentence(predictor: StepPredictor, prediction: PredictedStep, codec: str) -> str:
    """Whether a codec pays: what it saves on the network, and what its own work costs."""
    plan = replace(prediction.plan, codec=None)
    if plan.data == 1:
        return f"{codec}: there is one data rank, so no gradients are exchanged"
    if plan.strategy != "allreduce":
        raise SpecError(f"{codec}: the planner predicts codecs with allreduce, not with {plan.strategy}")
    without, with_codec = predictor.predict(plan), predictor.predict(replace(plan, codec=codec))
    saved = without.parts["reduction"] - with_codec.parts["reduction"]
    cost = with_codec.parts["codec"] - without.parts["codec"]  # a measured exchange works without a codec too
    if not math.isfinite(saved):
        raise SpecError(f"{codec}: its exchange cannot be predicted")
    verdict = "pays" if saved > cost else "does not pay"
    change, price = "saves" if saved >= 0 else "adds", "costs" if cost >= 0 else "saves"
    return (
        f"compression with {codec} {verdict} here: it {change} {format_duration(abs(saved))} of communication and "
        f"{price} {format_duration(abs(cost))} of computation"
    )
