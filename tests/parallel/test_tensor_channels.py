"""Values between stages whose bodies travel on channels: the path between GPUs, here with messages as channels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.parallel.boundary import HEADER_BYTES, Boundary, Place
from syncline.parallel.executor import find_pairs
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import build_schedule
from syncline.transports import Transport
from syncline.transports.torch_dist.nccl_channels import GpuPlace, why_not_nccl
from syncline.world import World
from tests.hunting import hunted, seeds
from tests.parallel.channels import ordered_channels
from tests.parallel.test_boundary import MESSAGES
from tests.parallel.test_executor import UNBUFFERED, chain
from tests.parallel.test_lost_ranks import LAYOUTS, check_kill

CPU = torch.device("cpu")


def make_boundary(world: World) -> tuple[Boundary, Counter[str]]:
    """A boundary of two ranks with channels, and how often they were used."""
    transport = world.group().transport
    channels = ordered_channels(transport, [(0, 1)], CPU)
    boundary = Boundary(transport, CPU, channels)
    boundary.uses_channels = True
    return boundary, channels.calls


def test_messages_of_any_shape_and_device_follow_each_other() -> None:
    def exchange(world: World) -> tuple[list[Tensor | None], int, int]:
        boundary, calls = make_boundary(world)
        place, received = Place(3, 1, "x"), []
        for step, message in enumerate(MESSAGES):
            if world.rank == 0:
                boundary.send(message, 1, place, step)
            else:
                boundary.expect(0, place)
                received.append(boundary.receive(0, place, step))
        boundary.wait_all_sent()
        return received, boundary.sent_bytes, calls.total()

    (_, sent, on_channel), (received, _, _) = sl.simulate(exchange, 2, UNBUFFERED).results
    for message, found in zip(MESSAGES, received, strict=True):
        if message is None or found is None:
            assert message is found
            continue
        assert torch.equal(message, found)
        assert (found.dtype, found.requires_grad) == (message.dtype, message.requires_grad)
        assert found.stride() == message.stride() or message.numel() == 0
    bodies = [each for each in MESSAGES if each is not None and each.numel()]
    assert sent == len(MESSAGES) * HEADER_BYTES + sum(each.nbytes for each in bodies)
    assert on_channel == sum(each.is_floating_point() for each in bodies)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_values_are_taken_in_another_order_than_they_were_sent(order: tuple[int, ...]) -> None:
    """Some are expected early, some are not; one is on the CPU; each comes twice, in two steps."""
    places = [Place(number, 0, f"value {number}") for number in range(4)]

    def value(number: int, step: int) -> Tensor:
        found = torch.full((number + 1,), 10.0 * step + number)
        return found.long() if number == 1 else found

    def exchange(world: World) -> list[Tensor | None]:
        boundary, _ = make_boundary(world)
        received = []
        if world.rank == 0:
            for step in range(2):
                for number, place in enumerate(places):
                    sent = value(number, step)
                    boundary.send(sent, 1, place, step)
                    sent.fill_(-1)
            boundary.wait_all_sent()
            return []
        for step in range(2):
            for number in order[:2]:
                boundary.expect(0, places[number])
            received += [boundary.receive(0, places[number], step) for number in order]
        return received

    found = sl.simulate(exchange, 2, UNBUFFERED).results[1]
    expected = [value(number, step) for step in range(2) for number in order]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.hunt
@pytest.mark.parametrize("spec", list(LAYOUTS))
def test_training_over_channels_has_the_same_bits_and_names_a_killed_rank(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with training whose values do not travel on channels. After the first step the channels are used."""
    made = []

    def make(transport: Transport, pairs: set[tuple[int, int]], device: torch.device) -> object:
        made.append(ordered_channels(transport, pairs, device))
        return made[-1]

    monkeypatch.setattr(Transport, "tensor_channels", make)
    hunted(check_kill, seeds(3), spec)
    calls = sum((each.calls for each in made), Counter[str]())
    assert calls["receive"] > 0
    assert calls["send"] >= calls["receive"]


@pytest.mark.parametrize(
    ("spec", "replicas", "pairs"),
    [
        ("1f1b", (1, 1, 1), {(0, 1), (1, 2)}),
        ("1f1b", (2, 2), {(0, 2), (1, 3)}),
        ("1f1b", (3, 2), {(0, 3), (0, 4), (1, 3), (1, 4), (2, 3), (2, 4)}),
        ("interleaved(chunks=2)", (1, 1, 1), {(0, 1), (1, 2), (0, 2)}),
        ("zbv", (1, 1), {(0, 1)}),
    ],
)
def test_workers_that_exchange_values(spec: str, replicas: tuple[int, ...], pairs: set[tuple[int, int]]) -> None:
    placement = PipelinePlacement(build_schedule(spec), replicas)
    expected = pairs | {(destination, source) for source, destination in pairs}
    assert find_pairs(chain(placement.stages), placement) == expected


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("A", "2.28.9"), ("B", "2.28.9")], ""),
        ([("A", "2.28.9", "one"), ("A", "2.28.9", "two")], ""),
        ([("A", "2.28.9"), ("", "")], "the tensors of rank 5 are on the CPU"),
        ([("A", "2.28.9"), ("B", "")], "the PyTorch of rank 5 has no NCCL"),
        ([("A", "2.28.9"), ("B", "2.27.3")], "rank 4 has NCCL 2.28.9 and rank 5 2.27.3"),
        ([("A", "2.28.9"), ("A", "2.28.9")], "ranks 4 and 5 use the same GPU"),
    ],
)
def test_when_nccl_carries_tensors(places: list[tuple[str, ...]], words: str) -> None:
    found = why_not_nccl([GpuPlace(*place) for place in places], [4, 5])
    assert words in found
    assert bool(words) == bool(found)
