"""Rules about the setup: hardware (4), operations per second (7), configuration (8), inputs (9) and batch (11)."""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.lint.base import ExpectedSteps, LintCase, LintRule, Note, close, is_built_in, some
from syncline.bench.runlog import RunRecord, finite, read_document
from syncline.errors import SynclineError
from syncline.lr_scaling import scale_factor

__all__ = ["RULES"]


def _differing(values: Iterable[tuple[Any, str]]) -> dict[str, list[str]]:
    """Folders by value, the most frequent value first; empty if all values are equal."""
    groups: dict[str, list[str]] = defaultdict(list)
    for value, folder in values:
        groups[json.dumps(value, sort_keys=True)].append(folder)
    if len(groups) == 1:
        return {}
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


# 4. Hardware

FIELDS_BY_SIZE = ("device", "threads", "hosts", "lab")
"""Fields of the world that are equal for all runs on the same number of workers."""
FIELDS_BY_ENGINE = ("engine", "launcher")
"""Fields that are equal for all of these whose entries have the same engine in the plan."""
USABLE_CORES = "cores usable"
"""A field of rank 0's machine. Rank 0 has more cores if fewer workers share the machine."""


def _section(system: dict[str, Any], name: str) -> dict[str, Any]:
    section = system.get(name)
    return section if isinstance(section, dict) else {}


def _described_runs(case: LintCase) -> list[RunRecord]:
    return [run for run in case.race.runs if run.system]


def _describe_hardware(case: LintCase) -> str:
    runs = _described_runs(case)
    return f"system.json of {len(runs)} runs" if runs else ""


def _check_hardware(case: LintCase) -> Iterator[Note]:
    runs = _described_runs(case)
    for section in ("machine", "versions"):
        fields = {key for run in runs for key in _section(run.system, section)} - {USABLE_CORES}
        for name in sorted(fields):
            yield from _compare_systems(f"{section}, {name}", runs, section, name)
    engines = {entry.name: entry.engine for entry in case.plan.entries}
    for size in sorted({run.workers for run in runs}):
        same_size = [run for run in runs if run.workers == size]
        yield from _compare_systems(USABLE_CORES, same_size, "machine", USABLE_CORES)
        for name in FIELDS_BY_SIZE:
            yield from _compare_systems(f"{name} of {size} workers", same_size, "world", name)
        for engine in sorted(set(engines.values()), key=str):
            same_engine = [run for run in same_size if engines.get(run.entry) == engine]
            for name in FIELDS_BY_ENGINE:
                yield from _compare_systems(f"{name} of {size} workers", same_engine, "world", name)
    yield from _check_race_machine(case, runs)
    yield from _check_place(case, runs)


def _compare_systems(what: str, runs: list[RunRecord], section: str, name: str) -> Iterator[Note]:
    groups = _differing((_section(run.system, section).get(name), run.folder) for run in runs)
    if groups:
        values = "; ".join(f"{value} in {some(folders, 2)}" for value, folders in groups.items())
        yield Note(f"the runs differ in {what}: {values}")


def _check_race_machine(case: LintCase, runs: list[RunRecord]) -> Iterator[Note]:
    """The machine on which the race was planned, if the workers ran there."""
    if not runs or not case.race.system:
        return
    planned, first = _section(case.race.system, "machine"), _section(runs[0].system, "machine")
    for name, value in planned.items():
        # The launcher decides how many cores a process may use.
        if name not in ("host", USABLE_CORES) and first.get(name) != value:
            yield Note(f"the race was planned with {name} {value!r}, and ran with {first.get(name)!r}")


def _check_place(case: LintCase, runs: list[RunRecord]) -> Iterator[Note]:
    """The runs took place where the plan says."""
    kind = case.plan.place.kind
    for run in runs:
        world = _section(run.system, "world")
        if world.get("size") != run.workers:
            yield Note(f"{run.folder} is listed with {run.workers} workers, and ran on {world.get('size')}")
            return
        planned = next((entry.engine for entry in case.plan.entries if entry.name == run.entry), None)
        if planned is not None and world.get("engine") != planned:
            yield Note(f"{run.folder} ran on engine {world.get('engine')!r}; its entry has {planned!r}")
            return
        if (world.get("engine") == "simulated") != (kind == "simulated") or (kind == "lab" and not world.get("lab")):
            yield Note(
                f"{run.folder} ran on engine {world.get('engine')!r}, lab {world.get('lab')!r}; race.json says "
                f"{kind} {case.plan.place.detail}"
            )
            return


# 7. Operations per second

OPERATIONS_UNIT = re.compile(
    r"(?:^|[^a-z])[kmgtpe]?(?:fl)?ops?(?:/s|ps\b|[_ ](?:per|a)[_ ]s)|(?:^|[^a-z])[kmgtpe]?flops?(?![a-z])|"
    r"(?:^|[^a-z])mfu(?![a-z])",
    re.IGNORECASE,
)
"""flops, TFLOP/s, gop/s, ops_per_second, MFU: in a key or in a sentence."""
DTYPE = re.compile(r"(?:float|bfloat|fp|bf|int|uint)\d+|double|half", re.IGNORECASE)


def _describe_operations(case: LintCase) -> str:
    reports = [path.name for path in _reports(case.race.path)]
    return f"keys of {len(case.race.runs)} logs and configurations{''.join(f', {name}' for name in reports)}"


def _check_operations(case: LintCase) -> Iterator[Note]:
    for run in case.race.runs:
        yield from _check_run_operations(run)
    for path in _reports(case.race.path):
        if path.suffix == ".json":
            yield from _unexplained(read_document(path, []), path.name)
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL | re.IGNORECASE)
            for sentence in re.split(r"[\n.;]\s", html.unescape(re.sub(r"<[^>]*>", " ", text))):
                if _is_unexplained(sentence):
                    yield Note(f"{path.name} says {' '.join(sentence.split())[:120]!r}")
                    break


def _check_run_operations(run: RunRecord) -> Iterator[Note]:
    seen: set[str | Note] = set()
    for event in run.events:
        key, metadata = str(event.get("key")), event.get("metadata")
        explained = _has_formula(metadata if isinstance(metadata, dict) else {})
        if OPERATIONS_UNIT.search(key) and key not in seen and not explained:
            seen.add(key)
            yield Note(f"{run.folder}/log.jsonl has {key} = {event.get('value')} without a formula")
        elif isinstance(event.get("value"), dict):
            for note in _unexplained(event["value"], f"{run.folder}/log.jsonl, {key}"):
                if note not in seen:
                    seen.add(note)
                    yield note
    yield from _unexplained(run.config, f"{run.folder}/config.json")


def _reports(folder: Path) -> list[Path]:
    return [folder / name for name in ("report.json", "report.html", "runs.csv") if (folder / name).exists()]


def _unexplained(value: Any, where: str) -> Iterator[Note]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "findings":
                continue  # findings of an earlier lint
            explained = _has_formula(value) or (isinstance(inner, dict) and _has_formula(inner))
            if OPERATIONS_UNIT.search(str(key)) and not explained:
                yield Note(f"{where} has {key} = {json.dumps(inner)[:60]} without a formula")
            else:
                yield from _unexplained(inner, where)
    elif isinstance(value, list):
        for inner in value:
            yield from _unexplained(inner, where)
    elif isinstance(value, str) and _is_unexplained(value):
        yield Note(f"{where} says {value[:120]!r}")


def _is_unexplained(sentence: str) -> bool:
    if not re.search(r"\d", sentence) or not OPERATIONS_UNIT.search(sentence):
        return False
    return not (DTYPE.search(sentence) and "=" in sentence)


def _has_formula(values: dict[str, Any]) -> bool:
    return bool(DTYPE.search(str(values.get("dtype", "")))) and bool(str(values.get("formula") or "").strip())


# 8. One configuration

SETTINGS_OF_OTHER_RULES = frozenset(
    ("target", "evaluate_every", "evaluations_after", "batch", "global_batch", "epochs", "steps")
)
"""Rules 10, 11 and 12 compare these."""
LOGGED_SETTINGS = {
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
"""Keys of the log that repeat a field of `config.json`."""
CHOSEN_BY_AUTO = ("strategy", "codec")
CLOCK_SLACK_MS = 100


def _describe_configuration(case: LintCase) -> str:
    return f"configuration, log and code of {len(case.configured)} runs" if case.configured else ""


def _check_configuration(case: LintCase) -> Iterator[Note]:
    """Plan, configuration and log of every run agree."""
    yield from _check_versions(case)
    for run in case.configured:
        planned = case.planned(run)
        if planned is None:
            yield Note(f"{run.folder}: race.json has no entry {run.entry!r}")
            continue
        expected = {"workers": run.workers, **asdict(case.plan.settings(planned))}
        for name in sorted(expected.keys() - SETTINGS_OF_OTHER_RULES):
            wanted, value = expected[name], run.config.get(name)
            if not close(wanted, value) and not (wanted is None and name == "learning_rate"):
                yield Note(f"{run.folder}: {name} is {value!r} in its configuration, {wanted!r} in the plan")
        yield from _check_run_configuration(run)
    yield from _check_log_times(case)
    yield from _check_copies(case)


def _check_run_configuration(run: RunRecord) -> Iterator[Note]:
    """The log agrees with the configuration."""
    config = run.config
    built = config["run"] if isinstance(config.get("run"), dict) else {}
    expected: dict[str, Any] = {key: config.get(name) for key, name in LOGGED_SETTINGS.items()}
    expected |= {f"sl_{name}": built[name] for name in ("strategy", "codec", "collective") if name in built}
    for key, value in expected.items():
        for event in run.lines(key):
            if not close(event.get("value"), value):
                yield Note(f"{run.folder}: the log has {key} {event.get('value')!r}, config.json {value!r}")
    chosen = built.get("auto")  # the strategy and the codec that `auto` has taken
    asked = {**config, **{name: chosen.get(name) for name in CHOSEN_BY_AUTO}} if isinstance(chosen, dict) else config
    for name, spec in _build_specs(asked, built).items():
        if built[name] != spec:
            yield Note(f"{run.folder}: its {name} is {spec!r}, and {built[name]!r} was used")
    yield from _check_rates(run)


def _check_versions(case: LintCase) -> Iterator[Note]:
    """All runs used the code of the plan."""
    plan, groups = case.plan, defaultdict(list)
    for run in case.configured:
        if plan.code_digest and run.config.get("code_digest") != plan.code_digest:
            groups[f"{run.config.get('code_version')}, {run.config.get('code_digest')}"].append(run.folder)
    for version, folders in groups.items():
        yield Note(
            f"{len(folders)} runs used other code ({version}) than the plan ({plan.code_version}, "
            f"{plan.code_digest}): {some(folders)}"
        )


def _build_specs(config: dict[str, Any], built: Collection[str]) -> dict[str, str | None]:
    """Codec and strategy as built from the configuration; those that are not installed here are left out."""
    specs: dict[str, str | None] = {}
    with suppress(SynclineError):
        if "codec" in built:
            specs["codec"] = None if config.get("codec") is None else _codec(config["codec"])
        if "strategy" in built:
            specs["strategy"] = _strategy(str(config.get("strategy")))
    return specs


@cache_answers
def _codec(spec: str) -> str | None:
    from syncline.codecs import build_codec

    codec = build_codec(spec)
    return None if codec is None else repr(codec)


@cache_answers
def _strategy(spec: str) -> str:
    from syncline.bench.race.entries import build_race_strategy

    return repr(build_race_strategy(spec))


def _check_rates(run: RunRecord) -> Iterator[Note]:
    """The learning rates of the optimizer are those of the configuration."""
    config = run.config
    rate, scaling = finite(config.get("learning_rate")), str(config.get("scaling"))
    if rate is None:
        return
    scaled = rate * scale_factor(scaling, int(config.get("workers") or 1))
    constant = config.get("decay") == "none" and not config.get("warmup")
    used = [finite(event.get("value")) for event in run.lines("sl_learning_rate")]
    wrong = [one for one in used if one is not None and (not close(one, scaled) if constant else one > scaled * 1.0001)]
    if wrong or not close(config.get("scaled_learning_rate"), scaled):
        other = wrong[0] if wrong else config.get("scaled_learning_rate")
        yield Note(f"{run.folder}: its learning rate is {scaled:g} by its configuration, and {other} was used")


def _check_log_times(case: LintCase) -> Iterator[Note]:
    """Each log was written between the start and the end that the registry has."""
    window: dict[str, dict[str, float]] = defaultdict(dict)
    for line in case.race.lines:
        stamp = finite(line.get("time_ms"))
        if line.get("event") in ("begun", "ended") and stamp is not None:
            window[str(line.get("run"))][line["event"]] = stamp
    for run in case.race.runs:
        stamps = [stamp for stamp in (finite(event.get("time_ms")) for event in run.events) if stamp is not None]
        registered = window[run.folder]
        if stamps and (
            min(stamps) < registered.get("begun", min(stamps)) - CLOCK_SLACK_MS
            or max(stamps) > registered.get("ended", max(stamps)) + CLOCK_SLACK_MS
        ):
            yield Note(f"{run.folder}/log.jsonl was not written at the time that the registry has")


def _check_copies(case: LintCase) -> Iterator[Note]:
    """Runs with different seeds do not have identical curves."""
    seen: dict[tuple[Any, ...], RunRecord] = {}
    for run in case.finished:
        curve = tuple(one.metric for one in run.evaluations)
        if len(set(curve)) < 3:
            continue
        other = seen.setdefault((run.entry, run.workers, run.kind, run.factor, curve), run)
        if other is not run and other.seed != run.seed:
            yield Note(f"{run.folder} has exactly the same curve as {other.folder}, with another seed")


# 9. Inputs

INPUT_FIELDS = ("workload", "metric", "higher_is_better", "samples", "parameters", "sha256", "script_sha256", "input")


def _describe_inputs(case: LintCase) -> str:
    if not case.configured:
        return ""
    if case.data is None:
        return f"{case.plan.workload} cannot be built here: the runs are only compared with each other"
    return f"input and data of {len(case.configured)} runs, and the data on this machine"


def _check_inputs(case: LintCase) -> Iterator[Note]:
    """All runs used the same data, and it is the workload's."""
    for name in INPUT_FIELDS:
        groups = _differing((run.config.get(name), run.folder) for run in case.configured)
        if groups:
            values = "; ".join(f"{value} in {some(folders, 2)}" for value, folders in groups.items())
            yield Note(f"the runs differ in {name}: {values}")
    for run in case.configured:
        yield from _check_run_inputs(run)
    if not case.configured:
        return
    first = case.configured[0]
    trained = str(first.config.get("workload"))
    if case.data is not None:
        yield from _compare_inputs(first, case.data["config"])
        return
    name = trained.partition("(")[0]
    if is_built_in(name) and case.plan.workload.partition("(")[0].strip() != name:
        # The plan names a script, which the lint does not execute.
        yield Note(f"race.json names the workload {case.plan.workload!r}, and the runs trained {trained!r}")


def _check_run_inputs(run: RunRecord) -> Iterator[Note]:
    """The number of samples in the log is that of the configuration."""
    sizes = run.config.get("samples")
    for key, split in (("train_samples", "train"), ("eval_samples", "validation")):
        for event in run.lines(key):
            if isinstance(sizes, dict) and event.get("value") != sizes.get(split):
                yield Note(f"{run.folder}: {key} is {event.get('value')}, and {split} has {sizes.get(split)}")


def _compare_inputs(run: RunRecord, here: dict[str, Any]) -> Iterator[Note]:
    if run.config.get("sha256") != here.get("sha256") and run.config.get("input") == here["input"]:
        yield Note(
            f"the SHA-256 of the data is {run.config.get('sha256')} in the race, {here.get('sha256')} on this machine",
            "lint on a machine with the same data, or state which data it was",
            "warning",
        )
        return
    for name in INPUT_FIELDS:
        if run.config.get(name) != here.get(name):
            yield Note(f"{name} is {run.config.get(name)} in {run.folder}, and {here.get(name)} in the workload")


# 11. Batch


def _describe_batch(case: LintCase) -> str:
    sizes = sorted({run.workers for run in case.race.runs})
    if not sizes:
        return ""
    scaling = case.plan.scaling or "no scaling"
    return f"batches of {len(case.race.runs)} runs on {', '.join(map(str, sizes))} workers: {scaling}"


def _check_batch(case: LintCase) -> Iterator[Note]:
    """The batch of every run follows from the plan."""
    plan = case.plan
    sizes = sorted({run.workers for run in case.race.runs} | {plan.workers, *plan.scaling_workers})
    if len(sizes) > 1 and plan.scaling is None:
        yield Note(f"there are runs on {', '.join(map(str, sizes))} workers, and race.json declares no scaling")
        return
    for run in case.configured:
        planned = case.planned(run)
        if planned is None:
            continue
        settings = plan.settings(planned)
        batch = {name: run.config.get(name) for name in ("batch", "global_batch")}
        if batch != {"batch": settings.batch, "global_batch": settings.global_batch}:
            constant = "global batch" if plan.scaling == "strong" else "batch of each worker"
            yield Note(
                f"{run.folder} used {batch['batch']} samples per step and worker; with a constant {constant} "
                f"({plan.scaling or 'one size'}, {plan.batch} on {plan.workers} workers) it is {settings.batch}"
            )
        yield from _check_run_batch(run)


def _check_run_batch(run: RunRecord) -> Iterator[Note]:
    """The batch in the log is that of the configuration."""
    expected = ExpectedSteps.of(run)
    if expected is None:
        return
    for event in run.lines("global_batch_size"):
        if event.get("value") != expected.batch or run.config.get("samples_a_step") != expected.batch:
            yield Note(
                f"{run.folder}: steps of {event.get('value')} samples in the log, {run.config.get('samples_a_step')} "
                f"in config.json, {expected.batch} by batch and workers"
            )


RULES = (
    LintRule(
        4,
        "The hardware differs",
        "all entries ran on the same machine, with the same software, in the same place",
        "run all entries on the same machine, with the same software, in one race",
        _check_hardware,
        _describe_hardware,
    ),
    LintRule(
        7,
        "Operations per second are not explained",
        "operations per second come with the type of their operands and the formula that counts them",
        "leave it out, or add the type of the operands and the formula that counts them (dtype, formula)",
        _check_operations,
        _describe_operations,
        _check_run_operations,
    ),
    LintRule(
        8,
        "Speed and accuracy have different settings",
        "both come from one run, with the settings of the plan and one version of the code",
        "take speed and accuracy from the same run; race again with one configuration and one version of the code",
        _check_configuration,
        _describe_configuration,
        _check_run_configuration,
    ),
    LintRule(
        9,
        "The inputs are not the workload's",
        "samples have the shape, type and number that the workload defines",
        "train on the unchanged samples of the workload, and race again",
        _check_inputs,
        _describe_inputs,
        _check_run_inputs,
    ),
    LintRule(
        11,
        "The batch does not match the scaling",
        "strong or weak scaling is declared, and every batch follows from it",
        "declare it (--scaling weak keeps the batch of each worker, strong the global batch), and run all sizes so",
        _check_batch,
        _describe_batch,
        _check_run_batch,
    ),
)
