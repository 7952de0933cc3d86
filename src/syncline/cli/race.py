"""Compare synchronisation strategies: which one reaches the target first here, and why. One page shows the result.

examples:
  syncline race digits -n 4                                     five entries, three seeds; about two minutes
  syncline race digits -n 4 --simulate 100mbit                  twelve entries on simulated slow links; a minute
  syncline race digits -n 4 --entries all                       all kinds of strategies and codecs; many minutes
  syncline race fashion -n 4 --lab 100mbit                      on four emulated hosts with slow links (needs root)
  syncline race workload.py -n 2 --target 0.9                   your own: syncline new workload.py makes a template
  syncline race digits -n 4 --entries mine.toml --seeds 5
  syncline race digits -n 4 --tune 3                            an equal budget of three learning rates for each entry
  syncline race digits -n 4 --scaling weak                      on 1, 2 and 4 workers
  syncline race digits -n 16 --simulate 1gbit                   on simulated workers, in virtual time
  syncline race --resume runs/race-digits-…                     go on where it was stopped

An entry of --entries is written [[entry]], with strategy, codec, collective, learning_rate, scaling, warmup, decay,
momentum, engine and name, all optional. Ctrl-C ends the race and keeps what is done; the report is
written all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.bench.race.plan import Place, Plan, Tuning
from syncline.bench.race.reading import Race, read_race
from syncline.cli.placement import add_placement_options
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.lab import Lab, parse_lab
from syncline.launch.machine import warn_if_oversubscribed
from syncline.training.folder import fresh_name
from syncline.training.progress import duration
from syncline.training.signals import INTERRUPTED_EXIT_CODE
from syncline.training.system import code_digest, code_version

if TYPE_CHECKING:
    from syncline.bench.race.arena import Arena
    from syncline.bench.race.field import Field
    from syncline.workloads.base import Workload

__all__ = ["configure", "run"]

HINTS = {
    **dict.fromkeys(
        ("--strategy", "--strategies", "--codec", "--collective"), "list the entries in a file: --entries FILE.toml"
    ),
    **dict.fromkeys(("--lr", "--learning-rate"), "set it in the entries file, or try 3 for each with --tune 3"),
    "--seed": "write --seeds 1,2,3",
}

ALL = Path("all")
"""What --entries takes in place of a file: every kind of strategy and codec."""
LARGE = 10_000
"""Samples from which an epoch is evaluated several times: the time to target is known to an evaluation."""
RATIO = 3.0
"""Between two learning rates that tuning tries."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument(
        "workload", nargs="?", metavar="WORKLOAD|script.py", help="digits, fashion, …, or your own file"
    )
    add_placement_options(parser, "-n", help={"-n": "number of workers; default 4"})
    parser.set_defaults(ranks=4)
    what = parser.add_argument_group("what is raced")
    what.add_argument(
        "--entries", type=Path, metavar="all|FILE.toml", help="the entries to compare; default: a few that differ most"
    )
    what.add_argument("--seeds", default="3", metavar="N|a,b,…", help="so many, or these; default 3")
    what.add_argument("--target", type=float, help="the validation metric to reach; default: the workload's")
    what.add_argument("--epochs", type=int, help="times over the data, at most; default: the workload's")
    what.add_argument("--batch", type=int, help="samples of each worker in a step; default: the workload's")
    what.add_argument("--evaluate-every", type=float, metavar="EPOCHS", help="default 1; 0.25 for large data")
    what.add_argument(
        "--tune", type=int, default=0, metavar="RATES", help="learning rates to try for each entry; default 0"
    )
    what.add_argument("--tune-epochs", type=int, help="for each of them; default: a third of the epochs")
    what.add_argument("--scaling", choices=("weak", "strong"), help="race on 1, 2, 4 … workers too")
    what.add_argument(
        "--limit", type=float, default=900.0, metavar="SECONDS", help="of a run, then it counts as hung; default 900"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--lab", metavar="100mbit", help="on emulated hosts, one for each worker, at that rate")
    where.add_argument(
        "--simulate", metavar="NETWORK", help="in virtual time: 100mbit, or network(latency=…, bandwidth=…)"
    )
    where.add_argument("--seconds-a-sample", type=float, help="of simulated computing; default: measured here")
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FOLDER", help="the race's folder; default runs/race-WORKLOAD-time")
    files.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the race in that folder")


def run(arguments: argparse.Namespace) -> int:
    """Race; the exit code."""
    from syncline.bench.race.runner import Runner, begin
    from syncline.bench.race.view import View

    if arguments.resume is not None:
        folder = arguments.resume
        _check_alone(arguments)
        race = read_race(folder)
        _same_code(race)
        said = len(race.left())
        _say(f"{folder}: {said} runs left")
    else:
        folder, plan, workload = _new(arguments)
        begin(folder, plan, workload)
        race = read_race(folder)
        _announce(plan, folder, workload)
    complete = False
    try:
        with _arena(race.plan) as arena, View(race) as view:
            complete = Runner(folder, arena, view).run()
    except KeyboardInterrupt:
        _say("stopped")
    except OSError as error:
        _say(f"stopped: {error}")
    return _conclude(folder, complete)


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse options that --resume would ignore: it uses the plan in the folder."""
    parser = argparse.ArgumentParser()
    configure(parser)
    usual = vars(parser.parse_args([]))
    changed = [name for name in usual if name != "resume" and getattr(arguments, name) != usual[name]]
    if changed:
        raise SpecError(
            f"--resume {arguments.resume} goes on with the plan in that folder, and takes no other arguments; leave "
            f"out {', '.join(_option(name) for name in changed)}"
        )


def _option(name: str) -> str:
    """
    >>> _option("tune_epochs"), _option("ranks"), _option("workload")
    ('--tune-epochs', '-n', 'the workload')
    """
    return {"ranks": "-n", "workload": "the workload"}.get(name, f"--{name.replace('_', '-')}")


def _conclude(folder: Path, complete: bool) -> int:
    """Lint, report, and say where it is."""
    from syncline.bench.lint import lint
    from syncline.bench.report import analyse, judge, write_report

    race = read_race(folder)
    ended = [run for run in race.runs if run.status not in ("interrupted", "running")]
    if ended:
        findings = lint(race)
        path = write_report(folder, findings, race)
        for finding in findings if complete else ():
            _say(f"lint, {finding.severity}: {finding.title}: {finding.evidence}")
        print(judge(analyse(race)).text(), file=sys.stderr, flush=True)
        print(path)
    if not complete:
        _say(f"{len(race.left())} of {len(race.plan.runs())} runs are left: syncline race --resume {folder}")
        return INTERRUPTED_EXIT_CODE
    return 0


def _new(arguments: argparse.Namespace) -> tuple[Path, Plan, Workload]:
    from syncline.workloads import ScriptWorkload, build

    if arguments.workload is None:
        raise SpecError("name a workload: syncline race digits -n 4, or a file of your own, or --resume FOLDER")
    if arguments.lab and arguments.simulate:
        raise IncompatibleError("--lab and --simulate are two places; leave one out")
    if arguments.ranks < 1:
        raise SpecError(f"-n {arguments.ranks}: a race takes at least one worker")
    if arguments.tune_epochs is not None and not arguments.tune:
        raise SpecError(f"--tune-epochs {arguments.tune_epochs} belongs to --tune RATES: give both, or none")
    seconds = arguments.seconds_a_sample
    if seconds is not None and (arguments.simulate is None or not 0 <= seconds < math.inf):
        raise SpecError(f"--seconds-a-sample {seconds}: a number from 0 on, together with --simulate NETWORK")
    workload = build(arguments.workload)
    if isinstance(workload, ScriptWorkload):
        workload.check()
    field = _field(arguments, workload)
    plan = _plan(arguments, workload, field)
    folder = arguments.out or Path("runs") / f"race-{fresh_name(workload.spec)}"
    return folder, plan, workload


def _field(arguments: argparse.Namespace, workload: Workload) -> Field:
    from syncline.bench.race.field import default_field, read_field, short_field

    simulated, one_host = arguments.simulate is not None, arguments.lab is None
    if arguments.entries is None:
        return short_field(workload, simulated, one_host)
    if arguments.entries == ALL:
        return default_field(workload, simulated, one_host)
    return read_field(arguments.entries, workload, simulated, one_host)


def _plan(arguments: argparse.Namespace, workload: Workload, field: Field) -> Plan:
    from syncline.bench.race.pace import seconds_a_sample

    usual = workload.defaults
    target = usual.target if arguments.target is None else arguments.target
    if target is None:
        raise SpecError(f"{workload} has no target of its own: give one with --target ({workload.metric})")
    samples = workload.splits().sizes()["train"]
    if samples < arguments.ranks:
        raise IncompatibleError(f"{workload} has {samples} samples to train on, too few for {arguments.ranks} workers")
    epochs = _at_least("--epochs", usual.epochs if arguments.epochs is None else arguments.epochs)
    batch = _at_least("--batch", usual.batch if arguments.batch is None else arguments.batch)
    usual_every = 0.25 if samples >= LARGE else 1.0
    every = usual_every if arguments.evaluate_every is None else arguments.evaluate_every
    if not 0 < every <= epochs:
        raise SpecError(f"--evaluate-every {every}: epochs, or parts of one, above 0 and at most {epochs}")
    if not arguments.limit > 0:
        raise SpecError(f"--limit {arguments.limit}: seconds, above 0")
    place = _place(arguments)
    plan = Plan(
        workload=workload.spec,
        workers=arguments.ranks,
        entries=field.entries,
        seeds=_seeds(arguments.seeds),
        target=workload.check_target(target),
        metric=workload.metric,
        higher_is_better=workload.higher_is_better,
        epochs=epochs,
        batch=batch,
        evaluate_samples=max(1, round(every * samples)),
        limit=arguments.limit,
        place=place,
        tuning=_tuning(arguments, epochs),
        scaling=arguments.scaling,
        scaling_workers=_sizes(arguments.ranks) if arguments.scaling else (),
        data=_told(workload),
        skipped=dict(field.skipped),
        command=shlex.join(["syncline", *sys.argv[1:]]),
        code_version=code_version(),
        code_digest=code_digest(),
        created_ms=time.time_ns() // 1_000_000,
    )
    for planned in (*plan.tuning_runs(), *plan.runs()):
        plan.settings(planned).resolved(workload, planned.workers)  # refuses what cannot be, before anything runs
    if place.kind == "simulated":
        given = arguments.seconds_a_sample
        return replace(plan, seconds_a_sample=seconds_a_sample(workload, batch) if given is None else given)
    return plan


def _place(arguments: argparse.Namespace) -> Place:
    if arguments.simulate is not None:
        from syncline.bench.race.pace import parse_network

        parse_network(arguments.simulate)
        return Place(kind="simulated", detail=arguments.simulate)
    if arguments.lab is None:
        return Place()
    lab = arguments.lab if "@" in arguments.lab else f"{arguments.ranks}@{arguments.lab}"
    hosts, _ = parse_lab(lab)
    if hosts != arguments.ranks:
        raise IncompatibleError(f"--lab {lab} has {hosts} hosts for {arguments.ranks} workers: give each one its own")
    return Place(kind="lab", detail=lab)


def _seeds(text: str) -> tuple[int, ...]:
    """
    >>> _seeds("3"), _seeds("7,8")
    ((1, 2, 3), (7, 8))
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    found = tuple(range(1, numbers[0] + 1)) if len(numbers) == 1 and "," not in text else tuple(numbers)
    if not found or len(set(found)) != len(found) or min(found) < 0:
        raise SpecError(f"--seeds {text}: how many (3), or which (1,2,3), each once")
    return found


def _tuning(arguments: argparse.Namespace, epochs: int) -> Tuning | None:
    rates = arguments.tune
    if not rates:
        return None
    if rates < 2:
        raise SpecError(f"--tune {rates}: at least two learning rates for each entry, or none")
    tuned = _at_least("--tune-epochs", max(1, epochs // 3) if arguments.tune_epochs is None else arguments.tune_epochs)
    factors = tuple(RATIO ** (number - (rates - 1) / 2) for number in range(rates))
    seed = max(_seeds(arguments.seeds)) + 1000
    return Tuning(factors=factors, epochs=tuned, seed=seed)


def _sizes(workers: int) -> tuple[int, ...]:
    """1, 2, 4 … and the number itself.

    >>> _sizes(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({2**power for power in range(workers.bit_length()) if 2**power < workers} | {workers}))


def _at_least(name: str, value: int) -> int:
    if value < 1:
        raise SpecError(f"{name} {value}: at least 1")
    return value


@contextlib.contextmanager
def _arena(plan: Plan) -> Iterator[Arena]:
    from syncline.bench.race.arena import ProcessArena, SimulatedArena
    from syncline.bench.race.pace import parse_network

    if plan.place.kind == "simulated":
        yield SimulatedArena(parse_network(plan.place.detail))
    elif plan.place.kind == "lab":
        with Lab(*parse_lab(plan.place.detail)) as lab:
            if lab.measured is not None:
                rate = f"{lab.measured / 1e6:.1f} Mbit/s"
                _say(f"a lab of {plan.place.detail}, measured {rate}; it adds no latency of its own")
            yield ProcessArena(lab)
    else:
        warn_if_oversubscribed(plan.workers)
        yield ProcessArena()


def _announce(plan: Plan, folder: Path, workload: Workload) -> None:
    from syncline.bench.race.pace import expected_seconds

    runs = len(plan.tuning_runs()) + len(plan.runs())
    takes = duration(expected_seconds(plan, workload))
    _say(f"{len(plan.entries)} entries, {len(plan.seeds)} seeds, {runs} runs, about {takes}")
    _say(f"follow them: syncline watch {folder}")
    for name, reason in plan.skipped.items():
        _say(f"left out: {name}: {reason}")


def _told(workload: Workload) -> dict[str, str]:
    """What must not change while the race goes on: the data, and the file of a script."""
    return {key: str(value) for key, value in workload.describe().items() if key in ("sha256", "script_sha256")}


def _same_code(race: Race) -> None:
    """Another version's times and accuracies do not belong in the same table."""
    from syncline.workloads import build

    plan = race.plan
    told = _told(build(plan.workload))
    changed = [key for key in told if plan.data and plan.data.get(key) != told[key]]
    if changed:
        what = "its script was edited" if "script_sha256" in changed else "its data has changed"
        raise IncompatibleError(f"{race.path} cannot go on: {what} since it began; begin a new race")
    if plan.code_digest != code_digest():
        raise IncompatibleError(
            f"{race.path} was begun with other code ({plan.code_version}, {plan.code_digest}) than this "
            f"({code_version()}, {code_digest()}): finish it with that, or begin a new race"
        )


def _say(text: str) -> None:
    print(f"syncline: {text}", file=sys.stderr, flush=True)
