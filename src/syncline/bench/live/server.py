"""The web server of the live page: on the loopback interface, with a token, for GET requests only.

One thread serves all connections with asyncio, because a browser opens connections that it may never use, and a slow
one must not delay the others. A table lists what can be requested; no request becomes a path on the disk.

No web framework would make this file shorter: most of it is the access check, the headers and the documents. The
parser accepts only GET requests without a body, and `http.server` of the standard library needs a thread per
connection.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib
import json
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from syncline.bench.live.feed import Feed
from syncline.errors import UnsupportedError

__all__ = ["LiveServer", "serve"]

REQUEST_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 60.0
"""Long enough for a slow ssh tunnel."""
MAX_CONNECTIONS = 64

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
MAX_REQUEST_BYTES = 16 << 10
HEADERS_END = b"\r\n\r\n"
NOT_HTTP = "this is not an HTTP request"
JAVASCRIPT = "text/javascript; charset=utf-8"
PAGE_FILES = {"page.html": "text/html; charset=utf-8", "style.css": "text/css; charset=utf-8"}
PAGE_FILES |= dict.fromkeys(("app.js", "plots.js", "table.js", "phrases.js"), JAVASCRIPT)
"""Content types of the files in `static/`."""


class _Refusal(Exception):  # noqa: N818 (an HTTP answer, not an error)
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class LiveServer:
    """Serves the page and the documents of a feed to browsers that have the token."""

    def __init__(self, feed: Feed, port: int = 0) -> None:
        self._feed = feed
        self._assets = load_assets()
        self.token = secrets.token_urlsafe(24)
        self._socket = _listen(port)
        self.host: str
        self.port: int
        self.host, self.port = self._socket.getsockname()
        self._open = 0

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MAX_REQUEST_BYTES)
        try:
            await stop.wait()
        finally:
            server.close()  # without waiting for idle connections

    def close(self) -> None:
        """Release the port. A second call does nothing."""
        self._socket.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                await self._serve_connection(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the browser sent nothing, or closed the connection
        finally:
            self._open -= 1
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # the browser does not read the answer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = await asyncio.wait_for(reader.readuntil(HEADERS_END), REQUEST_TIMEOUT_S)
            answer = self._answer(parse_request(data))
        except asyncio.LimitOverrunError:
            answer = _refuse(_Refusal(400, NOT_HTTP))
        except _Refusal as refusal:
            answer = _refuse(refusal)
        writer.transport.set_write_buffer_limits(high=0)  # drain() waits until all is sent
        writer.write(answer)
        await asyncio.wait_for(writer.drain(), SEND_TIMEOUT_S)

    def _answer(self, request: HttpRequest) -> bytes:
        self._check_access(request)
        if request.method != "GET":
            raise _Refusal(405, f"{request.method} is not possible here: the page only reads")
        if request.path in self._assets:
            return self._asset(request, self._assets[request.path])
        document = self._document(request)
        if document is None:
            raise _Refusal(404, "there is nothing here")
        body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        return _response(200, body, {"Content-Type": "application/json", "Cache-Control": "no-store"})

    def _check_access(self, request: HttpRequest) -> None:
        """Refuse requests without the token, and requests whose Host is another name (DNS rebinding).

        The port may be different, because ssh -L may map it.
        """
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if host not in ("127.0.0.1", "localhost"):
            raise _Refusal(403, f"this server is 127.0.0.1 or localhost, not {host[:100]!r}")
        tokens = (request.query.get("token", ""), request.cookies.get(self._cookie, ""))
        if not any(secrets.compare_digest(one.encode(), self.token.encode()) for one in tokens):
            raise _Refusal(403, "this page needs its token: open the whole address that syncline watch printed")

    @property
    def _cookie(self) -> str:
        """Cookies are not separated by port, so each server on this machine has its own name."""
        return f"syncline-{self.port}"

    def _asset(self, request: HttpRequest, asset: Asset) -> bytes:
        headers = {"Content-Type": asset.kind, "ETag": asset.tag, "Cache-Control": asset.cache}
        if request.path == "/":
            headers["Set-Cookie"] = f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        if request.headers.get("if-none-match") == asset.tag:
            return _response(304, b"", headers)
        if asset.large and "gzip" in request.headers.get("accept-encoding", ""):
            return _response(200, asset.small, {**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        return _response(200, asset.body, headers)

    def _document(self, request: HttpRequest) -> dict[str, Any] | None:
        query = request.query
        if request.path == "/state.json":
            return self._feed.state()
        if request.path == "/curves.json":
            return self._feed.curves([int(word) for word in query.get("runs", "").split(",") if _is_number(word)])
        if request.path == "/run.json" and _is_number(query.get("id", "")):
            return self._feed.detail(int(query["id"]), query.get("kind", "compute"))
        return None


def serve(feed: Feed, port: int, announce: Callable[[LiveServer], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; call `announce` when the page can be opened."""
    server = LiveServer(feed, port)

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
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # before the address is printed
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise UnsupportedError(
            f"cannot listen on 127.0.0.1:{port} ({why}); without --port a free one is taken"
        ) from None
    return listener


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def _refuse(refusal: _Refusal) -> bytes:
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    headers |= {"Allow": "GET"} if refusal.status == 405 else {}
    return _response(refusal.status, f"{refusal}\n".encode(), headers)


def _response(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **headers, "Content-Length": str(len(body))}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(frozen=True)
class HttpRequest:
    """A GET request. Header names are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    cookies: dict[str, str]


def parse_request(data: bytes) -> HttpRequest:
    """Parse a request without a body.

    >>> request = parse_request(b"GET /run.json?id=3 HTTP/1.1\\r\\nHost: localhost\\r\\nCookie: a=b; c=d\\r\\n\\r\\n")
    >>> request.path, request.query, request.cookies
    ('/run.json', {'id': '3'}, {'a': 'b', 'c': 'd'})
    """
    first, *rest = data.removesuffix(HEADERS_END).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[0].isalpha() or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        raise _Refusal(400, NOT_HTTP)
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        key = name.lower()
        # Refuse repeated and folded headers: other software may read them differently.
        if not colon or not name or name != name.strip() or (key in headers and key in ("host", "cookie")):
            raise _Refusal(400, NOT_HTTP)
        headers[key] = value.strip()
    try:
        parts = urlsplit("//host" + words[1])
        query = dict(parse_qsl(parts.query, max_num_fields=20))
    except ValueError:
        raise _Refusal(400, NOT_HTTP) from None
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return HttpRequest(words[0], parts.path, query, headers, {name: value for name, _, value in pairs})


@dataclass(frozen=True)
class Asset:
    """A file that the server sends."""

    body: bytes
    kind: str
    cache: str = "no-cache"

    @property
    def large(self) -> bool:
        """True if it is sent compressed: 5 MB become a quarter, which helps through ssh."""
        return len(self.body) > 1 << 20

    @cached_property
    def small(self) -> bytes:
        """Compressed at the first request."""
        return gzip.compress(self.body, 4, mtime=0)

    @cached_property
    def tag(self) -> str:
        """The ETag."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'


def load_assets() -> dict[str, Asset]:
    """The files of the page and Plotly's script, by request path."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise UnsupportedError("the live page needs Plotly: pip install 'syncline[view]'") from None
    here = files("syncline.bench.live").joinpath("static")
    assets = {f"/{name}": Asset(here.joinpath(name).read_bytes(), kind) for name, kind in PAGE_FILES.items()}
    assets["/"] = assets.pop("/page.html")
    assets["/plotly.js"] = Asset(offline.get_plotlyjs().encode(), JAVASCRIPT, "private, max-age=86400")
    return assets
