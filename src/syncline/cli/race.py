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
  syncline race --resume runs/race-digits-…                     continue a race that was stopped

An entry of --entries is written [[entry]], with strategy, codec, collective, learning_rate, scaling, warmup, decay,
momentum, engine and name, all optional. Ctrl-C ends the race; finished runs stay, and their report is written.
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

from syncline.bench.race.plan import RacePlace, RacePlan, RateTuning
from syncline.bench.runlog import RaceRecord, read_race
from syncline.cli.placement import add_placement_options
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.lab import Lab, parse_lab
from syncline.launch.machine import warn_if_oversubscribed
from syncline.training.progress import duration
from syncline.training.run_folder import fresh_name
from syncline.training.signals import INTERRUPTED_EXIT_CODE
from syncline.training.system import code_digest, code_version

if TYPE_CHECKING:
    from syncline.bench.race.entries import RaceEntries
    from syncline.bench.race.predictions import RacePredictions
    from syncline.bench.race.runner import TrainingRunner
    from syncline.workloads.base import Workload

__all__ = ["configure", "run"]

HINTS = {
    **dict.fromkeys(
        ("--strategy", "--strategies", "--codec", "--collective"), "list the entries in a file: --entries FILE.toml"
    ),
    **dict.fromkeys(("--lr", "--learning-rate"), "set it in the entries file, or try 3 for each with --tune 3"),
    "--seed": "write --seeds 1,2,3",
}

ALL_ENTRIES = Path("all")
"""The value of --entries for every kind of strategy and codec."""
LARGE_DATA_SAMPLES = 10_000
"""From this size on there are several evaluations per epoch: the time to target is known to one evaluation."""
TUNING_RATIO = 3.0
"""Between two learning rates that tuning tries."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", nargs="?", metavar="WORKLOAD|script.py", help="digits, fashion, …, or your own file"
    )
    add_placement_options(parser, "-n", help={"-n": "number of workers; default 4"})
    parser.set_defaults(ranks=4)
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--entries", type=Path, metavar="all|FILE.toml", help="the entries to compare; default: a few that differ most"
    )
    what.add_argument("--seeds", default="3", metavar="N|a,b,…", help="how many, or which; default 3")
    what.add_argument("--target", type=float, help="the validation metric to reach; default: the workload's")
    what.add_argument("--epochs", type=int, help="at most; default: the workload's")
    what.add_argument("--batch", type=int, help="samples per worker and step; default: the workload's")
    what.add_argument("--evaluate-every", type=float, metavar="EPOCHS", help="default 1; 0.25 for large data")
    what.add_argument(
        "--tune", type=int, default=0, metavar="RATES", help="learning rates to try for each entry; default 0"
    )
    what.add_argument("--tune-epochs", type=int, help="of each trial; default: a third of the epochs")
    what.add_argument("--scaling", choices=("weak", "strong"), help="race on 1, 2, 4 … workers too")
    what.add_argument(
        "--limit", type=float, default=900.0, metavar="SECONDS", help="after which a run counts as hung; default 900"
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--lab", metavar="100mbit", help="on emulated hosts, one for each worker, with links of this rate"
    )
    where.add_argument(
        "--simulate", metavar="NETWORK", help="in virtual time: 100mbit, or network(latency=…, bandwidth=…)"
    )
    where.add_argument(
        "--seconds-a-sample", type=float, help="computation of a simulated worker; default: measured here"
    )
    where.add_argument(
        "--machine", metavar="machine.json", help="for predictions of steps: what syncline bench machine measured here"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FOLDER", help="the race's folder; default runs/race-WORKLOAD-time")
    files.add_argument("--resume", type=Path, metavar="FOLDER", help="continue the race in that folder")


def run(arguments: argparse.Namespace) -> int:
    """Run the race, write the report; return the exit code."""
    from syncline.bench.race.progress import RaceProgress
    from syncline.bench.race.runner import RaceRunner, start_race

    if arguments.resume is not None:
        folder = arguments.resume
        _check_alone(arguments)
        race = read_race(folder)
        _check_unchanged(race)
        _say(f"{folder}: {len(race.remaining())} runs left")
    else:
        folder, plan, workload = _new(arguments)
        start_race(folder, plan, workload, _predict(arguments, plan, workload))
        race = read_race(folder)
        _announce(plan, folder, workload)
    complete = False
    try:
        with _runner(race.plan) as runner, RaceProgress(race) as progress:
            complete = RaceRunner(folder, runner, progress).run()
    except KeyboardInterrupt:
        _say("stopped")
    except OSError as error:
        _say(f"stopped: {error}")
    return _conclude(folder, complete)


def _predict(arguments: argparse.Namespace, plan: RacePlan, workload: Workload) -> RacePredictions:
    """The step of each entry, from what is known before the race."""
    from syncline.bench.race.predict import predict_race
    from syncline.bench.race.runner import parse_network
    from syncline.planner.machine import MachineMeasurement

    if plan.place.kind == "simulated":
        return predict_race(plan, workload, network=parse_network(plan.place.detail))
    machine = None if arguments.machine is None else MachineMeasurement.read(arguments.machine)
    if machine is not None and machine.workers != plan.workers:
        raise SpecError(
            f"--machine {arguments.machine} was measured with {machine.workers} workers, and the race has "
            f"{plan.workers}: measure again with syncline bench machine -n {plan.workers}"
        )
    return predict_race(plan, workload, machine=machine)


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse options that --resume ignores: it uses the plan in the folder."""
    parser = argparse.ArgumentParser()
    configure(parser)
    usual = vars(parser.parse_args([]))
    changed = [name for name in usual if name != "resume" and getattr(arguments, name) != usual[name]]
    if changed:
        raise SpecError(
            f"--resume {arguments.resume} continues with the plan in that folder, and takes no other arguments; leave "
            f"out {', '.join(_option(name) for name in changed)}"
        )


def _option(name: str) -> str:
    """
    >>> _option("tune_epochs"), _option("ranks"), _option("workload")
    ('--tune-epochs', '-n', 'the workload')
    """
    return {"ranks": "-n", "workload": "the workload"}.get(name, f"--{name.replace('_', '-')}")


def _conclude(folder: Path, complete: bool) -> int:
    """Lint the race, write the report, and print the verdict and the path."""
    from syncline.bench.lint import lint
    from syncline.bench.report import analyse, judge, write_report

    race = read_race(folder)
    if any(run.ended for run in race.runs):
        findings = lint(race)
        path = write_report(folder, findings, race)
        for finding in findings if complete else ():
            _say(f"lint, {finding.severity}: {finding.title}: {finding.evidence}")
        print(judge(analyse(race)).text(), file=sys.stderr, flush=True)
        print(path)
    if not complete:
        _say(f"{len(race.remaining())} of {len(race.plan.runs())} runs are left: syncline race --resume {folder}")
        return INTERRUPTED_EXIT_CODE
    return 0


def _new(arguments: argparse.Namespace) -> tuple[Path, RacePlan, Workload]:
    from syncline.workloads import ScriptWorkload, build

    if arguments.workload is None:
        raise SpecError("name a workload: syncline race digits -n 4, or a file of your own, or --resume FOLDER")
    if arguments.lab and arguments.simulate:
        raise IncompatibleError("--lab and --simulate exclude each other; leave one out")
    if arguments.machine and arguments.simulate:
        raise IncompatibleError("--machine describes real workers, and --simulate has none; leave one out")
    if arguments.ranks < 1:
        raise SpecError(f"-n {arguments.ranks}: a race needs at least one worker")
    if arguments.tune_epochs is not None and not arguments.tune:
        raise SpecError(f"--tune-epochs {arguments.tune_epochs} belongs to --tune RATES: give both, or none")
    seconds = arguments.seconds_a_sample
    if seconds is not None and (arguments.simulate is None or not 0 <= seconds < math.inf):
        raise SpecError(f"--seconds-a-sample {seconds}: a number from 0 on, together with --simulate NETWORK")
    workload = build(arguments.workload)
    if isinstance(workload, ScriptWorkload):
        workload.check()
    plan = _plan(arguments, workload, _entries(arguments, workload))
    folder = arguments.out or Path("runs") / f"race-{fresh_name(workload.spec)}"
    return folder, plan, workload


def _entries(arguments: argparse.Namespace, workload: Workload) -> RaceEntries:
    from syncline.bench.race.entries import all_entries, default_entries, read_entries

    simulated, one_host = arguments.simulate is not None, arguments.lab is None
    if arguments.entries is None:
        return default_entries(workload, simulated, one_host)
    if arguments.entries == ALL_ENTRIES:
        return all_entries(workload, simulated, one_host)
    return read_entries(arguments.entries, workload, simulated, one_host)


def _plan(arguments: argparse.Namespace, workload: Workload, entries: RaceEntries) -> RacePlan:
    from syncline.bench.race.runner import seconds_a_sample

    usual = workload.defaults
    target = usual.target if arguments.target is None else arguments.target
    if target is None:
        raise SpecError(f"{workload} has no default target: set one with --target ({workload.metric})")
    samples = workload.splits().sizes()["train"]
    if samples < arguments.ranks:
        raise IncompatibleError(f"{workload} has {samples} samples to train on, too few for {arguments.ranks} workers")
    epochs = _at_least("--epochs", usual.epochs if arguments.epochs is None else arguments.epochs)
    batch = _at_least("--batch", usual.batch if arguments.batch is None else arguments.batch)
    usual_every = 0.25 if samples >= LARGE_DATA_SAMPLES else 1.0
    every = usual_every if arguments.evaluate_every is None else arguments.evaluate_every
    if not 0 < every <= epochs:
        raise SpecError(f"--evaluate-every {every}: epochs, or parts of one, above 0 and at most {epochs}")
    if not arguments.limit > 0:
        raise SpecError(f"--limit {arguments.limit}: seconds, above 0")
    place = _place(arguments)
    plan = RacePlan(
        workload=workload.spec,
        workers=arguments.ranks,
        entries=entries.entries,
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
        data=_checksums(workload),
        skipped=dict(entries.skipped),
        command=shlex.join(["syncline", *sys.argv[1:]]),
        code_version=code_version(),
        code_digest=code_digest(),
        created_ms=time.time_ns() // 1_000_000,
    )
    for planned in (*plan.tuning_runs(), *plan.runs()):
        plan.settings(planned).resolved(workload, planned.workers)  # refuses impossible settings before anything runs
    if place.kind == "simulated":
        given = arguments.seconds_a_sample
        return replace(plan, seconds_a_sample=seconds_a_sample(workload, batch) if given is None else given)
    return plan


def _place(arguments: argparse.Namespace) -> RacePlace:
    if arguments.simulate is not None:
        from syncline.bench.race.runner import parse_network

        parse_network(arguments.simulate)
        return RacePlace(kind="simulated", detail=arguments.simulate)
    if arguments.lab is None:
        return RacePlace()
    lab = arguments.lab if "@" in arguments.lab else f"{arguments.ranks}@{arguments.lab}"
    hosts, _ = parse_lab(lab)
    if hosts != arguments.ranks:
        raise IncompatibleError(f"--lab {lab} has {hosts} hosts for {arguments.ranks} workers: give each one its own")
    return RacePlace(kind="lab", detail=lab)


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


def _tuning(arguments: argparse.Namespace, epochs: int) -> RateTuning | None:
    rates = arguments.tune
    if not rates:
        return None
    if rates < 2:
        raise SpecError(f"--tune {rates}: at least two learning rates for each entry, or none")
    tuned = _at_least("--tune-epochs", max(1, epochs // 3) if arguments.tune_epochs is None else arguments.tune_epochs)
    factors = tuple(TUNING_RATIO ** (number - (rates - 1) / 2) for number in range(rates))
    seed = max(_seeds(arguments.seeds)) + 1000
    return RateTuning(factors=factors, epochs=tuned, seed=seed)


def _sizes(workers: int) -> tuple[int, ...]:
    """1, 2, 4 … and `workers`.

    >>> _sizes(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({2**power for power in range(workers.bit_length()) if 2**power < workers} | {workers}))


def _at_least(name: str, value: int) -> int:
    if value < 1:
        raise SpecError(f"{name} {value}: at least 1")
    return value


@contextlib.contextmanager
def _runner(plan: RacePlan) -> Iterator[TrainingRunner]:
    from syncline.bench.race.runner import ProcessRunner, SimulatedRunner, parse_network

    if plan.place.kind == "simulated":
        yield SimulatedRunner(parse_network(plan.place.detail))
    elif plan.place.kind == "lab":
        with Lab(*parse_lab(plan.place.detail)) as lab:
            if lab.measured is not None:
                rate = f"{lab.measured / 1e6:.1f} Mbit/s"
                _say(f"a lab of {plan.place.detail}, measured {rate}; it adds no latency")
            yield ProcessRunner(lab)
    else:
        warn_if_oversubscribed(plan.workers)
        yield ProcessRunner()


def _announce(plan: RacePlan, folder: Path, workload: Workload) -> None:
    from syncline.bench.race.runner import expected_seconds

    runs = len(plan.tuning_runs()) + len(plan.runs())
    takes = duration(expected_seconds(plan, workload))
    _say(f"{len(plan.entries)} entries, {len(plan.seeds)} seeds, {runs} runs, about {takes}")
    _say(f"follow the race: syncline watch {folder}")
    for name, reason in plan.skipped.items():
        _say(f"left out: {name}: {reason}")


def _checksums(workload: Workload) -> dict[str, str]:
    """Checksums of what must not change during the race: the data, and the file of a script."""
    return {key: str(value) for key, value in workload.describe().items() if key in ("sha256", "script_sha256")}


def _check_unchanged(race: RaceRecord) -> None:
    """Refuse to continue a race with other data or code: its results cannot be compared."""
    from syncline.workloads import build

    plan = race.plan
    sums = _checksums(build(plan.workload))
    changed = [key for key in sums if plan.data and plan.data.get(key) != sums[key]]
    if changed:
        what = "its script was edited" if "script_sha256" in changed else "its data has changed"
        raise IncompatibleError(f"{race.path} cannot continue: {what} since it began; begin a new race")
    if plan.code_digest != code_digest():
        raise IncompatibleError(
            f"{race.path} began with other code ({plan.code_version}, {plan.code_digest}) than this "
            f"({code_version()}, {code_digest()}): finish it with that version, or begin a new race"
        )


def _say(text: str) -> None:
    print(f"syncline: {text}", file=sys.stderr, flush=True)
