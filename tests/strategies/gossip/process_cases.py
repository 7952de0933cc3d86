"""Gossip on real workers; run by mpiexec as a module, or by a pool of processes."""

from __future__ import annotations

import json
from typing import Any

import torch

import syncline as sl
from syncline.strategies.gossip import Gossip, GossipRun, PairwiseRun
from syncline.testing.collectives import world_on
from syncline.transports import Transport
from tests.strategies.gossip.cases import begin, row, start, take_step

STEPS = 6


def mix(world: sl.World, form: Any, codec: str | None) -> list[list[float]]:
    """Everybody's weights after each step of this worker, and what is left at the end."""
    rate = 0.1 if codec is None else 0.0
    model, optimizer, run = begin(world, Gossip(form=form), rate, codec=codec)
    assert isinstance(run, GossipRun)
    seen = []
    for _ in range(STEPS if codec is None else 40):
        take_step(model, optimizer)
        seen.append(row(model).tolist())
    run.close()
    return [*seen, row(model).tolist()]


def mix_on(transport: Transport, form: str, codec: str | None) -> list[list[float]]:
    """As `mix`, on the ranks of a pool."""
    return mix(world_on(transport), form, codec)


def pairs(world: sl.World) -> dict[str, Any]:
    """Average in pairs without gradients: what this worker began and ended with, and what all agree on."""
    model, optimizer, run = begin(world, Gossip("complete", pairwise=True), 0.0)
    assert isinstance(run, PairwiseRun)
    assert run.peers is not None
    run.absorb()
    world.barrier()
    for _ in range(30):
        take_step(model, optimizer)
    run.control_channel().finish()  # a step's count may be on its way when the step is over
    world.barrier()
    last = run.peers.weights.tolist()
    steps = run.control_channel().steps()
    run.close()
    told = {"rank": world.rank, "first": start(world.rank), "last": last, "agreed": row(model).tolist()}
    return {**told, "steps": steps, "sent": run.stats.bytes_wire}


def main() -> None:
    """Mix and average in pairs, one after the other."""
    torch.set_num_threads(1)
    with sl.init() as world:
        told = {"rank": world.rank, "seen": mix(world, "beside", None)}
        world.barrier()
        told["pairs"] = pairs(world)
    print(json.dumps(told) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
