"""Process groups: those of the channels, made from a store under our own names, and torch's default group.

`dist.new_group` names a group by the number of groups that a process has made, so that ranks with different histories
never meet. It also needs the default group of the process, which belongs to the user's script. Groups made from a
store need neither.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from syncline.environment import Environment
from syncline.errors import UnsupportedError, WorldError
from syncline.runtime import Task
from syncline.transports.key_value_store import KeyValueStore, find_rendezvous, first_line, open_store
from syncline.transports.liveness import Liveness

__all__ = ["ChannelGroups", "DefaultGroup", "ProcessGroupFactory", "has_default_group"]

MAX_DEVICES = 4
"""Largest number of gloo devices of a process. Each has a thread and a listening socket; channels share them."""
INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default torch ends the process, without naming a rank
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread of the process's first group sleeps 8 minutes, then kills it
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # else a thread sleeps 75 s, and the end of the group waits for it
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # that messages wait for each other is wanted
}
"""What torch does when an operation of NCCL fails. Our own task notices that, and names the lost rank."""
WATCHDOG_TIMEOUT = timedelta(days=365)
"""After which torch takes an operation of NCCL for failed. Our waits have timeouts, and name the lost rank."""
SPARE_DESCRIPTORS = 32
"""File descriptors that stay free when a channel is made: gloo aborts the process if it gets none."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds to wait, at the end, for channels that are closed in the background."""
MIN_POLL_S, MAX_POLL_S = 0.001, 0.05
"""Seconds between two checks for members that have not joined yet: at first, and at most."""


class ChannelGroups:
    """One channel's groups: gloo for tensors on the CPU and for messages, NCCL for tensors on GPUs."""

    def __init__(self, cpu: Any, make_cuda: Callable[[], Any]) -> None:
        self.cpu = cpu
        self._make_cuda = make_cuda
        self._cuda: Any = None

    def of(self, tensor: torch.Tensor) -> Any:
        """The group for the device of a tensor. The first tensor on a GPU makes the NCCL group."""
        if not tensor.is_cuda:
            return self.cpu
        if self._cuda is None:
            self._cuda = self._make_cuda()
        return self._cuda

    def close(self) -> list[Any]:
        """Release both groups. Returns gloo's: its threads and sockets end with the last reference."""
        if self._cuda is not None:
            self._cuda.shutdown()
            self._cuda = None
        held, self.cpu = [self.cpu], None
        return held


class ProcessGroupFactory:
    """Makes the process groups of all channels of a process, from one store."""

    def __init__(
        self,
        store: Store,
        liveness: Liveness,
        timeout: float,
        address: str,
        control_store: KeyValueStore,
    ) -> None:
        self.control_store = control_store
        """The store of the world's control channels. Closed with the factory."""
        self.store = store
        self.liveness = liveness
        self.timeout = timeout
        self._address = address
        self._groups: list[ChannelGroups] = []
        self._closing: list[Task] = []
        self._devices: list[Any] = []
        self._channels = 0
        self.idle_waiting_tasks: list[Any] = []
        """Tasks that wait for messages in place of their callers, in an elastic job. The channels share them."""

    def await_members(self, channel: str, members: Sequence[int], rank: int) -> None:
        """Wait until all members are ready to make a channel; raise soon after one is known to be lost.

        gloo itself would wait until the timeout. If a rank has too few file descriptors left, all members
        refuse the channel.
        """
        refusal = _refusal(rank, len(members))
        here = PrefixStore(f"channel/{channel}", self.store)
        if refusal:
            here.set("refused", refusal)
        self._check_links(here, members)
        here.set(f"here/{rank}", "1")
        _await_keys(here, [f"here/{member}" for member in members], members, self.liveness, self.timeout)
        if here.check(["refused"]):
            raise WorldError(here.get("refused").decode())

    def _check_links(self, here: Store, members: Sequence[int]) -> None:
        """Raise if the host of a member does not answer: gloo would wait for a connection until its timeout."""
        links, pause = self.liveness.links, MIN_POLL_S
        if links is None:
            return
        links.start(members)
        while links.pending:
            self.liveness.runtime.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)
            links.poll()
        for member in members:
            if member in links.unreachable:
                reason = f"rank {self.liveness.rank} cannot reach rank {member}: {links.unreachable[member]}"
                here.set("cut", reason)
                raise RuntimeError(reason)

    def groups(self, channel: str, members: Sequence[int], rank: int) -> ChannelGroups:
        """Make the groups of a channel of these members. `rank` is this process's place among them."""
        size, store = len(members), PrefixStore(f"channel/{channel}", self.store)
        store.set_timeout(timedelta(seconds=self.timeout))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = self._next_devices(gloo)
        addresses: Store = PrefixStore("gloo", store)
        if self.liveness.elastic:
            addresses = _InterruptibleStore(addresses, members, self.liveness, self.timeout)
        cpu = gloo(addresses, rank, size, options)
        groups = ChannelGroups(cpu, lambda: self._make_nccl_group(PrefixStore("nccl", store), rank, size))
        self._groups.append(groups)
        return groups

    def _next_devices(self, gloo: Any) -> list[Any]:
        """The devices of the next channel. The first few channels make them, the others share them."""
        self._channels += 1
        if len(self._devices) < MAX_DEVICES:
            interfaces = os.environ.get(INTERFACES_VARIABLE)
            if interfaces:
                self._devices.append([gloo.create_device(interface=name) for name in interfaces.split(",")])
            else:  # by default gloo listens on the address that the host's own name resolves to
                self._devices.append([gloo.create_device(hostname=self._address)])
        return list(self._devices[self._channels % len(self._devices)])

    def make_nccl_pair(self, store: Store, rank: int, device: torch.device) -> Any:
        """A group of NCCL for messages between two ranks. Their kernels have priority. Both ranks call it and wait.

        The communicator is made at once: at the first message torch would make it too, and print a warning.
        """
        group = self._make_nccl_group(store, rank, 2, priority=True)
        group.eager_connect_single_device(device)
        return group

    def _make_nccl_group(self, store: Store, rank: int, size: int, priority: bool = False) -> Any:
        """A group of NCCL. It makes its communicator with the first operation. `priority`: that of its kernels."""
        if not dist.is_nccl_available():
            raise UnsupportedError("this PyTorch has no NCCL: move the tensor to the CPU, or name a schedule")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = WATCHDOG_TIMEOUT
        options.is_high_priority_stream = priority
        with _variables(NCCL_VARIABLES):
            return nccl(store, rank, size, options)

    def exchange_texts(self, name: str, members: Sequence[int], rank: int, text: str) -> list[str]:
        """The texts of all members, in their order. Raises a RuntimeError soon after one of them is lost."""
        here = PrefixStore(f"texts/{name}", self.store)
        here.set(str(rank), text)
        keys = [str(member) for member in members]
        _await_keys(here, keys, members, self.liveness, self.timeout)
        return [here.get(key).decode() for key in keys]

    def release(self, groups: ChannelGroups) -> None:
        """End one channel's groups; in an elastic job in the background.

        gloo closes its connections in tens of milliseconds, and training would wait for that in every new team.
        """
        held = groups.close()
        if groups in self._groups:
            self._groups.remove(groups)
        self._closing = [task for task in self._closing if not task.done()]
        if self.liveness.elastic:
            self._closing.append(self.liveness.runtime.spawn(held.clear, name="close groups"))

    def close(self) -> None:
        """Close all groups and stop the heartbeats."""
        self.liveness.close()
        for groups in list(self._groups):
            self.release(groups)
        for task in self._closing:
            task.join(CLOSE_TIMEOUT_S)
        self._devices.clear()
        self.control_store.close()


def _await_keys(store: Store, keys: list[str], members: Sequence[int], liveness: Liveness, timeout: float) -> None:
    """Wait until all keys are set; raise soon after one of the members is known to be lost."""
    runtime, pause = liveness.runtime, MIN_POLL_S
    until = runtime.now() + timeout
    while not store.check(keys):
        gone = [member for member in members if member in liveness.lost()]
        if gone:
            raise RuntimeError(f"rank {gone[0]} is gone")
        if liveness.links is not None and store.check(["cut"]):
            raise RuntimeError(store.get("cut").decode())
        if runtime.now() > until:
            raise RuntimeError("timed out: not all members have joined")
        runtime.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)


class _InterruptibleStore(Store):
    """The store in which gloo's members exchange their addresses. A wait ends if its member is lost.

    With a store of torch, gloo would wait for the address until its timeout.
    """

    def __init__(self, inner: Store, members: Sequence[int], liveness: Liveness, timeout: float) -> None:
        super().__init__()
        self._inner, self._members, self._liveness, self._timeout = inner, members, liveness, timeout

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        _await_keys(self._inner, keys, self._members, self._liveness, seconds)


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
        f"{members - 1} more: close groups that are no longer needed (group.close()), or raise the limit (ulimit -n)"
    )


def has_default_group() -> bool:
    """Whether this process has a default process group."""
    return bool(dist.is_initialized())


class DefaultGroup:
    """The default process group among the ranks of a world. A group that the script has made is used and kept."""

    def __init__(self, environment: Environment, timeout: float, backend: str | None = None) -> None:
        self._group: Any = None
        if dist.is_initialized():
            _check_same_ranks(environment)
            return
        both = torch.cuda.is_available() and dist.is_nccl_available()
        self._hook = sys.excepthook
        store = _store(environment, timeout)
        try:
            with _on_loopback() if environment.on_one_host else nullcontext():
                dist.init_process_group(
                    backend or ("cpu:gloo,cuda:nccl" if both else "gloo"),
                    store=store,
                    rank=environment.rank,
                    world_size=environment.size,
                    timeout=timedelta(seconds=timeout),
                )
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {environment.rank} of {environment.size} could not make torch.distributed's default process "
                f"group within {timeout:.3g} s: {first_line(error)}"
            ) from error
        self._group = dist.group.WORLD

    def close(self) -> None:
        """Destroy the group, unless the script did so or has made another."""
        group, self._group = self._group, None
        if group is None:
            return
        sys.excepthook = self._hook  # init_process_group installs one that prefixes each line of a traceback
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()


def _check_same_ranks(environment: Environment) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (environment.rank, environment.size):
        raise WorldError(
            f"torch.distributed has a default process group already, in which this is rank {rank} of {size}, and in "
            f"this world it is rank {environment.rank} of {environment.size}: leave out dist.init_process_group(), or "
            "process_group=True"
        )


def _store(environment: Environment, timeout: float) -> Store:
    if environment.size == 1:
        return HashStore()
    store = open_store(environment, find_rendezvous(environment), timeout)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"syncline/default/{restart}/{environment.rank}", 1)  # a second group has other keys
    return PrefixStore(f"syncline/default/{restart}/{number}", store)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo listen on the loopback interface only, unless `GLOO_SOCKET_IFNAME` is set."""
    if INTERFACES_VARIABLE in os.environ or not os.path.exists("/sys/class/net/lo"):
        yield
        return
    with _variables({INTERFACES_VARIABLE: "lo"}):
        yield


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment has these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
