"""Runs in which each worker trains at its own pace, and the calls in which their workers wait for each other.

Between the first step and the last, neither the run nor the loop around it calls a collective of the world, because a
killed worker would break it. Workers wait for each other by posts on the control channel (`wait_for_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from syncline.control import ControlBarrier, ControlChannel
from syncline.strategies.base import StrategyRun, all_tensors
from syncline.transports import Transport
from syncline.world import Group, barrier

__all__ = ["AsynchronousRun"]


class AsynchronousRun(StrategyRun):
    """A subclass calls `open_channel` in `setup`, with a function that reads the weights that all workers share."""

    loop_state: Mapping[str, Any] = {}
    """Plain values of the training loop on this worker, for checkpoints."""
    saving_team: Group | None = None
    """While a checkpoint is written: the workers that write it; else None."""

    _channel: ControlChannel

    def open_channel(
        self,
        load_weights: Callable[[nn.Module], None],
        transport: Transport | None = None,
        on_stop: Callable[[], None] = lambda: None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the control channel. Every worker calls it. `transport` has the store, by default the world's."""
        world = self.world
        store = world.control_store() if transport is None else transport.control_store()
        self._channel = ControlChannel(
            store,
            world.runtime,
            self.strategy.name,
            world.size,
            world.rank,
            load_weights=load_weights,
            on_stop=on_stop,
            on_finish=on_finish,
        )

    def control_channel(self) -> ControlChannel:
        return self._channel

    @cached_property
    def _barrier(self) -> ControlBarrier:
        return ControlBarrier(self.world, self.control_channel())

    def wait_for_all(self, what: str) -> None:
        """Wait for the other workers. `what` names what all of them do, for messages.

        While a checkpoint is written these are the workers that write it. If one is lost then, all others raise a
        `PeerLostError` and begin again without it.
        """
        if self.saving_team is None:
            self._barrier.wait(what)
        elif self.saving_team.size > 1:
            barrier(self.saving_team)

    def shown_tensors(self) -> dict[str, Tensor]:
        return all_tensors(self.model)

    def show_agreed(self) -> None:
        self.wait_for_all("enter agreed()")  # no worker steps from now on
        self.control_channel().load_weights(self.model)
        self.wait_for_all("read the weights")

    def finish(self) -> None:
        self.control_channel().finish()
        self._barrier.close()
        self.read_final()

    def read_final(self) -> None:
        """Write the final weights into the model. Called when no worker takes steps any more."""
        self.control_channel().load_weights(self.model)

    def detach(self) -> None:
        super().detach()
        self.control_channel().close()

    def close_at_exit(self) -> None:
        self.close()  # other workers may wait for this process

    def wait_for_reload(self) -> None:
        self.wait_for_all("load a state into the model after sl.distribute")

    # No worker waits for another at the end of its data.

    def check_uneven(self) -> None:
        self.uneven.schedulers.begin_epoch()

    def settle_uneven(self) -> None:
        pass

    # Workers are at different steps, so each saves its own position.

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        position = {"cursors": self.readers.state_dict(), "steps": self.stats.steps, "kept": dict(self.loop_state)}
        state["local"]["place"] = position
        return state

    def saved_position(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> Mapping[str, Any]:
        position: Mapping[str, Any] = shared if local is None else local.get("place", shared)
        self.loop_state = dict(position.get("kept", {}))
        return position
