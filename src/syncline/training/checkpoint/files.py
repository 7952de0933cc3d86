"""Files that are on the disk when the call returns: JSON, checksums, tensors as safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.state_trees import decode, encode

__all__ = ["describe", "digest", "read_json", "read_part", "sync", "write_json", "write_part"]

STATE = "state.json"
BLOCK = 1 << 20


def write_part(folder: Path, tree: Any, name: str) -> None:
    """Keep a tree in a new folder: `state.json` beside its tensors. All of it is on the disk afterwards."""
    told, tensors = encode(tree, name)
    folder.mkdir()
    if tensors:
        _write_tensors(folder, tensors)
    write_json(folder / STATE, told)
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def read_part(folder: Path) -> Any:
    """The tree that `write_part` kept, its tensors on the CPU and owned by nobody else."""
    told = read_json(folder / STATE)
    tensors = _read_tensors(folder) if any(folder.glob("*.safetensors")) else {}
    return decode(told, tensors, str(folder / STATE))


# torch.distributed.checkpoint is imported where it is used: that takes seconds, and who saves nothing need not wait.


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Not FileSystemWriter: it pickles its metadata. no_dist: the process group, if there is one, is not ours.
    try:
        with _told_already():
            save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)
    except CheckpointException as error:  # a BaseException, wrapped around what happened
        raise _cause(error) from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    try:
        for name, told in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(told, TensorStorageMetadata)
            tensors[name] = torch.empty(told.size, dtype=told.properties.dtype)
        with _told_already():
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ProtocolError(f"the tensors in {folder} cannot be read: {_cause(error)}") from error
    except Exception as error:  # safetensors has an exception class of its own
        raise ProtocolError(f"the tensors in {folder} cannot be read: {error}") from error
    return tensors


@contextmanager
def _told_already() -> Iterator[None]:
    """Without torch's warning that it works alone, which is what `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: Any) -> BaseException:
    causes: list[BaseException] = [cause for cause, _ in error.failures.values()]
    return causes[0] if causes else RuntimeError(str(error))


def write_json(path: Path, value: Any) -> None:
    """Write and sync one JSON file, strictly: no NaN."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """What a JSON file holds, or a `ProtocolError` that names it."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is not JSON: {error}") from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ProtocolError(f"{path} is missing") from None


def describe(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a part, by its name inside the checkpoint."""
    return {
        f"{part}/{path.name}": {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted((folder / part).iterdir())
    }


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
