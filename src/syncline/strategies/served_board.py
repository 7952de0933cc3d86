"""A board that lies on server 0, beside the weights: for the workers of a run, and for who only watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from syncline.errors import IncompatibleError, PeerLostError
from syncline.server import Client, ServerNetwork, watch_space
from syncline.strategies.control import Post
from syncline.strategies.served_keys import KeyMap

__all__ = ["ServedBoard", "post_order", "watch_board"]

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
