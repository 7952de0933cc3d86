"""Represents one forked Python process: `python -S -E client.py SOCKET ARGUMENTS…`.

It imports few modules, because it is started for every process of the tests.
"""

import json
import os
import signal
import socket
import sys

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_STARTED_EXIT_CODE = 70


def main() -> None:
    path, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    files = [0, 1, 2]
    if "PMI_FD" in os.environ:  # the descriptor through which MPICH's launcher talks to a rank
        files.append(int(os.environ["PMI_FD"]))
    request = json.dumps(
        {"arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd(), "files": files}
    ).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(request) + 4096)
    socket.send_fds(connection, [request], files)
    pid = int(connection.recv(64) or 0)
    if not pid:
        sys.exit(NOT_STARTED_EXIT_CODE)
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    for file in files:
        os.close(file)
    code = int(connection.recv(64) or NOT_STARTED_EXIT_CODE)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
