"""Follow a race or a training run in the browser: curves, stragglers, communication. Finished ones show as well.

examples:
  syncline watch                                the newest run under runs/
  syncline watch runs/race-digits-20261115      a race, one of its runs, or a training run
  syncline watch runs/a --port 8800             always at the same port

The page is served on this machine only and needs the token in the printed address. Ctrl-C ends the page, not the run.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from syncline.bench.live import LiveServer, newest_run, open_feed, serve
from syncline.errors import SpecError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, help="of a race or a run; default: the newest under runs/")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if not 0 <= arguments.port <= 65535:
        raise SpecError(f"--port {arguments.port}: a port is 1 to 65535, or 0 for a free one")
    folder = arguments.folder or newest_run(Path("runs"))

    def announce(server: LiveServer) -> None:
        print(f"watching {folder}: {server.url}", flush=True)
        tunnel = f"{server.port}:127.0.0.1:{server.port}"
        print(f"from another machine: ssh -N -L {tunnel} {platform.node()}, and the same address there", flush=True)
        print("Ctrl-C ends the page; the run continues", flush=True)

    serve(open_feed(folder), arguments.port, announce)
    print("\nthe page has ended; the run was not touched", flush=True)
    return 0
