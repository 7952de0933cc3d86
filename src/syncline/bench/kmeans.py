"""`syncline train kmeans`: k-means on many workers. Each rank runs this module.

The points are random Gaussian blobs. Their centres are uniform in a box of side 20, and their standard deviation is
`spread`. At the true centres the objective, the mean squared distance to the nearest centre, is dims · spread².
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from syncline.errors import SpecError, SynclineError
from syncline.solvers import KMeans, Solution, aggregate, asgd
from syncline.specs import Registry, nearest, parse, spec_of
from syncline.strategies.onesided.update import Array
from syncline.transports.base import format_bytes
from syncline.workloads.base import check_number, check_whole
from syncline.world import World, init

__all__ = ["Blobs", "KMeansPlan", "build_blobs", "describe", "rank_main", "solve"]

BOX_HALF_SIDE = 10.0
DEFAULT_OPTIONS = {"rate": 0.3, "rate_end": 0.01}
"""Options of asgd that suit k-means."""
SOLVERS: dict[str, Callable[..., Solution]] = {"aggregate": aggregate, "allreduce": aggregate, "onesided": asgd}
"""`aggregate` does one all-reduce per round."""


@dataclass(frozen=True)
class Blobs:
    """A problem. `repr()` is its spec.

    >>> Blobs(points=5000)
    kmeans(points=5000)
    >>> Blobs(k=3, dims=2, points=7).draw()[0].shape
    (7, 2)
    """

    k: int = 100
    dims: int = 10
    points: int = 1_000_000
    spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("kmeans", "points", self.points, 1, 1 << 30)
        check_whole("kmeans", "k", self.k, 1, self.points)
        check_whole("kmeans", "dims", self.dims, 1, 4096)
        check_number("kmeans", "spread", self.spread, 0, 1e6)
        check_whole("kmeans", "seed", self.seed, 0, (1 << 63) - 1)

    def __repr__(self) -> str:
        return str(spec_of("kmeans", self))

    def draw(self) -> tuple[Array, Array]:
        """Points and true centres, in float32: the same in every process."""
        random = np.random.default_rng(self.seed)
        centres = random.uniform(-BOX_HALF_SIDE, BOX_HALF_SIDE, (self.k, self.dims)).astype(np.float32)
        points = random.standard_normal((self.points, self.dims), np.float32)
        points *= np.float32(self.spread)
        points += centres[random.integers(self.k, size=self.points)]
        return points, centres


def build_blobs(spec: str) -> Blobs:
    """The problem that a spec describes.

    >>> build_blobs("kmeans(k=4, points=100)")
    kmeans(k=4, points=100)
    """
    registry = Registry[Blobs]("workload")
    registry.add("kmeans", Blobs)
    return registry.build(spec)


@dataclass(frozen=True, kw_only=True)
class KMeansPlan:
    """What to solve, and how."""

    problem: str = "kmeans"
    strategy: str = "onesided"
    given: dict[str, Any] | None = None
    """Options of the command line in addition to the strategy."""
    seed: int = 0

    def as_json(self) -> str:
        """For the command line of a rank.

        >>> plan = KMeansPlan(strategy="aggregate(iterations=5)")
        >>> KMeansPlan(**json.loads(plan.as_json())) == plan
        True
        """
        return json.dumps(asdict(self))

    def solver(self) -> tuple[str, Callable[..., Solution], dict[str, Any]]:
        """The name of the strategy, its function, and its options. An unknown one is a `SpecError`.

        >>> KMeansPlan(strategy="onesided(batch=100)", given={"rate": 0.1}).solver()[2]
        {'rate': 0.1, 'rate_end': 0.01, 'batch': 100, 'seed': 0}
        """
        links = parse(self.strategy)
        if len(links) != 1 or links[0].args or links[0].name not in SOLVERS:
            raise SpecError(
                f"--strategy {self.strategy}: k-means is solved by onesided(…) or aggregate(…), options by name; "
                f"{nearest(links[0].name, sorted(SOLVERS))}"
            )
        link, given = links[0], self.given or {}
        solve = SOLVERS[link.name]
        defaults = DEFAULT_OPTIONS if solve is asgd else {}
        options = {**defaults, **given, **link.kwargs, "seed": self.seed}
        known = sorted(inspect.signature(solve).parameters)
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise SpecError(
                f"--strategy {self.strategy}: {link.name} has no {unknown[0]!r}; {nearest(unknown[0], known)}"
            )
        return link.name, solve, options


def solve(plan: KMeansPlan, world: World) -> tuple[Solution, float]:
    """The solution, and the objective at the true centres on this rank's points."""
    blobs = build_blobs(plan.problem)
    points, centres = blobs.draw()
    _, solver, options = plan.solver()
    own = points[world.rank :: world.size]
    del points
    objective = KMeans(blobs.k)
    solution = solver(objective, own, split=False, **options)
    return solution, objective.value(centres.astype(np.float64).reshape(-1), (own,))


def describe(plan: KMeansPlan, solution: Solution, truth: float, engine: str) -> str:
    """The result as text."""
    name, efforts = plan.solver()[0], solution.efforts
    steps = [effort.steps for effort in efforts]
    shown = f"{min(steps)}" if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"
    lines = [
        f"{plan.problem} by {name} on {len(efforts)} workers ({engine}): {solution.value:.5g} a point after "
        f"{solution.seconds:.3g} s (at the true centres {truth:.5g})",
        f"steps of each worker {shown}, {format_bytes(solution.sent_bytes)} sent",
    ]
    if name == "onesided":
        counts = ", ".join(
            f"{solution.total(key)} {key}" for key in ("sent", "dropped", "accepted", "rejected", "torn")
        )
        lines.append(f"states: {counts}")
    return "\n".join(lines)


def rank_main(plan: KMeansPlan) -> int:
    """Solve on this rank; return the exit code."""
    with init() as world:
        solution, truth = solve(plan, world)
        if world.rank == 0:
            print(describe(plan, solution, truth, world.transport.name), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(rank_main(KMeansPlan(**json.loads(sys.argv[1]))))
    except SynclineError as error:
        print(f"syncline train: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
