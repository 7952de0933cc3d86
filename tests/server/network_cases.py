"""What the processes of these tests do with a server network, before there is a server: an echo, by hand."""

from __future__ import annotations

import math

import torch

import syncline as sl
from syncline.server.network import ServerNetwork, server_network

ASK, ANSWER = 1, 2
BYE = -1.0


def serve(network: ServerNetwork) -> None:
    """Add a thousand times one's own number to what comes, until every worker has said goodbye or is lost."""
    left: set[int] = set()
    while not left | set(network.transport.lost()) >= set(network.workers):
        buffer = torch.zeros(1)
        handle = network.transport.recv(buffer, None, ASK)
        handle.wait(timeout=math.inf)
        if float(buffer) == BYE:
            left.add(handle.source)
        else:
            network.transport.send(buffer + 1000 * network.me, handle.source, ANSWER)


def ask(network: ServerNetwork, server: int, value: float) -> float:
    """What a server makes of a number."""
    answer = torch.zeros(1)
    handle = network.transport.recv(answer, server, ANSWER)
    network.transport.send(torch.tensor([value]), server, ASK).wait()
    handle.wait()
    return float(answer)


def say_goodbye(network: ServerNetwork) -> None:
    for server in network.servers:
        network.transport.send(torch.tensor([BYE]), server, ASK).wait()


def use(world: sl.World) -> list[float]:
    """Ask every server once, as a worker does; serve too where the workers are the servers."""
    network = server_network(world)
    assert network is server_network(world)
    assert network.me == world.rank
    assert network.dedicated == (network.servers != network.workers)
    task = None if network.dedicated else world.runtime.spawn(serve, network, name="server")
    answers = [ask(network, server, float(world.rank)) for server in network.servers]
    world.barrier()
    say_goodbye(network)
    if task is not None:
        assert task.join(60)
    world.barrier()
    return answers


def expected(rank: int, servers: range) -> list[float]:
    return [rank + 1000.0 * server for server in servers]
