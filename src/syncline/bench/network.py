"""`syncline bench network`: measures the network model, and the transports. Each rank runs this module.

For the transports, rank 0 sends n bytes to rank 1 and receives n back. A plain TCP socket, a bare pair of ZeroMQ
sockets and the transports take turns in the same processes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from syncline.bench.measuring import Summary, describe_place, format_size, ratios, summarize
from syncline.collectives import names
from syncline.costs import Calibration, predict
from syncline.environment import detect
from syncline.transports import Transport
from syncline.transports.base import LANE_TAGS
from syncline.transports.key_value_store import listening_address
from syncline.transports.zeromq import connect as connect_zeromq
from syncline.world import World, broadcast, init

__all__ = ["NetworkPlan", "describe", "measure", "measure_echoes"]

SHOWN_SIZES_BYTES = (4 << 10, 256 << 10, 16 << 20)
"""Bytes for which the table shows the best schedules."""


@dataclass(frozen=True)
class NetworkPlan:
    """The options of the benchmark."""

    out: str
    engine: str = "torch_dist"
    fresh: bool = False
    echo: bool = True
    rounds: int = 11


def measure(plan: NetworkPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    with init(transport=plan.engine) as world:
        calibration = world.everyone.auto.calibration(fresh=plan.fresh)
        rows = measure_echoes(world, plan.rounds, calibration.bandwidth) if plan.echo and world.size > 1 else []
        if world.rank == 0:
            document = {
                "kind": "network",
                "engine": world.transport.name,
                "ranks": world.size,
                "hosts": list(world.hosts),
                "lab": os.environ.get("SYNCLINE_LAB", ""),
                "network": asdict(calibration),
                "echo": rows,
            }
            Path(plan.out).write_text(json.dumps(document, indent=1))


def describe(document: dict[str, Any]) -> str:
    """The results as text."""
    calibration = Calibration(**document["network"])
    lines = [
        f"{document['ranks']} ranks on {document['lab'] or describe_place(document)}, {document['engine']}",
        f"  latency      {1e6 * calibration.latency:9.1f} µs   (± {100 * calibration.latency_spread:.0f} %)",
        f"  bandwidth    {calibration.bandwidth / 1e6:9.1f} MB/s (± {100 * calibration.bandwidth_spread:.0f} %), all "
        "ranks at once",
        f"  per message  {1e6 * calibration.per_message:9.1f} µs",
        f"  combining    {1e9 * calibration.combine:9.2f} ns per byte",
    ]
    if calibration.ranks_per_host:
        lines.append(
            f"  inside hosts {1e6 * calibration.inside_latency:9.1f} µs, {calibration.inside_bandwidth / 1e6:.1f} MB/s "
            f"({calibration.ranks_per_host} ranks each)"
        )
    if document["ranks"] > 1:
        lines += ["", "best all-reduce schedules by this model"]
        lines += [
            f"  {format_size(size):>6}  {_best(size, document['ranks'], calibration)}" for size in SHOWN_SIZES_BYTES
        ]
    if document["echo"]:
        lines += ["", *_echo_table(document["echo"])]
    return "\n".join(lines)


def _best(size: int, ranks: int, calibration: Calibration) -> str:
    network = calibration.network()
    seconds = {name: predict(name, ranks, size, network).seconds for name in names("allreduce")}
    ranked = sorted(seconds, key=lambda name: seconds[name])[:3]
    return ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked)


def _echo_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "round trip between ranks 0 and 1, in one run; rates relative to a bare echo, paired",
        f"{'size':>7} {'contender':18} {'median ms':>10} {'of TCP':>8} {'95 % interval':>16} "
        f"{'of bare ZeroMQ':>15} {'95 % interval':>16}",
    ]
    for row in rows:
        time, tcp, bare = (Summary(**row[key]) for key in ("time", "of_tcp", "of_bare_zeromq"))
        lines.append(
            f"{format_size(row['bytes']):>7} {row['contender']:18} {1e3 * time.median:10.3f} {100 * tcp.median:7.0f}% "
            f"{tcp.scaled(100).interval('.0f'):>16} {100 * bare.median:14.0f}% {bare.scaled(100).interval('.0f'):>16}"
        )
    return lines


ECHO_SIZES = (4096, 4 << 20, 40 << 20)
ZEROMQ_MESSAGE_BYTES = 1 << 20
"""A bare ZeroMQ message of 40 MB would be slower."""
REQUEST_TAG, ANSWER_TAG = LANE_TAGS + 1, LANE_TAGS + 2
MIN_TURN_S = 0.05
MAX_ROUND_TRIP_S = 1.0
"""Sizes that take longer by the network model are left out."""
MAX_ECHOES = 200

RoundTrip = Callable[[int], None]
"""One round trip of n bytes: rank 0 sends first, rank 1 answers."""


def measure_echoes(world: World, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """Times of all contenders at the sizes that do not take too long; rows on rank 0, none elsewhere."""
    place = detect().rendezvous
    address = listening_address(place.address if place else "127.0.0.1", one_host=len(set(world.hosts)) == 1)
    zeromq = connect_zeromq(detect(), world.transport.timeout)
    plain, bare = _Tcp(world, address), _BareZeromq(world, address)
    contenders: dict[str, RoundTrip] = {"TCP": plain.round_trip, "bare ZeroMQ": bare.round_trip}
    contenders |= {each.name: _transport(each, world.rank) for each in (world.transport, zeromq)}
    rows: list[dict[str, Any]] = []
    for nbytes in [nbytes for nbytes in ECHO_SIZES if 2 * nbytes / bandwidth < MAX_ROUND_TRIP_S]:
        rows += _compare(world, contenders, nbytes, rounds)
    world.barrier()  # the last answer may not have arrived
    plain.close()
    bare.close()
    zeromq.close()
    return rows if world.rank == 0 else []


def _compare(world: World, contenders: dict[str, RoundTrip], nbytes: int, rounds: int) -> list[dict[str, Any]]:
    calls, times = {}, {name: [] for name in contenders}  # type: dict[str, int], dict[str, list[float]]
    for name, round_trip in contenders.items():
        for _ in range(3):
            round_trip(nbytes)
        warm = _turn(world, round_trip, nbytes, 1)
        wanted = broadcast(torch.tensor([max(1, min(MAX_ECHOES, int(MIN_TURN_S / warm)))]))
        calls[name] = int(wanted)
    for number in range(rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(_turn(world, contenders[name], nbytes, calls[name]))
    return [
        {
            "contender": name,
            "bytes": nbytes,
            "seconds": own,
            "time": asdict(summarize(own)),
            "of_tcp": asdict(ratios(times["TCP"], own)),
            "of_bare_zeromq": asdict(ratios(times["bare ZeroMQ"], own)),
        }
        for name, own in times.items()
    ]


def _turn(world: World, round_trip: RoundTrip, nbytes: int, calls: int) -> float:
    now = world.runtime.now
    world.barrier()
    start = now()
    if world.rank < 2:
        for _ in range(calls):
            round_trip(nbytes)
    return (now() - start) / calls


def _transport(transport: Transport, rank: int) -> RoundTrip:
    buffers: dict[int, torch.Tensor] = {}

    def round_trip(nbytes: int) -> None:
        buffer = buffers.setdefault(nbytes, torch.from_numpy(np.zeros(nbytes, np.uint8)))
        if rank == 0:
            answer = transport.recv(buffer, 1, ANSWER_TAG)
            transport.send(buffer.clone() if nbytes < ZEROMQ_MESSAGE_BYTES else buffer, 1, REQUEST_TAG).wait()
            answer.wait()
        elif rank == 1:
            asked = transport.recv(buffer, None if transport.name == "zeromq" else 0, REQUEST_TAG)
            asked.wait()
            transport.send(buffer, asked.source, ANSWER_TAG).wait()

    return round_trip


class _Tcp:
    """A plain TCP socket."""

    def __init__(self, world: World, address: str) -> None:
        self.rank = world.rank
        self._buffers: dict[int, memoryview] = {}
        with socket.socket() as listener:
            if world.rank == 1:
                listener.bind((address, 0))
                listener.listen(1)
            where = _share_address(world, address, listener.getsockname()[1] if world.rank == 1 else 0)
            if world.rank == 0:
                self.socket = socket.create_connection(where, timeout=60)
            elif world.rank == 1:
                listener.settimeout(60)
                self.socket = listener.accept()[0]
        if world.rank < 2:
            # Timeouts of the kernel: Python's own would poll before every read.
            self.socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 120, 0))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip(self, nbytes: int) -> None:
        if self.rank > 1:
            return
        buffer = self._buffers.setdefault(nbytes, np.zeros(nbytes, np.uint8).data)
        if self.rank == 0:
            self.socket.sendall(buffer)
        self._read(buffer)
        if self.rank == 1:
            self.socket.sendall(buffer)

    def _read(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            count = self.socket.recv_into(buffer[filled:])
            if not count:
                raise ConnectionError("the other side of the echo has closed")
            filled += count

    def close(self) -> None:
        if self.rank < 2:
            self.socket.close()


class _BareZeromq:
    """Bare ROUTER and DEALER sockets: each message is split, copied, and sent back."""

    def __init__(self, world: World, address: str) -> None:
        self.rank = world.rank
        self._buffers: dict[int, Any] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if world.rank == 1 else zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.rcvtimeo = 120_000
        port = self._socket.bind_to_random_port(f"tcp://{address}") if world.rank == 1 else 0
        host, port = _share_address(world, address, port)
        if world.rank == 0:
            self._socket.connect(f"tcp://{host}:{port}")

    def round_trip(self, nbytes: int) -> None:
        if self.rank > 1:
            return
        buffer = self._buffers.setdefault(nbytes, np.zeros(nbytes, np.uint8))
        parts = [buffer[first : first + ZEROMQ_MESSAGE_BYTES] for first in range(0, nbytes, ZEROMQ_MESSAGE_BYTES)]
        identity: list[bytes] = []
        if self.rank == 0:
            self._send(parts, identity)
        for part in parts:
            if self.rank == 1:
                identity = [self._socket.recv()]
            part[:] = np.frombuffer(self._socket.recv(copy=False).buffer, np.uint8)
        if self.rank == 1:
            self._send(parts, identity)

    def _send(self, parts: list[Any], identity: list[bytes]) -> None:
        for part in parts:
            self._socket.send_multipart([*identity, part], copy=len(part) < ZEROMQ_MESSAGE_BYTES)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _share_address(world: World, address: str, port: int) -> tuple[str, int]:
    """The address of rank 1, on every rank."""
    numbers = [*socket.inet_aton(address), port]
    *quad, port = broadcast(torch.tensor(numbers), root=1).tolist()
    return socket.inet_ntoa(bytes(quad)), port


if __name__ == "__main__":
    measure(NetworkPlan(**json.loads(sys.argv[1])))
