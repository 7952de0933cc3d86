"""Messages between stages arrive as they were sent, whatever was sent before them."""

from __future__ import annotations

import torch
from torch import Tensor

import syncline as sl
from syncline.parallel.boundary import HEADER_BYTES, Boundary, Place
from syncline.world import World

PLACE = Place(3, 1, "the output x of stage 0 for micro-batch 1")
MESSAGES: list[Tensor | None] = [
    None,
    torch.arange(6.0).view(2, 3),
    torch.arange(12.0).view(4, 3),
    torch.arange(3.0).view(1, 3),
    None,
    torch.tensor(7, dtype=torch.int64),
    torch.zeros(0, 5),
    torch.arange(16.0).view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    torch.arange(16.0).view(2, 2, 2, 2),
    torch.tensor([True, False]),
    torch.ones(3, dtype=torch.float64, requires_grad=True),
]


def test_messages_of_any_shape_follow_each_other() -> None:
    def exchange(world: World) -> tuple[list[Tensor | None], int]:
        boundary = Boundary(world.group().transport, torch.device("cpu"))
        received = []
        for step, message in enumerate(MESSAGES):
            if world.rank == 0:
                boundary.send(message, 1, PLACE, step)
            else:
                boundary.expect(0, PLACE)
                received.append(boundary.receive(0, PLACE, step))
        boundary.wait_all_sent()
        return received, boundary.sent_bytes

    (_, sent), (received, _) = sl.simulate(exchange, 2).results
    for message, found in zip(MESSAGES, received, strict=True):
        if message is None or found is None:
            assert message is found
            continue
        assert torch.equal(message, found)
        assert (found.dtype, found.requires_grad) == (message.dtype, message.requires_grad)
        assert found.stride() == message.stride() or message.numel() == 0
    bodies = sum(0 if each is None else each.nbytes for each in MESSAGES)
    assert sent >= len(MESSAGES) * HEADER_BYTES + bodies


def test_a_tensor_may_change_after_it_was_sent() -> None:
    def exchange(world: World) -> Tensor | None:
        boundary = Boundary(world.group().transport, torch.device("cpu"))
        for step in range(3):
            if world.rank == 0:
                tensor = torch.full((4,), float(step))
                boundary.send(tensor, 1, PLACE, step)
                tensor.fill_(-1.0)
            else:
                found = boundary.receive(0, PLACE, step)
        boundary.wait_all_sent()
        return found if world.rank else None

    found = sl.simulate(exchange, 2, sl.Network(eager=0)).results[1]
    assert torch.equal(found, torch.full((4,), 2.0))
