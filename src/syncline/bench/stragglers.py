"""Compares the time to a target if some workers are slow.

The same training runs with each strategy, on real processes and on the simulator. Computation is replaced by sleeping,
so that two cores are enough for four workers.

```text
wandering   worker 0 ████                ████           4 times slower for eight steps, then the next worker
            worker 1     ████                ████
lasting     worker 3 ████████████████████████████       4 times slower for the whole run
equal       no slow worker
```
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.bench.measuring import ratios, summarize
from syncline.bench.race.plan import RaceEntry
from syncline.bench.runlog import read_run
from syncline.errors import SpecError
from syncline.specs import nearest
from syncline.training.settings import Settings

if TYPE_CHECKING:
    from syncline.bench.race.runner import TrainingRunner
    from syncline.training.stragglers import Slow

__all__ = ["SCENARIOS", "StragglersPlan", "measure", "table"]

LATENCY_S, BYTES_PER_S = 3e-4, 1e9
"""Simulated network between processes of one machine. A step takes far longer."""
SLOW_STEPS = 8
"""In the wandering scenario, a worker is slow for the time of this many steps."""
MAX_WANDERING_STEPS = 4000
"""The wandering scenario covers the time of this many steps."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StragglersPlan:
    """What to measure."""

    out: str
    workload: str = "digits"
    entries: tuple[str, ...] = ("bsp", "ssp(slack=3)", "downpour(rule='sgd(0.125)', prefetch=False)")
    """The first is the baseline of the others. All three are plain SGD. Downpour does not average pushes, so each of
    four workers has a quarter of the rate."""
    scenarios: tuple[str, ...] = ("wandering", "lasting", "equal")
    workers: int = 4
    seeds: int = 5
    factor: float = 4.0
    step: float = 0.04
    """Seconds of a step on a worker that is not slow."""
    batch: int = 8
    learning_rate: float = 0.5
    momentum: float = 0.0
    """The same for all strategies."""
    target: float = 0.95
    evaluate_every: int = 4
    epochs: int = 40
    simulate: bool = False
    """Run only on the simulator."""
    limit: float = 300.0
    """Seconds after which a run counts as hung."""

    def check(self) -> None:
        """Refuse impossible settings."""
        from syncline.bench.race.entries import build_race_strategy
        from syncline.workloads import build

        for name in self.scenarios:
            if name not in SCENARIOS:
                raise SpecError(f"unknown scenario {name!r}; {nearest(name, list(SCENARIOS))}")
        if not self.entries or not self.scenarios:
            raise SpecError("at least one entry and one scenario: --entries 'bsp;ssp(slack=3)' --scenarios lasting")
        for spec in self.entries:
            build_race_strategy(spec)
        build(self.workload).check_target(self.target)
        if self.batch < 1 or not 0 < self.learning_rate < math.inf:
            raise SpecError(
                f"--batch {self.batch} --learning-rate {self.learning_rate:g}: at least one sample, and a finite rate "
                "above 0"
            )
        if self.workers < 2 or self.seeds < 1 or not self.factor > 1 or not self.step > 0:
            raise SpecError(
                f"at least two workers and one seed, a factor above 1 and a step above 0 s (-n {self.workers}, "
                f"--seeds {self.seeds}, --factor {self.factor:g}, --step {self.step:g})"
            )


def _wandering(plan: StragglersPlan) -> list[Slow]:
    from syncline.training.stragglers import Slow

    span = SLOW_STEPS * plan.step
    return [
        Slow(number % plan.workers, plan.factor, number * span, (number + 1) * span)
        for number in range(MAX_WANDERING_STEPS // SLOW_STEPS)
    ]


def _lasting(plan: StragglersPlan) -> list[Slow]:
    from syncline.training.stragglers import Slow

    return [Slow(plan.workers - 1, plan.factor)]


SCENARIOS: dict[str, Callable[[StragglersPlan], list[Slow]]] = {
    "wandering": _wandering,
    "lasting": _lasting,
    "equal": lambda plan: [],
}


def measure(plan: StragglersPlan, say: Say) -> dict[str, Any]:
    """Run everything, in random order for each seed. Return seconds to the target, infinite if it was not reached."""
    from syncline.bench.race.runner import ProcessRunner, SimulatedRunner
    from syncline.transports import Network

    runners: dict[str, TrainingRunner] = {
        "simulated": SimulatedRunner(Network(latency=LATENCY_S, bandwidth=BYTES_PER_S))
    }
    if not plan.simulate:
        runners["measured"] = ProcessRunner()
    results: dict[str, Any] = {}
    for scenario in plan.scenarios:
        rows: dict[str, dict[str, list[float]]] = {spec: {way: [] for way in runners} for spec in plan.entries}
        for way, runner in runners.items():
            for seed in range(1, plan.seeds + 1):
                order = list(plan.entries)
                random.Random(f"{scenario}{seed}").shuffle(order)
                for spec in order:
                    seconds = _run(plan, scenario, spec, seed, way, runner)
                    rows[spec][way].append(seconds)
                    say(f"{scenario}, {spec}, seed {seed}, {way}: {seconds:.2f} s")
        results[scenario] = rows
    document = {"plan": asdict(plan), "seconds": results}
    Path(plan.out).write_text(json.dumps(document, indent=1))
    return document


def _run(plan: StragglersPlan, scenario: str, spec: str, seed: int, way: str, runner: TrainingRunner) -> float:
    from syncline.training.worker import TrainPlan
    from syncline.workloads import build

    folder = Path(plan.out).parent / scenario / f"{RaceEntry(name=spec).slug}-{way}-seed{seed}"
    folder.mkdir(parents=True)
    settings = Settings(
        strategy=spec,
        batch=plan.batch,
        epochs=plan.epochs,
        learning_rate=plan.learning_rate,
        momentum=plan.momentum,
        target=plan.target,
        evaluate_every=plan.evaluate_every,
        seed=seed,
        checkpoint_every=0,
    )
    worker_plan = TrainPlan(
        workload=plan.workload,
        settings=settings,
        folder=str(folder),
        seconds_a_sample=plan.step / plan.batch,
        slow=tuple(SCENARIOS[scenario](plan)),
    )
    stop_s = time.monotonic() + plan.limit
    result = runner.run(
        worker_plan,
        plan.workers,
        lambda: f"it took more than {plan.limit:g} s" if time.monotonic() > stop_s else None,
    )
    if result.status != "finished":
        raise SpecError(f"{spec} ({scenario}, seed {seed}, {way}) {result.status}: {result.reason}; see {folder}")
    return read_run(folder).time_to_target(plan.target, build(plan.workload).higher_is_better)


def table(document: dict[str, Any]) -> str:
    """Seconds to the target, and their ratios to the first entry: measured and simulated."""
    plan = document["plan"]
    lines = [
        f"{plan['workload']} to {plan['target']:g} on {plan['workers']} workers, {1000 * plan['step']:.0f} ms a step, "
        f"slow ones {plan['factor']:g} times; {plan['seeds']} seeds; × is relative to {plan['entries'][0]}",
        f"{'':<46}{'measured, s':>20}{'×':>22}{'simulated, s':>20}{'×':>22}",
    ]
    for scenario, rows in document["seconds"].items():
        lines.append(scenario)
        base = rows[plan["entries"][0]]
        for spec, own in rows.items():
            cells = [_cells(own.get(way), base.get(way)) for way in ("measured", "simulated")]
            lines.append(f"  {spec:<44}" + "".join(f"{seconds:>20}{ratio:>22}" for seconds, ratio in cells))
    return "\n".join(lines)


def _cells(own: Sequence[float] | None, base: Sequence[float] | None) -> tuple[str, str]:
    if own is None or base is None:
        return "–", "–"
    if any(math.isinf(each) for each in (*own, *base)):
        return str(summarize(own)), "not reached"
    return str(summarize(own)), str(ratios(own, base))
