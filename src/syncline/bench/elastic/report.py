"""Runs everything that `syncline bench elastic` measures, and presents it: `measure` and `table`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from syncline.bench.elastic.analysis import (
    Growth,
    WorkerJournal,
    admissions,
    check_pushes,
    count_batches,
    count_steps,
    growth,
    median_step,
    percentile,
    read_journals,
    recoveries,
)
from syncline.bench.elastic.plan import ElasticPlan, strategy_of
from syncline.bench.elastic.runner import JobRun, Say, run_job, unexpected_losses
from syncline.bench.measuring import Summary, summarize
from syncline.strategies import build_strategy
from syncline.workloads import build

__all__ = ["analyse", "compare", "measure", "table"]

MEGABYTE = 1e6
MAX_SHOWN_LOSSES = 3
MIN_SLOPE_S = 600.0
"""A slope of memory is shown only for processes that were observed for this long."""


def measure(plan: ElasticPlan, folder: Path, say: Say) -> dict[str, Any]:
    """Run all jobs one after the other. The document is written after each of them, and returned."""
    document: dict[str, Any] = {"kind": "elastic", "plan": asdict(plan), "contenders": {}, "runs": []}
    if plan.against:
        from syncline.bench.elastic.torchft_worker import CONTENDERS

        document["contenders"] = {spec: CONTENDERS.build(spec).settings for spec in plan.against}
    for schedule in plan.schedule():
        run = run_job(plan, schedule, folder / schedule.name, say)
        result = analyse(run, plan)
        document["runs"].append(result)
        document["strategies"] = compare(document["runs"])
        (folder / "elastic.json").write_text(json.dumps(document, indent=1))
        say(f"{schedule.name}: {describe_end(result)}")
    return document


def analyse(run: JobRun, plan: ElasticPlan) -> dict[str, Any]:
    """The figures of one run."""
    journals, kills = read_journals(run.journals), run.kills
    seconds = max(run.stop - run.start, 1e-9)
    synchronous = not build_strategy(strategy_of(run.schedule.strategy)).asynchronous
    batches = count_batches(journals.values(), run.start, run.stop)
    steps = count_steps(journals.values(), run.start, run.stop) if synchronous else batches
    step_s = median_step(journals.values())
    recovered = recoveries(journals, kills, run.stop)
    joins = admissions(journals, kills, step_s)
    workload = build(plan.workload)
    metric, target = workload.metric, workload.defaults.target
    values = [one.end["metrics"][metric] for one in journals.values() if one.end is not None]
    pushes = check_pushes(journals, [kill.member for kill in kills if kill.member is not None])
    return {
        "name": run.schedule.name,
        "strategy": run.schedule.strategy,
        "turn": run.schedule.turn,
        "disturbed": run.schedule.disturbed,
        "synchronous": synchronous,
        "seconds": seconds,
        "code": run.code,
        "problem": run.problem,
        "refused": _refusal(journals, kills),
        "steps": steps,
        "batches": batches,
        "median_step_s": step_s,
        "kills": [{"s": kill.time - run.start, "program": kill.program} for kill in kills],
        "skipped_kills": run.skipped_kills,
        "next_step_s": [list(one.next_step_s.values()) for one in recovered],
        "pause_s": [list(one.pause_s.values()) for one in recovered],
        "stuck": sorted({member for one in recovered for member in one.stuck}),
        "joins": [
            {
                "member": one.member,
                "s": one.time - run.start,
                "start_s": one.start_s,
                "extra_s": [*one.extra_s.values()],
            }
            for one in joins
        ],
        "metric": metric,
        "values": values,
        "target": target,
        "reached": target is not None and bool(values) and all(workload.reached(value, target) for value in values),
        "memory": _memory(run),
        "pushes": None if pushes is None else {**asdict(pushes), "lost": pushes.lost, "doubled": pushes.doubled},
        "unexpected": unexpected_losses(run.output.read_text(errors="replace"), kills),
        "zombies": run.max_zombies,
        "left_processes": run.left_processes,
        "left_files": run.left_files,
    }


def _refusal(journals: Mapping[int, WorkerJournal], kills: Sequence[object]) -> str | None:
    """Why the strategy refuses this job, or refuses newcomers."""
    first = next((one.refused for one in journals.values() if one.refused and not one.joined), None)
    joined = next((one.refused for one in journals.values() if one.refused and one.joined), None)
    return first if first is not None else f"newcomers: {joined}" if joined is not None else None


def _memory(run: JobRun) -> dict[str, dict[str, Any]]:
    """Memory in MB and descriptors of the launcher, and of the worker and the server with the longest lives."""
    found: dict[str, dict[str, Any]] = {}
    for title, prefix in (
        ("launcher", "launcher"),
        ("longest-lived worker", "rank "),
        ("longest-lived server", "server "),
    ):
        programs = [program for program in run.samples if program.startswith(prefix)]
        name = max(programs, key=lambda program: len(run.samples[program]), default=prefix)
        samples = run.samples.get(name, [])
        memory = growth([(seconds, nbytes / MEGABYTE) for seconds, nbytes, _ in samples])
        files = growth([(seconds, float(count)) for seconds, _, count in samples])
        if memory is not None and files is not None:
            observed = samples[-1][0] - samples[0][0]
            found[title] = {
                "program": name,
                "s": observed,
                "megabytes": asdict(memory),
                "descriptors": asdict(files),
                "samples": samples,
            }
    return found


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By strategy: medians over its runs with losses, and the ratios to the undisturbed ones of the same round.

    Runs of different lengths are compared by their rates.
    """
    found: dict[str, dict[str, Any]] = {}
    for spec in dict.fromkeys(run["strategy"] for run in runs):
        own = [run for run in runs if run["strategy"] == spec]
        lossy = [run for run in own if run["disturbed"]]
        plain = {run["turn"]: run for run in own if not run["disturbed"]}
        pairs = [(run, plain[run["turn"]]) for run in lossy if run["turn"] in plain]
        steps = [_rate(run, "steps") / _rate(other, "steps") for run, other in pairs if other["steps"]]
        batches = [_rate(run, "batches") / _rate(other, "batches") for run, other in pairs if other["batches"]]
        found[spec] = {
            "kills": sum(len(run["kills"]) for run in lossy),
            "next_step_s": _spread([value for run in lossy for each in run["next_step_s"] for value in each]),
            "slowest_next_step_s": _spread([max(each) for run in lossy for each in run["next_step_s"] if each]),
            "pause_s": _spread([value for run in lossy for each in run["pause_s"] for value in each]),
            "slowest_pause_s": _spread([max(each) for run in lossy for each in run["pause_s"] if each]),
            "joins": sum(len(run["joins"]) for run in lossy),
            "join_start_s": _spread([join["start_s"] for run in lossy for join in run["joins"]]),
            "join_extra_s": _spread([seconds for seconds, _ in _join_costs(lossy)]),
            "join_extra_steps": _spread([steps for _, steps in _join_costs(lossy)]),
            "steps_ratio": asdict(summarize(steps)) if steps else None,
            "batches_ratio": asdict(summarize(batches)) if batches else None,
        }
    return found


def _join_costs(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The highest cost of each newcomer for one of the others, in seconds and in median steps."""
    joins = [(join["extra_s"], run["median_step_s"]) for run in runs for join in run["joins"]]
    return [(max(extra), max(extra) / step_s) for extra, step_s in joins if extra and step_s]


def _rate(run: Mapping[str, Any], what: str) -> float:
    return float(run[what]) / float(run["seconds"])


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median with its interval, 95th percentile and maximum; None without values."""
    if not values:
        return None
    return {**asdict(summarize(values)), "p95": percentile(values, 0.95), "max": max(values)}


def failed(run: Mapping[str, Any]) -> bool:
    """Whether something went wrong in a run."""
    pushes = run["pushes"] or {"lost": 0, "doubled": 0}
    wrong = (run["problem"], run["refused"], run["stuck"], run["unexpected"], run["left_processes"], run["left_files"])
    return run["code"] != 0 or any(wrong) or bool(pushes["lost"] or pushes["doubled"])


def describe_end(run: Mapping[str, Any]) -> str:
    """How a run ended, in a sentence."""
    if run["refused"]:
        return f"refused: {run['refused']}"
    if run["problem"]:
        return f"{run['problem']} (exit code {run['code']})"
    if run["code"] != 0:
        return f"the job failed (exit code {run['code']})"
    value = f", {run['metric']} {statistics.median(run['values']):.4g}" if run["values"] else ""
    if run["target"] is not None:
        value += f" (target {run['target']:g} {'reached' if run['reached'] else 'not reached'})"
    return f"{run['steps']} steps in {run['seconds']:.0f} s, {len(run['kills'])} kills{value}"


def table(document: Mapping[str, Any]) -> str:
    """All figures as text, a block for each strategy."""
    plan, runs = document["plan"], document["runs"]
    servers = f", {plan['servers']} servers, {plan['replicas']} replicas" if plan["servers"] else ""
    what = "frozen (SIGSTOP)" if plan["lost"] == "freeze" else "killed (SIGKILL)"
    lines = [
        f"{plan['workload']} on {plan['workers']} workers{servers}, {plan['transport'] or 'torch_dist'}: one of the "
        f"{'processes' if plan['kill'] == 'both' else plan['kill']} {what} every {plan['kill_every']:g} s"
    ]
    for spec, figures in document.get("strategies", {}).items():
        own = [run for run in runs if run["strategy"] == spec]
        settings = [f"{name} {value}" for name, value in document.get("contenders", {}).get(spec, {}).items()]
        about = [", ".join(settings)] if settings else []
        lines += ["", spec, *(f"  {line}" for line in (*about, *_figures(figures, own), *_checks(own)))]
    return "\n".join([*lines, *_side_by_side(document)])


def _side_by_side(document: Mapping[str, Any]) -> list[str]:
    """The medians of all strategies and contenders, a row for each; empty if there is only one."""
    titles = ("steps", "undisturbed", "steps ÷", "next step", "pause", "newcomer's start", "its cost")
    rows = []
    for spec, figures in document.get("strategies", {}).items():
        own = [run for run in document["runs"] if run["strategy"] == spec]
        counts = [sum(run["steps"] for run in own if run["disturbed"] is lossy) for lossy in (True, False)]
        keys = ("steps_ratio", "slowest_next_step_s", "slowest_pause_s", "join_start_s", "join_extra_s")
        spreads = [figures[key] for key in keys]
        values = [str(count) for count in counts] + [f"{one['median']:.3g}" if one else "-" for one in spreads]
        rows.append((spec, *values))
    if len(rows) < 2:
        return []
    width = max(len(row[0]) for row in rows)
    lines = [f"{'':<{width}}  {'  '.join(titles)}"]
    lines += [f"{first:<{width}}  {'  '.join(map(str.rjust, rest, map(len, titles)))}" for first, *rest in rows]
    return ["", *lines, "medians, in seconds; next step and pause of the slowest survivor"]


def _figures(figures: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{run['name']:<36} {describe_end(run)}" for run in runs]
    if not figures["kills"]:
        return lines
    rows = [("seconds", "median, 95 % interval", "p95", "max")]
    for key, title in (
        ("next_step_s", "kill to a survivor's next step"),
        ("slowest_next_step_s", "kill to the slowest's next step"),
        ("pause_s", "a survivor's longest pause"),
        ("slowest_pause_s", "the slowest's longest pause"),
        ("join_start_s", "newcomer: start to first step"),
        ("join_extra_s", "newcomer: cost for the others"),
        ("join_extra_steps", "the same in steps"),
    ):
        spread = figures[key]
        if spread is not None:
            rows.append((title, _summary(spread).text(".3g"), f"{spread['p95']:.3g}", f"{spread['max']:.3g}"))
    lines += [f"{first:<32} {second:<28} {third:>7} {fourth:>7}" for first, second, third, fourth in rows]
    for key, title in (("steps_ratio", "steps ÷ undisturbed"), ("batches_ratio", "batches ÷ undisturbed")):
        if figures[key] is not None:
            lines.append(f"{title:<32} {_summary(figures[key]).text('.3g')}")
    return lines


def _summary(spread: Mapping[str, Any]) -> Summary:
    return Summary(spread["median"], spread["low"], spread["high"], spread["samples"])


def _checks(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was checked in each run, and everything that was wrong."""
    lines = []
    for run in runs:
        if run["disturbed"]:
            for title, use in run["memory"].items():
                lines.append(f"{title:<32} {_growth_text(use)}")
        if run["pushes"] is not None:
            lines.append(f"{'pushes':<32} {_pushes_text(run['pushes'])}")
        skipped = run["skipped_kills"]
        wrong = {
            "skipped kills": [f"{len(skipped)}; the first {skipped[0]}"] if skipped else [],
            "survivors that stood still": run["stuck"],
            "processes left": run["left_processes"],
            "temporary files left": run["left_files"],
        }
        lines += [f"{title:<32} {', '.join(map(str, found))}" for title, found in wrong.items() if found]
        for sentence in run["unexpected"][:MAX_SHOWN_LOSSES]:
            lines.append(f"{'unexpected loss':<32} {sentence}")
        if len(run["unexpected"]) > MAX_SHOWN_LOSSES:
            lines.append(f"{'':<32} and {len(run['unexpected']) - MAX_SHOWN_LOSSES} more: see output.txt")
    return lines


def _growth_text(use: Mapping[str, Any]) -> str:
    memory, files = Growth(**use["megabytes"]), Growth(**use["descriptors"])
    slope = f" ({memory.per_hour:+.1f} MB an hour)" if use["s"] >= MIN_SLOPE_S else ""
    return (
        f"{memory.first:.1f} to {memory.last:.1f} MB{slope}, {files.first:.0f} to {files.last:.0f} descriptors "
        f"({use['program']}, {use['s']:.0f} s)"
    )


def _pushes_text(pushes: Mapping[str, Any]) -> str:
    text = f"{pushes['acknowledged']} acknowledged, {pushes['applied']} counted by the servers"
    text += f" (up to {pushes['unknown']} of killed workers were in flight)" if pushes["unknown"] else ""
    if pushes["lost"] or pushes["doubled"]:
        return f"{text}: {pushes['lost']} LOST, {pushes['doubled']} DOUBLED"
    return f"{text}: none lost, none doubled"
