"""Plans of a measured model on a measured machine: `syncline plan profile.json --machine machine.json`.

Steps are those of `predict_run`: with the machine's network, codecs, Python and shared processors, the profile's update
and reading of data. Memory is predicted from the profile's. What was not measured is refused, not estimated.
"""

from __future__ import annotations

import math
from dataclasses import replace

from syncline.errors import SpecError
from syncline.parallel.schedules import build_schedule
from syncline.planner.cluster import Cluster, NetworkLevel
from syncline.planner.devices import Device
from syncline.planner.exchange_costs import ExchangeCosts
from syncline.planner.layer_costs import MeasuredCosts
from syncline.planner.machine import MachineMeasurement
from syncline.planner.measured_memory import predict_memory
from syncline.planner.memory import RankMemory
from syncline.planner.plans import OPTIMIZERS, TrainingPlan
from syncline.planner.prediction import PARTS, PredictedStep, StepPredictor
from syncline.planner.profile import TrainingProfile
from syncline.planner.run_prediction import pipeline_parts, predict_run

__all__ = ["MachinePredictor", "machine_cluster"]

DEFAULT_MEMORY_BYTES = 1e12
"""Of a machine whose memory was not measured: no plan is refused for it."""


def machine_cluster(machine: MachineMeasurement, profile: TrainingProfile) -> Cluster:
    """The measured machine as a cluster: a worker is a device, and workers of a machine divide its memory.

    The device's peak is what the profile reaches, for the sentences about limits; steps are not predicted by it.
    """
    inside = max(1, machine.workers // machine.hosts)
    sharing = machine.workers if machine.lab or machine.hosts == 1 else inside
    memory = (machine.memory_bytes or DEFAULT_MEMORY_BYTES) / sharing
    speed = max(1.0, profile.total_flops / profile.layers.seconds)
    copied = machine.copy_bytes_per_s or 1e10
    device = Device(
        name="worker",
        half_flops_per_s=speed,
        single_flops_per_s=speed,
        memory_bytes=memory,
        memory_bytes_per_s=2 * copied,
        source="syncline bench machine",
    )
    network = machine.network
    levels = [
        NetworkLevel(
            name="host",
            members=inside,
            bandwidth=(network.inside_bandwidth or network.bandwidth) if inside > 1 else math.inf,
            latency_s=network.inside_latency or network.latency,
        )
    ]
    if machine.hosts > 1:
        levels.append(
            NetworkLevel(
                name="network",
                members=machine.hosts,
                bandwidth=network.bandwidth * inside,
                latency_s=network.latency + network.per_message,
            )
        )
    return Cluster(
        device=device,
        levels=tuple(levels),
        storage_bytes_per_s=profile.samples_per_s * profile.sample_bytes or None,
        step_noise=0.0,
        source="measured",
        text=machine.lab,
    )


class MachinePredictor(StepPredictor):
    """Predicts plans of a measured model on a measured machine, by `predict_run`."""

    def __init__(
        self,
        profile: TrainingProfile,
        machine: MachineMeasurement,
        *,
        cluster: Cluster | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__(MeasuredCosts(profile.layers), cluster or machine_cluster(machine, profile), factors=factors)
        self.profile, self.machine = profile, machine
        self.optimizer = {"adamw": "adam"}.get(profile.optimizer.name, profile.optimizer.name)

    def on(self, cluster: Cluster) -> MachinePredictor:
        """The same model on a machine whose network and storage are changed as the cluster's are."""
        before, after = self.cluster.levels[-1], cluster.levels[-1]
        machine, profile = self.machine, self.profile
        if after.bandwidth != before.bandwidth and machine.hosts > 1:
            network = replace(machine.network, bandwidth=machine.network.bandwidth * after.bandwidth / before.bandwidth)
            machine = replace(machine, network=network, allreduces=())
        if cluster.storage_bytes_per_s and self.cluster.storage_bytes_per_s:
            ratio = cluster.storage_bytes_per_s / self.cluster.storage_bytes_per_s
            profile = replace(profile, samples_per_s=profile.samples_per_s * ratio)
        return MachinePredictor(profile, machine, cluster=cluster, factors=self.factors)

    def can_predict(self, plan: TrainingPlan) -> bool:
        """Whether a step can be predicted. Asynchronous strategies cannot, with a pipeline or several micro-batches."""
        return plan.strategy == "allreduce" or (
            plan.pipeline == 1 and (plan.strategy == "local" or plan.micro_batches == 1)
        )

    def predict(self, plan: TrainingPlan) -> PredictedStep:
        """Predict one step of a plan.

        Raises:
            SpecError: if it needs what was not measured.
        """
        self._check(plan)
        if plan.tensor > 1 or plan.strategy == "fsdp":
            raise SpecError(f"{plan}: a measured profile says nothing about divided layers or weights in shards")
        if plan.pipeline > 1:
            costs = ExchangeCosts(self.machine, plan.ranks, copies=self.profile.copies)
            schedule = plan.schedule if plan.schedule != "interleaved" else f"interleaved(chunks={plan.chunks})"
            found, _ = pipeline_parts(
                self.profile, costs, build_schedule(schedule), plan.pipeline, plan.micro_batch, plan.micro_batches
            )
        else:
            found = dict(
                predict_run(
                    self.profile,
                    self.machine,
                    strategy=_spec(plan),
                    codec=plan.codec,
                    workers=plan.data,
                    batch=plan.micro_batch,
                ).parts
            )
            found["compute"] *= plan.micro_batches
        found["optimizer"] *= self._update_ratio(plan)
        parts = dict.fromkeys(PARTS, 0.0) | found
        parts["input"] = self._reading_s(plan)
        return PredictedStep(
            plan=plan,
            parts=parts,
            memory=self.memory(plan),
            exchange_s=parts["reduction"],
            factors=self.factors,
        )

    def memory(self, plan: TrainingPlan) -> RankMemory:
        """By the measured tensors; of pipelines by the sizes of the layers."""
        if plan.pipeline > 1:
            return super().memory(plan)
        found = predict_memory(
            self.profile.memory,
            batch_size=plan.micro_batch,
            recompute=plan.recomputation == "full",
            codec=plan.codec,
            workers=plan.data,
        )
        return RankMemory(
            weights=found.weights + found.buffers,
            gradients=found.gradients,
            optimizer=found.optimizer_state,
            activations=found.activations + found.batch + found.temporary,
            buckets=found.buckets + found.payloads,
            residuals=found.residuals,
            versions=found.weight_versions,
        )

    def _reading_s(self, plan: TrainingPlan) -> float:
        """Seconds in which the process of a worker reads its samples before it computes."""
        samples = plan.micro_batch * plan.micro_batches
        costs = ExchangeCosts(self.machine, plan.ranks, copies=self.profile.copies)
        return samples / self.profile.samples_per_s * costs.contention

    def _update_ratio(self, plan: TrainingPlan) -> float:
        """How many times as many bytes the plan's optimizer moves as the measured one."""
        measured = OPTIMIZERS.get(self.optimizer or "")
        return plan.bytes_per_parameter.update / measured.update if measured is not None else 1.0

    def input_s(self, plan: TrainingPlan) -> float:
        """Seconds of reading."""
        return self._reading_s(plan)


def _spec(plan: TrainingPlan) -> str:
    return f"local(period={plan.period})" if plan.strategy == "local" else plan.strategy
