"""The verdict on a race: every rule of it, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.bench.race.plan import RaceEntry
from syncline.bench.report import RaceVerdict, judge
from syncline.bench.report.verdict import binding_limit
from tests.bench.report_races import Hand, analysed, seeds


def judged(folder: Path, runs: list[Hand], entries: tuple[RaceEntry, ...] = (), **changes: Any) -> RaceVerdict:
    return judge(analysed(folder, runs, entries, **changes))


class TestVerdict:
    def test_whoever_is_sooner_with_every_seed_has_won(self, tmp_path: Path) -> None:
        runs = [*seeds("base", (2.0, 2.2, 2.1)), *seeds("b", (1.0, 1.1, 1.05))]
        found = judged(tmp_path, runs)
        assert (found.outcome, found.leader) == ("won", "b")
        assert found.sentence.startswith("b reached accuracy 0.9 first: median 3.15 s [")
        assert found.sentence.endswith(", 2× faster than base.")

    def test_a_leading_baseline_is_compared_with_the_next(self, tmp_path: Path) -> None:
        found = judged(tmp_path, [*seeds("base", (1.0, 1.1, 1.05)), *seeds("b", (3.0, 3.3, 3.15))])
        assert found.sentence.endswith(", 3× faster than b.")

    def test_nobody_wins_where_seeds_disagree(self, tmp_path: Path) -> None:
        found = judged(tmp_path, [*seeds("base", (1.0, 1.2, 1.1)), *seeds("b", (1.1, 1.0, 1.2))])
        assert (found.outcome, found.rivals) == ("tied", ["b"])
        assert found.sentence.startswith("No entry won: base")

    def test_two_seeds_are_not_enough(self, tmp_path: Path) -> None:
        found = judged(tmp_path, [*seeds("base", (2.0, 2.0)), *seeds("b", (1.0, 1.0))], (), seeds=(1, 2))
        assert found.outcome == "ahead"
        assert found.sentence.startswith("b was ahead: accuracy 0.9, median 3 s")
        assert "With 2 seeds this is not significant" in found.sentence

    def test_an_unfinished_race_is_judged_so_far(self, tmp_path: Path) -> None:
        found = judged(tmp_path, [*seeds("base", (2.0, 2.0)), *seeds("b", (1.0, 1.0))])
        assert found.sentence.startswith("So far: b was ahead")

    def test_one_entry_has_nobody_to_beat(self, tmp_path: Path) -> None:
        assert judged(tmp_path, seeds("a")).outcome == "alone"

    def test_a_target_never_reached_is_told_with_the_best_value(self, tmp_path: Path) -> None:
        runs = [*seeds("a", metrics=(0.2, 0.71)), *seeds("b", metrics=(0.2, 0.85))]
        found = judged(tmp_path, runs)
        assert found.outcome == "nobody"
        assert found.sentence == "No entry reached accuracy 0.9. The best was 0.85, by b."

    def test_a_target_reached_with_the_smaller_part_of_the_seeds_is_not_reached(self, tmp_path: Path) -> None:
        runs = [Hand("a", 1), *(Hand("a", seed, metrics=(0.2, 0.3)) for seed in (2, 3))]
        assert "most of its seeds: a with 1 of 3 seeds" in judged(tmp_path, runs).sentence

    def test_a_winner_that_missed_once_is_told(self, tmp_path: Path) -> None:
        runs = [*seeds("a", (1.0, 1.0)), Hand("a", 3, metrics=(0.1,)), *seeds("b", metrics=(0.1, 0.2))]
        found = judged(tmp_path, runs)
        assert "only with 2 of 3 seeds" in found.sentence
        assert "no other entry reached it" in found.sentence

    def test_all_failed(self, tmp_path: Path) -> None:
        found = judged(tmp_path, seeds("a", metrics=(), status="failed", reason="boom"))
        assert found.outcome == "nobody"
        assert "no run had an evaluation" in found.sentence
        assert found.notes == ["Failed: a (3 failed of 3)."]

    def test_nothing_has_run(self, tmp_path: Path) -> None:
        assert judged(tmp_path, [], (RaceEntry(name="a"),)).outcome == "empty"

    def test_one_worker_that_is_no_slower_is_named(self, tmp_path: Path) -> None:
        alone = seeds("a", (1.0, 1.0, 1.0), workers=1, kind="scaling")
        found = judged(tmp_path, [*seeds("a"), *alone], scaling="weak", scaling_workers=(1,))
        assert found.notes[0] == "One worker was not slower than 4: 3 s (a)."


class TestLimits:
    @pytest.mark.parametrize(
        ("phase", "name"),
        [
            ("compute", "compute"),
            ("exposed", "communication"),
            ("codec", "codec"),
            ("data", "data"),
            ("evaluation", "evaluation"),
        ],
    )
    def test_the_largest_share_binds(self, tmp_path: Path, phase: str, name: str) -> None:
        shares = {**dict.fromkeys(("compute", "exposed", "codec", "data", "evaluation"), 0.1), phase: 0.6}
        found = analysed(tmp_path, seeds("a", shares=shares))
        limit = binding_limit(found, found.entry("a"))
        assert limit is not None
        assert limit.name == name
        assert limit.share == pytest.approx(0.6)
        assert limit.evidence.startswith("60 % of its time is")
        assert ("2.5× earlier" in limit.advice) == (name != "compute")

    def test_many_more_epochs_than_another_are_statistics(self, tmp_path: Path) -> None:
        slow = seeds("slow", metrics=(*(0.5,) * 11, 0.95), shares={"compute": 0.6, "exposed": 0.4})
        found = analysed(tmp_path, [*seeds("quick"), *slow])
        limit = binding_limit(found, found.entry("slow"))
        assert limit is not None
        assert limit.name == "statistics"
        assert limit.share == pytest.approx(0.75)
        assert limit.evidence == "it needs 12 epochs, 4× as many as quick"

    def test_many_more_epochs_than_one_worker_are_statistics(self, tmp_path: Path) -> None:
        alone = seeds("a", metrics=(0.95, 0.95), workers=1, kind="scaling")
        found = analysed(tmp_path, [*seeds("a"), *alone], scaling="weak", scaling_workers=(1,))
        limit = binding_limit(found, found.entry("a"))
        assert limit is not None
        assert limit.name == "statistics"
        assert limit.evidence.endswith("3× as many as one worker")

    def test_a_few_more_epochs_are_luck(self, tmp_path: Path) -> None:
        found = analysed(
            tmp_path,
            [*seeds("five", metrics=(0.5, 0.5, 0.5, 0.5, 0.95)), *seeds("six", metrics=(*(0.5,) * 5, 0.95))],
        )
        limit = binding_limit(found, found.entry("six"))
        assert limit is not None
        assert "statistics" not in limit.shares

    def test_who_needs_fewer_bytes_is_named(self, tmp_path: Path) -> None:
        shares = {"compute": 0.1, "exposed": 0.9}
        found = analysed(tmp_path, [*seeds("a", shares=shares), *seeds("thrifty", bytes_each=10.0)])
        limit = binding_limit(found, found.entry("a"))
        assert limit is not None
        assert "thrifty reached it with 100× fewer bytes" in limit.advice
