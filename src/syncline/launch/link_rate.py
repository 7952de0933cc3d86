"""What a rate means for a link: the token bucket, and how TCP is kept from piling up in front of it.

Every link has a bucket at each end (tbf on the host's side and on the switch's), so it holds the rate both ways:

    host e0 ──tbf──►  p0 ┐          ┌ p1 ──tbf──► e0 host
                         br0 (switch)
    host e0 ◄──tbf──  p0 ┘          └ p1 ◄──tbf── e0 host

Three things keep messages near the time that latency and bandwidth predict, where many of them meet at one port:

- queues never drop (`QUEUE`): at a port with room for 128 kB, three senders at once took up to 1.6 times as long;
- a host's own queue stays near a millisecond (`piece`, TCP's limit of unsent bytes): acknowledgements wait behind the
  data that the host sends, and with the kernel's 64 kB pieces a ring of 8 took 1.2 to 2 times as long;
- a link starts at full speed (`SYSCTLS`, the initial window): a cluster's connections are warm, and the kernel forgets
  a window that has been idle for 0.2 s. (The effect of this one was not measured apart from the others.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import SpecError

__all__ = ["OPEN", "SYSCTLS", "LinkShape", "parse_rate"]

OPEN = "open"

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 256e3, 100e9

BURST_SECONDS = 1.3e-3
"""A bucket holds this much of the rate. With a tenth of it timers are too late to keep 1 Gbit/s; with twenty times as
much a compressed gradient would pass unshaped."""

FRAME = 1514
"""Bytes that a bucket counts for a full packet: 1500 and the Ethernet header."""

PAYLOAD = 1448
"""Bytes of a full packet that are the user's: less IP (20), TCP (20) and its timestamps (12)."""

QUEUE = 64 << 20
"""Bytes that may wait at one end of a link. More than the windows of 64 hosts at once, so that nothing is dropped."""

WINDOW = 64
"""Packets that a new connection may have on its way, where the kernel starts with 10."""

BUFFER_SECONDS = 25e-3
"""A connection has at most this much of the rate on its way, so that 7 senders' queue at one port stays below the 0.2 s
after which TCP believes a packet lost: with the kernel's 4 MB, five runs of 7 × 4 MB had 100 false alarms."""

SMALLEST_BUFFER = 131072

SYSCTLS = {
    # All labs must have the same one, and kernels come with different ones. A ring of 8 took 1.05 times its prediction
    # with reno, 1.10 with cubic and with BBR.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
}


@dataclass(frozen=True)
class LinkShape:
    """A rate in bits a second, and what follows from it.

    >>> LinkShape(100e6).burst, LinkShape(100e6).piece
    (16250, 8125)
    """

    rate: float

    @property
    def burst(self) -> int:
        """Bytes in the bucket; never less than two packets, which it could not pass."""
        return max(2 * FRAME, int(self.rate / 8 * BURST_SECONDS))

    @property
    def piece(self) -> int:
        """Bytes that TCP hands over at once: half a bucket, so that the bucket need not cut it into packets."""
        return min(65536, max(4096, self.burst // 2))

    def links(self, device: str) -> list[str]:
        """Lines for `ip` that bound what the device takes at once."""
        return [f"link set {device} gso_max_size {self.piece}"]

    def buckets(self, device: str) -> list[str]:
        """Lines for `tc` that shape what leaves the device."""
        return [f"qdisc add dev {device} root tbf rate {self.rate:.0f}bit burst {self.burst} limit {QUEUE}"]

    def sysctls(self) -> dict[str, str]:
        """Settings of the host's TCP that go with the rate."""
        window = max(SMALLEST_BUFFER, int(self.rate / 8 * BUFFER_SECONDS))
        return {
            "net/ipv4/tcp_limit_output_bytes": str(2 * self.piece),
            "net/ipv4/tcp_wmem": f"4096 16384 {window}",
        }


def parse_rate(text: str) -> LinkShape | None:
    """Read a rate in tc's notation; None stands for "open", a link without a bucket.

    >>> parse_rate("2.5gbit").rate
    2500000000.0
    """
    if text == OPEN:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text) if isinstance(text, str) and len(text) < 32 else None
    if found is None or found[2] not in UNITS:
        raise SpecError(
            f"a lab's rate is a number with kbit, mbit or gbit, such as '512kbit', '100mbit' or '2.5gbit', or '{OPEN}' "
            f"for links without a limit, not {text!r}"
        )
    rate = float(found[1]) * UNITS[found[2]]
    if not SLOWEST <= rate <= FASTEST:
        raise SpecError(f"a lab's rate lies between 256kbit and 100gbit (rate: {text!r})")
    return LinkShape(rate)
