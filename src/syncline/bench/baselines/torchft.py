"""torchft: DistributedDataParallel whose ranks ask a lighthouse server before every step which ranks are alive.

https://github.com/pytorch/torchft. Each rank is a replica, and all must take part in every step. A race does not use
the purpose of torchft, to continue without lost ranks.
"""

from __future__ import annotations

import importlib
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore  # what torch.distributed re-exports untyped
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.bench.baselines.base import find_package
from syncline.bench.baselines.ddp import WrappedRun, buffers_option
from syncline.environment import detect
from syncline.errors import WorldError
from syncline.reduction import Communicator, broadcast_tree
from syncline.strategies import RunSettings, Strategy, StrategyRun
from syncline.transports.key_value_store import find_rendezvous, listening_address

__all__ = ["TorchFT", "find_torchft", "store_at"]


def find_torchft(requirement: str = "torchft==0.2.0") -> ModuleType:
    """The package. An error names the tested release."""
    os.environ.setdefault("RUST_LOG", "error")  # otherwise it prints ten lines per step, which takes time
    return find_package("torchft", requirement)


@dataclass(frozen=True, repr=False)
class TorchFT(Strategy):
    """DistributedDataParallel in torchft's Manager, each rank a replica. Needs the package `torchft`.

    >>> from syncline.bench.baselines import availability
    >>> "pip install torchft" in (availability("torchft") or "pip install torchft")
    True
    """

    name: ClassVar[str] = "torchft"

    def __post_init__(self) -> None:
        find_torchft()

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        return _TorchFTRun(self, model, optimizer, communicator, settings)


class _TorchFTRun(WrappedRun):
    backend = "torchft"

    def _connect(self) -> None:
        self._torchft = find_torchft()
        self._servers: list[Any] = []
        super()._connect()
        self.optimizer = self._torchft.Optimizer(self._manager, self.optimizer)

    def detach(self) -> None:
        super().detach()
        for server in self._servers:
            server.shutdown()
        self._servers = []

    def _group(self) -> AbstractContextManager[None]:
        return nullcontext()  # torchft makes its own groups

    def _wrap(self) -> DistributedDataParallel:
        rank, size = self.communicator.rank, self.communicator.size
        timeout = timedelta(seconds=self.world.transport.timeout)
        place = find_rendezvous(detect())
        address = listening_address(place.address, len(set(self.world.hosts)) == 1)
        coordination = importlib.import_module("torchft.coordination")
        lighthouse_url = ""
        if rank == 0:
            lighthouse = coordination.LighthouseServer(bind=f"{address}:0", min_replicas=size)
            self._servers.append(lighthouse)
            # The address that it reports has a host name, which may not resolve.
            lighthouse_url = f"http://{address}:{urlsplit(lighthouse.address()).port}"
        self._store = store_at(address, timeout)
        manager = self._torchft.Manager(
            pg=self._torchft.ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=size,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            hostname=address,
            replica_id=f"rank{rank}_",
            lighthouse_addr=broadcast_tree(self.communicator, {"lighthouse": lighthouse_url}, 0)["lighthouse"],
            checkpoint_transport=_NoCheckpoints(),
            init_sync=False,  # the ranks have the same weights already
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
        )
        self._servers.insert(0, manager)
        self._manager = _TimedManager(manager, self)
        wrapped: DistributedDataParallel = self._torchft.DistributedDataParallel(
            self._manager, self.model, **{buffers_option(): False}
        )
        return wrapped

    def _expose(self) -> None:
        """Nothing to add: the hook waits for each bucket within backward, where `_TimedManager` counts it."""


class _TimedManager:
    """Torchft's Manager for its module and optimizer, with the time that it takes."""

    def __init__(self, manager: Any, run: WrappedRun) -> None:
        self._manager = manager
        self._run = run

    def start_quorum(self) -> None:
        self._manager.start_quorum()

    def allreduce(self, bucket: Tensor) -> Any:
        start = self._run.now()
        work = self._manager.allreduce(bucket)
        work.wait()  # as the hook of torchft does
        self._run.stats.waited(start, self._run.now())
        return work

    def should_commit(self) -> bool:
        """Raise if a step is not committed: torchft would skip it silently."""
        start = self._run.now()
        agreed = bool(self._manager.should_commit())
        self._run.stats.waited(start, self._run.now())
        if not agreed:
            raise WorldError(
                f"torchft did not commit step {self._manager.current_step()}: {self._manager.errored()}; look for a "
                "failed rank in the output of the others"
            )
        return True


class _NoCheckpoints:
    """Replaces the checkpoint server of torchft, which uses pickle. No rank joins late, so none needs it."""

    def metadata(self) -> str:
        return "none"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        raise WorldError(f"torchft wants to send a checkpoint of step {step} to {dst_ranks}: a race has no late ranks")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        raise WorldError(f"torchft wants a checkpoint of step {step} from {src_rank}: a race has no late ranks")

    def disallow_checkpoint(self) -> None:
        return

    def shutdown(self, wait: bool = True) -> None:
        return


def store_at(address: str, timeout: timedelta) -> TCPStore:
    """A store of this rank that listens on one address; by default torch listens on every interface."""
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
