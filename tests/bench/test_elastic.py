"""`syncline bench elastic`: exact figures from made-up journals, and one short run of real processes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.elastic.analysis import (
    PushCheck,
    VictimKill,
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
from syncline.bench.elastic.plan import ElasticPlan
from syncline.bench.elastic.report import compare, failed, table
from syncline.bench.elastic.runner import ProcessTable, unexpected_losses
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from tests.launch.runs import Runs

END = {"metrics": {"accuracy": 0.9}, "steps": 1}


def journal(
    member: int, times: list[float], *, first: int = 1, joined: bool = False, ended: bool = True
) -> WorkerJournal:
    steps = list(range(first, first + len(times)))
    sizes = [2] * len(times)
    began = times[0] - 0.5 if times else 0.0
    end = END if ended else None
    return WorkerJournal(member, 100 + member, joined, began, times, steps, sizes, end=end)


def by_member(*journals: WorkerJournal) -> dict[int, WorkerJournal]:
    return {one.member: one for one in journals}


def kill(time: float, member: int) -> VictimKill:
    return VictimKill(time, f"rank {member}", 100 + member)


def test_next_step_and_pause_of_each_survivor() -> None:
    # A step of worker 0 was almost complete at the kill. The pause of 0.5 s before the newcomer's step does not count.
    steady = [3.25 + 0.25 * number for number in range(9)]
    journals = by_member(
        journal(0, [2.25, 2.375, 2.625, 3.0, *steady, 5.75, 6.0]),
        journal(1, [2.25, 2.375, 3.125, *steady, 5.75, 6.0]),
        journal(2, [2.25, 2.375], ended=False),
        journal(3, [5.75, 6.0], joined=True),
    )
    (found,) = recoveries(journals, [kill(2.5, 2)], end=7.0)
    assert found.next_step_s == {0: 0.125, 1: 0.625}
    assert found.pause_s == {0: 0.375, 1: 0.75}
    assert found.stuck == ()


def test_survivors_that_stand_still_are_named_unless_they_were_killed_too() -> None:
    journals = by_member(
        journal(0, [1.0, 2.0, 5.0]),
        journal(1, [1.0, 2.0], ended=False),
        journal(2, [1.0], ended=False),
        journal(3, [1.0, 2.0], ended=False),
        journal(4, [4.0], joined=True),
    )
    first, second = recoveries(journals, [kill(1.5, 2), kill(3.0, 3)], end=9.0)
    assert (first.next_step_s, first.stuck) == ({0: 0.5, 1: 0.5, 3: 0.5}, ())
    assert (second.next_step_s, second.stuck) == ({0: 2.0}, (1,))


def test_newcomer_costs_the_others_their_longest_step_around_its_first() -> None:
    journals = by_member(
        journal(0, [9.0, 10.0, 10.25, 10.5, 11.25, 11.5, 12.25, 14.0]),  # 1.5 s come later
        journal(1, [9.0, 10.0, 10.25, 10.5, 10.75, 11.0, 11.25, 11.5, 11.75, 12.0, 12.25, 14.0]),
        replace(journal(3, [11.25, 11.5], joined=True), began=10.375),
    )
    (found,) = admissions(journals, [], median_s=0.25)
    assert (found.member, found.time, found.start_s) == (3, 11.25, 0.875)
    assert found.extra_s == {0: 0.5, 1: 0.0}


def test_pause_that_began_before_the_newcomer_is_not_its_cost() -> None:
    # As with torchft: a step is complete shortly after the kill, and the newcomer arrives in the pause that follows.
    journals = by_member(journal(0, [9.0, 10.125, 15.125, 15.375]), journal(3, [15.125], joined=True))
    (found,) = admissions(journals, [kill(10.0, 1)], median_s=0.25)
    assert found.extra_s == {0: 0.0}


def test_pause_of_a_kill_is_not_the_cost_of_a_newcomer() -> None:
    journals = by_member(journal(0, [9.0, 11.0, 11.25, 11.5]), journal(3, [11.25], joined=True))
    (found,) = admissions(journals, [kill(10.5, 1)], median_s=0.25)
    assert found.extra_s == {0: 0.0}


def test_steps_of_a_team_and_batches_of_all() -> None:
    journals = [
        journal(0, [1.0, 2.0, 3.0, 4.0], first=11),
        journal(1, [1.0, 2.0], first=11),
        journal(2, [4.0, 5.0], first=14),
    ]
    assert count_steps(journals, 1.0, 4.0) == 3
    assert count_batches(journals, 1.0, 4.0) == 5
    assert count_steps(journals, 1.0, 5.0) == 4
    assert median_step(journals) == 1.0
    assert median_step([]) == 0.0


def test_growth_leaves_the_warm_up_out() -> None:
    found = growth([(0.0, 100.0), (1800.0, 200.0), (3600.0, 202.0)])
    assert found is not None
    assert (found.first, found.last, found.per_hour, found.samples) == (200.0, 202.0, 4.0, 2)
    assert growth([]) is None
    assert growth([(1.0, 5.0)]) is None


def with_clocks(member: int, clock: int, applied: int, end: tuple[int, int] | None = None) -> WorkerJournal:
    ended = None if end is None else {**END, "clock": end[0], "applied": end[1]}
    return replace(journal(member, [1.0]), clocks=[clock], applied=[applied], end=ended)


@pytest.mark.parametrize(
    ("applied", "expected", "lost", "doubled"),
    [
        (25, PushCheck(25, 25, 2), 0, 0),
        (27, PushCheck(25, 27, 2), 0, 0),  # the killed worker had two pushes in flight
        (24, PushCheck(25, 24, 2), 1, 0),
        (28, PushCheck(25, 28, 2), 0, 1),
    ],
)
def test_lost_and_doubled_pushes_are_found(applied: int, expected: PushCheck, lost: int, doubled: int) -> None:
    journals = by_member(with_clocks(0, 9, 20, (15, applied)), with_clocks(1, 10, 21))
    found = check_pushes(journals, [1])
    assert found == expected
    assert (found.lost, found.doubled) == (lost, doubled)
    assert check_pushes(by_member(journal(0, [1.0])), []) is None


def test_journals_on_disk_are_read_to_the_last_whole_line(tmp_path: Path) -> None:
    first = {"member": 1, "place": 3, "pid": 7, "joined": False, "time": 0.5}
    (tmp_path / "worker-1.txt").write_text(f"{json.dumps(first)}\n1.5 3 2 3 5\n2.5 4 2 4 7\n3.5 5")
    (tmp_path / "worker-0.txt").write_text(
        f'{json.dumps({**first, "member": 0, "joined": True})}\n{{"refused": "no"}}\n'
    )
    (tmp_path / "worker-2.txt").write_text("")
    found = read_journals(tmp_path)
    assert [*found] == [0, 1]
    assert found[1].times == [1.5, 2.5]
    assert (found[1].steps, found[1].clocks, found[1].applied) == ([3, 4], [3, 4], [5, 7])
    assert (found[0].refused, found[0].joined) == ("no", True)
    processes = ProcessTable(os.getpid(), tmp_path)
    processes.update()
    assert (processes.workers(), processes.trained(), processes.last_step()) == ({0: 7, 1: 7}, {1: 7}, 4)
    assert processes.place_of(1) == 3


def test_a_process_that_uses_the_id_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    processes = ProcessTable(os.getpid(), tmp_path)
    processes.update()
    assert processes.lives(os.getpid())
    processes.start_times[os.getpid()] = "1"  # the start time of the earlier process
    assert not processes.lives(os.getpid())


def test_unexpected_losses_are_those_of_others_than_the_victims() -> None:
    output = (
        "syncline: rank 1 was killed by signal 9 (SIGKILL); it is started again in 1 s\n"
        "syncline: rank 2 failed (exit code 1); the others go on\n[3] rank 4 failed\n"
        "syncline: server 1 was killed by signal 9 (SIGKILL); its replicas continue\n"
        "syncline: server 0 failed (exit code 1)\n"
    )
    kills = [kill(1.0, 1), VictimKill(2.0, "server process 7", 7)]
    assert unexpected_losses(output, kills) == [
        "rank 2 failed (exit code 1); the others go on",
        "server 0 failed (exit code 1)",
    ]


def result(**changes: Any) -> dict[str, Any]:
    usual = {
        "name": "allreduce-losses-1", "strategy": "allreduce", "turn": 0, "disturbed": True, "synchronous": True,
        "seconds": 10.0, "code": 0, "problem": None, "refused": None, "steps": 90, "batches": 300,
        "median_step_s": 0.1, "kills": [{"s": 5.0, "program": "rank 1"}], "skipped_kills": [],
        "next_step_s": [[0.25, 0.5]], "pause_s": [[0.5, 0.75]], "stuck": [],
        "joins": [{"member": 4, "s": 7.0, "start_s": 1.0, "extra_s": [0.1, 0.2]}], "metric": "accuracy",
        "values": [0.9, 0.9], "target": 0.95, "reached": False, "memory": {}, "pushes": None, "unexpected": [],
        "zombies": 0, "left_processes": [], "left_files": [],
    }  # fmt: skip
    return usual | changes


def test_strategies_are_compared_with_their_undisturbed_runs() -> None:
    plain = result(name="allreduce-undisturbed-1", disturbed=False, seconds=5.0, steps=50, batches=200, kills=[])
    runs = [result(), plain | {"next_step_s": [], "pause_s": [], "joins": []}]
    found = compare(runs)["allreduce"]
    assert found["steps_ratio"]["median"] == 0.9
    assert found["batches_ratio"]["median"] == 0.75
    assert (found["next_step_s"]["median"], found["slowest_next_step_s"]["max"]) == (0.375, 0.5)
    assert (found["pause_s"]["median"], found["slowest_pause_s"]["p95"]) == (0.625, 0.75)
    assert (found["join_extra_s"]["max"], found["join_extra_steps"]["max"]) == (0.2, 2.0)
    plan = vars(ElasticPlan())
    text = table({"plan": plan, "runs": runs, "strategies": compare(runs)})
    assert "steps ÷  next step" not in text, "there is nothing to compare with"
    assert "90 steps in 10 s, 1 kills, accuracy 0.9 (target 0.95 not reached)" in text
    assert "steps ÷ undisturbed              0.9 (n=1)" in text


def test_contender_is_shown_beside_the_strategy() -> None:
    runs = [result(), result(name="torchft-losses-1", strategy="torchft", steps=45, joins=[], pause_s=[[5.0, 5.5]])]
    contenders = {"torchft": {"torchft-nightly": "2026.10.26", "heartbeat timeout": "5 s"}}
    found = {"plan": vars(ElasticPlan()), "contenders": contenders, "runs": runs, "strategies": compare(runs)}
    text = table(found)
    assert "\ntorchft\n  torchft-nightly 2026.10.26, heartbeat timeout 5 s\n" in text
    rows = [line.split() for line in text.splitlines()[-3:-1]]
    assert rows == [
        ["allreduce", "90", "0", "-", "0.5", "0.75", "1", "0.2"],
        ["torchft", "45", "0", "-", "0.5", "5.5", "-", "-"],
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"code": 1},
        {"refused": "needs the same workers"},
        {"stuck": [3]},
        {"unexpected": ["rank 2 failed"]},
        {"left_files": ["socket"]},
        {"pushes": {"acknowledged": 5, "applied": 4, "unknown": 0, "lost": 1, "doubled": 0}},
    ],
)
def test_whatever_went_wrong_is_in_the_table_and_in_the_exit_code(changes: dict[str, Any]) -> None:
    assert not failed(result())
    run = result(**changes)
    assert failed(run)
    text = table({"plan": vars(ElasticPlan()), "runs": [run], "strategies": compare([run])})
    assert text != table({"plan": vars(ElasticPlan()), "runs": [result()], "strategies": compare([result()])})


def test_runs_with_and_without_losses_take_turns() -> None:
    plan = ElasticPlan(strategies=("a", "b"), seconds=60, rounds=2, undisturbed=30)
    names = [(run.strategy, run.disturbed, run.seconds) for run in plan.schedule()]
    assert names == [
        ("a", True, 60), ("a", False, 30), ("b", True, 60), ("b", False, 30),
        ("a", False, 30), ("a", True, 60), ("b", False, 30), ("b", True, 60),
    ]  # fmt: skip
    assert len({run.name for run in plan.schedule()}) == 8
    plan = replace(plan, against=("torchft",), rounds=1)
    assert [(run.strategy, run.name) for run in plan.schedule()][4:] == [
        ("torchft", "torchft-losses-1"), ("torchft", "torchft-undisturbed-1"),
    ]  # fmt: skip
    assert percentile([1.0], 0.95) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 1}, "-n 1: at least 2"),
        ({"seconds": 0}, "--seconds 0: a finite time"),
        ({"kill_every": -1}, "--kill-every -1"),
        ({"seconds": 11, "kill_every": 8}, "no kill falls into the run"),
        ({"strategies": ("alreduce",)}, "did you mean 'allreduce'"),
        ({"strategies": ()}, "no strategy is named"),
        ({"workload": "mnist"}, "did you mean 'digits'"),
        ({"undisturbed": -1}, "--undisturbed -1"),
        ({"rounds": 0}, "--rounds 0"),
        ({"batch": 0}, "--batch 0"),
        ({"learning_rate": 0}, "--learning-rate 0"),
        ({"kill": "both"}, "there are no servers"),
        ({"against": ("torchtf",)}, "did you mean 'torchft'"),
        ({"against": ("torchft",), "servers": 2}, "torchft has no servers"),
        ({"kill": "servers", "servers": 2}, "add --replicas 2"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, IncompatibleError), match=message):
        ElasticPlan(**options).check()


def test_job_that_loses_a_worker_is_measured(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    try:
        options = ("-n", "2", "--seconds", "6", "--kill-every", "2", "--undisturbed", "0", "--out", "found")
        run = runs.run("bench", "elastic", *options)
        assert run.code == 0, f"{run.describe()}\n{(tmp_path / 'found/allreduce-losses-1/output.txt').read_text()}"
        (found,) = json.loads((tmp_path / "found/elastic.json").read_text())["runs"]
        assert len(found["kills"]) == 1
        assert [len(each) for each in found["next_step_s"]] == [1]
        assert found["steps"] > 0
        assert "kill to a survivor's next step" in run.out
        assert "of 6 s, 2 workers, step " in run.err
        runs.assert_nothing_left()
    finally:
        runs.close()


def test_missing_torchft_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(UnsupportedError, match=r"torchft is not installed here .*: pip install torchft-nightly=="):
        ElasticPlan(against=("torchft(heartbeat_timeout=1)",)).check()


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_torchft_loses_the_same_worker(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    try:
        options = ("-n", "2", "--seconds", "8", "--kill-every", "2", "--undisturbed", "0", "--out", "found")
        fast = "torchft(heartbeat_timeout=0.5, group_timeout=0.5)"
        run = runs.run("bench", "elastic", "--against", fast, *options)
        assert f"written: {Path('found') / 'elastic.json'}" in run.out, run.describe()
        document = json.loads((tmp_path / "found/elastic.json").read_text())
        ours, theirs = document["runs"]
        assert document["contenders"][fast]["heartbeat timeout"] == "0.5 s"
        assert (ours["strategy"], theirs["strategy"]) == ("allreduce", fast)
        assert theirs["kills"][0]["program"] == ours["kills"][0]["program"]
        assert theirs["steps"] > 0
        assert "the job ended well" in next(tmp_path.glob("found/torchft*/output.txt")).read_text()
        runs.assert_nothing_left()
    finally:
        runs.close()
