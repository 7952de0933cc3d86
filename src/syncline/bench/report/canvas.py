"""What the pictures of a report are drawn on, and how they become bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline.bench.report.style import ROLES
from syncline.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["GRID", "INK", "MUTED", "Picture", "canvas", "finished", "styled"]

WIDTH = 4.6
"""Inches. A phone shows it about as wide as that many points."""
INK, MUTED, GRID = (light for light, _ in ROLES.values())


@dataclass(frozen=True)
class Picture:
    """A picture, its file's name, its title, and what somebody who cannot see it is told."""

    name: str
    title: str
    about: str
    svg: bytes
    """With nothing behind it."""
    png: bytes
    """On white."""


def canvas(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of so many inches, with panels below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def finished(name: str, title: str, about: str, figure: Figure) -> Picture:
    """A figure that nothing is added to any more: the same bytes for the same figure."""
    nothing = {"svg": {"Date": None, "Creator": None, "Format": None, "Type": None}, "png": {"Software": None}}
    made = {}
    with styled(salt=name):
        for kind, paper in (("svg", "none"), ("png", "white")):
            written = io.BytesIO()
            figure.savefig(written, format=kind, dpi=200, metadata=nothing[kind], facecolor=paper)
            made[kind] = written.getvalue()
            figure.set_layout_engine("none")  # everything has its place now
    return Picture(name, title, about, **made)


@contextmanager
def styled(salt: str = "syncline") -> Iterator[None]:
    """Letters, lines and colours of every picture; `salt` makes the names inside an SVG its own."""
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("pictures need matplotlib: pip install 'syncline[plot]'") from None
    chosen: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "hatch.linewidth": 0.6,
        "svg.hashsalt": salt,
    }
    with matplotlib.rc_context(chosen):
        yield
