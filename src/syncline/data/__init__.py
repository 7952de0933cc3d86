"""Sharded, shuffled, resumable reading of data."""

from syncline.data.claims import Epochs
from syncline.data.cursor import Cursor
from syncline.data.loader import move
from syncline.data.micro_batches import Micro, MicroBatches, MicroStep
from syncline.data.sharded import Sharded
from syncline.data.sources import Piece

__all__ = ["Cursor", "Epochs", "Micro", "MicroBatches", "MicroStep", "Piece", "Sharded", "move"]
