"""The text of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from syncline.errors import UnsupportedError

__all__ = ["Corpus", "read_corpus"]

PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "urllib",
    "xml",
)
"""Read beside the modules of the top level."""
SHARES = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
MOST_OF_A_FILE = 1 << 16
"""Bytes: no file makes up a split by itself."""


@dataclass(frozen=True)
class Corpus:
    """Three texts of different files; `sha256` is that of all of them with their names."""

    train: bytes
    validation: bytes
    test: bytes
    files: int
    sha256: str


def read_corpus(limit: int, folder: Path | None = None) -> Corpus:
    """`limit` bytes of the library's modules, in the order of their names' hashes.

    A file goes whole to one split: the one that is furthest below its share.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, list[bytes]] = {split: [] for split in SHARES}
    sizes = dict.fromkeys(SHARES, 0)
    total = hashlib.sha256()
    files = taken = 0
    for name, path in sorted(_modules(folder), key=lambda module: hashlib.sha256(module[0].encode()).digest()):
        if taken == limit:
            break
        text = path.read_bytes()[: min(MOST_OF_A_FILE, limit - taken)]
        taken += len(text)
        files += 1
        total.update(f"{name}\0{len(text)}\0".encode())
        total.update(text)
        split = _furthest_below(sizes, taken)
        sizes[split] += len(text)
        texts[split].append(text)
    if taken < limit:
        raise UnsupportedError(
            f"the modules in {folder} have {taken:,} bytes (at most {MOST_OF_A_FILE:,} of each count), {limit:,} were "
            "asked for; write a smaller bytes=, or use a Python that has its library's source"
        )
    train, validation, test = (b"".join(texts[split]) for split in ("train", "validation", "test"))
    return Corpus(train, validation, test, files, total.hexdigest())


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    for pattern in ("*.py", *(f"{package}/**/*.py" for package in PACKAGES)):
        for path in folder.glob(pattern):
            # _sysconfigdata is written when Python is built: the paths and flags of one machine.
            if not path.name.startswith("_sysconfigdata"):
                yield path.relative_to(folder).as_posix(), path


def _furthest_below(sizes: dict[str, int], taken: int) -> str:
    return max(SHARES, key=lambda split: SHARES[split] * taken - sizes[split])
