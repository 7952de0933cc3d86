"""Searches for races: runs a function under many random schedules of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from syncline.transports import Network, Transport
from syncline.transports.faults import Fault
from syncline.transports.simulated import kill_rank
from syncline.world import Simulation, World, simulate
from syncline.world.simulation import ExtraProcess

__all__ = ["hunt", "hunt_cases", "kill_soon"]


def hunt(
    fn: Callable[[World], Any],
    ranks: int,
    seeds: Iterable[int],
    *,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    invariant: Callable[[Simulation], object] = lambda simulation: None,
    timeout: float = 60.0,
    return_exceptions: bool = False,
    extra: Sequence[ExtraProcess | Callable[[Transport], Any]] = (),
) -> int:
    """Run `fn` in chaos mode for every seed, and call `invariant` with the outcome; it raises if something is wrong.

    The first failure is raised as an `AssertionError` whose message says how to repeat it. Returns the number of seeds.

    >>> hunt(lambda world: world.rank, ranks=2, seeds=range(3))
    3
    """
    others = f", extra=({len(extra)} processes)" if extra else ""
    replay = (
        f"simulate({getattr(fn, '__name__', 'fn')}, ranks={ranks}, network={network!r}, faults={tuple(faults)!r}, "
        f"seed={{seed}}, chaos=True, timeout={timeout}, return_exceptions={return_exceptions}{others})"
    )

    def check(seed: int) -> None:
        invariant(
            simulate(
                fn,
                ranks,
                network=network,
                faults=faults,
                seed=seed,
                chaos=True,
                timeout=timeout,
                return_exceptions=return_exceptions,
                extra=extra,
            )
        )

    return hunt_cases(check, seeds, replay)


def hunt_cases(check: Callable[[int], object], seeds: Iterable[int], replay: str) -> int:
    """Call `check(seed)` for every seed; `check` derives the whole case from the seed.

    The first failure is raised as an `AssertionError`. `replay` is the call that repeats it, with {seed} in it.

    >>> hunt_cases(lambda seed: None, range(5), "check({seed})")
    5
    """
    count = 0
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            how = replay.replace("{seed}", str(seed))
            raise AssertionError(f"seed {seed} breaks it: {error}\nreplay: {how}") from error
        count += 1
    return count


def kill_soon(world: World) -> None:
    """Kill the simulated process of this rank at a random later moment, which the seed decides in chaos mode.

    `Kill` has virtual times, which do not fit chaos mode: it would kill the rank before anything has started.
    """
    kill_rank(world.transport)
