"""`distribute()`, checkpoints, and the loop behind `syncline train`."""

from syncline.training.checkpoint import latest, load, save
from syncline.training.distribute import distribute

__all__ = ["distribute", "latest", "load", "save"]
