"""One worker of a network's training by one-sided SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import PeerLostError
from syncline.reduction import Communicator
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import RunSettings, check_gradients, trained
from syncline.strategies.key_map import KeyMap
from syncline.strategies.local_weights import load_optimizer_state, optimizer_state, refuse_inside_agreed
from syncline.strategies.onesided.core import is_near
from syncline.strategies.onesided.mailslots import HEADER, Mailslots
from syncline.strategies.onesided.step import Array, step
from syncline.strategies.onesided.window_channel import READ_TIMEOUT_S, WindowChannel

if TYPE_CHECKING:
    from syncline.strategies.onesided.strategy import OneSided

__all__ = ["OneSidedRun"]

SHORTEST, LONGEST = 1e-3, 0.25
"""Seconds between two looks at who has finished."""


class OneSidedRun(AsynchronousRun):
    """Its weights are in the model; a copy of them is in a window, where those who want the mean read it."""

    strategy: OneSided

    def __init__(
        self, strategy: OneSided, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        super().__init__(strategy, model, optimizer, exchange, settings)
        world = exchange.world
        self.keys = KeyMap.of(model, optimizer)
        self.synchronised = {id(parameter) for parameter in self.keys.trains(model)}
        self.slots = Mailslots(world.transport, self.keys.trained, np.float32, strategy.buffers, near=is_near(world))
        self._window = world.transport.memory.window(self.keys.numel, torch.float32)
        self._channel = WindowChannel(world, self._load_weights)
        self._before: Tensor | None = None
        """The weights at the beginning of the step."""
        self.accepted = self.rejected = 0
        self._base = 0
        """Steps before the latest load: the numbers of messages begin anew."""
        self._same_size = True
        self._publish()
        if exchange.size > 1:
            world.barrier()  # nobody reads what is not there yet
        self.hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def control_channel(self) -> WindowChannel:
        return self._channel

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)
        if self.exchange.size > 1:
            self._before = self._read()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1
        if self._before is not None:
            self._blend(self._before.numpy())
        self._before = None
        self._publish()
        self._channel.count()
        if self.exchange.size > 1 and self.stats.steps % self.strategy.every == 0:
            self._send()

    def _blend(self, before: Array) -> None:
        """Go towards what others have left, as far as it lies where this step went."""
        messages = self.slots.collect()
        if not messages:
            return
        move = before - self._read().numpy()
        after, accepted = step(before, move, self._pull(), messages)
        self.accepted += sum(accepted)
        self.rejected += len(accepted) - sum(accepted)
        if any(accepted):
            self.keys.write(self.model, torch.from_numpy(after.astype(np.float32, copy=False)))
        taken = self.stats.steps - self._base
        for message, good in zip(messages, accepted, strict=True):
            if good:
                self.stats.read_at(max(0, taken - message.sequence * self.strategy.every))

    def _send(self) -> None:
        strategy, exchange, numel = self.strategy, self.exchange, self.keys.trained
        to, first, count = strategy.draw(exchange.rank, self.stats.steps, exchange.size, numel)
        if self.slots.post(self._window.local.numpy()[:numel], to, first, count):
            nbytes = HEADER + 4 * count
            self.stats.sent(nbytes, nbytes)

    def _pull(self) -> float | Array:
        """The strategy's, or each group's learning rate."""
        if self.strategy.pull is not None:
            return self.strategy.pull
        groups = self.keys.groups
        rates = [min(1.0, float(self.optimizer.param_groups[group.number].get("lr", 1.0))) for group in groups]
        if len(set(rates)) == 1:
            return rates[0]
        return np.repeat(np.array(rates, np.float32), [group.after - group.first for group in groups])

    def _read(self) -> Tensor:
        """This worker's weights as one row, on the CPU."""
        return torch.cat([each.detach().reshape(-1).to("cpu", torch.float32) for each in self.keys.trains(self.model)])

    def _publish(self) -> None:
        """Show what this worker has now to those who want the mean."""
        self._window.local.copy_(self.keys.read(self.model))

    # The model of all.

    def _load_weights(self, model: nn.Module) -> None:
        """The mean of what every worker shows, of those that are there."""
        rows = []
        for rank in sorted([self.exchange.rank, *self._channel.others()]):
            row = torch.empty(self.keys.numel, dtype=torch.float32)
            try:
                self._window.get(row, rank).wait(READ_TIMEOUT_S if rank != self.exchange.rank else None)
            except PeerLostError:
                continue
            rows.append(row.double())
        mean = torch.stack(rows).mean(dim=0)
        mean[self.keys.averaged :] = rows[0][self.keys.averaged :]
        apart = sum(float((row - mean)[: self.keys.trained].square().sum()) for row in rows)
        self.stats.consensus = math.sqrt(apart / len(rows))
        self.keys.write(model, mean.float())

    def show_agreed(self) -> None:
        self._publish()
        super().show_agreed()

    def finish(self) -> None:
        self._publish()
        super().finish()

    def read_final(self) -> None:
        super().read_final()
        self._channel.announce_done()

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if not self.world.lost:  # freeing is for all together
            self.slots.close()
            self._channel.release()
            self._window.close()

    # State.

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.every

    @property
    def copies_weights(self) -> bool:
        return True

    def restart(self) -> None:
        """Drop states from other workers: they belong to the old weights."""
        self.wait_for_all("start from the loaded weights")
        self.slots.collect()
        self._publish()
        self.wait_for_all("show the loaded weights")

    def resume_steps(self) -> None:
        self._base = self.stats.steps
        self._channel.resume(self.stats.steps)

    def shared_state(self) -> dict[str, Any]:
        return {"workers": self.exchange.size}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._same_size = int(state.get("workers", 0)) == self.exchange.size
        self.resume_steps()

    def local_state(self) -> dict[str, Any]:
        """This worker's weights, and what its optimizer remembers. States that are on their way are not kept."""
        refuse_inside_agreed(self)
        return {
            "weights": self.keys.named(self._read()),
            "optimizer": optimizer_state(self.optimizer, trained(self.model)),
            "accepted": self.accepted,
            "rejected": self.rejected,
        }

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if states and "weights" in states[0]:
            own = states[0]
            load_optimizer_state(self.optimizer, trained(self.model), own["optimizer"])
            self.accepted, self.rejected = int(own.get("accepted", 0)), int(own.get("rejected", 0))
            if self._same_size:
                self.keys.write(self.model, self.keys.joined(dict(own["weights"]), self._read()))
        self._publish()
