"""Random numbers inside divided layers: the same on all workers of a team, or different ones.

Dropout on a tensor that every worker has must use the same mask everywhere, so it draws from torch's global generators,
which are equal. Dropout on a tensor of which each worker has a part must use different masks:

```text
global generator    a₀ ── s ──────────────────────── a₁ ──►      the same on all workers
                          │
worker r                  └─ seeded with (s, r): masks            different on each worker
```
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from syncline.parallel.team import LayerTeam

__all__ = ["split_random"]

SEED_RANGE = 2**62
"""Seeds are drawn below this number."""


@contextmanager
def split_random(team: LayerTeam, device: torch.device | None = None) -> Iterator[None]:
    """Inside, random numbers differ between the workers of a team. Afterwards the global generators are equal again.

    One number is drawn from the global generator on the CPU, so that each use has different numbers. `device`: a GPU
    whose generator layers inside use.
    """
    seed = int(torch.randint(SEED_RANGE, ()))
    gpus = [] if device is None or device.type == "cpu" else [device]
    with torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cuda"):
        own = (seed * team.size + team.rank) % 2**63
        torch.default_generator.manual_seed(own)
        for gpu in gpus:
            module = torch.get_device_module(gpu)
            with module.device(gpu):
                module.manual_seed(own)
        yield
