"""`syncline bench machine`: two ranks on gloo, the file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import syncline as sl
from syncline.bench.machine import MachinePlan, describe, measure_world
from syncline.cli.main import main
from syncline.costs import Calibration
from syncline.errors import SpecError
from syncline.planner.machine import CodecRate, MachineMeasurement
from syncline.testing import Pool
from tests.strategies.cases import on_gloo

NETWORK = Calibration(1e-5, 1e9, 1e-5, 1e-10, 0.1, 0.1)
EXCHANGE = {"strategy": "allreduce", "codec": "", "tensors": 1, "nbytes": 64, "seconds": 0.001}
MACHINE = MachineMeasurement(
    workers=2,
    hosts=1,
    threads=1,
    network=NETWORK,
    call_s=1e-4,
    compute_s=0.04,
    allreduce_s=0.02,
    together_s=0.05,
    compute_slowdown=1.5,
    codecs=(CodecRate(spec="onebit", encode_bytes_per_s=1e9, decode_bytes_per_s=2e9, payload_ratio=0.03),),
)


def measure_on(world: sl.World) -> MachineMeasurement:
    # The ranks of a pool are a part of its world, and servers need the whole.
    plan = MachinePlan(out="", codecs=("quantize(4)",), codec_bytes=4096, part_s=0.002, rounds=3, servers=False)
    return measure_world(world, plan)


@pytest.mark.xdist_group("gloo")
def test_two_ranks_measure_messages_overlap_and_codecs(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(on_gloo, 2, measure_on)
    assert replace(first, codecs=()) == replace(second, codecs=()), "the slowest rank counts on both"
    assert first.together_s >= 0.5 * max(first.compute_s, first.allreduce_s)
    assert 0 <= first.hidden_share <= 1
    assert [each.spec for each in first.codecs] == ["quantize(4)"]
    assert 4 / 32 < first.codecs[0].payload_ratio < 6 / 32
    assert [each.nbytes for each in first.allreduces] == [64, 512, 4096]
    kinds = [(each.strategy, each.codec, each.tensors) for each in first.exchanges]
    assert kinds[:3] == [("allreduce", "", 1), ("allreduce", "quantize(4)", 1), ("allreduce", "", 16)]
    assert min(each.seconds for each in first.exchanges) > 0
    assert min(first.compute_contention, first.copy_contention, first.cores) >= 1
    assert not first.lab
    first.write(tmp_path / "machine.json")
    assert MachineMeasurement.read(tmp_path / "machine.json") == first
    assert "quantize(4)  encodes" in describe(first)
    assert "exchange by allreduce with quantize(4): 1 x " in describe(first)


def test_exchanges_by_servers() -> None:
    plan = MachinePlan(out="", codecs=(), codec_bytes=4096, part_s=0.002, rounds=1)
    found = sl.simulate(lambda world: measure_world(world, plan), ranks=2).results[0]
    kinds = [(each.strategy, each.tensors, each.nbytes) for each in found.exchanges]
    assert [each for each in kinds if each[0] == "ssp"] == [("ssp", 1, 64), ("ssp", 16, 256), ("ssp", 1, 4096)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workers", 1, "'workers' is 1; it must be a whole number, at least 2"),
        ("compute_s", 0, "'compute_s' is 0; it must be above 0"),
        ("speed", 3, "unknown key 'speed'"),
        ("version", 9, "'version' is 9"),
        ("network", 3, "must be an object"),
        ("exchanges", [EXCHANGE, EXCHANGE], "'exchanges' has 2 of allreduce, and needs 3"),
    ],
)
def test_wrong_files(tmp_path: Path, key: str, value: object, words: str) -> None:
    path = tmp_path / "machine.json"
    MACHINE.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(SpecError) as refusal:
        MachineMeasurement.read(path)
    assert words in str(refusal.value)


def test_an_unmeasured_codec_is_named() -> None:
    assert MACHINE.codec("onebit").seconds(2e6) == 0.003
    with pytest.raises(SpecError, match="was not measured on this machine; measured: onebit"):
        MACHINE.codec("ternary")


def test_one_worker_and_unknown_codecs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with sl.init() as world, pytest.raises(SpecError, match="at least 2 workers"):
        measure_world(world, MachinePlan(out=""))
    for words, told in (
        (["--codecs", "tpk"], "tpk"),
        (["--codecs", "none"], "encodes nothing"),
        (["-n", "1"], "2 ranks"),
    ):
        assert main(["bench", "machine", *words]) == 2
        assert told in capsys.readouterr().err


def test_file_has_every_value(tmp_path: Path) -> None:
    MACHINE.write(tmp_path / "machine.json")
    assert asdict(MachineMeasurement.read(tmp_path / "machine.json")) == asdict(MACHINE)
