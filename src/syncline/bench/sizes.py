"""Sizes as people write them."""

from __future__ import annotations

import re

from syncline.errors import SpecError

__all__ = ["parse_size", "parse_sizes", "written"]

UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes; KB, MB and GB are powers of two.

    >>> parse_size("4KB"), parse_size("1.5mb")
    (4096, 1572864)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?B?)", text.strip(), re.IGNORECASE)
    unit = match[2].upper() if match else "?"
    unit = unit if unit in UNITS else f"{unit}B"
    if match is None or unit not in UNITS or float(match[1]) <= 0:
        raise SpecError(f"{text!r} is not a size; write 4KB, 1MB or 1.5MB")
    return max(4, int(float(match[1]) * UNITS[unit]) // 4 * 4)


def parse_sizes(text: str) -> list[int]:
    """A list, or a range in steps of four.

    >>> [written(size) for size in parse_sizes("4KB:1MB")]
    ['4KB', '16KB', '64KB', '256KB', '1MB']
    >>> parse_sizes("1MB,3MB")
    [1048576, 3145728]
    """
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, _, last = text.partition(":")
    size, end = parse_size(first), parse_size(last)
    if size > end:
        raise SpecError(f"the range {text!r} ends before it begins; write the smaller size first")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= 4
    return sizes


def written(size: int) -> str:
    """A size for people, in powers of two."""
    for unit in ("GB", "MB", "KB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.4g}{unit}"
    return f"{size}B"
