"""Pipeline schedules: the drawings in their docstrings, torch's orders, what every order must keep, the specs."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import SpecError
from syncline.parallel.player import StageCost, play
from syncline.parallel.schedules import (
    ZBV,
    Action,
    GPipe,
    Interleaved,
    OneFOneB,
    PipeDream,
    PipelineSchedule,
    PipelineSetting,
    ZeroBubble,
    build_schedule,
    names,
    with_reductions,
)
from tests.hunting import HUNTING, only_hunting

EVERY_SCHEDULE = (
    GPipe(),
    OneFOneB(),
    *(Interleaved(chunks=chunks) for chunks in (1, 2, 3, 4)),
    *(ZeroBubble(chunks=chunks) for chunks in (1, 2, 3)),
    ZBV(),
    PipeDream(),
)
WITH_UNEQUAL_REPLICAS = (GPipe(), OneFOneB(), PipeDream())
HALVES = StageCost(forward_s=1, input_s=0.5, weight_s=0.5)
"""Forward and whole backward take one column of a drawing."""
UNITS = StageCost(forward_s=1, input_s=1, weight_s=1)
"""Forward and each half of the backward take one column."""


def computations(schedule: PipelineSchedule, rank: int, setting: PipelineSetting, replica: int = 0) -> list[Action]:
    return [each for each in schedule.actions(rank, setting, replica) if each.kind in "FBIW"]


def accepts(schedule: PipelineSchedule, setting: PipelineSetting) -> bool:
    try:
        schedule.check(setting)
    except SpecError:
        return False
    return True


def drawing(module: str) -> list[list[str]]:
    """The rows of ranks in the docstring of a module, one entry for each column."""
    text = importlib.import_module(f"syncline.parallel.schedules.{module}").__doc__ or ""
    return [row.split() for row in re.findall(r"^ +rank \d+ +(.*[FBIW]\d.*)$", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("module", "schedule", "setting", "cost"),
    [
        ("gpipe", GPipe(), PipelineSetting(3, 4), HALVES),
        ("one_f_one_b", OneFOneB(), PipelineSetting(3, 4), HALVES),
        ("interleaved", Interleaved(chunks=2), PipelineSetting(2, 4), HALVES),
        ("zero_bubble", ZeroBubble(), PipelineSetting(3, 4), UNITS),
        ("zbv", ZBV(), PipelineSetting(2, 4), UNITS),
        ("pipedream", PipeDream(), PipelineSetting(3, 6), HALVES),
    ],
)
def test_schedules_run_as_drawn(
    module: str, schedule: PipelineSchedule, setting: PipelineSetting, cost: StageCost
) -> None:
    drawn = drawing(module)
    timeline = play(schedule, setting, cost)
    rows = [["."] * round(timeline.makespan_s) for _ in range(setting.ranks)]
    for rank, action, start_s, _ in timeline.actions:
        if action.kind in "FBIW":
            name = str(action) if schedule.stages_per_rank > 1 else str(action).removeprefix(str(rank))
            rows[rank][round(start_s)] = name
    assert rows == drawn


def torch_orders(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[str]]:
    """torch's order of each rank by `get_schedule_ops`, without idle places and reductions."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.stage import PipelineStage

    kind = schedules.get_schedule_class(name)
    several = not issubclass(kind, schedules.PipelineScheduleSingle)
    order: Any
    with mock.patch.object(kind, "_prepare_schedule_with_comms", create=True):  # it takes long, and is not compared
        if several and chunks == 1:  # get_schedule_ops refuses it, and the class does not
            stage = mock.create_autospec(PipelineStage, instance=True)
            stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, ranks
            order = kind([stage], micro_batches).pipeline_order
        else:
            order = get_schedule_ops(name, ranks, micro_batches, chunks)
    return [[str(each) for each in order[rank] if each and "REDUCE" not in str(each)] for rank in range(ranks)]


def compare_with_torch(ranks: int, micro_batches: int) -> int:
    """Compare all schedules that torch has too. Returns the number of compared orders."""
    setting = PipelineSetting(ranks, micro_batches)
    cases: list[tuple[str, PipelineSchedule]] = [
        ("GPipe", GPipe()),
        ("ZBVZeroBubble", ZBV()),
        *(("Interleaved1F1B", Interleaved(chunks=chunks)) for chunks in (1, 2, 3, 4)),
        *(("InterleavedZeroBubble", ZeroBubble(chunks=chunks)) for chunks in (1, 2, 3, 4)),
    ]
    compared = 0
    for name, schedule in cases:
        if name.startswith("Interleaved") and micro_batches % max(1, micro_batches // ranks):
            with pytest.raises(ValueError, match="number of rounds"):
                torch_orders(name, ranks, micro_batches, schedule.stages_per_rank)
            assert accepts(schedule, setting) == (schedule.stages_per_rank == 1)
            continue
        expected = torch_orders(name, ranks, micro_batches, schedule.stages_per_rank)
        assert [list(map(str, computations(schedule, rank, setting))) for rank in range(ranks)] == expected, (
            f"{schedule} in {setting}"
        )
        compared += 1
    return compared


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_orders_equal_torch(ranks: int) -> None:
    assert sum(compare_with_torch(ranks, micro_batches) for micro_batches in (1, 3, 5, 8, 10, 24)) > 30


@only_hunting
def test_all_orders_equal_torch() -> None:
    for ranks, micro_batches in product(range(1, 9), range(1, 33)):
        compare_with_torch(ranks, micro_batches)


def check_order(schedule: PipelineSchedule, setting: PipelineSetting) -> None:
    """Each stage computes each micro-batch once, on its own rank; each stage ends with its R; nothing deadlocks."""
    replicas = setting.replicas or (1,) * setting.ranks
    kinds = "FIW" if schedule.splits_backward else "FB"
    total: Counter[Action] = Counter()
    for rank, count in enumerate(replicas):
        for replica in range(count):
            order = list(schedule.actions(rank, setting, replica))
            stages = range(schedule.stages_per_rank * setting.ranks)
            own = [stage for stage in stages if schedule.rank_of(stage, setting.ranks) == rank]
            assert len(own) == schedule.stages_per_rank
            reduced = [each.stage for each in order if each.kind == "R"]
            assert sorted(reduced) == (own if schedule.flushes else []), f"{schedule} in {setting}"
            for each in order:
                assert each.stage in own
                if each.kind == "R":
                    later = order[order.index(each) :]
                    assert not any(other.stage == each.stage and other.kind in "BW" for other in later)
                elif setting.replicas:
                    assert each.micro_batch % count == replica
            total.update(each for each in order if each.kind in "FBIW")
    stages = range(schedule.stages_per_rank * setting.ranks)
    expected = [Action(kind, s, j) for kind, s, j in product(kinds, stages, range(setting.micro_batches))]  # type: ignore[arg-type]
    assert total == Counter(expected), f"{schedule} in {setting}"
    play(schedule, setting, UNITS, transfer_s=0.5)  # raises a DeadlockError if the order cannot be run


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=str)
def test_orders_are_complete_and_do_not_deadlock(schedule: PipelineSchedule) -> None:
    limit = 9 if HUNTING else 6
    tried = [PipelineSetting(*each) for each in product(range(1, limit), (*range(1, 2 * limit), 24))]
    tried = [setting for setting in tried if accepts(schedule, setting)]
    assert len(tried) > 30
    for setting in tried:
        check_order(schedule, setting)


@pytest.mark.parametrize("schedule", WITH_UNEQUAL_REPLICAS, ids=str)
@settings(max_examples=500 if HUNTING else 60, deadline=None, derandomize=True, database=None)
@given(
    replicas=st.lists(st.integers(1, 16), min_size=1, max_size=6).map(tuple),
    micro_batches=st.integers(1, 60),
)
def test_unequal_replicas_do_not_deadlock(
    schedule: PipelineSchedule, replicas: tuple[int, ...], micro_batches: int
) -> None:
    check_order(schedule, PipelineSetting(len(replicas), micro_batches, replicas))


@pytest.mark.parametrize("schedule", WITH_UNEQUAL_REPLICAS, ids=str)
@pytest.mark.parametrize(
    "replicas", [(3, 1), (1, 3), (15, 1), (9, 5, 1, 1), (13, 2, 1), (2, 1, 1), (1, 1, 2), (2, 7, 3)]
)
def test_published_replicas_do_not_deadlock(schedule: PipelineSchedule, replicas: tuple[int, ...]) -> None:
    for micro_batches in (1, 2, 7, 16, 61):
        check_order(schedule, PipelineSetting(len(replicas), micro_batches, replicas))


def test_warmup_follows_the_replicas() -> None:
    def warmups(*replicas: int) -> list[int]:
        setting = PipelineSetting(len(replicas), 99, replicas)
        return [PipeDream().warmup(rank, setting) for rank in range(len(replicas))]

    assert warmups(1, 1, 1, 1) == warmups(2, 2, 2, 2) == [3, 2, 1, 0]
    assert warmups(3, 1) == warmups(15, 1) == [1, 0]
    assert warmups(9, 5, 1, 1) == [1, 1, 1, 0]
    assert warmups(1, 3) == [3, 0]


def test_unequal_replicas_keep_the_last_stage_busy() -> None:
    """Each stage takes as long for each of its replicas, so that all workers could compute all the time."""
    for replicas in [(3, 1), (1, 3), (9, 5, 1, 1), (1, 1, 1, 1), (4, 2, 1)]:
        setting = PipelineSetting(len(replicas), 180, replicas)
        costs = [StageCost(count, count, 0) for count in replicas]
        last = play(OneFOneB(), setting, costs).rows[-1]
        assert last[-1].end_s - last[0].start_s <= 2 * 180 + 2 * sum(replicas), replicas


def test_replicas_without_a_micro_batch_reduce_too() -> None:
    setting = PipelineSetting(2, 2, replicas=(3, 1))
    assert list(OneFOneB().actions(0, setting, replica=2)) == [Action("R", 0)]
    assert list(GPipe().actions(0, setting, replica=2)) == [Action("R", 0)]


def test_reductions_follow_the_last_backward_of_their_stage() -> None:
    order = [Action("F", 0, 0), Action("I", 0, 0), Action("F", 1, 0), Action("W", 0, 0), Action("B", 1, 0)]
    assert " ".join(map(str, with_reductions(order))) == "0F0 0I0 1F0 0W0 0R 1B0 1R"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pipedream_forwards_see_the_updates_of_the_formula(ranks: int) -> None:
    setting = PipelineSetting(ranks, 3 * ranks + 2)
    for stage in range(ranks):
        updates, versions, most = 0, dict[int, int](), 0
        for kind, _, number in PipeDream().actions(stage, setting):
            if kind == "F":
                assert updates == max(0, number - (ranks - 1 - stage))
                versions[number] = updates
            elif kind == "B":
                most = max(most, len({*versions.values(), updates}))
                del versions[number]
            elif kind == "U":
                updates += 1
        assert updates == setting.micro_batches
        assert most == ranks - stage


@pytest.mark.parametrize("replicas", [(), (3, 1, 1, 1), (9, 5, 1, 1)])
def test_pipedream_order_is_a_prefix_of_a_longer_one(replicas: tuple[int, ...]) -> None:
    short, long = PipelineSetting(4, 40, replicas), PipelineSetting(4, 10**9, replicas)
    for rank in range(4):
        for replica in range((replicas or (1,) * 4)[rank]):
            order = list(PipeDream().actions(rank, short, replica))
            steady = max(place for place, each in enumerate(order) if each.kind == "F") + 1
            assert order[:steady] == list(islice(PipeDream().actions(rank, long, replica), steady))
            assert all(each.kind in "BU" for each in order[steady:])
            first = next(place for place, each in enumerate(order) if each.kind == "B")
            assert first == PipeDream().warmup(rank, short) + 1


def test_zbv_places_the_stages_as_a_v() -> None:
    assert [ZBV().rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [Interleaved().rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_specs_are_read_and_written() -> None:
    assert names() == ["1f1b", "gpipe", "interleaved", "pipedream", "zbv", "zero_bubble"]
    for spec in (
        *names(),
        "1f1b(microbatches=8)",
        "interleaved(microbatches=8, chunks=4)",
        "zero_bubble(chunks=2)",
        "pipedream(vertical_sync=True)",
    ):
        built = build_schedule(spec)
        assert repr(built) == str(built) == spec
        assert build_schedule(built) is built
        assert build_schedule(f" {spec} ") == built
        assert replace(built, microbatches=3) == build_schedule(repr(replace(built, microbatches=3)))
    assert build_schedule("interleaved(4)") == Interleaved(chunks=4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dapple", "did you mean '1f1b'"),
        ("PipeDream-Flush", "did you mean '1f1b'"),
        ("1F1B", "did you mean '1f1b'"),
        ("OneFOneB", "did you mean '1f1b'"),
        ("1f1bb", "cannot read spec '1f1bb'"),
        ("zb", "did you mean 'zero_bubble'"),
        ("ZB-H1", "did you mean 'zero_bubble'"),
        ("InterleavedZeroBubble", r"did you mean 'zero_bubble\(chunks=2\)'"),
        ("ZBVZeroBubble", "did you mean 'zbv'"),
        ("Interleaved1F1B", "did you mean 'interleaved'"),
        ("dualpipev", "DualPipe is not available"),
        ("zbh2", "'zero_bubble' is ZB-H1"),
        ("1f1b|gpipe", "a pipeline schedule is one name, not a chain: '1f1b|gpipe'"),
        ("1f1b(chunks=2)", r"'1f1b\(chunks=2\)': it has no argument 'chunks'.*; write 1f1b\("),
        ("1f1b(microbatches=f())", r"in spec '1f1b\(microbatches=f\(\)\)'"),
        ("1f1b(", r"cannot read spec '1f1b\('"),
        ("gpipe(microbatches=0)", r"gpipe\(microbatches=0\): it must be a whole number, at least 1"),
        ("interleaved(chunks=0)", r"interleaved\(chunks=0\): it must be a whole number, at least 1"),
        ("interleaved(chunks=True)", "it must be a whole number"),
        ("pipedream(vertical_sync=1)", "it must be True or False"),
        ("", "is empty; available: '1f1b'"),
        (GPipe, r"write GPipe\(\)"),
    ],
)
def test_wrong_specs_show_what_to_write(spec: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        build_schedule(spec)
    assert "n1f1b" not in str(raised.value)


@pytest.mark.parametrize(
    ("schedule", "setting", "message"),
    [
        (Interleaved(), PipelineSetting(4, 9), r"9 micro-batches on 4 ranks .* 2 rounds .*; use 8 or 10 micro-batches"),
        (ZeroBubble(chunks=2), PipelineSetting(2, 7), "7 micro-batches on 2 ranks .*; use 6 or 8 micro-batches"),
        (ZBV(), PipelineSetting(2, 8, (3, 1)), r"the same number of replicas at each rank, not \(3, 1\)"),
        (ZeroBubble(), PipelineSetting(2, 8, (2, 1)), "use 'gpipe', '1f1b' or 'pipedream'"),
        (Interleaved(), PipelineSetting(2, 8, (2, 2)), "leave `replicas` empty"),
        (OneFOneB(), PipelineSetting(2, 8, (3, 1, 1)), r"replicas \(3, 1, 1\) of 2 ranks"),
        (GPipe(), PipelineSetting(2, 8, (3, 0)), r"replicas \(3, 0\) of 2 ranks"),
        (GPipe(), PipelineSetting(2, 0), "0 micro-batches"),
        (PipeDream(), PipelineSetting(0, 4), "0 ranks"),
    ],
    ids=str,
)
def test_settings_that_cannot_run_are_refused(
    schedule: PipelineSchedule, setting: PipelineSetting, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        schedule.check(setting)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=str)
def test_fewer_micro_batches_than_ranks_run(schedule: PipelineSchedule) -> None:
    for micro_batches in (1, 2, 7):
        check_order(schedule, PipelineSetting(8, micro_batches))
