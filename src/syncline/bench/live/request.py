"""The little of HTTP that a page on the loopback interface needs: a request line and headers, no body."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

__all__ = ["LIMIT", "Request", "parse_request", "read_request"]

LIMIT = 16 << 10
"""Bytes of a request, at most."""
END = b"\r\n\r\n"


@dataclass(frozen=True)
class Request:
    """Names of headers are in small letters."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    cookies: dict[str, str]


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None where it is too long or none that we read."""
    try:
        data = await reader.readuntil(END)
    except asyncio.LimitOverrunError:
        return None
    return parse_request(data)


def parse_request(data: bytes) -> Request | None:
    """A whole request without a body; None where it is not one.

    >>> found = parse_request(b"GET /run.json?id=3 HTTP/1.1\\r\\nHost: localhost\\r\\nCookie: a=b; c=d\\r\\n\\r\\n")
    >>> found.path, found.query, found.cookies
    ('/run.json', {'id': '3'}, {'a': 'b', 'c': 'd'})
    >>> parse_request(b"hello\\r\\n\\r\\n") is None
    True
    """
    first, *rest = data.removesuffix(END).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[0].isalpha() or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        key = name.lower()
        # A header that is there twice, or continued on a second line, may be read differently by others: refused.
        if not colon or not name or name != name.strip() or (key in headers and key in ("host", "cookie")):
            return None
        headers[key] = value.strip()
    try:
        parts = urlsplit("//host" + words[1])
        query = dict(parse_qsl(parts.query, max_num_fields=20))
    except ValueError:
        return None
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return Request(words[0], parts.path, query, headers, {name: value for name, _, value in pairs})
