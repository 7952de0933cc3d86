"""torchft in `syncline bench elastic`: the lighthouse server of a job, and the training script of its workers.

https://github.com/pytorch/torchft. Each worker is a replica group of one rank. The script follows torchft's example
train_ddp.py: its DistributedDataParallel, Manager and Optimizer on gloo, and the state of a healthy worker over the
process group. The journal is that of `worker.py`. Timeouts are those of the example, of the command of the lighthouse
in torchft's README, and otherwise torchft's defaults.

```text
worker killed        heartbeats missing for heartbeat_timeout         next quorum, without it
─────┼───────────────────────────────────────────────────────────────────┼──────►
     │ the others' all-reduce fails or ends at group_timeout; they do not commit the step, and wait for the quorum
```

torchft's Manager listens on all interfaces. Everything else listens on the loopback interface.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch.utils.data import DataLoader

from syncline.bench.baselines.ddp import buffers_option
from syncline.bench.baselines.torchft import find_torchft, store_at
from syncline.bench.elastic.worker import AGREE_EVERY_STEPS, Journal, ScriptSettings, make_optimizer
from syncline.errors import SpecError
from syncline.specs import Registry
from syncline.workloads import build
from syncline.workloads.base import Workload

__all__ = ["CONTENDERS", "TorchFTJob", "train"]

PACKAGE = "torchft-nightly==2026.10.26"
"""The tested release. With torchft 0.2.0 all workers fail when one is lost during an all-reduce on gloo."""
LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 10.0
"""After this time the lighthouse no longer waits for workers that send heartbeats and do not ask for a quorum."""
TICK_S = 0.1
"""Interval in which the lighthouse checks whether a quorum is complete."""
MANAGER_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TorchFTJob:
    """A job of torchft. Needs the package `torchft`."""

    name: ClassVar[str] = "torchft"
    heartbeat_timeout: float = 5.0
    """Seconds without a heartbeat after which the lighthouse counts a worker as lost. Heartbeats come every 0.1 s."""
    group_timeout: float = 5.0
    """Timeout in seconds of an all-reduce. A worker whose neighbour has given up a step waits for this long."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_timeout", "group_timeout"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise SpecError(f"torchft({name}={value!r}): seconds above 0")
        find_torchft(PACKAGE)

    @property
    def settings(self) -> dict[str, str]:
        """The installed release and the timeouts, for the document of the bench."""
        package = metadata.packages_distributions()[self.name][0]
        timeouts = {
            "heartbeat timeout": self.heartbeat_timeout,
            "all-reduce timeout": self.group_timeout,
            "join timeout": JOIN_TIMEOUT_S,
            "quorum tick": TICK_S,
            "manager timeout": MANAGER_TIMEOUT_S,
        }
        return {package: metadata.version(package), **{name: f"{value:g} s" for name, value in timeouts.items()}}

    @contextmanager
    def lighthouse(self) -> Iterator[Mapping[str, str]]:
        """Serve the lighthouse in this process. Yields the environment variables that the workers need."""
        server = importlib.import_module("torchft.coordination").LighthouseServer(
            bind=f"{LOOPBACK}:0",
            min_replicas=1,
            join_timeout_ms=round(1000 * JOIN_TIMEOUT_S),
            quorum_tick_ms=round(1000 * TICK_S),
            heartbeat_timeout_ms=round(1000 * self.heartbeat_timeout),
        )
        try:
            # The address that it reports has a host name, which may not resolve.
            port = urlsplit(server.address()).port
            yield {"TORCHFT_LIGHTHOUSE": f"http://{LOOPBACK}:{port}", "GLOO_SOCKET_IFNAME": "lo"}
        finally:
            server.shutdown()


CONTENDERS = Registry[TorchFTJob]("contender")
CONTENDERS.add(TorchFTJob.name, TorchFTJob)


def train(settings: ScriptSettings) -> None:
    """Train on this worker until the stop file exists, and journal the metrics of the final model."""
    torch.set_num_threads(1)
    torchft = find_torchft(PACKAGE)
    transfer = importlib.import_module("torchft.checkpointing.pg_transport")
    journal = Journal(settings.folder)
    workload = build(settings.workload)
    model = workload.model(settings.seed)
    inner = make_optimizer(workload, model, settings)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=CONTENDERS.build(settings.strategy).group_timeout))
    store = store_at(LOOPBACK, timedelta(seconds=MANAGER_TIMEOUT_S))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        hostname=LOOPBACK,
        replica_id=f"replica_{journal.place}",
        timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
        checkpoint_transport=transfer.PGTransport(
            group, timeout=timedelta(seconds=TRANSFER_TIMEOUT_S), device=torch.device("cpu")
        ),
    )
    wrapped = torchft.DistributedDataParallel(manager, model, **{buffers_option(): False})
    optimizer = torchft.Optimizer(manager, inner)
    manager.register_state_dict_fn("model", wrapped.load_state_dict, wrapped.state_dict)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    # The inner optimizer takes a step only if torchft commits the step.
    inner.register_step_post_hook(lambda *_: journal.write_step(manager.current_step(), manager.num_participants()))
    try:
        for batch in _batches(torchft, manager, workload, settings, journal.place):
            optimizer.zero_grad()
            workload.loss(wrapped, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if manager.current_step():  # a newcomer that comes after the end has no trained model
            metrics = workload.evaluate(model, workload.splits().validation)
            journal.write(metrics=metrics, steps=manager.current_step())
    finally:
        manager.shutdown(wait=False)


def _batches(torchft: Any, manager: Any, workload: Workload, settings: ScriptSettings, place: int) -> Iterator[Any]:
    """The batches of one epoch after the other. All workers look for the stop file at the same steps."""
    data = workload.splits().train
    sampler = torchft.DistributedSampler(
        data, replica_rank=place, num_replica_groups=settings.workers, group_rank=0, num_replicas=1
    )
    loader = DataLoader(data, batch_size=settings.batch, sampler=sampler)
    while True:
        sampler.set_epoch(manager.current_step() // len(loader))
        for batch in loader:
            if manager.current_step() % AGREE_EVERY_STEPS == 0 and os.path.exists(settings.stop_file):
                return
            yield batch


if __name__ == "__main__":
    train(ScriptSettings(**json.loads(sys.argv[1])))
