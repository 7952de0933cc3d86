"""Pictures on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["save"]


def save(figure: Any, stem: Path) -> list[Path]:
    """Write a picture as SVG and PNG, and let go of it."""
    from matplotlib import pyplot

    figure.tight_layout()
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
