"""hivemind: peers find each other in a distributed hash table and periodically average their weights.

https://github.com/learning-at-home/hivemind; Ryabinin et al., "Moshpit SGD", 2021. This baseline calls its
`DecentralizedAverager` every `period` steps for a group of all ranks. Between these calls the ranks train locally.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.bench.baselines.base import ForeignRun, find_package
from syncline.environment import detect
from syncline.errors import SpecError
from syncline.reduction import Communicator, broadcast_tree
from syncline.strategies import RunSettings, Strategy, StrategyRun
from syncline.transports.key_value_store import find_rendezvous, listening_address

__all__ = ["Hivemind"]

MATCHMAKING_S = 1.0
"""Time in which hivemind searches for a group; a group of all ranks starts at once."""


def find_hivemind() -> ModuleType:
    """The package, in the tested release."""
    return find_package("hivemind", "hivemind==1.1.12")


@dataclass(frozen=True, repr=False)
class Hivemind(Strategy):
    """The mean of the weights every `period` steps, by hivemind. Needs the package `hivemind`.

    >>> from syncline.bench.baselines import availability
    >>> "pip install hivemind" in (availability("hivemind") or "pip install hivemind")
    True
    """

    period: int = 8

    name: ClassVar[str] = "hivemind"

    def __post_init__(self) -> None:
        if not isinstance(self.period, int) or self.period < 1:
            raise SpecError(f"hivemind(period={self.period!r}): a number of steps, at least one")
        find_hivemind()

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _HivemindRun(self, model, optimizer, communicator, settings)


class _HivemindRun(ForeignRun):
    strategy: Hivemind
    backend = "hivemind"
    parts = True
    missed = 0
    """Rounds in which hivemind found no group of all ranks."""
    _dht: Any = None
    _averager: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """With the number of rounds in which hivemind found no group of all ranks."""
        return {**super().config, "rounds_missed": self.missed}

    def detach(self) -> None:
        super().detach()
        for part in (self._averager, self._dht):
            if part is not None:
                part.shutdown()
        self._averager = self._dht = None

    def _connect(self) -> None:
        """Join the hash table, which rank 0 starts."""
        hivemind = find_hivemind()
        rank, place = self.communicator.rank, find_rendezvous(detect())
        address = listening_address(place.address, len(set(self.world.hosts)) == 1)
        options = {"host_maddrs": [f"/ip4/{address}/tcp/0"], "use_relay": False, "use_auto_relay": False}
        peers: list[str] = []
        if rank == 0:
            self._dht = hivemind.DHT(start=True, **options)
            peers = [str(each) for each in self._dht.get_visible_maddrs()]
        peers = broadcast_tree(self.communicator, {"peers": peers}, 0)["peers"]
        if rank != 0:
            self._dht = hivemind.DHT(start=True, initial_peers=peers, **options)
        self._averager = hivemind.averaging.DecentralizedAverager(
            [parameter.detach().cpu().clone() for parameter in self.trained],
            self._dht,
            prefix="syncline",
            target_group_size=self.communicator.size,
            min_group_size=self.communicator.size,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            initial_group_bits="",
            start=True,
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._after_step(optimizer, args, kwargs)
        if self.stats.steps % self.strategy.period == 0 and self.communicator.size > 1:
            self._average_weights()

    def _average_weights(self) -> None:
        """Average the weights. Without a group of all ranks they stay unchanged, as in hivemind."""
        start = self.now()
        with self._averager.get_tensors() as shared:
            for own, parameter in zip(shared, self.trained, strict=True):
                own.copy_(parameter.detach())
        group = self._averager.step(timeout=self.world.transport.timeout)
        if group is None:
            self.missed += 1
        else:
            with self._averager.get_tensors() as shared:
                for own, parameter in zip(shared, self.trained, strict=True):
                    parameter.detach().copy_(own)
            self.stats.sent(self.gradient_bytes, self.gradient_bytes)
        self.stats.waited(start, self.now())
