"""Every baseline by its name."""

from __future__ import annotations

from syncline.bench.baselines.ddp import DDP
from syncline.bench.baselines.hivemind import Hivemind
from syncline.bench.baselines.post_local import PostLocalSGD
from syncline.bench.baselines.torchft import TorchFT
from syncline.errors import UnsupportedError
from syncline.specs import Registry
from syncline.strategies import Strategy

__all__ = ["availability", "baseline_names", "build_baseline", "default_baselines", "uninvited"]

UNINVITED = {"torchft": "it listens on every interface of this machine, so it runs only where --entries names it"}


def build_baseline(spec: str) -> Strategy:
    """The baseline that a spec describes, as a strategy like ours.

    >>> build_baseline("ddp(hook='fp16')")
    ddp(hook='fp16')
    """
    return _registry().build(spec)


def baseline_names() -> list[str]:
    """Every name that a baseline's spec may begin with.

    >>> baseline_names()
    ['ddp', 'ddp_post_local', 'hivemind', 'torchft']
    """
    return _registry().names()


def default_baselines() -> list[str]:
    """Those that a race takes unless it is told; some may not be available.

    >>> default_baselines()[0]
    'ddp'
    """
    return [
        "ddp",
        "ddp(hook='fp16')",
        "ddp(hook='powersgd', rank=2)",
        "ddp_post_local(start=20)",
        "torchft",
        "hivemind",
    ]


def availability(spec: str) -> str | None:
    """Why a baseline cannot be used here, or None where it can. A spec that nobody could use is a `SpecError`.

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


def uninvited(spec: str) -> str | None:
    """Why nobody gets this baseline without asking for it, or None.

    >>> uninvited("ddp") is None
    True
    """
    return UNINVITED.get(spec)


def _registry() -> Registry[Strategy]:
    registry = Registry[Strategy]("baseline")
    for baseline in (DDP, PostLocalSGD, TorchFT, Hivemind):
        registry.add(baseline.name, baseline)
    return registry
