"""Runs on emulated hosts, predicted before they run, and the planner's choice among all plans.

```sh
python -m tests.planner.lab_runs prepare FOLDER           # profiles, and syncline bench machine in each lab
python -m tests.planner.lab_runs predict FOLDER twelve    # writes the predictions; nothing runs
python -m tests.planner.lab_runs run FOLDER twelve 4@1gbit    # the runs of a lab; without a lab, all of them
python -m tests.planner.lab_runs table FOLDER twelve
python -m tests.planner.lab_runs record FOLDER           # keeps the results with the tests, for docs/planner.md
```

The sets of runs are `twelve`, `second`, `choice` (all plans of six pairs of a model and a network) and
`development`, the runs that errors of the model were looked for in. `run` needs the file of predictions.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.planner.machine import MachineMeasurement
from syncline.planner.profile import TrainingProfile
from syncline.planner.run_prediction import RunPrediction, predict_run
from tests.planner.lab_worker import LabPlan

CODECS = ("topk(0.01)|quantize(4)", "powersgd(2)")
TOPK, POWERSGD = CODECS
LOCAL, SSP, PIPELINE = "local(period=16)", "ssp(slack=3)", "pipeline(microbatches=8)"
COPIES_PER_CORE = 2
RECORD = Path(__file__).with_name("data") / "lab_runs.json"
BLOCK_S, REPEATS = 2.0, 3
CHOICE_BLOCK_S = 1.5


@dataclass(frozen=True)
class Model:
    """A workload, with the samples of a worker in a step."""

    workload: str
    batch: int
    optimizer: str


MODELS = {
    "transformer": Model("transformer(layers=4, width=128)", 16, "adam"),
    "vgg": Model("vgg(side=16, width=16, dense=512)", 64, "momentum"),
    "small": Model("transformer(layers=2, width=64)", 16, "adam"),
}


@dataclass(frozen=True)
class LabRun:
    """A run: model, lab, strategy, codec."""

    model: str
    lab: str
    strategy: str = "allreduce"
    codec: str | None = None

    @property
    def text(self) -> str:
        return self.strategy if self.codec is None else f"{self.strategy}, {self.codec}"


TWELVE = (
    LabRun("transformer", "2@100mbit"),
    LabRun("transformer", "2@100mbit", codec=POWERSGD),
    LabRun("transformer", "2@100mbit", SSP),
    LabRun("transformer", "4@100mbit", codec=TOPK),
    LabRun("transformer", "4@100mbit", LOCAL),
    LabRun("transformer", "4@100mbit", PIPELINE),
    LabRun("transformer", "4@1gbit"),
    LabRun("transformer", "4@1gbit", SSP),
    LabRun("transformer", "4@1gbit", PIPELINE),
    LabRun("transformer", "8@1gbit", codec=TOPK),
    LabRun("transformer", "8@1gbit", codec=POWERSGD),
    LabRun("transformer", "8@1gbit", LOCAL),
)
SECOND = (
    LabRun("transformer", "2@100mbit", codec=TOPK),
    LabRun("transformer", "2@100mbit", LOCAL),
    LabRun("transformer", "2@100mbit", PIPELINE),
    LabRun("transformer", "4@100mbit"),
    LabRun("transformer", "4@100mbit", codec=POWERSGD),
    LabRun("transformer", "4@100mbit", SSP),
    LabRun("transformer", "4@1gbit", codec=TOPK),
    LabRun("transformer", "4@1gbit", codec=POWERSGD),
    LabRun("transformer", "4@1gbit", LOCAL),
    LabRun("transformer", "4@1gbit", PIPELINE),
    LabRun("transformer", "8@1gbit"),
    LabRun("transformer", "8@1gbit", SSP),
)
"""Other runs of the same kinds, for the model after its errors on the twelve were seen. The pipeline is one of them."""
CANDIDATES = (("allreduce", None), ("allreduce", TOPK), ("allreduce", POWERSGD), (SSP, None), (PIPELINE, None))
"""The plans among which the planner chooses."""
CHOICE = tuple(
    LabRun(model, lab, strategy, codec)
    for model in MODELS
    for lab in ("4@100mbit", "4@1gbit")
    for strategy, codec in CANDIDATES
)
DEVELOPMENT = (
    *(
        LabRun("vgg", lab, strategy, codec)
        for lab in ("4@100mbit", "4@1gbit")
        for strategy, codec in (*CANDIDATES, (LOCAL, None))
    ),
    *(
        LabRun("transformer", "4@1gbit", *plan)
        for plan in (("allreduce", TOPK), ("allreduce", POWERSGD), (LOCAL, None))
    ),
)
SETS = {"twelve": TWELVE, "second": SECOND, "choice": CHOICE, "development": DEVELOPMENT}


def prepare(folder: Path, labs: Sequence[str] = (), models: Sequence[str] = ()) -> None:
    """Profile the models, and measure the machine in each lab."""
    for name in models or ([] if labs else MODELS):
        model = MODELS[name]
        words = ["profile", model.workload, "--optimizer", model.optimizer, "--batch", str(model.batch), "--copies"]
        words.append(str(COPIES_PER_CORE * len(os.sched_getaffinity(0))))
        _syncline(*words, "--out", str(folder / f"{name}.json"))
    for lab in labs or ([] if models else sorted({run.lab for runs in SETS.values() for run in runs})):
        codecs = ";".join(CODECS)
        _syncline(
            "bench",
            "machine",
            "--lab",
            lab,
            "--codecs",
            codecs,
            "--rounds",
            "7",
            "--out",
            str(folder / f"machine-{lab}"),
        )


def _syncline(*words: str) -> float:
    """Run a command. Returns the share of the processors that other programs used meanwhile."""
    busy, own, begin = _busy_s(), _children_s(), time.monotonic()
    subprocess.run([sys.executable, "-m", "syncline", *words], check=True)
    others = (_busy_s() - busy) - (_children_s() - own)
    share = max(0.0, others / (time.monotonic() - begin) / len(os.sched_getaffinity(0)))
    print(f"other programs used {share:.0%} of the processors", flush=True)
    return share


def _busy_s() -> float:
    """Seconds in which the processors have worked, for anybody."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def predictions(folder: Path, runs: Sequence[LabRun]) -> list[RunPrediction]:
    """The predictions from the files of `prepare`."""
    profiles = {name: TrainingProfile.read(folder / f"{name}.json") for name in {run.model for run in runs}}
    machines = {
        lab: MachineMeasurement.read(folder / f"machine-{lab}" / "machine.json") for lab in {run.lab for run in runs}
    }
    return [predict_run(profiles[run.model], machines[run.lab], strategy=run.strategy, codec=run.codec) for run in runs]


def predict(folder: Path, name: str) -> None:
    """Write the predictions of a set of runs."""
    runs = SETS[name]
    rows = [
        {**asdict(run), "predicted_s": each.seconds, "parts": dict(each.parts), "cuts": each.cuts}
        for run, each in zip(runs, predictions(folder, runs), strict=True)
    ]
    (folder / f"{name}-predicted.json").write_text(json.dumps(rows, indent=1))


def run(folder: Path, name: str, only: Sequence[str] = ()) -> None:
    """Run a set, one launch for the plans of a model in a lab."""
    rows = json.loads((folder / f"{name}-predicted.json").read_text())
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["lab"]), []).append(row)
    for (model, lab), members in groups.items():
        if only and lab not in only and model not in only and f"{model}-{lab}" not in only:
            continue
        plans = [asdict(LabPlan(row["strategy"], row["codec"], tuple(row["cuts"]))) for row in members]
        options = {
            "workload": MODELS[model].workload,
            "batch": MODELS[model].batch,
            "optimizer": MODELS[model].optimizer,
            "plans": plans,
            "seconds": CHOICE_BLOCK_S if name == "choice" else BLOCK_S,
            "repeats": REPEATS,
            "out": str(folder / f"{name}-{model}-{lab}.json"),
        }
        worker = str(Path(__file__).with_name("lab_worker.py"))
        share = _syncline("run", "--lab", lab, worker, json.dumps(options))
        path = Path(str(options["out"]))
        path.write_text(json.dumps({"others": share, "rows": json.loads(path.read_text())}, indent=1))


@dataclass(frozen=True)
class LabResult:
    """A run with its prediction and the seconds of a step in each repeat."""

    model: str
    lab: str
    strategy: str
    codec: str | None
    predicted_s: float
    step_s: tuple[float, ...]
    others: float
    """The share of the processors that other programs used."""

    @property
    def text(self) -> str:
        return self.strategy if self.codec is None else f"{self.strategy}, {self.codec}"

    @property
    def measured_s(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.step_s)

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1."""
        return self.predicted_s / self.measured_s - 1


def results(folder: Path, name: str) -> list[LabResult]:
    """The runs of a set that were measured."""
    found = []
    for row in json.loads((folder / f"{name}-predicted.json").read_text()):
        path = folder / f"{name}-{row['model']}-{row['lab']}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        for measured in document["rows"]:
            if (measured["plan"]["strategy"], measured["plan"]["codec"]) == (row["strategy"], row["codec"]):
                where = {key: row[key] for key in ("model", "lab", "strategy", "codec", "predicted_s")}
                found.append(LabResult(**where, step_s=tuple(measured["step_s"]), others=document["others"]))
    return found


def record(folder: Path) -> None:
    """Keep the results with the tests."""
    names = [name for name in ("twelve", "second", "choice") if (folder / f"{name}-predicted.json").exists()]
    kept = {name: [asdict(each) for each in results(folder, name)] for name in names}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def recorded(name: str) -> list[LabResult]:
    """The results that are kept."""
    return [LabResult(**{**row, "step_s": tuple(row["step_s"])}) for row in json.loads(RECORD.read_text())[name]]


def table(rows: Sequence[LabResult]) -> list[str]:
    """Every run, in Markdown."""
    lines = ["| model | lab | plan | measured ms (range) | predicted ms | error |", "|---|---|---|---|---|---|"]
    for each in rows:
        low, high = min(each.step_s), max(each.step_s)
        plan = each.text.replace("|", "\\|")
        measured = f"{1e3 * each.measured_s:.1f} ({1e3 * low:.1f} – {1e3 * high:.1f})"
        lines.append(
            f"| {each.model} | {each.lab} | `{plan}` | {measured} | {1e3 * each.predicted_s:.1f} | {each.error:+.1%} |"
        )
    return lines


def summary(rows: Sequence[LabResult]) -> str:
    """The errors together."""
    errors = sorted(abs(each.error) for each in rows)
    return f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%} of {len(errors)} runs"


def choices(rows: Sequence[LabResult]) -> list[str]:
    """For each pair of a model and a network: the plan with the shortest predicted step, and that which was fastest."""
    lines = ["| model | lab | chosen | ms | fastest | ms | chosen ÷ fastest |", "|---|---|---|---|---|---|---|"]
    for model, lab in dict.fromkeys((each.model, each.lab) for each in rows):
        own = [each for each in rows if (each.model, each.lab) == (model, lab)]
        chosen, best = min(own, key=lambda each: each.predicted_s), min(own, key=lambda each: each.measured_s)
        texts = [each.text.replace("|", "\\|") for each in (chosen, best)]
        lines.append(
            f"| {model} | {lab} | `{texts[0]}` | {1e3 * chosen.measured_s:.1f} | `{texts[1]}` | "
            f"{1e3 * best.measured_s:.1f} | {chosen.measured_s / best.measured_s:.3f} |"
        )
    return lines


def main(words: Sequence[str]) -> None:
    command, folder, *rest = words
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    match command:
        case "prepare":
            prepare(where, [each for each in rest if "@" in each], [each for each in rest if "@" not in each])
        case "predict":
            predict(where, rest[0])
        case "run":
            run(where, rest[0], rest[1:])
        case "record":
            record(where)
        case "table":
            rows = results(where, rest[0])
            print("\n".join([*table(rows), "", summary(rows), *(choices(rows) if rest[0] == "choice" else [])]))
        case _:
            raise SystemExit(f"unknown command {command!r}: prepare, predict, run, record or table")


if __name__ == "__main__":
    main(sys.argv[1:])
