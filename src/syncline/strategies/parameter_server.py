"""What the strategies of the parameter server share: the servers hold the model's weights and apply the gradients.

```text
worker                                        servers
loss.backward()
optimizer.step()
  └─ before   gradients, rates, tick    ───►  rule(weights, gradients)
              weights                   ◄───  as soon as the clocks allow
     step     nothing: the gradients are hidden
     after    the gradients are visible again
```

Each worker proceeds at its own pace: between the first step and the last no collective of the world is called. The
strategy decides how long a read waits for other workers.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Chooser, Codec
from syncline.control import ControlChannel, poll
from syncline.data import MicroBatches, Sharded
from syncline.errors import DivergedError, IncompatibleError, PeerLostError, SpecError
from syncline.server import Client, Future, ServerNetwork, open_space, server_network, watch_space
from syncline.server.filters import Cache, build_filter
from syncline.server.protocol import MAX_INFLIGHT_REQUESTS
from syncline.server.rules import HandlerRule, Sgd, UpdateRule, build_rule, rule_of, torch_rule
from syncline.server.shard import NO_CLOCK
from syncline.specs import parse
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import Strategy, StrategyRun, check_gradients, with_hint
from syncline.strategies.gradient_pusher import GradientPusher, check_filters, group_bounds
from syncline.strategies.key_map import KeyMap, read_optimizer, write_optimizer

__all__ = ["ParameterServerRun", "ParameterServerStrategy", "ReplicaRun", "ServerOptions"]

logger = logging.getLogger("syncline")

PUSH_BUFFERS_EVERY_STEPS = 20
NOT_SETTINGS = ("params", "lr", "initial_lr")
"""Keys of a parameter group that are no settings of a rule. Learning rates are sent with each push."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a strategy asks of the servers."""

    rule: str | None = None
    """None: the rule that corresponds to the optimizer."""
    lr: float | None = None
    """Replaces the optimizer's learning rate. The optimizer's schedule still applies."""
    slack: int | None = 0
    """A read waits until every worker is at most this many steps behind; None: it does not wait."""
    synchronous: bool = False
    quorum: float = 1.0
    damped: bool = False
    filters: str | None = None
    factors: bool = False
    stride: int = 1
    """Steps for each tick of a worker's clock."""


class ParameterServerStrategy(Strategy, ABC):
    """A strategy whose weights are at servers. Subclasses are frozen dataclasses."""

    @abstractmethod
    def server_options(self) -> ServerOptions: ...

    def run_type(self) -> type[StrategyRun]:
        return ParameterServerRun

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def state_format(self) -> str:
        """Strategies with the same rule can read each other's state at the servers."""
        rule = getattr(self, "rule", None)
        return "server" if rule is None else f"server({rule})"

    def observe(self, model: nn.Module, network: ServerNetwork) -> ControlChannel | None:
        return watch_channel(network, self.name, model)

    def check_rule(self, rule: str | None, filters: str | None = None) -> None:
        """Raise a `SpecError` for a rule or filters that cannot be read."""
        for key, spec, build in (("rule", rule, build_rule), ("filters", filters, build_filter)):
            if spec is None:
                continue
            if not isinstance(spec, str):
                raise SpecError(f"{self.name}({key}={spec!r}): a spec in quotes")
            build(spec)


class ParameterServerRun(AsynchronousRun):
    """One worker's part. Strategies override the methods of the first section."""

    strategy: ParameterServerStrategy
    copies_weights = True

    def setup(self) -> None:
        super().setup()
        model, optimizer, communicator = self.model, self.optimizer, self.communicator
        options = self.options = self.strategy.server_options()
        self.keys = KeyMap.of(model, optimizer)
        if options.rule is None:
            rules = self.adapt_rules(rule_of(optimizer))
            self.rules = [rules[group.number] for group in self.keys.groups]
        else:
            self.rules = [build_rule(options.rule)] * len(self.keys.groups)
        self._optimizer_settings = _settings_of(optimizer)
        self._rule_has_rate = options.rule is not None and _has_rate(options.rule)
        self._base_rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        self._filters = None if options.filters is None else build_filter(options.filters)
        check_filters(self._filters, options.factors, self.rules)
        _check_codec(communicator.codec)
        self.parameters = self.keys.trains(model)
        self.synchronised = {id(parameter) for parameter in self.parameters}
        self.absent: list[int] = []
        """Indices of the parameters without a gradient in this step."""
        self.gradients = torch.zeros(self.keys.trained, dtype=torch.float32)
        """This step's gradients in one tensor, multiplied by this worker's weight."""
        self.weights = torch.empty(self.keys.trained, dtype=torch.float32)
        """The weights of the latest pull."""
        self._gradient_views = self.keys.views(self.gradients)
        self._weight_views = self.keys.views(self.weights)
        self.weight = 1.0
        self._multiplier = 1.0
        """The factor of this step's gradients: the worker's weight divided by a GradScaler's scale."""
        self._hidden_gradients: list[Tensor | None] | None = None
        self._counted_bytes = (0, 0)
        self._now = self.world.runtime.now
        self.pushed: list[Future] = []
        """Pushes that this worker has not waited for."""
        if self.joining:  # its control channel says whether the job has ended
            self._open_server_channel()
        self.client = self._open_client_of_job()
        self.encoded = communicator.codec is not None
        """Whether replies with weights are encoded."""
        self.pusher = GradientPusher(self.client, self.keys, model, self._filters, options.factors)
        self.pulls_with_push = self.pusher.plain and _fits_in_flight(self.client, self.keys)
        """Whether a step's pushes and pulls share their messages."""
        if not self.joining:
            self._open_server_channel()
        if communicator.rank == 0 and not self.joining:  # for observers, which have the model and no optimizer
            self._channel.set_value(ORDER_KEY, json.dumps(self.keys.order))
        self._optimizer_loaded = False
        """Whether a state was loaded into the optimizer since the latest step."""
        self._weights_are_old = False
        """Whether the others have continued without this worker since it read the weights."""
        self._finished_training = False
        """Whether this worker takes no more steps."""
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._note_load),
        ]

    def _open_server_channel(self) -> None:
        """Open the control channel in the store of the servers' network.

        Evaluators are members of that network, and not of the world.
        """
        self.open_channel(
            self._load_weights,
            server_network(self.world).transport,
            lambda: self.client.stop(),
            self._finish_training,
        )

    def _open_client_of_job(self) -> Client:
        """Open the space. A newcomer whose job has ended says so, because no server knows the space any more."""
        self.raise_if_job_has_ended()
        try:
            return self.open_client()
        except PeerLostError:
            self.raise_if_job_has_ended()
            raise

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "servers": len(self.client.network.servers)}

    # What strategies override.

    has_tree = False
    """Whether other servers are between a worker and its weights."""

    def open_client(self) -> Client:
        """Open the space, together with the other workers."""
        groups = group_bounds(self.keys, self.model, self.rules, self.options.factors)
        # The client only caches key lists: it would choose gradients over all groups at once.
        caches = self._filters is not None and self._filters.caches
        return open_space(
            self.world,
            self.strategy.name,
            self.keys.numel,
            filters=Cache() if caches else None,
            **self.space_options([rule for _, rule in groups], [first for first, _ in groups]),
        )

    def space_options(self, rules: Sequence[UpdateRule], bounds: Sequence[int]) -> dict[str, Any]:
        """Arguments of `open_space`. Buffers are a group of their own, with the rule `assign`."""
        codec, options = self.communicator.codec, self.options
        buffers = [self.keys.trained] if self.keys.buffers else []
        return {
            "rules": [*map(repr, rules), *("assign" for _ in buffers)],
            "bounds": [*bounds, *buffers],
            "parameters": self.keys.starts if options.rule is None else (),
            "synchronous": options.synchronous,
            "mean": options.synchronous,
            "quorum": options.quorum,
            "damped": options.damped,
            "codec": None if codec is None else repr(codec),
            "initial": self.keys.read(self.model),
            "seed": self.settings.seed,
            "retry_s": server_network(self.world).transport.retry_after_s,
        }

    def adapt_rules(self, rules: list[UpdateRule]) -> list[UpdateRule]:
        """Change the rules that correspond to the optimizer."""
        return rules

    def scale(self) -> float:
        """The factor of a push at the servers, so that pushes add up to a mean over the workers that still train. In a
        synchronous step the servers take the mean, and this is the weight of the worker's batch.
        """
        return self.weight if self.options.synchronous else 1.0 / max(1, self.client.status.live)

    def before_step(self) -> None:
        """Push `gradients`, and put the servers' weights into the model."""
        self.push_and_pull()
        self.install_weights()
        self._hidden_gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def after_step(self) -> None:
        """Called after the optimizer's step."""

    def finish_pushing(self) -> None:
        """Send everything that is left: this worker takes no more steps."""
        with self.explain_errors():
            for future in self.pusher.flush(self.rates(), scale=self.scale()):
                future.wait()
            self.put_buffers()
        self.count_bytes()

    def explain_lost(self, peer: int) -> str:
        """What a user can do after the loss of a member; empty if nothing is known."""
        network, client = self.client.network, self.client
        if network.is_lost(network.me):  # the others have declared this worker lost
            return ""
        if peer not in network.servers or not network.transport.gone_reason(peer):
            if client.status.min_clock >= NO_CLOCK:  # no worker trains any more: no read waits for a clock
                return ""
            return (
                f"a server replies to a read when the clocks allow it: this worker is at clock {client.clock} and "
                f"reads when all are at {self.min_clock(client.clock)}, and in the latest reply the slowest was at "
                f"{client.status.min_clock}. Look for a worker that hangs, or give sl.init() a longer timeout"
            )
        if network.dedicated:
            return (
                f"member {peer} was server {network.servers.index(peer)}, and its part of the weights is lost: resume "
                "from a checkpoint"
            )
        return (
            f"worker {peer} held a part of the weights, which is gone with it: servers of their own outlive workers "
            "(syncline run --servers 1), or go on from a checkpoint"
        )

    # A step.

    def min_clock(self, clock: int) -> int:
        """The clock that all workers must have before a worker at `clock` reads; −1: the read does not wait."""
        slack = self.options.slack
        return -1 if slack is None else max(0, clock - slack)

    def rates(self) -> list[float | None]:
        """The current learning rate of each group of keys; None: the rule's own."""
        if self._rule_has_rate:
            return [None] * len(self.keys.groups)
        rates: list[float | None] = []
        for group in self.keys.groups:
            settings = self.optimizer.param_groups[group.number]
            rate = float(settings.get("lr", 1.0))
            if self.options.lr is not None:
                base = float(settings.get("initial_lr", self._base_rates[group.number]))
                rate = self.options.lr * (rate / base if base else 1.0)
            rates.append(rate)
        return rates

    def push_and_pull(self) -> list[Future]:
        """Push this step's gradients, end the step, and read the new weights into `weights`; return all requests."""
        with self.timed_wait("push and pull"):
            shared = self.pulls_with_push and not self.absent
            pushed, pulled = self._push_with_pull() if shared else self._push_then_pull()
            for future in (*pushed, *pulled):
                future.wait()
        # A worker that waits for clocks counts the staleness of its read; one that does not, that of its push.
        counted = pulled if self.min_clock(self.client.clock) >= 0 else pushed
        self.stats.read_at(max(0, *(future.staleness for future in counted)))
        return [*pushed, *pulled]

    def _push_with_pull(self) -> tuple[list[Future], list[Future]]:
        scale, rates, min_clock = self.scale(), self.rates(), self.min_clock(self.client.clock + 1)
        last, encoded, futures = len(self.keys.groups) - 1, self.encoded, []
        for number, group in enumerate(self.keys.groups):
            part = slice(group.first, group.after)
            futures.append(
                self.client.push_pull(
                    (group.first, group.after),
                    self.gradients[part],
                    self.weights[part],
                    rate=rates[number],
                    scale=scale,
                    min_clock=min_clock,
                    tick=number == last,
                    encoded=encoded,
                )
            )
        return futures, futures

    def _push_then_pull(self) -> tuple[list[Future], list[Future]]:
        min_clock = max(0, self.min_clock(self.client.clock + 1))  # a read that belongs to a step names a clock
        pushed = self.pusher.push(
            self.gradients, self.rates(), scale=self.scale(), weight=self._multiplier, absent=self.absent
        )
        after = [pushed[-1].timestamp]
        pulled = self.client.pull(
            (0, self.keys.trained), self.weights, min_clock=min_clock, after=after, encoded=self.encoded
        )
        return pushed, [pulled]

    def install_weights(self) -> None:
        """Put `weights` into the model."""
        with torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self._weight_views)

    def finish_pushes(self) -> None:
        """Wait until the servers have applied all pushes of this worker."""
        with self.explain_errors():
            for future in self.pushed:
                future.wait()
        if self.pushed:
            staleness = max(0, *(future.staleness for future in self.pushed))
            self.stats.read_at(staleness * self.options.stride)
        self.pushed = []

    def finish_requests(self) -> None:
        """Wait for all requests of this worker."""
        self.finish_pushes()

    @contextmanager
    def timed_wait(self, what: str) -> Iterator[None]:
        """Inside, the worker waits for its servers; the stats count the time."""
        now = self._now
        begin = now()
        with self.explain_errors():
            yield
        end = now()
        self.stats.next_round()
        self.stats.reduced(begin, end, what)
        self.stats.waited(begin, end)
        self.count_bytes()

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Add to an error what a user can do about it."""
        try:
            yield
        except DivergedError as error:  # a push does not know the step
            raise error.at_step(self.stats.steps) from None
        except PeerLostError as error:
            if self.membership is not None:
                self.membership.raise_if_declared_lost("waits for a server", error)
            words = "" if error.peer is None else self.explain_lost(error.peer)
            if not words:
                raise
            raise with_hint(error, words) from error

    def count_bytes(self) -> None:
        """Add the client's new bytes to the stats."""
        logical, wire = self.client.bytes_logical + self.pusher.bytes_held, self.client.bytes_wire
        self.stats.sent(logical - self._counted_bytes[0], wire - self._counted_bytes[1])
        self._counted_bytes = (logical, wire)

    def put_buffers(self) -> None:
        """The first live worker sends its buffers to the servers."""
        if self.keys.buffers and self._is_first_live():
            self.client.put((self.keys.trained, self.keys.numel), self.keys.read_buffers(self.model))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:  # args[0] is the optimizer
            raise IncompatibleError(
                f"{self.strategy!r} cannot be used with step(closure): the step is taken at the servers; call "
                "backward() and then step()"
            )
        if self.settings.check_finite:
            check_gradients(self)
        scale = _loss_scale(optimizer)
        self.absent = self._gather_gradients()
        if scale is None:  # a GradScaler skips this step, because a gradient is not finite
            self.absent = list(range(len(self.parameters)))
            self.gradients.zero_()
        elif scale != self.weight:
            self.gradients.mul_(self.weight / scale)
        self._multiplier = self.weight / (scale or 1.0)
        settings = _settings_of(optimizer)
        if settings != self._optimizer_settings:
            self._send_settings(settings)
        if self._optimizer_loaded:
            self._send_loaded_state()
        self.before_step()

    def _gather_gradients(self) -> list[int]:
        """Copy the gradients into `gradients`; return the indices of parameters without one, which get zeros."""
        views, gradients, absent = [], [], []
        for number, (parameter, view) in enumerate(zip(self.parameters, self._gradient_views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                absent.append(number)
            else:
                gradients.append(gradient.detach().to_dense() if gradient.is_sparse else gradient.detach())
                views.append(view)
        if views:
            torch._foreach_copy_(views, gradients)
        return absent

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._hidden_gradients is not None:
            for parameter, gradient in zip(self.parameters, self._hidden_gradients, strict=True):
                parameter.grad = gradient
            self._hidden_gradients = None
        self.stats.steps += 1
        self.after_step()
        self._channel.report_steps(self.client.clock * self.options.stride)
        if self.keys.buffers and self.stats.steps % PUSH_BUFFERS_EVERY_STEPS == 0:
            with self.explain_errors():
                self.put_buffers()

    def _send_settings(self, settings: list[dict[str, Any]]) -> None:
        """Send the optimizer's settings to the servers after a schedule has changed one."""
        if self.options.rule is not None:
            return
        before, self._optimizer_settings = self._optimizer_settings, settings
        rules = self.adapt_rules(rule_of(self.optimizer))
        for number, group in enumerate(self.keys.groups):
            if settings[group.number] != before[group.number]:
                self.rules[number] = _as_torch_rule(rules[group.number])
        check_filters(self._filters, self.options.factors, self.rules)
        if self._is_first_live():
            specs = [repr(rule) for _, rule in group_bounds(self.keys, self.model, self.rules, self.options.factors)]
            buffers = ["assign"] if self.keys.buffers else []
            with self.explain_errors():
                self.client.control({"do": "rules", "rules": [*specs, *buffers]}, everywhere=True)

    def _note_load(self, optimizer: Optimizer) -> None:
        self._optimizer_loaded = True

    def _send_loaded_state(self) -> None:
        """One worker sends a state that was loaded into the optimizer to the servers."""
        if self.options.rule is None and self._is_first_live():
            with self.explain_errors():
                self._write_server_state(read_optimizer(self.optimizer, self.keys, self.parameters, self.rules))
        self._optimizer_loaded = False

    def _is_first_live(self) -> bool:
        if self.joining:
            return False
        if self.membership is not None:
            return self.membership.present()[:1] in ([], [self.membership.member])  # the last one may have left
        network = self.client.network
        lost = network.transport.lost()
        return network.me == next(each for each in network.workers if network.transport.members[each] not in lost)

    # Elastic jobs.

    @property
    def admits_newcomers(self) -> bool:  # type: ignore[override]
        """Newcomers are new clients of servers that outlive the workers."""
        return server_network(self.world).dedicated and not self.has_tree

    @property
    def elastic_refusal(self) -> str:
        if self.has_tree or server_network(self.world).dedicated:
            return super().elastic_refusal
        return (
            f"a worker joins {self.strategy!r} only if the servers are processes of their own: start the job with "
            "syncline run --servers S, or leave --restart out"
        )

    @property
    def delays_others(self) -> bool:
        return self.options.slack is not None

    @contextmanager
    def idle(self) -> Iterator[None]:
        if self._finished_training:  # no read waits for its clock any more
            yield
            return
        with self.explain_errors():
            self.finish_requests()
            self.client.pause()
        before = self.client.clock
        yield
        with self.explain_errors():
            self.client.join()
        # At the same clock, the weights of the latest pull are as new as they must be.
        self._weights_are_old |= self.membership is not None or self.client.clock != before

    def enter_training(self) -> None:
        with self.explain_errors():
            self.client.join()
        self.stats.steps = self.client.clock * self.options.stride
        self._load_weights(self.model)
        self._optimizer_settings = _settings_of(self.optimizer)
        self._optimizer_loaded = False

    def batch_read(self, reader: Sharded | MicroBatches) -> None:
        super().batch_read(reader)
        if self._weights_are_old and not self.inside_agreed:
            self._weights_are_old = False
            self.read_weights_again()

    def read_weights_again(self) -> None:
        """The other workers have continued while this one waited: read weights that are as new as its clock demands."""
        with self.timed_wait("the weights"):
            min_clock = max(0, self.min_clock(self.client.clock))
            self.client.pull((0, self.keys.trained), self.weights, min_clock=min_clock, encoded=self.encoded).wait()
        self.install_weights()

    # The run.

    def _load_weights(self, model: nn.Module) -> None:
        with self.explain_errors():
            self.keys.write(model, self.client.get())

    def _finish_training(self) -> None:
        self.finish_pushing()
        with self.explain_errors():
            self.client.finish_training()
        self._finished_training = True

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        self.weight = weight

    def show_agreed(self) -> None:
        with self.explain_errors():
            self.finish_requests()
            self.put_buffers()
        super().show_agreed()

    def read_final(self) -> None:
        """Read the weights, the buffers and the optimizer's state, when no worker pushes any more."""
        now, timeout_s = self.world.runtime.now, self.world.transport.timeout
        deadline = now() + timeout_s
        for _ in poll(self.world.runtime):
            with self.explain_errors():
                if self.client.applied():
                    break
            if now() > deadline:
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {timeout_s:g} s for the sub-masters to relay their last sums "
                    "to the root",
                    pending="the last sums",
                )
        super().read_final()
        with self.explain_errors():
            self._read_server_state()

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self.explain_errors():
            self.client.close()

    def detach(self) -> None:
        super().detach()
        self.pusher.close()

    # State.

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._optimizer_loaded = False

    def restart(self) -> None:
        """Send the model's weights and the optimizer's state to the servers."""
        if self.joining:
            return  # a newcomer takes the weights of the others
        self.finish_requests()
        self.wait_for_all("start from the loaded weights")
        if self._writes_for_all():
            self.client.put(None, self.keys.read(self.model))
            self._write_server_state(read_optimizer(self.optimizer, self.keys, self.parameters, self.rules))
        for row in (self.pusher.held_back, self.client.residual):
            if row is not None:
                row.zero_()
        self.set_clocks(self.client.steps())

    def resume_steps(self) -> None:
        self.set_clocks([self.stats.steps // self.options.stride] * self.communicator.size)

    def _writes_for_all(self) -> bool:
        """Whether this worker writes to the servers what all workers have loaded."""
        return self.communicator.rank == 0 if self.membership is None else self._is_first_live()

    def set_clocks(self, clocks: list[int]) -> None:
        """Set every worker's clock, as rank 0 says. Every worker calls it, without pending requests, and none steps."""
        if self.joining:
            return
        if self.membership is not None:
            self._set_clocks_to(max(clocks))
            return
        rank = self.communicator.rank
        self.wait_for_all("set the clocks", steps_before=False)
        if rank == 0:
            self.client.control({"do": "clocks", "clocks": clocks}, everywhere=True)
        self._channel.report_steps(clocks[rank] * self.options.stride)
        self.wait_for_all("go on from these clocks", steps_before=False)
        self.client.clock = self.client.steps()[rank]

    def _set_clocks_to(self, clock: int) -> None:
        """In an elastic job: set the clocks of all workers, also of those that have joined, to the same value."""
        self.wait_for_all("set the clocks")
        if self._is_first_live():
            workers = len(self.client.control({"do": "steps"})["steps"])
            self.client.control({"do": "clocks", "clocks": [clock] * workers}, everywhere=True)
        self.wait_for_all("go on from these clocks")
        self._channel.report_steps(self.client.clock * self.options.stride)

    def _read_server_state(self) -> dict[str, Tensor]:
        """The rules' state by name. It is also written into the optimizer."""
        names = self.client.optimizer_state()
        state = {name: self.client.read_state(slot) for slot, name in enumerate(names, 1)}
        if self.options.rule is None:
            write_optimizer(self.optimizer, self.keys, self.parameters, self.rules, state)
        return state

    def _write_server_state(self, state: Mapping[str, Tensor]) -> None:
        for slot, name in enumerate(self.client.optimizer_state(sorted(state)), 1):
            self.client.write_state(slot, state[name])

    def shared_state(self) -> dict[str, Any]:
        """What the servers hold: weights, the rules' state, and the clocks."""
        clocks = saved_clocks(self, self.client.steps, self.client.clock)
        return {
            "weights": self.keys.named(self.client.get()),
            "planes": {name: self.keys.named(row) for name, row in self._read_server_state().items()},
            "clocks": clocks,
        }

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        if self.joining:
            return
        self.wait_for_all("load a checkpoint")  # no worker reads from the servers from now on
        if self._writes_for_all():
            keys = self.keys
            self.client.put(None, keys.joined(dict(state["weights"]), keys.read(self.model)))
            rows = {name: keys.joined(dict(row), torch.zeros(keys.numel)) for name, row in state["planes"].items()}
            self._write_server_state(rows)
        self.set_clocks(loaded_clocks(self, state["clocks"]))
        self.keys.write(self.model, self.client.get((0, self.keys.trained)))

    def local_state(self) -> dict[str, Any]:
        """The values that filters have held back, and the codec's residual."""
        rows = {"kept": self.pusher.held_back, "residual": self.client.residual}
        return {name: self.keys.named(row) for name, row in rows.items() if row is not None}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        for name, row in (("kept", self.pusher.held_back), ("residual", self.client.residual)):
            if row is None:
                if any(name in state for state in states):
                    logger.warning("the checkpoint has unsent gradients, and this run has no filter or codec for them")
                continue
            row.zero_()
            for state in states:
                if name in state:
                    row.add_(self.keys.joined(dict(state[name]), torch.zeros_like(row)))


class ReplicaRun(ParameterServerRun):
    """A run in which each worker trains its own copy of the weights, and pushes without waiting."""

    @abstractmethod
    def push_remaining(self) -> None:
        """Push what is left after the last step."""

    def scale(self) -> float:
        """Each push counts in full."""
        return 1.0

    @property
    def first_exchange(self) -> int | None:
        return self.options.stride

    steps_pushed = 0
    """The steps of this worker that are in its pushes so far."""
    _steps_acked = 0

    @property
    def counted_steps(self) -> int:
        return self._steps_acked

    def finish_pushes(self) -> None:
        super().finish_pushes()
        self._steps_acked = self.steps_pushed

    def flush_steps(self) -> None:
        self.push_remaining()
        self.finish_requests()

    def read_weights_again(self) -> None:
        """This worker has its own weights, and reads those of the servers at its usual steps."""

    def enter_training(self) -> None:
        super().enter_training()
        self.steps_pushed = self._steps_acked = self.stats.steps

    def finish_pushing(self) -> None:
        self.push_remaining()
        with self.timed_wait("the last push"):
            self.finish_requests()
        super().finish_pushing()
        self._channel.report_steps(self.stats.steps)

    def shared_state(self) -> dict[str, Any]:
        """Read the servers when all pushes have arrived: a push in flight is in no worker's own state any more."""
        self.finish_pushes()
        self.wait_for_all("save the weights")
        return super().shared_state()


def saved_clocks(run: AsynchronousRun, clocks: Callable[[], Sequence[int]], own: int) -> list[int]:
    """The workers' clocks for a checkpoint: in an elastic job those of the workers that save.

    Otherwise a lost worker gets this worker's clock.
    """
    if run.membership is not None:
        return [int(clock) for clock in run.exchange("save their clocks", str(own)).values()]
    lost = run.world.lost
    return [own if rank in lost else clock for rank, clock in enumerate(clocks())]


def loaded_clocks(run: AsynchronousRun, saved: Sequence[int]) -> list[int]:
    """The workers' clocks from a checkpoint. If the number of workers has changed, all get the largest."""
    clocks, size = [int(clock) for clock in saved], run.communicator.size
    return clocks if len(clocks) == size else [max(clocks, default=0)] * size


ORDER_KEY = "order"
"""The key of the control channel with the order of the parameters."""


def watch_channel(network: ServerNetwork, name: str, model: nn.Module) -> ControlChannel:
    """The channel of the first run of that name, for an observer. It waits until the workers have begun."""
    client, transport = watch_space(network, name, 1), network.transport
    channel = ControlChannel(
        transport.control_store(),
        transport.runtime,
        name,
        len(network.workers),
        on_stop=client.stop,
        on_close=client.close,
    )
    begin = transport.runtime.now()
    for _ in poll(transport.runtime):
        if (order := channel.value(ORDER_KEY)) is not None:
            keys = KeyMap.in_order(model, json.loads(order))
            break
        waited = transport.runtime.now() - begin
        if waited > transport.timeout:
            raise PeerLostError(
                f"member {network.me} has waited {waited:.0f} s for worker 0 to publish the order of the parameters",
                peer=0,
                pending="the order of the parameters",
                seconds=waited,
            )
    if keys.numel != client.numel:
        raise IncompatibleError(
            f"the servers hold {client.numel} keys, and this model has {keys.numel}: build the same model here as on "
            "the workers"
        )
    channel.load_weights = lambda model: keys.write(model, client.get())
    return channel


def _check_codec(codec: Codec | None) -> None:
    """Raise an `IncompatibleError` for a codec that needs more than a piece of the keys."""
    if codec is None:
        return
    if isinstance(codec, Chooser):
        raise IncompatibleError(
            f"{codec!r} chooses by the names of parameters or by their sizes, and servers hold one row of keys: give "
            "one codec for all"
        )
    for option in codec.traits.parameter_options:
        raise IncompatibleError(
            f"{codec!r}: {option} is about the sizes of parameters, and servers hold one row of keys: leave it out"
        )
    if codec.traits.residual_needs_sum:
        raise IncompatibleError(
            f"{codec!r} sums whole matrices among the workers, and servers hold one row of keys: give a codec that "
            "works on any piece, such as quantize(4) or topk(0.01), or factors=True, or take strategy allreduce"
        )


def _loss_scale(optimizer: Optimizer) -> float | None:
    """The loss scale of the gradients at an optimizer's step, usually 1; None if the step is skipped.

    A GradScaler divides the gradients by its scale before `optimizer.step()`, and skips the step if one of them is not
    finite. A fused optimizer does both itself: the scaler then sets `grad_scale` and `found_inf` on the optimizer.
    """
    skipped: Tensor | None = getattr(optimizer, "found_inf", None)
    if skipped is not None and bool(skipped.item()):
        return None
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, such as momentum and weight decay."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in NOT_SETTINGS
        }
        for group in optimizer.param_groups
    ]


def _as_torch_rule(rule: UpdateRule) -> UpdateRule:
    """An optimizer's rule in the form whose settings can change."""
    return torch_rule("SGD", lr=rule.lr) if isinstance(rule, Sgd) else rule


def _has_rate(spec: str) -> bool:
    """Whether a rule's spec has its own learning rate, or the rule needs none."""
    (link,) = parse(spec)
    rule = build_rule(spec)
    if rule.name in ("add", "assign") or isinstance(rule, HandlerRule):
        return True
    return "lr" in link.kwargs or (rule.elementwise and bool(link.args))


def _fits_in_flight(client: Client, keys: KeyMap) -> bool:
    """Whether all requests of a step can be in flight at once at each server. The last one ends the step for all."""
    layout = client.description.layout
    servers = [part.server for group in keys.groups for part in layout.split_range(group.first, group.after)]
    return all(servers.count(server) < MAX_INFLIGHT_REQUESTS // 2 for server in set(servers))
