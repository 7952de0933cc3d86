"""Bulk synchronous parallel at a parameter server: the gradients of all workers make one step.

w ← rule(w, (1/p) Σ g_i(w)). The servers keep early pushes until a step is complete, add them in the order of the
workers, and apply the sum once::

    worker 0   push 0 ─────────────┐ read 1   push 1 …
    worker 1      push 0 ──────────┤ read 1      push 1 …
    worker 2               push 0 ─┴ read 1               a step takes as long as the slowest worker's

Valiant (1990); at a parameter server: Li et al. (2014), sequential consistency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.strategies.base import Preset, check_flags
from syncline.strategies.parameter_server import ParameterServerStrategy, ServerOptions

__all__ = ["BSP"]


@dataclass(frozen=True, repr=False)
class BSP(ParameterServerStrategy):
    """Synchronous training at a parameter server. The servers apply the optimizer's own rule, or `rule`.

    >>> BSP(filters="significant(1e-4)|cache", rule="momentum(mu=0.9)")
    bsp(rule='momentum(mu=0.9)', filters='significant(1e-4)|cache')
    """

    rule: str | None = None
    filters: str | None = None
    factors: bool = False

    name: ClassVar[str] = "bsp"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="bsp"),)

    def __post_init__(self) -> None:
        check_flags(self, "factors")
        self.check_rule(self.rule, self.filters)

    def server_options(self) -> ServerOptions:
        return ServerOptions(synchronous=True, rule=self.rule, filters=self.filters, factors=self.factors)
