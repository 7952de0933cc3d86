"""The parameter server: a flat space of keys, sharded over servers that workers push to and pull from."""

from __future__ import annotations

from syncline.server.board import Post
from syncline.server.client import Client, Future, Told
from syncline.server.handlers import handler
from syncline.server.network import ServerNetwork, network_of, server_network
from syncline.server.server import Server, serve
from syncline.server.store import open_space, store, watch_space

__all__ = [
    "Client",
    "Future",
    "Post",
    "Server",
    "ServerNetwork",
    "Told",
    "handler",
    "network_of",
    "open_space",
    "serve",
    "server_network",
    "store",
    "watch_space",
]
