"""The output of workers: whole lines, each with its rank, as soon as they are written."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

__all__ = ["Output"]

PERIOD = 0.05
CHUNK = 1 << 20


@dataclass(eq=False)
class _Stream:
    file: BinaryIO
    prefix: bytes | None
    sink: BinaryIO
    rest: bytes = b""
    """The beginning of a line whose end has not been written yet."""
    ended: bool = False
    broken: bool = False


class Output:
    """Follows files that workers write and passes them on, in one thread.

    A slow terminal holds up this thread alone, not the supervisor.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        self.out = out
        self.err = err
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: str, sink: BinaryIO, prefix: str | None) -> None:
        """Pass on what is written to a file: by whole lines after `prefix`, or as it comes where that is None."""
        stream = _Stream(open(path, "rb", buffering=0), None if prefix is None else prefix.encode(), sink)  # noqa: SIM115
        with self._lock:
            self._streams.append(stream)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def finish(self, prefix: str) -> None:
        """Its writer has ended: an unfinished line of it is passed on too. Does not wait for the terminal."""
        for stream in list(self._streams):
            if stream.prefix == prefix.encode():
                stream.ended = True

    def drain(self) -> None:
        """Pass on all that has been written so far."""
        with self._lock:
            for stream in list(self._streams):
                ended = stream.ended  # asked first: what was written before the end is then there to read
                _pass_on(stream)
                if ended:
                    self._close(stream)

    def close(self) -> None:
        """Pass on all that is left."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self.drain()
        for stream in list(self._streams):
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        if stream.rest:
            _write(stream, [stream.rest])
        stream.file.close()
        self._streams.remove(stream)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            self.drain()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pass_on(stream: _Stream) -> None:
    while True:
        data = stream.file.read(CHUNK)
        if not data:
            return
        if stream.prefix is None:
            _send(stream, data)
            continue
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        if lines:
            _write(stream, lines)


def _write(stream: _Stream, lines: list[bytes]) -> None:
    prefix = stream.prefix or b""
    # Of a line that was written over and over, as progress bars do, the last state is what a terminal would show.
    _send(stream, b"".join(prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines))


def _send(stream: _Stream, data: bytes) -> None:
    if not stream.broken:
        try:
            stream.sink.write(data)
            stream.sink.flush()
        except (OSError, ValueError):  # nobody reads any more (| head); the workers go on
            stream.broken = True
