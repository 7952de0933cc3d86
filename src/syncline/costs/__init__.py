"""What communication costs: formulas where they are exact, the schedule itself played on a network where not."""

from syncline.costs.closed_forms import closed_form
from syncline.costs.player import Cost, play

__all__ = ["Cost", "closed_form", "play"]
