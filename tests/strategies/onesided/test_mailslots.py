"""Receive buffers: what is put is found once and whole, or not at all."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest

import syncline as sl
from syncline.strategies.onesided import mailslots
from syncline.strategies.onesided.mailslots import HEADER_BYTES, MAX_QUEUED_MESSAGES, Mailslots, pack
from syncline.testing import hunt
from syncline.transports import SingleTransport, Transport

SEEDS = range(1000 if os.environ.get("SYNCLINE_HUNT") else 40)
STATES = 12
SIZE = 24


def alone(buffers: int = 1) -> Mailslots:
    return Mailslots(SingleTransport(), SIZE, np.float64, buffers)


def test_a_message_is_found_once() -> None:
    slots = alone()
    assert slots.collect() == []
    slots.post(np.arange(SIZE, dtype=float), to=0)
    slots.settle()
    (found,) = slots.collect()
    assert (found.first, found.sender, found.sequence) == (0, 0, 1)
    assert found.values.tolist() == list(range(SIZE))
    assert slots.collect() == []
    assert (slots.counts.sent, slots.counts.received, slots.counts.torn) == (1, 1, 0)
    assert slots.counts.sent_bytes == HEADER_BYTES + 8 * SIZE
    slots.close()


def test_a_collected_message_survives_an_overwritten_slot() -> None:
    slots = alone()
    slots.post(np.ones(SIZE), to=0)
    slots.settle()
    (found,) = slots.collect()
    slots.post(np.zeros(SIZE), to=0)
    slots.settle()
    assert found.values.tolist() == [1.0] * SIZE
    slots.close()


def test_an_unread_message_is_overwritten() -> None:
    slots = alone()
    for value in (1.0, 2.0):
        slots.post(np.full(SIZE, value), to=0)
        slots.settle()
    (found,) = slots.collect()
    assert (found.sequence, found.values[0]) == (2, 2.0)
    slots.close()


@pytest.mark.parametrize("cut", [4, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + 8 * SIZE - 1])
def test_a_torn_message_is_collected_later(cut: int) -> None:
    slots = alone()
    old, new = pack(0, 1, 0, np.ones(SIZE)), pack(0, 2, 0, np.full(SIZE, 2.0))
    slots.memory[0, : len(old)] = old
    assert len(slots.collect()) == 1
    slots.memory[0, :cut] = new[:cut]
    for _ in range(3):  # looked at again and again, and counted once
        assert slots.collect() == []
    assert slots.counts.torn <= 1
    if cut >= 16:  # its number has arrived
        assert slots.counts.torn == 1
    slots.memory[0, : len(new)] = new
    (found,) = slots.collect()
    assert found.values.tolist() == [2.0] * SIZE
    slots.close()


@pytest.mark.parametrize(
    ("sender", "first", "count"),
    [(7, 0, SIZE), (0, -1, SIZE), (0, 1, SIZE), (0, 0, 0), (0, 0, -3), (0, 1 << 62, 1 << 62), (0, 0, 1 << 62)],
)
def test_an_invalid_header_never_reads_out_of_bounds(sender: int, first: int, count: int) -> None:
    slots = alone()
    mailslots.MESSAGE_FIELDS.pack_into(slots.memory[0].data, 4, sender, 1, first, count)
    assert slots.collect() == []
    assert slots.counts.torn == 1
    slots.close()


def test_every_sender_has_its_own_slot_if_there_are_enough() -> None:
    def case(world: sl.World) -> list[int]:
        slots = Mailslots(world.transport, 2, np.float64, buffers=3)
        if world.rank != 2:
            slots.post(np.full(2, float(world.rank)), to=2)
        slots.settle()
        world.barrier()
        found = sorted(message.sender for message in slots.collect())
        slots.close()
        return found

    assert sl.simulate(case, 4).results == ([], [], [0, 1, 3], [])


def test_a_full_line_drops_and_never_waits() -> None:
    def case(world: sl.World) -> tuple[list[bool], float, int]:
        slots = Mailslots(world.transport, 1000, np.float64)
        sent = [slots.post(np.zeros(1000), to=1) for _ in range(MAX_QUEUED_MESSAGES + 3)] if world.rank == 0 else []
        waited = world.runtime.now()
        slots.close()
        return sent, waited, slots.counts.dropped

    (sent, waited, dropped), _ = sl.simulate(case, 2, network=sl.Network(latency=1.0)).results
    assert waited == 0.0
    assert sent == [True] * MAX_QUEUED_MESSAGES + [False] * 3
    assert dropped == 3


def test_other_engines_have_no_windows() -> None:
    with (
        mock.patch.object(SingleTransport, "memory", Transport.memory),
        pytest.raises(sl.errors.UnsupportedError, match=r"not available on single; they work on MPI .* simulator"),
    ):
        alone()


# Torn messages. A state is one number, repeated: whatever is found is whole if its elements are equal.


def chatter(world: sl.World) -> tuple[int, int, int, int]:
    """All write into rank 0's only slot, in small pieces; how often it found something, torn, mixed, or an old one."""
    slots = Mailslots(world.transport, SIZE, np.float64, buffers=1, chunk_bytes=40)
    found = mixed = again = 0
    seen: set[tuple[int, int]] = set()
    for number in range(STATES if world.rank else 5 * STATES):
        world.compute(1e-4)
        if world.rank:
            slots.post(np.full(SIZE, world.rank + number / 100), to=0)
        for message in slots.collect():
            found += 1
            mixed += len(set(message.values.tolist())) > 1
            again += (message.sender, message.sequence) in seen
            seen.add((message.sender, message.sequence))
    slots.close()
    return found, slots.counts.torn, mixed, again


def test_no_interleaving_lets_a_mixture_through() -> None:
    total = [0, 0]

    def whole(simulation: sl.Simulation) -> None:
        found, torn, mixed, again = simulation.results[0]
        total[0] += found
        total[1] += torn
        assert mixed == 0, f"{mixed} of {found} messages were half old and half new"
        assert again == 0, f"{again} messages were counted twice"

    network = sl.Network(latency=1e-4, bandwidth=1e6, jitter=1.0)
    faults = (sl.faults.Delay(2e-4, probability=0.3), sl.faults.Slow(1, 3.0))
    assert hunt(chatter, 3, SEEDS, network=network, faults=faults, invariant=whole) == len(SEEDS)
    assert total[0] > len(SEEDS) / 2, "messages were found"
    assert total[1] > 0, "and some were seen half written"


def test_without_the_sum_mixtures_would_be_taken() -> None:
    """The test above can fail."""
    mixed = 0
    with mock.patch.object(mailslots, "is_whole", return_value=True):
        for seed in range(40):
            mixed += sl.simulate(chatter, 3, seed=seed, chaos=True).results[0][2]
    assert mixed > 0
