"""A throw-away ssh server on the loopback interface, with keys of its own."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from syncline.testing.processes import free_port
from tests.launch.runs import wait_for

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/login.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
CLIENT = """
Host alpha beta
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/login
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
    LogLevel ERROR
Host gone
    HostName 127.0.0.1
    Port {closed}
"""


@contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """Serve until the end; what SYNCLINE_SSH has to be. Hosts alpha and beta are this machine, gone is not there."""
    assert SSHD is not None
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its privileges
    for name in ("host", "login"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder, user=getpass.getuser(), closed=free_port()))
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "server"], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(port) or server.poll() is not None, f"sshd answers at port {port}")
        assert server.poll() is None, "sshd did not start"
        yield f"ssh -F {folder}/client"
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
