"""Save a checkpoint: under a hidden name, to the disk, and in place by one rename.

every rank   its own part, and its part of a divided model ──┐                          ┌── returns the path
rank 0       makes a folder                                  ┴ shared part · manifest · rename · prune
             with a hidden name

If workers of an asynchronous run are lost, the others save (`participants`); the lowest of them does rank 0's part.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from syncline.checkpoint.files import (
    ABOUT,
    SHARED,
    CheckpointName,
    Manifest,
    PendingCheckpoint,
    describe_files,
    model_part_name,
    prune,
    rank_part,
    remove_leftovers,
    set_abandoned_aside,
    write_manifest,
    write_part,
)
from syncline.checkpoint.objects import (
    RunLike,
    get_rng_states,
    kind_of,
    model_tree,
    optimizer_tree,
    parameter_names,
    rng_seed,
)
from syncline.checkpoint.participants import Participants
from syncline.checkpoint.saved_model import part_tree
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SpecError
from syncline.state_trees import clone

__all__ = ["save"]

logger = logging.getLogger("syncline")


def save(folder: str | PathLike[str], *, step: int, keep: int | None = 3, **objects: Any) -> Path:
    """Save everything that is needed to continue from here, in `folder/step-…`. Every rank calls it.

    An object is a run, a module, an optimizer, anything with `state_dict()` (a scheduler, a GradScaler), or a plain
    value; its keyword is its name for `load`. The random-number states of every rank are saved too. The checkpoint is
    complete or does not exist, even if a process is killed; if a rank cannot write, every rank raises. The newest
    `keep` checkpoints stay (None: all). If training went back, checkpoints of later steps are renamed. If workers take
    different numbers of steps, as with parameter servers in an elastic job, the largest `step` counts.

    >>> import tempfile, torch
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> save(folder, step=100, model=model, epoch=3).name
    'step-00000100'
    """
    participants = Participants.to_save(objects)
    if participants.joins:  # it has not trained, and the others save what they have
        logger.info("rank %d joins an elastic job, and saves nothing before it takes part", participants.rank)
        return Path(folder) / CheckpointName(step, edition=1).name
    with participants.span("sl_checkpoint_seconds", step):
        edition: int | None = None
        try:
            while edition is None:
                step = participants.assemble(step)
                edition = participants.settle(*_attempt(_Saving(participants, Path(folder), step, objects), keep))
        finally:
            participants.release()
        return Path(folder) / CheckpointName(step, edition).name


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

    def __init__(self, participants: Participants, folder: Path, step: int, objects: dict[str, Any]) -> None:
        self.participants = participants
        self.folder = folder
        self.step = step
        self.objects = objects
        self.runs: dict[str, RunLike] = {name: value for name, value in objects.items() if kind_of(value) == "run"}
        self.random = get_rng_states()
        self.pending: PendingCheckpoint | None = None
        self.hidden = folder
        self.files: dict[str, Any] = {}
        self.run_states: dict[str, Any] = {}

    def begin(self, keep: int | None) -> None:
        """Check that all ranks save the same objects; the root makes the hidden folder; every run returns its state."""

        def work() -> dict[str, Any]:
            _check_arguments(self.step, keep, self.objects)
            self._check_divided()
            if self.participants.rank == self.participants.root:
                remove_leftovers(self.folder)
                self.pending = PendingCheckpoint(self.folder, self.step)
            kinds = {name: kind_of(value) for name, value in self.objects.items()}
            return {
                "hidden": self.pending.path.name if self.pending else "",
                "what": [self.step, sorted(kinds.items())],
            }

        replies = self.participants.run_on_all("begin a checkpoint", work)
        for rank, reply in zip(self.participants.ranks, replies, strict=True):
            if reply["what"] != replies[0]["what"]:
                raise IncompatibleError(
                    f"the ranks save different things: rank {self.participants.root} "
                    f"{_describe_reply(replies[0])}, rank {rank} {_describe_reply(reply)}"
                )
        self.hidden = self.folder / replies[0]["hidden"]
        # Not in a task: a strategy may need the other ranks for its state.
        self.participants.run_on_all("get the state of its runs", self._ask_runs)

    def _check_divided(self) -> None:
        """Refuse an optimizer that has only this worker's part of the parameters."""
        world = self.participants.world
        for run in [] if world is None else world.runs:
            if not isinstance(run, RunLike) or run.model_part() is None:
                continue
            for name, value in self.objects.items():
                if value is run.optimizer or value is run.model:
                    raise IncompatibleError(
                        f"{name} is divided over the workers by {run.strategy!r}'s run: save the run, as "
                        "sl.save(folder, step=step, run=run), which includes it"
                    )

    def _ask_runs(self) -> None:
        for name, run in self.runs.items():
            state = run.state_dict()
            # A copy: inside agreed() the tensors that these share with the model have other values.
            first = self.participants.rank == self.participants.root
            part = run.model_part()
            self.run_states[name] = {
                "local": state["local"],
                "shared": clone(state["shared"]) if first else None,
                "part": clone(state["part"]) if part is not None and part.writes else None,
            }

    def write_own_part(self) -> None:
        """Every rank writes its own part, and learns the files of all ranks."""

        def work() -> dict[str, Any]:
            part = rank_part(self.participants.rank)
            local = {name: state["local"] for name, state in self.run_states.items()}
            write_part(self.hidden / part, {"random": self.random, "runs": local}, part)
            return describe_files(self.hidden, part)

        for files in self.participants.run_in_task("write its part of the checkpoint", work):
            self.files |= files

    def write_shared_part(self, keep: int | None) -> int:
        """The root writes the shared part and the manifest, and renames the checkpoint. Returns its edition."""

        def work() -> int:
            if self.pending is None:
                return 0
            models: dict[str, Any] = {name: run.model for name, run in self.runs.items() if run.model_part() is None}
            models |= {name: value for name, value in self.objects.items() if kind_of(value) == "module"}
            for name, model in models.items():
                write_part(self.hidden / model_part_name(name), model_tree(model), "")
                self.files |= describe_files(self.hidden, model_part_name(name))
            write_part(self.hidden / SHARED, self._shared_tree(), "")
            self.files |= describe_files(self.hidden, SHARED)
            self._check_parts()
            write_manifest(self.hidden, Manifest(self.step, self.participants.size, self.files))
            set_abandoned_aside(self.folder, self.step, self.participants.resumed.get(self.folder.resolve()))
            edition = self.pending.commit()
            self.participants.resumed.pop(self.folder.resolve(), None)
            return edition

        with ExitStack() as stack:
            for run in self.runs.values():
                stack.enter_context(run.saving())
            if any(run.model_part() is not None for run in self.runs.values()):
                for files in self.participants.run_in_task("write its part of the model", self._write_model_parts):
                    self.files |= files
            edition = int(self.participants.run_in_task("write the shared part of the checkpoint", work)[0])
        self.participants.resumed.pop(self.folder.resolve(), None)
        if self.pending is not None:
            prune(self.folder, CheckpointName(self.step, edition), keep)
        return edition

    def _write_model_parts(self) -> dict[str, Any]:
        """Write this worker's parts of models that no worker has as a whole. Returns their files."""
        files: dict[str, Any] = {}
        for name, run in self.runs.items():
            part = run.model_part()
            if part is not None and part.writes:
                folder = model_part_name(name, part.number)
                tree = part_tree(part, run.model, run.optimizer, parameter_names(run.model))
                write_part(self.hidden / folder, {**tree, "state": self.run_states[name]["part"]}, "")
                files |= describe_files(self.hidden, folder)
        return files

    def _shared_tree(self) -> dict[str, Any]:
        """Every object's state by its name, so that an error reads "scheduler.lr_lambdas[0] is a function"."""
        states: dict[str, Any] = {}
        for name, value in self.objects.items():
            if isinstance(value, RunLike):
                states[name] = {"shared": self.run_states[name]["shared"]}
                if value.model_part() is None:
                    states[name]["optimizer"] = optimizer_tree(value.optimizer, parameter_names(value.model))
            elif kind_of(value) == "optimizer":
                states[name] = optimizer_tree(value, {})
            elif kind_of(value) == "stateful":
                states[name] = value.state_dict()
            elif kind_of(value) == "value":
                states[name] = value
        about = {name: [kind_of(value), type(value).__qualname__] for name, value in self.objects.items()}
        return {**states, ABOUT: {"objects": about, "seed": rng_seed(self.random)}}

    def _check_parts(self) -> None:
        for name, written in self.files.items():
            path = self.hidden / name
            if not path.exists() or path.stat().st_size != written["bytes"]:
                raise ProtocolError(
                    f"rank {self.participants.root} does not see {path} as it was written: the folder must be on a "
                    "file system that all ranks share"
                )

    def give_up(self) -> None:
        """Remove the files of this attempt. If this rank dies before, the next attempt removes them."""
        self.participants.cancel()
        if self.pending is not None:
            self.pending.discard()


def _check_arguments(step: Any, keep: Any, objects: dict[str, Any]) -> None:
    if type(step) is not int or step < 0:
        raise SpecError(f"step={step!r} is not a number of steps: 0, 1, 2, …")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise SpecError(f"keep={keep!r} is not a number of checkpoints: 1, 2, …, or None for all")
    for name in objects:
        if not name.isidentifier():
            raise SpecError(f"{name!r} is no name for something in a checkpoint: letters, digits and underscores")


def _describe_reply(reply: dict[str, Any]) -> str:
    step, kinds = reply["what"]
    return f"step {step} with {', '.join(f'{name} ({kind})' for name, kind in kinds) or 'nothing'}"
