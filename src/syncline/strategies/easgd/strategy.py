"""Workers are tied to a centre by springs: each explores on its own, and all pull at the centre and it at them.

x_i ← x_i − η g_i(x_i) − α (x_i − x̃),  x̃ ← x̃ + α Σ (x_i − x̃),  every τ steps; in between x_i ← x_i − η g_i(x_i)::

    worker 0   ·  ·  ·  ●  ·  ·  ·  ●            ●  α of the way towards the centre, and the centre as much towards
    centre              ◆           ◆               the workers; what they give it gets: Σ x_i + x̃ stays
    worker 1   ·  ·  ·  ●  ·  ·  ·  ●            ◆  x̃, *the* model

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.errors import SpecError
from syncline.reduction import Communicator
from syncline.strategies.base import Preset, RunSettings, StrategyRun
from syncline.strategies.easgd.ahead import check_momentum
from syncline.strategies.easgd.centres import pull_of
from syncline.strategies.easgd.parameter_server import ServerElasticRun, ServerElasticTreeRun
from syncline.strategies.easgd.run import ElasticRun
from syncline.strategies.easgd.tree import HOSTS, check_tree, groups_of
from syncline.strategies.parameter_server import ParameterServerStrategy

__all__ = ["EASGD"]


@dataclass(frozen=True, repr=False)
class EASGD(ParameterServerStrategy):
    """Elastic averaging: a round with the centre every `period` steps, in which each moves `alpha` of the way.

    By default `alpha` is 0.9 / workers. All workers meet for a round; with `sync=False` the centre lies at the
    parameter server, and each comes when it is there. `momentum` is Nesterov's around the optimizer, which must have
    none. With `centres` groups of neighbours (or "hosts") have a centre each, tied to a root every `root_every` rounds.

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
        for key in ("period", "root_every"):
            self._refuse(key, "a whole number, at least 1", not _is_count(getattr(self, key)))
        for key in ("sync", "unstable"):
            self._refuse(key, "True or False", not isinstance(getattr(self, key), bool))
        self._refuse(
            "momentum", "a number, at least 0 and below 1", not (_is_number(self.momentum) and 0 <= self.momentum < 1)
        )
        self._refuse(
            "centres",
            f"a number of groups, at least 1, or {HOSTS!r}",
            not (_is_count(self.centres) or self.centres == HOSTS),
        )
        if self.alpha is not None:
            self._refuse("alpha", "above 0, or None for 0.9 / workers", not (_is_number(self.alpha) and self.alpha > 0))
            over = self.alpha > 1.0 and not self.unstable
            self._refuse("alpha", "at most 1 / workers, or unstable=True", over)
        if self.root_every > 1 and self.centres == 1:
            raise SpecError(
                f"easgd(root_every={self.root_every}) is for trees, and there is one centre: give centres too"
            )

    def _refuse(self, key: str, wanted: str, wrong: bool) -> None:
        if wrong:
            raise SpecError(f"easgd({key}={getattr(self, key)!r}): {wanted}")

    @property
    def asynchronous(self) -> bool:
        return not self.sync

    @property
    def stride(self) -> int:
        return self.period

    @property
    def state_format(self) -> str:
        return "easgd" if self.sync else "easgd(sync=False)"

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        check_momentum(self, self.momentum, optimizer)
        groups = groups_of(exchange.world, self.centres)
        if self.sync:
            check_tree(groups, exchange.codec)
        pulls = [pull_of(self, self.alpha, len(group), self.unstable) for group in groups]
        alpha = next(pull for pull, group in zip(pulls, groups, strict=True) if exchange.rank in group)
        how: dict[str, Any] = {"period": self.period, "alpha": alpha, "momentum": self.momentum}
        tree: dict[str, Any] = {"groups": groups, "root_every": self.root_every}
        if self.sync:
            return ElasticRun(self, model, optimizer, exchange, settings, **how, **tree)
        if len(groups) > 1:
            return ServerElasticTreeRun(self, model, optimizer, exchange, settings, **how, **tree)
        return ServerElasticRun(self, model, optimizer, exchange, settings, **how)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
