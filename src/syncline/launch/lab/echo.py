"""The echo before use: what the links really carry, one way and back, as plain TCP sees it."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from syncline.errors import WorldError
from syncline.launch.lab.shaping import FRAME, PAYLOAD, Shape

if TYPE_CHECKING:
    from syncline.launch.lab.lab import LabHost

__all__ = ["check", "throughput"]

TOLERANCE = 0.10
"""Share of the rate by which the echo may be off."""

SECONDS = 0.3
"""Seconds that the first sample of each way takes; the second takes twice as long, the others four times."""

ATTEMPTS = 7
"""Samples before the lab is refused: another process may hold the cores during one of them."""

FEWEST = 64 * PAYLOAD
"""Bytes in a sample of a slow link: with fewer, one packet more or less would show."""

OPEN_BYTES = 64 << 20
"""Bytes in a sample of a link without a limit."""

CHUNK = 1 << 18


def check(here: LabHost, there: LabHost, shape: Shape | None) -> float:
    """Bits a second on the link, the worse of the two ways; refuse when that is not the rate of the shape."""
    if shape is None:
        return min(throughput(here, there, OPEN_BYTES, 0), throughput(there, here, OPEN_BYTES, 0))
    seen: list[float] = []
    for attempt in range(ATTEMPTS):
        nbytes = max(FEWEST, int(shape.rate / 8 * SECONDS * 2 ** min(attempt, 2)))
        # The bucket is full at first, at both ends of both links: what it gives away at once is not the rate.
        ways = [throughput(a, b, nbytes, 4 * shape.burst) for a, b in ((here, there), (there, here))]
        seen.append(max(ways, key=lambda bits: abs(bits - shape.rate)))
        if abs(seen[-1] / shape.rate - 1) <= TOLERANCE:
            return seen[-1]
    best = min(seen, key=lambda bits: abs(bits - shape.rate))
    raise WorldError(
        f"the lab's links should carry {_spoken(shape.rate)}, and an echo between {here.name} and {there.name} saw "
        f"{_spoken(best)} at best in {ATTEMPTS} samples (at most {TOLERANCE:.0%} off is allowed): ask for a rate that "
        "this machine can carry ('open' has no limit), or try again when it has less to do"
    )


def throughput(sender: LabHost, receiver: LabHost, nbytes: int, skip: int) -> float:
    """Bits a second that the link carries while `nbytes` pass from one host to the other, after the first `skip`.

    TCP's payload is compared with what a bucket counts: of each frame of 1514 bytes, 1448 are payload.
    """
    patience = 10.0 + 100 * SECONDS
    listener = receiver.call(lambda: socket.create_server((receiver.address, 0), backlog=1))
    with listener:
        listener.settimeout(patience)
        port = int(listener.getsockname()[1])
        try:
            out = sender.call(lambda: socket.create_connection((receiver.address, port), timeout=patience))
            with out, listener.accept()[0] as into:
                into.settimeout(patience)
                feeder = threading.Thread(target=_feed, args=(out, skip + nbytes), name="syncline-echo", daemon=True)
                feeder.start()
                seconds, counted = _drain(into, skip, nbytes)
                feeder.join(patience)
        except OSError as error:
            raise WorldError(
                f"the lab's echo of {nbytes} bytes from {sender.name} to {receiver.name} failed within "
                f"{patience:.0f} s ({error}): its links carry nothing; look whether this machine filters "
                "bridged traffic (net.bridge.bridge-nf-call-iptables)"
            ) from None
    return counted * 8 / seconds * FRAME / PAYLOAD


def _feed(out: socket.socket, left: int) -> None:
    block = bytes(CHUNK)
    try:
        while left:
            left -= out.send(memoryview(block)[:left])
    except OSError:
        out.close()  # the receiver sees the end and says so


def _drain(into: socket.socket, skip: int, nbytes: int) -> tuple[float, int]:
    """Seconds from the first bytes past `skip` to the last, and how many came between."""
    block = memoryview(bytearray(CHUNK))
    got, began, since = 0, 0.0, 0
    while got < skip + nbytes:
        count = into.recv_into(block)
        if not count:
            raise ConnectionError(f"the sender ended after {got} of {skip + nbytes} bytes")
        got += count
        if not began and got >= skip:
            began, since = time.perf_counter(), got
    return max(time.perf_counter() - began, 1e-9), got - since


def _spoken(bits: float) -> str:
    """
    >>> _spoken(97.26e6), _spoken(2.5e9)
    ('97.3 Mbit/s', '2.5 Gbit/s')
    """
    for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
