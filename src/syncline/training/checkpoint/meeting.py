"""The ranks that save or load together: what one of them cannot do is told to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import syncline.errors
from syncline.environment import detect
from syncline.errors import IncompatibleError, PeerLostError, SynclineError, WorldError
from syncline.runtime import Task
from syncline.strategies import AsynchronousRun
from syncline.training.checkpoint.folder import Resumed
from syncline.training.checkpoint.objects import RunLike
from syncline.training.checkpoint.survivors import Survivors
from syncline.world import World, allgather, current_world

__all__ = ["Meeting"]

BEAT = 5.0
"""Seconds after which a rank whose disk is slow says that it is still at it."""


RESUMED = "checkpoints resumed"


class Meeting:
    """The world of the runs that are saved, else the current one, else this process alone.

    `ranks` are the ranks that take part: all workers, except in an asynchronous run of which some are lost
    (`Survivors`). The lowest of them, `root`, does what is done once.
    """

    def __init__(self, world: World | None) -> None:
        self.world = world
        self.rank = 0 if world is None else world.rank
        self.size = 1 if world is None else world.size
        """Workers of the world, lost ones too."""
        self.ranks = tuple(range(self.size))
        self.team = None if world is None else world.everyone
        self._survivors: Survivors | None = None
        self._loose: list[AsynchronousRun] = []
        self._task: Task | None = None
        self.resumed = {} if world is None else world.keep(RESUMED, Resumed).steps
        """By folder: the step from which this process resumed training."""

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> Meeting:
        """Find the world. Processes of a launcher that have none would each believe to be alone: refused."""
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
    def to_save(cls, objects: Mapping[str, Any]) -> Meeting:
        """As `of`, for saving: among the workers that are not lost, if the run continues without the lost ones."""
        meeting = cls.of(objects)
        world = meeting.world
        if world is None or world.size == 1:
            return meeting
        meeting._loose = [value for value in objects.values() if isinstance(value, AsynchronousRun)]
        if meeting._loose:
            channel = meeting._loose[0].control_channel()
            meeting._survivors = world.keep(("checkpoints", channel), lambda: Survivors(world, channel))
        return meeting

    @property
    def root(self) -> int:
        """The rank that writes what all have in common."""
        return self.ranks[0]

    def assemble(self) -> None:
        """Find out who takes part; every worker that is left calls it before each attempt to save."""
        if self._survivors is None:
            return
        self.team = self._survivors.assemble()
        self.ranks = self.team.ranks
        for run in self._loose:
            run.saving_team = self.team

    def release(self) -> None:
        """The save has ended, with or without success."""
        for run in self._loose:
            run.saving_team = None

    def settle(self, edition: int | None, error: PeerLostError | None) -> int | None:
        """The edition that an attempt has saved; None if all begin again without the workers that were lost."""
        if self._survivors is not None:
            return self._survivors.settle(edition, error)
        if error is not None:
            raise error
        return edition

    @contextmanager
    def span(self, key: str, step: int | None) -> Iterator[None]:
        """Time a block in the world's events."""
        if self.world is None:
            yield
        else:
            with self.world.events.span(key, step=step):
                yield

    def at_once(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank that takes part, here; what each returned, in the order of `ranks`.

        The first failure is raised on every rank alike.
        """
        outcome, error = _try(work)
        return self._settle(what, self._exchange(outcome), error)

    def patiently(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """As `at_once`, for work that may take longer than a wait for a peer may: in a task, while the ranks tell one
        another that they are still there. The work must call no collective.
        """
        if self.world is None or len(self.ranks) == 1:
            return self.at_once(what, work)
        kept: list[tuple[dict[str, Any], Exception | None]] = []
        beat = min(BEAT, self.world.transport.timeout / 4)
        self._task = self.world.runtime.spawn(lambda: kept.append(_try(work)), name="checkpoint")
        while True:
            done = self._task.join(beat)
            notes = self._exchange(kept[0][0] if done else {})
            if all(notes):
                self._task = None
                return self._settle(what, notes, kept[0][1])

    def abandon(self) -> None:
        """After a failure of the meeting itself: let this rank's own work end before its files are taken away."""
        if self._task is not None and self.world is not None:
            self._task.join(self.world.transport.timeout)
            self._task = None

    def _exchange(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """One line of JSON from every rank that takes part."""
        if self.team is None or len(self.ranks) == 1:
            return [note]
        line = bytearray(json.dumps(note).encode() + b"\n")
        joined = allgather(torch.frombuffer(line, dtype=torch.uint8), group=self.team)
        return [json.loads(line) for line in joined.numpy().tobytes().splitlines()]

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
