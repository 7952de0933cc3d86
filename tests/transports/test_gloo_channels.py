"""What channels of gloo cost a process, and what happens when it can have no more of them."""

from __future__ import annotations

import json
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import syncline as sl
from syncline.environment import Environment, Rendezvous
from syncline.runtime import RealRuntime
from syncline.testing import Pool
from syncline.testing.processes import TEST_TIMEOUT_S
from syncline.transports import Transport, torch_dist
from syncline.transports.torch_dist.process_groups import ProcessGroupFactory
from tests.transports.zeromq_worlds import serve_a_store

pytestmark = pytest.mark.xdist_group("gloo")

CHANNELS = 20


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def make_many(channel: Transport) -> tuple[int, int]:
    """By how much descriptors and threads grow; all channels work."""
    first = [channel.split(range(channel.size)) for _ in range(5)]  # the devices that all share are there after these
    before = held()
    made = [channel.split(range(channel.size)) for _ in range(CHANNELS)]
    after = held()
    for each in (*first, *made):
        assert each is not None
        assert each.native is not None
        token = torch.ones(1)
        each.native.allreduce(token, "sum").wait()
        assert token.item() == channel.size
        each.close()
    return after[0] - before[0], after[1] - before[1]


def test_a_channel_takes_one_descriptor_a_peer_and_two_threads(gloo: Pool) -> None:
    """With a device each it was six and three: 200 teams of two reached the limit of 1,024 descriptors, and aborted."""
    for descriptors, threads in gloo.run(make_many, 2):
        assert descriptors <= 1.5 * CHANNELS
        assert threads <= 2 * CHANNELS


def run_out(channel: Transport) -> str:
    """Rank 1 has few descriptors left: nobody makes the channel, and the one that is there goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if channel.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[0] + 10, hard))
    try:
        with pytest.raises(sl.errors.WorldError) as caught:
            channel.split(range(channel.size))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    again = channel.split(range(channel.size))
    assert again is not None
    again.close()
    return str(caught.value)


def test_a_channel_is_refused_before_the_descriptors_run_out(gloo: Pool) -> None:
    told = gloo.run(run_out, 3)
    assert len(set(told)) == 1
    assert "rank 1 has" in told[0]
    assert "file descriptors in use" in told[0]
    assert "group.close()" in told[0]


def leave_early(channel: Transport) -> str:
    """One rank closes its channel while the others are in a collective of it."""
    own = channel.split(range(channel.size))
    assert own is not None
    assert own.native is not None
    own.native.barrier().wait()  # both have made it
    if channel.rank == 1:
        own.close()
        return ""
    with pytest.raises(sl.errors.PeerLostError) as caught:
        own.native.allreduce(torch.ones(4), "sum").wait()
    own.close()
    return str(caught.value)


def test_a_rank_that_closed_a_channel_is_not_in_the_operation(gloo: Pool) -> None:
    told = [text for text in gloo.run(leave_early, 2) if text]
    assert all("closed or given up this channel" in text or "has not entered" in text for text in told), told


def test_a_rank_that_ends_before_it_joins_is_named_at_once() -> None:
    """The launcher knows of its end, and gloo itself would wait for the whole timeout."""
    store = serve_a_store()
    store.set("syncline/dead/1", json.dumps({"rank": 1, "reason": "it was killed by signal 9 (SIGKILL)"}))
    store.add("syncline/dead", 1)
    place = Rendezvous("127.0.0.1", store.port, hosted=True)
    environment = Environment(source="a test", rank=0, size=2, local_rank=0, local_size=2, rendezvous=place)
    with pytest.raises(
        sl.errors.WorldError, match=r"rank 1 has ended before all had joined: it was killed by signal 9"
    ):
        torch_dist.connect(environment, 10 * TEST_TIMEOUT_S)


def test_channel_with_a_member_that_is_lost_before_it_has_an_address_is_given_up() -> None:
    """All were ready to make the channel. Then gloo alone would wait for the address until the timeout."""
    asked: list[int] = []

    def lost() -> dict[int, str]:
        asked.append(len(asked))
        return {1: "it was killed by signal 9 (SIGKILL)"} if len(asked) > 2 else {}

    liveness: Any = SimpleNamespace(elastic=True, runtime=RealRuntime(), lost=lost, links=None)
    unused: Any = None
    factory = ProcessGroupFactory(HashStore(), liveness, TEST_TIMEOUT_S, "127.0.0.1", unused)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        factory.groups("team2", (0, 1), 0)


def test_channels_that_close_in_the_background_are_closed_with_their_factory() -> None:
    """In an elastic job training does not wait until gloo has closed the channels of the team before."""
    nothing = SimpleNamespace(close=lambda: None)
    liveness: Any = SimpleNamespace(elastic=True, runtime=RealRuntime(), links=None, close=nothing.close)
    factory = ProcessGroupFactory(HashStore(), liveness, TEST_TIMEOUT_S, "127.0.0.1", nothing)
    before = held()
    groups = [factory.groups(f"team{number}", (0,), 0) for number in range(3)]
    assert held()[1] > before[1]
    for each in groups[:2]:
        factory.release(each)
        assert each.cpu is None
    factory.close()
    assert held() <= before
