"""Looking for a bad interleaving over many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from syncline.transports import Network
from syncline.transports.faults import Fault
from syncline.world import Simulation, World, simulate

__all__ = ["hunt"]


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
) -> int:
    """Run `fn` in chaos mode for every seed and check `invariant` (which raises when it is broken) on the outcome.

    The first failure is raised as an `AssertionError` whose message says how to replay it. Returns the number of seeds.

    >>> hunt(lambda world: world.rank, ranks=2, seeds=range(3))
    3
    """
    count = 0
    for seed in seeds:
        try:
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
                )
            )
        except Exception as error:
            raise AssertionError(
                f"seed {seed} breaks it: {error}\nreplay: simulate({getattr(fn, '__name__', 'fn')}, ranks={ranks}, "
                f"network={network!r}, faults={tuple(faults)!r}, seed={seed}, chaos=True, timeout={timeout}, "
                f"return_exceptions={return_exceptions})"
            ) from error
        count += 1
    return count
