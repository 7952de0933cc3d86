"""Workers that are slow now and then, or for good: who still reaches the target soon?

The same training with each strategy in turn, on real processes that sleep what a sample takes, so that two processors
carry four workers; beside it what the simulator says of the same run.

```text
wandering   worker 0 ████                ████           4 times slower, for eight steps' time, then the next one
            worker 1     ████                ████
lasting     worker 3 ████████████████████████████       for good
equal       nobody
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

from syncline.bench.race.reading import RanRun, read_run
from syncline.bench.stats import ratios, summarize
from syncline.errors import SpecError
from syncline.specs import nearest
from syncline.training.settings import Settings

if TYPE_CHECKING:
    from syncline.bench.race.arena import Arena
    from syncline.training.stragglers import Slow

__all__ = ["SCENARIOS", "StragglersPlan", "measure", "table"]

LATENCY_S, BYTES_PER_S = 3e-4, 1e9
"""What the simulator takes for the messages between processes of one machine; a step's sleep is far longer."""
AWHILE = 8
"""Steps' times that a wandering slowness stays with one worker."""
LONGEST = 4000
"""Steps' times for which the wandering is laid out."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StragglersPlan:
    """What to measure."""

    out: str
    workload: str = "digits"
    entries: tuple[str, ...] = ("bsp", "ssp(slack=3)", "downpour(rule='sgd(0.125)', prefetch=False)")
    """The first is what the others are compared with. All three are plain SGD: downpour's pushes are not averaged, so
    that four workers have a quarter of the rate each."""
    scenarios: tuple[str, ...] = ("wandering", "lasting", "equal")
    workers: int = 4
    seeds: int = 5
    factor: float = 4.0
    step: float = 0.04
    """Seconds that a step takes a worker that is not slow."""
    batch: int = 8
    learning_rate: float = 0.5
    momentum: float = 0.0
    """The same for all: what momentum a strategy bears is another question."""
    target: float = 0.95
    evaluate_every: int = 4
    epochs: int = 40
    simulate: bool = False
    """Only on the simulator."""
    limit: float = 300.0
    """Seconds after which a run counts as never through."""

    def check(self) -> None:
        """Refuse what cannot be measured."""
        from syncline.bench.race.field import build_entrant
        from syncline.workloads import build

        for name in self.scenarios:
            if name not in SCENARIOS:
                raise SpecError(f"unknown scenario {name!r}; {nearest(name, list(SCENARIOS))}")
        if not self.entries or not self.scenarios:
            raise SpecError("at least one entry and one scenario: --entries 'bsp;ssp(slack=3)' --scenarios lasting")
        for spec in self.entries:
            build_entrant(spec)
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

    span = AWHILE * plan.step
    return [
        Slow(number % plan.workers, plan.factor, number * span, (number + 1) * span)
        for number in range(LONGEST // AWHILE)
    ]


def _lasting(plan: StragglersPlan) -> list[Slow]:
    from syncline.training.stragglers import Slow

    return [Slow(plan.workers - 1, plan.factor)]


def _equal(plan: StragglersPlan) -> list[Slow]:
    return []


SCENARIOS: dict[str, Callable[[StragglersPlan], list[Slow]]] = {
    "wandering": _wandering,
    "lasting": _lasting,
    "equal": _equal,
}


def measure(plan: StragglersPlan, say: Say) -> dict[str, Any]:
    """Run everything, in an order drawn for each seed; seconds to the target, infinite where it was not reached."""
    from syncline.bench.race.arena import ProcessArena, SimulatedArena
    from syncline.transports import Network

    arenas: dict[str, Arena] = {"simulated": SimulatedArena(Network(latency=LATENCY_S, bandwidth=BYTES_PER_S))}
    if not plan.simulate:
        arenas["measured"] = ProcessArena()
    found: dict[str, Any] = {}
    for scenario in plan.scenarios:
        rows: dict[str, dict[str, list[float]]] = {spec: {way: [] for way in arenas} for spec in plan.entries}
        for way, arena in arenas.items():
            for seed in range(1, plan.seeds + 1):
                order = list(plan.entries)
                random.Random(f"{scenario}{seed}").shuffle(order)
                for spec in order:
                    seconds = _run(plan, scenario, spec, seed, way, arena)
                    rows[spec][way].append(seconds)
                    say(f"{scenario}, {spec}, seed {seed}, {way}: {seconds:.2f} s")
        found[scenario] = rows
    document = {"plan": asdict(plan), "seconds": found}
    Path(plan.out).write_text(json.dumps(document, indent=1))
    return document


def _run(plan: StragglersPlan, scenario: str, spec: str, seed: int, way: str, arena: Arena) -> float:
    from syncline.bench.race.entrant import Entrant
    from syncline.workloads import build

    folder = Path(plan.out).parent / scenario / f"{_file(spec)}-{way}-seed{seed}"
    folder.mkdir(parents=True)
    workload = build(plan.workload)
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
    entrant = Entrant(
        workload=plan.workload,
        settings=settings,
        folder=str(folder),
        seconds_a_sample=plan.step / plan.batch,
        slow=tuple(SCENARIOS[scenario](plan)),
    )
    result = arena.run(entrant, plan.workers, _Limit(plan.limit))
    events = read_run(folder)[2]
    ran = RanRun(str(folder), "race", spec, plan.workers, seed, result.status, result.reason, None)
    ran.events = events
    hit = ran.hit(plan.target, workload.higher_is_better)
    if result.status != "finished":
        raise SpecError(f"{spec} ({scenario}, seed {seed}, {way}) {result.status}: {result.reason}; see {folder}")
    return math.inf if hit is None else hit.elapsed


class _Limit:
    """Ends a run that takes too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None

    def __call__(self) -> str | None:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        return f"it took more than {self._seconds:g} s" if now - self._began > self._seconds else None


def _file(spec: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in spec).strip("-")


def table(document: dict[str, Any]) -> str:
    """Seconds to the target, and how many times those of the first entry they are: measured, and as simulated."""
    plan = document["plan"]
    lines = [
        f"{plan['workload']} to {plan['target']:g} on {plan['workers']} workers, {1000 * plan['step']:.0f} ms a step, "
        f"slow ones {plan['factor']:g} times; {plan['seeds']} seeds; × is of {plan['entries'][0]}",
        f"{'':<46}{'measured, s':>20}{'×':>22}{'simulated, s':>20}{'×':>22}",
    ]
    for scenario, rows in document["seconds"].items():
        lines.append(scenario)
        base = rows[plan["entries"][0]]
        for spec, own in rows.items():
            told = [_told(own.get(way), base.get(way)) for way in ("measured", "simulated")]
            lines.append(f"  {spec:<44}" + "".join(f"{seconds:>20}{ratio:>22}" for seconds, ratio in told))
    return "\n".join(lines)


def _told(own: Sequence[float] | None, base: Sequence[float] | None) -> tuple[str, str]:
    if own is None or base is None:
        return "–", "–"
    if any(math.isinf(each) for each in (*own, *base)):
        return str(summarize(own)), "not reached"
    return str(summarize(own)), str(ratios(own, base))
