"""The `syncline` command as `Runs` starts it: ranks are forked from this process, which has imported torch.

python command.py '{"arguments": ["run", "-n", "2", "script.py"], "folder": "/tmp/…", "job": null, "where": ""}'
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from syncline.cli.main import main
from syncline.launch import start
from syncline.launch.lab import parse_lab
from syncline.launch.prefork_client import Prefork, adopt
from syncline.launch.prefork_process import serve
from syncline.launch.programs import parse_hosts


def give_prefork() -> None:
    """Fork a prefork process from this launcher. Returns only in the launcher."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()
        del sys.path[0]  # the folder of this script
        serve(theirs)
    theirs.close()
    adopt(Prefork(ours), os.environ)


def run(request: Mapping[str, Any]) -> int:
    """Run the command line of the request, or its job; return the exit code."""
    if request["job"] is None:
        return main(request["arguments"])
    job, where = start.Job(target=tuple(request["arguments"]), **request["job"]), request["where"]
    if "@" in where:
        return start.run_in_lab(job, *parse_lab(where))
    return start.run_on_hosts(job, parse_hosts(where)) if where else start.run_here(job, 2)


if __name__ == "__main__":
    received = json.loads(sys.argv[1])
    os.chdir(received["folder"])
    give_prefork()
    sys.exit(run(received))
