"""`a:2,b:2`: hosts, and how many ranks each takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import SpecError

__all__ = ["HERE", "Host", "parse_hosts"]

HERE = "localhost"
"""The one name that is started without ssh."""


@dataclass(frozen=True)
class Host:
    """A host by the name that ssh knows it by."""

    name: str
    slots: int


def parse_hosts(text: str, ranks: int | None = None) -> tuple[Host, ...]:
    """The hosts of a list; where it gives no counts, `ranks` are dealt out evenly, or each host takes one.

    >>> parse_hosts("a:2,ada@b:1")
    (Host(name='a', slots=2), Host(name='ada@b', slots=1))
    >>> parse_hosts("a,b", ranks=4)
    (Host(name='a', slots=2), Host(name='b', slots=2))
    """
    found = [_parse_host(part.strip(), text) for part in text.split(",")]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"--hosts {text}: {name} is named {names.count(name)} times; give its ranks as {name}:N")
    even = 1
    if ranks is not None and all(slots is None for _, slots in found):
        even, odd = divmod(ranks, len(found))
        if odd or not even:
            raise SpecError(f"--hosts {text}: {ranks} ranks cannot be dealt evenly to {len(found)} hosts; give a:N")
    hosts = tuple(Host(name, even if slots is None else slots) for name, slots in found)
    _check_count(text, hosts, ranks)
    return hosts


def _parse_host(part: str, text: str) -> tuple[str, int | None]:
    # A name may not begin with a dash: ssh would take it for an option.
    match = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(\d+))?", part)
    if match is None:
        raise SpecError(f"--hosts {text}: {part!r} is not a host; write a:2,b:2 (name:ranks, separated by commas)")
    slots = None if match[2] is None else int(match[2])
    if slots == 0:
        raise SpecError(f"--hosts {text}: {match[1]} would take 0 ranks; leave it out")
    return match[1], slots


def _check_count(text: str, hosts: Sequence[Host], ranks: int | None) -> None:
    total = sum(host.slots for host in hosts)
    if ranks is not None and total != ranks:
        raise SpecError(f"-n {ranks} but --hosts {text} takes {total} ranks; leave -n out, or make them agree")
