"""`syncline bench codecs`: what it measures, small; never how fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.bench.codecs import DEFAULT_CODECS, CodecsPlan, codecs_plot, codecs_table, gradients, measure
from syncline.cli.main import main
from syncline.codecs import build_codec, codec_names
from syncline.errors import SpecError
from syncline.specs import parse

pytestmark = pytest.mark.xdist_group("codecs")  # they share a fixture that takes long

SMALL = ["quantize(4)", "topk(0.1)", "cast('fp16')", "powersgd(2)", "lossless", "topk(0.1)|quantize(4)"]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return measure(CodecsPlan(sizes=[4096, 16384], codecs=SMALL, rounds=2))


def row(document: dict[str, Any], codec: str, feedback: bool = False, size: int = 16384) -> dict[str, Any]:
    """The one row of a codec."""
    found = [
        each
        for each in document["results"]
        if (each["contender"], each["feedback"], each["bytes"]) == (codec, feedback, size)
    ]
    assert len(found) == 1, f"{codec} has {len(found)} rows"
    return dict(found[0])


def test_every_codec_is_measured_by_default() -> None:
    named = {link.name for spec in DEFAULT_CODECS for link in parse(spec)}
    assert named == set(codec_names()) - {"raw", "per_layer", "by_size"}, "choosing is no codec of its own, raw none"
    for spec in DEFAULT_CODECS:
        assert repr(build_codec(spec)) == spec


def test_all_take_turns_and_ratios_are_to_memcpy_in_the_same_round(document: dict[str, Any]) -> None:
    for size in (4096, 16384):
        copies = row(document, "memcpy", size=size)
        assert copies["encode"]["of_memcpy"]["median"] == 1
        for spec in SMALL:
            found = row(document, spec, size=size)
            for what in ("encode", "decode"):
                assert len(found[what]["seconds"]) == 2
                pairs = zip(copies["encode"]["seconds"], found[what]["seconds"], strict=True)
                assert found[what]["of_memcpy"]["median"] == pytest.approx(sum(a / b for a, b in pairs) / 2)


@pytest.mark.parametrize("spec", ["quantize(4)", "topk(0.1)", "topk(0.1)|quantize(4)"])
def test_payloads_are_those_of_the_codec(document: dict[str, Any], spec: str) -> None:
    codec = build_codec(spec)
    assert codec is not None
    payload = codec.encode(gradients(4096, 1, seed=0)[0])
    assert row(document, spec)["payload_bytes"] == payload.numel()
    assert row(document, spec)["bits"] == 8 * payload.numel() / 4096


def test_tensors_that_sum_are_counted_as_they_leave(document: dict[str, Any]) -> None:
    assert row(document, "cast('fp16')")["payload_bytes"] == 2 * 4096
    assert row(document, "powersgd(2)")["payload_bytes"] == 4 * 2 * (64 + 64), "P and Q of a 64 × 64 matrix"


def test_errors_are_of_what_was_decoded_without_a_residual(document: dict[str, Any]) -> None:
    codec = build_codec("topk(0.1)")
    assert codec is not None
    lost = []
    for gradient in gradients(4096, 4, seed=0):
        decoded = codec.decode(codec.encode(gradient), torch.empty(4096))
        lost.append(float((gradient - decoded).norm() / gradient.norm()))
    assert row(document, "topk(0.1)")["error"] == pytest.approx(sum(lost) / 4, rel=1e-5)
    assert row(document, "lossless")["error"] == 0
    assert 0 < row(document, "cast('fp16')")["error"] < row(document, "quantize(4)")["error"]


def test_feedback_is_measured_where_a_residual_is_kept(document: dict[str, Any]) -> None:
    fed = {each["contender"] for each in document["results"] if each["feedback"]}
    assert fed == {"topk(0.1)", "powersgd(2)", "topk(0.1)|quantize(4)"}


def test_gradients_have_heavy_tails_and_few_directions() -> None:
    (made,) = gradients(256 * 256, 1, seed=3)
    ordered = made.square().sort(descending=True).values
    assert float(ordered[: len(ordered) // 100].sum() / ordered.sum()) > 0.14, "a normal's largest hundredth has 0.09"
    strengths = torch.linalg.svdvals(made.view(256, 256)).square()
    assert float(strengths[:64].sum() / strengths.sum()) == pytest.approx(1, abs=1e-4), "a batch of 64"


def test_the_threads_are_given_back(document: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    measure(CodecsPlan(sizes=[64], codecs=["cast('bf16')"], rounds=1, threads=before + 1))
    assert torch.get_num_threads() == before


def test_the_table_and_the_picture(document: dict[str, Any], tmp_path: Path) -> None:
    table = codecs_table(document)
    lines = table.splitlines()
    (fed,) = [line for line in lines if line.split()[:2] == ["16KB", "topk(0.1)"]]
    assert fed.count("(n=2)") == 3, "encode, with feedback, decode"
    (unfed,) = [line for line in lines if line.split()[:2] == ["16KB", "quantize(4)"]]
    assert unfed.count("(n=2)") == 2
    for path in codecs_plot(document, tmp_path / "codecs"):
        assert path.stat().st_size > 1000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "codecs", "--codecs", "onebit; randomk(0.1)", "--sizes", "4KB", "--rounds", "1"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "onebit" in told.out
    assert "randomk(0.1)" in told.out
    assert "onebit: compiling and warming up" in told.err
    assert json.loads((tmp_path / "codecs.json").read_text())["plan"]["codecs"] == ["onebit", "randomk(0.1)"]
    assert (tmp_path / "codecs.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--codecs", "qantize(4)"], "quantize"),
        (["--codecs", "quantize(9)"], "9"),
        (["--codecs", "none"], "nothing to measure"),
        (["--codecs", "by_size(4096, None, 'onebit')", "--sizes", "4KB"], "nothing to measure"),
        (["--rounds", "0"], "round (0)"),
        (["--threads", "0"], "thread (0)"),
        (["--sizes", "huge"], "'huge' is not a size"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "codecs", *arguments, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


@pytest.mark.parametrize("option", ["-n", "--lab", "--hosts"])
def test_it_has_no_ranks(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "codecs", option, "2"])
    assert f"unknown option {option}" in capsys.readouterr().err


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(SpecError, match=r"size \(0\)"):
        measure(CodecsPlan(sizes=[]))
