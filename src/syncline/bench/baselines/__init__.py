"""Baselines from other libraries, as strategies: PyTorch's DistributedDataParallel, torchft and hivemind."""

from __future__ import annotations

from syncline.bench.baselines.base import process_group
from syncline.bench.baselines.ddp import DDP, ddp
from syncline.bench.baselines.hivemind import Hivemind
from syncline.bench.baselines.post_local import PostLocalSGD
from syncline.bench.baselines.torchft import TorchFT
from syncline.errors import UnsupportedError
from syncline.specs import Registry
from syncline.strategies import Strategy

__all__ = [
    "BASELINES",
    "DDP",
    "DEFAULT_BASELINES",
    "RUN_ONLY_IF_NAMED",
    "Hivemind",
    "PostLocalSGD",
    "TorchFT",
    "availability",
    "baseline_names",
    "build_baseline",
    "ddp",
    "process_group",
]

BASELINES = Registry[Strategy]("baseline")
for _baseline in (DDP, PostLocalSGD, TorchFT, Hivemind):
    BASELINES.add(_baseline.name, _baseline)

DEFAULT_BASELINES = (
    "ddp",
    "ddp(hook='fp16')",
    "ddp(hook='powersgd', rank=2)",
    "ddp_post_local(start=20)",
    "torchft",
    "hivemind",
)
"""The baselines of a race of all entries; some may not be available."""
RUN_ONLY_IF_NAMED = {"torchft": "it listens on every interface of this machine, so it runs only if --entries names it"}
"""Baselines that a race runs only if the user names them, and why."""


def build_baseline(spec: str) -> Strategy:
    """Build the baseline that a spec describes.

    >>> build_baseline("ddp(hook='fp16')")
    ddp(hook='fp16')
    """
    return BASELINES.build(spec)


def baseline_names() -> list[str]:
    """Every name of a baseline.

    >>> baseline_names()
    ['ddp', 'ddp_post_local', 'hivemind', 'torchft']
    """
    return BASELINES.names()


def availability(spec: str) -> str | None:
    """Why a baseline cannot run here, or None if it can. An invalid spec is a `SpecError`.

    >>> availability("ddp") is None
    True
    >>> availability("ddp(hook='bf16')")[:50]
    "ddp(hook='bf16'): torch's bf16 hook refuses to be "
    """
    try:
        build_baseline(spec)
    except UnsupportedError as error:
        return str(error)
    return None
