"""The player: published bubble rates, formulas of time and memory, transfers, replicas, orders that deadlock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from syncline.errors import DeadlockError, SpecError
from syncline.parallel.player import PipelineTimeline, StageCost, play
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
)

DOCS = Path(__file__).parents[2] / "docs" / "parallel"
UNITS = StageCost(forward_s=1, input_s=1, weight_s=1)

PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
]
"""Ranks, micro-batches, milliseconds of F, I, W and a transfer; bubble rates of 1F1B and ZB-H1 (arXiv 2401.10241,
tables 9 and 5: models of 1.5, 6.2 and 14.6 billion parameters)."""


@pytest.mark.parametrize(("ranks", "micro_batches", "f", "i", "w", "c", "one_f_one_b", "zero_bubble"), PUBLISHED)
def test_bubble_rates_equal_the_published_ones(
    ranks: int, micro_batches: int, f: float, i: float, w: float, c: float, one_f_one_b: float, zero_bubble: float
) -> None:
    setting = PipelineSetting(ranks, micro_batches)
    assert round(play(OneFOneB(), setting, StageCost(f, i, w), c).bubble_rate, 4) == one_f_one_b
    assert round(play(ZeroBubble(), setting, StageCost(f, i, w), c).bubble_rate, 4) == zero_bubble


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_zbv_has_no_bubble_at_equal_times(ranks: int, micro_batches: int) -> None:
    timeline = play(ZBV(), PipelineSetting(ranks, micro_batches), UNITS)
    assert timeline.costs_s == (6 * micro_batches,) * ranks
    assert timeline.makespan_s == 6 * micro_batches + ranks - 1
    assert timeline.peak_activations == (2 * ranks,) * ranks
    assert timeline.bubble_rate == 0


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches", "cost", "peak"),
    [(4, 1, 8, 33, 7), (4, 2, 8, 57, 11), (4, 4, 8, 105, 19), (8, 2, 16, 117, 23)],
)
def test_interleaved_costs_a_bubble_of_one_chunk(
    ranks: int, chunks: int, micro_batches: int, cost: float, peak: int
) -> None:
    timeline = play(Interleaved(chunks), PipelineSetting(ranks, micro_batches), UNITS)
    assert max(timeline.costs_s) == timeline.makespan_s == cost == 3 * micro_batches * chunks + 3 * (ranks - 1)
    assert timeline.peak_activations[0] == peak == (chunks - 1) * ranks + 2 * (ranks - 1) + 1


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 12), (8, 16)])
def test_gpipe_and_1f1b_take_the_same_time(ranks: int, micro_batches: int) -> None:
    setting, cost = PipelineSetting(ranks, micro_batches), StageCost(2, 3, 1)
    gpipe, alternating = play(GPipe(), setting, cost), play(OneFOneB(), setting, cost)
    assert gpipe.makespan_s == alternating.makespan_s == (micro_batches + ranks - 1) * 6
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert gpipe.bubble_rate == alternating.bubble_rate == pytest.approx(expected, rel=1e-12)
    assert gpipe.peak_activations == (micro_batches,) * ranks
    assert alternating.peak_activations == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 24)])
def test_zero_bubble_fills_the_bubble_with_weight_gradients(ranks: int, micro_batches: int) -> None:
    f, i, w = 4, 5, 3
    timeline = play(ZeroBubble(), PipelineSetting(ranks, micro_batches), StageCost(f, i, w))
    assert max(timeline.costs_s) == micro_batches * (f + i + w) + (ranks - 1) * (f + i - w)
    assert timeline.peak_activations == (ranks,) * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_times_of_few_micro_batches(ranks: int) -> None:
    f, i, w = 4, 5, 3
    for micro_batches in range(1, ranks + 1):
        setting = PipelineSetting(ranks, micro_batches)
        passes = micro_batches + ranks - 1
        assert play(OneFOneB(), setting, StageCost(f, i, w)).makespan_s == passes * (f + i + w)
        assert max(play(ZeroBubble(), setting, StageCost(f, i, w)).costs_s) == passes * (f + i) + w


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(2), ZeroBubble(), ZBV(), PipeDream()], ids=str)
def test_actions_wait_for_what_they_need(schedule: PipelineSchedule) -> None:
    setting, transfer_s = PipelineSetting(3, 6), 0.25
    costs = [StageCost(1 + 0.5 * (stage % 3), 2, 1) for stage in range(3 * schedule.stages_per_rank)]
    timeline = play(schedule, setting, costs, transfer_s)
    at = {(("B" if a.kind == "I" else a.kind), a.stage, a.micro_batch): (s, e) for _, a, s, e in timeline.actions}
    for kind, stage, number in [key for key in at if key[0] in "FB"]:
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < len(costs):
            apart = schedule.rank_of(stage, 3) != schedule.rank_of(source, 3)
            assert at[kind, stage, number][0] >= at[kind, source, number][1] + transfer_s * apart
        if kind == "B":
            assert at["B", stage, number][0] >= at["F", stage, number][1]
    for row in timeline.rows:
        assert all(before.end_s <= after.start_s for before, after in pairwise(row))
    assert timeline.actions[0].start_s == 0


def test_stages_on_one_rank_transfer_nothing() -> None:
    alone = PipelineSetting(1, 4)
    assert play(Interleaved(3), alone, UNITS, transfer_s=100).makespan_s == 3 * 4 * 3
    assert play(ZBV(), alone, UNITS, transfer_s=100).makespan_s == 2 * 4 * 3


def test_transfers_may_depend_on_bytes() -> None:
    costs = [StageCost(1, 1, 0, output_bytes=100), StageCost(1, 1, 0, output_bytes=7), StageCost(1, 1, 0)]
    timeline = play(GPipe(), PipelineSetting(3, 1), costs, lambda nbytes: 0.5 + nbytes / 100)
    assert timeline.makespan_s == pytest.approx(6 + 2 * (0.5 + 1) + 2 * (0.5 + 0.07), rel=1e-12)


def test_memory_is_the_sum_of_live_activations() -> None:
    costs = [StageCost(1, 1, 1, activation_bytes=10), StageCost(1, 1, 1, activation_bytes=1000)]
    setting = PipelineSetting(2, 6)
    assert play(OneFOneB(), setting, costs).peak_activation_bytes == (20, 1000)
    assert play(GPipe(), setting, costs).peak_activation_bytes == (60, 6000)
    assert play(ZeroBubble(), setting, costs).peak_activation_bytes == (20, 2000)


def test_replicas_take_micro_batches_in_turn() -> None:
    setting = PipelineSetting(2, 7, replicas=(3, 1))
    timeline = play(OneFOneB(), setting, [StageCost(3, 3, 0), StageCost(1, 1, 0)], transfer_s=0.5)
    assert timeline.workers == ((0, 0), (0, 1), (0, 2), (1, 0))
    forwards = [[a.micro_batch for _, a, _, _ in row if a.kind == "F"] for row in timeline.rows]
    assert forwards == [[0, 3, 6], [1, 4], [2, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert [row[0].rank for row in timeline.rows] == [0, 1, 2, 3]
    assert timeline.costs_s[3] == timeline.busy_s[3] == 14
    assert timeline.bubble_rate == (21 - 18) / 21


def test_replica_without_a_micro_batch_costs_nothing() -> None:
    timeline = play(GPipe(), PipelineSetting(2, 1, replicas=(2, 1)), UNITS)
    assert timeline.costs_s == (6.0, 0.0, 3.0)


def test_wrong_settings_and_costs_are_refused() -> None:
    with pytest.raises(SpecError, match="use 8 or 10 micro-batches"):
        play(Interleaved(), PipelineSetting(4, 9), UNITS)
    with pytest.raises(SpecError, match=r"interleaved on 2 ranks has 4 stages, but there are 2 costs"):
        play(Interleaved(), PipelineSetting(2, 4), [UNITS, UNITS])


class BackwardFirst(PipelineSchedule):
    """The second rank waits for a gradient before the forward that it follows from."""

    name = "backward_first"

    def actions(self, rank: int, setting: PipelineSetting, replica: int = 0) -> Iterator[Action]:
        order = "FB" if rank != 1 else "BF"
        yield from (Action(kind, rank, 0) for kind in order)  # type: ignore[arg-type]


def test_deadlocks_name_the_blocked_actions() -> None:
    with pytest.raises(DeadlockError) as raised:
        play(BackwardFirst(), PipelineSetting(3, 1), UNITS)
    message = str(raised.value)
    assert "the order of backward_first deadlocks" in message
    assert "rank 0: 0B0 waits for B of micro-batch 0 from stage 1" in message
    assert "rank 1: 1B0 waits for F of micro-batch 0 from stage 1" in message
    assert "rank 2: 2F0 waits for F of micro-batch 0 from stage 1" in message


def test_long_lists_of_blocked_actions_are_cut() -> None:
    with pytest.raises(DeadlockError, match=r"; and 4 more$"):
        play(BackwardFirst(), PipelineSetting(12, 1), UNITS)


def test_pipedream_has_no_bubble_in_the_steady_state() -> None:
    setting = PipelineSetting(4, 100)
    timeline: PipelineTimeline = play(PipeDream(), setting, StageCost(1, 1, 0))
    for rank, row in enumerate(timeline.rows):
        computed = [each for each in row if each.action.kind in "FB"]
        first = next(place for place, each in enumerate(computed) if each.action.kind == "B")
        last = max(place for place, each in enumerate(computed) if each.action.kind == "F")
        steady = computed[first : last + 1]
        assert steady[-1].end_s - steady[0].start_s == len(steady), f"rank {rank}"


@pytest.mark.parametrize("page", ["1f1b", "gpipe", "interleaved", "pipedream", "zbv", "zero_bubble"])
def test_tables_in_the_docs_are_predictions(page: str) -> None:
    lines = [re.split(r" *\| *", line.strip("| \n")) for line in (DOCS / f"{page}.md").read_text().splitlines()]
    header = next(place for place, cells in enumerate(lines) if cells[0] == "schedule")
    wanted = [re.fullmatch(r"m = (\d+)(?:, c = (\d+) ms)?", cell) for cell in lines[header][1:-1]]
    columns = [(int(each[1]), float(each[2] or 0)) for each in wanted if each]
    assert len(columns) == len(lines[header]) - 2
    compared = 0
    for spec, *cells in lines[header + 2 : lines.index([""], header)]:
        schedule = build_schedule(spec)
        share = schedule.stages_per_rank
        cost = StageCost(10 / share, 10 / share, 10 / share)
        played = [(m, play(schedule, PipelineSetting(8, m), cost, c)) for m, c in columns]
        assert cells[:-1] == [f"{100 * each.bubble_rate:.1f} %" for _, each in played], spec
        most = {m: f"{max(each.peak_activations) / share:g}" for m, each in played}
        assert cells[-1] == ", ".join(most.values()), spec
        compared += 1
    assert compared >= 2


def test_messages_wait_for_the_port_of_their_sender() -> None:
    """Two ranks. Each message takes 3, so that the second stage waits for one after the other."""
    timeline = play(GPipe(), PipelineSetting(2, 3), UNITS, transfer_s=3.5, port_s=3)
    starts = {str(each.action): each.start_s for each in timeline.actions}
    assert [starts[name] for name in ("1F0", "1F1", "1F2")] == [4.5, 7.5, 10.5]
    assert [starts[name] for name in ("1B0", "1B1", "1B2")] == [11.5, 13.5, 15.5]
    assert [starts[name] for name in ("0B0", "0B1", "0B2")] == [17, 20, 23]
