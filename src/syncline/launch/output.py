"""Forwards the output of workers to the terminal: whole lines, each with its rank, as soon as they are written."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

POLL_EVERY_S = 0.05
READ_BYTES = 1 << 20
"""Bytes that are read from one stream before the next; a longer line is cut."""
WRITE_BYTES = 1 << 16
FREE_EVERY_BYTES = 16 << 20
"""Bytes of a file that are read before their disk space is freed."""
READER_TIMEOUT_S = 30.0
"""Seconds at the end of a run in which the reader takes no byte, after which the rest is dropped."""


@dataclass(eq=False)
class _Stream:
    file: BinaryIO
    prefix: bytes | None
    sink: BinaryIO
    rest: bytes = b""
    """The beginning of an incomplete line."""
    position: int = 0
    end: int = 0
    """The position up to which this stream is read in the current turn."""
    freed: int = 0
    ended: bool = False
    broken: bool = False
    copy: BinaryIO | None = None
    """A file to which everything is written too, as it is."""


class OutputForwarder:
    """Reads the files that workers write, and forwards them and the launcher's own messages, in one thread.

    A slow terminal blocks only this thread, not the supervisor.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        # Unbuffered: at exit, Python waits for the lock of a buffer, which this thread may hold.
        self.out: BinaryIO = getattr(out, "raw", out)
        self.err: BinaryIO = getattr(err, "raw", err)
        self._streams: list[_Stream] = []
        self._messages: deque[bytes] = deque()
        self._written = 0
        self.lock = threading.Lock()
        """Held while output is forwarded; another holder pauses it."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: str, sink: BinaryIO, prefix: str | None, copy: str | None = None) -> None:
        """Forward what is written to a file: whole lines after `prefix`, or unchanged if `prefix` is None.

        Everything is also written to the file `copy`, unchanged, if there is one.
        """
        # Open for writing too, so that its disk space can be freed.
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed in _close()
        stream = _Stream(file, None if prefix is None else prefix.encode(), sink)
        if copy is not None:
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            stream.copy = open(copy, "wb", buffering=0)  # noqa: SIM115 - closed in _close()
        self._streams.append(stream)
        self._start_thread()

    def say(self, line: str) -> None:
        """Write a line to stderr after everything that was written so far. Does not wait for the terminal."""
        self._messages.append(f"{line}\n".encode())
        self._start_thread()

    def finish(self, prefix: str) -> None:
        """The writer with this prefix has ended: forward its incomplete line too. Does not wait for the terminal."""
        for stream in list(self._streams):
            if stream.prefix == prefix.encode():
                stream.ended = True

    def drain(self) -> None:
        """Forward everything that was written so far."""
        with self.lock:
            # Read first: output that was written before a message is forwarded before it.
            messages = len(self._messages)
            streams = [(stream, stream.ended) for stream in list(self._streams)]
            for stream, _ in streams:
                stream.end = os.fstat(stream.file.fileno()).st_size
            # In turns, and only up to the current end: a stream that is written without end does not block the others.
            waiting = [stream for stream, _ in streams]
            while waiting:
                waiting = [stream for stream in waiting if self._forward(stream)]
            for stream, ended in streams:
                if ended:
                    self._close(stream)
            for _ in range(messages):
                self._put(self.err, self._messages[0])
                self._messages.popleft()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of incomplete lines."""
        return sum(len(stream.rest) for stream in self._streams)

    def close(self) -> None:
        """Forward the rest, as long as it is read."""
        self._closed.set()
        written, since = self._written, time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL_EVERY_S)
            if self._written != written:
                written, since = self._written, time.monotonic()
            elif time.monotonic() - since > READER_TIMEOUT_S:
                return self._give_up()
        return None

    def _give_up(self) -> None:
        """Write the remaining messages to stderr: perhaps only stdout has no reader."""
        note = f"syncline: nobody has read the output for {READER_TIMEOUT_S:.0f} s: the rest is dropped; use > file\n"
        words = b"".join([*self._messages, note.encode()])
        last = threading.Thread(target=self._put, args=(self.err, words), name="last messages", daemon=True)
        last.start()
        last.join(1.0)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(POLL_EVERY_S):
            self.drain()
        self.drain()
        for stream in list(self._streams):
            self._close(stream)

    def _forward(self, stream: _Stream) -> bool:
        """Forward one chunk of a stream; return whether there is more."""
        data = stream.file.read(min(READ_BYTES, stream.end - stream.position))
        stream.position += len(data)
        self._copy(stream, data)
        if stream.prefix is None:
            self._send(stream, data)
        else:
            *lines, rest = (stream.rest + data).split(b"\n")
            stream.rest = _last_state(rest)
            if len(stream.rest) > READ_BYTES:
                lines, stream.rest = [*lines, stream.rest], b""
            self._write(stream, lines)
        if stream.position - stream.freed > FREE_EVERY_BYTES:
            # The last chunk stays: the last message of ssh may be read again.
            free_disk_space(stream.file.fileno(), stream.freed, stream.position - READ_BYTES)
            stream.freed = stream.position - READ_BYTES
        return bool(data) and stream.position < stream.end

    def _close(self, stream: _Stream) -> None:
        if stream.rest:
            self._write(stream, [stream.rest])
        stream.file.close()
        if stream.copy is not None:
            stream.copy.close()
        self._streams.remove(stream)

    def _copy(self, stream: _Stream, data: bytes) -> None:
        """Write to the copy of a stream. If that fails, for example on a full disk, the run goes on without it."""
        copy = stream.copy
        if copy is None:
            return
        try:
            while data:
                data = data[copy.write(data) :]
        except OSError as error:
            self._messages.append(f"syncline: {copy.name} is incomplete: {error.strerror}\n".encode())
            copy.close()
            stream.copy = None

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        prefix = stream.prefix or b""
        self._send(stream, b"".join(prefix + _last_state(line).rstrip(b"\r") + b"\n" for line in lines))

    def _send(self, stream: _Stream, data: bytes) -> None:
        # Broken: the reader has ended (| head); the workers continue.
        stream.broken = stream.broken or not self._put(stream.sink, data)

    def _put(self, sink: BinaryIO, data: bytes) -> bool:
        """Write all data, in pieces, so that a slow reader differs from none. Returns False if there is no reader."""
        left = memoryview(data)
        while left:
            try:
                count: int | None = sink.write(left[:WRITE_BYTES])
                sink.flush()
            except (OSError, ValueError):
                return False
            if count is None:  # a non-blocking terminal whose buffer is full
                time.sleep(POLL_EVERY_S)
            left = left[count or 0 :]
            self._written += count or 0
        return True

    def __enter__(self) -> OutputForwarder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _last_state(line: bytes) -> bytes:
    """The part of a line that a terminal would show after carriage returns, as progress bars write them.

    >>> _last_state(b"10%\\r20%"), _last_state(b"10%\\r20%\\r")
    (b'20%', b'20%\\r')
    """
    ends = line.rstrip(b"\r")
    return ends.rpartition(b"\r")[2] + (b"\r" if len(ends) < len(line) else b"")


FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2


def free_disk_space(fd: int, start: int, end: int) -> bool:
    """Free the disk space of bytes `start` to `end` of an open file; its length stays.

    Returns False if the file system does not support it.
    """
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, start, end - start) == 0)
