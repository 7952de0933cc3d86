"""Elastic averaging SGD: each worker trains its own weights, and every τ steps it and a centre move towards each other.

x_i ← x_i − η g_i(x_i) − α (x_i − x̃),  x̃ ← x̃ + α Σ (x_i − x̃),  every τ steps; in between x_i ← x_i − η g_i(x_i)::

    worker 0   ·  ·  ·  ●  ·  ·  ·  ●            ●  moves α of the way towards the centre
    centre              ◆           ◆            ◆  x̃, *the* model, moves towards the workers: Σ x_i + x̃ is constant
    worker 1   ·  ·  ·  ●  ·  ·  ·  ●

Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator
from syncline.strategies.base import Preset, RunSettings, StrategyRun
from syncline.strategies.easgd.centre import DEFAULT_TOTAL_PULL, HOSTS, groups_of
from syncline.strategies.easgd.parameter_server import ServerElasticRun, ServerElasticTreeRun
from syncline.strategies.easgd.run import ElasticRun
from syncline.strategies.parameter_server import ParameterServerStrategy

__all__ = ["EASGD", "alpha_of"]


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
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        self._check_momentum(optimizer)
        groups = groups_of(communicator.world, self.centres)
        if self.sync:
            _check_tree_codec(len(groups), communicator.codec)
        alphas = [alpha_of(self, self.alpha, len(group), self.unstable) for group in groups]
        alpha = next(each for each, group in zip(alphas, groups, strict=True) if communicator.rank in group)
        elastic: dict[str, Any] = {"period": self.period, "alpha": alpha, "momentum": self.momentum}
        tree: dict[str, Any] = {"groups": groups, "root_every": self.root_every}
        if self.sync:
            return ElasticRun(self, model, optimizer, communicator, settings, **elastic, **tree)
        if len(groups) > 1:
            return ServerElasticTreeRun(self, model, optimizer, communicator, settings, **elastic, **tree)
        return ServerElasticRun(self, model, optimizer, communicator, settings, **elastic)

    def _check_momentum(self, optimizer: Optimizer) -> None:
        """Refuse momentum in both the strategy and the optimizer."""
        momentum = max((float(group.get("momentum") or 0.0) for group in optimizer.param_groups), default=0.0)
        if self.momentum and momentum:
            raise IncompatibleError(
                f"{self} has a momentum of its own, and the optimizer's is {momentum:g}: they would add up; give the "
                "optimizer none, or leave the strategy's out"
            )


def alpha_of(spec: object, alpha: float | None, count: int, unstable: bool) -> float:
    """The checked α of one of `count` workers at a centre.

    >>> round(alpha_of("easgd", None, 4, False), 3)
    0.225
    """
    if alpha is None:
        return DEFAULT_TOTAL_PULL / count
    if alpha * count > 1.0 + 1e-9 and not unstable:
        raise IncompatibleError(
            f"{spec} with {count} workers at a centre: alpha · {count} = {alpha * count:g}, and above 1 the centre "
            f"jumps beyond them; give alpha of at most {1.0 / count:.4g}, none for {DEFAULT_TOTAL_PULL}/{count}, or "
            "unstable=True"
        )
    return alpha


def _check_tree_codec(groups: int, codec: Codec | None) -> None:
    if groups > 1 and codec is not None and codec.traits.residual_needs_sum:
        raise IncompatibleError(
            f"{codec!r} keeps a warm start that all workers share, and the {groups} groups of a tree reduce apart: "
            "give a codec such as topk(0.01) or quantize(4), or one centre"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
