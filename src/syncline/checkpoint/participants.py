"""The ranks that save or load together. If one of them fails, all raise its error.

If workers of an asynchronous run are lost, the others agree on which workers save, and on whether it was saved:

```text
worker 0   "saving" ──┐  "members" 0, 2      own part ──┐ shared part, manifest, rename   "saved" ──► returns
worker 1   ✝          │      ▼                          │                                     ▼
worker 2   "saving" ──┴── reads who saves ── own part ──┴────────────────────────────── reads it ──► returns
```

The control channel of an asynchronous strategy outlives any worker. The lowest worker that is not lost makes the
decisions and posts them there. If a worker is lost while it saves, the others start again.

In an elastic job in which each worker has its own pace, all exchanges go over the log of the workers that are present
(`ElasticAgreement`). Those that save are the ranks of the checkpoint, in the order of their numbers in the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import syncline.errors
from syncline.checkpoint.objects import RunLike
from syncline.control import ControlChannel, poll
from syncline.environment import detect
from syncline.errors import IncompatibleError, PeerLostError, SynclineError, UnsupportedError, WorldError
from syncline.runtime import Task
from syncline.strategies import AsynchronousRun
from syncline.world import Group, World, allgather, current_world

__all__ = ["Participants"]

HEARTBEAT_S = 5.0
"""Interval in which a rank that still reads or writes files informs the others."""
RESUMED = "checkpoints resumed"
"""The world's key of the steps from which training was resumed."""
SAVING, MEMBERS, SAVED = "saving", "members", "saved"
"""Kinds of posts: rank and attempt; attempt and ranks; attempt and the edition, or one of the two below."""
AGAIN, NEVER = 0, -1
"""Instead of an edition: a worker was lost and the others start again; or it is unknown which, and all raise."""
WORD_BITS = 48
"""Ranks in one number of a post: a float has 53 exact bits."""
MAX_WORDS = 23
"""Such numbers in one post, at most."""
CHECK_LOST_EVERY_S = 0.2
LOSS_TIMEOUT_S = 10.0
"""Time within which the launcher or the transport must report the loss that broke a save."""


class Participants:
    """The ranks of the world of the saved runs; without runs, of the current world; else this process alone.

    `ranks` are all workers, except the lost ones of an asynchronous run (`SaveAgreement`). The lowest of them, `root`,
    does what is done once.
    """

    def __init__(self, world: World | None) -> None:
        self.world = world
        self.joins = world is not None and world.elastic is not None and world.elastic.joining
        """Whether this process joins an elastic job and is not in the team yet: it saves nothing, and loads alone."""
        self.rank = 0 if world is None else world.rank
        self.size = 1 if world is None or self.joins else world.size
        """Workers of the world, with lost ones."""
        self.ranks = (self.rank,) if self.joins else tuple(range(self.size))
        self.group = None if world is None else world.everyone
        self._agreement: SaveAgreement | ElasticAgreement | None = None
        self._asynchronous_runs: list[AsynchronousRun] = []
        self._task: Task | None = None
        self.resumed = {} if world is None else world.keep(RESUMED, _ResumedSteps).steps
        """By folder: the step from which this process resumed training."""

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> Participants:
        """Find the world. Refuses a process of a launcher that has none, because each would save alone."""
        worlds = {name: value.world for name, value in objects.items() if isinstance(value, RunLike)}
        if len({id(world) for world in worlds.values()}) > 1:
            raise IncompatibleError(f"{' and '.join(worlds)} belong to different worlds; save each by itself")
        if worlds:
            return cls(next(iter(worlds.values())))
        try:
            return cls(current_world())
        except WorldError:
            size = detect().size
            if size > 1:
                raise WorldError(
                    f"this is one of {size} workers and has no world: every one of them would write the same "
                    "checkpoint; call sl.init() first, or do it before world.close()"
                ) from None
            return cls(None)

    @classmethod
    def to_save(cls, objects: Mapping[str, Any]) -> Participants:
        """As `of`, for saving: among the workers that are not lost, if the run continues without the lost ones."""
        participants = cls.of(objects)
        if participants.joins:
            return participants
        world, runs = participants.world, [value for value in objects.values() if isinstance(value, AsynchronousRun)]
        in_training = [] if world is None else [run for run in world.runs if isinstance(run, AsynchronousRun)]
        elastic = next((run for run in in_training if run.membership is not None), None)
        if elastic is not None:  # newcomers are in no team of the world
            participants._agreement = ElasticAgreement(elastic)
        elif world is not None and world.size > 1 and runs:
            participants._asynchronous_runs = runs
            channel = runs[0].control_channel()
            participants._agreement = world.keep(("checkpoints", channel), lambda: SaveAgreement(world, channel))
        elif in_training:
            in_training[0].pause_steps_for("save")
        return participants

    @classmethod
    def to_load(cls, objects: Mapping[str, Any]) -> Participants:
        """As `of`, for loading: no worker of an asynchronous run steps until all have loaded."""
        participants = cls.of(objects)
        runs = [] if participants.world is None else participants.world.runs
        in_training = [run for run in runs if isinstance(run, AsynchronousRun)]
        if in_training and not participants.joins:
            in_training[0].pause_steps_for("load")
        return participants

    @property
    def root(self) -> int:
        """The rank that writes the shared part."""
        return self.ranks[0]

    def assemble(self, step: int) -> int:
        """Agree on the ranks; every worker that is not lost calls it before each attempt to save `step`.

        Returns the step under which they save: the largest, if each worker has its own pace in an elastic job.
        """
        if isinstance(self._agreement, ElasticAgreement):
            step = self._agreement.assemble(step)
            self.rank, self.size = self._agreement.rank, len(self._agreement.members)
            self.ranks = tuple(range(self.size))
            return step
        if self._agreement is None:
            if self._elastic and self.world is not None:
                self.rank, self.size = self.world.rank, self.world.size
                self.ranks = tuple(range(self.size))
            return step
        with self._asynchronous_runs[0].idle_in_all_runs():
            self.group = self._agreement.assemble()
        self.ranks = self.group.ranks
        for run in self._asynchronous_runs:
            run.saving_team = self.group
        return step

    def release(self) -> None:
        """The save has ended, with or without success."""
        for run in self._asynchronous_runs:
            run.saving_team = None

    def settle(self, edition: int | None, error: PeerLostError | None) -> int | None:
        """The edition that an attempt has saved; None if all start again without the lost workers."""
        if self._agreement is not None:
            return self._agreement.settle(edition, error)
        if error is not None and not self._elastic:
            raise error
        return edition

    @property
    def _elastic(self) -> bool:
        """Whether the world goes on with the survivors of a loss: they save again."""
        return self.world is not None and self.world.elastic is not None

    @contextmanager
    def span(self, key: str, step: int | None) -> Iterator[None]:
        """Time a block in the world's events."""
        if self.world is None:
            yield
        else:
            with self.world.events.span(key, step=step):
                yield

    def run_on_all(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank, in this task. Returns the results in the order of `ranks`.

        The first error is raised on every rank.
        """
        outcome, error = _try(work)
        return self._settle(what, self._gather_notes(outcome), error)

    def run_in_task(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """As `run_on_all`, in a task, for work that may exceed the timeout. The ranks exchange heartbeats meanwhile.

        The work must call no collective.
        """
        if self.world is None or len(self.ranks) == 1:
            return self.run_on_all(what, work)
        results: list[tuple[dict[str, Any], Exception | None]] = []
        interval = min(HEARTBEAT_S, self.world.transport.timeout / 4)
        self._task = self.world.runtime.spawn(lambda: results.append(_try(work)), name="checkpoint")
        while True:
            done = self._task.join(interval)
            notes = self._gather_notes(results[0][0] if done else {})
            if all(notes):
                self._task = None
                return self._settle(what, notes, results[0][1])

    def cancel(self) -> None:
        """After a lost rank: wait for the end of this rank's own work, before its files are removed."""
        if self._task is not None and self.world is not None:
            self._task.join(self.world.transport.timeout)
            self._task = None

    def _gather_notes(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """One line of JSON from every rank."""
        if isinstance(self._agreement, ElasticAgreement):
            return self._agreement.gather(note)
        if self.group is None or len(self.ranks) == 1:
            return [note]
        line = bytearray(json.dumps([len(self.ranks), note]).encode() + b"\n")
        joined = allgather(torch.frombuffer(line, dtype=torch.uint8), group=self.group)
        found = [json.loads(line) for line in joined.numpy().tobytes().splitlines()]
        expected = max(ranks for ranks, _ in found)
        if expected != len(found):  # in an elastic world; some rank began before the loss
            raise PeerLostError(f"{len(found)} of {expected} workers are left in the middle of a checkpoint")
        return [note for _, note in found]

    def _settle(self, what: str, notes: list[dict[str, Any]], error: Exception | None) -> list[Any]:
        failed = [rank for rank, note in zip(self.ranks, notes, strict=True) if "error" in note]
        if not failed:
            return [note["result"] for note in notes]
        if isinstance(error, SynclineError):
            raise error
        first = notes[self.ranks.index(failed[0])]
        kind = getattr(syncline.errors, str(first["kind"]), None) if first["kind"] in syncline.errors.__all__ else None
        text = first["error"] if kind else f"{first['kind']}: {first['error']}"
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        who = f"rank {failed[0]}{others}" if self.size > 1 else "this process"
        raise (kind or SynclineError)(f"{who} could not {what}: {text}") from error


def _try(work: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"result": work()}, None
    except Exception as error:
        return {"error": str(error), "kind": type(error).__name__}, error


class _ResumedSteps:
    """By folder: the step from which training was resumed, until a checkpoint is saved there."""

    def __init__(self) -> None:
        self.steps: dict[Path, int] = {}

    def close(self) -> None:
        """Forget them; the world calls it when it closes."""
        self.steps.clear()


class SaveAgreement:
    """One worker's view of which workers save. A process has one for each channel, because it counts the attempts."""

    def __init__(self, world: World, channel: ControlChannel) -> None:
        self.world, self._channel = world, channel
        self._attempt = 0
        self._since = 0
        self._saving: dict[int, set[int]] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._saved: dict[int, int] = {}
        self._groups: dict[tuple[int, ...], Group] = {}

    def assemble(self) -> Group:
        """Wait until every worker that is not lost is ready to save. Returns the group of these workers."""
        self._attempt += 1
        attempt, rank = self._attempt, self.world.rank
        self._channel.post(SAVING, [rank, attempt])

        def known() -> bool:
            living = self._living()
            if (
                attempt not in self._members
                and living[0] == rank
                and self._saving.get(attempt, set()).issuperset(living)
            ):
                self._post(MEMBERS, [attempt, *_as_words(living, self.world.size)])
            return attempt in self._members

        self._wait("the other workers to save", known)
        members = self._members[attempt]
        if rank not in members:
            raise PeerLostError(
                f"rank {rank} waits to save, and the other workers have declared it lost: ranks {list(members)} save "
                "without it",
                peer=rank,
                pending="a checkpoint",
            )
        return self._group(members)

    def settle(self, edition: int | None, error: PeerLostError | None) -> int | None:
        """The result of an attempt, the same on every worker: the edition that was saved, or None to start again.

        `edition` is None if this worker has seen a loss, `error`, which is raised if the lost worker is unknown.
        """
        attempt, rank = self._attempt, self.world.rank
        members = self._members[attempt]

        def known() -> bool:
            living = [member for member in members if member not in self.world.lost or member == rank]
            if attempt not in self._saved and living[0] == rank:
                # The lowest worker that is left has written the shared part, or knows whether it was written.
                self._post(SAVED, [attempt, self._fate(members) if edition is None else edition])
            return attempt in self._saved

        self._wait("the other workers to say whether it is saved", known)
        fate = self._saved[attempt]
        if fate == NEVER:
            raise error or PeerLostError(
                "the checkpoint was not saved: a worker has seen a loss", pending="a checkpoint"
            )
        return None if fate == AGAIN else fate

    def close(self) -> None:
        """The world calls it when it closes; it closes the groups too."""
        self._groups.clear()

    def _living(self) -> list[int]:
        gone = self.world.lost
        return [rank for rank in range(self.world.size) if rank not in gone or rank == self.world.rank]

    def _group(self, members: tuple[int, ...]) -> Group:
        if len(members) == self.world.size:
            return self.world.everyone
        if members not in self._groups:
            self._groups[members] = self.world.group_of_survivors(members)
        return self._groups[members]

    def _fate(self, members: tuple[int, ...]) -> int:
        """After a loss: wait until the launcher or the transport reports the lost worker."""
        runtime = self.world.runtime
        until = runtime.now() + min(LOSS_TIMEOUT_S, self.world.transport.timeout)
        while not any(member in self.world.lost for member in members):
            if runtime.now() >= until:
                return NEVER
            runtime.sleep(CHECK_LOST_EVERY_S)
        return AGAIN

    def _post(self, kind: str, values: list[float]) -> None:
        """Post a decision, and read the channel. If there are two decisions, all workers take the first."""
        self._channel.post(kind, values)
        self._read()

    def _read(self) -> None:
        for post in self._channel.read_posts(self._since):
            self._since = max(self._since, post.number)
            if post.kind == SAVING:
                self._saving.setdefault(int(post.values[1]), set()).add(int(post.values[0]))
            elif post.kind == MEMBERS:
                self._members.setdefault(int(post.values[0]), _from_words(post.values[1:], self.world.size))
            elif post.kind == SAVED:
                self._saved.setdefault(int(post.values[0]), int(post.values[1]))

    def _wait(self, what: str, known: Callable[[], bool]) -> None:
        """Read the channel until `known` is true. Any post restarts the timeout."""
        runtime, timeout = self.world.runtime, self.world.transport.timeout
        since, before = runtime.now(), self._since
        for _ in poll(runtime):
            self._read()
            if known():
                return
            if self._since != before:
                since, before = runtime.now(), self._since
            if runtime.now() - since > timeout:
                here, lost = sorted(self._saving.get(self._attempt, ())), sorted(self.world.lost)
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {timeout:g} s for {what} (here: {here}, lost: {lost})",
                    pending=what,
                    seconds=runtime.now() - since,
                )


class ElasticAgreement:
    """One worker's view of which workers save, in an elastic job in which each has its own pace and others may join."""

    def __init__(self, run: AsynchronousRun) -> None:
        self._run = run
        self.members: list[int] = []
        """The numbers in the job of the workers that save."""
        self._lost = False
        """Whether one of them was lost, or has left, in this attempt."""

    @property
    def rank(self) -> int:
        """This worker's rank among those that save."""
        assert self._run.membership is not None
        return self.members.index(self._run.membership.member)

    def assemble(self, step: int) -> int:
        """Wait until every worker that is present is ready to save. Returns the largest step."""
        self._lost = False
        found = self._exchange(step if type(step) is int else None)
        self.members = sorted(found)
        return step if None in found.values() else max(found.values())

    def gather(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """The notes of all that save. If one of them is lost, or has left, all others raise a `PeerLostError`."""
        found = self._exchange(note)
        lost = [member for member in self.members if member not in found]
        if lost:
            self._lost = True
            raise PeerLostError(f"workers {lost} were lost, or have left, in the middle of a checkpoint", peer=lost[0])
        return [found[member] for member in self.members]

    def settle(self, edition: int | None, error: PeerLostError | None) -> int | None:
        """The edition that was saved, the same on every worker; None if they start again without a lost worker."""
        if error is not None and not self._lost:
            raise error
        return edition

    def _exchange(self, note: Any) -> dict[int, Any]:
        texts = self._run.exchange("save", json.dumps(note))
        return {member: json.loads(text) for member, text in texts.items()}


def _as_words(ranks: list[int], size: int) -> list[float]:
    """Ranks as numbers of a post; empty if all ranks take part.

    >>> _as_words([0, 2], 3), _as_words([0, 1, 2], 3)
    ([5.0], [])
    """
    if len(ranks) == size:
        return []
    words = [0] * -(-size // WORD_BITS)
    if len(words) > MAX_WORDS:
        raise UnsupportedError(
            f"{size - len(ranks)} of {size} workers are lost, and the others can save only in a world of at most "
            f"{MAX_WORDS * WORD_BITS} workers: resume from the latest checkpoint"
        )
    for rank in ranks:
        words[rank // WORD_BITS] |= 1 << rank % WORD_BITS
    return [float(word) for word in words]


def _from_words(words: Any, size: int) -> tuple[int, ...]:
    """
    >>> _from_words([5.0], 3), _from_words([], 2)
    ((0, 2), (0, 1))
    """
    found = [int(word) for word in words]
    if not found:
        return tuple(range(size))
    return tuple(rank for rank in range(size) if found[rank // WORD_BITS] >> rank % WORD_BITS & 1)
