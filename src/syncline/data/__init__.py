"""Sharded, shuffled, resumable reading."""

from syncline.data.base import Piece
from syncline.data.cursor import Cursor
from syncline.data.micro import Micro, MicroBatches, Step
from syncline.data.move import move
from syncline.data.sharded import Sharded

__all__ = ["Cursor", "Micro", "MicroBatches", "Piece", "Sharded", "Step", "move"]
