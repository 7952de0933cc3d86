"""Process groups, made straight from a store under names of ours.

`dist.new_group` names a group by how many groups a process has made, so that ranks with different histories never meet;
and it needs the process's one default group, which belongs to the user's script. Groups made from a store need neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from syncline.errors import UnsupportedError
from syncline.transports.torch_dist.liveness import Liveness

__all__ = ["Engine", "Groups"]


class Groups:
    """One channel's groups: gloo for tensors on the CPU and for messages, NCCL for tensors on GPUs."""

    def __init__(self, cpu: Any, make_cuda: Callable[[], Any]) -> None:
        self.cpu = cpu
        self._make_cuda = make_cuda
        self._cuda: Any = None

    def of(self, tensor: torch.Tensor) -> Any:
        """The group that can work on a tensor where it lies. The first one on a GPU makes the group for it."""
        if not tensor.is_cuda:
            return self.cpu
        if self._cuda is None:
            self._cuda = self._make_cuda()
        return self._cuda

    def close(self) -> None:
        """Let both engines go: gloo's threads and sockets end with the last reference."""
        if self._cuda is not None:
            self._cuda.shutdown()
            self._cuda = None
        self.cpu = None


class Engine:
    """What all channels of a process share: the store, the watch over the others, where to listen."""

    def __init__(self, store: Store, liveness: Liveness, timeout: float, address: str) -> None:
        self.store = store
        self.liveness = liveness
        self.timeout = timeout
        self._address = address
        self._made: list[Groups] = []

    def groups(self, channel: str, rank: int, size: int) -> Groups:
        """Meet the other members of a channel."""
        store = PrefixStore(f"channel/{channel}", self.store)
        store.set_timeout(timedelta(seconds=self.timeout))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
        else:  # gloo itself would listen wherever the host's own name leads
            options._devices = [gloo.create_device(hostname=self._address)]
        cpu = gloo(PrefixStore("gloo", store), rank, size, options)
        groups = Groups(cpu, lambda: self._nccl(PrefixStore("nccl", store), rank, size))
        self._made.append(groups)
        return groups

    def _nccl(self, store: Store, rank: int, size: int) -> Any:
        if not dist.is_nccl_available():
            raise UnsupportedError("this PyTorch has no NCCL: move the tensor to the CPU, or name a schedule")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=self.timeout)
        return nccl(store, rank, size, options)

    def release(self, groups: Groups) -> None:
        """End one channel's groups."""
        groups.close()
        if groups in self._made:
            self._made.remove(groups)

    def close(self) -> None:
        """End all groups and the watch."""
        self.liveness.close()
        for groups in list(self._made):
            self.release(groups)
