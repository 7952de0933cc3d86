"""One-sided asynchronous SGD for networks: each worker, at its own pace, puts its state into another worker's memory.

    worker i   forward ─ backward ─ step: w' ─ reads its own buffers ─ w ← w' − pull·(w − w̄) ─ puts w ─ …
                                                 ▲ written by other workers at any time

The optimizer's change, w − w', stands for εΔ: a remote state w_k counts iff ‖w' − w_k‖² < ‖w − w_k‖². `pull` is by
default the optimizer's learning rate, as in the paper. *The* model is the mean of the workers' weights.

Keuper, Pfreundt: Asynchronous Parallel Stochastic Gradient Descent (2015).
"""

from __future__ import annotations

import importlib
import logging
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, PeerLostError
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import (
    Preset,
    Strategy,
    StrategyRun,
    check_counts,
    check_gradients,
    check_number,
    trained,
)
from syncline.strategies.key_map import KeyMap
from syncline.strategies.local_weights import load_optimizer_state, optimizer_state, refuse_inside_agreed
from syncline.strategies.onesided.mailslots import HEADER_BYTES, Mailslots, on_same_host
from syncline.strategies.onesided.update import Array, step

__all__ = ["OneSided", "OneSidedRun"]

logger = logging.getLogger("syncline")

READ_TIMEOUT_S = 5.0
"""Timeout of a read of another worker's weights. After it, the mean does not count them."""


@dataclass(frozen=True, repr=False)
class OneSided(Strategy):
    """Receive buffers that others write through one-sided memory: on MPI, on the simulator, or alone.

    After every `every` steps a worker puts its state, or a random contiguous `part` of it, into one of the `buffers` of
    a random other worker. `pull` is the step size towards the mean with the accepted states.

    >>> OneSided(part=0.25, pull=0.5)
    onesided(part=0.25, pull=0.5)
    """

    buffers: int = 4
    part: float = 1.0
    every: int = 1
    pull: float | None = None
    seed: int = 0

    name: ClassVar[str] = "onesided"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="onesided(pull=0.5)", engine="mpi"),)
    asynchronous = True

    def __post_init__(self) -> None:
        check_counts(self, buffers=1, every=1, seed=0)
        for key in ("part",) if self.pull is None else ("part", "pull"):
            check_number(self, key, "a number above 0, at most 1", lambda value: 0 < value <= 1)

    def run_type(self) -> type[StrategyRun]:
        return OneSidedRun

    def draw(self, rank: int, number: int, workers: int, numel: int) -> tuple[int, int, int]:
        """The target of a worker's message of that number, its first element, and the number of elements.

        >>> OneSided(part=0.5).draw(rank=1, number=1, workers=2, numel=8)
        (0, 3, 4)
        """
        generator = random.Random(f"{self.seed}/{rank}/{number}")
        to = (rank + generator.randrange(1, workers)) % workers
        count = max(1, round(self.part * numel))
        return to, generator.randrange(numel - count + 1), count


class OneSidedRun(AsynchronousRun):
    """One worker. Its weights are in the model, and a copy is in a window, where others read it for the mean."""

    strategy: OneSided
    copies_weights = True

    def setup(self) -> None:
        super().setup()
        codec = self.communicator.codec
        if codec is not None:
            raise IncompatibleError(
                f"onesided puts states into memory as they are, and nobody is there to decode {codec!r}: leave the "
                "codec out, and send less with part=0.25 or every=4"
            )
        world, model, optimizer, strategy = self.world, self.model, self.optimizer, self.strategy
        self.keys = KeyMap.of(model, optimizer)
        self.synchronised = {id(parameter) for parameter in self.keys.trains(model)}
        self.slots = Mailslots(
            world.transport, self.keys.trained, np.float32, strategy.buffers, same_host=on_same_host(world)
        )
        self._window = world.transport.memory.window(self.keys.numel, torch.float32)
        self.open_channel(self._load_weights)
        self._before: Tensor | None = None
        """The weights before the step."""
        self.accepted = self.rejected = 0
        self._base = 0
        """Steps before the latest load, after which the sequence numbers start again."""
        self._same_size = True
        self._publish()
        if self.communicator.size > 1:
            world.barrier()  # no worker reads a window that is not filled
        self.hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.raise_if_declared_lost()
        if self.settings.check_finite:
            check_gradients(self)
        if self.communicator.size > 1:
            self._before = self._read()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1
        if self._before is not None:
            self._blend(self._before.numpy())
        self._before = None
        self._publish()
        self._channel.report_steps(self.stats.steps)
        if self.communicator.size > 1 and self.stats.steps % self.strategy.every == 0:
            self._send()

    def _blend(self, before: Array) -> None:
        """Move towards the states of other workers that lie in the direction of this step."""
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
        strategy, communicator, numel = self.strategy, self.communicator, self.keys.trained
        to, first, count = strategy.draw(communicator.rank, self.stats.steps, communicator.size, numel)
        if self.slots.post(self._window.local.numpy()[:numel], to, first, count):
            nbytes = HEADER_BYTES + 4 * count
            self.stats.sent(nbytes, nbytes)

    def _pull(self) -> float | Array:
        """The strategy's pull, or each parameter group's learning rate."""
        if self.strategy.pull is not None:
            return self.strategy.pull
        groups = self.keys.groups
        rates = [min(1.0, float(self.optimizer.param_groups[group.number].get("lr", 1.0))) for group in groups]
        if len(set(rates)) == 1:
            return rates[0]
        return np.repeat(np.array(rates, np.float32), [group.after - group.first for group in groups])

    def _read(self) -> Tensor:
        """This worker's weights as one flat tensor on the CPU."""
        return torch.cat([each.detach().reshape(-1).to("cpu", torch.float32) for each in self.keys.trains(self.model)])

    def _publish(self) -> None:
        """Copy this worker's weights into its window."""
        self._window.local.copy_(self.keys.read(self.model))

    # The model of all.

    def _load_weights(self, model: nn.Module) -> None:
        """Fill a model with the mean of the windows of all workers that are not lost."""
        rows = []
        for rank in sorted(set(range(self.world.size)) - self.world.lost.keys() | {self.communicator.rank}):
            row = torch.empty(self.keys.numel, dtype=torch.float32)
            try:
                self._window.get(row, rank).wait(READ_TIMEOUT_S if rank != self.communicator.rank else None)
            except PeerLostError:
                continue
            rows.append(row.double())
        mean = torch.stack(rows).mean(dim=0)
        mean[self.keys.averaged :] = rows[0][self.keys.averaged :]
        total = sum(float((row - mean)[: self.keys.trained].square().sum()) for row in rows)
        self.stats.consensus = math.sqrt(total / len(rows))
        self.keys.write(model, mean.float())

    def show_agreed(self) -> None:
        self._publish()
        super().show_agreed()

    def finish(self) -> None:
        self._publish()
        super().finish()

    def read_final(self) -> None:
        super().read_final()
        try:
            self.wait_for_all("read the final weights")  # from this worker's memory
        except PeerLostError as error:
            logger.warning("rank %d leaves while others may still read its weights: %s", self.world.rank, error)

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if not self.world.lost:  # all workers free a window together
            self.slots.close()
            self._window.close()

    # State.

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.every

    def restart(self) -> None:
        """Drop the states of other workers, which belong to the old weights."""
        self.wait_for_all("start from the loaded weights")
        self.slots.collect()
        self._publish()
        self.wait_for_all("show the loaded weights")

    def resume_steps(self) -> None:
        self._base = self.stats.steps
        self._channel.report_steps(self.stats.steps)

    def shared_state(self) -> dict[str, Any]:
        return {"workers": self.communicator.size}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._same_size = int(state.get("workers", 0)) == self.communicator.size
        self.resume_steps()

    def local_state(self) -> dict[str, Any]:
        """This worker's weights and optimizer state. Messages in flight are not saved."""
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


def __getattr__(name: str) -> Any:
    """The solvers were here before, and are found with a warning."""
    solvers = importlib.import_module("syncline.solvers")
    if name not in solvers.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now in syncline.solvers", DeprecationWarning, stacklevel=2)
    return getattr(solvers, name)
