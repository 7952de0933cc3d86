"""What the race's harness costs: the same steps by its loop and by a bare one, taking turns in one run.

syncline run -n 2 examples/harness_cost.py
syncline run -n 4 examples/harness_cost.py --workload digits --repeats 15
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import syncline as sl
from syncline.bench.stats import ratios, summarize
from syncline.bench.workloads import build
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.training.workload import Workload
from syncline.world import World


def bare(workload: Workload, batch: int, steps: int) -> float:
    """Seconds a step of a loop that somebody writes by hand."""
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    taken = 0
    with sl.distribute(model, optimizer, check_finite=True) as run:
        loader = DataLoader(workload.splits().train, batch_size=batch, shuffle=True)
        start = time.perf_counter()
        while taken < steps:
            for samples in run.shard(loader):
                optimizer.zero_grad()
                workload.loss(model, samples).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                taken += 1
                if taken == steps:
                    break
        return (time.perf_counter() - start) / steps


def raced(workload: Workload, batch: int, steps: int, folder: Path) -> float:
    """Seconds a step of the race's own loop, with log, phases and the table of ranks; without its evaluations."""
    how = Settings(batch=batch, steps=steps, evaluate_every=10 * steps, checkpoint_every=0)
    return train(workload, how, folder=folder, stop=lambda: False, predict=True).seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="fashion", help="default: fashion")
    parser.add_argument("--steps", type=int, default=300, help="in a turn (default: 300)")
    parser.add_argument("--repeats", type=int, default=11, help="turns of each (default: 11)")
    options = parser.parse_args()
    workload = build(options.workload)
    with sl.init() as world:
        measure(world, workload, options.steps, options.repeats)


def measure(world: World, workload: Workload, steps: int, repeats: int) -> None:
    batch = workload.defaults.batch
    seconds: dict[str, list[float]] = {"bare": [], "raced": []}
    order = random.Random(0)  # the same on every rank
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) if world.rank == 0 else Path(place, "unused")
        for turn in range(repeats + 1):  # the first warms up
            names = ["bare", "raced"]
            order.shuffle(names)
            for name in names:
                world.barrier()
                here = folder / str(turn)
                took = bare(workload, batch, steps) if name == "bare" else raced(workload, batch, steps, here)
                if turn:
                    seconds[name].append(took)
    if world.rank == 0:
        plain, ratio = summarize(seconds["bare"]), ratios(seconds["raced"], seconds["bare"])
        print(f"{workload} on {world.size} workers, batch {batch}: a bare step takes {plain.scaled(1e3)} ms,")
        print(f"the race's {ratio} times that (median of {repeats} pairs of {steps} steps, 95 % interval)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
