"""Rule 8: speed and accuracy are of one run, with the options that the plan names and one version of the code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.lint.base import Case, Note, some
from syncline.bench.lint.evidence import close, events, number, wall_ms
from syncline.bench.race.reading import RanRun
from syncline.errors import SynclineError
from syncline.scaling import scale_factor

__all__ = ["check", "check_run", "looked"]

OTHERS = frozenset(("target", "evaluate_every", "evaluations_after", "batch", "global_batch", "epochs", "steps"))
"""Settings that other rules compare: 10, 11 and 12."""
TOLD = {
    "sl_code_version": "code_version",
    "sl_workload": "workload",
    "sl_workers": "workers",
    "seed": "seed",
    "opt_base_learning_rate": "scaled_learning_rate",
    "opt_learning_rate_warmup_epochs": "warmup",
    "sl_learning_rate_of_one": "learning_rate",
    "sl_scaling": "scaling",
    "sl_metric": "metric",
}
"""Lines of the log that repeat what `config.json` says."""
ONE = "take speed and accuracy from the same run; race again with one configuration and one version of the code"


def looked(case: Case) -> str:
    """What is there."""
    known = [run for run in case.race.runs if run.config]
    return f"configuration, log and code of {len(known)} runs" if known else ""


def check(case: Case) -> Iterator[Note]:
    """The plan, the configuration and the log of every run tell the same."""
    yield from _versions(case)
    for run in case.race.runs:
        if not run.config:
            continue
        planned = case.planned(run)
        if planned is None:
            yield Note(f"{run.folder}: race.json has no entry {run.entry!r}", ONE)
            continue
        expected = {"workers": run.workers, **asdict(case.plan.settings(planned))}
        for name in sorted(expected.keys() - OTHERS):
            asked, found = expected[name], run.config.get(name)
            if not close(asked, found) and not (asked is None and name == "learning_rate"):
                yield Note(f"{run.folder}: {name} is {found!r} in its configuration, {asked!r} in the plan", ONE)
        yield from check_run(run)
    yield from _times(case)
    yield from _copies(case)


def check_run(run: RanRun) -> Iterator[Note]:
    """One run: its log against its configuration."""
    config = run.config
    chosen = config["run"] if isinstance(config.get("run"), dict) else {}
    expected: dict[str, Any] = {key: config.get(name) for key, name in TOLD.items()}
    expected |= {f"sl_{name}": chosen[name] for name in ("strategy", "codec", "collective") if name in chosen}
    for key, value in expected.items():
        for event in events(run, key):
            if not close(event.get("value"), value):
                yield Note(f"{run.folder}: the log has {key} {event.get('value')!r}, config.json {value!r}", ONE)
    for name, spec in _built(config, chosen).items():
        if chosen[name] != spec:
            yield Note(f"{run.folder} was to run with {name} {spec!r}, and ran with {chosen[name]!r}", ONE)
    yield from _rates(run)


def _versions(case: Case) -> Iterator[Note]:
    """The code that each run ran is that of the plan."""
    plan, groups = case.plan, defaultdict(list)
    for run in case.race.runs:
        if run.config and plan.code_digest:
            groups[f"{run.config.get('code_version')}, {run.config.get('code_digest')}"].append(run)
    for told, runs in groups.items():
        if runs[0].config.get("code_digest") != plan.code_digest:
            yield Note(
                f"{len(runs)} runs ran other code ({told}) than the race was planned with ({plan.code_version}, "
                f"{plan.code_digest}): {some([run.folder for run in runs])}",
                ONE,
            )


def _built(config: dict[str, Any], chosen: Collection[str]) -> dict[str, str | None]:
    """What the specs of a configuration become when they are built; nothing for what is not installed here."""
    found: dict[str, str | None] = {}
    with suppress(SynclineError):
        if "codec" in chosen:
            found["codec"] = None if config.get("codec") is None else _codec(config["codec"])
        if "strategy" in chosen:
            found["strategy"] = _strategy(str(config.get("strategy")))
    return found


@cache_answers
def _codec(spec: str) -> str | None:
    from syncline.codecs import build_codec

    codec = build_codec(spec)
    return None if codec is None else repr(codec)


@cache_answers
def _strategy(spec: str) -> str:
    from syncline.bench.race.field import build_entrant

    return repr(build_entrant(spec))


def _rates(run: RanRun) -> Iterator[Note]:
    """The learning rates that the optimizer had are those of the configuration."""
    config = run.config
    rate, scaling = number(config.get("learning_rate")), str(config.get("scaling"))
    if rate is None:
        return
    scaled = rate * scale_factor(scaling, int(config.get("workers") or 1))
    steady = config.get("decay") == "none" and not config.get("warmup")
    used = [number(event.get("value")) for event in events(run, "sl_learning_rate")]
    wrong = [one for one in used if one is not None and (not close(one, scaled) if steady else one > scaled * 1.0001)]
    if wrong or not close(config.get("scaled_learning_rate"), scaled):
        found = wrong[0] if wrong else config.get("scaled_learning_rate")
        yield Note(f"{run.folder}: its rate is {scaled:g} by its configuration, and {found} was used", ONE)


def _times(case: Case) -> Iterator[Note]:
    """A log was written between the moments at which the registry saw its run begin and end."""
    allowed = 100
    window: dict[str, dict[str, float]] = defaultdict(dict)
    for line in case.race.lines:
        stamp = number(line.get("time_ms"))
        if line.get("event") in ("begun", "ended") and stamp is not None:
            window[str(line.get("run"))][line["event"]] = stamp
    for run in case.race.runs:
        stamps, seen = wall_ms(run), window[run.folder]
        if stamps and (
            min(stamps) < seen.get("begun", min(stamps)) - allowed
            or max(stamps) > seen.get("ended", max(stamps)) + allowed
        ):
            yield Note(f"{run.folder}/log.jsonl was not written while the registry says that it ran", ONE)


def _copies(case: Case) -> Iterator[Note]:
    """Two seeds do not give the same numbers to the last digit."""
    seen: dict[tuple[Any, ...], RanRun] = {}
    for run in case.counted:
        curve = tuple(one.metric for one in run.evaluations)
        key = (run.entry, run.workers, run.kind, run.factor, curve)
        if len(set(curve)) < 3:
            continue
        twin = seen.setdefault(key, run)
        if twin is not run and twin.seed != run.seed:
            yield Note(f"{run.folder} has the same curve as {twin.folder}, digit by digit, with another seed", ONE)
