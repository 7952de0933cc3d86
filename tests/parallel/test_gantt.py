"""The picture of a pipeline: boxes at the right places, idle time, scale, legend, the pictures of the docs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from syncline.errors import SpecError
from syncline.parallel.gantt import draw, draw_schedule, main
from syncline.parallel.player import StageCost, play
from syncline.parallel.schedules import ZBV, Action, GPipe, OneFOneB, PipelineSetting, names

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A drawn action: its tooltip, fill, left edge, top and width."""

    what: str
    fill: str
    left: float
    top: float
    width: float


def boxes(picture: str) -> list[Box]:
    found = []
    for each in ElementTree.fromstring(picture).iter(f"{SVG}rect"):  # noqa: S314 (our own picture)
        if each.get("class") == "box":
            place = [float(each.get(key, "")) for key in ("x", "y", "width")]
            found.append(Box(each.findtext(f"{SVG}title", ""), each.get("fill", ""), *place))
    return found


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]  # noqa: S314


def test_boxes_have_places_and_widths_of_their_times() -> None:
    timeline = play(GPipe(), PipelineSetting(2, 2), StageCost(1, 1, 1))
    drawn = [each for each in boxes(draw({"": timeline.actions})) if "reduction" not in each.what]
    unit = drawn[0].width
    assert [each.what.partition(" of ")[0] for each in drawn[:4]] == [
        "0F0: forward", "0F1: forward", "0B0: backward", "0B1: backward"
    ]  # fmt: skip
    assert [round((each.left - drawn[0].left) / unit, 2) for each in drawn] == [0, 1, 5, 7, 1, 2, 3, 5]
    assert [round(each.width / unit, 2) for each in drawn] == [1, 1, 2, 2, 1, 1, 2, 2]
    assert drawn[4].top > drawn[0].top
    assert len({each.fill for each in drawn}) == 2


def test_panels_share_one_scale_and_begin_at_zero() -> None:
    predicted = [(0, Action("F", 0, 0), 0.0, 1.0)]
    measured = [(0, Action("F", 0, 0), 17.0, 19.0)]
    first, second = boxes(draw({"predicted": predicted, "measured": measured}))
    assert second.left == first.left
    assert second.width == pytest.approx(2 * first.width, abs=0.02)
    assert "0 s to 2 s" in second.what


def test_idle_time_is_hatched_until_the_end_of_the_panel() -> None:
    picture = draw({"": [(0, Action("F", 0, 0), 0.0, 1.0), (1, Action("F", 1, 0), 1.0, 4.0)]})
    root = ElementTree.fromstring(picture)  # noqa: S314
    idle = [each for each in root.iter(f"{SVG}rect") if "gantt-idle" in each.get("fill", "")]
    assert len(idle) == 3  # two rows and the legend
    first, second = boxes(picture)
    assert float(idle[0].get("width", "")) == pytest.approx(4 * first.width, abs=0.1)
    assert float(idle[1].get("width", "")) == pytest.approx(first.width + second.width, abs=0.1)


def test_legend_names_the_kinds_that_occur() -> None:
    one = texts(draw({"": play(OneFOneB(), PipelineSetting(2, 2), StageCost(1, 1, 1)).actions}))
    assert {"forward", "backward", "reduction", "idle"} <= set(one)
    assert not {"update", "backward, weights"} & set(one)
    assert not any("lighter" in each for each in one)
    split = texts(draw({"": play(ZBV(), PipelineSetting(2, 4), StageCost(1, 1, 1)).actions}))
    assert {"backward, inputs", "backward, weights"} <= set(split)
    assert "lighter: a later stage of the rank" in split


def test_stages_of_a_rank_have_shades() -> None:
    drawn = boxes(draw({"": play(ZBV(), PipelineSetting(2, 4), StageCost(1, 1, 1)).actions}))
    fills = {each.what.partition(":")[0]: each.fill for each in drawn}
    assert fills["0F0"] == fills["1F0"] == fills["0F3"]
    assert fills["3F0"] == fills["2F0"] != fills["0F0"]


def test_actions_without_duration_are_marked() -> None:
    (forward, reduction) = boxes(draw({"": [(0, Action("F", 0, 0), 0.0, 1.0), (0, Action("R", 0), 1.0, 1.0)]}))
    assert reduction.width > 2
    assert reduction.left + reduction.width / 2 == pytest.approx(forward.left + forward.width, abs=0.1)


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    actions = [(0, Action("F", 0, 107), 0.0, 1.0), (0, Action("F", 0, 108), 1.0, 500.0)]
    shown = texts(draw({"": actions}))
    assert "108" in shown
    assert "107" not in shown


@pytest.mark.parametrize(
    ("span_s", "unit", "last"), [(3.0, "0 s", "3"), (0.27, "0 ms", "250"), (4e-5, "0 µs", "40"), (700.0, "0 s", "700")]
)
def test_axis_has_round_ticks_in_a_fitting_unit(span_s: float, unit: str, last: str) -> None:
    shown = texts(draw({"": [(0, Action("F", 0, 0), 0.0, span_s)]}))
    ticks = shown[1 : shown.index("rank 0")]
    assert ticks[0] == unit
    assert ticks[-1] == last
    assert 4 <= len(ticks) <= 11


def test_titles_and_labels_are_escaped() -> None:
    shown = texts(draw({"a < b & c": [(0, Action("F", 0, 0), 0.0, 1.0)]}, labels=["<rank>"]))
    assert "a < b & c" in shown
    assert "<rank>" in shown


def test_nothing_measured_is_an_empty_picture() -> None:
    assert boxes(draw({"measured": []})) == []


def test_pictures_of_the_docs_are_current() -> None:
    for name in names():
        assert (PICTURES / f"pipeline-{name}.svg").read_text() == draw_schedule(name), (
            f"python -m syncline.parallel.gantt {name} > docs/pictures/pipeline-{name}.svg"
        )


def test_command_prints_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zero_bubble", "--ranks", "2", "--microbatches", "3", "--forward-ms", "20", "--transfer-ms", "1"])
    printed = capsys.readouterr().out
    assert printed == draw_schedule("zero_bubble", 2, 3, StageCost(0.02, 0.01, 0.01), 0.001)
    assert len([each for each in boxes(printed) if "reduction" not in each.what]) == 2 * 3 * 3
    with pytest.raises(SpecError, match="did you mean 'zero_bubble'"):
        main(["zb"])
