"""The live page: follows a race or a training run in a browser on this machine.

```text
log.jsonl ─────► run.py   RunFeed: curves, speeds, ranks × steps ─┐
registry.jsonl ───────────────────────────────────────────────────┴─► feed.py ─► server.py ─► static/
```

A request reads what is new in the files. Nothing is read without a request.
"""

from __future__ import annotations

from syncline.bench.live.feed import Feed, newest_run, open_feed
from syncline.bench.live.server import LiveServer, serve

__all__ = ["Feed", "LiveServer", "newest_run", "open_feed", "serve"]
