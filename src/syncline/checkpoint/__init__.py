"""Checkpoints: complete or not there, and without code."""

from syncline.checkpoint.load import latest, load
from syncline.checkpoint.save import save

__all__ = ["latest", "load", "save"]
