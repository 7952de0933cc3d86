"""What `check=True` costs: the same all-reduce with and without it, taking turns in one run.

torchrun --nproc-per-node 4 examples/check_cost.py
torchrun --nproc-per-node 2 examples/check_cost.py --repeats 500
"""

import argparse
import statistics
import time

import torch

import syncline as sl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="timed pairs for each size (default: 200)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with sl.init() as world:
        for numel in (1_000, 250_000, 4_000_000):
            x = torch.zeros(numel)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for repeat in range(options.repeats + 5):  # the first five warm up
                for world.check in (False, True) if repeat % 2 else (True, False):
                    world.barrier()
                    start = time.perf_counter()
                    sl.allreduce(x, op="mean")
                    if repeat >= 5:
                        seconds[world.check].append(time.perf_counter() - start)
            if world.rank == 0:
                extra = [on - off for on, off in zip(seconds[True], seconds[False], strict=True)]
                low, middle, high = (1e3 * value for value in statistics.quantiles(extra, n=4))
                plain = 1e3 * statistics.median(seconds[False])
                print(f"{4 * numel / 1e6:8.3f} MB: {plain:7.2f} ms, check adds {middle:.2f} ({low:.2f}–{high:.2f}) ms")


if __name__ == "__main__":
    main()
