"""`distribute()`, checkpoints, and the loop behind `syncline train`."""

from syncline.training.distribute import distribute

__all__ = ["distribute"]
