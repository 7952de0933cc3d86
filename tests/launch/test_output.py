"""Passing output on, without any process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from syncline.errors import ProtocolError
from syncline.launch.output import Output
from syncline.launch.store import Board, serve_store


class Broken(io.BytesIO):
    """A pipe whose reader has gone."""

    def write(self, data: object) -> int:
        raise BrokenPipeError


def test_lines_are_passed_on_whole(tmp_path: Path) -> None:
    out = io.BytesIO()
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as writer, Output(out, io.BytesIO()) as output:
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


def test_some_are_passed_on_as_they_come(tmp_path: Path) -> None:
    err = io.BytesIO()
    path = tmp_path / "log"
    path.write_bytes(b"10%\r20%")
    with Output(io.BytesIO(), err) as output:
        output.follow(str(path), err, None)
        output.drain()
        assert err.getvalue() == b"10%\r20%"


def test_nobody_reads_any_more(tmp_path: Path) -> None:
    out, err = Broken(), io.BytesIO()
    for name in ("out", "err"):
        (tmp_path / name).write_text("words\n")
    with Output(out, err) as output:
        output.follow(str(tmp_path / "out"), out, "[1] ")
        output.follow(str(tmp_path / "err"), err, "[1] ")
    assert err.getvalue() == b"[1] words\n"


def test_what_is_no_report_is_refused() -> None:
    board = Board(serve_store("127.0.0.1"))
    board.store.set("run/ended/1", '["nonsense"]')
    board.store.add("run/ended", 1)
    with pytest.raises(ProtocolError, match=r"run/ended/1 in the store is no agent's report: b'\[\"nonsense\"\]'"):
        board.read_ended()
