"""`syncline bench server`, small, on real processes; and that a soak notices what goes wrong."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.bench.server.rates import sweep_table
from syncline.bench.server.soak import SPACES, PushLedger, SoakedSpace, checkpoint
from syncline.cli.main import main
from syncline.errors import ProtocolError
from syncline.server.shard import ParameterShard
from tests.hunting import only_hunting
from tests.launching import finish, start

pytestmark = pytest.mark.xdist_group("launch")


def bench(tmp_path: Path, *arguments: str) -> str:
    """Run the command as a user would; what it printed."""
    command = ["-m", "syncline", "bench", "server", *arguments, "--out", str(tmp_path / "out")]
    (ended,) = finish([start(command, {"SYNCLINE_CACHE": str(tmp_path)})])
    assert ended.code == 0, ended.err
    return ended.out


def rows(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((tmp_path / "out" / name).read_text())["results"]
    return found


def test_a_dedicated_server_beside_a_bare_echo(tmp_path: Path) -> None:
    printed = bench(tmp_path, "-n", "2", "--servers", "1", "--sizes", "4KB,256KB", "--rounds", "3")
    found = rows(tmp_path, "server-1.json")
    told = {(row["contender"], row["bytes"], row["workers"]) for row in found}
    assert told == {(name, size, n) for name in ("syncline", "bare echo") for size in (4096, 1 << 18) for n in (1, 2)}
    assert {len(row["seconds"]) for row in found} == {3}, "not side by side"
    for row in found:
        assert row["rate"]["median"] == pytest.approx(2 * row["bytes"] * row["requests"]["median"])
        assert row["processor"]["median"] > 0
    assert all(row["of_echo"]["median"] == 1 for row in found if row["contender"] == "bare echo")
    for words in ("1 dedicated server", "of echo", "requests/s", "bare echo"):
        assert words in printed


@pytest.mark.hunt
@pytest.mark.skipif(not os.environ.get("SYNCLINE_HUNT"), reason="half a minute of processes: SYNCLINE_HUNT=1 runs it")
def test_co_located_with_several_in_flight(tmp_path: Path) -> None:
    printed = bench(tmp_path, "-n", "2", "--servers", "0", "--sizes", "64KB", "--rounds", "2", "--depth", "3")
    found = rows(tmp_path, "server-co-located.json")
    assert {(row["workers"], row["servers"], row["depth"]) for row in found} == {(1, 1, 3), (2, 2, 3)}
    assert "co-located" in printed
    assert "3 in flight" in printed


@pytest.mark.hunt
@pytest.mark.skipif(not os.environ.get("SYNCLINE_HUNT"), reason="half a minute of processes: SYNCLINE_HUNT=1 runs it")
def test_a_sweep_says_how_many_servers(tmp_path: Path) -> None:
    printed = bench(tmp_path, "--sweep", "-n", "1", "--size", "64KB", "--passes", "2", "--rounds", "2")
    document = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert {name: len(passes) for name, passes in document["seconds"].items()} == {"co-located": 2, "1 server": 2}
    assert "For 64KB and 1 workers, " in printed


def test_a_sweep_that_cannot_tell_says_so() -> None:
    samples = {"co-located": [[0.10], [0.12]], "1 server": [[0.11], [0.11]], "2 servers": [[0.3], [0.4]]}
    told = sweep_table(samples, 4 << 20, 2, "one host").splitlines()[-1]
    assert "1 server cannot be distinguished" in told or "co-located cannot be distinguished" in told
    assert "2 servers takes 3.18 times as long" in told


@only_hunting
def test_a_soak_of_five_seconds(tmp_path: Path) -> None:
    printed = bench(tmp_path, "--soak", "0.084", "-n", "2", "--servers", "1")
    document = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert all(count > 0 for count in document["counts"].values()), document["counts"]
    assert len(document["samples"]) > 3
    assert all(len(each["workers"]) == 2 and len(each["servers"]) == 1 for each in document["samples"])
    assert "none differs" in printed


def soak_a_little(world: sl.World) -> int:
    torch.manual_seed(world.rank)
    rng = random.Random(world.rank)
    names = ("small", "cast", "cached", "filtered")
    spaces = [SoakedSpace(world, name, {**SPACES[name], "numel": 600}, rng) for name in names]
    for _ in range(2):
        for _ in range(60):
            rng.choice(spaces).request()
        checkpoint(world, spaces)
    for space in spaces:
        space.client.close()
    return sum(space.ledger.numel for space in spaces)


def test_a_soak_on_the_simulator_passes() -> None:
    assert sl.simulate(soak_a_little, ranks=2, seed=3).results == (2400, 2400)


def test_a_soak_notices_one_lost_update(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = ParameterShard.apply, iter(range(10**9))

    def forgetful(self: ParameterShard, push: Any, *how: Any) -> None:
        if next(count) != 40:
            whole(self, push, *how)

    monkeypatch.setattr(ParameterShard, "apply", forgetful)
    with pytest.raises(ProtocolError, match="was due"):
        sl.simulate(soak_a_little, ranks=2, seed=3)


def test_a_ledger_refuses_impossible_reads() -> None:
    ledger = PushLedger("demo", numel=16, rank=1, workers=2)
    own = torch.tensor([0, *range(*ledger.own_keys)])
    ledger.push(own, torch.full((len(own),), 2.0))
    expected = ledger.expect(own, "pull")
    ledger.check(expected, torch.full((len(own),), 2.0))
    with pytest.raises(ProtocolError, match="says 3 for key 14, where at most 2 was due"):
        ledger.check(expected, torch.tensor([2.0, 3.0, 2.0]))
    with pytest.raises(ProtocolError, match="whole number"):
        ledger.check(expected, torch.tensor([2.5, 2.0, 2.0]))
    with pytest.raises(ProtocolError, match="exactly 2 was due"):
        ledger.check_total(ledger.pushed, torch.zeros(16), "checkpoint")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--servers", "-1"], "--servers -1"),
        (["--depth", "99"], "--depth 99"),
        (["-n", "0"], "-n 0"),
        (["--soak", "0"], "--soak 0"),
        (["--sweep", "--servers", "2"], "leave --servers 2 out"),
        (["--sweep", "--soak", "1"], "--sweep and --soak"),
        (["--lab", "2@1gbit", "--engine", "mpi"], "--engine mpi and --lab"),
        (["--sizes", "4KX"], "4KX"),
    ],
)
def test_what_it_refuses(arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "server", *arguments, "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
