"""Every strategy, in settings that communicate often, for tests that ask the same of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from tests.strategies.hogwild_cases import one_host

SYNCHRONOUS = (
    "allreduce",
    "bsp",
    "ssp(slack=0)",
    "master",
    "master(masters=2)",
    "local(period=2)",
    "local(period=2, after=2)",
    "adacomm(start=2)",
    "diloco(period=2)",
    "diloco(period=2, overlap=True)",
    "easgd(period=2)",
    "easgd(period=2, momentum=0.5)",
    "gossip",
    "average",
)
"""Workers with the same data do what one worker does, at least as long as they have agreed on the weights."""
ASYNCHRONOUS = (
    "allreduce(delay=1)",
    "ssp(slack=2)",
    "downpour",
    "downpour(push=2, fetch=2)",
    "master(sync=False)",
    "hogwild",
    "easgd(period=2, sync=False)",
    "easgd(period=2, sync=False, centres=2)",
    "gossip(pairwise=True)",
    "onesided",
)
EVERY = (*SYNCHRONOUS, *ASYNCHRONOUS, "ensemble")


def play(work: Callable[[sl.World], Any], ranks: int = 2, **options: Any) -> tuple[Any, ...]:
    """Run it on simulated workers of one host, which hogwild needs."""
    return sl.simulate(work, ranks=ranks, network=one_host(ranks), **options).results


def whole(model: nn.Module) -> Tensor:
    """All parameters and buffers of a model, in one row."""
    held = (*model.parameters(), *model.buffers())
    return torch.cat([each.detach().reshape(-1).double() for each in held]).clone()
