"""What a simulated race must be told: the network, and how long a worker computes for a sample."""

from __future__ import annotations

import statistics
import time

import torch

from syncline.errors import SpecError
from syncline.launch.lab.shaping import parse_rate
from syncline.specs import Registry
from syncline.training.workload import Workload, batches
from syncline.transports import Network

__all__ = ["parse_network", "seconds_a_sample"]

LATENCY = 50e-6
TRIES = 12


def parse_network(text: str) -> Network:
    """A rate such as "100mbit" between any two workers, or all of it: "network(latency=1e-4, bandwidth=12.5e6)".

    >>> parse_network("100mbit").bandwidth
    12500000.0
    """
    if "(" in text:
        registry = Registry[Network]("network")
        registry.add("network", Network)
        return registry.build(text)
    try:
        shape = parse_rate(text)
    except SpecError as error:
        raise SpecError(f"{error}; or write all of it: network(latency=1e-4, bandwidth=12.5e6)") from None
    if shape is None:
        raise SpecError(f"a simulated network needs a rate, such as 100mbit, not {text!r}")
    return Network(latency=LATENCY, bandwidth=shape.rate / 8)


def seconds_a_sample(workload: Workload, batch: int) -> float:
    """What forward, backward and update take here for one sample of a batch, on one thread; the median of some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = workload.model(0)
        optimizer = workload.optimizer(model)
        first = next(batches(workload.splits().train, batch))
        taken = []
        for _ in range(TRIES):
            start = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(model, first).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(taken[2:]) / len(first[0])
