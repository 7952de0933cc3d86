"""Every worker trains a replica of its own, pushes what its gradients add up to, and fetches what the servers have.

```text
push=2, fetch=3     step        1    2    3    4    5    6
                    local       w −= η·g  in every step, by the user's optimizer
                    push             ▲         ▲         ▲        Σg since the last push ─► rule at the servers
                    fetch                 ▼              ▼        w ← the servers' weights
                    ask for it       ▼              ▼             with prefetch: it lands while the step computes
```

Nobody waits for anybody. What is pushed is the sum of the gradients, and each is in exactly one push. The servers'
Adagrad, η_i = γ / √ΣΔ², makes the rate of a weight fall with what was pushed to it, which stale updates need.

Dean et al.: Large scale distributed deep networks (2012).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.errors import PeerLostError, SpecError
from syncline.reduction import Communicator
from syncline.server import Future
from syncline.strategies.base import Preset, RunSettings, StrategyRun
from syncline.strategies.parameter_server import ParameterServerRun, ParameterServerStrategy, ServerOptions
from syncline.world.hooks import ModuleHook

__all__ = ["Downpour"]

SHORTEST, LONGEST = 1e-3, 0.25
"""Seconds between two looks at how far worker 0 has warmed up."""


@dataclass(frozen=True, repr=False)
class Downpour(ParameterServerStrategy):
    """Asynchronous replicas: a push every `push` steps, a fetch every `fetch` steps, and `rule` at the servers.

    The servers' rate is `lr` where it is told, else the optimizer's; either follows the optimizer's schedule. Worker 0
    takes the first `warmup` steps alone. With `prefetch` a fetch is asked for one step before it is due.

    >>> Downpour(push=4, fetch=4, lr=0.01)
    downpour(push=4, fetch=4, lr=0.01)
    """

    push: int = 1
    fetch: int = 1
    rule: str = "adagrad"
    lr: float | None = None
    warmup: int = 0
    prefetch: bool = True
    filters: str | None = None

    name: ClassVar[str] = "downpour"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="downpour(rule='adam(b1=0.0)', lr=0.004, prefetch=False)"),)

    def __post_init__(self) -> None:
        for key, least in (("push", 1), ("fetch", 1), ("warmup", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"downpour({key}={value!r}): a number of steps, at least {least}")
        if self.lr is not None and (isinstance(self.lr, bool) or not isinstance(self.lr, (int, float)) or self.lr <= 0):
            raise SpecError(f"downpour(lr={self.lr!r}): a positive number, or None for the optimizer's")
        if not isinstance(self.prefetch, bool):
            raise SpecError(f"downpour(prefetch={self.prefetch!r}): True or False")
        self.check_rule(self.rule, self.filters)

    @property
    def stride(self) -> int:
        return self.push

    @property
    def state_format(self) -> str:
        return f"downpour({self.rule})"

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        plan = ServerOptions(rule=self.rule, lr=self.lr, filters=self.filters, stride=self.push)
        return _DownpourRun(self, model, optimizer, exchange, settings, plan)


class _DownpourRun(ParameterServerRun):
    strategy: Downpour

    def __init__(
        self,
        strategy: Downpour,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Communicator,
        settings: RunSettings,
        plan: ServerOptions,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings, plan)
        self._sum = torch.zeros(self.keys.trained, dtype=torch.float32)
        """GradientReducer that no push has taken yet."""
        self._spare = torch.zeros(self.keys.trained, dtype=torch.float32)
        """The row of the latest push, which may be under way."""
        self._unsent = 0
        """Steps in `_sum`."""
        self._without: set[int] | None = None
        """Indices of the parameters that had no gradient in any of these steps; None before the first step."""
        self._pushed: list[Future] = []
        self._asked: Future | None = None
        if strategy.warmup and exchange.rank > 0:
            self.hooks.append(model.register_forward_pre_hook(ModuleHook(self._await_warmth)))

    def scale(self) -> float:
        """Each gradient counts whole."""
        return 1.0

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.push

    def before_step(self) -> None:
        self._sum.add_(self.gradients)
        self._unsent += 1
        self._without = set(self.absent) if self._without is None else self._without & set(self.absent)

    def after_step(self) -> None:
        taken, fetch = self.stats.steps, self.strategy.fetch
        if taken % self.strategy.push == 0:
            self._push()
        if taken % fetch == 0:
            self._land()
        if self.strategy.prefetch and (taken + 1) % fetch == 0:
            self._ask()

    def ending(self) -> None:
        if self._unsent:
            self._push()
        with self.waiting("the last push"):
            self._settle()
            if self._asked is not None:  # nobody looks at it any more
                self._asked.wait()
                self._asked = None
        super().ending()
        self._board.tell_steps(self.exchange.rank, self.stats.steps)

    def settle_pushes(self) -> None:
        self._settle()
        if self._asked is not None:
            self._asked.wait()
            self._asked = None

    def restart(self) -> None:
        super().restart()
        self._sum.zero_()
        self._unsent, self._without = 0, None

    def shared_state(self) -> dict[str, Any]:
        """A push that is under way is in no worker's sum any more: the servers are read when all have arrived."""
        self._settle()
        self.wait_for_all("save the weights")
        return super().shared_state()

    def local_state(self) -> dict[str, Any]:
        """This replica, and the gradients that wait for the next push."""
        own = {"weights": self.keys.named(self.keys.read(self.model)), "unsent": self.keys.named(self._sum)}
        return {**super().local_state(), **own, "steps_unsent": self._unsent}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        self._sum.zero_()
        self._unsent, self._without = 0, None
        for state in states:  # what workers that are no more have left is pushed by who takes over
            self._sum.add_(self.keys.joined(dict(state["unsent"]), torch.zeros(self.keys.trained, dtype=torch.float32)))
            self._unsent += int(state["steps_unsent"])
        if states:
            self.keys.write(self.model, self.keys.joined(dict(states[0]["weights"]), self.keys.read(self.model)))

    # Within.

    def _push(self) -> None:
        """Send the sum, and begin another; the row of the push before must have arrived first."""
        if self._pushed and not all(future.done() for future in self._pushed):
            with self.waiting("the push before"):
                self._settle()
        self._settle()
        self._sum, self._spare = self._spare.zero_(), self._sum
        absent, self._without, self._unsent = sorted(self._without or ()), None, 0
        with self.explained():
            self._pushed = self.pusher.push(self._spare, self.rates(), scale=self.scale(), absent=absent)
        self.count()

    def _settle(self) -> None:
        """See the latest push in place."""
        with self.explained():
            for future in self._pushed:
                future.wait()
        if self._pushed:
            others = max(future.staleness for future in self._pushed)
            self.stats.read_at(max(0, others) * self.strategy.push)
        self._pushed = []

    def _ask(self) -> None:
        """Ask for the weights, with the latest push in them."""
        after = [future.timestamp for future in self._pushed]
        with self.explained():
            self._asked = self.client.pull(
                (0, self.keys.trained), self.weights, wanted=0, after=after, coded=self.coded
            )

    def _land(self) -> None:
        """Go on from the servers' weights."""
        if self._asked is None:
            self._ask()
        assert self._asked is not None
        with self.waiting("fetch"):
            self._asked.wait()
        self._asked = None
        self.install()

    def _await_warmth(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the first forward that trains: worker 0 has taken its steps, or takes no more."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self.hooks.pop().remove()
        network, runtime = self.client.network, self.world.runtime
        first, patience = network.transport.members[network.workers[0]], network.transport.timeout
        gap, before, since = SHORTEST, -1, runtime.now()
        with self.waiting("worker 0 to warm up"):
            while True:
                taken = self._board.steps()[0]
                through = self._board.stop_requested() or self._board.has_finished(0)
                if taken >= self.strategy.warmup or through or first in network.transport.lost():
                    break
                if taken > before:
                    before, since = taken, runtime.now()
                if runtime.now() - since > patience:
                    raise PeerLostError(
                        f"worker 0 warms up and has taken {taken} of {self.strategy.warmup} steps, none of them in the "
                        f"last {patience:g} s",
                        peer=0,
                        pending="worker 0's next push",
                        seconds=runtime.now() - since,
                    )
                runtime.sleep(gap)
                gap = min(2 * gap, LONGEST)
            self.client.pull((0, self.keys.trained), self.weights, wanted=0).wait()
        self.install()
