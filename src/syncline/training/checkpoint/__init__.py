"""Checkpoints: complete or not there, and without code."""

from syncline.training.checkpoint.load import latest, load
from syncline.training.checkpoint.save import save

__all__ = ["latest", "load", "save"]
