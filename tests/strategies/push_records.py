"""Records what the clients of a simulation push to the servers, and computes the weights that must come of it.

A push counts if a server has acknowledged it. One without a reply, of a worker that was lost, may count or not, at each
server for itself; one that a worker has sent after it was declared lost must not::

    weights at a server  =  Σ acknowledged pushes  +  Σ some of the pushes without a reply
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.server import Client, Future, protocol

MAX_OPEN_PARTS = 12
"""The most pushes without a reply at one server whose combinations are tried."""


@dataclass(frozen=True)
class SentPart:
    """The part of a push for one server."""

    member: int
    epoch: int
    first: int
    values: Tensor
    rate: float
    scale: float
    clock: int
    status: int | None
    """Of the reply; None without one."""
    after_loss: bool
    """Whether its worker had been declared lost before it sent the push."""

    @property
    def acknowledged(self) -> bool:
        return self.status == protocol.OK


@dataclass(eq=False)
class SentPush:
    """One call of a client."""

    client: Client
    epoch: int
    first: int
    values: Tensor
    rate: float
    scale: float
    clock: int
    after_loss: bool
    future: Future | None = None
    """None if the call has raised an error."""

    @property
    def member(self) -> int:
        return self.client.network.me

    def parts(self) -> Iterator[tuple[int, SentPart]]:
        """The parts, each with the number of its server in the space."""
        requests = () if self.future is None else self.future.requests
        replies = {
            (each.connection.index, each.header.first): each.reply
            for each in requests
            if each.header.kind != protocol.PULL
        }
        split = self.client.description.layout.split((self.first, self.first + self.values.numel()))
        for server, pieces in split.items():
            for piece in pieces:
                reply = replies.get((server, piece.first))
                yield (
                    server,
                    SentPart(
                        self.member,
                        self.epoch,
                        piece.first,
                        self.values[piece.start : piece.stop],
                        self.rate,
                        self.scale,
                        self.clock,
                        None if reply is None else reply.status,
                        self.after_loss,
                    ),
                )


@dataclass
class PushRecords:
    """All pushes of a simulation, in the order of the calls."""

    sent: list[SentPush] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    """By member: the epoch that it trains now. The test sets it."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the pushes of all clients are recorded."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("push", "push_pull"):
                patch.setattr(Client, name, self._recorded(getattr(Client, name)))
            yield

    def _recorded(self, call: Any) -> Any:
        def push(client: Client, keys: tuple[int, int], values: Tensor, *args: Any, **options: Any) -> Future:
            me, rate = client.network.me, options.get("rate")
            sent = SentPush(
                client,
                self.epochs.get(me, 0),
                keys[0],
                values.clone(),
                1.0 if rate is None else rate,
                options.get("scale", 1.0),
                client.clock,
                client.network.is_lost(me),
            )
            self.sent.append(sent)
            sent.future = call(client, keys, values, *args, **options)
            return sent.future

        return push

    def by_server(self) -> dict[int, list[SentPart]]:
        """The parts of all pushes that have keys, by the number of their server."""
        found: dict[int, list[SentPart]] = {}
        for push in self.sent:
            for server, part in push.parts():
                found.setdefault(server, []).append(part)
        return found

    def pushed_since(self, member: int, place: int, numel: int) -> Tensor:
        """The sum of what a member has pushed since `len(sent)` was `place`, times the scales."""
        total = torch.zeros(numel)
        for push in self.sent[place:]:
            if push.member == member:
                total[push.first : push.first + push.values.numel()] += push.scale * push.values
        return total


def expected_weights(parts: Sequence[SentPart], numel: int, *, sign: float, synchronous: bool) -> Tensor:
    """The weights, from zeros, after these pushes. In a synchronous space the pushes of a clock make one mean step."""
    steps: dict[int, list[SentPart]] = {}
    for number, part in enumerate(parts):
        steps.setdefault(part.clock if synchronous else number, []).append(part)
    weights = torch.zeros(numel)
    for step in steps.values():
        weight = sum(part.scale for part in step)
        for part in step:
            factor = 1.0 / weight if synchronous else part.scale
            weights[part.first : part.first + part.values.numel()] += sign * part.rate * factor * part.values
    return weights


def check_weights(records: PushRecords, weights: Tensor, *, sign: float = -1.0, synchronous: bool = False) -> None:
    """The servers have every acknowledged update once, and nothing from a worker that was declared lost before."""
    row = weights.reshape(-1)
    for server, parts in records.by_server().items():
        forbidden = [part for part in parts if part.after_loss and part.acknowledged]
        assert not forbidden, f"server {server} has acknowledged pushes of lost workers: {describe(forbidden)}"
        known = [part for part in parts if part.acknowledged]
        maybe = [part for part in parts if part.status is None and not part.after_loss]
        assert len(maybe) <= MAX_OPEN_PARTS, f"server {server}: {len(maybe)} pushes have no reply: {describe(maybe)}"
        first, end = min(part.first for part in parts), max(part.first + part.values.numel() for part in parts)
        differences = []
        for count in range(len(maybe) + 1):
            for some in combinations(maybe, count):
                expected = expected_weights([*known, *some], row.numel(), sign=sign, synchronous=synchronous)
                differences.append((row - expected)[first:end])
        if not any(bool((each.abs() < 1e-3).all()) for each in differences):
            least = min(differences, key=lambda each: int((each.abs() >= 1e-3).sum()))
            keys = {first + int(key): round(float(least[key]), 4) for key in (least.abs() >= 1e-3).nonzero()}
            raise AssertionError(
                f"server {server}: the weights differ from the {len(known)} acknowledged pushes, with any of the "
                f"{len(maybe)} without a reply, at least by {keys}"
            )


def describe(parts: Sequence[SentPart]) -> str:
    return ", ".join(f"clock {part.clock} of member {part.member} (epoch {part.epoch})" for part in parts[:8])
