"""The rate of a link in the lab: its token buckets, and TCP settings that keep queues short.

Every link has a token bucket (tbf) at each end, on the host's side and on the switch's, so it limits both directions:

    host e0 ──tbf──►  p0 ┐          ┌ p1 ──tbf──► e0 host
                         br0 (switch)
    host e0 ◄──tbf──  p0 ┘          └ p1 ◄──tbf── e0 host

Three settings keep the times of messages near the prediction from latency and bandwidth, if many meet at one port:

- queues never drop (`QUEUE_BYTES`): with a queue of 128 kB, three senders at once took up to 1.6 times as long;
- the queue of a host stays near a millisecond (`segment`, TCP's limit of unsent bytes): acknowledgements wait behind
  the data that the host sends, and with the kernel's segments of 64 kB a ring of 8 took 1.2 to 2 times as long;
- a link starts at full speed (`SYSCTLS`, the initial window): connections of a cluster are warm, and the kernel resets
  a window that was idle for 0.2 s. (The effect of this setting was not measured alone.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import SpecError

OPEN = "open"

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MIN_RATE_BITS_S, MAX_RATE_BITS_S = 256e3, 100e9

BURST_S = 1.3e-3
"""Size of a bucket, in seconds of the rate. With a tenth of it, timers are too slow for 1 Gbit/s; with twenty times as
much, a compressed gradient would pass without a limit."""

FRAME_BYTES = 1514
"""Bytes of a full frame, as a bucket counts them: 1500 and the Ethernet header."""

FRAME_PAYLOAD_BYTES = 1448
"""Payload bytes of a full frame: without IP (20), TCP (20) and its timestamps (12)."""

QUEUE_BYTES = 64 << 20
"""Queue at each end of a link. It is larger than the windows of 64 hosts together, so that nothing is dropped."""

INITIAL_WINDOW_PACKETS = 64
"""Packets that a new connection may have in flight; the kernel's default is 10."""

SEND_BUFFER_S = 25e-3
"""Send buffer of a connection, in seconds of the rate. The queue of 7 senders at one port then stays below the 0.2 s
after which TCP retransmits: with the kernel's 4 MB, five runs of 7 × 4 MB had 100 retransmissions without a loss."""

MIN_SEND_BUFFER_BYTES = 131072

SYSCTLS = {
    # Kernels have different defaults, and all labs must be alike. A ring of 8 took 1.05 times its prediction with reno,
    # 1.10 with cubic and with BBR.
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
}


@dataclass(frozen=True)
class LinkShape:
    """A rate in bits per second, and the settings that follow from it.

    >>> LinkShape(100e6).burst, LinkShape(100e6).segment
    (16250, 8125)
    """

    rate: float

    @property
    def burst(self) -> int:
        """Bytes of the bucket; at least two frames."""
        return max(2 * FRAME_BYTES, int(self.rate / 8 * BURST_S))

    @property
    def segment(self) -> int:
        """Maximum bytes of a TCP segment: half a bucket, so that the bucket does not split it."""
        return min(65536, max(4096, self.burst // 2))

    def links(self, device: str) -> list[str]:
        """Lines for `ip` that limit the segments of a device."""
        return [f"link set {device} gso_max_size {self.segment}"]

    def buckets(self, device: str) -> list[str]:
        """Lines for `tc` that limit the rate of a device."""
        return [f"qdisc add dev {device} root tbf rate {self.rate:.0f}bit burst {self.burst} limit {QUEUE_BYTES}"]

    def sysctls(self) -> dict[str, str]:
        """Settings of the host's TCP for this rate."""
        window = max(MIN_SEND_BUFFER_BYTES, int(self.rate / 8 * SEND_BUFFER_S))
        return {
            "net/ipv4/tcp_limit_output_bytes": str(2 * self.segment),
            "net/ipv4/tcp_wmem": f"4096 16384 {window}",
        }


def parse_rate(text: str) -> LinkShape | None:
    """Parse a rate in tc's notation; None for "open", a link without a limit.

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
    if not MIN_RATE_BITS_S <= rate <= MAX_RATE_BITS_S:
        raise SpecError(f"a lab's rate lies between 256kbit and 100gbit (rate: {text!r})")
    return LinkShape(rate)
