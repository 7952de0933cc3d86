"""Steps before the clock runs: what is done once on a machine is no part of anybody's training."""

from __future__ import annotations

from syncline.strategies import Strategy, strategy_run
from syncline.training.distribute import distribute
from syncline.training.settings import Settings
from syncline.workloads.base import Workload, batches
from syncline.world import World

__all__ = ["rehearse"]

STEPS = 2


def rehearse(workload: Workload, settings: Settings, strategy: Strategy | None, world: World) -> None:
    """Take steps with a model that nobody keeps, so that a codec's kernels are compiled. Every rank calls it.

    The first use of a codec on a machine compiles for some ten seconds, in the very paths that a step takes. Random
    numbers are drawn: seed afterwards.
    """
    model = workload.model(settings.seed).to(world.device)
    optimizer = settings.optimizer(workload, model, world.size)
    way, codec = strategy or settings.strategy, settings.codec
    with distribute(model, optimizer, way, codec, settings.collective, seed=settings.seed) as run:
        batch = next(batches(workload.splits().train, settings.batch or 1))
        for _ in range(STEPS):
            optimizer.zero_grad()
            workload.loss(strategy_run(run).replica, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
