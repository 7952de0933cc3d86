"""The cache of answers: computed once for the same code, and again for any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.bench import answer_cache
from syncline.bench.answer_cache import cache_answers

asked: list[str] = []


@cache_answers
def length(text: str) -> int | None:
    asked.append(text)
    return len(text) or None


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SYNCLINE_CACHE", str(tmp_path / "cache"))
    asked.clear()
    return tmp_path / "cache"


def test_an_answer_is_asked_for_once() -> None:
    assert [length("a"), length("bc"), length("a"), length("bc")] == [1, 2, 1, 2]
    assert asked == ["a", "bc"]


def test_no_answer_is_not_kept() -> None:
    assert [length(""), length("")] == [None, None]
    assert asked == ["", ""]


def test_other_versions_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    length("a")
    monkeypatch.setattr(answer_cache, "_versions", lambda: ["another version"])
    assert length("a") == 1
    assert asked == ["a", "a"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"versions": 1, "answers": 2}'])
def test_a_broken_file_is_written_anew(content: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "answers.json").write_text(content)
    assert [length("a"), length("a")] == [1, 1]
    assert asked == ["a"]


def test_a_folder_that_cannot_be_made_costs_only_time(cache: Path) -> None:
    cache.write_text("a file")
    assert [length("a"), length("a")] == [1, 1]
