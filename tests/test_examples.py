"""Each example runs."""

from __future__ import annotations

import pytest

from tests.launching import ROOT, finish, launch, start, torch_variables


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["schedules.py", "--megabytes", "0.1"], "every rank checked its sum"),
        (["schedules.py", "--ranks", "6", "--megabytes", "0.1", "--ranks-per-host", "3"], "hierarchical"),
        (["schedules.py", "--help"], "--bandwidth"),
        (["hello.py"], "ranks [0]"),
        (["train.py"], "1 workers: 3"),
        (["pipeline.py"], "with 1 stages"),
        (["experts.py", "--steps", "20"], "1 workers: "),
        (["simulator_speed.py", "--ranks", "8", "--player-ranks", "16", "--seeds", "5", "--repeats", "2"], "5 seeds"),
    ],
)
def test_example(arguments: list[str], says: str) -> None:
    (ended,) = finish([start([f"examples/{arguments[0]}", *arguments[1:]], {})])
    assert ended.code == 0, ended.err
    assert says in ended.out


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["compare_allreduce.py", "--megabytes", "0.1", "--repeats", "3"], "halving_doubling"),
        (["check_cost.py", "--repeats", "2"], "check adds"),
        (["train.py"], "2 workers: 3"),
        (["pipeline.py"], "with 2 stages"),
        (["experts.py", "--steps", "10"], "2 workers: "),
        (["weird_trick.py", "c"], "with scheme c on 2 workers"),
        (["sparse_logistic.py", "--steps", "20", "--files", "70"], "balanced test accuracy 0."),
        (["topics.py", "--sweeps", "2", "--words", "20", "--files", "30"], "every one is counted once"),
        (["harness_cost.py", "--workload", "digits", "--steps", "5", "--repeats", "1"], "the race's"),
    ],
)
def test_the_measurements_on_gloo(command: list[str], says: str) -> None:
    script = [f"examples/{command[0]}", *command[1:]]
    ended = finish([start(script, each) for each in torch_variables(2)])
    assert [one.code for one in ended] == [0, 0], ended
    assert says in ended[0].out


def test_the_readme_example() -> None:
    text = (ROOT / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (ended,) = launch(code, [{}])
    assert ended.code == 0, ended.err
    assert "World(rank 0 of 1" in ended.out
