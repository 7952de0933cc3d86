"""What users have on disk, on the command line and in their code keeps working.

The files in `pinned/` record command lines, public names, payloads, log keys, checkpoint contents and the results of
simulated training. A change that breaks one of them breaks a user. After a change that is meant to add to them, write
them anew: `SYNCLINE_PIN=1 pytest tests/test_pinned.py`, and read the difference.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import syncline as sl
from syncline.cli import main as command

PINNED = Path(__file__).parent / "pinned"
ENTRIES = PINNED / "entries.toml"
SPECS = (
    *("cast('fp16')", "cast('bf16')", "quantize(2)", "quantize(4)", "quantize(8)", "quantize(4, norm='l2')"),
    *("onebit", "ternary", "lossless", "topk(0.1)", "topk(0.1)|cast('fp16')", "randomk(0.1)", "threshold(0.5)"),
    *("topk(0.1)|quantize(4)", "topk(0.1)|lossless", "quantize(8)|lossless", "raw"),
)
STRATEGIES = (
    *("allreduce", "allreduce(delay=1)", "local(period=2)", "adacomm(start=2)", "diloco(period=2)"),
    *("easgd(period=2)", "gossip", "average", "ensemble(seed=0)"),
)
"""Those that need no server."""
CODED = (("allreduce", "topk(0.5)"), ("allreduce", "powersgd(2)"), ("gossip", "topk(0.5)"))


def compare(name: str, found: Any) -> None:
    """Compare a JSON value with the recorded one."""
    path = PINNED / name
    if os.environ.get("SYNCLINE_PIN"):
        path.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    assert json.loads(json.dumps(found)) == json.loads(path.read_text(encoding="utf-8"))


def options_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options and arguments of a parser, and of those of its commands that have any."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = {name: options_of(each) for name, each in action.choices.items()}
            found["commands"] = {name: each for name, each in below.items() if set(each) - {"-h --help"}}
        else:
            key = " ".join(action.option_strings) or action.dest
            found[key] = sorted(map(str, action.choices)) if action.choices is not None else []
    return found


def test_command_lines() -> None:
    """Every option of every command is still there."""
    parsers = {name: options_of(command.build_parser(name))["commands"].get(name, {}) for name in command.COMMANDS}
    compare("command_lines.json", parsers)


def test_public_names() -> None:
    """Every name that the package has offered can still be read from it, perhaps with a warning."""
    path = PINNED / "public_names.json"
    if os.environ.get("SYNCLINE_PIN"):
        path.write_text(json.dumps(sorted(sl.__all__), indent=1) + "\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        missing = [name for name in json.loads(path.read_text(encoding="utf-8")) if not hasattr(sl, name)]
    assert missing == []


def test_payloads() -> None:
    """The bytes of every codec: workers of two versions can still talk."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(3000, generator=generator)
    residual = torch.randn(3000, generator=generator)
    found = {}
    for spec in SPECS:
        codec = sl.codecs.build_codec(spec)
        assert codec is not None
        plain, left = codec.encode(tensor), residual.clone()
        fed = codec.encode(tensor, residual=left)
        found[spec] = [
            hashlib.sha256(each.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            for each in (plain, fed, left)
        ]
    compare("payloads.json", found)


def train(world: sl.World, strategy: str, codec: str | None, folder: Path) -> None:
    """Four steps, then a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = sl.distribute(model, optimizer, strategy=strategy, codec=codec)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))).sum().backward()
        optimizer.step()
    sl.save(folder, step=4, run=run, epoch=3)


def shape_of(tree: Any) -> Any:
    """The keys of a JSON value: of dictionaries all, of lists those of the first element."""
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape_of(tree[0])] if tree else []
    return type(tree).__name__


def contents(folder: Path) -> dict[str, Any]:
    """What each file of a checkpoint holds."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            found[name] = sorted(load_file(path))
        elif path.suffix == ".json" and name != "manifest.json":
            found[name] = shape_of(json.loads(path.read_text(encoding="utf-8")))
        elif path.is_file():
            found[name] = "file"
    return found


@pytest.mark.parametrize(("strategy", "codec"), [*((each, None) for each in STRATEGIES), *CODED])
def test_checkpoints(strategy: str, codec: str | None, tmp_path: Path) -> None:
    """The files and keys of a checkpoint: one of an earlier version can still be loaded."""
    sl.simulate(lambda world: train(world, strategy, codec, tmp_path), 2)
    compare(f"checkpoint-{strategy}{'' if codec is None else '-' + codec}.json", contents(tmp_path))


def keys_of(log: Path) -> list[str]:
    """The keys of a run log, with those of their metadata."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return sorted({f"{e['event_type']} {e['key']} {' '.join(sorted(e['metadata']))}".strip() for e in events})


def test_simulated_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each strategy takes the same steps in the same virtual time, sends as many bytes, and logs the same keys."""
    monkeypatch.chdir(tmp_path)
    place = ["--simulate", "10mbit", "--seconds-a-sample", "0.0001", "--out", "race"]
    assert not command.main(
        ["race", "regression", "-n", "3", "--entries", str(ENTRIES), "--seeds", "1", "--epochs", "1", *place]
    )
    logs = sorted(Path("race").glob("runs/*/*/log.jsonl"))
    compare("log_keys.json", {log.parent.parent.name: keys_of(log) for log in logs})
    if os.environ.get("SYNCLINE_PIN"):
        (PINNED / "curves.csv").write_bytes(Path("race/curves.csv").read_bytes())
    found, pinned = (
        list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        for path in (Path("race/curves.csv"), PINNED / "curves.csv")
    )
    assert [row["entry"] for row in found] == [row["entry"] for row in pinned]
    for row, before in zip(found, pinned, strict=True):
        assert row.keys() == before.keys()
        for key in row:
            if row[key] != before[key]:  # another processor may round otherwise
                assert float(row[key]) == pytest.approx(float(before[key]), rel=1e-4), (row["entry"], key)
