"""Process groups, made straight from a store under names of ours.

`dist.new_group` names a group by how many groups a process has made, so that ranks with different histories never meet;
and it needs the process's one default group, which belongs to the user's script. Groups made from a store need neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from syncline.transports.torch_dist.liveness import Liveness

__all__ = ["Engine", "Groups"]


@dataclass(frozen=True)
class Groups:
    """One channel's groups: gloo for tensors on the CPU and for messages, NCCL for tensors on GPUs."""

    cpu: Any
    cuda: Any | None

    def of(self, tensor: torch.Tensor) -> Any:
        """The group that can work on a tensor where it lies."""
        return self.cuda if tensor.is_cuda and self.cuda is not None else self.cpu


class Engine:
    """What all channels of a process share: the store, the watch over the others, where to listen."""

    def __init__(self, store: Store, liveness: Liveness, timeout: float, one_host: bool) -> None:
        self.store = store
        self.liveness = liveness
        self.timeout = timeout
        self._one_host = one_host

    def groups(self, channel: str, rank: int, size: int) -> Groups:
        """Meet the other members of a channel."""
        store = PrefixStore(f"channel/{channel}", self.store)
        store.set_timeout(timedelta(seconds=self.timeout))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        if self._one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
            options._devices = [gloo.create_device(hostname="127.0.0.1")]  # nothing listens to the outside
        else:
            options._devices = [gloo.create_default_device()]
        cpu = gloo(PrefixStore("gloo", store), rank, size, options)
        cuda = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl: Any = dist.ProcessGroupNCCL
            nccl_options = nccl.Options()
            nccl_options._timeout = timedelta(seconds=self.timeout)
            cuda = nccl(PrefixStore("nccl", store), rank, size, nccl_options)
        return Groups(cpu, cuda)
