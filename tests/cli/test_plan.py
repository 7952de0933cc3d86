"""`syncline plan`: from descriptions or a profile to a table, a sentence and a file."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from xml.dom.minidom import parseString

import pytest

from syncline.cli.main import main
from syncline.cli.placement import Placement
from syncline.planner.profile import TrainingProfile

ROOT = Path(__file__).parents[2]
PROFILE = str(ROOT / "tests" / "parallel" / "data" / "vgg16-profile.json")
GPT = ("plan", "--model", "gpt(layers=32, hidden=4096)", "--cluster")


def test_a_described_model_on_a_described_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plans.json"
    assert main([*GPT, "16 hosts x 8 a100, 100gbit", "--top", "3", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt(layers=32, hidden=4096) on 16 hosts x 8 a100 (128 devices")
    table = printed.split("\n\n")[1].splitlines()
    assert len(table) == 4
    assert re.search(r"limit: .* limits it", printed)
    assert "interval: residuals of 62 published steps of GPT" in printed
    assert "note: storage is not described" in printed
    answer = json.loads(file.read_text())
    assert len(answer["plans"]) == answer["tried"] - answer["do_not_fit"] - answer["not_predicted"]
    for plan in answer["plans"]:
        assert sum(plan["parts_s"].values()) == pytest.approx(plan["step_s"])
        assert plan["interval_s"][0] < plan["step_s"] < plan["interval_s"][1]
        assert sum(plan["memory_by_kind"].values()) == pytest.approx(plan["memory_bytes"])
    assert answer["plans"][0]["plan"] in table[1]


def test_the_page_of_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "new" / "plan.html", tmp_path / "plans.json"
    cluster = "2 hosts x 4 a100, 10gbit, $2 an hour"
    words = ["plan", "--model", "gpt(8, 1024)", "--cluster", cluster, "--codec", "topk(0.01)", "--top", "4"]
    target = ["--epochs", "8:30, 512:31", "--samples", "9000"]
    assert main([*words, *target, "--json", str(file), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"written: {page}\n")
    text, answer = page.read_text(), json.loads(file.read_text())
    pictures = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert [re.findall(r"aria-labelledby=.about-(\w+)", each) for each in pictures] == [
        ["steps"],
        ["memory"],
        ["scaling"],
    ]
    for each in pictures:
        parseString(each)  # noqa: S318 (it was written here)
    assert re.findall(r"#[0-9a-f]{6};", "".join(pictures)) == []  # the page's colours, light and dark
    plain = unescape(re.sub(r"<[^>]+>", "", text))
    for sentence in (answer["limit"]["sentence"], *answer["remarks"]):
        assert sentence[1:] in plain
    for note in answer["notes"]:
        assert note in plain
    plans = re.search(r'<section id="plans">.*?</section>', text, flags=re.DOTALL)
    assert plans is not None
    shown = [unescape(re.sub(r"<[^>]+>", "", row)) for row in re.findall(r'<th scope="row">.*?</th>', plans[0])]
    assert shown == [f"plan {number} {plan['plan']}" for number, plan in enumerate(answer["plans"][:4], 1)]
    assert re.findall(r"https?:|@import|\bsrc=", text) == []
    scaled = re.search(r'<section id="scaled">.*?</section>', text, flags=re.DOTALL)
    assert scaled is not None
    assert re.findall(r'<td class="n">(\d+)</td><td class="n">(\d+)</td>', scaled[0]) == [
        (str(ranks), str(8 * ranks)) for ranks in (1, 2, 4, 8)
    ]


def test_a_profile_with_time_and_cost_to_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "4 hosts x 4 v100, 10gbit, $2 an hour"
    target = ("--epochs", "1664:36.2, 3328:41, 33280:56", "--samples", "1281167")
    words = ["plan", PROFILE, "--cluster", cluster, "--batch", "2048", *target, "--codec", "topk(0.01)"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "to target" in printed
    assert re.search(r"\$\d", printed)
    assert "compression with topk(0.01)" in printed
    assert "tensor" not in printed.split("\n\n")[1]
    assert "interval: residuals of 27 published scaling rows" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*GPT, "16 hosts x 8 a100"), "no bandwidth between them"),
        ((*GPT, "1 hosts x 1 a100"), "no plan fits"),
        (
            ("plan", "--model", "mlp([8, 8])", "--cluster", "1 hosts x 8 a100", "--batch", "7"),
            "a batch of 7 cannot be divided",
        ),
        ((*GPT, "1 hosts x 8 a100", "--batch", "0"), "the batch is 0"),
        ((*GPT, "1 hosts x 8 a100", "--top", "0"), "print at least one plan"),
        ((*GPT, "1 hosts x 8 a100", "--strategy", "horovod"), "unknown strategy 'horovod'"),
        ((*GPT, "1 hosts x 8 a100", "--codec", "zip(3)"), "unknown codec 'zip'"),
        ((*GPT, "1 hosts x 8 a100", "--epochs", "256:30"), "has one point"),
        ((*GPT, "1 hosts x 8 a100", "--epochs", "256:30, 512:31"), "needs both"),
        (("plan", "--cluster", "1 hosts x 8 a100"), "give a profile, or --model"),
        (("plan", PROFILE, "--model", "vgg", "--cluster", "1 hosts x 8 a100"), "one of them"),
        (("plan", PROFILE, "--cluster", "1 hosts x 8 v100", "--batch", "8"), "use a batch of"),
        (("plan", PROFILE, "--cluster", "1 hosts x 8 v100", "--precision", "half"), "leave out --precision"),
        (("plan", PROFILE), "--measure here, --hosts a:2,b:2 or --lab"),
        (("plan", PROFILE, "--cluster", "1 hosts x 8 v100", "--hosts", "a,b"), "--cluster and --hosts name different"),
        (("plan", PROFILE, "--cluster", "1 hosts x 8 v100", "-n", "4"), "leave -n out"),
        (("plan", PROFILE, "--measure", "here", "-n", "1"), "at least 2 workers"),
        (("plan", PROFILE, "--measure", "here"), "neither FLOPs nor memory"),
        (("plan", "--model", "vgg", "--measure", "here"), "--measure needs a profile"),
        (("plan", "nowhere.json", "--cluster", "1 hosts x 8 v100"), "nowhere.json cannot be read"),
        ((*GPT, "1 hosts x 8 a100", "--html", "/dev/null/plan.html"), "name another folder with --html"),
        ((*GPT, "1 hosts x 8 a100", "--html", str(ROOT / "tests")), "tests cannot be written (Is a directory)"),
    ],
)
def test_impossible_questions_get_a_sentence(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_interrupted_measurement_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher returns 130 after Ctrl-C, and so does the command."""
    monkeypatch.setattr(Placement, "run", lambda placement, job: 130)
    monkeypatch.setattr(TrainingProfile, "read", lambda path: None)
    assert main(["plan", PROFILE, "--measure", "here"]) == 130


def test_options_of_other_tools_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*GPT, "1 hosts x 8 a100", "--gpus=8"])
    assert 'write --cluster "16 hosts x 8 a100, 100gbit"' in capsys.readouterr().err


def test_a_profile_gets_the_choice_of_pipedreams_partitioner(capsys: pytest.CaptureFixture[str]) -> None:
    """The stages that PipeDream's code has for VGG-16 on four machines."""
    assert main(["plan", PROFILE, "--cluster", "4 hosts x 1 a100, 10gbit", "--batch", "512"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"pipedream's partitioner, .* chooses 3-1, cut before \S+: \d+.* samples/s \(all-reduce after", printed
    )
