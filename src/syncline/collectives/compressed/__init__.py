"""All-reduce of encoded tensors: pure reductions that yield requests, their costs, and the executor of requests."""

from syncline.collectives.compressed.allreduce import (
    COMPRESSED_COLLECTIVES,
    CompressedCollective,
    CompressedCollectives,
    NonfiniteGuard,
    check_collective,
    compressed_allreduce,
)
from syncline.collectives.compressed.requests import LaunchedRequest, Reduction, Request, RequestExecutor

__all__ = [
    "COMPRESSED_COLLECTIVES",
    "CompressedCollective",
    "CompressedCollectives",
    "LaunchedRequest",
    "NonfiniteGuard",
    "Reduction",
    "Request",
    "RequestExecutor",
    "check_collective",
    "compressed_allreduce",
]
