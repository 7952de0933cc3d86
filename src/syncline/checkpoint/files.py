"""The files of checkpoints: parts (JSON and tensors), the manifest, and the folder with all checkpoints of a run.

```text
checkpoints/
  step-00000100/              a checkpoint. It is complete, because it gets this name by one rename
    shared/  model-run/         parts: state.json and safetensors files
    model-run-00000/ …          the model in parts, if no worker has the whole
    rank-00000/ …               the part of each rank
    manifest.json               every file's size and SHA-256; written last
  step-00000100-2/            the same step saved again; the first one is removed afterwards
  abandoned-step-00000120/    training went back to an older checkpoint, and this one is of a later step
  damaged-step-00000090/      it was damaged when old checkpoints were counted
  .step-00000200.3f9a/        being written, or left by a process that died
  .step-00000200.3f9a.lock    held by the process that writes it; the kernel releases it when that process ends
```

Tensors are written by torch.distributed.checkpoint, in the safetensors format.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.file_lock import FileLock
from syncline.state_trees import decode, encode, tensor_names

__all__ = [
    "ABOUT",
    "MANIFEST",
    "SHARED",
    "CheckpointName",
    "Manifest",
    "PendingCheckpoint",
    "describe_files",
    "list_checkpoints",
    "list_model_parts",
    "list_set_aside",
    "model_part_name",
    "prune",
    "rank_part",
    "read_part",
    "read_structure",
    "read_tree",
    "remove_leftovers",
    "set_abandoned_aside",
    "verify",
    "write_manifest",
    "write_part",
]

logger = logging.getLogger("syncline")

STATE = "state.json"
HASH_BLOCK_BYTES = 1 << 20
MANIFEST = "manifest.json"
FORMAT = "syncline checkpoint"
VERSION = 1
SHARED = "shared"
ABOUT = "(about)"
"""The key in the shared part with the kinds of all objects, and the seed for new ranks."""

_FILE_NAME = re.compile(r"(shared|model-\w+(-\d{5,})?|rank-\d{5,})/[\w.-]+")
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_PENDING_NAME = re.compile(r"\.step-\d{8,}\.[0-9a-z]+")
ABANDONED, DAMAGED = "abandoned", "damaged"
"""Prefixes of checkpoints that `list_checkpoints` does not list."""


def write_part(folder: Path, tree: Any, name: str) -> None:
    """Write a tree into a new folder: `state.json` and its tensors. Returns when all of it is on the disk."""
    structure, tensors = encode(tree, name)
    folder.mkdir()
    if tensors:
        _write_tensors(folder, tensors)
    _write_json(folder / STATE, structure)
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def read_part(folder: Path) -> Any:
    """Read the tree of `write_part`. Its tensors are new ones on the CPU."""
    return read_tree(folder, read_structure(folder))


def read_structure(folder: Path) -> Any:
    """Read the JSON of a part, without its tensors."""
    return _read_json(folder / STATE)


def read_tree(folder: Path, structure: Any) -> Any:
    """A part's structure, or something in it, with its tensors. Other tensors are not read."""
    names = tensor_names(structure)
    return decode(structure, _read_tensors(folder, names) if names else {}, str(folder / STATE))


# torch.distributed.checkpoint is imported in the functions that use it, because the import takes seconds.


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Not FileSystemWriter, which pickles its metadata. no_dist, because a process group belongs to the user.
    try:
        with _without_warning():
            save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)
    except CheckpointException as error:  # a BaseException around the real error
        raise _cause(error) from error


def _read_tensors(folder: Path, names: set[str]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    try:
        for name, header in reader.read_metadata().state_dict_metadata.items():
            if name not in names:
                continue
            assert isinstance(header, TensorStorageMetadata)
            tensors[name] = torch.empty(header.size, dtype=header.properties.dtype)
        with _without_warning():
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ProtocolError(f"the tensors in {folder} cannot be read: {_cause(error)}") from error
    except Exception as error:  # safetensors has its own exception class
        raise ProtocolError(f"the tensors in {folder} cannot be read: {error}") from error
    return tensors


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning about `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: Any) -> BaseException:
    causes: list[BaseException] = [cause for cause, _ in error.failures.values()]
    return causes[0] if causes else RuntimeError(str(error))


def _write_json(path: Path, value: Any) -> None:
    """Write a new JSON file. NaN is an error."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)


def _read_json(path: Path) -> Any:
    """Read a JSON file. A `ProtocolError` names it."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is not JSON: {error}") from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ProtocolError(f"{path} is missing") from None


def describe_files(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a part, by its name in the checkpoint."""
    return {
        f"{part}/{path.name}": {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted((folder / part).iterdir())
    }


def _digest(path: Path) -> str:
    """The SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            total.update(block)
    return total.hexdigest()


def _fsync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Manifest:
    """The step, the number of ranks that saved it, and every file's size and checksum."""

    step: int
    ranks: int
    """The size of the world. Lost ranks have no part in the checkpoint."""
    files: dict[str, dict[str, Any]]

    def has_part(self, rank: int) -> bool:
        """Whether a rank has a part in it."""
        return any(name.startswith(f"{rank_part(rank)}/") for name in self.files)


def rank_part(rank: int) -> str:
    """The folder of a rank's part."""
    return f"rank-{rank:05d}"


def model_part_name(name: str, number: int | None = None) -> str:
    """The folder of a model, or of one of its parts."""
    return f"model-{name}" if number is None else f"model-{name}-{number:05d}"


def list_model_parts(folder: Path, name: str) -> list[Path]:
    """The folders with the parts of a model; empty if it was saved as a whole."""
    return sorted(folder.glob(f"{model_part_name(name)}-*"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest. Everything else is on the disk already."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    _write_json(folder / MANIFEST, {**body, "sha256": _json_digest(body)})
    _fsync(folder / MANIFEST)
    _fsync(folder)


def verify(folder: Path, checksums: bool = True) -> Manifest:
    """Check that all files exist, with the sizes and (with `checksums`) the bytes of the manifest. Returns it.

    Anything else is a `ProtocolError` that names the file and the difference.
    """
    manifest = _read_manifest(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.glob("*/*")}
    for name in sorted(present - manifest.files.keys()):
        raise ProtocolError(f"{folder / name} is not in the manifest: another program wrote it; remove it")
    for name, written in manifest.files.items():
        path = folder / name
        if name not in present or not path.is_file():
            raise ProtocolError(f"{path} is missing: {_hint(folder)}")
        size = path.stat().st_size
        if size != written["bytes"]:
            raise ProtocolError(f"{path} has {size} bytes where {written['bytes']} were written: {_hint(folder)}")
        if checksums and _digest(path) != written["sha256"]:
            raise ProtocolError(f"{path} has other bytes than were written (SHA-256 differs): {_hint(folder)}")
    return manifest


def _verify_changed(folder: Path) -> None:
    """As `verify`, with checksums only if a file is newer than the manifest, which is written last.

    A checkpoint of another format version is not checked.
    """
    document = _read_json(folder / MANIFEST)
    if isinstance(document, dict) and document.get("version", VERSION) != VERSION:
        return
    written_at = (folder / MANIFEST).stat().st_mtime_ns
    changed = any(path.lstat().st_mtime_ns >= written_at for path in folder.glob("*/*"))
    verify(folder, checksums=changed)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    document = _read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProtocolError(f"{path} is not the manifest of a checkpoint")
    if document.get("version") != VERSION:
        raise ProtocolError(f"{path} is of format version {document.get('version')}; this Syncline reads {VERSION}")
    if document.pop("sha256", None) != _json_digest(document):
        raise ProtocolError(f"{path} has other bytes than were written (SHA-256 differs): {_hint(folder)}")
    manifest = Manifest(document["step"], document["ranks"], document["files"])
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ProtocolError(f"{path} names a file {name!r} that no checkpoint has")
    return manifest


def _json_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hint(folder: Path) -> str:
    return f"the checkpoint {folder.name} is damaged; load another with step=, or remove it"


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The name of a checkpoint. A later edition of the same step is newer."""

    step: int
    edition: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f"-{self.edition}" if self.edition > 1 else "")

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """The opposite of `name`; None if it is no such name."""
        match = _NAME.fullmatch(name)
        return None if match is None else CheckpointName(int(match[1]), int(match[2] or 1))


def list_checkpoints(folder: Path) -> list[CheckpointName]:
    """The checkpoints in a folder, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found for name in names if (found := CheckpointName.parse(name)))


def list_set_aside(folder: Path, step: int) -> list[str]:
    """The names of abandoned and damaged checkpoints of a step."""
    name = CheckpointName(step, 1).name
    return sorted(path.name for kind in (ABANDONED, DAMAGED) for path in folder.glob(f"{kind}-{name}*"))


class PendingCheckpoint:
    """A checkpoint that is being written under a hidden name. `commit` renames it; `discard` removes it."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.step = step
        self.path = folder / f".{CheckpointName(step, 1).name}.{secrets.token_hex(6)}"
        # Before the folder is made: a folder without a lock counts as a leftover.
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"), wait=True, own=True)
        try:
            self.path.mkdir()
        except BaseException:
            self._lock.release()
            raise

    def commit(self) -> int:
        """Rename it to its final name; everything in it is on the disk. Returns its edition of the step."""
        same = [entry.edition for entry in list_checkpoints(self.folder) if entry.step == self.step]
        edition = max(same, default=0) + 1
        while True:
            target = self.folder / CheckpointName(self.step, edition).name
            try:
                os.rename(self.path, target)
            except OSError as error:  # another run has saved the same step
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                edition += 1
            else:
                break
        _fsync(self.folder)
        self._lock.release()
        return edition

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_leftovers(folder: Path) -> None:
    """Remove pending checkpoints of processes that died. A living writer holds its lock."""
    for path in folder.glob(".step-*"):
        if _PENDING_NAME.fullmatch(path.name) and not path.with_name(path.name + ".lock").exists():
            shutil.rmtree(path, ignore_errors=True)
    for lock in folder.glob(".step-*.lock"):
        pending = lock.with_suffix("")
        if not _PENDING_NAME.fullmatch(pending.name):
            continue
        try:
            handle = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(pending, ignore_errors=True)
            lock.unlink(missing_ok=True)
        except OSError:  # its writer lives, or the file system has no locks
            pass
        finally:
            os.close(handle)


def set_abandoned_aside(folder: Path, step: int, resumed: int | None = None) -> None:
    """Rename abandoned checkpoints, and warn. Called before a checkpoint of `step` is committed.

    Steps only grow during a run. So checkpoints of later steps belong to abandoned training, and `load` must not take
    them for the newest. If training was resumed from step `resumed`, that holds for all checkpoints after it.
    """
    last = step if resumed is None else min(step, resumed)
    names = _set_aside(folder, [entry for entry in list_checkpoints(folder) if entry.step > last], ABANDONED)
    if names:
        logger.warning(
            "the checkpoint of step %d is written, and %s has others of later steps than %d: training went back to an "
            "older one. They are renamed to %s: load() reads them only by their path, and nothing removes them",
            step,
            folder,
            last,
            ", ".join(names),
        )


def prune(folder: Path, written: CheckpointName, keep: int | None) -> None:
    """Remove old checkpoints: all but the newest `keep` good ones, and earlier editions of the step just written.

    A damaged one does not count: it is renamed, and an older good one stays in its place.
    """
    others = [entry for entry in list_checkpoints(folder) if entry != written]
    stale = [entry for entry in others if entry.step == written.step and entry.edition < written.edition]
    rest = [entry for entry in others if entry not in stale]
    if keep is not None and len(rest) > keep - 1:
        stale += _older_than(folder, rest, keep - 1)
    for entry in stale:
        # Renamed first: a half-removed checkpoint must not look like one.
        hidden = folder / f".{CheckpointName(entry.step, 1).name}.{secrets.token_hex(6)}"
        try:
            os.rename(folder / entry.name, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", folder / entry.name, error)


def _older_than(folder: Path, names: Sequence[CheckpointName], count: int) -> list[CheckpointName]:
    """Checkpoints older than the newest `count` good ones. Damaged ones among the newer are renamed."""
    good = 0
    for place in range(len(names) - 1, -1, -1):
        if good == count:
            return list(names[: place + 1])
        entry = names[place]
        try:
            _verify_changed(folder / entry.name)
        except ProtocolError as error:
            for name in _set_aside(folder, [entry], DAMAGED):
                logger.warning("%s; it does not count in keep, and is renamed to %s", error, name)
        except OSError:  # it cannot be read now, so it stays
            good += 1
        else:
            good += 1
    return []


def _set_aside(folder: Path, checkpoints: Sequence[CheckpointName], kind: str) -> list[str]:
    """Rename checkpoints so that `list_checkpoints` does not list them. Returns the new names."""
    names: list[str] = []
    for entry in checkpoints:
        first = name = f"{kind}-{CheckpointName(entry.step, 1).name}"
        number = 1
        while (folder / name).exists():
            number += 1
            name = f"{first}-{number}"
        try:
            os.rename(folder / entry.name, folder / name)
        except OSError as error:
            logger.warning("cannot rename the checkpoint %s: %s", folder / entry.name, error)
        else:
            names.append(name)
    return names
