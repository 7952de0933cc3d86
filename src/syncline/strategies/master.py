"""One master holds the weights; workers bring it gradients and take weights home. Masters may stand in a tree.

Synchronous: the master waits for the first ⌈fraction · p⌉ workers of a step, takes their mean and steps once; who comes
late gets the new weights, and its gradient does not count. Asynchronous: every gradient is a step of its own::

    sync, fraction=2/3                            async
    worker 0   g0 ──┐ w1   g1 ──┐ w2              worker 0   g ─┐ w   g ─┐ w
    worker 1   g0 ──┴ w1   g1 ──┴ w2              worker 1      g ─┐ w      g ─┐ w
    worker 2   g0 ────────── late ┴ w2            master        1  2        3  4

With `masters=m` the workers are m groups of neighbours. A sub-master adds up what its group brings before it talks to
the root: one push and one pull for the group, in place of one for each worker::

    root ◄── Σ ── sub-master 0 ◄── g ── workers 0, 1        sync: the sum of a step
         ◄── Σ ── sub-master 1 ◄── g ── workers 2, 3        async: what came while the last sum was under way

Chen et al.: Revisiting distributed synchronous SGD (2016), for the fraction; Anderson, Vlimant, Spiropulu: mpi_learn
(2017), for the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.errors import DivergedError, IncompatibleError, PeerLostError, SpecError
from syncline.reduction import Communicator
from syncline.server import Client, Future, open_space, server_network
from syncline.server.filters import Filter
from syncline.server.opening import TreeClient, open_tree
from syncline.server.rules import Sgd, TorchRule, UpdateRule
from syncline.strategies.base import Preset, RunSettings, StrategyRun
from syncline.strategies.parameter_server import ParameterServerRun, ParameterServerStrategy, ServerOptions

__all__ = ["Master", "momentum_left"]


def momentum_left(momentum: float, workers: int) -> float:
    """The explicit momentum that is left when `workers` go at their own pace.

    With p workers alike, a gradient is k steps old with probability (1/p)(1 − 1/p)^k. In the mean the update is then
    v ← μ′ v − η G, G ← (1 − 1/p) G + (1/p) g: two filters in a row, of which asynchrony is the second, a momentum of
    1 − 1/p. The gradients in v have the mean age μ′/(1−μ′) + (p−1). To be as old as with a momentum of μ alone:

        μ′/(1 − μ′) + (p − 1) = μ/(1 − μ)        so        μ′ = 1 − 1 / (1/(1−μ) − (p−1)),  or 0 where p ≥ 1/(1−μ)

    Mitliagkas, Zhang, Hadjis, Ré: Asynchrony begets momentum (2016) for the second filter.

    >>> [round(momentum_left(0.9, workers), 3) for workers in (1, 2, 4, 8, 16)]
    [0.9, 0.889, 0.857, 0.667, 0.0]
    """
    room = 1.0 / (1.0 - momentum) - (workers - 1)
    return max(0.0, 1.0 - 1.0 / room) if room > 1.0 else 0.0


@dataclass(frozen=True, repr=False)
class Master(ParameterServerStrategy):
    """Workers and one master, in step or not; with `masters` above 1, a tree.

    `fraction` of the living workers makes a step (`sync` only; in a tree, of each group). For `sync=False`: `damp`
    divides the rate of a gradient by its staleness in steps, where that is above 1 (Zhang et al. 2016), and
    `correct_momentum` lowers SGD's momentum to what asynchrony leaves of it (`momentum_left`).

    >>> Master(sync=False, damp=True)
    master(sync=False, damp=True)
    """

    sync: bool = True
    fraction: float = 1.0
    masters: int = 1
    damp: bool = False
    correct_momentum: bool = False

    name: ClassVar[str] = "master"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="master(sync=False)", momentum=0.2),)

    def __post_init__(self) -> None:
        for key in ("sync", "damp", "correct_momentum"):
            if not isinstance(getattr(self, key), bool):
                raise SpecError(f"master({key}={getattr(self, key)!r}): True or False")
        number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not number or not 0.0 < self.fraction <= 1.0:
            raise SpecError(f"master(fraction={self.fraction!r}): the part of the workers to wait for, in (0, 1]")
        if isinstance(self.masters, bool) or not isinstance(self.masters, int) or self.masters < 1:
            raise SpecError(f"master(masters={self.masters!r}): a number of groups, at least 1")
        if self.sync and (self.damp or self.correct_momentum):
            given = "damp" if self.damp else "correct_momentum"
            raise SpecError(f"master({given}=True) is for gradients that come late: give sync=False too")
        if not self.sync and self.fraction != 1.0:
            raise SpecError(f"master(sync=False, fraction={self.fraction}): nobody waits there; leave fraction out")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        plan = ServerOptions(synchronous=self.sync, quorum=self.fraction, damped=self.damp)
        return MasterRun(self, model, optimizer, exchange, settings, plan)


class MasterRun(ParameterServerRun):
    """One worker's part."""

    strategy: Master
    late_steps = 0
    """Steps of this worker that a quorum did without."""

    def open_client(self, filters: Filter | None) -> Client:
        strategy, network, codec = self.strategy, server_network(self.world), self.exchange.codec
        options: dict[str, Any] = {
            "rules": [*(repr(rule) for rule in self.rules), *self._buffer_rule],
            "bounds": self.keys.bounds,
            "parameters": self.keys.starts,
            "synchronous": strategy.sync,
            "mean": strategy.sync,
            "quorum": strategy.fraction,
            "damped": strategy.damp,
            "codec": None if codec is None else repr(codec),
            "initial": self.keys.read(self.model),
            "seed": self.settings.seed,
            "retry": network.transport.retry_after_s,
        }
        if strategy.masters == 1:
            return open_space(self.world, strategy.name, self.keys.numel, servers=network.servers[:1], **options)
        return open_tree(self.world, strategy.name, self.keys.numel, strategy.masters, **options)

    def adapted(self, rules: list[UpdateRule]) -> list[UpdateRule]:
        if not self.strategy.correct_momentum:
            return rules
        # In a tree the root takes turns with sub-masters, not with workers.
        peers = self.world.size if self.strategy.masters == 1 else self.strategy.masters
        return [_lowered(rule, peers) for rule in rules]

    def wanted(self, clock: int) -> int:
        return clock if self.strategy.sync else -1

    def scale(self) -> float:
        """The master takes the mean of the gradients that arrived, or each gradient by itself."""
        return self.weight if self.strategy.sync else 1.0

    def talk(self) -> list[Future]:
        futures = super().talk()
        if any(future.late for future in futures):
            self.late_steps += 1
            self.stats.events.count("sl_late_steps")
        return futures

    def set_clocks(self, clocks: list[int]) -> None:
        super().set_clocks(clocks)
        if isinstance(self.client, TreeClient):
            self.client.set_clocks(clocks)
            self.wait_for_all("set the clocks of their groups")

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except DivergedError as error:  # a push does not count the steps
            raise error.at_step(self.stats.steps) from None
        except PeerLostError as error:
            network, client = self.client.network, self.client
            if error.peer is None or network.dedicated:
                raise
            needed = 1 if self.strategy.masters == 1 else self.strategy.masters + 1
            what = "the master, and the weights are gone with it"
            if isinstance(client, TreeClient) and error.peer in client.description.servers:
                what = f"the sub-master of workers {list(client.description.workers)}"
            raise PeerLostError(
                f"{error}; worker {error.peer} was {what}: servers of their own outlive workers "
                f"(syncline run --servers {needed}), or go on from a checkpoint",
                peer=error.peer,
                pending=error.pending,
                seconds=error.seconds,
            ) from error


def _lowered(rule: UpdateRule, workers: int) -> UpdateRule:
    """The rule with the momentum that asynchrony leaves."""
    if isinstance(rule, Sgd):
        return rule
    if isinstance(rule, TorchRule) and rule.optimizer == "SGD":
        options = dict(rule.options)
        left = momentum_left(float(options.pop("momentum", 0.0)), workers)
        if left:
            options["momentum"] = left
        else:
            options.pop("nesterov", None)
        return TorchRule("SGD", tuple(options.items()))
    raise IncompatibleError(f"master(correct_momentum=True) lowers the momentum of SGD, and the optimizer is {rule!r}")
