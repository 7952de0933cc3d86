"""Follow a running race or training in the browser: curves, stragglers, communication. Finished ones show as well.

examples:
  syncline watch                                the newest run under runs/
  syncline watch runs/race-digits-20261115      a race, or one run of it, or a training
  syncline watch runs/a --port 8800             always at the same port

The page is for this machine alone and needs the token in the address that is printed. Ctrl-C ends the view; what it
shows goes on.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from syncline.bench.live import Server, newest_run, open_feed, serve
from syncline.errors import SpecError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument("folder", nargs="?", type=Path, help="of a race or a run; default: the newest under runs/")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if not 0 <= arguments.port <= 65535:
        raise SpecError(f"--port {arguments.port}: a port is 1 to 65535, or 0 for a free one")
    folder = arguments.folder or newest_run(Path("runs"))

    def announce(server: Server) -> None:
        print(f"watching {folder}: {server.url}", flush=True)
        there = f"{server.port}:127.0.0.1:{server.port}"
        print(f"from another machine: ssh -N -L {there} {platform.node()}, and the same address there", flush=True)
        print("Ctrl-C ends the view; what it shows goes on", flush=True)

    serve(open_feed(folder), arguments.port, announce)
    print("\nthe view has ended; what it showed was not touched", flush=True)
    return 0
