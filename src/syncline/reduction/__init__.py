"""Reduces the gradients of a run: bucket layout, overlap with backward, codecs and collectives."""

from syncline.collectives.compressed import COMPRESSED_COLLECTIVES, check_collective
from syncline.reduction.buckets import BUCKET_BYTES
from syncline.reduction.codec_cost import codec_seconds
from syncline.reduction.communicator import Communicator, broadcast_tensors, broadcast_tree, check_same, check_same_in
from syncline.reduction.reducer import GradientReducer, ReducerOptions, ReductionPolicy, Scaling, plain_name
from syncline.reduction.reduction_pass import ReductionPass
from syncline.reduction.stats import Stats, as_table

__all__ = [
    "BUCKET_BYTES",
    "COMPRESSED_COLLECTIVES",
    "Communicator",
    "GradientReducer",
    "ReducerOptions",
    "ReductionPass",
    "ReductionPolicy",
    "Scaling",
    "Stats",
    "as_table",
    "broadcast_tensors",
    "broadcast_tree",
    "check_collective",
    "check_same",
    "check_same_in",
    "codec_seconds",
    "plain_name",
]
