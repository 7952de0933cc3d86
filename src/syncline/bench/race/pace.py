"""Estimates the duration of a race, and parses the simulated network."""

from __future__ import annotations

import os
import statistics
import time

import torch

from syncline.bench.race.plan import Plan
from syncline.errors import SpecError
from syncline.launch.link_rate import parse_rate
from syncline.specs import Registry
from syncline.transports import Network
from syncline.workloads.base import Workload, batches

__all__ = ["expected_seconds", "parse_network", "seconds_a_sample"]

LATENCY = 50e-6
"""Seconds; the latency of a simulated network that is given by its rate alone."""
TRIES = 12
"""Training steps that are timed; the first two are not counted."""
START_S, START_CPU_S = 1.5, 2.5
"""Overhead of a run on real processes: seconds for the run, and CPU seconds for each worker."""
SIMULATED_S, SIMULATED_STEP_S = 0.2, 0.0015
"""Overhead of a simulated run: seconds for the run, and seconds for each step of a worker."""


def parse_network(text: str) -> Network:
    """The network of a rate such as "100mbit", or of a whole spec: "network(latency=1e-4, bandwidth=12.5e6)".

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
        raise SpecError(f"{error}; or give the whole network: network(latency=1e-4, bandwidth=12.5e6)") from None
    if shape is None:
        raise SpecError(f"a simulated network needs a rate, such as 100mbit, not {text!r}")
    return Network(latency=LATENCY, bandwidth=shape.rate / 8)


def seconds_a_sample(workload: Workload, batch: int) -> float:
    """Measured seconds of forward, backward and update for one sample of a batch, on one thread (a median)."""
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
    """Estimated seconds of a race on this machine: from a measured step, and overheads measured on two cores."""
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
