"""Opening a space: by all workers together, or by somebody who only watches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from syncline.codecs import Codec, build_codec, check_no_gradient_options
from syncline.errors import IncompatibleError, SpecError
from syncline.server.client import Client
from syncline.server.description import Description, pack_starts
from syncline.server.filters import Filter, build_filter
from syncline.server.network import ServerNetwork, server_network
from syncline.server.protocol import PIECE
from syncline.server.rules import Rule, build_rule
from syncline.server.server import Server
from syncline.world import World, current_world

__all__ = ["open_space", "store", "watch_space"]

LEAVING = 60.0
"""Seconds that leaving waits for those who still need this process's shard, at least."""


def store(
    numel: int,
    rule: str | Rule = "add",
    *,
    initial: Tensor | None = None,
    codec: str | Codec | None = None,
    filters: str | Filter | None = None,
    world: World | None = None,
) -> Client:
    """A space of `numel` float32 keys that all workers share, sharded over the servers. Every worker calls it.

    `rule` says what a push does: "add", "assign", "sgd(0.1)", "adagrad(0.1)", "handler('mine')", … Values go in
    `codec`; `filters` hold back what is not worth sending yet. The keys begin at 0, or at rank 0's `initial`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.store(3, rule="sgd(0.5)") as weights:
    ...     weights.push_pull(None, torch.tensor([1.0, 2.0, 3.0])).wait()
    tensor([-0.5000, -1.0000, -1.5000])
    """
    world = current_world() if world is None else world
    if not isinstance(numel, int) or numel < 1:
        raise SpecError(f"store({numel!r}): a number of keys, at least one")
    coder = build_codec(codec)
    if coder is not None:
        check_no_gradient_options(coder, "a store")
    return open_space(
        world,
        "store",
        numel,
        rules=(repr(build_rule(rule)),),
        codec=None if coder is None else repr(coder),
        filters=None if filters is None else build_filter(filters),
        initial=initial,
    )


def open_space(
    world: World,
    name: str,
    numel: int,
    *,
    rules: Sequence[str] = ("add",),
    bounds: Sequence[int] = (0,),
    held: bool = False,
    quorum: float = 1.0,
    damped: bool = False,
    codec: str | None = None,
    filters: Filter | None = None,
    servers: Sequence[int] | None = None,
    workers: Sequence[int] | None = None,
    mean: bool = False,
    upward: str = "",
    parameters: Sequence[int] = (),
    piece: int = PIECE,
    initial: Tensor | None = None,
    retry: float | None = None,
    seed: int = 0,
    kind: type[Client] = Client,
) -> Client:
    """Open a space together with the other workers of the world, in the same order on all of them.

    `servers` are members of the network that hold its shards (all that serve, if not told), `workers` those with a
    clock (all).
    """
    _check_filters(filters, rules)
    network = server_network(world)
    host = world.keep("syncline.server", lambda: Server(network).start()) if network.serves else None
    names = world.keep(("spaces", name), _Names)
    description = Description(
        name=f"{name} {next(names.numbers)}",
        numel=numel,
        servers=tuple(network.servers if servers is None else servers),
        workers=tuple(network.workers if workers is None else workers),
        rules=tuple(rules),
        bounds=tuple(bounds),
        held=held,
        quorum=quorum,
        damped=damped,
        codec=codec,
        piece=piece,
        mean=mean,
        upward=upward,
        parameters=pack_starts(parameters) if parameters else "",
    )
    client = kind(
        network, description, filters=filters, retry=retry, seed=seed, on_close=_leaving(host, description, network)
    )
    client.hello()
    if initial is not None and network.me == description.workers[0]:
        client.put(None, initial)
    world.barrier()
    return client


def watch_space(network: ServerNetwork, name: str, number: int, servers: Sequence[int] | None = None) -> Client:
    """A client that only watches the `number`-th space of that name (from 1); it waits until the workers have it."""
    where = tuple(network.servers if servers is None else servers)
    placeholder = Description(name=f"{name} {number}", numel=1, servers=where[:1], workers=network.workers)
    return Client(network, placeholder, retry=network.transport.retry).observe()


def _check_filters(filters: Filter | None, rules: Sequence[str]) -> None:
    """Refuse a filter that holds values back where the rule cannot take sums of them later, for some keys."""
    if filters is None or not filters.chooses:
        return
    for rule in map(build_rule, rules):
        if rule.name == "assign" or not rule.elementwise:
            reason = "takes no lists of keys" if rule.name != "assign" else "replaces values, and sums replace nothing"
            raise IncompatibleError(
                f"{filters!r} sends some keys now and sums of the others later, and {rule!r} {reason}: use a rule like "
                "sgd or adam, or no filter that chooses"
            )


class _Names:
    """Counts the spaces of one name, alike on every worker."""

    def __init__(self) -> None:
        self.numbers = count(1)

    def close(self) -> None:
        return


def _leaving(host: Server | None, description: Description, network: ServerNetwork):  # type: ignore[no-untyped-def]
    """What closing a client waits for, where its process holds a shard."""
    if host is None or network.me not in description.servers:
        return None

    def wait() -> None:
        patience = max(LEAVING, network.transport.timeout)
        if not host.wait_left(description.mark, patience):
            raise IncompatibleError(
                f"members {host.waiting_for(description.mark)} have not left space {description.name!r} within "
                f"{patience:.0f} s: every worker closes its run, and this one holds a shard for them until then"
            )

    return wait
