"""Published rows that predictions are compared with, and the comparison. docs/planner.md has its table.

Scaling rows: the factor of the computation is fitted to the smallest scale alone, and the largest scale is predicted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from syncline.planner.calibration import MeasuredStep
from syncline.planner.cluster import Cluster, read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.models import build_model
from syncline.planner.plans import TrainingPlan
from syncline.planner.prediction import StepPredictor

DATA = Path(__file__).parent / "data"


@cache
def vtrain_steps() -> tuple[tuple[str, MeasuredStep], ...]:
    """vTrain's steps on several hosts: billions of parameters, and the step."""
    found = []
    with (DATA / "vtrain_multi_node.csv").open(encoding="utf-8") as file:
        for row in list(csv.reader(file))[1:]:
            size = row[0]
            ranks, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[1:11])
            plan = TrainingPlan(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                micro_batch=micro,
                micro_batches=batch // data // micro,
                recomputation="full",
                optimizer="adam-mixed",
                overlap=False,
                scattered=True,
            )
            model = f"gpt({layers}, {hidden}, heads={heads}, sequence={sequence})"
            found.append((size, MeasuredStep(model, ranks // 8, plan, float(row[11]) / 1e3)))
    return tuple(found)


@cache
def vtrain_single_host_steps() -> tuple[MeasuredStep, ...]:
    """vTrain's steps of small models on 1 to 8 GPUs of one host."""
    found = []
    with (DATA / "vtrain_single_node.csv").open(encoding="utf-8") as file:
        for row in list(csv.reader(file))[1:]:
            _, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[:10])
            plan = TrainingPlan(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                micro_batch=micro,
                micro_batches=batch // data // micro,
                recomputation="full",
                optimizer="adam-mixed",
                overlap=False,
                scattered=True,
            )
            model = f"gpt({layers}, {hidden}, heads={heads}, sequence={sequence})"
            found.append(MeasuredStep(model, 1, plan, float(row[10]) / 1e3))
    return tuple(found)


def vtrain_cluster(hosts: int) -> Cluster:
    """vTrain's machines."""
    return read_cluster(f"{hosts} hosts x 8 a100, 800gbit")


@dataclass(frozen=True)
class ScalingRow:
    """Throughput of all ranks on the smallest and on the largest number of ranks."""

    source: str
    name: str
    model: str
    host: str
    """What follows "N hosts x" in the description of the cluster."""
    per_host: int
    micro_batch: int
    scales: Sequence[tuple[int, float]]
    """Ranks, and samples per second of all of them: the smallest and the largest scale."""
    plan: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    """What the plan of the smallest scale has otherwise."""
    precision: str = "half"
    bad: str = ""
    """Why the two runs cannot be compared, so that this row does not count."""
    miss: str = ""
    """What the planner does not predict. The row counts."""

    def predictor(self, ranks: int, scale: float) -> StepPredictor:
        hosts = max(1, ranks // self.per_host)
        cluster = read_cluster(f"{hosts} hosts x {min(ranks, self.per_host)} {self.host}")
        model = build_model(self.model).at_precision(self.precision)  # type: ignore[arg-type]
        return StepPredictor(DescribedCosts(model, cluster.device), cluster, compute_scale=scale)

    def throughput(self, ranks: int, scale: float) -> float:
        """Predicted samples per second."""
        plan = {"micro_batch": self.micro_batch, **self.plan}
        plan |= self.first if ranks == self.scales[0][0] else {}
        return self.predictor(ranks, scale).predict(TrainingPlan(data=ranks, **plan)).throughput

    @cached_property
    def fitted_scale(self) -> float:
        """The factor of the computation with which the smallest scale is predicted exactly."""
        ranks, measured = self.scales[0]
        low, high = 0.01, 100.0
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.throughput(ranks, middle) > measured else (low, middle)
        return low

    @cached_property
    def error(self) -> float:
        """(predicted − measured) ÷ measured at the largest scale."""
        ranks, measured = self.scales[-1]
        return self.throughput(ranks, self.fitted_scale) / measured - 1


def _fsdp(
    name: str, shape: str, micro: int, scales: Sequence[tuple[int, float]], *, full: bool = False, **other: Any
) -> ScalingRow:
    """llm-foundry: tokens per second and GPU, sequences of 2048."""
    plan = {"strategy": "fsdp", "optimizer": "adam-mixed", "recomputation": "full" if full else "none"}
    plan |= other.pop("plan", {})
    host = other.pop("host", "a100-40g, 1600gbit")
    sequences = [(ranks, rate * ranks / 2048) for ranks, rate in scales]
    model = f"gpt({shape}, vocabulary=50368, attention='flash')"
    return ScalingRow("llm-foundry", name, model, host, 8, micro, sequences, plan, **other)


def _titan(name: str, host: str, rates: Sequence[tuple[int, float]]) -> ScalingRow:
    """torchtitan: tokens per second and GPU, sequences of 8192."""
    plan = {"strategy": "fsdp", "optimizer": "adam-mixed", "recomputation": "selective"}
    model = "gpt(32, 4096, heads=32, sequence=8192, vocabulary=128256, attention='flash')"
    return ScalingRow("torchtitan", name, model, host, 8, 2, [(n, rate * n / 8192) for n, rate in rates], plan)


def _bert(name: str, host: str, per_host: int, sequence: int, micro: int, first: float, last: float) -> ScalingRow:
    """NVIDIA's BERT: the gradients of a step are reduced once, after the last backward, in 16 bits."""
    plan = {"overlap": False, "gradient_bytes": 2, "optimizer": "adam-mixed"}
    model = f"bert(24, 1024, heads=16, sequence={sequence})"
    return ScalingRow(
        "NVIDIA BERT", name, model, host, per_host, micro, [(per_host, first), (16 * per_host, last)], plan
    )


def _images(
    source: str, name: str, model: str, host: str, per_host: int, batch: int, *scales: tuple[int, float], **other: Any
) -> ScalingRow:
    plan = {"optimizer": "momentum", **other.pop("plan", {})}
    return ScalingRow(source, name, model, host, per_host, batch, scales, plan, precision="single", **other)


P100, K80, V100 = "p100", "k80, 10gbit", "v100, 100gbit"
SERVERS = {"strategy": "bsp", "whole_tensors": True}
SCALING_ROWS = (
    _fsdp("125M, 8 to 128", "12, 768, heads=12", 26, [(8, 136334), (128, 123936)]),
    _fsdp("350M, 8 to 128", "24, 1024, heads=16", 16, [(8, 55995), (128, 51934)]),
    _fsdp("760M, 8 to 128", "24, 1536, heads=12", 12, [(8, 30173), (128, 28940)]),
    _fsdp("1B, 8 to 128", "24, 2048, heads=16", 8, [(8, 19271), (128, 18647)]),
    _fsdp("1B, 8 to 32", "24, 2048, heads=16", 8, [(8, 19271), (32, 15555)],
          bad="a bad run: 64 GPUs with the same micro-batch, 10, reach 19001 a GPU, this one 15555"),
    _fsdp("7B, 8 to 128", "32, 4096, heads=32", 12, [(8, 3679), (128, 3623)], full=True),
    _fsdp("13B, 16 to 128", "40, 5120, heads=40", 16, [(16, 1993), (128, 1972)], full=True),
    _fsdp("13B, 8 to 128, micro-batch 4 to 16", "40, 5120, heads=40", 16, [(8, 1668), (128, 1972)], full=True,
          first={"micro_batch": 4}, bad="the source has micro-batches of 4 at 8 GPUs and of 16 at 128"),
    _fsdp("70B, 64 to 128, micro-batch 2 to 4", "80, 8192, heads=64", 4, [(64, 276), (128, 376)], full=True,
          first={"micro_batch": 2}, bad="the source has micro-batches of 2 at 64 GPUs and of 4 at 128"),
    _fsdp("H100 1B, 8 to 64", "24, 2048, heads=16", 8, [(8, 45455), (64, 44402)], host="h100, 3200gbit"),
    _fsdp("H100 13B, 8 to 64", "40, 5120, heads=40", 8, [(8, 4792), (64, 4800)], full=True, host="h100, 3200gbit"),
    _fsdp("H100 70B, 32 to 64, micro-batch 2 x 16 to 8 x 4", "80, 8192, heads=64", 8, [(32, 882), (64, 1039)],
          full=True, host="h100, 3200gbit", plan={"micro_batches": 4}, first={"micro_batch": 2, "micro_batches": 16},
          bad="the source has 16 micro-batches of 2 at 32 GPUs and 4 of 8 at 64"),
    _titan("8B, 8 to 128", "h100, 8 x 400gbit", [(8, 5762), (128, 5605)]),
    _titan("8B compiled, 8 to 128", "h100, 8 x 400gbit", [(8, 6667), (128, 6514)]),
    _titan("8B fp8, 8 to 128", "h100, 8 x 400gbit", [(8, 8532), (128, 8380)]),
    _titan("8B fp8 H200, 32 to 64", "h200, 8 x 400gbit", [(32, 10938), (64, 10753)]),
    _bert("DGX-1, 128 tokens", "v100, 4 x 100gbit", 8, 128, 16, 874.24, 12144.64),
    _bert("DGX-1, 512 tokens", "v100, 4 x 100gbit", 8, 512, 4, 195.93, 2746.37),
    _bert("DGX-2H, 128 tokens", "v100-32g, 8 x 100gbit", 16, 128, 64, 3379.2, 51937.28),
    _bert("DGX-2H, 512 tokens", "v100-32g, 8 x 100gbit", 16, 512, 8, 625.66, 9932.8),
    _images("TensorFlow", "Inception-v3 P100, 1 to 8", "inception", P100, 8, 64, (1, 142), (8, 1131)),
    _images("TensorFlow", "ResNet-50 P100, 1 to 8", "resnet(50)", P100, 8, 64, (1, 219), (8, 1734)),
    _images("TensorFlow", "ResNet-152 P100, 1 to 8", "resnet(152)", P100, 8, 64, (1, 91.8), (8, 716)),
    _images("TensorFlow", "Inception-v3 K80, 1 to 64", "inception", K80, 8, 64, (1, 29.7), (64, 1783), plan=SERVERS),
    _images("TensorFlow", "ResNet-50 K80, 1 to 64", "resnet(50)", K80, 8, 64, (1, 52.4), (64, 2744), plan=SERVERS),
    _images("TensorFlow", "ResNet-152 K80, 1 to 64", "resnet(152)", K80, 8, 32, (1, 19.4), (64, 981), plan=SERVERS),
    _images("TensorFlow", "Inception-v3 Piz Daint, 1 to 64", "inception", "p100, 80gbit", 1, 64, (1, 138.23),
            (64, 7118.31), plan={**SERVERS, "servers": 40}),
    _images("TensorFlow", "Inception-v3 Piz Daint, 1 to 128", "inception", "p100, 80gbit", 1, 64, (1, 138.23),
            (128, 9219.7), plan={**SERVERS, "servers": 116},
            miss="the rate of TCP on this network is not in the source"),
    _images("DLPerf", "ResNet-50 PyTorch, 1 to 32", "resnet(50)", V100, 8, 128, (1, 348.62), (32, 10021.29)),
    _images("DLPerf", "ResNet-50 NGC, 1 to 32", "resnet(50)", V100, 8, 128, (1, 367.29), (32, 10917.09)),
    _images("Horovod", "Inception-v3, 1 to 512", "inception", "p100, 25gbit", 4, 64, (1, 142.0),
            (512, 0.9 * 512 * 142)),
)  # fmt: skip
