"""A client of a RequestHandler without a transport. It numbers requests as clients do, or wrongly."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from syncline.server import protocol
from syncline.server.protocol import RequestHeader, json_body
from syncline.server.request_handler import OutgoingReply, RequestHandler
from syncline.server.shard import ParameterShard
from syncline.server.space import SpaceDescription

WORKERS = (0, 1)
NUMEL = 8


def describe(name: str = "test 1", **options: Any) -> SpaceDescription:
    found: dict[str, Any] = {"numel": NUMEL, "servers": (5,), "workers": WORKERS, **options}
    return SpaceDescription(name=name, **found)


def body_of(values: Tensor, keys: Tensor | None = None) -> Tensor:
    parts = [] if keys is None else [keys.view(torch.uint8)]
    return torch.cat([*parts, values.view(torch.uint8)])


class HandlerClient:
    """One member's requests to a handler about one space."""

    def __init__(self, handler: RequestHandler, member: int, description: SpaceDescription, greet: bool = True) -> None:
        self.handler, self.member, self.description = handler, member, description
        self.number = 0
        self.acked = 0
        self.others: list[OutgoingReply] = []
        """Replies to other members."""
        if greet:
            body = torch.frombuffer(bytearray(description.to_json()), dtype=torch.uint8)
            assert self.ask(RequestHeader(protocol.HELLO), body).header.status == protocol.OK

    @property
    def space(self) -> ParameterShard:
        return self.handler.shards[self.description.space_id]

    def send(
        self, request: RequestHeader, body: Tensor | None = None, number: int | None = None
    ) -> list[OutgoingReply]:
        """Send a request under the next number, or another; return this member's replies."""
        if number is None:
            self.number += 1
            number = self.number
        body = torch.empty(0, dtype=torch.uint8) if body is None else body
        request = request._replace(
            space=request.space or self.description.space_id,
            number=number,
            acked=request.acked or self.acked,
            length=body.numel(),
        )
        answers = self.handler.handle(self.member, request, body.clone())
        self.others += [answer for answer in answers if answer.member != self.member]
        return [answer for answer in answers if answer.member == self.member]

    def ask(self, request: RequestHeader, body: Tensor | None = None, number: int | None = None) -> OutgoingReply:
        (answer,) = self.send(request, body, number)
        return answer

    def push(self, values: Tensor, first: int = 0, **fields: Any) -> OutgoingReply:
        request = RequestHeader(protocol.PUSH, first=first, count=values.numel(), **fields)
        return self.ask(request, body_of(values))

    def pull(self, first: int = 0, count: int = NUMEL, **fields: Any) -> list[OutgoingReply]:
        return self.send(RequestHeader(protocol.PULL, first=first, count=count, **fields))

    def control(self, **asked: Any) -> Any:
        answer = self.ask(RequestHeader(protocol.CONTROL), json_body(asked))
        assert answer.header.status == protocol.OK, reason_of(answer)
        assert answer.body is not None
        return json.loads(bytes(answer.body.numpy()))


def handler_with(*members: int, **options: Any) -> list[HandlerClient]:
    """A handler with one space, and members that have said hello."""
    handler, description = RequestHandler(lambda found: 0), describe(**options)
    return [HandlerClient(handler, member, description) for member in members]


def reason_of(answer: OutgoingReply) -> str:
    assert answer.header.status == protocol.REFUSED, answer.header
    assert answer.body is not None
    return bytes(answer.body.numpy()).decode()


def values_of(answer: OutgoingReply) -> list[float]:
    assert answer.body is not None
    return answer.body.view(torch.float32).tolist()
