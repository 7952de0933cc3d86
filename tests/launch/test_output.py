"""Passing output on, without any process."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncline.errors import ProtocolError
from syncline.launch import output as module
from syncline.launch.output import FREE_EVERY_BYTES, READ_BYTES, OutputForwarder, free_disk_space
from syncline.launch.process_events import ENDED, ProcessEvents, serve_store
from tests.launch.runs import WAIT_TIMEOUT_S, wait_for


class Broken(io.BytesIO):
    """A pipe whose reader has gone."""

    def write(self, data: object) -> int:
        raise BrokenPipeError


class Blocked(io.BytesIO):
    """A pipe that nobody reads, until somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def write(self, data: object) -> int:
        self.reached.set()
        assert self.released.wait(WAIT_TIMEOUT_S)
        return super().write(data)  # type: ignore[arg-type]


class Endless(io.BytesIO):
    """A terminal at which more is written whenever it shows something, though not for ever."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.fed = path, 0

    def write(self, data: object) -> int:
        if self.fed < 1000:
            self.fed += 1
            with self.path.open("ab") as file:
                file.write(b"more\n")
        return super().write(data)  # type: ignore[arg-type]


def test_lines_are_forwarded_whole(tmp_path: Path) -> None:
    out = io.BytesIO()
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as writer, OutputForwarder(out, io.BytesIO()) as output:
        output.follow(str(path), out, "[1] ")
        writer.write(b"half a ")
        output.drain()
        assert out.getvalue() == b""
        writer.write("line ±\nand".encode())
        output.drain()
        assert out.getvalue().decode() == "[1] half a line ±\n"
        writer.write(b" the end")
        output.finish("[1] ")
        output.drain()
    assert out.getvalue().decode() == "[1] half a line ±\n[1] and the end\n"


def test_output_without_prefix_is_unchanged(tmp_path: Path) -> None:
    err = io.BytesIO()
    path = tmp_path / "log"
    path.write_bytes(b"10%\r20%")
    with OutputForwarder(io.BytesIO(), err) as output:
        output.follow(str(path), err, None)
        output.drain()
        assert err.getvalue() == b"10%\r20%"


def test_closed_reader_does_not_stop_the_workers(tmp_path: Path) -> None:
    out, err = Broken(), io.BytesIO()
    for name in ("out", "err"):
        (tmp_path / name).write_text("words\n")
    with OutputForwarder(out, err) as output:
        output.follow(str(tmp_path / "out"), out, "[1] ")
        output.follow(str(tmp_path / "err"), err, "[1] ")
    assert err.getvalue() == b"[1] words\n"


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    sink = Blocked()
    yield sink
    sink.released.set()  # its thread may go


def test_blocked_reader_does_not_block_messages(tmp_path: Path, blocked: Blocked) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name}\n")
    with OutputForwarder(blocked, blocked) as output:
        output.follow(str(tmp_path / "one"), blocked, "[1] ")
        assert blocked.reached.wait(WAIT_TIMEOUT_S)
        output.follow(str(tmp_path / "two"), blocked, "[2] ")
        output.say("first words")
        output.say("last words")
        assert not blocked.released.is_set()
        assert blocked.getvalue() == b""
        blocked.released.set()
    assert blocked.getvalue() == b"[1] one\n[2] two\nfirst words\nlast words\n"


def test_reader_that_takes_nothing_times_out(tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READER_TIMEOUT_S", 0.0)
    err = io.BytesIO()
    (tmp_path / "one").write_text("one\n")
    with OutputForwarder(blocked, err) as output:
        output.follow(str(tmp_path / "one"), blocked, "[1] ")
        assert blocked.reached.wait(WAIT_TIMEOUT_S)
        output.say("rank 1 failed")
    assert blocked.getvalue() == b""
    assert err.getvalue() == (
        b"rank 1 failed\nsyncline: nobody has read the output for 0 s: the rest is dropped; use > file\n"
    )


def test_endless_stream_does_not_block_others(tmp_path: Path) -> None:
    path, other = tmp_path / "one", tmp_path / "two"
    path.write_bytes(b"x" * 99 + b"\n")
    other.write_text("two\n")
    sink = Endless(path)
    with OutputForwarder(sink, sink) as output:
        with output.lock:  # both are there when the first has its turn
            output.follow(str(path), sink, "[1] ")
            output.follow(str(other), sink, "[2] ")
            output.say("words")
        wait_for(lambda: b"words\n" in sink.getvalue(), "the launcher has its turn")
    lines = sink.getvalue().splitlines()
    assert lines.index(b"[2] two") < lines.index(b"words") < 10


def test_streams_take_turns(tmp_path: Path) -> None:
    path, other = tmp_path / "one", tmp_path / "two"
    path.write_bytes((b"x" * 1023 + b"\n") * (3 * READ_BYTES // 1024))
    other.write_text("two\n")
    out = io.BytesIO()
    with OutputForwarder(out, out) as output, output.lock:
        output.follow(str(path), out, "[1] ")
        output.follow(str(other), out, "[2] ")
        output.say("done")
    lines = out.getvalue().splitlines()
    assert lines[READ_BYTES // 1024] == b"[2] two"
    assert lines[-1] == b"done"
    assert len(lines) == 3 * READ_BYTES // 1024 + 2


def test_progress_bar_needs_no_memory(tmp_path: Path) -> None:
    out = io.BytesIO()
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"\r%6d of many" % number for number in range(300_000)))
    assert path.stat().st_size > 3 * READ_BYTES
    output = OutputForwarder(out, out)
    output.follow(str(path), out, "[1] ")
    output.drain()
    assert output.buffered_bytes == len(b"299999 of many")
    with path.open("ab") as file:
        file.write(b"\r")
    output.drain()
    assert output.buffered_bytes == len(b"299999 of many\r")
    output.close()
    assert out.getvalue() == b"[1] 299999 of many\n"


def test_long_line_is_cut(tmp_path: Path) -> None:
    out = io.BytesIO()
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 * READ_BYTES))
    with OutputForwarder(out, out) as output:
        output.follow(str(path), out, "[1] ")
        output.drain()
        assert output.buffered_bytes <= READ_BYTES
    lines = out.getvalue().splitlines()
    assert sum(len(line) - len("[1] ") for line in lines) == 5 * READ_BYTES
    assert max(map(len, lines)) <= 2 * READ_BYTES + len("[1] ")


def test_disk_space_of_read_output_is_freed(tmp_path: Path) -> None:
    line = b"x" * 1023 + b"\n"
    path = tmp_path / "log"
    path.write_bytes(line * 8)
    with path.open("r+b") as file:
        if not free_disk_space(file.fileno(), 0, 4096):
            pytest.skip(f"the file system of {tmp_path} has no holes")
    path.write_bytes(line * (2 * FREE_EVERY_BYTES // len(line)))
    out = io.BytesIO()
    with OutputForwarder(out, out) as output:
        output.follow(str(path), out, None)
        output.drain()
        assert path.stat().st_size == 2 * FREE_EVERY_BYTES
        assert path.stat().st_blocks * 512 <= FREE_EVERY_BYTES + 2 * READ_BYTES
        with path.open("ab") as file:
            file.write(b"the end\n")
    assert out.getvalue() == line * (2 * FREE_EVERY_BYTES // len(line)) + b"the end\n"


def test_a_terminal_that_does_not_block(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    (tmp_path / "one").write_bytes(b"x" * (1 << 20))
    with os.fdopen(theirs, "wb") as sink, os.fdopen(ours, "rb", buffering=0) as reader:
        output = OutputForwarder(sink, io.BytesIO())
        output.follow(str(tmp_path / "one"), output.out, None)
        found = bytearray()
        while len(found) < 1 << 20:
            found += reader.read(1 << 16)
        output.close()
    assert found == b"x" * (1 << 20)


def test_invalid_event_is_refused() -> None:
    board = ProcessEvents(serve_store("127.0.0.1"))
    board.store.set("run/ended/1", '["nonsense"]')
    board.store.add("run/ended", 1)
    with pytest.raises(
        ProtocolError, match=r"run/ended/1 in the store is not a report of an agent: b'\[\"nonsense\"\]'"
    ):
        board.read_new(ENDED)
