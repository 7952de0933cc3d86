"""Downpour SGD: each worker trains its own replica, pushes the sum of its gradients, and fetches the servers' weights.

```text
push=2, fetch=3     step        1    2    3    4    5    6
                    local       w −= η·g  in every step, by the user's optimizer
                    push             ▲         ▲         ▲        Σg since the last push ─► rule at the servers
                    fetch                 ▼              ▼        w ← the servers' weights
                    request          ▼              ▼             with prefetch: the reply arrives during the step
```

No worker waits for another. Each gradient is in exactly one push. The servers' Adagrad, η_i = γ / √ΣΔ², lowers the
learning rate of a weight with each update, which stale updates need.

Dean et al.: Large scale distributed deep networks (2012).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from syncline.control import poll
from syncline.errors import PeerLostError
from syncline.server import Future
from syncline.strategies.base import Preset, StrategyRun, check_counts, check_flags, check_number
from syncline.strategies.parameter_server import ParameterServerStrategy, ReplicaRun, ServerOptions
from syncline.world.hooks import ModuleHook

__all__ = ["Downpour"]


@dataclass(frozen=True, repr=False)
class Downpour(ParameterServerStrategy):
    """Asynchronous replicas: a push every `push` steps, a fetch every `fetch` steps, and `rule` at the servers.

    The servers' learning rate is `lr`, or the optimizer's if `lr` is None. Both follow the optimizer's schedule. Worker
    0 takes the first `warmup` steps alone. With `prefetch` a fetch is requested one step before it is due.

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
        check_counts(self, push=1, fetch=1, warmup=0)
        if self.lr is not None:
            check_number(self, "lr", "a positive number, or None for the optimizer's", lambda rate: rate > 0)
        check_flags(self, "prefetch")
        self.check_rule(self.rule, self.filters)

    @property
    def state_format(self) -> str:
        return f"downpour({self.rule})"

    def server_options(self) -> ServerOptions:
        return ServerOptions(rule=self.rule, lr=self.lr, slack=None, filters=self.filters, stride=self.push)

    def run_type(self) -> type[StrategyRun]:
        return DownpourRun


class DownpourRun(ReplicaRun):
    strategy: Downpour

    def setup(self) -> None:
        super().setup()
        self._sum = torch.zeros(self.keys.trained, dtype=torch.float32)
        """The sum of the gradients since the latest push."""
        self._spare = torch.zeros(self.keys.trained, dtype=torch.float32)
        """The values of the latest push, which may be in flight."""
        self._unsent = 0
        """Number of steps in `_sum`."""
        self._absent_in_all: set[int] | None = None
        """Indices of the parameters without a gradient in any of these steps; None before the first step."""
        self._fetch: Future | None = None
        if self.strategy.warmup and self.communicator.rank > 0:
            self.hooks.append(self.model.register_forward_pre_hook(ModuleHook(self._await_warmup)))

    def before_step(self) -> None:
        self._sum.add_(self.gradients)
        self._unsent += 1
        absent = set(self.absent)
        self._absent_in_all = absent if self._absent_in_all is None else self._absent_in_all & absent

    def after_step(self) -> None:
        steps, fetch = self.stats.steps, self.strategy.fetch
        if steps % self.strategy.push == 0:
            self._push()
        if steps % fetch == 0:
            self._finish_fetch()
        if self.strategy.prefetch and (steps + 1) % fetch == 0:
            self._request_fetch()

    def push_remaining(self) -> None:
        if self._unsent:
            self._push()

    def finish_requests(self) -> None:
        self.finish_pushes()
        if self._fetch is not None:  # its weights are not used
            self._fetch.wait()
            self._fetch = None

    def restart(self) -> None:
        super().restart()
        self._sum.zero_()
        self._unsent, self._absent_in_all = 0, None

    def local_state(self) -> dict[str, Any]:
        """This replica, and the gradients for the next push."""
        own = {"weights": self.keys.named(self.keys.read(self.model)), "unsent": self.keys.named(self._sum)}
        return {**super().local_state(), **own, "steps_unsent": self._unsent}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_local_states(states)
        self._sum.zero_()
        self._unsent, self._absent_in_all = 0, None
        for state in states:  # this worker also pushes the gradients of workers that it replaces
            self._sum.add_(self.keys.joined(dict(state["unsent"]), torch.zeros(self.keys.trained, dtype=torch.float32)))
            self._unsent += int(state["steps_unsent"])
        if states:
            self.keys.write(self.model, self.keys.joined(dict(states[0]["weights"]), self.keys.read(self.model)))

    def _push(self) -> None:
        """Push the sum and begin another. The previous push must have arrived, because its tensor is reused."""
        if self.pushed and not all(future.done() for future in self.pushed):
            with self.timed_wait("the push before"):
                self.finish_pushes()
        self.finish_pushes()
        self._sum, self._spare = self._spare.zero_(), self._sum
        absent, self._absent_in_all, self._unsent = sorted(self._absent_in_all or ()), None, 0
        with self.explain_errors():
            self.steps_pushed = self.stats.steps
            self.pushed = self.pusher.push(self._spare, self.rates(), scale=self.scale(), absent=absent)
        self.count_bytes()

    def _request_fetch(self) -> None:
        """Request the weights, including the latest push."""
        after = [future.timestamp for future in self.pushed]
        with self.explain_errors():
            self._fetch = self.client.pull(
                (0, self.keys.trained), self.weights, min_clock=0, after=after, encoded=self.encoded
            )

    def _finish_fetch(self) -> None:
        """Continue from the servers' weights."""
        if self._fetch is None:
            self._request_fetch()
        assert self._fetch is not None
        with self.timed_wait("fetch"):
            self._fetch.wait()
        self._fetch = None
        self.install_weights()

    def _await_warmup(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the first training forward: wait until worker 0 has taken the warm-up steps, or has ended."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self.hooks.pop().remove()
        transport, now, channel = self.client.network.transport, self.world.runtime.now, self._channel
        elastic = self.world.elastic
        first, timeout_s = transport.members[self.client.network.workers[0]], transport.timeout
        before, since = -1, now()
        with self.timed_wait("worker 0 to warm up"):
            for _ in poll(self.world.runtime):
                steps = self.client.steps()[0] * self.options.stride
                ended = channel.has_finished(0) or channel.stop_requested()
                ended |= elastic is not None and bool(elastic.leave_reason)  # worker 0 may wait to leave
                if steps >= self.strategy.warmup or ended or first in transport.lost():
                    break
                if steps > before:
                    before, since = steps, now()
                if now() - since > timeout_s:
                    raise PeerLostError(
                        f"worker 0 warms up and has taken {steps} of {self.strategy.warmup} steps, none of them in the "
                        f"last {timeout_s:g} s",
                        peer=0,
                        pending="worker 0's next push",
                        seconds=now() - since,
                    )
            self.client.pull((0, self.keys.trained), self.weights, min_clock=0).wait()
        self.install_weights()
