"""Buckets, overlap, and how a bucket is reduced; the one place codec meets collective."""

from syncline.reduction.agreement import broadcast_tensors, broadcast_tree, check_same
from syncline.reduction.communicator import Communicator
from syncline.reduction.gradients import GradientReducer, plain_name
from syncline.reduction.layout import BUCKET_BYTES
from syncline.reduction.rounds import ReductionPass
from syncline.reduction.stats import Stats, as_table
from syncline.reduction.ways import COMPRESSED_COLLECTIVES, check_collective

__all__ = [
    "BUCKET_BYTES",
    "COMPRESSED_COLLECTIVES",
    "Communicator",
    "GradientReducer",
    "ReductionPass",
    "Stats",
    "as_table",
    "broadcast_tensors",
    "broadcast_tree",
    "check_collective",
    "check_same",
    "plain_name",
]
