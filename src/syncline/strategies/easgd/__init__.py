"""Elastic averaging SGD: each worker trains its own weights, and every τ steps it and a centre move towards each other.

x_i ← x_i − η g_i(x_i) − α (x_i − x̃),  x̃ ← x̃ + α Σ (x_i − x̃),  every τ steps; in between x_i ← x_i − η g_i(x_i)::

    worker 0   ·  ·  ·  ●  ·  ·  ·  ●            ●  moves α of the way towards the centre
    centre              ◆           ◆            ◆  x̃, *the* model, moves towards the workers: Σ x_i + x̃ is constant
    worker 1   ·  ·  ·  ●  ·  ·  ·  ●

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator
from syncline.strategies.base import Preset, RunSettings, StrategyRun, check_counts, check_flags, check_number
from syncline.strategies.easgd.parameter_server import ServerElasticRun, ServerElasticTreeRun
from syncline.strategies.easgd.synchronous import DEFAULT_TOTAL_PULL, HOSTS, ElasticRun, groups_within
from syncline.strategies.parameter_server import ParameterServerStrategy, ServerOptions
from syncline.world.elastic import ElasticMember

__all__ = ["EASGD"]


@dataclass(frozen=True, repr=False)
class EASGD(ParameterServerStrategy):
    """Elastic averaging: a round with the centre every `period` steps, in which each moves `alpha` of the way.

    By default `alpha` is 0.9 / workers. All workers take a round together. With `sync=False` the centre is at the
    parameter server, and each worker exchanges with it at its own pace. `momentum` is Nesterov's around the optimizer,
    which must have none. With `centres`, groups of consecutive ranks (or "hosts") have a centre each, and these
    exchange with a root every `root_every` rounds.

    >>> EASGD(period=16)
    easgd(period=16)
    """

    period: int = 10
    alpha: float | None = None
    sync: bool = True
    momentum: float = 0.0
    unstable: bool = False
    centres: int | str = 1
    root_every: int = 1

    name: ClassVar[str] = "easgd"
    presets: ClassVar[tuple[Preset, ...]] = (
        Preset(spec="easgd(period=4)"),
        Preset(spec="easgd(period=4, sync=False)"),
    )

    def __post_init__(self) -> None:
        check_counts(self, period=1, root_every=1)
        check_flags(self, "sync", "unstable")
        check_number(self, "momentum", "a number, at least 0 and below 1", lambda momentum: 0 <= momentum < 1)
        if self.centres != HOSTS:
            if isinstance(self.centres, str):
                raise SpecError(f"easgd(centres={self.centres!r}): a number of groups, at least 1, or {HOSTS!r}")
            check_counts(self, centres=1)
        if self.alpha is not None:
            most = math.inf if self.unstable else 1.0
            wanted = "above 0 and at most 1 / workers; None for 0.9 / workers, or a larger one with unstable=True"
            check_number(self, "alpha", wanted, lambda alpha: 0 < alpha <= most and alpha < math.inf)
        if self.root_every > 1 and self.centres == 1:
            raise SpecError(
                f"easgd(root_every={self.root_every}) is for trees, and there is one centre: give centres too"
            )

    @property
    def asynchronous(self) -> bool:
        return not self.sync

    def server_options(self) -> ServerOptions:
        return ServerOptions(rule="add", slack=None, stride=self.period)

    @property
    def state_format(self) -> str:
        return "easgd" if self.sync else "easgd(sync=False)"

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        self._check_momentum(optimizer)
        if self.sync:
            self._check_elastic(communicator.world.elastic)
        groups = groups_within(communicator, self.centres)
        self.alpha_in(groups, communicator.rank)
        if self.sync:
            _check_tree_codec(len(groups), communicator.codec)
            return ElasticRun(self, model, optimizer, communicator, settings)
        if len(groups) > 1:
            return ServerElasticTreeRun(self, model, optimizer, communicator, settings)
        return ServerElasticRun(self, model, optimizer, communicator, settings)

    def alpha_in(self, groups: Sequence[Sequence[int]], rank: int) -> float:
        """The α of a worker in its group. All groups are checked, so that every worker raises the same error.

        >>> EASGD().alpha_in([[0, 1], [2, 3, 4]], rank=4)
        0.3
        """
        most = max(len(group) for group in groups)
        if self.alpha is not None and self.alpha * most > 1.0 + 1e-9 and not self.unstable:
            raise IncompatibleError(
                f"{self} with {most} workers at a centre: alpha · {most} = {self.alpha * most:g}, and above 1 the "
                f"centre jumps beyond them; give alpha of at most {1.0 / most:.4g}, none for "
                f"{DEFAULT_TOTAL_PULL}/{most}, or unstable=True"
            )
        return self.alpha_of(next(len(group) for group in groups if rank in group))

    def alpha_of(self, workers: int) -> float:
        """The α of a centre with so many workers."""
        return DEFAULT_TOTAL_PULL / workers if self.alpha is None else self.alpha

    def _check_elastic(self, elastic: ElasticMember | None) -> None:
        """Refuse what cannot follow another number of workers."""
        if elastic is None:
            return
        if self.centres != 1:
            raise IncompatibleError(
                f"{self} has groups of workers, which cannot follow the changing team of an elastic job: leave "
                "`centres` or --elastic out"
            )
        most = elastic.limits.maximum
        if self.alpha is not None and self.alpha * most > 1.0 + 1e-9 and not self.unstable:
            raise IncompatibleError(
                f"{self} in an elastic job of up to {most} workers: alpha · {most} = {self.alpha * most:g}, and above "
                f"1 the centre jumps beyond them; give alpha of at most {1.0 / most:.4g}, or none for "
                f"{DEFAULT_TOTAL_PULL} / workers, which follows their number"
            )

    def _check_momentum(self, optimizer: Optimizer) -> None:
        """Refuse momentum in both the strategy and the optimizer."""
        momentum = max((float(group.get("momentum") or 0.0) for group in optimizer.param_groups), default=0.0)
        if self.momentum and momentum:
            raise IncompatibleError(
                f"{self} has a momentum of its own, and the optimizer's is {momentum:g}: they would add up; give the "
                "optimizer none, or leave the strategy's out"
            )


def _check_tree_codec(groups: int, codec: Codec | None) -> None:
    if groups > 1 and codec is not None and codec.traits.residual_needs_sum:
        raise IncompatibleError(
            f"{codec!r} keeps a warm start that all workers share, and the {groups} groups of a tree reduce apart: "
            "give a codec such as topk(0.01) or quantize(4), or one centre"
        )
