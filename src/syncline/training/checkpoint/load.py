"""Reading a checkpoint: verify, read, check everything, and only then change anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.state_trees import clone
from syncline.training.checkpoint import randomness
from syncline.training.checkpoint.files import read_part
from syncline.training.checkpoint.folder import Entry, entries, entries_aside
from syncline.training.checkpoint.manifest import ABOUT, MANIFEST, SHARED, Manifest, rank_part, verify
from syncline.training.checkpoint.meeting import Meeting
from syncline.training.checkpoint.objects import (
    check_model,
    check_optimizer,
    kind_of,
    model_tree,
    names_of,
    optimizer_tree,
    put_model,
    put_optimizer,
)

__all__ = ["latest", "load"]

logger = logging.getLogger("syncline")


def latest(folder: str | PathLike[str]) -> int | None:
    """The step of the newest checkpoint in a folder, by its name; None where there is none.

    >>> latest("a folder that does not exist") is None
    True
    """
    found = entries(Path(folder))
    return found[-1].step if found else None


def load(
    folder: str | PathLike[str], *, step: int | None = None, verify: bool = True, **objects: Any
) -> dict[str, Any] | None:
    """Go on from the newest checkpoint in `folder`, or that of `step`, or the one that it is; every rank calls it.

    Gives the plain values that were saved, with "step"; None where there is no checkpoint. The objects go by the names
    they were saved with; a module in the place of a run takes its model alone. One that does not fit is refused before
    anything is changed. A damaged checkpoint is a `ProtocolError`, or passed over with a warning where an older good
    one exists. `verify=False` compares sizes alone, no checksums.

    >>> import tempfile, torch
    >>> from syncline.training.checkpoint import save
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> _ = save(folder, step=100, model=model, epoch=3)
    >>> load(folder, model=torch.nn.Linear(2, 1))
    {'epoch': 3, 'step': 100}
    """
    meeting = Meeting.of(objects)
    place = Path(folder)
    with meeting.span("sl_checkpoint_seconds", step):
        # Rank 0 decides for all: another rank may see a newer one, or judge another way.
        choose: Callable[[], Any] = (lambda: _choose(place, step, verify)) if meeting.rank == 0 else (lambda: None)
        chosen = meeting.patiently("find a good checkpoint", choose)[0]
        if chosen is None:
            return None
        loading = _Loading(meeting, place / chosen["name"], Manifest(**chosen["manifest"]), objects)
        meeting.patiently("read the checkpoint", loading.read)
        try:
            meeting.at_once("take over the checkpoint", loading.apply)
        except BaseException:
            loading.undo()
            raise
        loading.restore_randomness()
        if any(kind_of(value) in ("run", "optimizer") for value in objects.values()):  # loaded to continue training
            meeting.resumed[loading.path.resolve().parent] = loading.manifest.step
        return loading.values | {"step": loading.manifest.step}


def _choose(folder: Path, step: int | None, checksums: bool) -> dict[str, Any] | None:
    """The checkpoint to load: where it is below the folder, and its manifest."""
    if (folder / MANIFEST).exists():
        manifest = verify(folder, checksums)
        if step is not None and manifest.step != step:
            raise SpecError(f"{folder} is the checkpoint of step {manifest.step}, not {step}")
        return {"name": ".", "manifest": vars(manifest)}
    found = entries(folder)
    candidates = [entry for entry in reversed(found) if step is None or entry.step == step]
    if step is not None and not candidates:
        there = ", ".join(str(entry.step) for entry in found) or "none"
        aside = ", ".join(entries_aside(folder, step))
        hint = f"; of that step there is {aside}, which was set aside: load it by its path" if aside else ""
        raise SpecError(f"{folder} has no checkpoint of step {step}; there are: {there}{hint}")
    first: ProtocolError | None = None
    for entry in candidates:
        try:
            manifest = verify(folder / entry.name, checksums)
            _check_step(folder, entry, manifest)
        except ProtocolError as error:
            first = first or error
            continue
        if first is not None:
            logger.warning("%s; the checkpoint of step %d is taken instead", first, entry.step)
        return {"name": entry.name, "manifest": vars(manifest)}
    if first is not None:
        raise first
    return None


def _check_step(folder: Path, entry: Entry, manifest: Manifest) -> None:
    if manifest.step != entry.step:
        raise ProtocolError(f"{folder / entry.name} holds step {manifest.step}: somebody has renamed it")


class _Loading:
    """One call of `load` on one rank."""

    def __init__(self, meeting: Meeting, path: Path, manifest: Manifest, objects: dict[str, Any]) -> None:
        self.meeting = meeting
        self.path = path
        self.manifest = manifest
        self.objects = objects
        self.values: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.own: dict[str, Any] | None = None
        self.others: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self._undo: list[Callable[[], Any]] = []

    def read(self) -> None:
        """Read what this rank needs and check that it fits. Nothing is changed."""
        self.states = read_part(self.path / SHARED)
        self.about = self.states.pop(ABOUT)
        saved: dict[str, list[str]] = self.about["objects"]
        self.values = {name: self.states[name] for name, (kind, _) in saved.items() if kind == "value"}
        # With fewer ranks than before each takes over what some of those that are gone have kept.
        mine = range(self.meeting.rank, self.manifest.ranks, self.meeting.size)
        parts = [rank_part(rank) for rank in mine if self.manifest.has_part(rank)]  # a lost rank has none
        if parts:
            self.own, *self.others = [read_part(self.path / part) for part in parts]
            randomness.check(self.own["random"], str(self.path / parts[0]))
        for name, value in self.objects.items():
            self._check(name, value, saved)

    def _check(self, name: str, value: Any, saved: dict[str, list[str]]) -> None:
        kind = kind_of(value)
        if name not in saved:
            there = ", ".join(saved) or "nothing"
            raise IncompatibleError(f"{self.path} has nothing called {name!r}; it has: {there}")
        kind_there, class_there = saved[name]
        if kind == "value" or kind_there == "value":
            raise IncompatibleError(
                f"{name}={value!r} is saved as a {kind_there}, given as a {kind}: load takes objects with "
                "load_state_dict, and returns the plain values"
            )
        source = f"{name} in {self.path}"
        if kind == "module" and kind_there in ("module", "run"):
            self._check_model(name, value, source)
        elif kind != kind_there:
            raise IncompatibleError(f"{source} was saved as a {kind_there}, and is given as a {kind}")
        elif kind == "run":
            self._check_model(name, value.model, source)
            check_optimizer(value.optimizer, self.states[name]["optimizer"], names_of(value.model), source)
        elif kind == "optimizer":
            check_optimizer(value, self.states[name], {}, source)
        elif class_there != type(value).__qualname__:
            raise IncompatibleError(f"{source} is the state of a {class_there}, not of a {type(value).__qualname__}")

    def _check_model(self, name: str, model: nn.Module, source: str) -> None:
        self.models[name] = read_part(self.path / f"model-{name}")
        check_model(model, self.models[name], source)

    def apply(self) -> None:
        """Hand every object its state; what it had is kept until all ranks have taken theirs."""
        for name, value in self.objects.items():
            kind = kind_of(value)
            if kind == "module":
                self._change(value, model_tree, put_model, self.models[name])
            elif kind == "run":
                self._apply_run(name, value)
            elif kind == "optimizer":
                put: Callable[[Any, Any], None] = lambda target, tree: put_optimizer(target, tree, {})  # noqa: E731
                self._change(value, lambda target: optimizer_tree(target, {}), put, self.states[name])
            else:
                self._change(value, _state_of, _give_state, self.states[name])

    def _apply_run(self, name: str, run: Any) -> None:
        names = names_of(run.model)
        local = None if self.own is None else self.own["runs"][name]
        if local is not None and self.manifest.ranks != self.meeting.size:
            # The shares of the data have changed: all continue from the position of the rank that wrote it.
            local = {key: value for key, value in local.items() if key != "place"}
        state = {"shared": self.states[name]["shared"], "local": local}
        if self.others:
            state["others"] = [other["runs"][name]["strategy"] for other in self.others]

        def give(model: Any, optimizer: Any, own: Any) -> None:
            put_model(run.model, model)
            put_optimizer(run.optimizer, optimizer, names)
            # Last: the model's own part has the agreed buffers, the run's has this rank's.
            run.load_state_dict(own)

        before = [clone(each) for each in (_state_of(run), model_tree(run.model), optimizer_tree(run.optimizer, names))]
        self._undo.append(lambda: give(before[1], before[2], before[0]))
        give(self.models[name], self.states[name]["optimizer"], state)

    def _change(self, target: Any, take: Callable[[Any], Any], put: Callable[[Any, Any], Any], state: Any) -> None:
        before = clone(take(target))
        self._undo.append(lambda: put(target, before))
        put(target, state)

    def undo(self) -> None:
        """Give the objects back what they had: a rank has failed, and none may go on with another state."""
        for step in reversed(self._undo):
            step()

    def restore_randomness(self) -> None:
        if self.own is not None:
            randomness.restore(self.own["random"])
        else:
            randomness.seed_anew(self.about["seed"], self.meeting.rank, self.manifest.step)


def _state_of(target: Any) -> Any:
    return target.state_dict()


def _give_state(target: Any, state: Any) -> None:
    target.load_state_dict(state)
