"""Runs in the lab: the hosts are network namespaces of this machine, joined by links of a set rate."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from syncline.errors import SpecError
from syncline.launch.lab import Lab, LabHost
from syncline.launch.machine import warn_if_crowded
from syncline.launch.programs import Place
from syncline.launch.start import Job, run_placed
from syncline.launch.store import serve_store
from syncline.launch.variables import network_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["meet_in_lab", "run_in_lab"]


def run_in_lab(job: Job, hosts: int, rate: str, ranks: int | None = None) -> int:
    """Make a lab, run in it, take it down; the exit code."""
    ranks = hosts if ranks is None else ranks
    if ranks % hosts:
        raise SpecError(f"-n {ranks} is not a multiple of the {hosts} hosts of the lab: every host takes as many ranks")
    warn_if_crowded(ranks)
    with Lab(hosts, rate) as lab:
        print(
            f"syncline: a lab of {hosts} hosts at {rate}, {_measured(lab)}; it adds no latency of its own",
            file=sys.stderr,
            flush=True,
        )
        places, store, address = meet_in_lab(lab, ranks, job.address, mpi=job.mpi)
        return run_placed(job, places, store, address)


def meet_in_lab(
    lab: Lab, ranks: int, address: str | None = None, *, mpi: bool = False
) -> tuple[list[Place], TCPStore, str]:
    """Places for so many ranks, a fresh store for them, and its address. With fewer ranks than hosts the first ones.

    `mpi`: places that mpiexec can reach too.
    """
    hosts = lab.hosts[:ranks]
    first = hosts[0]
    meeting = address or first.address
    # A socket stays in the network it was made in, whichever thread uses it later.
    with _unresolved_names():
        store = first.call(lambda: serve_store(meeting, ranks))
    common = {"SYNCLINE_LAB": f"{len(lab.hosts)}@{lab.rate}", "SYNCLINE_KEY": network_key()}
    door = lab.door if mpi else ""
    return [_place(host, ranks // len(hosts), common, door) for host in hosts], store, meeting


@contextlib.contextmanager
def _unresolved_names() -> Iterator[None]:
    """Keep c10d's warning that the lab has no names off the terminal; it writes to the descriptor itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _measured(lab: Lab) -> str:
    return "not measured" if lab.measured is None else f"measured {lab.measured / 1e6:.1f} Mbit/s"


def _place(host: LabHost, slots: int, common: Mapping[str, str], door: str) -> Place:
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    variables = {**dict.fromkeys(names, host.interface), **common}
    # All hosts share this machine's cores: more threads would only make them wait for each other.
    variables["OMP_NUM_THREADS"] = "1"
    # Nobody answers for names in the lab, and c10d warns of each address that it cannot name.
    variables["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    return Place(
        name=host.name,
        slots=slots,
        enter=host.enter,
        variables=variables,
        address=host.address,
        interface=host.interface,
        door=door,
    )
