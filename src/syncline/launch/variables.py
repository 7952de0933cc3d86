"""The variables that tell workers who they are and where they meet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from syncline.launch.machine import cores

__all__ = ["carried", "common_variables", "network_key", "role_environment", "threads_each"]

CARRIED = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TP_", "TORCH_", "CUDA_", "UCX_", "PYTHON", "SYNCLINE_", "HOROVOD_")
"""What goes along to other hosts, by the beginning of its name: their own environment has the rest."""
SUPERVISORS_OWN = (
    *("SYNCLINE_SSH", "SYNCLINE_SUPERVISOR", "SYNCLINE_KEY", "SYNCLINE_PROGRAM"),
    # Of a run that this one may be started in.
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"),
)


def common_variables(address: str, port: int) -> dict[str, str]:
    """What all processes of a run are told: where they meet."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served by us, not by rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "SYNCLINE_RUN_ID": secrets.token_hex(8),
    }


def role_environment(
    workers: int, *, servers: int = 0, evaluators: int = 0, hosts: int = 1, handlers: str = ""
) -> dict[str, str]:
    """The variables that tell a process how many workers, servers, evaluators and hosts a run has.

    They are set even if there is no server, because a run may be started inside another run.


    >>> role_environment(4, servers=2)["SYNCLINE_SERVERS"]
    '2'
    """
    return {
        "SYNCLINE_WORKERS": str(workers),
        "SYNCLINE_SERVERS": str(servers),
        "SYNCLINE_EVALUATORS": str(evaluators),
        "SYNCLINE_HOSTS": str(hosts),
        "SYNCLINE_ROLE": "worker",
        "SYNCLINE_PROGRAM": "",
    } | ({"SYNCLINE_HANDLERS": handlers} if handlers else {})


def threads_each(workers: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A fair share of the cores for each worker's arithmetic, unless the user has said otherwise.

    >>> threads_each(4, {"OMP_NUM_THREADS": "3"})
    {'OMP_NUM_THREADS': '3'}
    """
    chosen = (os.environ if environ is None else environ).get("OMP_NUM_THREADS")
    return {"OMP_NUM_THREADS": chosen or str(max(1, cores() // max(1, workers)))}


def network_key(environ: Mapping[str, str] | None = None) -> str:
    """A secret that admits to the run's network, where others may be on the wire: the user's own, or a fresh one.

    >>> network_key({"SYNCLINE_KEY": "none"}), len(network_key({}))
    ('none', 40)
    """
    import zmq

    chosen = (os.environ if environ is None else environ).get("SYNCLINE_KEY")
    return chosen or str(zmq.curve_keypair()[1].decode("ascii"))


def carried(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's variables that go along to other hosts.

    >>> carried({"NCCL_DEBUG": "INFO", "HOME": "/home/user", "SYNCLINE_SSH": "ssh -v"})
    {'NCCL_DEBUG': 'INFO'}
    """
    found = os.environ if environ is None else environ
    return {name: value for name, value in found.items() if name.startswith(CARRIED) and name not in SUPERVISORS_OWN}
