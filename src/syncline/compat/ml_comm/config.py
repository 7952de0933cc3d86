"""The arguments of `config_team`, and how the ranks agree on them."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass, fields

import torch

from syncline.world import Group, broadcast

__all__ = ["TeamConfig", "agree_on"]

logger = logging.getLogger("syncline")


@dataclass(frozen=True)
class TeamConfig:
    """The arguments of `config_team`, which are the same on all ranks. The default is synchronous."""

    algorithm: int = 0
    ksteps: int = 1
    max_steps: int = 1
    verbosity: int = 0
    perf_freq: int = 0


def agree_on(config: TeamConfig, call: str, group: Group) -> TeamConfig:
    """Rank 0's configuration. A rank whose own differs logs a warning. Every rank calls it."""
    mine = torch.tensor(astuple(config), dtype=torch.int64)
    agreed = broadcast(mine, root=0, group=group)
    for field, own, first in zip(fields(config), mine.tolist(), agreed.tolist(), strict=True):
        if own != first:
            logger.warning("rank %d: %s has %s=%d here; rank 0's %d is used", group.rank, call, field.name, own, first)
    return TeamConfig(*agreed.tolist())
