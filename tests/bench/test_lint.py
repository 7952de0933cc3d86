"""Twelve ways to cheat, each planted into an honest race with sealed files; and the honest races themselves."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.bench.lint import RULES, review
from syncline.bench.runlog import read_race
from tests.bench.linting import (
    RACES,
    Line,
    Races,
    drop_run,
    edit_json,
    edit_log,
    edit_registry,
    linted,
    run_folders,
)
from tests.bench.racing import reseal

pytestmark = pytest.mark.xdist_group("lint")
Plant = Callable[[Path], None]


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Races:
    return Races(tmp_path_factory.getbasetemp() / "lint")


@pytest.mark.parametrize("name", RACES)
def test_honest_races_break_no_rule(races: Races, name: str) -> None:
    verdicts = review(read_race(races.honest(name)))
    assert [verdict.rule.number for verdict in verdicts] == list(range(13))
    assert {verdict.rule.number: verdict.findings for verdict in verdicts if verdict.state == "broken"} == {}
    looked = {verdict.rule.number: verdict.state for verdict in verdicts}
    assert looked.pop(1) == ("holds" if name == "scaled" else "nothing to check")
    assert set(looked.values()) == {"holds"}


def test_honest_races_have_what_is_cheated_with(races: Races) -> None:
    plain, tuned, scaled = (read_race(races.honest(name)) for name in ("plain", "tuned", "scaled"))
    assert {run.status for run in plain.of("too fast")} == {"diverged"}
    assert all(run.hit(plain.plan.target, False) for run in plain.of("allreduce"))
    assert len(tuned.of_kind("tuning")) == 4
    assert {run.workers for run in scaled.runs} == {1, 2}


# 1. Accuracy when scaling up


def without_accuracy(folder: Path) -> None:
    """Show how fast two workers are; what they have learned stays in the drawer."""
    for run in run_folders(folder, "runs/*/2w-*"):
        edit_log(run, lambda lines: [line for line in lines if line["key"] != "sl_test_gap"])


# 2. Test accuracy


def trained_on_the_test(folder: Path) -> None:
    """Put training samples into the test split, and its sum into the registry."""
    train = np.fromfile(folder / "splits/train.u64", dtype="<u8")
    test = np.fromfile(folder / "splits/test.u64", dtype="<u8")
    test[: len(test) // 4] = train[: len(test) // 4]
    _write_split(folder, "test", test)


def training_accuracy(folder: Path) -> None:
    """Tell the accuracy on the training split, which is better."""
    for run in run_folders(folder):
        edit_log(run, lambda lines: [_measured(line, 1079) for line in lines])


def best_test(folder: Path) -> None:
    """Look at the test split after every evaluation, and keep the best."""

    def change(lines: list[Line]) -> list[Line]:
        found = next(line for line in lines if line["key"] == "sl_test_gap")
        places = [number for number, line in enumerate(lines) if line["key"] == "eval_stop"]
        for place in reversed(places):
            stamps = {key: lines[place][key] for key in ("time_ms", "seconds", "metadata")}
            lines.insert(place + 1, {**found, **stamps})
        return lines

    edit_log(folder / "runs/allreduce/2w-seed1", change)


# 3. RateTuning


def uncounted_tuning(folder: Path) -> None:
    """Forget the rates that were tried in vain."""
    line = next(line for line in _registry(folder) if line["event"] == "tuned" and line["entry"] == "quantize(4)")
    loser = next(factor for factor in ("0.3", "1") if float(factor) != line["factor"])
    drop_run(folder, f"tuning/quantize-4/rate-times-{loser}")

    def forget(lines: list[Line]) -> list[Line]:
        for one in lines:
            if one["event"] == "tuned" and one["entry"] == "quantize(4)":
                del one["tried"][loser]
        return lines

    edit_registry(folder, forget)


# 4. Hardware


def other_machine(folder: Path) -> None:
    """Run the others on an old machine."""
    for run in run_folders(folder, "runs/allreduce/*"):
        edit_json(run / "system.json", lambda system: system["machine"].update(cores=1, kernel="2.6.32"))


# 5. Whole runs


def warm_part(folder: Path) -> None:
    """Begin to count after the first epoch, and set every clock accordingly."""

    def change(lines: list[Line]) -> list[Line]:
        first = next(n for n, line in enumerate(lines) if line["key"] == "run_start")
        second = [n for n, line in enumerate(lines) if line["key"] == "epoch_start"][1]
        late = lines[second]["seconds"] - lines[first]["seconds"]
        lines[first]["seconds"] = lines[second]["seconds"]
        kept = [*lines[: first + 1], *lines[second:]]
        return [_earlier(line, late, "compute", "exposed") for line in kept]

    edit_log(folder / "runs/quantize-4/2w-seed1", change)


# 6. I/O and evaluation


def without_evaluation(folder: Path) -> None:
    """Stop the clock while evaluating."""

    def change(lines: list[Line]) -> list[Line]:
        spent = 0.0
        for line in lines:
            if line["key"] == "sl_evaluation":
                spent = line["value"]["phases"]["evaluation"]
            _earlier(line, spent, "evaluation")
        return lines

    for run in run_folders(folder, "runs/quantize-4/*"):
        edit_log(run, change)


# 7. Operations


def teraflops(folder: Path) -> None:
    """Impress."""

    def change(lines: list[Line]) -> list[Line]:
        stamps = {key: lines[-1][key] for key in ("time_ms", "seconds")}
        point = {**stamps, "event_type": "POINT_IN_TIME", "key": "sl_tflops", "value": 312.0, "metadata": {}}
        return [*lines[:-1], point, lines[-1]]

    edit_log(folder / "runs/quantize-4/2w-seed1", change)


# 8. One configuration


def accuracy_of_another(folder: Path) -> None:
    """Show the accurate run's log under the fast entry's name."""
    shutil.copy(folder / "runs/allreduce/2w-seed1/log.jsonl", folder / "runs/quantize-4/2w-seed1/log.jsonl")


def other_code(folder: Path) -> None:
    """Run one entry with code that was made faster since."""
    for run in run_folders(folder, "runs/quantize-4/*"):
        edit_json(run / "config.json", lambda config: config.update(code_digest="0123456789abcdef"))


def lucky_seed(folder: Path) -> None:
    """Hand in the best seed three times."""
    lucky, other = (folder / f"runs/quantize-4/2w-seed{seed}" for seed in (1, 2))
    late = _first(other, "run_start")["time_ms"] - _first(lucky, "run_start")["time_ms"]

    def change(lines: list[Line]) -> list[Line]:
        for line in lines:
            line["time_ms"] += late
            if line["key"] == "seed":
                line["value"] = 2
        return lines

    shutil.copy(lucky / "log.jsonl", other / "log.jsonl")
    edit_log(other, change)


def other_rate(folder: Path) -> None:
    """Train with another learning rate than the plan has."""
    for run in run_folders(folder, "runs/quantize-4/*"):
        edit_log(run, lambda lines: [{**ln, "value": 0.9} if ln["key"] == "sl_learning_rate" else ln for ln in lines])


# 9. Inputs


def larger_inputs(folder: Path) -> None:
    """Train on inputs that keep the machine busy, in all runs alike."""
    for run in run_folders(folder):
        edit_json(run / "config.json", lambda config: config["input"].update(shape=[4096]))


# 10. The right time


def easier_target(folder: Path) -> None:
    """Lower the bar after the race, everywhere, and take the times that fit."""
    target = 0.22
    edit_json(folder / "race.json", lambda plan: plan.update(target=target))

    def change(lines: list[Line]) -> list[Line]:
        found = [line["value"] for line in lines if line["key"] == "sl_evaluation"]
        hit = next((one["elapsed"] for one in found if float(one["metric"]) <= target), None)
        for line in lines:
            if line["key"] == "sl_target":
                line["value"] = target
            if line["key"] == "sl_time_to_target_seconds":
                line["value"] = hit
        return lines

    for run in run_folders(folder):
        edit_log(run, change)
        edit_json(run / "config.json", lambda config: config.update(target=target))


def rarer_evaluations(folder: Path) -> None:
    """Leave out every second evaluation that did not reach the target."""

    def change(lines: list[Line]) -> list[Line]:
        steps = [line["metadata"]["step"] for line in lines if line["key"] == "eval_start"][:-3:2]
        return [ln for ln in lines if not ("eval" in ln["key"] and ln["metadata"].get("step") in steps)]

    edit_log(folder / "runs/allreduce/2w-seed1", change)


# 11. Strong and weak


def called_strong(folder: Path) -> None:
    """Call weak scaling strong: it looks like less work for the same batch."""
    edit_json(folder / "race.json", lambda plan: plan.update(scaling="strong"))


# 12. Whom to compare with, and which runs


def bad_seed_dropped(folder: Path) -> None:
    """Take the run that diverged out, with its lines."""
    drop_run(folder, "runs/too-fast/2w-seed2")


def loser_forgotten(folder: Path) -> None:
    """Take a whole entry out, from the plan too."""
    for seed in (1, 2, 3):
        drop_run(folder, f"runs/too-fast/2w-seed{seed}")
    edit_json(folder / "race.json", lambda plan: plan["entries"].pop())


def tried_again(folder: Path) -> None:
    """Run an unlucky one over, and keep both: the report takes the later."""
    name = "runs/quantize-4/2w-seed3"
    shutil.copytree(folder / name, folder / f"{name}.2")

    def change(lines: list[Line]) -> list[Line]:
        again = [{**line, "run": f"{name}.2"} for line in lines if line.get("run") == name]
        place = max(number for number, line in enumerate(lines) if line.get("run") == name)
        return [*lines[: place + 1], *again, *lines[place + 1 :]]

    edit_registry(folder, change)


def counted_as_finished(folder: Path) -> None:
    """Count a run that diverged as a slow one."""

    def change(lines: list[Line]) -> list[Line]:
        for line in lines:
            if line.get("status") == "diverged":
                line["status"], line["reason"] = "finished", None
        return lines

    edit_registry(folder, change)


def larger_budget(folder: Path) -> None:
    """Let the favourite run an epoch longer than the others may."""
    for run in run_folders(folder, "runs/quantize-4/*"):
        edit_json(run / "config.json", lambda config: config.update(epochs=config["epochs"] + 1))


CHEATS: list[tuple[int, str, Plant]] = [
    (1, "scaled", without_accuracy),
    (2, "plain", trained_on_the_test),
    (2, "digits", training_accuracy),
    (2, "plain", best_test),
    (3, "tuned", uncounted_tuning),
    (4, "plain", other_machine),
    (5, "plain", warm_part),
    (6, "plain", without_evaluation),
    (7, "plain", teraflops),
    (8, "plain", accuracy_of_another),
    (8, "plain", other_code),
    (8, "plain", lucky_seed),
    (8, "plain", other_rate),
    (9, "plain", larger_inputs),
    (10, "plain", easier_target),
    (10, "plain", rarer_evaluations),
    (11, "scaled", called_strong),
    (12, "plain", bad_seed_dropped),
    (12, "plain", loser_forgotten),
    (12, "plain", tried_again),
    (12, "plain", counted_as_finished),
    (12, "plain", larger_budget),
]


def test_every_rule_has_its_cheat() -> None:
    assert {number for number, _, _ in CHEATS} == {rule.number for rule in RULES[1:]} == set(range(1, 13))


@pytest.mark.parametrize(("number", "race", "plant"), CHEATS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_cheat_breaks_its_rule_alone(
    races: Races, tmp_path: Path, number: int, race: str, plant: Plant
) -> None:
    folder = races.copy(race, tmp_path)
    plant(folder)
    reseal(folder)
    broken, told = linted(folder)
    assert broken == {str(number)}, told


def test_resealing_alone_breaks_nothing(races: Races, tmp_path: Path) -> None:
    folder = races.copy("plain", tmp_path)
    reseal(folder)
    assert linted(folder)[0] == set()


def _registry(folder: Path) -> list[Line]:
    return [json.loads(text) for text in (folder / "registry.jsonl").read_text().splitlines()]


def _first(run: Path, key: str) -> Line:
    lines: list[Line] = [json.loads(text) for text in (run / "log.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["key"] == key)


def _write_split(folder: Path, name: str, digests: np.ndarray[Any, Any]) -> None:
    data = np.sort(digests).tobytes()
    (folder / f"splits/{name}.u64").write_bytes(data)

    def change(lines: list[Line]) -> list[Line]:
        lines[0]["splits"][name] = hashlib.sha256(data).hexdigest()
        return lines

    edit_registry(folder, change)


def _measured(line: Line, count: int) -> Line:
    """The same line with an accuracy that was measured on so many samples, a little better."""
    if line["key"] == "eval_accuracy":
        line["value"] = round((line["value"] + 0.001) * count) / count
    if line["key"] == "sl_evaluation":
        line["value"]["metric"] = round((line["value"]["metric"] + 0.001) * count) / count
    return line


def _earlier(line: Line, late: float, *phases: str) -> Line:
    """The same line with so many seconds less in all that it tells, taken out of these phases."""
    if line["key"] in ("sl_evaluation", "sl_phases"):
        line["value"]["elapsed"] -= late
        spent = line["value"].get("phases", line["value"])
        share = late / sum(spent[name] for name in phases)
        for name in phases:
            spent[name] *= 1 - share
    if line["key"] == "sl_evaluation":
        line["value"]["trained"] = min(line["value"]["trained"], line["value"]["elapsed"])
    if line["key"] == "sl_time_to_target_seconds":
        line["value"] -= late
    return line
