"""A pool of real processes for tests: they connect once and then run the functions of many tests.

The pool communicates with its own children over pipes of `multiprocessing`, within this machine.
"""

from __future__ import annotations

import contextvars
import gc
import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any

from syncline.errors import SynclineError
from syncline.transports import Transport

__all__ = ["PRELOADED", "Pool", "fork_context", "free_port"]

PRELOADED = (
    "torch",
    "torch._dynamo",  # torch imports it at the first step of an optimizer, which takes one second
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "numba",
    "syncline.cli.run",
    "syncline.cli.train",
    "syncline.launch.start",
    "syncline.testing",
    "syncline.checkpoint",
    "syncline.transports.torch_dist",
    "syncline.transports.zeromq",
)
"""Modules that the fork server imports; none of them starts a thread, MPI or CUDA."""

TEST_TIMEOUT_S = 120.0
"""Timeout of the slowest step of a test on a busy machine."""


def free_port() -> int:
    """A port of the loopback interface on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_context() -> ForkServerContext:
    """A multiprocessing context whose processes are forked from a server that has imported torch and syncline."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Pool:
    """`size` processes, connected by a transport on the loopback interface.

    ```python
    with Pool(4) as pool:
        results = pool.run(check_my_collective, 3)      # on the first three processes
    ```
    """

    def __init__(self, size: int, timeout: float = 60.0, engine: str = "torch_dist") -> None:
        self.size = size
        context = fork_context()
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, engine, rank, size, port, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """Call `fn(transport, *args)` on the first `size` ranks, and return the results in the order of ranks."""
        for pipe in self._pipes:
            pipe.send((fn, size, args))
        results: list[Any] = []
        problems: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TEST_TIMEOUT_S):
                problems.append(f"rank {rank} of {size} did not answer within {TEST_TIMEOUT_S:.0f} s in {fn.__name__}")
                continue
            try:
                result, problem = pipe.recv()
            except EOFError:
                result, problem = None, f"the process of rank {rank} has died in {fn.__name__}"
            results.append(result)
            if problem:
                problems.append(f"rank {rank} of {size}: {problem}")
        assert not problems, "\n".join(problems)
        return results[:size]

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(pipe: Connection, engine: str, rank: int, size: int, port: int, timeout: float) -> None:
    import torch

    from syncline.environment import detect

    connect = importlib.import_module(f"syncline.transports.{engine}").connect
    gc.freeze()  # the collector, and sl.distribute in its search for wrappers, skip the objects of all imports
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    everyone: Transport = connect(detect(), timeout)
    channels: dict[int, Transport | None] = {}
    before = contextvars.copy_context()
    while True:
        try:
            fn, members, args = pipe.recv()
        except EOFError:
            break
        _close_channels(before)
        before = contextvars.copy_context()  # one per call, so that a call does not see the last one's world
        try:
            if members not in channels:
                channels[members] = everyone.split(range(members))
            channel = channels[members]
            pipe.send((None if channel is None else before.run(fn, channel, *args), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    everyone.close()


def _close_channels(context: contextvars.Context) -> None:
    """Close the channels that the last call has left open, after all ranks have finished it.

    Each thread of gloo polls a hundred times a second, and a pool lives long.
    """
    from syncline.world import current_world

    with suppress(SynclineError):
        context.run(current_world).release_groups()
