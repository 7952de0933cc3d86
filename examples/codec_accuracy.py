"""Does a codec cost accuracy? A table on Fashion-MNIST: each codec against dense, seed by seed.

    syncline run -n 2 examples/codec_accuracy.py                        # half an hour on two free cores
    syncline run -n 2 examples/codec_accuracy.py --codecs "topk(0.01)|quantize(4)" --seeds 3

The workload as it is: MLP 784-256-10, batch 64 a worker, rate 0.02, momentum 0.9, cosine decay, five epochs. A
codec and dense with one seed begin with the same weights and see the same batches, so the difference of their test
accuracies is paired; the interval is Student's, at 95 %. Runs that the JSON file has are not repeated.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.workloads import Fashion
from syncline.workloads.base import Pairs

CODECS = [
    "topk(0.01, momentum=0.9, whole=4096)|quantize(4)",
    "powersgd(2)",
    "cast('fp16')",
    "cast('bf16', stochastic=True)",
    "quantize(4)",
    "quantize(2)",
    "onebit",
    "ternary",
    "topk(0.01)",
    "topk(0.01)|quantize(4)",
    "topk(16, bucket=512)|quantize(4)",
    "randomk(0.1)",
    "threshold(0.01)",
    "lossless",
]
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    workload = Fashion(folder=options.folder)
    split = workload.splits().train
    assert isinstance(split, Pairs)
    images = split.inputs.float() / (split.scale or 1)
    data = TensorDataset(images[: options.samples], split.targets[: options.samples])
    cells: dict[str, dict[str, float]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    with sl.init() as world:
        for seed in range(options.seeds):
            for codec in ["none", *options.codecs]:
                name = f"{codec}, {options.epochs} epochs, seed {seed}, {world.size} workers"
                if name in cells:
                    continue
                begun = time.perf_counter()
                accuracy, ratio = train(options, workload, data, codec, seed)
                cells[name] = {"accuracy": accuracy, "logical_over_wire": ratio}
                if world.rank == 0:
                    keep(options.json, cells)
                    print(f"{name}: {100 * accuracy:.2f} % in {time.perf_counter() - begun:.1f} s", flush=True)
        if world.rank == 0:
            print(table(options, cells, world.size))


def train(
    options: argparse.Namespace, workload: Fashion, data: TensorDataset, codec: str, seed: int
) -> tuple[float, float]:
    """The test accuracy after all epochs, and how many times fewer bytes were sent."""
    model = workload.model(seed)
    momentum = 0.0 if "momentum=" in codec else 0.9  # the codec brings its own
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=momentum)
    chosen = None if codec == "none" else codec
    with sl.distribute(model, optimizer, codec=chosen, seed=seed) as run:
        loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
        steps = len(data) // (64 * run.world.size)
        decay = sl.optim.cosine_decay(optimizer, options.epochs * steps) if options.decay == "cosine" else None
        for _ in range(options.epochs):
            for images, labels in run.shard(loader, seed=seed):
                optimizer.zero_grad()
                workload.loss(model, (images, labels)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if decay is not None:
                    decay.step()
        with run.agreed():
            accuracy = workload.evaluate(model, workload.splits().test)["accuracy"]
        return accuracy, run.stats.bytes_logical / max(1, run.stats.bytes_wire)


def keep(path: Path, cells: dict[str, dict[str, float]]) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(cells, indent=1) + "\n")
    os.replace(aside, path)


def table(options: argparse.Namespace, cells: dict[str, dict[str, float]], size: int) -> str:
    """Median accuracy, and the mean paired difference to dense in points with its interval."""

    def of(codec: str, seed: int) -> dict[str, float]:
        return cells[f"{codec}, {options.epochs} epochs, seed {seed}, {size} workers"]

    seeds = range(options.seeds)
    lines = ["| codec | bytes ÷ | accuracy, median | difference to dense, points |", "|---|---|---|---|"]
    for codec in ["none", *options.codecs]:
        found = [100 * of(codec, seed)["accuracy"] for seed in seeds]
        apart = [100 * (of(codec, seed)["accuracy"] - of("none", seed)["accuracy"]) for seed in seeds]
        mean = statistics.mean(apart)
        half = T95.get(len(apart) - 1, 2.0) * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        told = "" if codec == "none" else f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"
        lines.append(f"| {codec} | {of(codec, 0)['logical_over_wire']:.1f} | {statistics.median(found):.2f} | {told} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="specs; default: one of every kind")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--decay", choices=("none", "cosine"), default="cosine")
    parser.add_argument("--samples", type=int, default=50_000, help="of the training split")
    parser.add_argument("--folder", help="where Fashion-MNIST lies, if not where the package puts it")
    parser.add_argument("--json", type=Path, default=Path("runs/codec-accuracy.json"), help="what has been trained")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
