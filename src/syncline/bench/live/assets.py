"""The files of the page: ours, and Plotly's script as the package plotly ships it."""

from __future__ import annotations

import gzip
import hashlib
import importlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from syncline.errors import UnsupportedError

__all__ = ["Asset", "load_assets"]

OURS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "/table.js": ("table.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
}


@dataclass(frozen=True)
class Asset:
    """A file as it is sent."""

    body: bytes
    kind: str
    cache: str = "no-cache"

    @property
    def large(self) -> bool:
        """Whether it is worth compressing: five megabytes become a quarter of that, which counts through ssh."""
        return len(self.body) > 1 << 20

    @cached_property
    def small(self) -> bytes:
        """Compressed, when it is first asked for."""
        return gzip.compress(self.body, 4, mtime=0)

    @cached_property
    def tag(self) -> str:
        """What a browser shows to learn that it has this very file already."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'


def load_assets() -> dict[str, Asset]:
    """By the path of a request."""
    here = files("syncline.bench.live").joinpath("static")
    found = {path: Asset(here.joinpath(name).read_bytes(), kind) for path, (name, kind) in OURS.items()}
    script = _plotly()
    return {**found, "/plotly.js": Asset(script, "text/javascript; charset=utf-8", "private, max-age=86400")}


def _plotly() -> bytes:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise UnsupportedError(
            "the live view draws with Plotly, which is not installed: pip install 'syncline[view]'"
        ) from None
    return str(offline.get_plotlyjs()).encode()
