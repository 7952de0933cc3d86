"""Run logs that grow line by line, and a server for them, for the tests of the live view."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.bench.live import LiveServer, open_feed
from syncline.bench.race.registry import RunRegistry
from tests.bench.racing import PLAN

CONFIG = {
    "workload": "digits",
    "metric": "accuracy",
    "higher_is_better": True,
    "samples": {"train": 1000},
    "samples_a_step": 10,
    "epochs": 10,
    "steps": None,
    "target": 0.9,
    "workers": 2,
}


class GrowingRun:
    """Writes what the training loop writes, as slowly as a test likes."""

    def __init__(self, folder: Path, **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.seconds = 100.0
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))

    def raw(self, text: str) -> None:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(text)

    def line(self, key: str, value: Any = None, **metadata: Any) -> None:
        self.seconds += 0.1
        told = {"time_ms": time.time_ns() // 1_000_000, "seconds": self.seconds, "event_type": "POINT_IN_TIME"}
        self.raw(json.dumps({**told, "key": key, "value": value, "metadata": metadata}) + "\n")

    def start(self, target: float | None = 0.9) -> None:
        points = {"sl_workload": "digits", "sl_workers": 2, "sl_strategy": "allreduce", "sl_codec": None}
        for key, value in {**points, "seed": 0, "sl_target": target, "sl_metric": "accuracy"}.items():
            self.line(key, value)
        self.line("run_start")

    def evaluation(self, step: int, metric: float | str) -> None:
        spent = {"elapsed": step / 10, "epochs": step / 100, "bytes_wire": 1000 * step}
        self.line("sl_evaluation", {"metric": metric, **spent}, step=step)

    def speeds(self, step: int, loss: float | str = 1.0) -> None:
        self.line("train_loss", loss, step=step)
        self.line("sl_samples_per_second", 500.0, step=step)
        self.line("sl_bytes_per_second", 2e6, step=step)
        self.line("sl_exposed_share", 0.25, step=step)

    def ranks(self, step: int, compute: Sequence[float], steps: int = 10) -> None:
        none = [0.0] * len(compute)
        wait = [max(compute) - one for one in compute]
        table = {"compute": list(compute), "exposed": wait, "codec": none, "data": none}
        whole = [max(compute)] * len(compute)
        self.line("sl_ranks", {"step": step, "steps": steps, "seconds": whole, **table}, step=step)

    def stop(self, status: str = "success", **metadata: Any) -> None:
        self.line("run_stop", status=status, **metadata)


def growing_race(folder: Path) -> dict[str, GrowingRun]:
    """A race of three entries, two seeds, one and two workers; all runs have begun, none has ended."""
    plan = replace(PLAN, seeds=(1, 2), scaling="weak", scaling_workers=(1,))
    folder.mkdir(parents=True)
    (folder / "race.json").write_text(plan.as_json())
    registry = RunRegistry(folder / "registry.jsonl")
    made = {}
    for run in plan.runs():
        facts = {"kind": run.kind, "entry": run.entry.name, "workers": run.workers, "seed": run.seed}
        registry.append("begun", run=run.folder, **facts, factor=run.factor)
        made[run.folder] = GrowingRun(folder / run.folder, metric="gap", higher_is_better=False, target=plan.target)
        made[run.folder].start(target=plan.target)
    return made


def end_race(folder: Path, runs: Iterable[str]) -> None:
    """End these runs well."""
    for name in runs:
        RunRegistry(folder / "registry.jsonl").append("ended", run=name, status="finished", reason=None, seconds=60.0)


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    """A server in a thread of this process."""
    server = LiveServer(open_feed(folder))
    made: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        made.append((asyncio.get_running_loop(), stop))
        ready.set()
        await server.run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield server
    finally:
        loop, stop = made[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        server.close()
        assert not thread.is_alive()
