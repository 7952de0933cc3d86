"""What others do, to compare with: PyTorch's own DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore  # what torch.distributed re-exports untyped
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from syncline.environment import detect
from syncline.transports.store import find_place, meet
from syncline.world import World

__all__ = ["ddp", "process_group"]


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """The default process group that DistributedDataParallel wants, among the ranks of this world."""
    environment = detect()
    store = PrefixStore("baseline", meet(environment, find_place(environment), world.transport.timeout))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(model: nn.Module, broadcast_buffers: bool = False, half: bool = False) -> nn.Module:
    """The model in DistributedDataParallel, gradients as views of its buckets; `half`: they travel as fp16.

    Without `broadcast_buffers` batch norm's statistics stay local, as with us: that is the faster of the two.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its name until 2.12
    options: dict[str, Any] = {name: broadcast_buffers}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    if half:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped
