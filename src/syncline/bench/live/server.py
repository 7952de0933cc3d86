"""A web server for one person on this machine: loopback, a token, GET and nothing else.

Connections are handled side by side in one thread: a browser opens some that it may never use, and a slow one must not
hold up the others. What a request may ask for is in a table; no path on the disk is ever made from one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from syncline.bench.live.assets import Asset, load_assets
from syncline.bench.live.base import Feed
from syncline.bench.live.request import LIMIT, Request, read_request
from syncline.errors import UnsupportedError

__all__ = ["Server", "serve"]

PATIENCE = 10.0
"""Seconds for a request to arrive."""
TAKING = 60.0
"""Seconds for an answer to be taken, through a slow ssh too."""
CONNECTIONS = 64

HEADERS = {
    # Plotly writes style elements, and draws heat maps as data: images. Scripts and data come from here alone.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Connection": "close",
}
REASONS = {
    200: "OK",
    304: "Not Modified",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
}


class _Refusal(Exception):  # noqa: N818 (not an error of ours: an answer)
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Server:
    """Answers the page's questions about a feed, to whoever has the token."""

    def __init__(self, feed: Feed, port: int = 0) -> None:
        self._feed = feed
        self._assets = load_assets()
        self.token = secrets.token_urlsafe(24)
        self._socket = _listen(port)
        self.port: int = self._socket.getsockname()[1]
        self._open = 0

    @property
    def url(self) -> str:
        """With the token: for the user alone."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop."""
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=LIMIT)
        try:
            await stop.wait()
        finally:
            server.close()  # and not wait for connections that say nothing

    def close(self) -> None:
        """Give the port back. A second call does nothing."""
        self._socket.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS:
                await self._converse(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # it said nothing, or left: there is nobody to tell
        finally:
            self._open -= 1
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # it does not take its answer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await asyncio.wait_for(read_request(reader), PATIENCE)
        try:
            if request is None:
                raise _Refusal(400, "this is not a request that a browser makes")
            answer = self._answer(request)
        except _Refusal as refusal:
            answer = _text(refusal.status, f"{refusal}\n".encode())
        writer.transport.set_write_buffer_limits(high=0)  # drained means gone
        writer.write(answer)
        await asyncio.wait_for(writer.drain(), TAKING)

    def _answer(self, request: Request) -> bytes:
        self._admit(request)
        if request.method != "GET":
            raise _Refusal(405, f"{request.method} is not possible here: this page only shows")
        if request.path in self._assets:
            return self._asset(request, self._assets[request.path])
        document = self._document(request)
        if document is None:
            raise _Refusal(404, "there is nothing here")
        body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        return _response(200, body, {"Content-Type": "application/json", "Cache-Control": "no-store"})

    def _admit(self, request: Request) -> None:
        """A page elsewhere whose name was made to point here has another Host; whoever lacks the token is a stranger.

        The port is free to be another one: ssh -L may map it.
        """
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if host not in ("127.0.0.1", "localhost"):
            raise _Refusal(403, f"this server is 127.0.0.1 or localhost, not {host[:100]!r}")
        given = (request.query.get("token", ""), request.cookies.get(self._cookie, ""))
        if not any(secrets.compare_digest(one.encode(), self.token.encode()) for one in given):
            raise _Refusal(403, "this page needs its token: open the whole address that syncline watch printed")

    @property
    def _cookie(self) -> str:
        """Cookies do not know ports: two servers on one machine must not take each other's."""
        return f"syncline-{self.port}"

    def _asset(self, request: Request, asset: Asset) -> bytes:
        headers = {"Content-Type": asset.kind, "ETag": asset.tag, "Cache-Control": asset.cache}
        if request.path == "/":
            headers["Set-Cookie"] = f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        if request.headers.get("if-none-match") == asset.tag:
            return _response(304, b"", headers)
        if asset.large and "gzip" in request.headers.get("accept-encoding", ""):
            return _response(200, asset.small, {**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        return _response(200, asset.body, headers)

    def _document(self, request: Request) -> dict[str, Any] | None:
        query = request.query
        if request.path == "/state.json":
            return self._feed.state()
        if request.path == "/curves.json":
            return self._feed.curves([int(word) for word in query.get("runs", "").split(",") if _counts(word)])
        if request.path == "/run.json" and _counts(query.get("id", "")):
            return self._feed.detail(int(query["id"]), query.get("kind", "compute"))
        return None


def serve(feed: Feed, port: int, announce: Callable[[Server], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `announce` is told when the page can be opened."""
    server = Server(feed, port)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        announce(server)
        await server.run(stop)

    try:
        asyncio.run(main())
    finally:
        server.close()


def _listen(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
        found.listen()  # before anybody is told the address
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or error
        raise UnsupportedError(
            f"cannot listen on 127.0.0.1:{port} ({why}); without --port a free one is taken"
        ) from None
    return found


def _counts(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def _text(status: int, body: bytes) -> bytes:
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    return _response(status, body, {**headers, "Allow": "GET"} if status == 405 else headers)


def _response(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS[status]}"]
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **headers, "Content-Length": str(len(body))}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
