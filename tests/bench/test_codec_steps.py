"""`syncline bench step` with codecs: the labs it goes through, the echo, the contenders, the table."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.bench.step import StepPlan, codec_steps_table, describe_link, measure_link, step_table
from syncline.bench.step_contenders import ranks_agree
from syncline.cli.bench_step import step_labs
from syncline.cli.main import main
from syncline.errors import SpecError
from syncline.launch.lab import Lab
from syncline.launch.link_rate import FRAME_BYTES, FRAME_PAYLOAD_BYTES
from syncline.launch.start import Job
from syncline.transports.network import Link
from syncline.world import World
from tests.launching import finish, start

CODEC = "topk(0.01)|quantize(4)"


def bench(tmp_path: Path, *arguments: str) -> str:
    """Run the command as a user would; what it printed."""
    command = ["-m", "syncline", "bench", "step", *arguments, "--out", str(tmp_path / "out")]
    (ended,) = finish([start(command, {"SYNCLINE_CACHE": str(tmp_path)})])
    assert ended.code == 0, ended.err
    return ended.out


@pytest.mark.xdist_group("launch")
def test_codecs_beside_ddp_and_the_compute_alone(tmp_path: Path) -> None:
    asked = ["--codec", f"none;{CODEC}", "--codec", "cast('fp16')", "--against", "ddp,ddp-fp16"]
    printed = bench(tmp_path, *asked, "--rounds", "1", "--turns", "3")
    document = json.loads((tmp_path / "out" / "step.json").read_text())
    (row,) = document["results"]
    ours = ["none", CODEC, "cast('fp16')"]
    assert {name: len(own) for name, own in row["seconds"].items()} == dict.fromkeys(
        [*ours, "ddp", "ddp-fp16", "alone"], 3
    )
    assert row["ranks_agree"] == dict.fromkeys(ours, True)
    assert row["same_bits"], "two ranks add two numbers: there is one way"
    assert row["faster"]["ddp"]["median"] == row["of_alone"]["alone"]["median"] == 1
    dense = 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    used = row["used"]
    assert dense <= used["none"]["bytes_wire"] < 1.01 * dense
    assert dense / 2 <= used["cast('fp16')"]["bytes_wire"] < 0.51 * dense
    assert 0 < used[CODEC]["bytes_wire"] < 0.01 * dense
    assert used["none"]["codec_seconds"] == 0 < used[CODEC]["codec_seconds"]
    assert all(own["exposed_seconds"] > 0 for own in used.values())
    assert document["memory"] == [], "not with several codecs, unless it is asked for"
    for words in (*ours, "ddp ÷ it", "÷ alone", "wire KB", "codec ms", "exposed ms", "agree, as ddp's"):
        assert words in printed


@pytest.mark.xdist_group("launch")
def test_a_lab_is_checked_by_an_echo(tmp_path: Path) -> None:
    try:
        Lab(2, "1gbit", check=False).close()
    except sl.SynclineError as error:
        pytest.skip(str(error))
    asked = ["--codec", "cast('fp16')", "--lab", "2", "--rate", "1gbit", "--against", "ddp-fp16"]
    printed = bench(tmp_path, *asked, "--rounds", "1", "--turns", "1", "--memory-runs", "0")
    document = json.loads((tmp_path / "out" / "step.json").read_text())
    assert document["lab"] == "2@1gbit"
    assert document["link"]["rate"] == 1e9
    assert 0 < document["link"]["bits_a_second"] < 1.1e9, "a large message does not pass unshaped"
    assert document["results"][0]["same_bits"] is None, "neither ddp nor ours without a codec was there"
    assert "echo: " in printed


def test_every_number_of_hosts_with_every_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(job: Job, hosts: int, rate: str, ranks: int) -> int:
        plan, lab = json.loads(job.target[-1]), f"{hosts}@{rate}"
        assert (job.target[1], plan["codecs"], plan["only"]) == ("syncline.bench.step", ["none", "onebit"], "")
        Path(plan["out"]).write_text(json.dumps({**DOCUMENT, "lab": lab}))
        return 3 if lab == "4@open" else 0

    monkeypatch.setattr("syncline.cli.placement.run_in_lab", launch)
    asked = ["--codec", "none;onebit", "--lab", "2,4", "--rate", "1gbit,open", "--out", str(tmp_path)]
    assert main(["bench", "step", *asked]) == 3, "that of the run that failed"
    printed = capsys.readouterr().out
    labs = ["2@1gbit", "2@open", "4@1gbit"]
    assert [line.split("; ")[0] for line in printed.splitlines() if "emulated" in line] == [
        f"2 ranks, emulated hosts, {lab}" for lab in labs
    ]
    document = json.loads((tmp_path / "step.json").read_text())
    assert [run["lab"] for run in document["runs"]] == labs
    assert all(json.loads((tmp_path / f"step-{run['lab']}.json").read_text()) == run for run in document["runs"])


def test_the_echo_tells_the_rate_of_the_network() -> None:
    network = sl.Network(latency=0.0, bandwidth=12.5e6)
    found = sl.simulate(lambda world: measure_link(world, "3@100mbit"), ranks=3, network=network).results[0]
    assert found["to_rank"] == 1
    assert found["rate"] == 100e6
    assert found["bits_a_second"] == pytest.approx(100e6 * FRAME_BYTES / FRAME_PAYLOAD_BYTES, rel=0.01)
    assert "1.05 of the rate" in describe_link(found)


def test_the_echo_leaves_its_host() -> None:
    inside = Link(latency=0.0, bandwidth=1e12)
    network = sl.Network(latency=0.0, bandwidth=12.5e6, ranks_per_host=2, inside=inside)
    found = sl.simulate(lambda world: measure_link(world, "2@open"), ranks=4, network=network).results[0]
    assert found["to_rank"] == 2
    assert "no limit" in describe_link(found)
    assert sl.simulate(lambda world: measure_link(world, "1@open"), ranks=2, network=network).results == (None, None)


def test_a_lab_that_is_too_slow_is_not_to_be_trusted() -> None:
    link = {"bytes": 3_750_000, "to_rank": 1, "bits_a_second": 80e6, "rate": 100e6}
    assert "do not trust" in describe_link(link)
    assert describe_link(None) == ""


@pytest.mark.parametrize("changed", [None, 2])
def test_agreement_is_to_the_last_bit(changed: int | None) -> None:
    def work(world: World) -> bool:
        weights = torch.ones(1000)
        if world.rank == changed:
            weights[999] = torch.nextafter(weights[999], torch.tensor(2.0))
        return ranks_agree(world.everyone.channel, [torch.zeros(3), weights])

    assert set(sl.simulate(work, ranks=3).results) == {changed is None}


@pytest.mark.parametrize(
    ("lab", "rate", "labs"),
    [
        (None, None, [None]),
        ("2@1gbit", None, ["2@1gbit"]),
        ("2, 4", "100mbit, open", ["2@100mbit", "2@open", "4@100mbit", "4@open"]),
        ("2,2", "1gbit", ["2@1gbit"]),
    ],
)
def test_labs(lab: str | None, rate: str | None, labs: list[str | None]) -> None:
    assert step_labs(lab, rate) == labs


@pytest.mark.parametrize(
    ("lab", "rate", "says"),
    [
        (None, "1gbit", "give --lab"),
        ("2", None, "has no rate"),
        ("2@1gbit", "1gbit", "has a rate already"),
        ("2@1gbit,4", None, "has no rate"),
        (",", "1gbit", "names no hosts"),
        ("two", "1gbit", "two@1gbit"),
        ("2", "fast", "fast"),
        ("1", "1gbit", "at least two hosts"),
    ],
)
def test_labs_that_are_none(lab: str | None, rate: str | None, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        step_labs(lab, rate)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--codec", "topkk(0.01)"], "did you mean 'topk'"),
        (["--codec", ";"], "names none"),
        (["--codec", "quantize(4)", "--collective", "ring"], "cannot be added"),
        (["--collective", "split"], "there is no codec"),
        (["--against", "ddp,dpp-fp16"], "did you mean 'ddp-fp16'"),
        (["--against", ","], "no baseline is named"),
        (["--codec", "onebit", "--models", "resnte"], "did you mean 'resnet'"),
        (["--lab", "2@1gbit", "--hosts", "a:2"], "leave one out"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_who_takes_part() -> None:
    plain = StepPlan(out="")
    assert plain.contenders == ["syncline", "ddp"]
    assert StepPlan(out="", codecs=["none", "onebit"], against=["ddp-fp16", "ddp"]).contenders == [
        *("none", "onebit"),
        *("ddp-fp16", "ddp"),
        "alone",
    ]


def summary(median: float) -> dict[str, Any]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median, "samples": 9}


NAMES = {"none": 1.0, "onebit": 0.1, "ddp": 1.0, "alone": 0.05}
DOCUMENT: dict[str, Any] = {
    "ranks": 2,
    "lab": "2@100mbit",
    "link": {"bytes": 3_750_000, "to_rank": 1, "bits_a_second": 99e6, "rate": 100e6},
    "plan": {"against": ["ddp"], "strategy": "allreduce", "collective": "auto", "repeats": 3, "turns": 3},
    "results": [
        {
            "model": "mlp",
            "about": "an MLP",
            "time": {name: summary(seconds) for name, seconds in NAMES.items()},
            "faster": {name: summary(1 / seconds) for name, seconds in NAMES.items()},
            "of_alone": {name: summary(seconds / 0.05) for name, seconds in NAMES.items()},
            "used": {
                "none": {"bytes_wire": 7_454_000.0, "codec_seconds": 0.0, "exposed_seconds": 0.9},
                "onebit": {"bytes_wire": 240_000.0, "codec_seconds": 0.004, "exposed_seconds": 0.03},
            },
            "ranks_agree": {"none": True, "onebit": True},
            "same_bits": True,
        }
    ],
    "memory": [{"model": "mlp", "contender": "onebit", "peak_bytes": 300_000_000}],
}


def test_the_table_of_codecs() -> None:
    text = codec_steps_table([DOCUMENT])
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["onebit"]]
    assert line.split() == [
        *("onebit", "100", "[90,", "110]", "10", "[9,", "11]", "2", "[1.8,", "2.2]"),
        *("240.0", "4.00", "30.00", "agree"),
    ]
    order = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and "[" in line]
    assert order == ["alone", "onebit", "none", "ddp"], "the fastest first"
    assert "0.99 of the rate" in text
    assert "agree, as ddp's" in text
    assert "onebit 300.0 MB" in text


def test_the_table_says_when_ranks_differ() -> None:
    broken = copy.deepcopy(DOCUMENT)
    broken["results"][0]["ranks_agree"]["onebit"] = False
    assert codec_steps_table([broken]).count("DIFFER") == 1
    row = broken["results"][0]
    row["time"]["syncline"] = summary(1.0)
    row |= {"ratio": summary(1.0), "repeats": [1.0], "overlap": {"share": None}}
    assert "parameters afterwards: DIFFER between the ranks" in step_table(broken)
    row["ranks_agree"] = {"syncline": True}
    row["same_bits"] = False
    assert "differ from the baseline's in rounding" in step_table(broken)
