"""What a large batch costs, and which rule for the learning rate wins it back: a table on Fashion-MNIST.

    python examples/large_batch.py                            # about ten minutes on a free core
    python examples/large_batch.py --batches 64 1024 --rules none linear --seeds 1
    python examples/large_batch.py --tune sgd lars            # how the base rates were found

The workload's MLP (784-256-10) is trained for the same number of epochs at every batch, so a batch k times as large
takes a k-th of the steps. k workers of batch 64 give the gradient of one worker of batch k·64, so one process shows
what a synchronous run on k workers would reach. Momentum and cosine decay for all; the rates are tuned at batch 64 on
the validation split, and scaled from there:

    none          the rate of batch 64
    linear        × k                             sqrt          × √k
    warmup        × k, from × 1 over two epochs   sqrt-warmup   × √k, likewise
    lars          LARS from its own rate,         lars-sqrt     LARS, scaled as sqrt-warmup
                  scaled as warmup

At batch 64 all rules of an optimizer are one and the same, and are trained once. Cells that the JSON file has are not
trained again. A loss that is no longer finite ends a cell with the accuracy of guessing.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils.data import Dataset

from syncline.optim import LARS, cosine_decay, scale_lr, warmup
from syncline.workloads import Fashion
from syncline.workloads.base import Batch, Pairs, Workload

RULES = {
    "none": "none",
    "linear": "linear",
    "warmup": "linear + warm-up",
    "sqrt": "sqrt",
    "sqrt-warmup": "sqrt + warm-up",
    "lars": "LARS, linear",
    "lars-sqrt": "LARS, sqrt",
}
GRIDS = {"sgd": [0.01, 0.02, 0.05, 0.1, 0.2], "lars": [1.0, 2.0, 5.0, 10.0]}
BASE_BATCH = 64
GUESSING = 0.1


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    workload = Fashion(folder=options.folder)
    if options.tune:
        for optimizer in options.tune:
            tune(optimizer, options, workload)
        return
    kept = Cells(options)
    for batch in options.batches:
        for rule in options.rules:
            for seed in range(options.seeds):
                if (name := cell_name(options, batch, rule, seed)) in kept.cells:
                    continue
                begun = time.perf_counter()
                model, loss = train(options, workload, batch, rule, seed)
                accuracy = accuracy_of(model, loss, workload, workload.splits().test)
                seconds = time.perf_counter() - begun
                kept.add(name, {"accuracy": accuracy, "loss": loss, "seconds": round(seconds, 2)})
                print(f"{name}: {100 * accuracy:.2f} % in {seconds:.1f} s", flush=True)
    print(table(options, kept.cells))


def cell_name(options: argparse.Namespace, batch: int, rule: str, seed: int) -> str:
    if batch == BASE_BATCH:
        rule = "lars" if rule.startswith("lars") else "none"
    shown = f"{rule} from {options.lars_rate:g}" if rule.startswith("lars") else rule
    return f"batch {batch}, {shown}, seed {seed}"


class Cells:
    """What has been trained, by name, in a JSON file that says with which settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.json
        names = ["epochs", "warmup_epochs", "rate", "momentum", "weight_decay"]
        self.settings = {name: getattr(options, name) for name in names}
        self.cells: dict[str, dict[str, float | None]] = {}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found["settings"] != self.settings:
                raise SystemExit(f"{self.path} has cells of other settings, {found['settings']}: name another --json")
            self.cells = found["cells"]

    def add(self, name: str, cell: dict[str, float | None]) -> None:
        self.cells[name] = cell
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps({"settings": self.settings, "cells": self.cells}, indent=1) + "\n")
        os.replace(aside, self.path)


def train(
    options: argparse.Namespace, workload: Workload, batch: int, rule: str, seed: int
) -> tuple[nn.Module, float | None]:
    """The model after all epochs, and the last loss (None: it was no longer finite)."""
    model = workload.model(seed)
    split = workload.splits().train
    assert isinstance(split, Pairs)
    images, labels = split.inputs.float() / (split.scale or 1), split.targets
    steps_per_epoch = len(labels) // batch
    optimizer, scheduler = prepare(model, options, batch, rule, steps_per_epoch)
    draw = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(options.epochs):
        order = torch.randperm(len(labels), generator=draw)
        for chosen in order[: steps_per_epoch * batch].view(-1, batch):
            optimizer.zero_grad()
            loss = workload.loss(model, (images[chosen], labels[chosen]))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
        if not math.isfinite(loss.item()):
            return model, None
    return model, loss.item()


def accuracy_of(model: nn.Module, loss: float | None, workload: Workload, split: Dataset[Batch]) -> float:
    return GUESSING if loss is None else workload.evaluate(model, split)["accuracy"]


def prepare(
    model: nn.Module, options: argparse.Namespace, batch: int, rule: str, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """What a user would write for so many workers of `BASE_BATCH` each."""
    workers = batch // BASE_BATCH
    scaling = {"warmup": "linear", "lars": "linear", "lars-sqrt": "sqrt", "sqrt-warmup": "sqrt"}.get(rule, rule)
    common = {"momentum": options.momentum, "weight_decay": options.weight_decay}
    optimizer: torch.optim.Optimizer
    if rule.startswith("lars"):
        # What LARS excludes takes the rate as it is, and LARS's is far too large for that: biases keep SGD's.
        groups: list[dict[str, Any]] = [
            {"params": [each for each in model.parameters() if each.ndim > 1]},
            {
                "params": [each for each in model.parameters() if each.ndim < 2],
                "lr": scale_lr(options.rate, scaling, workers),
            },
        ]
        optimizer = LARS(groups, lr=scale_lr(options.lars_rate, scaling, workers), **common)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=scale_lr(options.rate, scaling, workers), **common)
    steps = options.epochs * steps_per_epoch
    warm = options.warmup_epochs * steps_per_epoch if rule not in ("none", "linear", "sqrt") else 0
    decay = cosine_decay(optimizer, steps)
    if not warm:
        return optimizer, decay
    # Chained, not one after the other: the decay is the same for every rule, and the warm-up the one difference.
    return optimizer, ChainedScheduler([warmup(optimizer, warm, scaling, workers), decay])


def tune(name: str, options: argparse.Namespace, workload: Workload) -> None:
    """Train at batch 64 with each rate of the grid, and show the accuracy on the validation split."""
    rule = {"sgd": "none", "lars": "lars"}[name]
    options = argparse.Namespace(**vars(options))
    for rate in GRIDS[name]:
        setattr(options, "rate" if name == "sgd" else "lars_rate", rate)
        found = []
        for seed in range(options.seeds):
            model, loss = train(options, workload, BASE_BATCH, rule, seed)
            found.append(100 * accuracy_of(model, loss, workload, workload.splits().validation))
        shown = ", ".join(f"{accuracy:.2f}" for accuracy in found)
        print(f"{name}, rate {rate:g}: {statistics.median(found):.2f} % ({shown})", flush=True)


def table(options: argparse.Namespace, cells: dict[str, dict[str, float | None]]) -> str:
    """Markdown: a row for each batch, a column for each rule; median and range over the seeds, in percent."""
    lines = [
        "| batch | " + " | ".join(RULES[rule] for rule in options.rules) + " |",
        "|---:|" + "---:|" * len(options.rules),
    ]
    for batch in options.batches:
        row = []
        for rule in options.rules:
            told = [cells[cell_name(options, batch, rule, seed)]["accuracy"] for seed in range(options.seeds)]
            found = sorted(100 * accuracy for accuracy in told if accuracy is not None)
            row.append(f"{statistics.median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f})")
        lines.append(f"| {batch:,} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "(default: %(default)s)"
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024, 4096], help=shown)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES), help=shown)
    parser.add_argument("--seeds", type=int, default=3, help=f"runs of each cell {shown}")
    parser.add_argument("--epochs", type=int, default=10, help=shown)
    parser.add_argument("--warmup-epochs", type=int, default=2, help=shown)
    parser.add_argument("--rate", type=float, default=0.05, help=f"SGD's rate at batch 64 {shown}")
    parser.add_argument("--lars-rate", type=float, default=5.0, help=f"LARS's rate at batch 64 {shown}")
    parser.add_argument("--momentum", type=float, default=0.9, help=shown)
    parser.add_argument("--weight-decay", type=float, default=1e-4, help=shown)
    parser.add_argument("--folder", help="where Fashion-MNIST's IDX files lie (default: where the workload finds them)")
    parser.add_argument("--json", type=Path, default=Path("large_batch.json"), help=f"results {shown}")
    parser.add_argument("--tune", nargs="+", choices=list(GRIDS), help="show accuracies over a grid of base rates")
    options = parser.parse_args()
    if unfit := [batch for batch in options.batches if batch % BASE_BATCH or not BASE_BATCH <= batch <= 50_000]:
        parser.error(f"--batches must be multiples of {BASE_BATCH}, up to the 50,000 of an epoch, not {unfit}")
    return options


if __name__ == "__main__":
    main()
