"""One master holds the weights; workers send gradients to it and read weights from it. Masters may form a tree.

Synchronous: the master waits for the first ⌈fraction · p⌉ workers of a step, takes the mean of their gradients and
steps once. A late worker gets the new weights, and its gradient is dropped. Asynchronous: every gradient is a step::

    sync, fraction=2/3                            async
    worker 0   g0 ──┐ w1   g1 ──┐ w2              worker 0   g ─┐ w   g ─┐ w
    worker 1   g0 ──┴ w1   g1 ──┴ w2              worker 1      g ─┐ w      g ─┐ w
    worker 2   g0 ────────── late ┴ w2            master        1  2        3  4

With `masters=m` the workers form m groups of neighbours. A sub-master adds up the gradients of its group before it
sends them to the root: one push and one pull for the group instead of one for each worker::

    root ◄── Σ ── sub-master 0 ◄── g ── workers 0, 1        sync: the sum of a step
         ◄── Σ ── sub-master 1 ◄── g ── workers 2, 3        async: the gradients since the last sum

Chen et al.: Revisiting distributed synchronous SGD (2016), for the fraction; Anderson, Vlimant, Spiropulu: mpi_learn
(2017), for the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.errors import IncompatibleError, SpecError
from syncline.server import Client, Future, open_space, server_network
from syncline.server.opening import TreeClient, open_tree
from syncline.server.rules import Sgd, TorchRule, UpdateRule
from syncline.strategies.base import Preset, StrategyRun, check_counts, check_flags, check_number
from syncline.strategies.parameter_server import ParameterServerRun, ParameterServerStrategy, ServerOptions

__all__ = ["Master", "momentum_left"]


def momentum_left(momentum: float, workers: int) -> float:
    """The momentum to use when `workers` run asynchronously, so that the effective momentum stays the same.

    With p equal workers, a gradient is k steps old with probability (1/p)(1 − 1/p)^k. On average the update is
    v ← μ′ v − η G, G ← (1 − 1/p) G + (1/p) g: asynchrony acts as a second filter with a momentum of 1 − 1/p. The
    gradients in v have the mean age μ′/(1−μ′) + (p−1). To have the same age as with a momentum of μ alone:

        μ′/(1 − μ′) + (p − 1) = μ/(1 − μ)        so        μ′ = 1 − 1 / (1/(1−μ) − (p−1)),  or 0 where p ≥ 1/(1−μ)

    Mitliagkas, Zhang, Hadjis, Ré: Asynchrony begets momentum (2016) for the second filter.

    >>> [round(momentum_left(0.9, workers), 3) for workers in (1, 2, 4, 8, 16)]
    [0.9, 0.889, 0.857, 0.667, 0.0]
    """
    room = 1.0 / (1.0 - momentum) - (workers - 1)
    return max(0.0, 1.0 - 1.0 / room) if room > 1.0 else 0.0


@dataclass(frozen=True, repr=False)
class Master(ParameterServerStrategy):
    """Workers and one master, synchronous or asynchronous; with `masters` above 1, a tree.

    With `sync`, a step needs the gradients of a `fraction` of the live workers (in a tree, of each group). With
    `sync=False`, `damp` divides the learning rate of a gradient by its staleness in steps, if that is above 1 (Zhang et
    al. 2016), and `correct_momentum` lowers SGD's momentum by `momentum_left`.

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
        check_flags(self, "sync", "damp", "correct_momentum")
        check_number(self, "fraction", "the part of the workers to wait for, in (0, 1]", lambda part: 0 < part <= 1)
        check_counts(self, masters=1)
        if self.sync and (self.damp or self.correct_momentum):
            given = "damp" if self.damp else "correct_momentum"
            raise SpecError(f"master({given}=True) is for gradients that come late: give sync=False too")
        if not self.sync and self.fraction != 1.0:
            raise SpecError(f"master(sync=False, fraction={self.fraction}): nobody waits there; leave fraction out")

    def server_options(self) -> ServerOptions:
        slack = 0 if self.sync else None
        return ServerOptions(slack=slack, synchronous=self.sync, quorum=self.fraction, damped=self.damp)

    def run_type(self) -> type[StrategyRun]:
        return MasterRun


class MasterRun(ParameterServerRun):
    """One worker's part."""

    strategy: Master

    @property
    def has_tree(self) -> bool:  # type: ignore[override]
        return self.strategy.masters > 1

    late_steps = 0
    """Steps of this worker that were late and dropped."""

    def open_client(self) -> Client:
        strategy, numel = self.strategy, self.keys.numel
        options = self.space_options(self.rules, [group.first for group in self.keys.groups])
        if strategy.masters == 1:
            servers = server_network(self.world).servers[:1]
            return open_space(self.world, strategy.name, numel, servers=servers, **options)
        return open_tree(self.world, strategy.name, numel, strategy.masters, **options)

    def adapt_rules(self, rules: list[UpdateRule]) -> list[UpdateRule]:
        if not self.strategy.correct_momentum:
            return rules
        # In a tree the clients of the root are the sub-masters.
        peers = self.initial_workers if self.strategy.masters == 1 else self.strategy.masters
        return [_lower_momentum(rule, peers) for rule in rules]

    def scale(self) -> float:
        """In a synchronous step the master takes the mean; otherwise each gradient is a step."""
        return self.weight if self.strategy.sync else 1.0

    def push_and_pull(self) -> list[Future]:
        futures = super().push_and_pull()
        if any(future.late for future in futures):
            self.late_steps += 1
            self.stats.events.count("sl_late_steps")
        return futures

    def set_clocks(self, clocks: list[int]) -> None:
        super().set_clocks(clocks)
        if isinstance(self.client, TreeClient):
            self.client.set_clocks(self.client.steps())
            self.wait_for_all("set the clocks of their groups", steps_before=False)

    def explain_lost(self, peer: int) -> str:
        client = self.client
        if client.network.dedicated:
            return ""
        needed = 1 if self.strategy.masters == 1 else self.strategy.masters + 1
        what = "the master, and the weights are gone with it"
        if isinstance(client, TreeClient) and peer in client.description.servers:
            what = f"the sub-master of workers {list(client.description.workers)}"
        return (
            f"worker {peer} was {what}: servers of their own outlive workers (syncline run --servers {needed}), or go "
            "on from a checkpoint"
        )


def _lower_momentum(rule: UpdateRule, workers: int) -> UpdateRule:
    """The rule with the momentum of `momentum_left`."""
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
