"""A member that sends requests which no client would send; on any transport."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

import syncline as sl
from syncline.errors import ProtocolError, SynclineError
from syncline.server import Client, handler, open_space, protocol
from syncline.server.protocol import REPLY_BYTES, ReplyHeader, RequestHeader
from syncline.transports import Handle

NUMEL = 40_000
"""Its values are too long to go with their header."""


@handler("raises_halfway")
def raises_halfway(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
    weights[: weights.numel() // 2] = 7.0
    raise RuntimeError("a fault of the user's")


class Rogue:
    """Sends requests to server 0 by hand, with the numbers that its client would use."""

    def __init__(self, client: Client) -> None:
        self.client, self.connection = client, client.sender.connections[0]
        self.transport = client.network.transport
        self.lane = protocol.first_tag(client.description.space_id)

    def request(self, **fields: Any) -> RequestHeader:
        request = RequestHeader(
            protocol.PUSH, count=NUMEL, space=self.client.description.space_id, acked=self.connection.acked
        )
        self.connection.last_number += 1
        return request._replace(number=self.connection.last_number, **fields)

    def send(
        self, request: RequestHeader, data: bytes | None = None, body: Tensor | None = None
    ) -> tuple[str, Handle | None]:
        """Send a header (or other bytes) and perhaps a body; return the refusal and the body's handle."""
        tag = self.lane + protocol.REPLY_TAG + request.number % protocol.REPLY_SLOTS
        buffer = torch.empty(REPLY_BYTES + protocol.MAX_INLINE_BYTES, dtype=torch.uint8)
        answer = self.transport.recv(buffer, self.connection.member, tag)
        whole = torch.frombuffer(bytearray(request.pack() if data is None else data), dtype=torch.uint8)
        self.transport.send(whole, self.connection.member, protocol.REQUEST_TAG)
        sending = None
        if body is not None:
            sending = self.transport.send(body, self.connection.member, self.lane + protocol.BODY_TAG, exact=True)
        answer.wait()
        reply = ReplyHeader.read(bytes(buffer[: answer.nbytes].numpy()))
        assert (reply.status, reply.number) == (protocol.REFUSED, request.number)
        self.connection.mark_finished(request.number)
        return bytes(buffer[REPLY_BYTES : answer.nbytes].numpy()).decode(), sending


def misbehave(client: Client) -> list[str]:
    """Send all kinds of invalid requests; return the refusals."""
    rogue, said = Rogue(client), []
    large = torch.ones(NUMEL).view(torch.uint8)

    request = rogue.request(length=4 * NUMEL)
    flipped = bytearray(request.pack())
    flipped[60] ^= 4
    said.append(rogue.send(request, bytes(flipped))[0])

    request = rogue.request()
    said.append(rogue.send(request, request.pack()[:50])[0])
    rogue.transport.send(large, rogue.connection.member, protocol.REQUEST_TAG)  # longer than any request

    reason, sending = rogue.send(rogue.request(length=1 << 40), body=large)
    said.append(reason)
    assert sending is not None
    with contextlib.suppress(ProtocolError):
        sending.wait(60.0)  # it is off our hands: the server has not left it lying there

    client.push(None, torch.ones(NUMEL)).wait()  # the next body is not taken for the one that was refused

    request = rogue.request(length=12, count=3)
    said.append(rogue.send(request, request.pack() + b"12345678")[0])
    said.append(rogue.send(rogue.request(length=4 * NUMEL), body=large[:50_000])[0])
    said.append(rogue.send(rogue.request(length=4 * NUMEL, first=NUMEL), body=large)[0])
    said.append(rogue.send(rogue.request(length=0, space=client.description.space_id ^ (1 << 18)))[0])
    for values, keys, name in [
        (torch.ones(NUMEL), None, "raises_halfway"),
        (torch.ones(1), range(1), "nobody_has_it"),
        (torch.ones(3, dtype=torch.float64), range(3), None),
        (torch.ones(2), range(3), None),
        (torch.ones(2), torch.tensor([3, 3]), None),
        (torch.ones(2), (NUMEL - 1, NUMEL + 1), None),
    ]:
        try:
            client.push(keys, values, handler=name).wait()
        except ProtocolError as error:
            said.append(str(error))
    return said


REASONS = [
    "checksum does not match",
    "a request was refused: its 50 B are shorter than its header",
    f"a body of {1 << 40} B; at most {protocol.MAX_BODY_BYTES} B are allowed",
    "8 B with a header that says 12",
    "50 kB",
    "are not this server's",
    "is unknown in space",
    "RuntimeError: a fault of the user's",
    "no handler 'nobody_has_it' in this process",
    "float32, not torch.float64",
    "2 values for 3 keys",
    "3 at place 0 comes twice",
    "do not lie in a space",
]


def work(world: sl.World) -> list[str]:
    """Rank 1 sends invalid requests, rank 0 continues, and only valid requests change values."""
    client = open_space(world, "s", NUMEL, servers=(client_server(world),))
    said: list[str] = []
    if world.rank == 1:
        said = misbehave(client)
        for reason, found in zip(REASONS, said, strict=True):
            assert reason in found, (reason, found)
    else:
        for _ in range(20):
            client.push(None, torch.ones(NUMEL)).wait()
    world.barrier()
    assert torch.equal(client.get(), torch.full((NUMEL,), 21.0)), "something was changed"
    world.barrier()
    try:
        client.close()
    except SynclineError as error:
        raise AssertionError(f"rank {world.rank} could not leave: {error}") from error
    return said


def client_server(world: sl.World) -> int:
    from syncline.server import server_network

    return server_network(world).servers[0]
