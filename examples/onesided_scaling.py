"""How far does one-sided SGD scale? K-means on simulated workers, with a mini-batch as costly as on this machine.

python examples/onesided_scaling.py
python examples/onesided_scaling.py --points 100000 --workers 1 8 --slow 4

Every worker goes once over its share of the same points, from the same first centres: p workers take a p-th of the
mini-batches each. A message costs what it takes here to write one, to check one and to step towards it. Beside it a
round of the aggregation, over all points and with one all-reduce. `--slow F` makes worker 0 F times slower; the seconds
are those of the typical worker.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

import syncline as sl
from syncline.bench.kmeans import Blobs
from syncline.solvers import KMeans, Solution, aggregate, asgd
from syncline.strategies.onesided.mailslots import is_whole, pack
from syncline.strategies.onesided.update import Array, StateSlice, step


def median_seconds(work: Callable[[], object], repeats: int = 300) -> float:
    """What something takes here."""
    took = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return float(np.median(took))


def message_seconds(state: Array) -> float:
    """What it takes to write a message, and to check one and step with it rather than without."""

    def work() -> None:
        message = pack(0, 1, 0, state)
        assert is_whole(message.copy())
        step(state, 0.1 * state, 0.1, [StateSlice(0, 2 * state)])

    return median_seconds(work) - median_seconds(lambda: step(state, 0.1 * state, 0.1, []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds; default 20e-6")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes a second; default 1.25e9")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower worker 0 is; default 1")
    options = parser.parse_args()
    points, centres = Blobs(points=options.points).draw()
    problem, truth = KMeans(len(centres)), centres.astype(np.float64).reshape(-1)
    a_sample = median_seconds(lambda: problem.delta(truth, (points[: options.batch],))) / options.batch
    a_message = message_seconds(truth)
    start = problem.begin((points,), np.random.default_rng(0))
    network = sl.Network(latency=options.latency, bandwidth=options.bandwidth)
    faults = [sl.faults.Slow(0, options.slow)] if options.slow != 1 else []
    values = [problem.value(state, (points,)) for state in (start, truth)]
    print(f"{options.batch} samples take {1e6 * a_sample * options.batch:.0f} µs, a message {1e6 * a_message:.0f} µs")
    print(f"the objective is {values[0]:.4f} at the first centres, {values[1]:.4f} at the true centres")
    print("workers   seconds  speed-up  objective  accepted   MB a worker   aggregation: seconds a round  speed-up")

    def cost(samples: int) -> float:
        return float(a_sample * samples)

    def cost_with_message(samples: int) -> float:
        return float(a_sample * samples + a_message)

    def one_sided(world: sl.World) -> Solution:
        price = cost if world.size == 1 else cost_with_message
        return asgd(problem, points, rate=0.3, rate_end=0.01, batch=options.batch, start=start, cost=price)

    def aggregated(world: sl.World) -> Solution:
        return aggregate(problem, points, iterations=2, tolerance=0, start=start, cost=cost)

    firsts: list[float] = []
    for workers in options.workers:
        found: Solution = sl.simulate(one_sided, workers, network=network, faults=faults).results[0]
        rounds: Solution = sl.simulate(aggregated, workers, network=network, faults=faults).results[0]
        typical = float(np.median([effort.seconds for effort in found.efforts]))
        a_round = rounds.seconds / rounds.efforts[0].steps
        firsts = firsts or [typical * workers, a_round * workers]
        share = found.total("accepted") / max(1, found.total("accepted") + found.total("rejected"))
        print(
            f"{workers:7d} {typical:9.4f} {firsts[0] / typical:9.1f} {found.value:10.4f} {share:9.0%} "
            f"{found.sent_bytes / workers / 1e6:13.2f} {a_round:29.5f} {firsts[1] / a_round:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
