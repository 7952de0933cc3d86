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
from torch import Tensor, nn
from torch.utils.data import DataLoader

import syncline as sl
from syncline.bench.measuring import ratios, summarize
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.workloads import Digits, Fashion
from syncline.workloads.base import Batch
from syncline.world import World

WARM = 2
"""Steps at the beginning of a turn that do not count: memory is allocated in them."""
STAMPS: list[float] = []
"""When each step of the present turn called for its loss."""


class StampedFashion(Fashion):
    """Takes the time of each step, in the same way for both loops."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        STAMPS.append(time.perf_counter())
        return super().loss(model, batch)


class StampedDigits(Digits):
    """The same for a smaller one."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        STAMPS.append(time.perf_counter())
        return super().loss(model, batch)


def bare(workload: Fashion | Digits, steps: int) -> None:
    """A loop that somebody writes by hand."""
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    taken = 0
    with sl.distribute(model, optimizer, check_finite=True) as run:
        loader = DataLoader(workload.splits().train, batch_size=workload.defaults.batch, shuffle=True)
        while taken < steps:
            for samples in run.shard(loader):
                optimizer.zero_grad()
                workload.loss(model, samples).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                taken += 1
                if taken == steps:
                    break


def raced(workload: Fashion | Digits, steps: int, folder: Path) -> None:
    """The race's own loop, with log, phases and the table of ranks; it evaluates when the steps are over."""
    how = Settings(steps=steps, evaluate_every=10 * steps, checkpoint_every=0)
    train(workload, how, folder=folder, stop=lambda: False, predict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("fashion", "digits"), default="fashion", help="default: fashion")
    parser.add_argument("--steps", type=int, default=100, help="in a turn (default: 100)")
    parser.add_argument("--repeats", type=int, default=41, help="turns of each (default: 41)")
    options = parser.parse_args()
    with sl.init() as world:
        measure(world, StampedFashion() if options.workload == "fashion" else StampedDigits(), options)


def measure(world: World, workload: Fashion | Digits, options: argparse.Namespace) -> None:
    seconds: dict[str, list[float]] = {"bare": [], "raced": []}
    order = random.Random(0)  # the same on every rank
    with tempfile.TemporaryDirectory() as place:
        for turn in range(options.repeats + 1):  # the first warms up
            names = ["bare", "raced"]
            order.shuffle(names)
            for name in names:
                world.barrier()
                STAMPS.clear()
                if name == "bare":
                    bare(workload, options.steps)
                else:
                    raced(workload, options.steps, Path(place, str(turn)))
                if turn:
                    first, last = STAMPS[WARM], STAMPS[options.steps - 1]
                    seconds[name].append((last - first) / (options.steps - 1 - WARM))
    if world.rank == 0:
        plain, ratio = summarize(seconds["bare"]), ratios(seconds["raced"], seconds["bare"])
        batch = workload.defaults.batch
        print(f"{workload} on {world.size} workers, batch {batch}: a bare step takes {plain.scaled(1e3)} ms,")
        print(f"the race's {ratio} times that ({options.repeats} pairs of {options.steps} steps, 95 % interval)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
