"""`syncline bench parallel`: compares plans that divide layers. Each rank runs this module.

All contenders are in the same processes, with the same weights and batches, and take turns step by step as in
`bench/step.py`. A step trains on one batch of `--batch` samples, of all workers together, whatever the plan:

```text
data parallel    each worker a share of the batch, all layers
tensor(2)        each team of two workers a share, each worker a part of the layers
```

After the last turn the weights are compared with those of one process.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.bench.measuring import (
    Summary,
    check_options,
    describe_place,
    over_ranks,
    quiet_machine,
    ratios,
    summarize,
)
from syncline.bench.pipeline_contenders import (
    DATA_PARALLEL,
    ONE_PROCESS,
    DataParallel,
    OneProcess,
    PipelineContender,
    bench_model,
    loss_of,
    make_optimizer,
)
from syncline.bench.pipeline_prediction import PipelineCosts, measure_costs, predict_data_parallel, predict_one_process
from syncline.bench.step import WARM_UP_STEPS, describe_link, measure_link
from syncline.bench.step_contenders import BenchModel
from syncline.bench.weird_trick_measurement import HeadSeconds, measure_head
from syncline.bench.weird_trick_prediction import cnn_costs, predict_weird_trick
from syncline.collectives.channel import barrier
from syncline.costs import calibrate
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.divided_head import HeadDivision
from syncline.parallel.division_specs import DivisionSpec, WeirdTrick
from syncline.training.distribute import distribute
from syncline.training.mesh import plan_mesh
from syncline.training.parallel_spec import read_parallel
from syncline.transports import Network
from syncline.world import World, broadcast_object, init

__all__ = ["ParallelBenchPlan", "measure", "parallel_table", "read_model"]

DTENSOR = "DTensor"
MAX_DIFFERENCE = 1e-3
"""The largest accepted difference of weights, relative to how far training moved them. Rounding: about 1e-6 a step."""
HEAD_WIDTH = 64
"""The width of an attention head of `blocks`."""
SEQUENCE = 64
"""The length of a sequence of `blocks`."""


class AttentionBlock(nn.Module):
    """A transformer block whose attention has as many heads as its projections have features for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            each(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return output


class Blocks(nn.Module):
    """Transformer blocks on sequences of vectors, and a head of ten classes for each position."""

    tensor_plan = {  # noqa: RUF012 (it is read only)
        **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"), "columns"),
        **dict.fromkeys(("blocks.*.out", "blocks.*.down"), "rows"),
    }

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(AttentionBlock(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(x))
        return output


def read_model(name: str, width: int, layers: int, batch: int) -> BenchModel:
    """`blocks`, or a model of `syncline bench pipeline`."""
    if name != "blocks":
        return bench_model(name, width, layers, batch)
    if width % HEAD_WIDTH:
        raise SpecError(f"--width {width}: blocks has heads of {HEAD_WIDTH}; take a multiple of {HEAD_WIDTH}")

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, SEQUENCE, width, generator=generator)
        return x, torch.randint(10, (batch, SEQUENCE), generator=generator)

    about = f"{layers} transformer blocks of width {width}, {SEQUENCE} positions, batch {batch}"
    return BenchModel(about, lambda: Blocks(width, layers), draw)


@dataclass(frozen=True)
class ParallelBenchPlan:
    """The options of the benchmark."""

    out: str
    plans: list[str] = field(default_factory=lambda: ["tensor(2)"])
    model: str = "blocks"
    width: int = 512
    layers: int = 2
    batch: int = 16
    against: list[str] = field(default_factory=list)
    repeats: int = 5
    turns: int = 20

    @property
    def contenders(self) -> list[str]:
        """Names of all contenders."""
        return [*self.plans, DATA_PARALLEL, ONE_PROCESS, *([DTENSOR] if self.against else [])]

    def first_model(self) -> nn.Module:
        """The model with its first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return read_model(self.model, self.width, self.layers, self.batch).model()

    def check(self, workers: int) -> None:
        """Refuse impossible settings with a sentence, before a process starts."""
        check_options(width=self.width, layers=self.layers, batch=self.batch, rounds=self.repeats, turns=self.turns)
        if workers < 2:
            raise SpecError(f"-n {workers}: give at least 2 ranks")
        if self.batch % workers:
            raise SpecError(f"--batch {self.batch}: take a multiple of {workers}, so that each worker has as much")
        if self.against not in ([], ["dtensor"]):
            raise SpecError(f"--against {','.join(self.against)}: the only baseline is dtensor")
        model = self.first_model()
        if self.against and not isinstance(model, Blocks):
            raise IncompatibleError(f"--against dtensor: its plan is that of --model blocks, not of {self.model}")
        for text in self.plans:
            plan_mesh(model, read_division(text), workers)


def read_division(text: str) -> Sequence[DivisionSpec]:
    """The divisions of a plan, which has no pipeline and no strategy."""
    plan = read_parallel(text)
    if plan.pipeline is not None or plan.strategy is not None or not plan.divisions:
        raise SpecError(f"--plan {text!r}: a plan divides layers, as tensor(2) does; see bench pipeline for pipelines")
    return plan.divisions


def measure(plan: ParallelBenchPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    lab = os.environ.get("SYNCLINE_LAB", "")
    with init(transport="torch_dist") as world, quiet_machine(), ExitStack() as stack:
        if plan.against:
            from syncline.bench.baselines import process_group

            stack.enter_context(process_group(world))
        link = measure_link(world, lab)
        document = _Comparison(world, plan).run()
        if world.rank == 0:
            about = {"hosts": list(world.hosts), "lab": lab, "link": link}
            Path(plan.out).write_text(json.dumps({**document, **about}, indent=1))


class DividedContender(PipelineContender):
    """Each worker trains its part of the layers on its share of the batch."""

    def __init__(self, name: str, world: World, model: nn.Module) -> None:
        super().__init__(name, world, model)
        self.optimizer = make_optimizer(list(model.parameters()))
        self.run = distribute(model, self.optimizer, parallel=name)
        mesh = world.mesh
        self.mesh = str(mesh)
        _, data, shared, _ = mesh.position(world.rank)
        self._share, self._shares = data * mesh.shared + shared, mesh.data * mesh.shared

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = (each.tensor_split(self._shares)[self._share] for each in batch)
        torch.autograd.backward(loss_of(self.model(x), y))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def sent_bytes(self) -> int:
        return self.run.stats.bytes_wire

    def close(self) -> None:
        self.run.close()


class DTensorContender(PipelineContender):
    """The same plan with torch's `parallelize_module`."""

    def __init__(self, name: str, world: World, model: nn.Module) -> None:
        from syncline.bench.baselines.dtensor import parallelize

        super().__init__(name, world, model)
        assert isinstance(model, Blocks)
        self._undivided = copy.deepcopy(model)
        """It takes the weights at the end."""
        parallelize(model, model.tensor_plan, world.size)
        self._optimizer = make_optimizer(list(model.parameters()))

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        torch.autograd.backward(loss_of(self.model(x), y))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        from syncline.bench.baselines.dtensor import whole_parameters

        with torch.no_grad():
            for parameter, value in zip(self._undivided.parameters(), whole_parameters(self.model), strict=True):
                parameter.copy_(value)
        self.model = self._undivided


class _Comparison:
    """All contenders, and their times."""

    def __init__(self, world: World, plan: ParallelBenchPlan) -> None:
        self.world, self.plan = world, plan
        self.signals = world.group()
        self.bench_model = read_model(plan.model, plan.width, plan.layers, plan.batch)
        self.network: Network = calibrate(world.everyone.channel).network()
        self.first = plan.first_model()
        self.costs = self._measure_costs()
        self.head_seconds = {name: self._measure_head(spec) for name, spec in self._weird_tricks().items()}
        self.contenders = {name: self._contender(name) for name in plan.contenders}
        self.memory = {name: _parameter_bytes(each.model) for name, each in self.contenders.items()}
        self.times: dict[str, list[float]] = {name: [] for name in self.contenders}

    def run(self) -> dict[str, Any]:
        """Measure; return the document."""
        plan = self.plan
        for number in range(WARM_UP_STEPS):
            self._run_turn(number)
        for own in self.times.values():
            own.clear()
        before = {name: each.sent_bytes for name, each in self.contenders.items()}
        turns = plan.repeats * plan.turns
        for number in range(turns):
            self._run_turn(WARM_UP_STEPS + number)
            if (number + 1) % plan.turns == 0:
                self._report(f"repeat {(number + 1) // plan.turns} of {plan.repeats}")
        channel = self.signals.channel
        self.times = {name: over_ranks(channel, own, "max") for name, own in self.times.items()}
        sent = {name: (each.sent_bytes - before[name]) / turns for name, each in self.contenders.items()}
        rows = [self._row(name, sent[name]) for name in self.contenders]
        for row, difference in zip(rows, self._differences(), strict=True):
            row["difference"] = difference
        network = {name: getattr(self.network, name) for name in ("latency", "bandwidth", "per_message")}
        return {
            "kind": "parallel",
            "ranks": self.world.size,
            "plan": asdict(plan),
            "about": self.bench_model.about,
            "network": network,
            "results": rows,
        }

    def _report(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _measure_costs(self) -> PipelineCosts:
        self._report("profiling the model")
        barrier(self.signals.channel)
        share = self.plan.batch // self.world.size
        batch = self.bench_model.batch(torch.Generator().manual_seed(0))
        own = asdict(
            measure_costs(
                copy.deepcopy(self.first), batch, loss_of, make_optimizer, micro_batch=share, share=share, splits=False
            )
        )
        return PipelineCosts.mean(self._gather_values(own))

    def _weird_tricks(self) -> dict[str, WeirdTrick]:
        """The plans that are one weird trick over all workers: their times are predicted."""
        specs = {name: read_division(name)[0] for name in self.plan.plans}
        return {
            name: spec
            for name, spec in specs.items()
            if isinstance(spec, WeirdTrick) and spec.size in (None, self.world.size)
        }

    def _measure_head(self, spec: WeirdTrick) -> HeadSeconds:
        model, share = copy.deepcopy(self.first), self.plan.batch // self.world.size
        x, y = self.bench_model.batch(torch.Generator().manual_seed(0))
        divisions = self._head_divisions(spec, model)
        return measure_head(model, divisions, (x[:share], y[:share]), loss_of, self.signals)

    def _head_divisions(self, spec: WeirdTrick, model: nn.Module) -> list[HeadDivision]:
        return [each for each in spec.divisions(model, self.world.size) if isinstance(each, HeadDivision)]

    def _gather_values(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        return [broadcast_object(value, rank, group=self.signals) for rank in range(self.world.size)]

    def _contender(self, name: str) -> PipelineContender:
        model = copy.deepcopy(self.first)
        if name == ONE_PROCESS:
            return OneProcess(name, self.world, model)
        if name == DATA_PARALLEL:
            return DataParallel(name, self.world, model)
        if name == DTENSOR:
            return DTensorContender(name, self.world, model)
        return DividedContender(name, self.world, model)

    def _run_turn(self, number: int) -> None:
        """One step of every contender."""
        batch, now = self.bench_model.batch(torch.Generator().manual_seed(number)), self.world.runtime.now
        for name in sorted(self.contenders, key=lambda name: random.Random(f"{number} {name}").random()):
            barrier(self.signals.channel)
            start = now()
            self.contenders[name].step(batch)
            self.times[name].append(now() - start)

    def _row(self, name: str, sent: float) -> dict[str, Any]:
        own, contender = self.times[name], self.contenders[name]
        return {
            "contender": name,
            "mesh": contender.mesh if isinstance(contender, DividedContender) else None,
            "seconds": own,
            "time": asdict(summarize(own)),
            "speedup": asdict(ratios(self.times[DATA_PARALLEL], own)),
            "to_dtensor": asdict(ratios(own, self.times[DTENSOR])) if DTENSOR in self.times else None,
            "sent_bytes": None if name == DTENSOR else self._gather_values(sent),
            "parameter_bytes": self._gather_values(self.memory[name]),
            "predicted": self._predict(name),
        }

    def _predict(self, name: str) -> dict[str, float] | None:
        """The predicted seconds of a step, and the bytes that a worker sends; None for what has no prediction."""
        workers, share = self.world.size, self.plan.batch // self.world.size
        if name == ONE_PROCESS:
            return {"step_s": predict_one_process(self.costs, self.plan.batch), "sent_bytes": 0.0}
        if name == DATA_PARALLEL:
            nbytes = sum(layer.parameter_bytes for layer in self.costs.profile.layers)
            return {
                "step_s": predict_data_parallel(self.costs, workers, share, self.network),
                "sent_bytes": 2 * (workers - 1) / workers * nbytes,
            }
        spec = self._weird_tricks().get(name)
        if spec is None:
            return None
        cnn = cnn_costs(self.costs, self._head_divisions(spec, self.first), share)
        seconds = self.head_seconds[name]
        measured = seconds if seconds.is_complete(cnn.layout.entries) else None
        found = predict_weird_trick(cnn, share, spec.scheme, self.network, measured)
        return {"step_s": found.step_s, "sent_bytes": float(found.bytes)}

    def _differences(self) -> list[float]:
        """The distance of each contender's weights from those of one process, relative to how far they have moved."""
        for contender in self.contenders.values():
            contender.close()
        alone = list(self.contenders[ONE_PROCESS].model.parameters())
        way = _distance(alone, list(self.first.parameters())) or 1.0
        found = [_distance(list(each.model.parameters()), alone) / way for each in self.contenders.values()]
        self.signals.close()
        return found


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return math.sqrt(sum(float((a.detach() - b.detach()).double().square().sum()) for a, b in pairs))


def _parameter_bytes(model: nn.Module) -> int:
    """The bytes of this worker's parameters."""
    local = [getattr(each, "_local_tensor", each) for each in model.parameters()]
    return sum(each.numel() * each.element_size() for each in local)


# The table.


def parallel_table(document: dict[str, Any]) -> str:
    """A table of step times, bytes and memory, predicted and measured."""
    plan, network = document["plan"], document["network"]
    lines = [
        f"divided layers on {document['ranks']} workers, {describe_place(document)}: {document['about']}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals",
        f"network: latency {1e6 * network['latency']:.0f} µs, {network['bandwidth'] / 1e6:.4g} MB/s, "
        f"{1e6 * network['per_message']:.1f} µs per message",
        *([describe_link(document["link"])] if document["link"] else []),
        *(f"{row['contender']}: {row['mesh']}" for row in document["results"] if row["mesh"]),
        "",
        *_rows(document),
        "",
        *_remarks(document["results"]),
    ]
    return "\n".join(lines)


def _rows(document: dict[str, Any]) -> Iterator[str]:
    rows = document["results"]
    width = max(len(row["contender"]) for row in rows)
    torch_too = rows[0]["to_dtensor"] is not None
    yield (
        f"{'':{width}} {'step ms':>24} {'predicted':>9} {'÷ it':>5} {'sent MB':>8} {'predicted':>9} "
        f"{'parameters MB':>13} {DATA_PARALLEL + ' ÷ it':>22}" + (f" {'÷ ' + DTENSOR:>21}" if torch_too else "")
    )
    for row in rows:
        step, predicted = Summary(**row["time"]).scaled(1e3), row["predicted"]
        cells = f"{row['contender']:{width}} {step.text('.4g'):>24}"
        cells += (
            f" {1e3 * predicted['step_s']:9.4g} {step.median / 1e3 / predicted['step_s']:5.2f}"
            if predicted
            else f" {'':15}"
        )
        cells += f" {max(row['sent_bytes']) / 1e6:8.3f}" if row["sent_bytes"] is not None else f" {'':8}"
        cells += f" {predicted['sent_bytes'] / 1e6:9.3f}" if predicted else f" {'':9}"
        cells += f" {max(row['parameter_bytes']) / 1e6:13.3f} {Summary(**row['speedup']).text('.3f'):>22}"
        yield (cells + (f" {Summary(**row['to_dtensor']).text('.3f'):>21}" if torch_too else "")).rstrip()


def _remarks(rows: list[dict[str, Any]]) -> Iterator[str]:
    other = next(row for row in rows if row["contender"] == DATA_PARALLEL)
    for row in rows:
        if row["mesh"] and row["predicted"]:
            measured = other["time"]["median"] / row["time"]["median"]
            predicted = other["predicted"]["step_s"] / row["predicted"]["step_s"]
            yield (
                f"{DATA_PARALLEL} ÷ {row['contender']}: {measured:.3g} measured, {predicted:.3g} predicted "
                f"({100 * (measured / predicted - 1):+.0f} %)"
            )
    far = {row["contender"]: row["difference"] for row in rows if row["difference"] > MAX_DIFFERENCE}
    if far:
        texts = ", ".join(f"{name} by {share:.2g}" for name, share in far.items())
        yield f"weights afterwards: they DIFFER from those of one process, as a share of their way: {texts}"
    else:
        worst = max(row["difference"] for row in rows)
        yield f"weights afterwards: those of one process, within {worst:.1g} of their way"


if __name__ == "__main__":
    measure(ParallelBenchPlan(**json.loads(sys.argv[1])))
