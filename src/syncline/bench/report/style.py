"""Colours, dashes and markers: told apart without colour, readable on paper, on a bright screen and on a dark one.

Pictures are drawn in the colours for paper. In a page each of them becomes a variable that the page sets twice, for
light and for dark.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BASELINE", "PHASES", "ROLES", "SERIES", "Look", "looks", "variables"]

ROLES = {"ink": ("#1c2126", "#e8ebee"), "muted": ("#586069", "#a3acb5"), "grid": ("#dfe3e8", "#343b43")}
"""What is text, what is less so, and what lies behind; for light and for dark."""

SERIES = (
    ("#0068a8", "#5ab0f2"),  # blue
    ("#c24a05", "#ff9a56"),  # vermilion
    ("#007a56", "#35c896"),  # green
    ("#a1337f", "#ee8fcf"),  # purple
    ("#866300", "#e0b93c"),  # ochre
    ("#117a94", "#62cbe4"),  # cyan
    ("#b3263a", "#ff8a95"),  # red
)
BASELINE = ("#40474f", "#c6cdd4")
PHASES = {
    "compute": ("#0069a9", "#5ab0f3"),
    "exposed": ("#c24b06", "#ff9a57"),
    "codec": ("#a13380", "#ee8fd0"),
    "data": ("#866401", "#e0b93d"),
    "evaluation": ("#007a57", "#35c897"),
    "checkpoint": ("#117a95", "#62cbe5"),
    "agreeing": ("#b3263b", "#ff8a96"),
    "rest": ("#8b949d", "#6d7680"),
}
"""A hair off the colours of the series: each is replaced by a variable of its own."""

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Look:
    """How an entry is drawn, in every picture of a report."""

    colour: str
    dash: Dash
    marker: str


def looks(names: list[str], baseline: str | None) -> dict[str, Look]:
    """A look for every entry; that of the baseline is grey and plain.

    >>> found = looks(["ddp", "a", "b"], "ddp")
    >>> found["ddp"].colour == BASELINE[0], found["a"] != found["b"]
    (True, True)
    """
    found: dict[str, Look] = {}
    number = 0
    for name in names:
        if name == baseline:
            found[name] = Look(BASELINE[0], "-", "o")
            continue
        colour = SERIES[number % len(SERIES)][0]
        # The numbers of colours, dashes and markers have no divisor in common: 280 entries before two look alike.
        found[name] = Look(colour, DASHES[number % len(DASHES)], MARKERS[(number + 1) % len(MARKERS)])
        number += 1
    return found


def variables() -> dict[str, tuple[str, str, str]]:
    """The colour for paper, as it is drawn: the name of its variable, and its values for light and for dark."""
    found = {light: (f"--{role}", light, dark) for role, (light, dark) in ROLES.items()}
    found |= {light: (f"--series-{number}", light, dark) for number, (light, dark) in enumerate(SERIES)}
    found |= {light: (f"--phase-{name}", light, dark) for name, (light, dark) in PHASES.items()}
    found[BASELINE[0]] = ("--baseline", *BASELINE)
    return found
