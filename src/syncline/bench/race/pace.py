"""How long a race takes: the network of a simulated one, the time a worker computes for a sample, the whole."""

from __future__ import annotations

import os
import statistics
import time

import torch

from syncline.bench.race.plan import Plan
from syncline.errors import SpecError
from syncline.launch.lab.shaping import parse_rate
from syncline.specs import Registry
from syncline.training.workload import Workload, batches
from syncline.transports import Network

__all__ = ["expected_seconds", "parse_network", "seconds_a_sample"]

LATENCY = 50e-6
TRIES = 12
START_S, START_CPU_S = 1.5, 2.5
"""Seconds that a run on real processes takes beside its training, and processor seconds that each worker takes."""
SIMULATED_S, SIMULATED_STEP_S = 0.2, 0.0015
"""Seconds that a simulated run takes beside its computing, and seconds of each worker's step."""


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


def expected_seconds(plan: Plan, workload: Workload) -> float:
    """Roughly how long a race takes here, from a measured step and what runs took on a machine of two cores."""
    samples = workload.splits().sizes()["train"]
    a_sample = plan.seconds_a_sample or seconds_a_sample(workload, plan.batch)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = 0.0
    for run in (*plan.tuning_runs(), *plan.runs()):
        epochs = plan.settings(run).epochs or plan.epochs
        computing = epochs * samples * a_sample
        if plan.place.kind == "simulated":
            total += SIMULATED_S + computing + SIMULATED_STEP_S * epochs * samples / plan.batch
        else:
            total += START_S + (computing + START_CPU_S * run.workers) / min(run.workers, cores)
    return total
