"""The parameter server: a flat space of keys, sharded over servers that workers push to and pull from."""

from __future__ import annotations

from syncline.server.client import Client, ClusterStatus, Future
from syncline.server.network import ServerNetwork, network_of, server_network
from syncline.server.opening import open_space, store, watch_space
from syncline.server.rules.handlers import handler
from syncline.server.server import Server, serve

__all__ = [
    "Client",
    "ClusterStatus",
    "Future",
    "Server",
    "ServerNetwork",
    "handler",
    "network_of",
    "open_space",
    "serve",
    "server_network",
    "store",
    "watch_space",
]
