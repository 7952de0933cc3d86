"""Which processes are in the world: a log in the launcher's store, and the keys that admit a process.

The log only grows: `version` counts its entries, and `log/1`, `log/2`, … hold them. With a key every entry is signed,
so that an unknown process that reaches the store can neither join nor remove a member. It can waste numbers and so keep
others from joining. The launcher's records of dead processes are not signed: with a key they are only hints, which the
node compares with the messages that it receives. In an elastic job they count, as in the forming of its teams.

All nodes of a world share one CURVE key pair. The launcher distributes its secret half. libzmq refuses a connection
that cannot prove that it has the key before it reads any byte of it, and encrypts all others.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator

from syncline.environment.base import KEY_VARIABLE, check_versions
from syncline.environment.lost_after import DEAD
from syncline.errors import WorldError
from syncline.runtime import Runtime
from syncline.transports.key_value_store import KeyValueStore, StoreSilentError, death_reason, first_line
from syncline.transports.messages import WarningLog

__all__ = ["KEY_VARIABLE", "CurveSecurity", "MemberEntry", "MembershipLog", "choose_key"]

logger = logging.getLogger("syncline")

MISSING_ENTRY_TIMEOUT_S = 5.0
"""Seconds after which a missing entry is given up: its writer was lost between counting and writing."""
MAX_POST_ATTEMPTS = 3
MAX_ENTRIES_PER_READ = 10_000
MAX_MISSING_ENTRIES = 1000
"""Missing entries that are awaited at once: a process that counts up and writes nothing costs little."""
CURVE_DOMAIN = "syncline"


@dataclass(frozen=True)
class MemberEntry:
    """One entry of the log."""

    kind: Literal["joined", "left", "lost"]
    rank: int
    endpoint: str = ""
    incarnation: str = ""
    reason: str = ""
    version: str = field(default="", kw_only=True)
    """The Syncline version of a member that joined."""
    name: str = field(default="", kw_only=True)
    """The name of a member that joined after the launch, as its launcher knows it; empty if its rank tells it."""


class MembershipLog:
    """One node's view of the log."""

    def __init__(
        self,
        store: KeyValueStore,
        launcher: KeyValueStore,
        key: str | None,
        runtime: Runtime,
        name_of: Callable[[int], str] = "rank {}".format,
        trusts_launcher: bool = False,
    ) -> None:
        self._trusts_launcher = trusts_launcher or key is None
        """Whether the launcher's records of dead processes count although they are not signed."""
        self._name_of = name_of
        self.store = store
        self.launcher = launcher
        self._refusals = WarningLog(logger, runtime.now)
        self._key = None if key is None else key.encode()
        self._runtime = runtime
        self._lock = runtime.lock()
        self._read = 0
        self._last = 0
        self.missing: dict[int, float] = {}
        """Entries that were counted but not written yet, each with the time at which it was first missed."""
        self.deaths_read = (0, 0)
        self._news: list[MemberEntry] = []
        self.members: dict[int, MemberEntry] = {}
        self.gone: dict[int, str] = {}
        """By rank: why it is gone."""
        self._found_lost: set[int] = set()
        """Lost members that this node has detected and has not read in the log yet."""
        self.left: set[int] = set()
        """Ranks that are gone after a goodbye message. Messages that they sent earlier may still arrive."""
        self.hints: dict[int, tuple[float, str]] = {}
        """With a key: the ranks that have ended according to unsigned records, each with the time and the reason."""
        self.refused = 0
        self.reachable = True
        """Whether the connection to the store is open. Once broken it stays False."""
        self.answers = True
        """Whether the store answered the last call. It may be cut off, or its process stopped."""

    def name_of(self, rank: int) -> str:
        """The name of a member as its launcher knows it: "rank 3" or "server 0"."""
        entry = self.members.get(rank)
        return entry.name if entry is not None and entry.name else self._name_of(rank)

    @property
    def incomplete(self) -> bool:
        """Whether unread entries may exist: an unknown rank may be in one of them."""
        return self.reachable and (bool(self.missing) or self._read < self._last)

    def may_appear(self, rank: int) -> bool:
        """Whether an unknown rank may still appear in the log."""
        with self._lock:
            return rank not in self.members and self.incomplete

    def may_match(self, rank: int, incarnation: str) -> bool:
        """Whether a rank has this incarnation, or may turn out to have it."""
        with self._lock:  # an entry is read and its rank becomes known in one step
            entry = self.members.get(rank)
            return self.incomplete if entry is None else entry.incarnation == incarnation

    def open(self, size: int) -> None:
        """Reserve the launched ranks, 0 to size − 1. Processes that join get higher ones."""
        self.store.add("ranks", size)
        self.store.set("open", "1")

    def next_rank(self) -> int:
        """A new rank, after the launched ones are reserved."""
        self.store.get("open")
        return int(self.store.add("ranks", 1)) - 1

    def post(self, entry: MemberEntry) -> None:
        """Add an entry to the log."""
        text = json.dumps(entry.__dict__)
        line = json.dumps({"entry": text, "mac": self.sign(text)})
        for _ in range(MAX_POST_ATTEMPTS):
            start = self._runtime.now()
            number = self.store.add("version", 1)
            self.store.set(f"log/{number}", line)
            if self._runtime.now() - start < MISSING_ENTRY_TIMEOUT_S / 2:
                return
            # This process was suspended in between: the others may have given the number up.

    def close(self) -> None:
        """Make no more calls to the store."""
        self.reachable = False
        self.launcher.close()

    def news(self) -> list[MemberEntry]:
        """The entries since the last call, oldest first, also those that `refresh` has read meanwhile."""
        self.refresh()
        with self._lock:
            news, self._news = self._news, []
        return news

    def refresh(self) -> None:
        """Read the new entries."""
        with self._lock:
            if not self.reachable:
                return
            try:
                self._apply(self._read_log())
                self._apply(self._read_deaths())
                self.answers = True
            except StoreSilentError as error:
                if self.answers:
                    logger.warning("the launcher's store does not answer: no process can join meanwhile (%s)", error)
                self.answers = False
            except RuntimeError as error:
                self.reachable = False
                reason = first_line(error)[:200]
                logger.warning("the launcher's store does not answer: no process can join any more (%s)", reason)

    def _apply(self, entries: list[MemberEntry]) -> None:
        for entry in entries:
            if entry.kind == "joined":
                self.members[entry.rank] = entry
            elif entry.rank in self._found_lost:  # this node has detected it too; the first entry in the log counts
                self.gone[entry.rank] = entry.reason
                self._found_lost.discard(entry.rank)
                continue
            elif entry.rank in self.gone:
                continue  # several nodes have detected it
            else:
                self.left |= {entry.rank} if entry.kind == "left" else set()
                self.gone[entry.rank] = entry.reason
            self._news.append(entry)

    def _read_log(self) -> list[MemberEntry]:
        entries: list[MemberEntry] = []
        now = self._runtime.now()
        self._last = int(self.store.add("version", 0))
        for number, since in list(self.missing.items()):
            if self._read_entry(number, entries) or now - since > MISSING_ENTRY_TIMEOUT_S:
                del self.missing[number]
        last = min(self._last, self._read + MAX_ENTRIES_PER_READ)
        while self._read < last and len(self.missing) < MAX_MISSING_ENTRIES:
            self._read += 1
            if not self._read_entry(self._read, entries):
                self.missing[self._read] = now
        return entries

    def _read_entry(self, number: int, entries: list[MemberEntry]) -> bool:
        """Read one entry of the log; False if it is missing."""
        if not self.store.check([f"log/{number}"]):
            return False
        entry = self._decode(self.store.get(f"log/{number}"))
        if entry is not None:
            entries.append(entry)
        return True

    def _read_deaths(self) -> list[MemberEntry]:
        """The launcher's records of failed processes. Anyone who reaches the store may have written them."""
        entries = []
        count = int(self.launcher.add(DEAD, 0))
        state = (count, len(self.members))  # a record of a new member may be older than the member's entry
        if count and state != self.deaths_read:
            for rank, reason in self.deaths_of(rank for rank in list(self.members) if rank not in self.gone).items():
                if self._trusts_launcher:
                    entries.append(MemberEntry("lost", rank, reason=reason))
                else:
                    self.hints.setdefault(rank, (self._runtime.now(), reason))
            self.deaths_read = state
        return entries

    def deaths_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Which of these members have ended according to the launcher, with the reasons. They need not have joined."""
        deaths = {}
        for rank in ranks if self.launcher.add(DEAD, 0) else ():
            key = f"{DEAD}/{self.name_of(rank).removeprefix('rank ')}"
            if self.launcher.check([key]):
                deaths[rank] = death_reason(self.launcher.get(key)) or "the launcher has seen it end"
        return deaths

    def lose(self, rank: int, reason: str) -> None:
        """Record a loss that this node has detected, before the others know of it."""
        with self._lock:
            if rank not in self.gone:
                self.gone[rank] = reason
                self._found_lost.add(rank)

    def check_versions(self, launched: int = 0) -> None:
        """Refuse members that run different versions of Syncline: those present, and all of the first `launched`.

        One of these may have refused the others already, and left: all ranks report the reason.
        """
        ranks = sorted({*range(launched), *self.present()})
        check_versions({self.name_of(rank): self.members[rank].version for rank in ranks})

    def _decode(self, line: bytes) -> MemberEntry | None:
        try:
            signed: dict[str, Any] = json.loads(line)
            text = str(signed["entry"])
            if self._key is not None and not hmac.compare_digest(str(signed["mac"]), self.sign(text)):
                raise ValueError("it is not signed with this world's key")
            fields = json.loads(text)
            if fields["kind"] not in ("joined", "left", "lost") or not isinstance(fields["rank"], int):
                raise ValueError("its kind or rank is unknown")
            texts = (str(fields[name]) for name in ("endpoint", "incarnation", "reason"))
            version, name = (str(fields.get(each, "")) for each in ("version", "name"))
            return MemberEntry(fields["kind"], fields["rank"], *texts, version=version, name=name)
        except (ValueError, KeyError, TypeError) as error:
            self.refused += 1
            self._refusals.warn(f"an entry of the membership log was refused: {error}")
            return None

    def sign(self, text: str) -> str:
        return "" if self._key is None else hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def find(self, rank: int) -> MemberEntry:
        """The entry of a rank that is or was a member."""
        if rank not in self.members:
            self.refresh()
        if rank not in self.members:
            raise WorldError(f"rank {rank} is not in this world: it has ranks {sorted(self.members)}")
        return self.members[rank]

    def present(self) -> tuple[int, ...]:
        """The ranks that are present, as far as this node knows."""
        return tuple(sorted(rank for rank in self.members if rank not in self.gone))


def choose_key(address: str, key: str | None) -> str | None:
    """The world's key, from the argument or from the launcher. Between hosts a key or "none" is required."""
    key = key or os.environ.get(KEY_VARIABLE) or None
    if key == "none":
        return None
    if key is None:
        if address.startswith("127."):
            return None
        raise WorldError(
            f"between hosts ZeroMQ needs a key: start with `syncline run`, which hands one out, or set {KEY_VARIABLE} "
            'alike everywhere (python -c "import zmq; print(zmq.curve_keypair()[1].decode())"); "none" switches it off'
        )
    try:
        zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise WorldError(
            f"{KEY_VARIABLE} is not a key: 40 characters as zmq.curve_keypair() makes them are needed"
        ) from None
    return key


class CurveSecurity:
    """Admits connections that hold the key."""

    def __init__(self, context: zmq.Context[Any], key: str | None) -> None:
        self._secret = None if key is None else key.encode()
        self._public = b"" if self._secret is None else zmq.curve_public(self._secret)
        self._authenticator: ThreadAuthenticator | None = None
        if self._secret is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            # A separate domain, because "*" does not cover all of them.
            self._authenticator.configure_curve_callback(domain=CURVE_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether a client with this public key is admitted."""
        return key == self._public

    def configure_server(self, socket: zmq.Socket[Any]) -> None:
        """Prepare a socket that peers connect to."""
        if self._secret is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._secret
            socket.zap_domain = CURVE_DOMAIN.encode()

    def configure_client(self, socket: zmq.Socket[Any]) -> None:
        """Prepare a socket that connects to a peer."""
        if self._secret is not None:
            socket.curve_serverkey = self._public
            socket.curve_publickey = self._public
            socket.curve_secretkey = self._secret

    def close(self) -> None:
        """End the authenticator."""
        if self._authenticator is not None:
            self._authenticator.stop()
