"""Load a checkpoint: verify, read, check everything, and only then change anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from syncline.checkpoint.files import (
    ABOUT,
    MANIFEST,
    SHARED,
    Manifest,
    list_checkpoints,
    list_set_aside,
    rank_part,
    read_part,
    verify,
)
from syncline.checkpoint.objects import (
    RunLike,
    check_model,
    check_optimizer,
    check_rng_states,
    kind_of,
    load_model,
    load_optimizer,
    model_tree,
    optimizer_tree,
    parameter_names,
    seed_new_rank,
    set_rng_states,
)
from syncline.checkpoint.participants import Participants
from syncline.checkpoint.saved_model import SavedModel
from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.model_parts import ModelPart
from syncline.state_trees import clone

__all__ = ["latest", "load"]

logger = logging.getLogger("syncline")


def latest(folder: str | PathLike[str]) -> int | None:
    """The step of the newest checkpoint in a folder; None if there is none.

    >>> latest("a folder that does not exist") is None
    True
    """
    names = list_checkpoints(Path(folder))
    return names[-1].step if names else None


def load(
    folder: str | PathLike[str], *, step: int | None = None, verify: bool = True, **objects: Any
) -> dict[str, Any] | None:
    """Load the newest checkpoint in `folder`, or that of `step`, or `folder` itself. Every rank calls it.

    Returns the plain values that were saved, with "step"; None if there is no checkpoint. Objects have the names with
    which they were saved; a module in place of a run gets the run's model. An object that does not fit is refused
    before anything is changed. A damaged checkpoint is a `ProtocolError`, or skipped with a warning if an older good
    one exists. `verify=False` compares sizes only, no checksums.

    >>> import tempfile, torch
    >>> from syncline.checkpoint import save
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
    >>> _ = save(folder, step=100, model=model, epoch=3)
    >>> load(folder, model=torch.nn.Linear(2, 1))
    {'epoch': 3, 'step': 100}
    """
    participants = Participants.to_load(objects)
    place = Path(folder)
    with participants.span("sl_checkpoint_seconds", step):
        # Rank 0 decides for all: another rank may see other files.
        decides = participants.rank == participants.root
        choose: Callable[[], Any] = (lambda: _choose(place, step, verify)) if decides else (lambda: None)
        chosen = participants.run_in_task("find a good checkpoint", choose)[0]
        if chosen is None:
            return None
        loading = _Loading(participants, place / chosen["name"], Manifest(**chosen["manifest"]), objects)
        with ExitStack() as stack:
            for run in [value for value in objects.values() if isinstance(value, RunLike)]:
                stack.enter_context(run.loading())
            participants.run_in_task("read the checkpoint", loading.read)
            try:
                participants.run_on_all("take over the checkpoint", loading.apply)
            except BaseException:
                loading.undo()
                raise
        loading.restore_randomness()
        continues = any(kind_of(value) in ("run", "optimizer") for value in objects.values())
        if continues and not participants.joins:  # the others may have saved since
            participants.resumed[loading.path.resolve().parent] = loading.manifest.step
        return loading.values | {"step": loading.manifest.step}


def _choose(folder: Path, step: int | None, checksums: bool) -> dict[str, Any] | None:
    """The name and the manifest of the checkpoint to load."""
    if (folder / MANIFEST).exists():
        manifest = verify(folder, checksums)
        if step is not None and manifest.step != step:
            raise SpecError(f"{folder} is the checkpoint of step {manifest.step}, not {step}")
        return {"name": ".", "manifest": vars(manifest)}
    names = list_checkpoints(folder)
    candidates = [entry for entry in reversed(names) if step is None or entry.step == step]
    if step is not None and not candidates:
        there = ", ".join(str(entry.step) for entry in names) or "none"
        aside = ", ".join(list_set_aside(folder, step))
        hint = f"; of that step there is {aside}, which was renamed: load it by its path" if aside else ""
        raise SpecError(f"{folder} has no checkpoint of step {step}; there are: {there}{hint}")
    first: ProtocolError | None = None
    for entry in candidates:
        try:
            manifest = verify(folder / entry.name, checksums)
            if manifest.step != entry.step:
                raise ProtocolError(f"{folder / entry.name} has step {manifest.step}: it was renamed")
        except ProtocolError as error:
            first = first or error
            continue
        if first is not None:
            logger.warning("%s; the checkpoint of step %d is loaded instead", first, entry.step)
        return {"name": entry.name, "manifest": vars(manifest)}
    if first is not None:
        raise first
    return None


class _Loading:
    """One call of `load` on one rank."""

    def __init__(self, participants: Participants, path: Path, manifest: Manifest, objects: dict[str, Any]) -> None:
        self.participants = participants
        self.path = path
        self.manifest = manifest
        self.objects = objects
        self.values: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
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
        # With fewer ranks than before, each rank takes over the parts of some missing ranks.
        mine = range(self.participants.rank, self.manifest.ranks, self.participants.size)
        mine = range(0) if self.participants.joins else mine  # the others have them
        parts = [rank_part(rank) for rank in mine if self.manifest.has_part(rank)]  # a lost rank has none
        if parts:
            self.own, *self.others = [read_part(self.path / part) for part in parts]
            check_rng_states(self.own["random"], str(self.path / parts[0]))
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
            self._read_model(name, value, None, source)
        elif kind != kind_there:
            raise IncompatibleError(f"{source} was saved as a {kind_there}, and is given as a {kind}")
        elif kind == "run":
            self._read_run(name, value, source)
        elif kind == "optimizer":
            check_optimizer(value, self.states[name], {}, source)
        elif class_there != type(value).__qualname__:
            raise IncompatibleError(f"{source} is the state of a {class_there}, not of a {type(value).__qualname__}")

    def _read_model(self, name: str, model: nn.Module, part: ModelPart | None, source: str) -> SavedModel:
        """Read a model, or a part of it, and check that it fits."""
        state = self.states.get(name)
        saved = SavedModel(self.path, name, state.get("optimizer") if isinstance(state, dict) else None)
        names, slices = (saved.names, {}) if part is None else (part.loads, part.slices)
        self.models[name] = saved.model(names, slices)
        check_model(model, self.models[name], saved.names, source)
        return saved

    def _read_run(self, name: str, run: RunLike, source: str) -> None:
        part, names = run.model_part(), parameter_names(run.model)
        saved = self._read_model(name, run.model, part, source)
        own = {names.get(id(each), "") for group in run.optimizer.param_groups for each in group["params"]}
        self.optimizers[name] = saved.optimizer(None if part is None else own, {} if part is None else part.slices)
        elsewhere = () if part is None else set(names.values()) - own
        check_optimizer(run.optimizer, self.optimizers[name], names, source, elsewhere)
        self.parts[name] = None if part is None else saved.state(part.number)

    def apply(self) -> None:
        """Load the state of every object. The old states are copied, for `undo`."""
        for name, value in self.objects.items():
            kind = kind_of(value)
            if kind == "module":
                self._change(model_tree(value), partial(load_model, value), self.models[name])
            elif kind == "run":
                self._apply_run(name, value)
            elif kind == "optimizer":
                self._change(optimizer_tree(value, {}), partial(load_optimizer, value, names={}), self.states[name])
            else:
                self._change(value.state_dict(), value.load_state_dict, self.states[name])

    def _apply_run(self, name: str, run: Any) -> None:
        names = parameter_names(run.model)
        local = None if self.own is None else self.own["runs"][name]
        if local is not None and self.manifest.ranks != self.participants.size:
            # The shares of the data have changed: all continue from the position of the rank that wrote it.
            local = {key: value for key, value in local.items() if key != "place"}
        state = {"shared": self.states[name]["shared"], "local": local, "part": self.parts[name]}
        if self.others:
            state["others"] = [other["runs"][name]["strategy"] for other in self.others]

        def put(trees: list[Any]) -> None:
            own, model, optimizer = trees
            load_model(run.model, model)
            load_optimizer(run.optimizer, optimizer, names)
            # Last: the model's part has the agreed buffers, the run's part has this rank's.
            run.load_state_dict(own)

        part = run.model_part()
        model = model_tree(run.model)
        if part is not None:
            model = {key: value for key, value in model.items() if key in self.models[name]}
        before = [run.state_dict(), model, optimizer_tree(run.optimizer, names)]
        self._change(before, put, [state, self.models[name], self.optimizers[name]])

    def _change(self, before: Any, put: Callable[[Any], Any], state: Any) -> None:
        before = clone(before)
        self._undo.append(lambda: put(before))
        put(state)

    def undo(self) -> None:
        """Restore the old states, because a rank has failed."""
        for step in reversed(self._undo):
            step()

    def restore_randomness(self) -> None:
        if self.own is not None:
            set_rng_states(self.own["random"])
        else:
            seed_new_rank(self.about["seed"], self.participants.rank, self.manifest.step)
