"""A way into a lab's hosts for programs that know ssh alone, as mpiexec does."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from syncline.errors import WorldError

__all__ = ["Door"]


class Door:
    """A script that is called as ssh is, `PATH -x HOST COMMAND…`, and runs the command inside that host.

    It lies in memory, and its path leads to a descriptor of this process: like the hosts, nothing of it outlives us.
    """

    def __init__(self, ways: Mapping[str, Sequence[str]]) -> None:
        self._owner = os.getpid()
        self._fd = _keep(_script(ways))

    @property
    def path(self) -> str:
        """Where other processes find it, while this one lives."""
        return f"/proc/{self._owner}/fd/{self._fd}"

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _script(ways: Mapping[str, Sequence[str]]) -> str:
    """As ssh does, it joins the words and lets a shell take them apart again.

    The command ends with whoever called: when all of a host's processes are killed at once, the kernel may take its
    network away before the others hear of it.

    >>> print(_script({"10.0.0.2": ["nsenter", "--net=/proc/7/fd/5"]}))
    #!/bin/sh
    while case $1 in -*) true;; *) false;; esac; do shift; done
    host=$1; shift
    case $host in
    10.0.0.2) exec nsenter --net=/proc/7/fd/5 setpriv --pdeathsig KILL sh -c "exec $*";;
    esac
    echo "syncline: the lab has no host $host" >&2
    exit 255
    <BLANKLINE>
    """
    inside = 'setpriv --pdeathsig KILL sh -c "exec $*"'
    cases = [f"{shlex.quote(host)}) exec {shlex.join(way)} {inside};;" for host, way in ways.items()]
    lines = (
        "#!/bin/sh",
        "while case $1 in -*) true;; *) false;; esac; do shift; done",
        "host=$1; shift",
        "case $host in",
        *cases,
        "esac",
        'echo "syncline: the lab has no host $host" >&2',
        "exit 255",
        "",
    )
    return "\n".join(lines)


def _keep(text: str) -> int:
    """A descriptor of an executable file in memory that holds this text, and that nobody can write any more."""
    writing = -1
    try:
        writing = os.memfd_create("syncline-door")
        os.write(writing, text.encode())
        os.fchmod(writing, 0o700)
        # The kernel runs no file that somebody may still write to.
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(
            f"cannot make a way into the lab's hosts for mpiexec: {error}; /proc/sys/vm/memfd_noexec must be 0"
        ) from None
    finally:
        if writing >= 0:
            os.close(writing)
