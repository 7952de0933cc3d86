"""Keys: who may talk to a node.

All nodes of a world hold one CURVE key pair. Its secret half is what the launcher hands out; a connection that cannot
prove that it holds it is refused by libzmq itself, before a byte of it is looked at, and everything is encrypted.
"""

from __future__ import annotations

import os
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from syncline.errors import WorldError

__all__ = ["VARIABLE", "Guard", "choose_key"]

VARIABLE = "SYNCLINE_KEY"
DOMAIN = "syncline"


def choose_key(address: str, key: str | None) -> str | None:
    """The world's key: given, or from the launcher. Between hosts there must be one, or "none" in so many words."""
    key = key or os.environ.get(VARIABLE) or None
    if key == "none":
        return None
    if key is None:
        if address.startswith("127."):
            return None
        raise WorldError(
            f"between hosts ZeroMQ wants a key: start with `syncline run`, which hands one out, or set {VARIABLE} "
            'alike everywhere (python -c "import zmq; print(zmq.curve_keypair()[1].decode())"); "none" switches it off'
        )
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise WorldError(
            f"{VARIABLE} is not a key: 40 characters as zmq.curve_keypair() makes them are needed"
        ) from None
    return key


class Guard:
    """Lets in who holds the key."""

    def __init__(self, context: zmq.Context[Any], key: str | None) -> None:
        self._secret = None if key is None else key.encode()
        self._public = b"" if self._secret is None else zmq.curve_public(self._secret)
        self._authenticator: ThreadAuthenticator | None = None
        if self._secret is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)  # "*" is not all

    def callback(self, domain: str, key: bytes) -> bool:
        """What the authenticator asks: whether a caller with this public key may come in."""
        return key == self._public

    def listen(self, node: zmq.Socket[Any]) -> None:
        """Prepare a socket that others connect to."""
        if self._secret is not None:
            node.curve_server = True
            node.curve_secretkey = self._secret
            node.zap_domain = DOMAIN.encode()

    def call(self, node: zmq.Socket[Any]) -> None:
        """Prepare a socket that connects to others."""
        if self._secret is not None:
            node.curve_serverkey = self._public
            node.curve_publickey = self._public
            node.curve_secretkey = self._secret

    def close(self) -> None:
        """End the authenticator."""
        if self._authenticator is not None:
            self._authenticator.stop()
