"""NCCL for ranks that share a GPU, in tests on a machine with fewer GPUs than ranks."""

from __future__ import annotations

import os

import torch

import syncline as sl


def share_gpus(world: sl.World) -> bool:
    """Let NCCL connect ranks that share a GPU. Returns whether any do. Call it before NCCL is used.

    NCCL refuses two ranks on one GPU of one host. With different names of the host it takes them for ranks of two
    hosts, which talk over sockets.
    """
    shared = torch.cuda.device_count() < world.size
    if shared:
        os.environ |= {
            "NCCL_HOSTID": f"rank-{world.rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_MNNVL_ENABLE": "0",
        }
    return shared
