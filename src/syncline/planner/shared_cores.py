"""Ranks that share the processors of one machine: what they compute takes longer while others compute.

n computations on c cores at the same time proceed at min(1, c / n) of their speed each, as the kernel's fair scheduler
lets them. Two players follow this rule in virtual time:

- `simulate_step_s`: strategies in which workers proceed at their own pace. Their own code runs in the simulator, with
  parameters of the right sizes; only the computation is replaced by its duration.
- `play_on_cores`: the actions of a pipeline schedule, as `parallel.player` does for a core for each rank.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import nn

from syncline.parallel.player import StageCost
from syncline.parallel.schedules import Action, PipelineSchedule, PipelineSetting
from syncline.strategies import build_strategy
from syncline.training.distribute import distribute
from syncline.transports import Network
from syncline.world import World, simulate

__all__ = ["SharedCores", "play_on_cores", "simulate_step_s"]

SLICE_S = 1e-3
"""How long a computation runs before it looks again how many others compute."""
MAX_SIMULATED_ELEMENTS = 200_000
"""More parameters are simulated as fewer, on a network that is slower by as much."""
MIN_STEPS = 12
"""Simulated steps that count, and at least two periods."""
WARM_UP_STEPS = 6
STEP_NOISE = 0.03
"""Standard deviation of a computation. Without any, workers that share cores would compute in step forever."""


class SharedCores:
    """Processors that simulated ranks share."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._computing = 0

    def compute(self, world: World, seconds: float) -> None:
        """Take the time of a computation that lasts so long alone. Called by one task of each rank."""
        self._computing += 1
        left = seconds
        while left > 1e-12:
            speed = min(1.0, self.cores / self._computing)
            taken = min(SLICE_S, left / speed)
            world.compute(taken)
            left -= taken * speed
        self._computing -= 1


def simulate_step_s(
    strategy: str,
    sizes: Sequence[int],
    workers: int,
    network: Network,
    compute_s: float,
    *,
    cores: int = 0,
    seed: int = 0,
) -> float:
    """Seconds of a step, the mean over the workers, while each computes `compute_s` between its exchanges.

    `sizes` are the elements of the parameters. `cores`: processors that all workers share; 0: each has its own.

    >>> round(simulate_step_s("ssp", [1000], 2, Network(latency=0.0, bandwidth=1e9), 0.010), 2)
    0.01
    """
    scale = max(1.0, sum(sizes) / MAX_SIMULATED_ELEMENTS)
    elements = [max(1, round(each / scale)) for each in sizes]
    slower = Network(
        latency=network.latency,
        bandwidth=network.bandwidth / scale,
        per_message=network.per_message,
        combine=network.combine * scale,
    )
    period = int(getattr(build_strategy(strategy), "period", 1))
    counted = math.ceil(max(MIN_STEPS, 2 * period) / period) * period
    before = math.ceil(WARM_UP_STEPS / period) * period
    shared = SharedCores(cores or workers)

    def train(world: World) -> float:
        model = nn.ParameterList([nn.Parameter(torch.zeros(each)) for each in elements])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        noise = random.Random(f"{seed} {world.rank}")
        begin = 0.0
        with distribute(model, optimizer, strategy=strategy, algorithm="auto"):
            for step in range(before + counted):
                if step == before:
                    begin = world.runtime.now()
                shared.compute(world, compute_s * max(0.0, noise.gauss(1.0, STEP_NOISE)))
                torch.stack([each.sum() for each in model]).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return (world.runtime.now() - begin) / counted

    found = simulate(train, workers, slower, seed=seed, progress=lambda _: None).results
    return math.fsum(found) / workers


def play_on_cores(
    schedule: PipelineSchedule,
    setting: PipelineSetting,
    costs: Sequence[StageCost],
    transfer_s: Callable[[int], float],
    port_s: Callable[[int], float],
    cores: float,
) -> float:
    """Seconds from the first action to the end of the last one, on `cores` processors that all ranks share.

    >>> from syncline.parallel.schedules import OneFOneB
    >>> costs = [StageCost(1.0, 1.0, 1.0)] * 4
    >>> schedule, setting, none = OneFOneB(), PipelineSetting(ranks=4, micro_batches=8), lambda nbytes: 0.0
    >>> [play_on_cores(schedule, setting, costs, none, none, cores) for cores in (4, 2, 1)]
    [33.0, 51.0, 96.0]
    """
    return _CorePlayer(schedule, setting, costs, transfer_s, port_s, cores).run()


class _CorePlayer:
    """All ranks in the order of time. A rank waits for results, computes, and sends."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        setting: PipelineSetting,
        costs: Sequence[StageCost],
        transfer_s: Callable[[int], float],
        port_s: Callable[[int], float],
        cores: float,
    ) -> None:
        self.schedule, self.ranks, self.costs, self.cores = schedule, setting.ranks, costs, cores
        self.transfer_s, self.port_s = transfer_s, port_s
        self.orders = [
            [each for each in schedule.actions(rank, setting) if each.kind in "FBIW"] for rank in range(self.ranks)
        ]
        self.next = [0] * self.ranks
        self.ports_free_s = [0.0] * self.ranks
        self.inputs_free_s = [0.0] * self.ranks
        self.arrived: set[tuple[int, str, int, int]] = set()
        """Results that a rank has: rank, kind, stage, micro-batch."""
        self.messages: list[tuple[float, tuple[int, str, int, int]]] = []
        self.left: dict[int, float] = {}
        """Seconds of work that are left of the computing ranks."""
        self.now = 0.0

    def run(self) -> float:
        for rank in range(self.ranks):
            self._start(rank)
        while self.left or self.messages:
            speed = min(1.0, self.cores / len(self.left)) if self.left else 1.0
            ends = min(self.left.values(), default=math.inf) / speed
            arrives = self.messages[0][0] - self.now if self.messages else math.inf
            passed = max(0.0, min(ends, arrives))
            self.now += passed
            self.left = {rank: each - passed * speed for rank, each in self.left.items()}
            if arrives <= ends:
                result = heapq.heappop(self.messages)[1]
                self.arrived.add(result)
                self._start(result[0])
                continue
            for rank in [rank for rank, each in self.left.items() if each <= 1e-12]:
                del self.left[rank]
                self._end(rank)
        return self.now

    def _start(self, rank: int) -> None:
        """Begin the next action of an idle rank, if it has what the action needs."""
        if rank in self.left or self.next[rank] == len(self.orders[rank]):
            return
        action = self.orders[rank][self.next[rank]]
        if all((rank, *need) in self.arrived for need in self._needs(action)):
            self.left[rank] = max(1e-12, self.costs[action.stage].seconds(action.kind))

    def _needs(self, action: Action) -> list[tuple[str, int, int]]:
        kind, stage, number = action
        if kind == "F":
            return [("F", stage - 1, number)] if stage else []
        if kind == "W":
            return [("B", stage, number)]
        following = [("B", stage + 1, number)] if stage + 1 < len(self.costs) else []
        return [("F", stage, number), *following]

    def _end(self, rank: int) -> None:
        """Send the result of the action that has ended, and begin the next one."""
        kind, stage, number = self.orders[rank][self.next[rank]]
        self.next[rank] += 1
        result = ("B" if kind == "I" else kind, stage, number)
        self.arrived.add((rank, *result))
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < len(self.costs):
            receiver = self.schedule.rank_of(to, self.ranks)
            if receiver != rank:
                nbytes = self.costs[min(stage, to)].output_bytes
                departs = max(self.now, self.ports_free_s[rank])
                port_s = self.port_s(nbytes)
                self.ports_free_s[rank] = departs + port_s
                # The receiver's port takes one message at a time, from either side.
                begins = max(departs + self.transfer_s(nbytes) - port_s, self.inputs_free_s[receiver])
                self.inputs_free_s[receiver] = begins + port_s
                heapq.heappush(self.messages, (begins + port_s, (receiver, *result)))
        self._start(rank)
