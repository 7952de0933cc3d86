"""Rounds of mixing that all workers take together: D-PSGD, its other form, and CHOCO-SGD.

form="after"     x_i ← Σ_j W_ij (x_j − η g_j(x_j))         step, then mix what all have after it
form="beside"    x_i ← Σ_j W_ij x_j − η g_i(x_i)           mix what all had before the step, while it is computed

after    │ forward backward step │ mix │ forward backward step │ mix │
beside   │ forward backward step │ forward backward step │ …
                                 └─ mix ─────────────────┘ its end: added to what the step has made
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import DivergedError
from syncline.reduction import Communicator
from syncline.strategies.base import RunSettings, Strategy
from syncline.strategies.gossip.apart import Apart
from syncline.strategies.gossip.choco import Choco, Pace, pace_of
from syncline.strategies.gossip.graphs import Graph
from syncline.strategies.gossip.mixing import Mixing, Neighbours, PlainMixing
from syncline.strategies.local_weights import LocalWeightsRun
from syncline.world import allreduce

__all__ = ["GossipRun"]

LOOKS = 16
"""Every so many rounds the workers tell how far apart they are: it takes a small message of its own."""


class GossipRun(LocalWeightsRun):
    """One worker among its neighbours."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Communicator,
        settings: RunSettings,
        *,
        graph: Graph,
        period: int,
        beside: bool,
        gamma: float | None,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.graph = graph
        self._period, self._beside = period, beside
        self._since = 0
        """Steps since the last round."""
        self._under_way = False
        self._uneven = False
        self._resumes = False
        """Whether a round was under way in the checkpoint that is loaded."""
        self._hat: Tensor | None = None
        self._pace: Pace | None = None
        self._mixing: Mixing | None = None
        self._neighbours: Neighbours | None = None
        self._apart: Apart | None = None
        if exchange.size > 1:
            self._neighbours = Neighbours(exchange, graph)
            self._mixing = self._make_mixing(self._neighbours, gamma)
            self._apart = Apart(self.weights)

    def _make_mixing(self, neighbours: Neighbours, gamma: float | None) -> Mixing:
        exchange, codec = self.exchange, self.exchange.codec
        if codec is None:
            return PlainMixing(neighbours, self.weights)
        self._pace = pace_of(exchange, self._names, codec, gamma)
        return Choco(neighbours, self._names, codec, self._pace, exchange.rank, self.settings.seed)

    @property
    def config(self) -> dict[str, Any]:
        paced = {} if self._pace is None else {"gossip_scale": self._pace.scale, "gossip_gamma": self._pace.gamma}
        return {**super().config, "spectral_gap": self.graph.gap, **paced}

    @property
    def first_exchange(self) -> int | None:
        return self._period

    @property
    def copies_weights(self) -> bool:
        return self.exchange.codec is not None

    # Steps and rounds.

    def after_step(self) -> None:
        self._land()
        self._since += 1
        if self._since >= self._period:
            self.sync()

    def sync(self, active: bool = True) -> int:
        self._land()
        alive = self._count_active(active)
        if alive:
            self._since = 0
            self._launch()
            if not self._beside:
                self._land()
        return alive

    def _launch(self) -> None:
        assert self._mixing is not None, "who is alone never meets"
        assert self._apart is not None
        if self.rounds % LOOKS == 0:
            self.stats.consensus = self._apart.measure(self.exchange, self.weights)
        if self.settings.check_finite:
            self._check_weights()
        self._mixing.begin(self.weights, self.rounds)
        self._under_way = True

    def _check_weights(self) -> None:
        """Raise where an optimizer has made NaN or Inf of finite gradients."""
        rank, steps = self.exchange.rank, self.stats.steps
        for name, weight in self._names.items():
            if not bool(torch.isfinite(weight.detach()).all()):
                raise DivergedError(f"NaN or Inf in {name} on rank {rank}", rank=rank, parameter=name, step=steps)

    def _land(self) -> None:
        """Take in what a round brings, where one is under way."""
        if not self._under_way:
            return
        assert self._mixing is not None
        with torch.no_grad():
            for weight, change in zip(self.weights, self._mixing.finish(), strict=True):
                if weight.dtype == change.dtype:
                    weight.add_(change.to(weight.device))
                else:
                    weight.copy_(weight.to(change.dtype).add_(change.to(weight.device)))
        self._under_way = False
        self.rounds += 1
        self.stats.staleness = 0

    def _count_active(self, active: bool) -> int:
        """How many still have data. Nobody need ask but in an epoch that may end sooner on some."""
        if not self._uneven:
            return self.exchange.size
        flags = torch.tensor([int(active)], dtype=torch.int64)
        return int(allreduce(flags, op="sum", group=self.exchange.team))

    def check_uneven(self) -> None:
        super().check_uneven()
        self._uneven = True

    def settle_uneven(self) -> None:
        super().settle_uneven()
        self._uneven = False
        self._since = 0  # steps of a period that not all have taken: begin another together

    def finish(self) -> None:
        self._drop()
        super().finish()

    def _drop(self) -> None:
        """End a round that is under way without it: the mean is the same."""
        if self._under_way and self._mixing is not None:
            self._mixing.finish()
            self._under_way = False

    def detach(self) -> None:
        super().detach()
        if self._neighbours is not None:
            self._neighbours.close()

    # State.

    def restart(self) -> None:
        self._drop()
        super().restart()
        self._since, self._resumes, self._hat = 0, False, None
        if isinstance(self._mixing, Choco):
            self._mixing.exchange_hats(self._mixing.begin_anew(self.weights))

    def shared_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {"since": self._since, "under_way": self._under_way}
        if self._pace is not None:
            own["pace"] = [self._pace.scale, self._pace.gamma]
        return super().shared_state() | own

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._drop()
        super().load_shared_state(state)
        self._since = int(state.get("since", 0))
        self._resumes = bool(state.get("under_way", False))
        if isinstance(self._mixing, Choco) and "pace" in state:
            self._pace = self._mixing.pace = Pace(*map(float, state["pace"]))

    def own_state(self) -> dict[str, Any]:
        return {"hat": self._mixing.hat.clone()} if isinstance(self._mixing, Choco) else {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._hat = state.get("hat")

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._hat = None
        super().load_local_states(states)
        if self._mixing is None:
            return
        if isinstance(self._mixing, Choco):
            self._mixing.exchange_hats(self._mixing.begin_anew(self.weights) if self._hat is None else self._hat)
        if self._resumes and self._beside:  # what was under way when it was saved
            self._mixing.begin(self.weights, self.rounds)
            self._under_way = True
