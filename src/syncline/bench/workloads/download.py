"""Fetching a file once, checked, whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import ipaddress
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from pathlib import Path
from typing import IO

from syncline.bench.workloads.idx import unpacked
from syncline.errors import ProtocolError, SpecError, UnsupportedError

__all__ = ["check_url", "fetch"]

TIMEOUT = 30.0
"""Seconds that a server may be silent."""
PIECE = 1 << 16


def check_url(workload: str, url: str) -> str:
    """An address to fetch from: https, or http on this very machine.

    >>> check_url("fashion", "http://example.org/data")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: fashion: url 'http://example.org/data' is not https; write https://host/folder/
    """
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else urllib.parse.urlsplit("")
    loopback = False
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(parts.hostname or "").is_loopback
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and loopback)):
        raise SpecError(f"{workload}: url {url!r} is not https; write https://host/folder/")
    return url.rstrip("/") + "/"


def fetch(url: str, target: Path, sha256: str, size: int) -> None:
    """Put what `url` has at `target`. `sha256` and `size` are of the content, unpacked where it is gzipped.

    It is written aside and renamed when all of it is right: who finds `target` finds it complete.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as aside:
            part = Path(aside.name)
            try:
                _receive(url, aside, most=size + PIECE)
                aside.flush()
                os.fsync(aside.fileno())
                _check(part, url, sha256, size)
                os.replace(part, target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except urllib.error.HTTPError as error:
        error.close()
        raise UnsupportedError(f"{url} answers {error.code} {error.reason}; {_instead(target)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise UnsupportedError(
            f"{url} could not be fetched into {target.parent} ({error or type(error).__name__}; a server may "
            f"be silent for {TIMEOUT:g} s); {_instead(target)}"
        ) from None


def _receive(url: str, file: IO[bytes], most: int) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:  # noqa: S310  check_url has seen the scheme
        received = 0
        while piece := answer.read(PIECE):
            received += len(piece)
            if received > most:
                raise ProtocolError(f"{url} sends more than {most:,} bytes; it is not the file that was asked for")
            file.write(piece)


def _check(path: Path, url: str, sha256: str, size: int) -> None:
    total = hashlib.sha256()
    count = 0
    try:
        with unpacked(path) as content:
            while count <= size and (piece := content.read(PIECE)):  # a gzip bomb ends here
                total.update(piece)
                count += len(piece)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProtocolError(f"{url}: the gzip stream is cut short or damaged ({error}); try again later") from None
    if count != size or total.hexdigest() != sha256:
        found = f"{count:,} bytes" if count <= size else f"more than {size:,} bytes"
        raise ProtocolError(
            f"{url}: {found} with SHA-256 {total.hexdigest()} where {size:,} with {sha256} were due; "
            "nothing was kept: try again or name another url"
        )


def _instead(target: Path) -> str:
    return f"or put {target.name} into a folder yourself and write folder='…'"
