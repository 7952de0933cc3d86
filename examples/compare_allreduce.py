"""Our schedules beside the engine's own all-reduce, in one run, taking turns.

    torchrun --nproc-per-node 4 examples/compare_allreduce.py
    torchrun --nproc-per-node 4 examples/compare_allreduce.py --megabytes 1 --repeats 50 --algorithms ring sharded

Each repeat times every algorithm once, in a shuffled order that all ranks share; a ratio is taken within a
repeat. Printed are medians and quartiles, and for ours where rank 0's time went: waiting for bytes, combining,
the rest.
"""

import argparse
import random
import statistics
import time

import torch

import syncline as sl
from syncline.collectives import build
from syncline.collectives.channel import allreduce
from syncline.collectives.executor import DenseChunks


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with sl.init() as world:
        tensor = torch.zeros(int(options.megabytes * (1 << 20)) // 4)
        team = world.group()
        channel = team.channel
        native = team.transport.native
        assert native is not None, "start this with torchrun, so that there is an engine to compare with"
        spent: dict[str, float] = {}
        combine = DenseChunks.merge

        def timed_merge(self: DenseChunks, move: object, data: torch.Tensor) -> None:
            start = time.perf_counter()
            combine(self, move, data)  # type: ignore[arg-type]
            spent["combine"] = spent.get("combine", 0.0) + time.perf_counter() - start

        DenseChunks.merge = timed_merge  # type: ignore[method-assign]
        seconds: dict[str, list[float]] = {name: [] for name in ["native", *options.algorithms]}
        combining: dict[str, list[float]] = {name: [] for name in seconds}
        order = random.Random(0)
        for repeat in range(options.repeats + 3):  # the first three warm up
            names = list(seconds)
            order.shuffle(names)
            for name in names:
                world.barrier()
                spent.clear()
                start = time.perf_counter()
                if name == "native":
                    native.allreduce(tensor, "sum").wait()
                else:
                    allreduce(channel, tensor, "sum", build("allreduce", name), lanes=options.lanes)
                took = time.perf_counter() - start
                if repeat >= 3:
                    seconds[name].append(took)
                    combining[name].append(spent.get("combine", 0.0))
        if world.rank == 0:
            print(f"{options.megabytes:g} MiB, {world.size} ranks, {options.repeats} repeats; medians (quartiles)")
            for name, times in seconds.items():
                ratios = [ours / theirs for ours, theirs in zip(times, seconds["native"], strict=True)]
                print(
                    f"{name:<20} {show(times, 1e3)} ms   {show(ratios, 1)} × native   "
                    f"of it combining {statistics.median(combining[name]) * 1e3:.2f} ms"
                )


def show(values: list[float], scale: float) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * scale:7.2f} ({low * scale:.2f}–{high * scale:.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the tensor in MiB (default: 16)")
    parser.add_argument("--repeats", type=int, default=30, help="timed repeats (default: 30)")
    parser.add_argument("--lanes", type=int, help="parts that our executor overlaps (default: what suits this machine)")
    parser.add_argument("--algorithms", nargs="+", default=["ring", "halving_doubling"], help="schedules to time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
