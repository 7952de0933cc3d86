"""torch.distributed's default process group, for code that asks for it: samplers, metrics, SyncBatchNorm."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from syncline.environment import Environment
from syncline.errors import WorldError
from syncline.transports.store import find_place, first_line, meet

__all__ = ["DefaultGroup", "has_default_group"]

INTERFACES = "GLOO_SOCKET_IFNAME"


def has_default_group() -> bool:
    """Whether this process has a default process group."""
    return bool(dist.is_initialized())


class DefaultGroup:
    """The default group among the ranks of a world; one that the script has made already is used, and stays."""

    def __init__(self, environment: Environment, timeout: float, backend: str | None = None) -> None:
        self._group: Any = None
        if dist.is_initialized():
            _check(environment)
            return
        both = torch.cuda.is_available() and dist.is_nccl_available()
        one_host = environment.local_known and environment.local_size == environment.size
        self._hook = sys.excepthook
        store = _store(environment, timeout)
        try:
            with _on_loopback() if one_host else nullcontext():
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


def _check(environment: Environment) -> None:
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
    store = meet(environment, find_place(environment), timeout)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    turn = store.add(f"syncline/default/{restart}/{environment.rank}", 1)  # a second group has keys of its own
    return PrefixStore(f"syncline/default/{restart}/{turn}", store)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo listen on the loopback interface only, unless `GLOO_SOCKET_IFNAME` is set."""
    if INTERFACES in os.environ or not os.path.exists("/sys/class/net/lo"):
        yield
        return
    os.environ[INTERFACES] = "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACES]
