"""Process groups, made straight from a store under names of ours.

`dist.new_group` names a group by how many groups a process has made, so that ranks with different histories never meet;
and it needs the process's one default group, which belongs to the user's script. Groups made from a store need neither.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from syncline.errors import UnsupportedError, WorldError
from syncline.transports.liveness import Liveness

__all__ = ["Engine", "Groups"]

MAX_DEVICES = 4
"""Largest number of gloo devices of a process. Each has a thread and a listening socket; channels share them."""
SPARE_DESCRIPTORS = 32
"""File descriptors that stay free when a channel is made: gloo aborts the process if it gets none."""
MIN_POLL_S, MAX_POLL_S = 0.001, 0.05
"""Seconds between two checks for members that have not joined yet: at first, and at most."""


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

    def __init__(
        self,
        store: Store,
        liveness: Liveness,
        timeout: float,
        address: str,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._on_close = on_close
        self.store = store
        self.liveness = liveness
        self.timeout = timeout
        self._address = address
        self._made: list[Groups] = []
        self._devices: list[Any] = []
        self._channels = 0

    def await_members(self, channel: str, members: Sequence[int], rank: int) -> None:
        """Return when all members are ready to make a channel; raise soon after one is known to be gone.

        gloo itself would wait for it until the timeout. If a rank has too few file descriptors left, all members
        refuse the channel.
        """
        refusal, runtime = _refusal(rank, len(members)), self.liveness.runtime
        here = PrefixStore(f"channel/{channel}", self.store)
        if refusal:
            here.set("refused", refusal)
        here.set(f"here/{rank}", "1")
        keys, until, pause = [f"here/{member}" for member in members], runtime.now() + self.timeout, MIN_POLL_S
        while not here.check(keys):
            gone = [member for member in members if member in self.liveness.lost()]
            if gone:
                raise RuntimeError(f"rank {gone[0]} is gone")
            if runtime.now() > until:
                raise RuntimeError("timed out: not all members have joined")
            runtime.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)
        if here.check(["refused"]):
            raise WorldError(here.get("refused").decode())

    def groups(self, channel: str, rank: int, size: int) -> Groups:
        """Meet the other members of a channel."""
        store = PrefixStore(f"channel/{channel}", self.store)
        store.set_timeout(timedelta(seconds=self.timeout))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = self._next_devices(gloo)
        cpu = gloo(PrefixStore("gloo", store), rank, size, options)
        groups = Groups(cpu, lambda: self._nccl(PrefixStore("nccl", store), rank, size))
        self._made.append(groups)
        return groups

    def _next_devices(self, gloo: Any) -> list[Any]:
        """The devices of the next channel: made for the first few, shared by the others."""
        self._channels += 1
        if len(self._devices) < MAX_DEVICES:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            if interfaces:
                self._devices.append([gloo.create_device(interface=name) for name in interfaces.split(",")])
            else:  # by default gloo listens on the address that the host's own name resolves to
                self._devices.append([gloo.create_device(hostname=self._address)])
        return list(self._devices[self._channels % len(self._devices)])

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
        self._devices.clear()
        if self._on_close is not None:
            self._on_close()


def _refusal(rank: int, members: int) -> str:
    """Why this process cannot open another channel: each peer takes a file descriptor. Empty if it can."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux: the number is unknown
        return ""
    if limit == resource.RLIM_INFINITY or used + members + SPARE_DESCRIPTORS <= limit:
        return ""
    return (
        f"rank {rank} has {used} of {limit} file descriptors in use, and a channel of {members} ranks takes "
        f"{members - 1} more: close teams that are no longer needed (team.close()), or raise the limit (ulimit -n)"
    )
