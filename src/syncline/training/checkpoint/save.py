"""Writing a checkpoint: aside, on the disk, and in place by one rename.

every rank   its own part ──┐                          ┌── returns the path
rank 0       makes a folder ┴ shared part · manifest · rename · prune
             aside

If workers of an asynchronous run are lost, the others save (`survivors`); the lowest of them does rank 0's part.
"""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SpecError
from syncline.state_trees import clone
from syncline.training.checkpoint import randomness
from syncline.training.checkpoint.files import describe, write_part
from syncline.training.checkpoint.folder import Attempt, Entry, prune, set_abandoned_aside, sweep
from syncline.training.checkpoint.manifest import ABOUT, SHARED, Manifest, rank_part, write_manifest
from syncline.training.checkpoint.meeting import Meeting
from syncline.training.checkpoint.objects import RunLike, kind_of, model_tree, names_of, optimizer_tree

__all__ = ["save"]


def save(folder: str | PathLike[str], *, step: int, keep: int | None = 3, **objects: Any) -> Path:
    """Keep everything that is needed to go on from here, in `folder/step-…`; every rank calls it.

    An object is a run, a module, an optimizer, anything with `state_dict()` (a scheduler, a GradScaler), or a plain
    value; its keyword is its name for `load`. The random-number states of every rank go along. The checkpoint is there
    whole or not at all, whatever happens meanwhile; if a rank cannot write, every rank raises. The newest `keep` stay,
    all with None; those of later steps, if training went back, are renamed.

    >>> import tempfile, torch
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> save(folder, step=100, model=model, epoch=3).name
    'step-00000100'
    """
    meeting = Meeting.to_save(objects)
    with meeting.span("sl_checkpoint_seconds", step):
        edition: int | None = None
        try:
            while edition is None:
                meeting.assemble()
                edition = meeting.settle(*_attempt(_Saving(meeting, Path(folder), step, objects), keep))
        finally:
            meeting.release()
        return Path(folder) / Entry(step, edition).name


def _attempt(saving: _Saving, keep: int | None) -> tuple[int | None, PeerLostError | None]:
    """The edition that was saved, or the loss of a worker that broke the attempt."""
    try:
        saving.begin(keep)
        saving.write_own_part()
        return saving.write_shared_part(keep), None
    except PeerLostError as error:
        saving.give_up()
        return None, error
    except BaseException:
        saving.give_up()
        raise


class _Saving:
    """One call of `save` on one rank."""

    def __init__(self, meeting: Meeting, folder: Path, step: int, objects: dict[str, Any]) -> None:
        self.meeting = meeting
        self.folder = folder
        self.step = step
        self.objects = objects
        self.runs: dict[str, RunLike] = {name: value for name, value in objects.items() if kind_of(value) == "run"}
        self.random = randomness.take()
        self.attempt: Attempt | None = None
        self.aside = folder
        self.files: dict[str, Any] = {}
        self.run_states: dict[str, Any] = {}

    def begin(self, keep: int | None) -> None:
        """Agree on what is saved; rank 0 makes the folder aside; every run says its state."""

        def work() -> dict[str, Any]:
            _check_arguments(self.step, keep, self.objects)
            if self.meeting.rank == self.meeting.root:
                sweep(self.folder)
                self.attempt = Attempt(self.folder, self.step)
            kinds = {name: kind_of(value) for name, value in self.objects.items()}
            return {"aside": self.attempt.path.name if self.attempt else "", "what": [self.step, sorted(kinds.items())]}

        notes = self.meeting.at_once("begin a checkpoint", work)
        for rank, note in zip(self.meeting.ranks, notes, strict=True):
            if note["what"] != notes[0]["what"]:
                raise IncompatibleError(
                    f"the ranks save different things: rank {self.meeting.root} {_told(notes[0])}, rank {rank} "
                    f"{_told(note)}"
                )
        self.aside = self.folder / notes[0]["aside"]
        # Not in a task: a strategy may have to ask the others for its state.
        self.meeting.at_once("say the state of its runs", self._ask_runs)

    def _ask_runs(self) -> None:
        for name, run in self.runs.items():
            state = run.state_dict()
            # Inside agreed() what these tensors share with the model would be somebody else's.
            first = self.meeting.rank == self.meeting.root
            self.run_states[name] = {"local": state["local"], "shared": clone(state["shared"]) if first else None}

    def write_own_part(self) -> None:
        """Each rank writes what is its own; all learn the files of all."""

        def work() -> dict[str, Any]:
            part = rank_part(self.meeting.rank)
            local = {name: state["local"] for name, state in self.run_states.items()}
            write_part(self.aside / part, {"random": self.random, "runs": local}, part)
            return describe(self.aside, part)

        for files in self.meeting.patiently("write its part of the checkpoint", work):
            self.files |= files

    def write_shared_part(self, keep: int | None) -> int:
        """The root writes what all agree on, seals the checkpoint and gives it its name; the edition of the step."""

        def work() -> int:
            if self.attempt is None:
                return 0
            models: dict[str, Any] = {name: run.model for name, run in self.runs.items()}
            models |= {name: value for name, value in self.objects.items() if kind_of(value) == "module"}
            for name, model in models.items():
                write_part(self.aside / f"model-{name}", model_tree(model), "")
                self.files |= describe(self.aside, f"model-{name}")
            write_part(self.aside / SHARED, self._shared_tree(), "")
            self.files |= describe(self.aside, SHARED)
            self._look_for_parts()
            write_manifest(self.aside, Manifest(self.step, self.meeting.size, self.files))
            set_abandoned_aside(self.folder, self.step, self.meeting.resumed.get(self.folder.resolve()))
            edition = self.attempt.commit()
            self.meeting.resumed.pop(self.folder.resolve(), None)
            return edition

        with ExitStack() as stack:
            for run in self.runs.values():
                stack.enter_context(run.agreed())
            edition = int(self.meeting.patiently("write the shared part of the checkpoint", work)[0])
        self.meeting.resumed.pop(self.folder.resolve(), None)
        if self.attempt is not None:
            prune(self.folder, Entry(self.step, edition), keep)
        return edition

    def _shared_tree(self) -> dict[str, Any]:
        """Every object's state under its name, so that a refusal reads "scheduler.lr_lambdas[0] is a function"."""
        states: dict[str, Any] = {}
        for name, value in self.objects.items():
            if isinstance(value, RunLike):
                optimizer = optimizer_tree(value.optimizer, names_of(value.model))
                states[name] = {"optimizer": optimizer, "shared": self.run_states[name]["shared"]}
            elif kind_of(value) == "optimizer":
                states[name] = optimizer_tree(value, {})
            elif kind_of(value) == "stateful":
                states[name] = value.state_dict()
            elif kind_of(value) == "value":
                states[name] = value
        about = {name: [kind_of(value), type(value).__qualname__] for name, value in self.objects.items()}
        return {**states, ABOUT: {"objects": about, "seed": randomness.material(self.random)}}

    def _look_for_parts(self) -> None:
        for name, told in self.files.items():
            path = self.aside / name
            if not path.exists() or path.stat().st_size != told["bytes"]:
                raise ProtocolError(
                    f"rank {self.meeting.root} does not see {path} as it was written: the folder must be on a file "
                    "system that all ranks share"
                )

    def give_up(self) -> None:
        """Leave nothing behind. Where this rank is not there to do it, the next attempt does."""
        self.meeting.abandon()
        if self.attempt is not None:
            self.attempt.discard()


def _check_arguments(step: Any, keep: Any, objects: dict[str, Any]) -> None:
    if type(step) is not int or step < 0:
        raise SpecError(f"step={step!r} is not a number of steps: 0, 1, 2, …")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise SpecError(f"keep={keep!r} is not a number of checkpoints: 1, 2, …, or None for all")
    for name in objects:
        if not name.isidentifier():
            raise SpecError(f"{name!r} is no name for something in a checkpoint: letters, digits and underscores")


def _told(note: dict[str, Any]) -> str:
    step, kinds = note["what"]
    return f"step {step} with {', '.join(f'{name} ({kind})' for name, kind in kinds) or 'nothing'}"
