"""Checkpoints that are whole or not there, and hold no code."""

from syncline.training.checkpoint.load import latest, load
from syncline.training.checkpoint.save import save

__all__ = ["latest", "load", "save"]
