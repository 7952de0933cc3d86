"""Memory that several processes of one host share.

Rank 0 makes a file without a name (`memfd_create`) and sends its descriptor to the others; each maps it and confirms.
A file without a name is freed when the processes end, in whatever way. The size of /dev/shm, which is small in
containers, does not limit it.

    rank 0   memfd ── offer (process, descriptor, bytes, nonce) ─►  rank r   opens /proc/<process>/fd/<descriptor>
             verdict of all ◄─ whether it has it ─────────────────           and compares the nonce
             ── verdict (the first rank that failed) ────────────►           raises, as all ranks do, or maps it
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.errors import ProtocolError, UnsupportedError, WorldError

if TYPE_CHECKING:
    from syncline.transports.base import Transport

__all__ = ["share_memory"]

MEMFD_NAME = "syncline-shared"
NONCE_BYTES = 16
OFFER = struct.Struct("<4sqqq16s")
"""Magic, process, descriptor, bytes with the nonce behind them, the nonce."""
MAGIC = b"slsm"
NO_FAILURE = -1


def share_memory(transport: Transport, numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate `numel` zeroed elements that every rank of `transport` reads and writes. All ranks call it together.

    It raises on all ranks if one cannot reach the memory: that rank runs on another host or in another container.
    """
    if numel < 0:
        raise WorldError(f"shared memory has at least 0 elements (numel: {numel})")
    nbytes = numel * dtype.itemsize
    if transport.size == 1:
        return torch.zeros(numel, dtype=dtype)
    descriptor = _create(transport, nbytes) if transport.rank == 0 else _join(transport, nbytes)
    try:
        mapping = mmap.mmap(descriptor, nbytes + NONCE_BYTES)
    finally:
        os.close(descriptor)  # the mapping keeps the memory alive
    return torch.frombuffer(mapping, dtype=dtype, count=numel) if numel else torch.zeros(0, dtype=dtype)


def _create(transport: Transport, nbytes: int) -> int:
    nonce = secrets.token_bytes(NONCE_BYTES)
    descriptor = _create_file(nbytes, nonce)
    offer = OFFER.pack(MAGIC, os.getpid(), descriptor, nbytes + NONCE_BYTES, nonce)
    others = range(1, transport.size)
    _send(transport, others, offer if descriptor >= 0 else bytes(OFFER.size))
    answers = [(rank, _receive(transport, rank, 1) == b"\1") for rank in others]
    failed = next((rank for rank, good in answers if not good), NO_FAILURE) if descriptor >= 0 else 0
    _send(transport, others, struct.pack("<q", failed))
    if failed != NO_FAILURE:
        if descriptor >= 0:
            os.close(descriptor)
        raise _refusal(transport, failed, nbytes)
    return descriptor


def _create_file(nbytes: int, nonce: bytes) -> int:
    """A descriptor of a file without a name; -1 if the system has none, or not enough memory."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create(MEMFD_NAME)
    try:
        os.posix_fallocate(descriptor, 0, nbytes + NONCE_BYTES)  # missing memory is reported now, not by SIGBUS later
        os.pwrite(descriptor, nonce, nbytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _join(transport: Transport, nbytes: int) -> int:
    offer = _receive(transport, 0, OFFER.size)
    descriptor = _open(offer, nbytes)
    _send(transport, [0], b"\1" if descriptor >= 0 else b"\0")
    (failed,) = struct.unpack("<q", _receive(transport, 0, 8))
    if failed != NO_FAILURE or descriptor < 0:
        if descriptor >= 0:
            os.close(descriptor)
        raise _refusal(transport, max(0, failed), nbytes)
    return descriptor


def _open(offer: bytes, nbytes: int) -> int:
    """The descriptor of the offered memory; -1 if this process does not see it, or sees another file there."""
    magic, process, number, length, nonce = OFFER.unpack(offer)
    if magic != MAGIC or process < 1 or number < 0 or length != nbytes + NONCE_BYTES:
        return -1
    path = f"/proc/{process}/fd/{number}"
    try:
        # In another container the same numbers may name a pipe, and opening a pipe would wait.
        if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}"):
            return -1
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if os.fstat(descriptor).st_size == length and os.pread(descriptor, NONCE_BYTES, nbytes) == nonce:
        return descriptor
    os.close(descriptor)
    return -1


def _refusal(transport: Transport, failed: int, nbytes: int) -> Exception:
    if failed == 0:
        return UnsupportedError(
            f"rank {transport.members[0]} cannot make {nbytes} bytes of shared memory: it takes Linux (memfd_create) "
            "and that much free memory"
        )
    return UnsupportedError(
        f"rank {transport.members[failed]} does not see the memory of rank {transport.members[0]} ({nbytes} bytes), or "
        "was asked for another size: shared memory takes processes of one host, one container and one user"
    )


def _send(transport: Transport, to: range | list[int], data: bytes) -> None:
    handles = [transport.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank) for rank in to]
    for handle in handles:
        handle.wait()


def _receive(transport: Transport, source: int, length: int) -> bytes:
    buffer = torch.zeros(length, dtype=torch.uint8)
    handle = transport.recv(buffer, source)
    handle.wait()
    if handle.nbytes != length:
        raise ProtocolError(
            f"{handle.nbytes} bytes about shared memory from rank {transport.members[source]}, not {length}",
            peer=transport.members[source],
        )
    return bytes(buffer.tolist())
