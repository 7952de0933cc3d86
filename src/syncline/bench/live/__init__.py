"""The live view: follows a race or a training in a browser, on this machine alone.

```text
log.jsonl ─► tail ─► series, heat ─► run ─┐
registry.jsonl ─► tail ───────────────────┴─► feed ─► server ─► static/
```

Files are read when the page asks, and only what is new in them.
"""

from __future__ import annotations

from syncline.bench.live.feed import Feed, newest_run, open_feed
from syncline.bench.live.server import Server, serve

__all__ = ["Feed", "Server", "newest_run", "open_feed", "serve"]
