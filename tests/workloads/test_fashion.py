"""Fashion-MNIST: valid, invalid and missing files, and downloads from a server on the loopback interface."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.errors import ProtocolError, SynclineError, UnsupportedError
from syncline.testing.workloads import WorkloadContract
from syncline.workloads import fashion
from syncline.workloads.base import Pairs, Workload
from syncline.workloads.fashion import DEBIAN_FOLDER, FILES, Fashion, fetch, read_idx

pytestmark = pytest.mark.xdist_group("fashion")  # they share a fixture that takes long


def idx(values: torch.Tensor) -> bytes:
    header = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
    return header + values.contiguous().numpy().tobytes()


def fill(folder: Path) -> None:
    """Files with as many images as the real ones. The brightness encodes the class, the first pixels the number."""
    folder.mkdir(parents=True, exist_ok=True)
    for images, labels in (FILES[:2], FILES[2:]):
        count = images.shape[0]
        numbers = torch.arange(count)
        classes = (numbers * 7 % 10).to(torch.uint8)
        pictures = (25 * classes).view(-1, 1, 1).repeat(1, 28, 28)
        for place in range(3):
            pictures[:, 0, place] = (numbers >> (8 * place)).to(torch.uint8)
        packed = gzip.compress(idx(pictures), compresslevel=1, mtime=0)
        (folder / f"{images.name}.gz").write_bytes(packed)
        (folder / labels.name).write_bytes(idx(classes))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fashion")
    fill(folder)
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No files in any of the searched folders; the cache is in the returned folder."""
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.delenv("SYNCLINE_DATA", raising=False)
    monkeypatch.setenv("SYNCLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path


class _Made(WorkloadContract):
    kind: str
    folder: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _folder(cls, made: Path) -> None:
        cls.folder = str(made)

    @classmethod
    def make(cls) -> Workload:
        return Fashion(model=cls.kind, folder=cls.folder)


class TestMLP(_Made):
    kind = "mlp"


class TestCNN(_Made):
    kind = "cnn"


def numbers(split: Pairs) -> set[int]:
    first = split.inputs[:, 0, 0, :3].long()
    return set((first[:, 0] + (first[:, 1] << 8) + (first[:, 2] << 16)).tolist())


def test_splits_are_disjoint_and_complete(made: Path) -> None:
    splits = Fashion(folder=str(made)).splits()
    assert splits.sizes() == {"train": 50_000, "validation": 10_000, "test": 10_000}
    train, validation, test = (split for split in vars(splits).values())
    assert numbers(train).isdisjoint(numbers(validation))
    assert numbers(train) | numbers(validation) == set(range(60_000))
    assert numbers(test) == set(range(10_000))
    image, label = test[3]
    assert (image.shape, image.dtype, int(label)) == ((1, 28, 28), torch.float32, 1)
    assert image[0, 5, 5].item() == pytest.approx(25 / 255)


@pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="needs apt install dataset-fashion-mnist")
def test_files_of_debian_have_the_checksums() -> None:
    for file in FILES:
        content = gzip.decompress((DEBIAN_FOLDER / f"{file.name}.gz").read_bytes())
        assert len(content) == file.bytes
        assert hashlib.sha256(content).hexdigest() == file.sha256


def test_order_of_the_searched_folders(made: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Path:
        return Fashion().find_folder()

    with pytest.raises(UnsupportedError, match="apt install dataset-fashion-mnist") as missing:
        found()
    assert str(nowhere / "cache" / "fashion-mnist") in str(missing.value)
    (nowhere / "cache").mkdir()
    for place in (nowhere / "cache" / "fashion-mnist", nowhere / "debian"):  # from the last resort to the first
        place.symlink_to(made)
        assert found() == place
    monkeypatch.setenv("SYNCLINE_DATA", str(made))
    assert found() == made
    (nowhere / "data").mkdir()
    (nowhere / "data" / "fashion-mnist").symlink_to(made)
    monkeypatch.setenv("SYNCLINE_DATA", str(nowhere / "data"))
    assert found() == nowhere / "data" / "fashion-mnist"
    with pytest.raises(UnsupportedError, match="elsewhere"):  # who names a folder means it
        Fashion(folder=str(nowhere / "elsewhere"), download=True).splits()


GOOD = idx(torch.arange(24, dtype=torch.uint8).view(4, 3, 2))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_reads_back(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "x").write_bytes(pack(GOOD))
    assert torch.equal(read_idx(tmp_path / "x"), torch.arange(24, dtype=torch.uint8).view(4, 3, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated, 0 bytes where 4 of the magic number"),
        (GOOD[:3], "truncated, 3 bytes"),
        (GOOD[:10], "truncated, 6 bytes where 12 of sizes"),
        (GOOD[:-1], "truncated, 23 bytes where 24 for 4×3×2"),
        (GOOD + b"!", "bytes follow the 24 values"),
        (b"\x89PNG" + GOOD, "begins with 89 50 4e 47"),
        (b"\0\0\x0d\x03" + GOOD[4:], "IDX type 0x0d"),
        (b"\0\0\x08\x00" + GOOD[4:], "in 0 dimensions"),
        (b"\0\0\x08\x09" + GOOD[4:], "in 9 dimensions"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "the header says 4294967295×4294967295×4294967295 values"),
        (b"\0\0\x08\x01" + b"\0" * 4, "the header says 0 values"),
        (gzip.compress(GOOD, mtime=0)[:-9], "cut short or damaged"),
        (gzip.compress(GOOD, mtime=0)[:-6] + b"\0\0\0\0\0\0", "cut short or damaged"),
        (b"\x1f\x8b\x08\x00nonsense", "cut short or damaged"),
    ],
)
def test_idx_files_that_are_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_idx_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"nothing\.here"):
        read_idx(tmp_path / "nothing.here")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t10k-images-idx3-ubyte.gz", GOOD, r"has \(4, 3, 2\) values where \(10000, 28, 28\)"),
        ("t10k-labels-idx1-ubyte", idx(torch.full((10_000,), 10, dtype=torch.uint8)), "label 10"),
    ],
)
def test_idx_files_of_another_data_set(made: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    for path in made.iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProtocolError, match=message) as error:
        Fashion(folder=str(tmp_path)).splits()
    assert name in str(error.value)


class Server:
    """Serves files by name on the loopback interface, and stores the names of the requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                outer.asked.append(name)
                content = outer.files.get(name)
                if content is None:
                    self.send_error(404)
                    return
                cut = name.startswith("cut")
                self.send_response(200)
                self.send_header("Content-Length", str(len(content) + cut))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/data"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join(30)
    assert not thread.is_alive()


def test_a_download_is_stored(server: Server, tmp_path: Path) -> None:
    content = b"some bytes" * 1000
    server.files = {"plain": content, "packed": gzip.compress(content, mtime=0)}
    for name in server.files:
        target = tmp_path / "deep" / name
        fetch(f"{server.url}/{name}", target, hashlib.sha256(content).hexdigest(), len(content))
        assert target.read_bytes() == server.files[name]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["packed", "plain"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("missing", None, UnsupportedError, "answers 404 Not Found; or put target into a folder"),
        ("other", b"other byte", ProtocolError, "10 bytes with SHA-256 [0-9a-f]{64} where 10 with"),
        ("short", b"some", ProtocolError, "4 bytes with"),
        ("long", b"some bytes!", ProtocolError, "more than 10 bytes with"),
        ("endless", bytes(100_000), ProtocolError, "sends more than"),
        ("bomb", gzip.compress(bytes(10_000_000), mtime=0), ProtocolError, "more than 10 bytes with"),
        ("damaged", gzip.compress(b"some bytes", mtime=0)[:-4], ProtocolError, "cut short or damaged"),
        ("cut", b"some byte", ProtocolError, "9 bytes with"),
    ],
)
def test_a_wrong_download_is_removed(
    server: Server, tmp_path: Path, name: str, content: bytes | None, error: type[SynclineError], message: str
) -> None:
    if content is not None:
        server.files[name] = content
    digest = hashlib.sha256(b"some bytes").hexdigest()
    with pytest.raises(error, match=message):
        fetch(f"{server.url}/{name}", tmp_path / "target", digest, 10)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    taken = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    port = taken.server_address[1]
    taken.server_close()
    with pytest.raises(UnsupportedError, match="refused"):
        fetch(f"http://127.0.0.1:{port}/x", tmp_path / "target", "0" * 64, 10)


def test_download_only_when_asked_and_only_once(
    server: Server, made: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are not the real ones, so their checksums replace the real ones."""
    files = []
    for file in FILES:
        path = fashion.path_in(made, file)
        content = gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes()
        server.files[f"{file.name}.gz"] = path.read_bytes() if path.suffix else gzip.compress(content, mtime=0)
        digest = hashlib.sha256(content).hexdigest()
        files.append(replace(file, sha256=digest))
    monkeypatch.setattr(fashion, "FILES", tuple(files))
    with pytest.raises(UnsupportedError, match=r"fashion\(download=True\)"):
        Fashion(url=server.url).splits()
    assert server.asked == []
    for _ in range(2):
        assert Fashion(download=True, url=server.url).splits().sizes()["test"] == 10_000
    assert sorted(server.asked) == sorted(server.files)
    assert sorted(path.name for path in (nowhere / "cache" / "fashion-mnist").iterdir()) == sorted(server.files)
