"""Stale synchronous parallel: a worker may be at most `slack` steps ahead of the slowest.

w ← rule(w, (1/p) g_i(w̃)), for each push when it arrives. A read at clock c contains every update of clocks ≤ c − s − 1
and all updates of this worker. It may contain newer updates::

    slack=1    clock      0     1     2     3
    worker 0              ───── ─────│···············      has ended 2 steps, and waits at the read of step 2 …
    worker 1              ─────────────── ─────            … until worker 1 has ended its first

Slack helps if different workers are slow at different times: a late worker catches up before the others must wait. A
worker that is always slow limits the pace of all. With slack 0 the servers keep early pushes, which is `bsp`.

The worker names the clock that its read needs (`min_clock` in `strategies/parameter_server.py`). The server defers the
read until all workers have it (`may_read` in `server/shard.py`).

Ho et al.: More effective distributed ML via a stale synchronous parallel parameter server (2013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from syncline.strategies.base import Preset, check_counts, check_flags
from syncline.strategies.parameter_server import ParameterServerStrategy, ServerOptions

__all__ = ["SSP"]


@dataclass(frozen=True, repr=False)
class SSP(ParameterServerStrategy):
    """Workers that are at most `slack` steps apart.

    >>> SSP(slack=3)
    ssp(slack=3)
    """

    slack: int = 1
    rule: str | None = None
    filters: str | None = None
    factors: bool = False

    name: ClassVar[str] = "ssp"
    # Staleness acts like momentum (Mitliagkas et al. 2016), so that the optimizer gets less of it and a larger rate.
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="ssp(slack=3)", rate=2.0, momentum=0.5),)

    def __post_init__(self) -> None:
        check_counts(self, slack=0)
        check_flags(self, "factors")
        self.check_rule(self.rule, self.filters)

    def server_options(self) -> ServerOptions:
        return ServerOptions(
            slack=self.slack,
            synchronous=self.slack == 0,
            rule=self.rule,
            filters=self.filters,
            factors=self.factors,
        )
