"""How long the simulator itself takes: a ring message by message, the same by the player, a hunt with faults.

    python examples/simulator_speed.py
    python examples/simulator_speed.py --ranks 64 --player-ranks 4096 --seeds 100 --repeats 5

Real seconds of this machine, each measured `--repeats` times: median (least–most).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import syncline as sl
from syncline.collectives import build
from syncline.costs import play
from syncline.testing import hunt

FAULTS = (sl.faults.Slow(1, 3.0), sl.faults.Delay(1e-3, probability=0.2), sl.faults.Kill(2, at=3e-4))


def steps(world: sl.World) -> torch.Tensor:
    x = torch.full((64,), float(world.rank))
    for _ in range(3):
        world.compute(1e-4)
        x = sl.allreduce(x, op="sum", algorithm="ring")
    return x


def one_culprit(run: sl.Simulation) -> None:
    errors = [result for result in run.results if isinstance(result, Exception)]
    assert all(isinstance(error, sl.errors.PeerLostError) and error.peer == 2 for error in errors), errors


def main() -> None:
    options = parse()
    numel = 10 * options.ranks
    measure(
        f"ring of {options.ranks} ranks, simulated",
        lambda: sl.simulate(
            lambda world: sl.allreduce(torch.ones(numel), "mean", algorithm="ring"), ranks=options.ranks
        ),
        options.repeats,
    )
    measure(
        f"ring of {options.player_ranks} ranks, played",
        lambda: play(build("allreduce", "ring"), options.player_ranks, 1 << 24, sl.Network()),
        options.repeats,
    )
    measure(
        f"{options.seeds} seeds of chaos with faults, 4 ranks",
        lambda: hunt(steps, 4, range(options.seeds), faults=FAULTS, invariant=one_culprit, return_exceptions=True),
        options.repeats,
    )


def measure(name: str, work: Callable[[], object], repeats: int) -> None:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    print(f"{name:<45} {statistics.median(seconds):7.2f} s ({min(seconds):.2f}–{max(seconds):.2f})", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256, help="ranks of the simulated ring (default: 256)")
    parser.add_argument("--player-ranks", type=int, default=1024, help="ranks of the played ring (default: 1024)")
    parser.add_argument("--seeds", type=int, default=1000, help="seeds of the hunt (default: 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each (default: 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
