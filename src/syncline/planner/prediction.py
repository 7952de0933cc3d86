"""Predicts one training step of a plan: seconds by kind, memory, and an interval.

```text
step = compute + bubble + tensor + transfer + reduction + codec + waiting + optimizer + input
```

- compute: forward and backward of all micro-batches on the slowest stage, by the roofline or the measured profile.
- bubble, transfer: `plans.pipeline_s`, a formula that equals the pipeline player.
- tensor: all-reduces of tensor teams, two in each pass of a transformer layer.
- reduction: what is left of the exchange of gradients after the backward. Bucket by bucket, with ready times r:

      eᵢ = max(eᵢ₋₁, rᵢ) + seconds(nᵢ)          exposed = e_last − end of the backward

  and, of a pipeline, the sum of the gradients of weights that the first and the last stage share

- waiting: a synchronous step waits for its slowest rank.
- input: what storage needs longer than the step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster, RankGroup
from syncline.planner.layer_costs import ModelCosts, StageLayers, cut_stages
from syncline.planner.memory import RankMemory, rank_memory
from syncline.planner.plans import ASYNCHRONOUS, SERVED, TrainingPlan, pipeline_s
from syncline.planner.quantities import format_duration

__all__ = ["PARTS", "PredictedStep", "StepPredictor"]

PARTS = ("compute", "bubble", "tensor", "transfer", "reduction", "codec", "waiting", "optimizer", "input")
"""The kinds of seconds of a step."""
BUCKET_BYTES = 25e6
"""Gradients of one message."""
CODEC_PASSES = {
    "cast": 3.0,
    "quantize": 6.0,
    "onebit": 6.0,
    "ternary": 8.0,
    "topk": 16.0,
    "randomk": 6.0,
    "threshold": 8.0,
    "powersgd": 12.0,
    "lossless": 40.0,
}
"""How often a codec reads or writes all gradients, if its speed is not described."""
COLLECTIVES = ("ring", "halving_doubling", "tree")
"""Algorithms of an all-reduce with a formula; "native" is the fastest of them."""


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step. `parts` are seconds by kind; they sum to `seconds`."""

    plan: TrainingPlan
    parts: Mapping[str, float]
    memory: RankMemory
    """Of the rank with the most."""
    matrix_share: float | None = None
    """The share of the device's peak that the matrix products reach. None: not known."""
    exchange_s: float = 0.0
    """Seconds of the exchange of gradients, exposed or not."""
    factors: tuple[float, float] = field(default=(1.0, 1.0), compare=False)
    """The bounds of the 80 % interval in multiples of the prediction."""

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        return math.fsum(self.parts.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 80 % of such steps lie."""
        return self.seconds * self.factors[0], self.seconds * self.factors[1]

    @property
    def hidden_s(self) -> float:
        """Seconds of the exchange of gradients that run beside the backward, and cost no time."""
        return max(0.0, self.exchange_s - self.parts["reduction"])

    @property
    def throughput(self) -> float:
        """Samples per second of all ranks."""
        return self.plan.batch / self.seconds

    @property
    def efficiency(self) -> float:
        """The share of the step in which the slowest rank computes what one rank would compute, too."""
        return self.parts["compute"] / self.seconds


class StepPredictor:
    """Predicts steps of one model on one cluster.

    >>> from syncline.planner.cluster import read_cluster
    >>> from syncline.planner.layer_costs import DescribedCosts
    >>> from syncline.planner.models import build_model
    >>> cluster = read_cluster("4 hosts x 8 a100, 100gbit")
    >>> predictor = StepPredictor(DescribedCosts(build_model("gpt(24, 2048)"), cluster.device), cluster)
    >>> plan = TrainingPlan(data=32, micro_batch=4, optimizer="adam-mixed")
    >>> round(predictor.predict(plan).seconds, 1)
    1.3
    """

    def __init__(
        self,
        costs: ModelCosts,
        cluster: Cluster,
        *,
        factors: tuple[float, float] = (1.0, 1.0),
        compute_scale: float = 1.0,
    ) -> None:
        self.costs, self.cluster, self.factors = costs, cluster, factors
        self.compute_scale = compute_scale
        """By how much computation is slower than described. A calibration sets it."""
        self.optimizer: str | None = None
        """The optimizer that was measured. None: it is the plan's."""
        self._reductions: dict[tuple[object, ...], float] = {}
        self._stages: dict[tuple[object, ...], tuple[StageLayers, ...]] = {}

    def on(self, cluster: Cluster) -> StepPredictor:
        """The same predictor on another cluster with the same device."""
        other = copy.copy(self)
        other.cluster, other._reductions = cluster, {}
        return other

    def stages(self, plan: TrainingPlan) -> tuple[StageLayers, ...]:
        """The stages of a plan."""
        key = (plan.pipeline, plan.tensor, plan.micro_batch, plan.sequence, plan.recomputation)
        if key not in self._stages:
            layers = self.costs.layer_times(
                plan.micro_batch, plan.tensor, sequence=plan.sequence, recomputation=plan.recomputation
            )
            self._stages[key] = cut_stages(layers, plan.pipeline)
        return self._stages[key]

    def memory(self, plan: TrainingPlan) -> RankMemory:
        """The memory of the rank with the most."""
        stages = self.stages(plan)
        return max((rank_memory(plan, stages[n], n) for n in _distinct(stages)), key=lambda each: each.total)

    def can_predict(self, plan: TrainingPlan) -> bool:
        """Whether there is a formula: not for chunks whose transfers take longer than their forward."""
        if plan.schedule != "interleaved" or plan.pipeline == 1 or plan.blocking:
            return True
        stages = self.stages(plan)
        shortest = min(stage.forward_s for stage in stages)
        return self._transfer_s(plan, stages[0]) * plan.chunks <= self.compute_scale * shortest

    def predict(self, plan: TrainingPlan) -> PredictedStep:
        """Predict one step of a plan.

        Raises:
            SpecError: if the plan does not suit the model or the cluster.
        """
        self._check(plan)
        stages, cluster, m = self.stages(plan), self.cluster, plan.micro_batches
        tensor = [self._tensor_s(plan, stage) for stage in stages]
        scale = self.compute_scale
        forward = [scale * stage.forward_s for stage in stages]
        backward = [scale * stage.backward_s for stage in stages]
        whole = [f + b + t for f, b, t in zip(forward, backward, tensor, strict=True)]
        slowest = max(range(len(stages)), key=whole.__getitem__)
        parts = dict.fromkeys(PARTS, 0.0)
        parts["compute"] = m * (forward[slowest] + backward[slowest])
        parts["tensor"] = m * tensor[slowest]
        if plan.pipeline > 1:
            transfer = self._transfer_s(plan, stages[0])
            idle = self._pipeline_s(plan, whole, forward, backward, slowest, 0.0) - m * whole[slowest]
            with_transfer = self._pipeline_s(plan, whole, forward, backward, slowest, transfer) - m * whole[slowest]
            parts["bubble"], parts["transfer"] = idle, with_transfer - idle
        exchange, exposed, codec = self._exchange(plan, stages, scale)
        tied = self._tied_s(plan, stages[-1])
        parts["reduction"], parts["codec"] = exposed + tied, codec
        # Bytes in flight take memory and cores away from the computation.
        parts["compute"] *= 1 + (cluster.background - 1) * min(1.0, max(0.0, exchange - exposed) / parts["compute"])
        if plan.strategy in ASYNCHRONOUS and cluster.slow:
            rate = sum(1 / cluster.slow.get(rank, 1.0) for rank in range(plan.ranks)) / plan.ranks
            parts["waiting"] = parts["compute"] * (1 / rate - 1)
        elif plan.strategy not in ASYNCHRONOUS:
            parts["waiting"] = parts["compute"] * (self._slowdown(plan) - 1)
        shards = plan.data if plan.strategy == "fsdp" else 1
        most = max(stage.parameters for stage in stages)
        if plan.strategy not in SERVED:
            parts["optimizer"] = cluster.device.stream_s(plan.bytes_per_parameter.update * most / shards)
        parts["input"] = max(0.0, self.input_s(plan) - math.fsum(parts.values()))
        return PredictedStep(
            plan=plan,
            parts=parts,
            memory=self.memory(plan),
            matrix_share=_matrix_share(stages[slowest]),
            exchange_s=exchange + tied,
            factors=self.factors,
        )

    def _check(self, plan: TrainingPlan) -> None:
        if plan.ranks > self.cluster.size:
            raise SpecError(f"{plan} needs {plan.ranks} ranks, but the cluster has {self.cluster.size} devices")
        if plan.tensor > self.costs.tensor_limit or self.costs.tensor_limit % plan.tensor:
            raise SpecError(f"{plan.tensor} tensor ranks do not divide {self.costs.tensor_limit} attention heads")

    def _slowdown(self, plan: TrainingPlan) -> float:
        """How many times as long the slowest of the plan's ranks computes."""
        cluster = self.cluster
        noise = 1 + cluster.step_noise * math.sqrt(2 * math.log(max(1, plan.ranks)))
        return max([noise, *(factor for rank, factor in cluster.slow.items() if rank < plan.ranks)])

    def _tensor_s(self, plan: TrainingPlan, stage: StageLayers) -> float:
        """Seconds of a tensor team's collectives for one micro-batch."""
        if plan.tensor == 1:
            return 0.0
        group = self.cluster.group(plan.tensor, stride=1)
        return sum(
            count * layer.collectives * self.allreduce_s(group, layer.collective_bytes, "native")
            for layer, count in stage.layers
        )

    def _transfer_s(self, plan: TrainingPlan, stage: StageLayers) -> float:
        """Seconds in which the output of a stage reaches the next one."""
        link = self.cluster.neighbour(plan.tensor * plan.data, plan.pipeline)
        if not plan.scattered or plan.tensor == 1:
            return link.latency_s + stage.output_bytes / link.bandwidth
        team = self.cluster.group(plan.tensor, stride=1)
        gathered = (plan.tensor - 1) / plan.tensor * stage.output_bytes / team.bandwidth + team.latency_s
        return link.latency_s + stage.output_bytes / plan.tensor / link.bandwidth + gathered

    @staticmethod
    def _pipeline_s(
        plan: TrainingPlan,
        whole: Sequence[float],
        forward: Sequence[float],
        backward: Sequence[float],
        slowest: int,
        transfer: float,
    ) -> float:
        """Seconds of all micro-batches. Stages of different times: fill and drain take the sum of all."""
        p, m = plan.pipeline, plan.micro_batches
        top = whole[slowest]
        uneven = math.fsum(whole) - p * top  # negative: the other stages fill faster
        if plan.schedule == "interleaved":
            part = 1 / plan.chunks
            name = f"interleaved:{plan.chunks}"
            if plan.blocking:  # two transfers are a part of each chunk's work
                return pipeline_s(name, p, m, top * part + 2 * transfer, 0.0, 0.0) + uneven * part
            if transfer * plan.chunks > forward[slowest]:
                raise SpecError(
                    f"{plan}: a transfer of {format_duration(transfer)} takes longer than the forward of a chunk, "
                    f"{format_duration(forward[slowest] / plan.chunks)}, so its step cannot be predicted: use '1f1b'"
                )
            return pipeline_s(name, p, m, top * part, 0.0, 0.0, transfer) + uneven * part
        if plan.schedule == "zero_bubble":
            # The weights' half of the backward has the same matrix products as the inputs' half.
            weight = backward[slowest] / 2
            share = (top - weight) / top
            return pipeline_s("zero_bubble", p, m, top - 2 * weight, weight, weight, transfer) + uneven * share
        return pipeline_s(plan.schedule, p, m, top, 0.0, 0.0, transfer) + uneven

    def allreduce_s(self, group: RankGroup, nbytes: float, algorithm: str) -> float:
        """Seconds of one all-reduce. "native" is the fastest algorithm that has a formula."""
        if group.size == 1 or not nbytes:
            return 0.0
        key = (group, nbytes, algorithm)
        if key not in self._reductions:
            from syncline.costs.prediction import closed_form, predict
            from syncline.transports import Network

            network = Network(latency=group.latency_s, bandwidth=group.bandwidth)
            n, size = math.ceil(nbytes), group.size
            names = COLLECTIVES if algorithm == "native" else (algorithm,)
            known = [seconds for name in names if (seconds := closed_form(name, size, n, network)) is not None]
            if algorithm == "native" and size & (size - 1):
                # Between powers of two the formulas are not exact: the other ranks send first and receive last.
                power = 1 << (size.bit_length() - 1)
                folded = 2 * (network.latency + n / network.bandwidth)
                others = [closed_form(name, power, n, network) for name in ("halving_doubling", "tree")]
                known += [seconds + folded for seconds in others if seconds is not None]
            if not known:
                known = [predict(algorithm, size, n, network).seconds]
            self._reductions[key] = min(known)
        return self._reductions[key]

    def _exchange(self, plan: TrainingPlan, stages: Sequence[StageLayers], scale: float) -> tuple[float, float, float]:
        """Seconds of the exchange of gradients or weights; of its exposed part; and of the codec's work."""
        if plan.data == 1:
            return 0.0, 0.0, 0.0
        group = self.cluster.group(plan.data, stride=plan.tensor)
        if plan.strategy == "fsdp":
            return self._sharded(plan, stages, group, scale)
        if plan.strategy in SERVED:
            total = self._served_s(plan, stages)
            return total, total, 0.0
        message, codec_s = self._messages(plan, group)
        if plan.strategy in ("local", "gossip"):
            nbytes = plan.bytes_per_parameter.weight * max(stage.parameters for stage in stages)
            if plan.strategy == "gossip":  # one partner: weights leave and arrive at the same time
                seconds = group.latency_s + nbytes / group.bandwidth
            else:
                seconds = message(nbytes) / plan.period
            return seconds, seconds, codec_s(nbytes) / plan.period
        # The last backward of the first stage ends the step; other stages have reduced by then, unless they are larger.
        total = exposed = codec = 0.0
        for place in _distinct(stages):
            stage = stages[place]
            nbytes = plan.sent_gradient_bytes * stage.parameters
            taken, left = self._reduce(plan, stage, message, scale)
            early = 0.0 if place == 0 else math.fsum(scale * each.backward_s for each in stages[:place])
            if taken > total:
                total, codec = taken, codec_s(nbytes)
            exposed = max(exposed, left - early)
        return total, exposed, codec

    def _tied_s(self, plan: TrainingPlan, last: StageLayers) -> float:
        """Seconds in which the first and the last stage sum the gradients of the weights that both use."""
        if plan.pipeline == 1 or not last.tied_parameters:
            return 0.0
        link = self.cluster.neighbour(plan.tensor * plan.data, plan.pipeline)
        shards = plan.data if plan.strategy == "fsdp" else 1
        return link.latency_s + plan.sent_gradient_bytes * last.tied_parameters / shards / link.bandwidth

    def _reduce(
        self, plan: TrainingPlan, stage: StageLayers, message: Callable[[float], float], scale: float
    ) -> tuple[float, float]:
        """Seconds of all buckets of a stage, and of those that end after the backward."""
        layers = [(layer, count) for layer, count in reversed(stage.layers)]
        total_s = scale * math.fsum(count * layer.backward_s for layer, count in layers)
        now = end = pending = taken = 0.0
        for layer, count in layers:
            nbytes = plan.sent_gradient_bytes * layer.parameters
            for _ in range(count):
                now += scale * layer.backward_s
                pending += nbytes
                if pending >= BUCKET_BYTES:
                    ready = now if plan.overlap else total_s
                    buckets = max(1, round(pending / BUCKET_BYTES))
                    each = buckets * message(pending / buckets)
                    end, taken, pending = max(end, ready) + each, taken + each, 0.0
        if pending:
            each = message(pending)
            end, taken = max(end, total_s) + each, taken + each
        return taken, max(0.0, end - total_s)

    def _messages(
        self, plan: TrainingPlan, group: RankGroup
    ) -> tuple[Callable[[float], float], Callable[[float], float]]:
        """Functions of the bytes of a bucket: seconds on the network, and of the codec's work."""
        if plan.codec is None:
            return (lambda nbytes: self.allreduce_s(group, nbytes, plan.collective)), (lambda nbytes: 0.0)
        text = plan.codec
        width = plan.sent_gradient_bytes
        speed = self.cluster.device.memory_bytes_per_s * self.cluster.device.memory_efficiency
        passes = sum(CODEC_PASSES.get(link.partition("(")[0].strip(), 10.0) for link in text.split("|"))

        def network_s(nbytes: float) -> float:
            key = (text, group, nbytes)
            if key not in self._reductions:
                self._reductions[key] = self._compressed_s(text, group, nbytes / width)
            return self._reductions[key]

        return network_s, lambda nbytes: passes * 4 * nbytes / width / speed

    def _compressed_s(self, text: str, group: RankGroup, elements: float) -> float:
        """Seconds in which a codec's payloads of so many gradients are exchanged."""
        from syncline.codecs import build_codec
        from syncline.codecs.base import PayloadCodec
        from syncline.collectives.compressed.cost import predict_collectives
        from syncline.transports import Network

        codec = build_codec(text)
        assert codec is not None
        numel = max(1, round(elements))
        if codec.traits.allreducible or not isinstance(codec, PayloadCodec):
            side = max(1, math.isqrt(numel))  # a square matrix, as PowerSGD divides it
            rank = getattr(codec, "rank", None)
            nbytes = 4.0 * 2 * side * rank if isinstance(rank, int) else float(2 * numel)
            return self.allreduce_s(group, nbytes, "native")
        network = Network(latency=group.latency_s, bandwidth=group.bandwidth)
        return min(predict_collectives(codec, [numel], network, group.size).values())

    def _served_s(self, plan: TrainingPlan, stages: Sequence[StageLayers]) -> float:
        """Seconds in which all workers push gradients to the servers and pull weights, after each other.

        Workers of one host send together; a server has the network of its host. With whole tensors, the server that has
        the largest one may have more to send than the others.
        """
        cluster = self.cluster
        level = cluster.levels[-1]
        rate = level.bandwidth * level.efficiency
        hosts = max(1, math.ceil(plan.ranks / cluster.devices_per_host))
        servers = plan.servers or hosts
        inside = cluster.levels[0].bandwidth * cluster.levels[0].efficiency
        width = plan.sent_gradient_bytes
        nbytes = width * max(stage.parameters for stage in stages)
        seconds = 2 * nbytes / inside if plan.ranks > 1 and cluster.devices_per_host > 1 else 0.0
        if hosts > 1:
            served = nbytes / servers
            if plan.whole_tensors:
                served = max(served, width * max(stage.largest_tensor for stage in stages))
            # A host's sum goes to the other hosts' servers; a server receives from all other hosts.
            most = max((hosts - 1) / hosts * nbytes, (hosts - 1) * served)
            seconds += 2 * most / rate + 2 * level.latency_s
        return seconds

    def _sharded(
        self, plan: TrainingPlan, stages: Sequence[StageLayers], group: RankGroup, scale: float
    ) -> tuple[float, float, float]:
        """Weights in shards: gathered before each forward and backward, one layer ahead; gradients scattered."""
        share, width = (group.size - 1) / group.size, plan.bytes_per_parameter.weight
        exposed = total = 0.0
        for stage in stages:
            seconds = first = 0.0
            spent = 0.0
            for layer, count in stage.layers:
                gather = share * width * layer.parameters / group.bandwidth + group.latency_s * math.log2(group.size)
                first = first or gather
                forward, backward = scale * layer.forward_s, scale * layer.backward_s
                seconds += count * (max(forward, gather) - forward + max(backward, 2 * gather) - backward)
                spent += 3 * count * gather
            exposed, total = max(exposed, seconds + 2 * first), max(total, spent)
        return plan.micro_batches * total, plan.micro_batches * exposed, 0.0

    def input_s(self, plan: TrainingPlan) -> float:
        """Seconds in which a host's storage delivers the samples of a step. 0: not described."""
        storage = self.cluster.storage_bytes_per_s
        if not storage or not self.costs.sample_bytes:
            return 0.0
        per_host = max(1.0, plan.data * plan.tensor * plan.pipeline / self.cluster.devices_per_host)
        return plan.batch * self.costs.sample_bytes / min(per_host, self.cluster.hosts) / storage


def _distinct(stages: Sequence[StageLayers]) -> Sequence[int]:
    """Stages that differ. Of repeated blocks, the first two and the last one: those between are like the second."""
    repeated = any(layer.copies > 1 for layer, _ in stages[0].layers)
    return sorted({0, min(1, len(stages) - 1), len(stages) - 1}) if repeated else range(len(stages))


def _matrix_share(stage: StageLayers) -> float | None:
    """The share of the peak that the matrix products of a stage reach, weighted by their seconds."""
    known = [(layer.matrix_share, count * layer.forward_s) for layer, count in stage.layers if layer.matrix_share]
    total = math.fsum(seconds for _, seconds in known)
    return math.fsum(share * seconds for share, seconds in known) / total if total else None
