"""Writes the tables of docs/planner.md, every published row beside its prediction: python -m tests.planner.accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.planner.calibration import A100_TRANSFORMERS, predict_steps
from syncline.planner.cluster import read_cluster
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.models import build_model
from syncline.planner.plans import TrainingPlan, pipeline_s
from syncline.planner.prediction import StepPredictor
from tests.planner.intervals import interval_kinds
from tests.planner.published import SCALING_ROWS, vtrain_cluster, vtrain_steps


@dataclass(frozen=True)
class ZeroBubbleRow:
    """A row of Table 4 of the zero-bubble paper, with the times of a micro-batch from its Table 9, in milliseconds."""

    model: str
    stages: int
    micro_batch: int
    micro_batches: int
    times_ms: tuple[float, float, float, float]
    """Forward, the two halves of the backward, and a transfer."""
    chunks: int
    """Of a rank with interleaved 1F1B: one layer each."""
    published: dict[str, float]
    """Samples per second and GPU, by the planner's name of the schedule. Its zero_bubble is the paper's ZB-1p."""

    def predicted(self, schedule: str) -> float:
        """Samples per second and GPU."""
        forward, inputs, weights, transfer = self.times_ms
        if schedule == "interleaved":  # Megatron waits for each transfer, so it is a part of each chunk's work
            work = [each / self.chunks for each in (forward, inputs, weights)]
            work[0] += 2 * transfer
            step = pipeline_s(f"interleaved:{self.chunks}", self.stages, self.micro_batches, *work)
        else:
            step = pipeline_s(schedule, self.stages, self.micro_batches, forward, inputs, weights, transfer)
        return self.micro_batch * self.micro_batches / self.stages / step * 1e3


def _zero_bubble_rows() -> tuple[ZeroBubbleRow, ...]:
    """Model, stages, micro-batch, chunks; then micro-batches, times, and what three schedules reach."""
    rows = (
        ("1.5B", 8, 6, 3, 24, (18.522, 18.086, 9.337, 0.601), (11.8, 13.1, 12.9)),
        ("1.5B", 8, 6, 3, 32, (18.513, 18.086, 9.331, 0.626), (12.5, 13.4, 13.4)),
        ("1.5B", 8, 6, 3, 64, (18.546, 18.097, 9.321, 0.762), (13.6, 13.9, 14.2)),
        ("6.2B", 8, 3, 4, 24, (29.718, 29.444, 19.927, 0.527), (3.50, 4.01, 3.88)),
        ("6.2B", 8, 3, 4, 32, (29.802, 29.428, 19.530, 0.577), (3.70, 4.08, 4.00)),
        ("6.2B", 8, 3, 4, 64, (29.935, 29.621, 19.388, 0.535), (4.03, 4.19, 4.20)),
        ("14.6B", 16, 1, 3, 48, (11.347, 11.248, 8.132, 0.377), (1.40, 1.54, 1.61)),
        ("14.6B", 16, 1, 3, 64, (11.307, 11.254, 8.101, 0.379), (1.49, 1.59, 1.67)),
        ("14.6B", 16, 1, 3, 128, (11.325, 11.308, 8.109, 0.378), (1.64, 1.66, 1.76)),
    )
    names = ("1f1b", "interleaved", "zero_bubble")
    return tuple(
        ZeroBubbleRow(model, stages, micro, count, times, chunks, dict(zip(names, rates, strict=True)))
        for model, stages, micro, chunks, count, times, rates in rows
    )


ZERO_BUBBLE = _zero_bubble_rows()
KORTHIKANTI = (  # name, layers, hidden, heads, hosts, pipeline, batch; seconds: full, sequence + selective
    ("22B", 48, 6144, 64, 1, 1, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 64, 18.13, 13.75),
)


def korthikanti() -> list[tuple[str, float, float]]:
    """Name, published and predicted seconds of steps with recomputation and with sequence parallelism."""
    found = []
    for name, layers, hidden, heads, hosts, pipeline, batch, full, selective in KORTHIKANTI:
        cluster = A100_TRANSFORMERS.apply(read_cluster(f"{hosts} hosts x 8 a100, 8 x 200gbit"))
        predictor = StepPredictor(
            DescribedCosts(build_model(f"gpt({layers}, {hidden}, heads={heads})"), cluster.device), cluster
        )
        micro = batch if pipeline == 1 else 1
        for text, seconds, sequence in (("full", full, False), ("selective", selective, True)):
            plan = TrainingPlan(
                tensor=8,
                pipeline=pipeline,
                micro_batch=micro,
                micro_batches=batch // micro,
                schedule="1f1b" if pipeline == 1 else "interleaved",
                chunks=1 if pipeline == 1 else 3,
                recomputation=text,  # type: ignore[arg-type]
                sequence=sequence,
                optimizer="adam-mixed",
                scattered=True,
                blocking=True,
            )
            found.append((f"{name}, {text} recomputation", seconds, predictor.predict(plan).seconds))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(predicted: float, published: float) -> str:
    return f"{predicted / published - 1:+.1%}"


def tables() -> str:
    """All tables, in Markdown."""
    steps = [step for _, step in vtrain_steps()]
    predicted = predict_steps(vtrain_cluster, steps, dict(A100_TRANSFORMERS.efficiencies))
    lines = ["#### GPT on 64 to 512 A100 (vTrain)", ""]
    rows = [
        [f"{size}B", str(step.plan).removesuffix(", full recomputation"), f"{step.seconds:.3f}", f"{seconds:.3f}",
         percent(seconds, step.seconds)]
        for (size, step), seconds in zip(vtrain_steps(), predicted, strict=True)
    ]  # fmt: skip
    lines += table(("model", "plan", "published s", "predicted s", "error"), rows)
    lines += ["", "#### Activation recomputation on 8 and 64 A100 (Korthikanti et al., Table 5)", ""]
    rows = [[name, f"{a:.2f}", f"{b:.2f}", percent(b, a)] for name, a, b in korthikanti()]
    lines += table(("model", "published s", "predicted s", "error"), rows)
    lines += [
        "",
        "#### Schedules on 8 and 16 A100 (zero-bubble paper, Table 4), from its measured times of a micro-batch",
        "",
    ]
    rows = [
        [row.model, schedule, str(row.micro_batches), f"{rate:g}", f"{row.predicted(schedule):.2f}",
         percent(row.predicted(schedule), rate)]
        for row in ZERO_BUBBLE
        for schedule, rate in row.published.items()
    ]  # fmt: skip
    lines += table(("model", "schedule", "micro-batches", "published samples/s a GPU", "predicted", "error"), rows)
    lines += ["", "#### Data parallelism: the largest scale, from the computation at the smallest", ""]
    rows = [
        [
            row.source,
            row.name,
            f"{row.error:+.1%}",
            f"does not count: {row.bad}" if row.bad else row.miss and f"miss: {row.miss}",
        ]
        for row in SCALING_ROWS
    ]
    lines += table(("source", "row", "error of the throughput", "note"), rows)
    lines += ["", "#### Intervals: rows that lie inside the interval of the other groups", ""]
    rows = []
    for kind in interval_kinds():
        inside, total = kind.coverage
        low, high = kind.calibration.factors
        rows.append(
            [kind.question, f"{total}, in {len(kind.groups)} groups by {kind.grouped_by}", f"{inside / total:.0%}",
             f"{low:.3f} to {high:.3f}"]
        )  # fmt: skip
    lines += table(("question", "rows", "held-out coverage", "factors of the 80 % interval"), rows)
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
