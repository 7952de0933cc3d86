"""Scalars for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import UnsupportedError
from syncline.events import RunEvent, TensorBoardSink


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own reader uses what NumPy will drop
        module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        found = module.EventAccumulator(str(folder))
        found.Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_numbers_with_a_step_are_scalars(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(RunEvent("train_loss", 0.5, 1.0, metadata={"step": 10}))
    sink.write(RunEvent("train_loss", 0.25, 2.0, metadata={"step": 20}))
    sink.write(RunEvent("eval_accuracy", 1, 2.0, metadata={"step": 20}))
    sink.write(RunEvent("seed", 7, 0.0))
    sink.write(RunEvent("sl_checkpoint", "step-1", 0.0, metadata={"step": 20}))
    sink.write(RunEvent("sl_comm_seconds", 0.5, 0.0, "INTERVAL_END", {"step": 20}))
    sink.close()
    sink.close()
    sink.write(RunEvent("train_loss", 0.1, 3.0, metadata={"step": 30}))  # after the end: nothing happens
    assert scalars(tmp_path) == {"loss/training": [(10, 0.5), (20, 0.25)], "eval_accuracy": [(20, 1.0)]}


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
