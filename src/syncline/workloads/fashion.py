"""Fashion-MNIST: 70,000 images of clothes, 28×28, in ten classes (Xiao, Rasul and Vollgraf, 2017).

Files are searched in this order, and the first folder with all four is used:

1. the folder that the user names (and no other);
2. `SYNCLINE_DATA`/fashion-mnist, then `SYNCLINE_DATA`;
3. Debian's /usr/share/datasets/fashion-mnist (`apt install dataset-fashion-mnist`);
4. fashion-mnist in the user's cache (`SYNCLINE_CACHE`, else ~/.cache/syncline);
5. with `download=True` they are downloaded into that cache.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import ipaddress
import math
import os
import struct
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor, nn

from syncline.environment.base import cache_folder
from syncline.errors import ProtocolError, SpecError, UnsupportedError
from syncline.workloads.base import Defaults, Pairs, Splits, check_choice, seeded
from syncline.workloads.classification import Classification, image_cnn, mlp

__all__ = ["Fashion"]

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MIRROR_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
VALIDATION_SAMPLES = 10_000
CLASSES = 10


@dataclass(frozen=True)
class _File:
    """One of the four files. The checksum is of the unpacked content, because gzip adds a name and a time."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def bytes(self) -> int:
        """The size of the unpacked file: a magic number and the sizes of 4 bytes each, then the values."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)


FILES = (
    _File(
        "train-images-idx3-ubyte", (60_000, 28, 28), "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    _File("train-labels-idx1-ubyte", (60_000,), "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    _File(
        "t10k-images-idx3-ubyte", (10_000, 28, 28), "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    _File("t10k-labels-idx1-ubyte", (10_000,), "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
)


class Fashion(Classification):
    """Fashion-MNIST, 50,000 / 10,000 / 10,000, with the standard test split.

    >>> Fashion(model="cnn", download=True)
    fashion(model='cnn', download=True)
    """

    name = "fashion"

    def __init__(
        self, model: str = "mlp", folder: str | None = None, download: bool = False, url: str = MIRROR_URL
    ) -> None:
        self.architecture = check_choice(self.name, "model", model, ["mlp", "cnn"])
        if not isinstance(folder, (str, type(None))) or not isinstance(download, bool):
            raise SpecError(
                f"fashion: folder is a path and download True or False (folder: {folder!r}, download: {download!r})"
            )
        self.folder, self.download, self.url = folder, download, check_url(self.name, url)
        super().__init__(model=model, folder=folder, download=download, url=url)

    @property
    def defaults(self) -> Defaults:
        """SGD with momentum at a constant rate."""
        if self.architecture == "cnn":
            return Defaults(batch=64, epochs=2, learning_rate=0.05, momentum=0.9, target=0.87)
        return Defaults(batch=64, epochs=10, learning_rate=0.02, momentum=0.9, target=0.87)

    def model(self, seed: int = 0) -> nn.Module:
        """784-256-10, or two convolutions with batch norm."""
        with seeded(seed):
            return mlp(784, 256, CLASSES) if self.architecture == "mlp" else image_cnn(28, (16, 32), CLASSES, norm=True)

    def make_splits(self) -> Splits:
        """The last 10,000 training images of one fixed shuffle are for validation."""
        folder = self.find_folder()
        images, labels, test_images, test_labels = (_checked(path_in(folder, file), file) for file in FILES)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(60_000))
        train, validation = order[:-VALIDATION_SAMPLES], order[-VALIDATION_SAMPLES:]
        return Splits(
            _pairs(images[train], labels[train]),
            _pairs(images[validation], labels[validation]),
            _pairs(test_images, test_labels),
        )

    def find_folder(self) -> Path:
        places = [Path(self.folder).expanduser()] if self.folder is not None else _places()
        for place in places:
            if all(path_in(place, file).is_file() for file in FILES):
                return place
        if self.folder is None and self.download:
            cache = places[-1]
            for file in FILES:
                if not path_in(cache, file).is_file():
                    fetch(f"{self.url}{file.name}.gz", cache / f"{file.name}.gz", file.sha256, file.bytes)
            return cache
        raise UnsupportedError(
            f"{self}: no folder has all of {', '.join(file.name for file in FILES)} (each plain or .gz); looked in "
            f"{', '.join(map(str, places))}. Debian and Ubuntu: apt install dataset-fashion-mnist; elsewhere "
            "fashion(folder='…') or fashion(download=True)"
        )


def _places() -> list[Path]:
    data = os.environ.get("SYNCLINE_DATA")
    named = [Path(data) / "fashion-mnist", Path(data)] if data else []
    return [*named, DEBIAN_FOLDER, cache_folder() / "fashion-mnist"]


def path_in(folder: Path, file: _File) -> Path:
    """The packed file if it exists, else the plain one."""
    packed = folder / f"{file.name}.gz"
    return packed if packed.is_file() else folder / file.name


def _checked(path: Path, file: _File) -> Tensor:
    values = read_idx(path)
    if tuple(values.shape) != file.shape:
        raise ProtocolError(
            f"{path} has {tuple(values.shape)} values where {file.shape} are expected; is it another data set?"
        )
    if len(file.shape) == 1 and int(values.max()) >= CLASSES:
        raise ProtocolError(
            f"{path}: label {int(values.max())} where classes are 0 to {CLASSES - 1}; fetch the file again"
        )
    return values


def _pairs(images: Tensor, labels: Tensor) -> Pairs:
    return Pairs(images.unsqueeze(1), labels.long(), scale=255)


UNSIGNED_BYTE = 8
MAX_DIMENSIONS = 4
MAX_IDX_BYTES = 1 << 30
"""A header with more bytes is refused before memory is allocated."""


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes, gzipped or plain.

    The format: two zero bytes, the type 8, the number of dimensions n, n sizes (big-endian u32), the values.
    """
    try:
        with unpacked(path) as file:
            return _read(file, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProtocolError(
            f"{path}: the gzip stream is cut short or damaged ({error}); fetch the file again"
        ) from None
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be read: {error}") from None


def unpacked(path: Path) -> IO[bytes]:
    """Open a file, unpacked if its first bytes are those of gzip."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _read(file: IO[bytes], path: Path) -> Tensor:
    head = _exactly(file, 4, path, "of the magic number")
    zeros, kind, dimensions = struct.unpack(">HBB", head)
    if zeros != 0:
        raise ProtocolError(f"{path} is no IDX file: it begins with {head.hex(' ')}, not with 00 00")
    if kind != UNSIGNED_BYTE or not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ProtocolError(
            f"{path}: IDX type 0x{kind:02x} in {dimensions} dimensions; bytes (0x08) in 1 to {MAX_DIMENSIONS} are read"
        )
    shape = struct.unpack(f">{dimensions}I", _exactly(file, 4 * dimensions, path, "of sizes"))
    count = math.prod(shape)
    if not 0 < count <= MAX_IDX_BYTES:
        raise ProtocolError(
            f"{path}: the header says {'×'.join(map(str, shape))} values; 1 to {MAX_IDX_BYTES:,} are read"
        )
    values = bytearray(_exactly(file, count, path, f"for {'×'.join(map(str, shape))}"))
    if file.read(1):
        raise ProtocolError(f"{path}: bytes follow the {count:,} values of the header; fetch the file again")
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _exactly(file: IO[bytes], count: int, path: Path, what: str) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ProtocolError(f"{path}: truncated, {len(data):,} bytes where {count:,} {what} are expected")
    return data


DOWNLOAD_TIMEOUT_S = 30.0
"""Read timeout of a download."""
DOWNLOAD_CHUNK_BYTES = 1 << 16


def check_url(workload: str, url: str) -> str:
    """Check a download address: https, or http on this machine.

    >>> check_url("fashion", "http://example.org/data")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: fashion: url 'http://example.org/data' is not https; write https://host/folder/
    """
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else urllib.parse.urlsplit("")
    loopback = False
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(parts.hostname or "").is_loopback
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and loopback)):
        raise SpecError(f"{workload}: url {url!r} is not https; write https://host/folder/")
    return url.rstrip("/") + "/"


def fetch(url: str, target: Path, sha256: str, size: int) -> None:
    """Download `url` to `target`. `sha256` and `size` are those of the unpacked content.

    It is written under another name and renamed when it is verified, so that `target` is always complete.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as aside:
            part = Path(aside.name)
            try:
                _receive(url, aside, most=size + DOWNLOAD_CHUNK_BYTES)
                aside.flush()
                os.fsync(aside.fileno())
                _check(part, url, sha256, size)
                os.replace(part, target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except urllib.error.HTTPError as error:
        error.close()
        raise UnsupportedError(f"{url} answers {error.code} {error.reason}; {_instead(target)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise UnsupportedError(
            f"{url} could not be downloaded into {target.parent} ({error or type(error).__name__}; a server may "
            f"be silent for {DOWNLOAD_TIMEOUT_S:g} s); {_instead(target)}"
        ) from None


def _receive(url: str, file: IO[bytes], most: int) -> None:
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # noqa: S310  check_url has seen the scheme
        received = 0
        while piece := answer.read(DOWNLOAD_CHUNK_BYTES):
            received += len(piece)
            if received > most:
                raise ProtocolError(f"{url} sends more than {most:,} bytes; it is not the requested file")
            file.write(piece)


def _check(path: Path, url: str, sha256: str, size: int) -> None:
    total = hashlib.sha256()
    count = 0
    try:
        with unpacked(path) as content:
            while count <= size and (piece := content.read(DOWNLOAD_CHUNK_BYTES)):  # a gzip bomb ends here
                total.update(piece)
                count += len(piece)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProtocolError(f"{url}: the gzip stream is cut short or damaged ({error}); try again later") from None
    if count != size or total.hexdigest() != sha256:
        found = f"{count:,} bytes" if count <= size else f"more than {size:,} bytes"
        raise ProtocolError(
            f"{url}: {found} with SHA-256 {total.hexdigest()} where {size:,} with {sha256} are expected; "
            "nothing was kept: try again or name another url"
        )


def _instead(target: Path) -> str:
    return f"or put {target.name} into a folder yourself and write folder='…'"
