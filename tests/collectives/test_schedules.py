"""Schedules: the contract, the rounds drawn in their docstrings, the counts of the table."""

from __future__ import annotations

from typing import get_args

import pytest

from syncline.collectives import Move, Operation, Round, Setting, build, names
from syncline.collectives.double_tree import build_trees, double_tree
from syncline.collectives.halving_doubling import halving_doubling
from syncline.collectives.hierarchical import hierarchical
from syncline.collectives.naive import naive
from syncline.collectives.pairwise import pairwise
from syncline.collectives.recursive_doubling import recursive_doubling
from syncline.collectives.ring import ring
from syncline.collectives.sharded import sharded
from syncline.collectives.tree import tree
from syncline.costs import play
from syncline.errors import SpecError
from syncline.testing import ScheduleContract, check_schedule
from syncline.transports import Network

ALL = [(operation, name) for operation in get_args(Operation) for name in names(operation)]


@pytest.mark.parametrize(("operation", "name"), ALL, ids=lambda value: str(value))
class TestContract(ScheduleContract):
    @pytest.fixture(autouse=True)
    def _schedule(self, operation: Operation, name: str) -> None:
        self.schedule = build(operation, name)


@pytest.mark.parametrize("chunks", [1, 2, 3, 16])
def test_double_tree_with_any_number_of_chunks(chunks: int) -> None:
    for size in range(1, 18):
        assert check_schedule(build("allreduce", f"double_tree(chunks={chunks})"), size) == 2 * chunks * size


def test_the_contract_can_fail() -> None:
    from syncline.collectives import Schedule

    def forgetful(rank: int, setting: Setting):  # type: ignore[no-untyped-def]
        for step, now in enumerate(ring(rank, setting)):
            yield Round(now.sends, tuple(m._replace(combine=m.combine and step > 0) for m in now.recvs))

    def impatient(rank: int, setting: Setting):  # type: ignore[no-untyped-def]
        yield from list(ring(rank, setting))[: 1 + rank % 2]

    for wrong, message in ((forgetful, "ends with"), (impatient, "no rank receives|numbers of rounds|wait forever")):
        with pytest.raises(AssertionError, match=message):
            check_schedule(Schedule("wrong", "allreduce", wrong, lambda size, hosts: size), 3)


def add(peer: int, chunk: int, width: int = 1) -> Move:
    return Move(peer, chunk, width, combine=True)


def test_naive_as_drawn() -> None:
    setting = Setting(4, 1)
    assert list(naive(0, setting)) == [
        Round(recvs=(add(1, 0), add(2, 0), add(3, 0))),
        Round(sends=(Move(1, 0), Move(2, 0), Move(3, 0))),
    ]
    assert list(naive(2, setting)) == [Round(sends=(Move(0, 0),)), Round(recvs=(Move(0, 0),))]


def test_sharded_as_drawn() -> None:
    assert list(sharded(1, Setting(4, 4))) == [
        Round((Move(2, 2), Move(3, 3), Move(0, 0)), (add(0, 1), add(3, 1), add(2, 1))),
        Round((Move(2, 1), Move(3, 1), Move(0, 1)), (Move(0, 0), Move(3, 3), Move(2, 2))),
    ]


def test_ring_as_drawn() -> None:
    assert list(ring(0, Setting(3, 3))) == [
        Round((Move(1, 2),), (add(2, 1),)),
        Round((Move(1, 1),), (add(2, 0),)),
        Round((Move(1, 0),), (Move(2, 2),)),
        Round((Move(1, 2),), (Move(2, 1),)),
    ]


def test_recursive_doubling_as_drawn() -> None:
    assert list(recursive_doubling(1, Setting(4, 1))) == [
        Round((Move(0, 0),), (add(0, 0),)),
        Round((Move(3, 0),), (add(3, 0),)),
    ]
    assert list(recursive_doubling(4, Setting(6, 1))) == [
        Round(sends=(Move(0, 0),)),
        Round(),
        Round(),
        Round(recvs=(Move(0, 0),)),
    ]


def test_halving_doubling_as_drawn() -> None:
    assert list(halving_doubling(1, Setting(4, 4))) == [
        Round((Move(3, 2, 2),), (add(3, 0, 2),)),
        Round((Move(0, 0),), (add(0, 1),)),
        Round((Move(0, 1),), (Move(0, 0),)),
        Round((Move(3, 0, 2),), (Move(3, 2, 2),)),
    ]


def test_tree_as_drawn() -> None:
    setting = Setting(8, 1)
    up = [{f"{r}→{m.peer}" for r in range(8) for m in list(tree(r, setting))[k].sends} for k in range(6)]
    assert up == [
        {"1→0", "3→2", "5→4", "7→6"},
        {"2→0", "6→4"},
        {"4→0"},
        {"0→4"},
        {"0→2", "4→6"},
        {"0→1", "2→3", "4→5", "6→7"},
    ]


def test_double_tree_as_drawn() -> None:
    setting = Setting(3, 4)  # a0 a1 b0 b1 are chunks 0 to 3
    assert list(double_tree(0, setting)) == [
        Round((Move(1, 0),), (add(2, 2), add(1, 2))),
        Round((Move(1, 1), Move(2, 2), Move(1, 2)), (Move(1, 0), add(2, 3), add(1, 3))),
        Round((Move(2, 3), Move(1, 3)), (Move(1, 1),)),
    ]
    assert list(double_tree(2, setting)) == [
        Round((Move(1, 0), Move(0, 2)), ()),
        Round((Move(1, 1), Move(0, 3)), (Move(1, 0), Move(0, 2))),
        Round((), (Move(1, 1), Move(0, 3))),
    ]


def test_double_trees_share_no_inner_rank() -> None:
    for size in range(2, 130):
        first, second = build_trees(size)
        inner = [{rank for rank in range(size) if tree.children[rank]} for tree in (first, second)]
        assert not inner[0] & inner[1], size
        for tree_ in (first, second):
            assert tree_.parent.count(None) == 1
            assert all(len(below) <= 2 for below in tree_.children)
            assert max(tree_.depth) <= size.bit_length() + 1


def test_hierarchical_as_drawn() -> None:
    setting = Setting(4, 4, hosts=(0, 0, 1, 1))
    assert list(hierarchical(1, setting)) == [
        Round((Move(0, 0, 2),), (add(0, 2, 2),)),
        Round((Move(3, 3),), (add(3, 2),)),
        Round((Move(3, 2),), (Move(3, 3),)),
        Round((Move(0, 2, 2),), (Move(0, 0, 2),)),
    ]


def test_pairwise_as_drawn() -> None:
    assert list(pairwise(0, Setting(3, 9))) == [
        Round((Move(1, 1),), (Move(2, 6),)),
        Round((Move(2, 2),), (Move(1, 3),)),
    ]


NETWORK = Network(latency=20e-6, bandwidth=1e9, combine=2e-10)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 16, 17])
def test_counts_of_the_table(size: int) -> None:
    """Rounds, bytes of the busiest rank, receives a round."""
    levels = size.bit_length() - 1
    power = 1 << levels
    extra = size > power
    n = 720_720 * 16  # divisible by every size here
    n -= n % (size * power)
    share = 2 * (size - 1) * n // size
    in_power = 2 * (power - 1) * n // power
    table = {
        "naive": (2, (size - 1) * n, size - 1),
        "sharded": (2, share, size - 1),
        "ring": (2 * (size - 1), share, 1),
        "recursive_doubling": (levels + 2 * extra, (levels + extra) * n, 1),
        "halving_doubling": (2 * levels + 2 * extra, in_power + extra * n, 1),
        "tree": (2 * (size - 1).bit_length(), (size - 1).bit_length() * n, 1),
    }
    for name, (rounds, sent, fan_in) in table.items():
        cost = play(build("allreduce", name), size, n, NETWORK)
        assert (cost.rounds, cost.busiest_bytes, cost.fan_in) == (rounds, sent, fan_in), name


@pytest.mark.parametrize("size", [2, 3, 8, 17, 64])
def test_counts_of_the_double_tree(size: int) -> None:
    chunks = 8
    n = 2 * chunks * 1000
    height = max(max(tree_.height) for tree_ in build_trees(size))
    cost = play(build("allreduce", f"double_tree(chunks={chunks})"), size, n, NETWORK)
    assert cost.rounds == 2 * height + chunks - 1
    assert cost.busiest_bytes <= 2 * n


def test_unknown_algorithms_show_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'ring'"):
        build("allreduce", "rign")
    with pytest.raises(SpecError, match=r"double_tree\(chunks: int = 8\)|chunks"):
        build("allreduce", "double_tree(pieces=3)")
    with pytest.raises(SpecError, match="at least one chunk"):
        build("allreduce", "double_tree(0)")
    assert repr(build("allreduce", "double_tree(chunks=4)")) == "double_tree(chunks=4)"
