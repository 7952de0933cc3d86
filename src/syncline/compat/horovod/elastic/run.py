"""Calling a training again after a failure, from its last commit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from syncline.compat.horovod.context import context, init, is_initialized, shutdown
from syncline.compat.horovod.elastic.state import State
from syncline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from syncline.errors import SynclineError

__all__ = ["run"]

logger = logging.getLogger("syncline")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

SETTLE = 2.0
"""Seconds in which the launcher has told all ranks of a loss; beats tell of it twice a second."""
PERIOD = 0.05
ALIVE = ("it has closed its world", "it is alive")
"""How the transport tells of ranks that others had to go without, and that may come back."""
TRIES = 3
"""Failures in a row without a commit between them: what fails again and again is no accident."""


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training `func(state, …)` that goes on after a failed operation, from the last commit.

    At a `HorovodInternalError` the state is restored, all ranks meet again (shutdown and init), the state's reset
    callbacks are called, rank 0's state is sent to all, and `func` is called again; at a `HostsUpdatedInterrupt` the
    same without restoring. It works while all ranks are alive. Nothing starts a worker in the place of a lost one: then
    the state is left as it was last committed, and the error is raised.

    >>> import syncline as sl, syncline.compat.horovod.torch as hvd
    >>> def main(world):
    ...     hvd.init()
    ...     state = hvd.elastic.TorchState(epoch=0, calls=0)
    ...     return train(state)
    >>> @run
    ... def train(state):
    ...     state.epoch += 1
    ...     if state.epoch == 1:
    ...         state.commit()
    ...         state.epoch += 10
    ...         raise hvd.HorovodInternalError("an operation failed")
    ...     return state.epoch
    >>> sl.simulate(main, ranks=2).results
    (2, 2)
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync = False
        failures = commits = 0
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if is_initialized():
                    context().leave(str(error))  # at once: the others may wait for this rank
                state.restore()
                failures = failures + 1 if state._commits == commits else 1
                commits = state._commits
                _check_that_it_can_go_on(error, failures)
                logger.warning("an operation failed, and training goes on from the last commit: %s", error)
                _meet_again(error)
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                _meet_again(interrupt)
                skip_sync = interrupt.skip_sync
            state.on_reset()

    return wrapper  # type: ignore[return-value]  # it takes `state` by name too, as Horovod's does


def _check_that_it_can_go_on(error: HorovodInternalError, failures: int) -> None:
    gone = _gone()
    if gone:
        logger.error("%s; %s", "; ".join(f"rank {rank} is gone ({why})" for rank, why in gone.items()), _ADVICE)
        raise error
    if failures >= TRIES:
        logger.error("%d failures without a commit between them: training does not try again", failures)
        raise error


_ADVICE = (
    "no worker is started in its place, so training ends here. The state of this rank is as it was last committed; "
    "save checkpoints to a file beside commits, and start the run again from the last one"
)


def _gone() -> dict[int, str]:
    """Ranks that are lost, and how. A loss is known to one rank before the others: it is given time to be told."""
    if not is_initialized():
        return {}
    world = context().world
    until = world.runtime.now() + SETTLE
    while True:
        gone = {rank: why for rank, why in world.lost.items() if not why.startswith(ALIVE)}
        if gone or world.runtime.now() >= until:
            return gone
        world.runtime.sleep(PERIOD)


def _meet_again(why: Exception) -> None:
    """Leave the world and join it again, with all ranks. The wait for them ends at the world's timeout."""
    try:
        if is_initialized():
            shutdown()
        init()
    except SynclineError as error:
        logger.error("the ranks did not meet again after %s: %s; %s", type(why).__name__, error, _ADVICE)
        raise why from error
