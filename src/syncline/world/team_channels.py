"""The channels of a team of an elastic job, and their preparation while the present team still trains.

New connections take much longer than a step. So the members connect to a newcomer in the background, and change to the
new channels between two steps, when all of them are connected::

    member 0    step 7   step 8   step 9 │ step 10   with the newcomer
    member 1    step 7   step 8   step 9 │ step 10
      in the background  ├── connect ──┤ │ the state ─┐
    newcomer             ├── connect ──┤ │            └► step 10
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.errors import PeerLostError, SynclineError
from syncline.runtime import Task
from syncline.state_trees import packed_bytes, unpack
from syncline.transports import TeamConnector, Transport

__all__ = [
    "Introducer",
    "Introduction",
    "Preparation",
    "TeamChannels",
    "open_channels",
    "recv_state",
    "send_state",
]

logger = logging.getLogger("syncline")

CANDIDATE_KEY = "control/candidate"
FIRST_PREPARED_CHANNEL = 1 << 32
"""Channels that are prepared have numbers from here on; those of other teams have the number of the team."""
MIN_POLL_S, MAX_POLL_S = 0.002, 0.05
"""Polling interval of the store in seconds while the members gather: at first, and at most."""
STATE_PIECE_BYTES = 64 << 20
"""Largest message with state for a newcomer."""


@dataclass(frozen=True)
class Introduction:
    """What the members of a team have told each other about themselves."""

    hosts: tuple[str, ...]
    lanes: int


class Introducer(Protocol):
    """Exchanges introductions on the channel of a team."""

    def __call__(self, transport: Transport, members: Sequence[int]) -> Introduction: ...


@dataclass(frozen=True)
class TeamChannels:
    """The connected channels of a team."""

    members: tuple[int, ...]
    transport: Transport
    """The channel of the world."""
    splits: tuple[Transport, ...]
    """One channel for each communicator of the world."""
    state: Transport | None
    """The channel on which newcomers receive the state; None if the team has none."""
    introduction: Introduction

    @property
    def opened(self) -> Iterator[Transport]:
        """All channels, those that were opened last first."""
        yield from () if self.state is None else (self.state,)
        yield from reversed(self.splits)
        yield self.transport

    def close(self) -> None:
        """End the waits on all channels, and close them."""
        for transport in self.opened:
            transport.abort()
            transport.close()


def open_channels(
    connector: TeamConnector,
    members: tuple[int, ...],
    number: int,
    communicators: int,
    introduce: Introducer,
    newcomers: bool,
) -> TeamChannels:
    """Connect a team. Every member calls it; it returns when all have connected all channels."""
    transport = connector.connect(members, number)
    opened = [transport]
    try:
        for _ in range(communicators + newcomers):
            split = transport.split(range(transport.size))
            assert split is not None, "every rank is a member"
            opened.append(split)
        introduction = introduce(transport, members)  # last: it ends when all members have come to this point
    except BaseException:
        for each in reversed(opened):
            each.abort()
            each.close()
        raise
    state = opened.pop() if newcomers else None
    return TeamChannels(members, transport, tuple(opened[1:]), state, introduction)


class Preparation:
    """One member's part in connecting a future team in the background.

    The first member of the present team writes the future team, the *candidate*, into the store. The other members and
    the newcomers find it there. A loss meanwhile ends the preparation.
    """

    def __init__(self, connector: TeamConnector, member: int, number: int) -> None:
        """`number` is that of the candidate, the same at all members and never used again."""
        self.number = number
        self.members: tuple[int, ...] = ()
        """The candidate, as soon as it is known."""
        self.failed = False
        self.communicators = 0
        """The communicators for which it makes channels."""
        self._connector, self._member = connector, member
        self._channels: TeamChannels | None = None
        self._abandoned = False
        self._present = 0
        self._task: Task | None = None

    @property
    def ready(self) -> bool:
        """Whether all members of the candidate are connected."""
        return self._channels is not None

    def serves(self, waiting: Sequence[int]) -> bool:
        """Whether all newcomers of the candidate are among those that wait. It fails if one of them is lost."""
        lost = self._connector.lost()
        self.failed |= any(member in lost for member in self.members)
        return set(waiting) >= set(self.members[self._present :])

    def propose(self, members: tuple[int, ...]) -> None:
        """Write the candidate into the store."""
        self._connector.store.set(self._key, json.dumps({"members": members}))

    def find(self) -> bool:
        """Whether the store has the candidate."""
        if not self.members and self._connector.store.check([self._key]):
            self.members = tuple(json.loads(self._connector.store.get(self._key))["members"])
        return bool(self.members)

    @property
    def _key(self) -> str:
        return f"{CANDIDATE_KEY}/{self.number}"

    def start(self, present: int, communicators: int, introduce: Introducer) -> None:
        """Begin to connect in the background. `present` is the number of members of the present team."""
        self.communicators, self._present = communicators, present
        self._task = self._connector.runtime.spawn(self._connect, introduce, name="prepare")

    def _connect(self, introduce: Introducer) -> None:
        channels = None
        try:
            self._wait_until(self.find, "the candidate")
            self._connector.follow(self.members)
            if len(self.members) <= self._present:
                raise PeerLostError("no newcomer waits any more")
            # A connection attempt ends only at its timeout: begin when all members are there.
            here = [f"{self._key}/here/{member}" for member in self.members]
            self._connector.store.set(f"{self._key}/here/{self._member}", "1")
            self._wait_until(lambda: self._connector.store.check(here), f"members {list(self.members)}")
            number = FIRST_PREPARED_CHANNEL + self.number
            channels = open_channels(
                self._connector, self.members, number, self.communicators, introduce, newcomers=True
            )
        except (SynclineError, RuntimeError) as error:
            logger.info("member %d has connected nothing in advance: %s", self._member, error)
        self._channels, self.failed = channels, self.failed or channels is None
        if self._abandoned:
            self.abandon()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        pause = MIN_POLL_S
        while not ready():
            lost = self._connector.lost()
            gone = [member for member in self.members if member in lost]
            if gone or self._abandoned:
                raise PeerLostError(f"no more waiting for {what}: {f'rank {gone[0]} is lost' if gone else 'given up'}")
            self._connector.runtime.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)

    def take(self, timeout_s: float) -> TeamChannels:
        """The channels, which the members with the state have connected already."""
        if self._task is not None:
            self._task.join(timeout_s)
        channels, self._channels = self._channels, None
        if channels is None:
            raise PeerLostError(f"member {self._member} could not be connected in advance to {list(self.members)}")
        return channels

    def abandon(self) -> None:
        """The team changes in another way: end the waits, and close what is connected."""
        self._abandoned = True
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.close()


def send_state(transport: Transport, newcomers: Sequence[int], packed: Sequence[tuple[bytes, Tensor]]) -> None:
    """Send packed trees to newcomers. Each calls `recv_state` as often."""
    try:
        for rank in newcomers:
            for document, buffer in packed:
                transport.send(torch.tensor([len(document)]), rank).wait()
                transport.send(torch.frombuffer(bytearray(document), dtype=torch.uint8), rank).wait()
                for start in range(0, buffer.numel(), STATE_PIECE_BYTES):
                    transport.send(buffer[start : start + STATE_PIECE_BYTES], rank).wait()
    except (SynclineError, RuntimeError) as error:  # the next operation of the team notices it too
        logger.info("rank %d could not send the state to newcomers: %s", transport.rank, error)


def recv_state(transport: Transport, source: int, device: torch.device) -> Any:
    """In a newcomer: the next tree that a member sends."""
    length = torch.zeros(1, dtype=torch.int64)
    transport.recv(length, source).wait()
    document = torch.zeros(int(length), dtype=torch.uint8)
    transport.recv(document, source).wait()
    text = document.numpy().tobytes()
    buffer = torch.zeros(packed_bytes(text), dtype=torch.uint8)
    for start in range(0, buffer.numel(), STATE_PIECE_BYTES):
        transport.recv(buffer[start : start + STATE_PIECE_BYTES], source).wait()
    return unpack(text, buffer, f"the state of rank {source}", device)
