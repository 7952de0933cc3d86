"""Eight virtual ranks reduce one tensor by every schedule: what the formula says, what the simulation takes.

    python examples/schedules.py
    python examples/schedules.py --ranks 16 --megabytes 64 --latency 1e-6 --bandwidth 12.5e9
    python examples/schedules.py --ranks-per-host 4 --inside-bandwidth 20e9

The simulator runs the library's own code, message by message, under a virtual clock; the formula is the
textbook's where one is exact, elsewhere the schedule's rounds are added up.
"""

import argparse

import torch

import syncline as sl
from syncline.collectives import build, names
from syncline.costs import closed_form, play


def main() -> None:
    options = parse()
    inside = sl.Link(latency=1e-6, bandwidth=options.inside_bandwidth) if options.ranks_per_host else None
    network = sl.Network(
        latency=options.latency, bandwidth=options.bandwidth, ranks_per_host=options.ranks_per_host, inside=inside
    )
    hosts = tuple(network.host(rank) for rank in range(options.ranks))
    numel = int(options.megabytes * 1e6 / 4)
    print(
        f"all-reduce of {options.megabytes:g} MB on {options.ranks} virtual ranks, "
        f"latency {options.latency * 1e6:g} µs, {options.bandwidth / 1e9:g} GB/s\n\n"
        f"{'schedule':<20} {'rounds':>6} {'messages':>8} {'busiest sends':>13} {'predicted':>12} {'by':>7} "
        f"{'simulated':>12}"
    )
    rows = []
    for name in names("allreduce"):
        cost = play(build("allreduce", name), options.ranks, 4 * numel, network, itemsize=4, hosts=hosts)
        formula = closed_form(name, options.ranks, 4 * numel, network)

        def once(world: sl.World, name: str = name) -> torch.Tensor:
            result: torch.Tensor = sl.allreduce(torch.full((numel,), world.rank + 1.0), op="sum", algorithm=name)
            return result

        run = sl.simulate(once, ranks=options.ranks, network=network, seed=7)
        expected = options.ranks * (options.ranks + 1) / 2
        assert all(bool((result == expected).all()) for result in run.results), f"{name} gave a wrong sum"
        predicted, source = (cost.time, "rounds") if formula is None else (formula, "formula")
        rows.append((run.time, name))
        print(
            f"{name:<20} {cost.rounds:>6} {len(run.messages):>8} {cost.busiest_bytes / 1e6:>10.2f} MB "
            f"{predicted * 1e3:>9.3f} ms {source:>7} {run.time * 1e3:>9.3f} ms"
        )
    print(f"\nfastest here: {min(rows)[1]}; every rank checked its sum")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual ranks (default: 8)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of the tensor (default: 4)")
    parser.add_argument(
        "--latency", type=float, default=50e-6, help="seconds a message takes at least (default: 50e-6)"
    )
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes a second (default: 1.25e9)")
    parser.add_argument("--ranks-per-host", type=int, help="group ranks into hosts that are fast inside")
    parser.add_argument("--inside-bandwidth", type=float, default=20e9, help="bytes a second inside a host")
    return parser.parse_args()


if __name__ == "__main__":
    main()
