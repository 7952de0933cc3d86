"""What the strategies of the parameter server share: the model's weights lie at the servers, gradients go there.

```text
worker                                        servers
loss.backward()
optimizer.step()
  └─ before   gradients, rates, a tick  ───►  rule(weights, gradients)
              weights                   ◄───  as soon as the clocks allow
     step     nothing: no gradients
     after    gradients are back, to be looked at
```

Workers go at their own pace: from the first step to the last no collective of the world is called. How long a read
waits for the others is the strategy's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Chooser, Codec
from syncline.errors import DivergedError, IncompatibleError, PeerLostError, SpecError
from syncline.reduction import Communicator
from syncline.server import Client, Future, ServerNetwork, open_space, server_network, watch_space
from syncline.server.filters import Filter, build_filter
from syncline.server.protocol import WINDOW
from syncline.server.rules import HandlerRule, Sgd, UpdateRule, build_rule, rule_of, torch_rule
from syncline.server.shard import FOREVER
from syncline.server.space import spans
from syncline.specs import parse
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import RunSettings, Strategy, check_gradients, loss_scale
from syncline.strategies.control import POLL_SECONDS, ControlChannel, Post
from syncline.strategies.gradient_pusher import GradientPusher, borders, check_filters, client_filter
from syncline.strategies.key_map import KeyMap, dense_rows, read_optimizer, settings_of, write_optimizer

__all__ = ["ParameterServerRun", "ParameterServerStrategy", "ServedBoard", "ServerOptions", "post_order", "watch_board"]

logger = logging.getLogger("syncline")

BUFFERS_EVERY = 20
"""Steps between two puts of the buffers."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a strategy wants of the servers."""

    rule: str | None = None
    """None: the rule that does what the optimizer would."""
    lr: float | None = None
    """In place of the optimizer's rate; it follows the optimizer's schedule all the same."""
    synchronous: bool = False
    quorum: float = 1.0
    damped: bool = False
    filters: str | None = None
    factors: bool = False
    stride: int = 1
    """Steps that a tick stands for."""


class ParameterServerStrategy(Strategy):
    """A strategy whose weights lie at servers. A frozen dataclass, as all are."""

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def state_format(self) -> str:
        """Strategies with the same rule can read each other's state at the servers."""
        rule = getattr(self, "rule", None)
        return "server" if rule is None else f"server({rule})"

    @property
    def stride(self) -> int:
        """Steps that a tick of a worker's clock stands for."""
        return 1

    def observe(self, model: nn.Module, network: ServerNetwork) -> ControlChannel | None:
        return watch_board(network, self.name, model, self.stride)

    def check_rule(self, rule: str | None, filters: str | None = None) -> None:
        """Refuse a rule or filters that cannot be read, before anything else is done with them."""
        for key, spec, build in (("rule", rule, build_rule), ("filters", filters, build_filter)):
            if spec is None:
                continue
            if not isinstance(spec, str):
                raise SpecError(f"{self.name}({key}={spec!r}): a spec in quotes")
            build(spec)


class ParameterServerRun(AsynchronousRun):
    """One worker's part. Strategies say what a read waits for, or replace `before_step` and `after_step`."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Communicator,
        settings: RunSettings,
        plan: ServerOptions,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.plan = plan
        self.keys = KeyMap.of(model, optimizer)
        self.rules = self._first_rules()
        self._settings = settings_of(optimizer)
        self._own_rates = plan.rule is not None and _tells_rate(plan.rule)
        self._base_rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        filters = self._filters = None if plan.filters is None else build_filter(plan.filters)
        check_filters(filters, plan.factors, self.rules)
        check_codec(exchange.codec)
        self.parameters = self.keys.trains(model)
        self.synchronised = {id(parameter) for parameter in self.parameters}
        self.absent: list[int] = []
        """Indices of the parameters without a gradient in this step."""
        self.gradients = torch.zeros(self.keys.trained, dtype=torch.float32)
        """A row of this step's gradients, times this worker's weight."""
        self.weights = torch.empty(self.keys.trained, dtype=torch.float32)
        self._gradient_views = self.keys.views(self.gradients)
        self._weight_views = self.keys.views(self.weights)
        self.weight = 1.0
        self._multiplier = 1.0
        """The factor of this step's gradients: the worker's weight divided by a GradScaler's scale."""
        self._stashed: list[Tensor | None] | None = None
        self._counted = (0, 0)
        self.client = self.open_client(filters)
        self.pusher = GradientPusher(self.client, self.keys, model, filters, plan.factors)
        self._at_once = self.pusher.plain and _fits(self.client, self.keys)
        if exchange.rank == 0:
            post_order(self.client, self.keys)
        self._board = ServedBoard(self.client, self.keys, stride=plan.stride, ending=self.ending)
        self._optimizer_loaded = False
        """Whether a state was loaded into the optimizer since the latest step."""
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._note_load),
        ]

    def _first_rules(self) -> list[UpdateRule]:
        if self.plan.rule is not None:
            return [build_rule(self.plan.rule)] * len(self.keys.groups)
        found = self.adapted(rule_of(self.optimizer))
        return [found[group.number] for group in self.keys.groups]

    # What a strategy may say otherwise.

    def open_client(self, filters: Filter | None) -> Client:
        """Open the space, together with the other workers."""
        codec, plan = self.exchange.codec, self.plan
        groups = borders(self.keys, self.model, self.rules, plan.factors)
        if self.keys.buffers:
            groups.append((self.keys.trained, build_rule("assign")))
        return open_space(
            self.world,
            self.strategy.name,
            self.keys.numel,
            rules=[repr(rule) for _, rule in groups],
            bounds=[first for first, _ in groups],
            parameters=self.keys.starts if plan.rule is None else (),
            synchronous=plan.synchronous,
            mean=plan.synchronous,
            quorum=plan.quorum,
            damped=plan.damped,
            codec=None if codec is None else repr(codec),
            filters=client_filter(filters),
            initial=self.keys.read(self.model),
            seed=self.settings.seed,
            retry=server_network(self.world).transport.retry_after_s,
        )

    def wanted(self, clock: int) -> int:
        """The clock that everyone must have reached before a worker at `clock` reads; −1: it does not wait."""
        return clock

    def scale(self) -> float:
        """The factor of a push at the servers, so that pushes add up to a mean over the workers that still train. In a
        synchronous step the servers take the mean, and this is the weight of the worker's batch in it.
        """
        return self.weight if self.plan.synchronous else 1.0 / max(1, self.client.told.live)

    def settle_pushes(self) -> None:
        """Wait until the servers have all that this worker has sent."""

    def before_step(self) -> None:
        """The gradients are in `gradients`: push them, and have the model hold the servers' weights."""
        self.talk()
        self.install()
        self._stashed = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def after_step(self) -> None:
        """The optimizer has done its step."""

    def ending(self) -> None:
        """This worker takes no more steps: what is left goes now."""
        with self.explained():
            for future in self.pusher.flush(self.rates(), scale=self.scale()):
                future.wait()
            self.put_buffers()
        self.count()

    # The parts of a step.

    def rates(self) -> list[float | None]:
        """The learning rate of each group of keys as it is now; None: the rule's own."""
        if self._own_rates:
            return [None] * len(self.keys.groups)
        found: list[float | None] = []
        for group in self.keys.groups:
            told = self.optimizer.param_groups[group.number]
            rate = float(told.get("lr", 1.0))
            if self.plan.lr is not None:
                base = float(told.get("initial_lr", self._base_rates[group.number]))
                rate = self.plan.lr * (rate / base if base else 1.0)
            found.append(rate)
        return found

    def talk(self) -> list[Future]:
        """Push this step, end it, and read the weights into `weights`; all that was asked for it."""
        with self.waiting("push and pull"):
            pushed, read = self._push_pull() if self._at_once and not self.absent else self._push_then_pull()
            for future in (*pushed, *read):
                future.wait()
        # Who waits for clocks knows how old the read may be; who does not, how old the push was.
        told = read if self.wanted(self.client.clock) >= 0 else pushed
        self.stats.read_at(max(0, *(future.staleness for future in told)))
        return [*pushed, *read]

    def install(self) -> None:
        """Put `weights` into the model."""
        with torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self._weight_views)

    def tell_settings(self) -> None:
        """Send the optimizer's settings to the servers if a schedule has changed one; pushes have the learning rate."""
        told, before = settings_of(self.optimizer), self._settings
        if self.plan.rule is not None or told == before:
            return
        self._settings = told
        fresh = self.adapted(rule_of(self.optimizer))
        for number, group in enumerate(self.keys.groups):
            if told[group.number] != before[group.number]:
                self.rules[number] = _of_torch(fresh[group.number])
        check_filters(self._filters, self.plan.factors, self.rules)
        if self._speaks():
            specs = [repr(rule) for _, rule in borders(self.keys, self.model, self.rules, self.plan.factors)]
            with self.explained():
                self.client.control({"do": "rules", "rules": [*specs, *self._buffer_rule]}, everywhere=True)

    def _note_load(self, optimizer: Optimizer) -> None:
        self._optimizer_loaded = True

    def _tell_state(self) -> None:
        """One worker sends a state that was loaded into the optimizer to the servers."""
        if self._optimizer_loaded and self.plan.rule is None and self._speaks():
            with self.explained():
                self._write_planes(read_optimizer(self.optimizer, self.keys, self.parameters, self.rules))
        self._optimizer_loaded = False

    def adapted(self, rules: list[UpdateRule]) -> list[UpdateRule]:
        """The rules that take the place of the optimizer's own."""
        return rules

    @property
    def _buffer_rule(self) -> list[str]:
        return ["assign"] if self.keys.buffers else []

    def put_buffers(self) -> None:
        """The lowest worker that lives tells the servers its buffers."""
        if self.keys.buffers and self._speaks():
            self.client.put((self.keys.trained, self.keys.numel), self.keys.read_buffers(self.model))

    @property
    def coded(self) -> bool:
        """Whether weights come encoded."""
        return self.exchange.codec is not None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The worker waits inside for its servers."""
        now = self.world.runtime.now
        begun = now()
        with self.explained():
            yield
        ended = now()
        self.stats.next_round()
        self.stats.reduced(begun, ended, what)
        self.stats.waited(begun, ended)
        self.count()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Who has lost a server, or waits in vain, is told what to do about it."""
        try:
            yield
        except DivergedError as error:  # a push does not count the steps
            raise error.at_step(self.stats.steps) from None
        except PeerLostError as error:
            words = "" if error.peer is None else self._explain(error.peer)
            if not words:
                raise
            raise PeerLostError(
                f"{error}; {words}", peer=error.peer, pending=error.pending, seconds=error.seconds
            ) from error

    def count(self) -> None:
        """Take the client's bytes into the stats."""
        logical, wire = self.client.bytes_logical + self.pusher.bytes_held, self.client.bytes_wire
        self.stats.sent(logical - self._counted[0], wire - self._counted[1])
        self._counted = (logical, wire)

    # The run.

    def control_channel(self) -> ServedBoard:
        return self._board

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        self.weight = weight

    # The agreed model.

    def show_agreed(self) -> None:
        with self.explained():
            self.settle_pushes()
            self.put_buffers()
            super().show_agreed()

    def finish(self) -> None:
        with self.explained():
            super().finish()

    def read_final(self) -> None:
        """No worker pushes any more: read the weights, the buffers and the optimizer's state."""
        gap, longest = POLL_SECONDS
        until = self.world.runtime.now() + self.world.transport.timeout
        while not self.client.applied():
            if self.world.runtime.now() > until:
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {self.world.transport.timeout:g} s for the sub-masters to "
                    "bring their last sums to the root",
                    pending="the last sums",
                )
            self.world.runtime.sleep(gap)
            gap = min(2 * gap, longest)
        super().read_final()
        self._read_planes()

    # State.

    @property
    def copies_weights(self) -> bool:
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._optimizer_loaded = False

    def restart(self) -> None:
        """The weights of the model, and the optimizer's state, go to the servers."""
        self.settle_pushes()
        self.wait_for_all("start from the loaded weights")
        if self.exchange.rank == 0:
            self.client.put(None, self.keys.read(self.model))
            self._write_planes(read_optimizer(self.optimizer, self.keys, self.parameters, self.rules))
        for row in (self.pusher.kept, self.client.residual):
            if row is not None:
                row.zero_()
        self.set_clocks([self.client.clock] * self.exchange.size)

    def resume_steps(self) -> None:
        self.set_clocks([self.stats.steps // self.plan.stride] * self.exchange.size)

    def set_clocks(self, clocks: list[int]) -> None:
        """Set every worker's clock. Every worker calls it, without pending requests."""
        self.wait_for_all("set the clocks")
        if self.exchange.rank == 0:
            self.client.control({"do": "clocks", "clocks": clocks}, everywhere=True)
        self.wait_for_all("go on from these clocks")
        self.client.clock = clocks[self.exchange.rank]

    def _read_planes(self) -> dict[str, Tensor]:
        """The rules' state by name. It is also written into the optimizer."""
        names = self.client.planes()
        planes = {name: self.client.read_plane(number) for number, name in enumerate(names, 1)}
        if self.plan.rule is None:
            write_optimizer(self.optimizer, self.keys, self.parameters, self.rules, planes)
        return planes

    def _write_planes(self, planes: Mapping[str, Tensor]) -> None:
        for number, name in enumerate(self.client.planes(sorted(planes)), 1):
            self.client.write_plane(number, planes[name])

    def shared_state(self) -> dict[str, Any]:
        """What the servers hold: weights, what the rules remember, and the clocks."""
        client, keys = self.client, self.keys
        return {
            "weights": keys.named(client.get()),
            "planes": {name: keys.named(row) for name, row in self._read_planes().items()},
            "clocks": self.clocks(),
        }

    def clocks(self) -> list[int]:
        """The clock of each worker, for a checkpoint. A lost worker gets this worker's clock."""
        gone = self.world.lost
        return [self.client.clock if rank in gone else clock for rank, clock in enumerate(self.client.steps())]

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        clocks = [int(clock) for clock in state["clocks"]]
        if len(clocks) != self.exchange.size:
            clocks = [max(clocks, default=0)] * self.exchange.size
        self.wait_for_all("load a checkpoint")  # no worker reads from the servers from now on
        if self.exchange.rank == 0:
            keys = self.keys
            self.client.put(None, keys.joined(dict(state["weights"]), keys.read(self.model)))
            self._write_planes(
                {
                    name: keys.joined(dict(row), torch.zeros(keys.numel, dtype=torch.float32))
                    for name, row in state["planes"].items()
                }
            )
        self.set_clocks(clocks)
        self.keys.write(self.model, self.client.get((0, self.keys.trained)))

    def local_state(self) -> dict[str, Any]:
        """What filters have held back and what the codec has left unsent."""
        rows = {"kept": self.pusher.kept, "residual": self.client.residual}
        return {name: self.keys.named(row) for name, row in rows.items() if row is not None}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        for name, row in (("kept", self.pusher.kept), ("residual", self.client.residual)):
            if row is None:
                if any(name in state for state in states):
                    logger.warning("the checkpoint has gradients that were not sent yet, and nothing here keeps such")
                continue
            row.zero_()
            for state in states:
                if name in state:
                    row.add_(self.keys.joined(dict(state[name]), torch.zeros_like(row)))

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self.explained():
            self.client.close()

    def detach(self) -> None:
        super().detach()
        self.pusher.close()

    # Within.

    def _push_pull(self) -> tuple[list[Future], list[Future]]:
        scale, rates, wanted = self.scale(), self.rates(), self.wanted(self.client.clock + 1)
        last, futures = len(self.keys.groups) - 1, []
        for number, group in enumerate(self.keys.groups):
            span = slice(group.first, group.after)
            futures.append(
                self.client.push_pull(
                    (group.first, group.after),
                    self.gradients[span],
                    self.weights[span],
                    rate=rates[number],
                    scale=scale,
                    wanted=wanted,
                    tick=number == last,
                    coded=self.coded,
                )
            )
        return futures, futures

    def _push_then_pull(self) -> tuple[list[Future], list[Future]]:
        wanted = max(0, self.wanted(self.client.clock + 1))  # a read that belongs to a step names a clock
        pushed = self.pusher.push(
            self.gradients, self.rates(), scale=self.scale(), weight=self._multiplier, absent=self.absent
        )
        after = [pushed[-1].timestamp]
        read = self.client.pull((0, self.keys.trained), self.weights, wanted=wanted, after=after, coded=self.coded)
        return pushed, [read]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:  # the optimizer comes first
            raise IncompatibleError(
                f"{self.strategy!r} cannot be used with step(closure): the step is taken at the servers; call "
                "backward() and then step()"
            )
        if self.settings.check_finite:
            check_gradients(self)
        scale = loss_scale(optimizer)
        self.absent = dense_rows(self.parameters, self._gradient_views)
        if scale is None:  # a GradScaler has found a gradient that is not finite
            self.absent = list(range(len(self.parameters)))
            self.gradients.zero_()
        elif scale != self.weight:
            self.gradients.mul_(self.weight / scale)
        self._multiplier = self.weight / (scale or 1.0)
        self.tell_settings()
        self._tell_state()
        self.before_step()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stashed is not None:
            for parameter, gradient in zip(self.parameters, self._stashed, strict=True):
                parameter.grad = gradient
            self._stashed = None
        self.stats.steps += 1
        self.after_step()
        if self.keys.buffers and self.stats.steps % BUFFERS_EVERY == 0:
            with self.explained():
                self.put_buffers()

    def _explain(self, peer: int) -> str:
        network, client = self.client.network, self.client
        if peer not in network.servers or not network.transport.gone_reason(peer):
            if client.told.min_clock >= FOREVER:  # nobody trains any more: no read waits for a clock
                return ""
            return (
                f"a server answers a read when the clocks allow it: this worker is at clock {client.clock} and reads "
                f"when all are at {self.wanted(client.clock)}, and when a server last told, the slowest was at "
                f"{client.told.min_clock}. Look for a worker that hangs, or give sl.init() a longer timeout"
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

    def _speaks(self) -> bool:
        transport, workers = self.client.network.transport, self.client.network.workers
        gone = transport.lost()
        return self.client.network.me == next(each for each in workers if transport.members[each] not in gone)


def check_codec(codec: Codec | None) -> None:
    """Refuse a codec that needs more than a piece of a row."""
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


def _of_torch(rule: UpdateRule) -> UpdateRule:
    """An optimizer's rule in the form whose settings may change."""
    return torch_rule("SGD", lr=rule.lr) if isinstance(rule, Sgd) else rule


def _tells_rate(spec: str) -> bool:
    """Whether a rule's spec says its rate itself, or has none."""
    (link,) = parse(spec)
    rule = build_rule(spec)
    if rule.name in ("add", "assign") or isinstance(rule, HandlerRule):
        return True
    return "lr" in link.kwargs or (rule.elementwise and bool(link.args))


def _fits(client: Client, keys: KeyMap) -> bool:
    """Whether a step's requests to any server may all be under way at once: the last one ends the step for all."""
    cuts = [cut for group in keys.groups for cut in client.description.layout.cut_range(group.first, group.after)]
    return all(len(mine) < WINDOW // 2 for _, mine in spans(cuts))


ORDER = "keys"
"""The kind of the posts that say which parameter lies where: how many there are, where this part begins, then it."""
PART = 500
STEPS = "steps"
"""The kind of the post in which a worker that has finished says how many steps it took: rank, steps."""
SHORTEST, LONGEST = 1e-3, 0.25
"""Seconds between two looks at the board."""


class ServedBoard:
    """A member's door to it. A tick of a worker's clock stands for `stride` steps, until it has told the exact number.

    `ending` is called once, before the clock is taken out: what is still to be pushed goes there.
    """

    def __init__(
        self, client: Client, keys: KeyMap, *, stride: int = 1, ending: Callable[[], None] | None = None
    ) -> None:
        self.client = client
        self._keys = keys
        self._stride = stride
        self._ending = ending
        self._finished = False
        self._exact: dict[int, int] = {}
        self._since = 0

    def steps(self) -> list[int]:
        clocks = self.client.steps()
        if self._stride == 1:
            return clocks
        self._read_exact()
        return [self._exact.get(rank, clock * self._stride) for rank, clock in enumerate(clocks)]

    def has_finished(self, rank: int) -> bool:
        """Whether a worker has said that it takes no more steps; only where a tick stands for several."""
        self._read_exact()
        return rank in self._exact

    def load_weights(self, model: nn.Module) -> None:
        self._keys.write(model, self.client.get((0, self._keys.numel)))

    def stop_requested(self) -> bool:
        return self.client.told.stop

    def request_stop(self) -> None:
        self.client.stop()

    def post(self, kind: str, values: Sequence[float]) -> None:
        self.client.post(kind, values)

    def read_posts(self, since: int) -> list[Post]:
        return self.client.read_posts(since)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._ending is not None:
            self._ending()
        self.client.finish_training()

    def tell_steps(self, rank: int, steps: int) -> None:
        """Leave the exact number of a worker's steps."""
        self.client.post(STEPS, [rank, steps])

    def close(self) -> None:
        """Leave the servers; a worker's run does so itself."""
        if self._ending is None:
            self.client.close()

    def _read_exact(self) -> None:
        if self.client.told.live == len(self.client.description.workers):
            return  # nobody has finished
        for post in self.client.read_posts(self._since):
            self._since = max(self._since, post.number)
            if post.kind == STEPS:
                self._exact[int(post.values[0])] = int(post.values[1])


def post_order(client: Client, keys: KeyMap) -> None:
    """Tell those who will watch where each parameter lies; they have the model, and no optimizer."""
    for first in range(0, len(keys.order), PART):
        client.post(ORDER, [len(keys.order), first, *keys.order[first : first + PART]])


def watch_board(network: ServerNetwork, name: str, model: nn.Module, stride: int = 1) -> ServedBoard:
    """The board of the first run of that name, for a member that takes no steps. It waits for the workers to begin."""
    client = watch_space(network, name, 1)
    runtime, patience = network.transport.runtime, network.transport.timeout
    begun, gap, since = runtime.now(), SHORTEST, 0
    order: dict[int, int] = {}
    due = -1
    while len(order) != due:
        for post in client.read_posts(since):
            since = max(since, post.number)
            if post.kind == ORDER:
                due, first = int(post.values[0]), int(post.values[1])
                order |= {first + at: int(value) for at, value in enumerate(post.values[2:])}
        if len(order) == due:
            break
        waited = runtime.now() - begun
        if waited > patience:
            raise PeerLostError(
                f"member {network.me} has waited {waited:.0f} s for worker 0 to say where each parameter lies",
                peer=0,
                pending=f"the post {ORDER!r}",
                seconds=waited,
            )
        runtime.sleep(gap)
        gap = min(2 * gap, LONGEST)
    keys = KeyMap.in_order(model, [order[at] for at in range(due)])
    if keys.numel != client.numel:
        raise IncompatibleError(
            f"the servers hold {client.numel} keys, and this model has {keys.numel}: build the same model here as on "
            "the workers"
        )
    return ServedBoard(client, keys, stride=stride)
