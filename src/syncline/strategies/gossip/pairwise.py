"""Two at a time, at any time: every worker at its own pace averages with one random neighbour, then takes its step.

    worker i    snapshot ── forward ── backward ── step: x_i ← x_i + what the optimizer did to the snapshot ── …
                └── (x_i, x_j) ← their mean, with one random neighbour j ──┘
    and         (x_k, x_i) ← their mean, whenever some k asks: in tasks of their own

The gradient is that of the snapshot, the step is added to what the weights have become meanwhile. Nobody waits for
anybody's step: a slow worker answers as soon as others do.

AD-PSGD: Lian, Zhang, Zhang, Liu: Asynchronous decentralized parallel stochastic gradient descent (2018).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, PeerLostError
from syncline.reduction import Communicator
from syncline.runtime import Task
from syncline.server import server_network
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import RunSettings, Strategy, check_gradients, trained
from syncline.strategies.gossip.graphs import Graph
from syncline.strategies.gossip.pair_channel import PairwiseChannel, open_channel
from syncline.strategies.gossip.partners import Partners, comes_before, mean_of
from syncline.strategies.local_weights import load_optimizer_state, optimizer_state, refuse_inside_agreed
from syncline.transports import Transport
from syncline.world.hooks import ModuleHook

__all__ = ["PairwiseRun"]

TORCH = "torch.distributed"


class PairwiseRun(AsynchronousRun):
    """One worker. Its real weights are `partners.weights`; the model holds a snapshot of them."""

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
        seed: int,
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        self.graph = graph
        self._period, self._seed = period, seed
        self._names = trained(model)
        self._drawn = 0
        """Partners that were drawn so far."""
        self._exchange_task: Task | None = None
        self._seen = 0
        """Changes by others when the snapshot was taken."""
        self._kept = torch.empty(0, dtype=torch.float32)
        self._snapshot = _row_like(list(self._names.values()))
        self._narrow = any(each.dtype != self._snapshot.dtype for each in self._names.values())
        """Whether the model's dtype is less precise than the one in which weights are averaged."""
        buffers = _row_like(self._shown_buffers(model)).to(self._snapshot.dtype)
        state = torch.cat([self._snapshot, buffers, _bytes_of(self._other_buffers(model)).to(buffers.dtype)])
        self.partners: Partners | None = None
        if exchange.size > 1:
            self.partners = Partners(_channel(exchange), state, self._snapshot.numel(), exchange.stats)
        self._now = torch.empty_like(self._snapshot)
        self._channel = open_channel(exchange.world, strategy.name, self._load_weights)
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_pre_hook(ModuleHook(self._forward)),
        ]

    def control_channel(self) -> PairwiseChannel:
        return self._channel

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "spectral_gap": self.graph.gap}

    # Steps.

    def _due(self) -> bool:
        """Whether the step that begins, or ends, has an average in it."""
        return self.partners is not None and (self.stats.steps + 1) % self._period == 0

    def _forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The average goes on beside forward and backward."""
        if self._exchange_task is None and module.training and torch.is_grad_enabled() and not self.inside_agreed:
            self._begin()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._exchange_task is None:  # the model was not called as a whole
            self._begin()
        self._settle()
        self.stats.steps += 1
        self.absorb()
        self._channel.tick()

    def _begin(self) -> None:
        if self._due():
            partner = self._draw()
            if partner is not None:
                self.stats.next_round()
                self._exchange_task = self.world.runtime.spawn(self._average_with, partner, name="average")

    def _average_with(self, partner: int) -> None:
        assert self.partners is not None
        now = self.world.runtime.now
        begun = now()
        apart = self.partners.average(partner)
        self.stats.reduced(begun, now(), f"an average with rank {partner}")
        if apart is not None:  # of two drawn at random, 2·p/(p−1) times the square of the distance to the mean
            size = self.exchange.size
            self.stats.consensus = apart * math.sqrt((size - 1) / (2 * size))

    def _settle(self) -> None:
        """See the average that is under way ended."""
        task, self._exchange_task = self._exchange_task, None
        if task is None:
            return
        now = self.world.runtime.now
        begun, patience = now(), 2 * self.world.transport.timeout
        if not task.join(patience):
            raise PeerLostError(
                f"rank {self.world.rank} has waited {patience:g} s for an average with a neighbour",
                pending="an average of two",
                seconds=patience,
            )
        self.stats.waited(begun, now())

    def _draw(self) -> int | None:
        """A neighbour that this worker may ask; where those are gone, anybody."""
        assert self.partners is not None
        rank, there = self.exchange.rank, self.partners.others()
        joined = {peer: weight for peer, weight in self.graph.neighbours(rank).items() if comes_before(rank, peer)}
        if not joined:
            return None
        left = {peer: weight for peer, weight in joined.items() if peer in there}
        left = left or {peer: 1.0 for peer in there if comes_before(rank, peer)}
        if not left:
            return None
        self._drawn += 1
        draw = random.Random(f"{self._seed}/{rank}/{self._drawn}")
        return draw.choices(list(left), list(left.values()))[0]

    def absorb(self) -> None:
        """Add what has been done to the snapshot to the weights, and take another."""
        partners = self.partners
        if partners is None:
            return
        weights, parameters = partners.weights, list(self._names.values())
        with torch.no_grad(), partners.held:
            _read(parameters, self._now)
            changed = partners.changes - self._seen
            if changed or self._narrow:
                weights.add_(self._now.sub_(self._snapshot))
                torch._foreach_copy_([each.detach() for each in parameters], _views(weights, parameters))
            else:
                weights.copy_(self._now)
            _read(parameters, self._snapshot)
            self._seen = partners.changes
            self._publish_buffers(partners)
        self.stats.read_at(changed)

    # The model of all.

    @contextmanager
    def agreed(self) -> Iterator[None]:
        if not self.inside_agreed:
            self.watch.apply_load()
            self._settle()
        with super().agreed():
            yield

    def show_agreed(self) -> None:
        if self.partners is not None:
            with self.partners.held:
                self._publish_buffers(self.partners)
        super().show_agreed()

    def _publish_buffers(self, partners: Partners) -> None:
        """Show this worker's buffers to those who want the mean; `partners.held` is held."""
        _read(self._shown_buffers(self.model), partners.state[partners.weights.numel() :])
        others = _bytes_of(self._other_buffers(self.model))
        partners.state[partners.state.numel() - others.numel() :] = others

    def _load_weights(self, model: nn.Module) -> None:
        """The mean of what everybody has now, as each tells it; of those that are there."""
        partners = self.partners
        if partners is None:
            own = self.model.state_dict(keep_vars=True)
            with torch.no_grad():
                for name, tensor in model.state_dict(keep_vars=True).items():
                    tensor.detach().copy_(own[name].detach())
            return
        rows = list(partners.read_all().values())
        self._write(model, rows)
        weights = [row[: partners.weights.numel()].double() for row in rows]
        mean = reduce(torch.add, weights) / len(weights)
        self.stats.consensus = math.sqrt(sum(float((row - mean).square().sum()) for row in weights) / len(weights))

    def _write(self, model: nn.Module, rows: Sequence[Tensor]) -> None:
        """Fill a model with the mean of all rows; buffers that cannot be averaged are those of the lowest rank."""
        tensors = [*trained(model).values(), *self._shown_buffers(model)]
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in tensors], _views(mean_of(rows), tensors))
            at = sum(tensor.numel() for tensor in tensors)
            for buffer in self._other_buffers(model):
                after = at + buffer.numel() * buffer.dtype.itemsize
                buffer.copy_(rows[0][at:after].to(torch.uint8).view(buffer.dtype).view(buffer.shape))
                at = after

    def _shown_buffers(self, model: nn.Module) -> list[Tensor]:
        """Buffers that are averaged."""
        return [buffer for buffer in model.buffers() if self._holds(buffer)]

    def _other_buffers(self, model: nn.Module) -> list[Tensor]:
        """Buffers that cannot be averaged, such as counters, and those that the row would round."""
        return [buffer for buffer in model.buffers() if not self._holds(buffer)]

    def _holds(self, buffer: Tensor) -> bool:
        kind = self._snapshot.dtype
        return buffer.is_floating_point() and torch.promote_types(buffer.dtype, kind) == kind

    def finish(self) -> None:
        self._settle()
        self.absorb()
        self._channel.finish()
        if self.partners is not None:
            self._write(self.model, list(self.partners.part(self._channel.steps).values()))

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        self._channel.client.close()

    def detach(self) -> None:
        super().detach()
        if self.partners is not None:
            self.partners.close()

    # State.

    def shared_state(self) -> dict[str, Any]:
        """Rows of one moment: nobody averages between the two barriers."""
        self._settle()
        self.absorb()
        self.wait_for_all("save their weights")
        if self.partners is not None:
            self._kept = self.partners.weights.clone()
        gone, own = self.world.lost, self._channel.client.clock
        clocks = [own if rank in gone else clock for rank, clock in enumerate(self._channel.steps())]
        self.wait_for_all("go on from a checkpoint")
        return {"clocks": clocks, "workers": self.exchange.size}

    def local_state(self) -> dict[str, Any]:
        refuse_inside_agreed(self)
        tensors = self._names if self.partners is None else dict(self._named(self._kept))
        return {
            "weights": {name: each.detach().clone() for name, each in tensors.items()},
            "optimizer": optimizer_state(self.optimizer, self._names),
            "drawn": self._drawn,
        }

    @property
    def first_exchange(self) -> int | None:
        return self._period

    @property
    def copies_weights(self) -> bool:
        return True

    def restart(self) -> None:
        self._settle()
        self._take_model()

    def resume_steps(self) -> None:
        self._set_clocks([self.stats.steps] * self.exchange.size)

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._settle()
        self._same_size = int(state["workers"]) == self.exchange.size
        clocks = [int(clock) for clock in state["clocks"]]
        if len(clocks) != self.exchange.size:
            clocks = [max(clocks, default=self.stats.steps)] * self.exchange.size
        self._set_clocks(clocks)

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if states:
            own = states[0]
            load_optimizer_state(self.optimizer, self._names, own["optimizer"])
            self._drawn = int(own["drawn"])
            if self._same_size:
                for name, value in own["weights"].items():
                    self._names[name].detach().copy_(value)
        self._take_model()

    def _take_model(self) -> None:
        """Take the weights from the model. Workers wait for each other, so that none averages with missing weights."""
        partners = self.partners
        if partners is not None:
            self.wait_for_all("load their weights")
            with partners.held:
                _read(list(self._names.values()), partners.weights)
                self._snapshot.copy_(partners.weights)
                self._seen = partners.changes
            self.wait_for_all("begin with their weights")

    def _set_clocks(self, clocks: list[int]) -> None:
        client = self._channel.client
        self._channel.settle()
        self.wait_for_all("set the clocks")
        if self.exchange.rank == 0:
            client.control({"do": "clocks", "clocks": clocks}, everywhere=True)
        self.wait_for_all("go on from these clocks")
        client.clock = clocks[self.exchange.rank]

    def _named(self, row: Tensor) -> list[tuple[str, Tensor]]:
        return list(zip(self._names, _views(row, list(self._names.values())), strict=True))


def _channel(exchange: Communicator) -> Transport:
    """A channel on which members may be lost: gloo's would break for all."""
    world = exchange.world
    base = server_network(world).transport if world.transport.name == TORCH else world.transport
    channel = base.split(range(world.size))
    assert channel is not None, "every worker is a member"
    return channel


def _row_like(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one row, of a type that holds them all."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    if dtype.is_complex:
        raise IncompatibleError("gossip averages real numbers, and a parameter is complex: view it as real numbers")
    return torch.cat([torch.empty(0, dtype=dtype), *(each.detach().reshape(-1).to("cpu", dtype) for each in tensors)])


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one row of bytes."""
    rows = [each.detach().reshape(-1).cpu().contiguous().view(torch.uint8) for each in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *rows])


def _views(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in tensors]
    parts = torch.split_with_sizes(row[: sum(sizes)], sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _read(tensors: Sequence[Tensor], row: Tensor) -> None:
    if tensors:
        torch._foreach_copy_(_views(row, tensors), [tensor.detach() for tensor in tensors])
