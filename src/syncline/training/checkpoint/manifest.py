"""What a checkpoint says of itself, written last: a folder whose files differ from it is not one."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.errors import ProtocolError
from syncline.training.checkpoint.files import digest, read_json, sync, write_json

__all__ = ["ABOUT", "MANIFEST", "SHARED", "Manifest", "rank_part", "verify", "verify_changed", "write_manifest"]

MANIFEST = "manifest.json"
FORMAT = "syncline checkpoint"
VERSION = 1
SHARED = "shared"
ABOUT = "(about)"
"""The key beside the objects' names in the shared part: their kinds, and what new ranks are seeded from."""

_FILE = re.compile(r"(shared|model-\w+|rank-\d{5,})/[\w.-]+")


@dataclass(frozen=True)
class Manifest:
    """Which step, saved by a world of how many ranks, and every file's size and checksum."""

    step: int
    ranks: int
    """The size of the world. Ranks that were lost before it was saved have no part in it."""
    files: dict[str, dict[str, Any]]

    def has_part(self, rank: int) -> bool:
        """Whether a rank has a part of its own in it."""
        return any(name.startswith(f"{rank_part(rank)}/") for name in self.files)


def rank_part(rank: int) -> str:
    """The folder of what is one rank's own."""
    return f"rank-{rank:05d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Seal a checkpoint: everything else is on the disk already."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_json(folder / MANIFEST, {**body, "sha256": _digest(body)})
    sync(folder)


def verify(folder: Path, checksums: bool = True) -> Manifest:
    """The manifest of a checkpoint whose files are all there and as long as it says, and with the same bytes.

    Anything else is a `ProtocolError` that names the file and what differs.
    """
    manifest = _read(folder)
    found = {path.relative_to(folder).as_posix() for path in folder.glob("*/*")}
    for name in sorted(found - manifest.files.keys()):
        raise ProtocolError(f"{folder / name} is not in the manifest: it was put there by somebody else; remove it")
    for name, told in manifest.files.items():
        path = folder / name
        if name not in found or not path.is_file():
            raise ProtocolError(f"{path} is missing: {_hint(folder)}")
        size = path.stat().st_size
        if size != told["bytes"]:
            raise ProtocolError(f"{path} has {size} bytes where {told['bytes']} were written: {_hint(folder)}")
        if checksums and digest(path) != told["sha256"]:
            raise ProtocolError(f"{path} has other bytes than were written (SHA-256 differs): {_hint(folder)}")
    return manifest


def verify_changed(folder: Path) -> None:
    """As `verify`; checksums are compared only where a file was written to after the manifest, which is written last.

    A checkpoint of another version of Syncline is not checked.
    """
    told = read_json(folder / MANIFEST)
    if isinstance(told, dict) and told.get("version", VERSION) != VERSION:
        return
    sealed = (folder / MANIFEST).stat().st_mtime_ns
    changed = any(path.lstat().st_mtime_ns >= sealed for path in folder.glob("*/*"))
    verify(folder, checksums=changed)


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST
    told = read_json(path)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise ProtocolError(f"{path} is not the manifest of a checkpoint")
    if told.get("version") != VERSION:
        raise ProtocolError(f"{path} is of format version {told.get('version')}; this Syncline reads {VERSION}")
    sum_told = told.pop("sha256", None)
    if sum_told != _digest(told):
        raise ProtocolError(f"{path} has other bytes than were written (SHA-256 differs): {_hint(folder)}")
    manifest = Manifest(told["step"], told["ranks"], told["files"])
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise ProtocolError(f"{path} names a file {name!r} that no checkpoint has")
    return manifest


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hint(folder: Path) -> str:
    return f"the checkpoint {folder.name} is damaged; load another with step=, or remove it"
