"""Every strategy by its name."""

from __future__ import annotations

from syncline.specs import Registry
from syncline.strategies.adacomm import AdaComm
from syncline.strategies.allreduce import AllReduce
from syncline.strategies.base import Preset, Strategy
from syncline.strategies.bsp import Bsp
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.downpour import Downpour
from syncline.strategies.easgd import Easgd
from syncline.strategies.ensemble import Average, Ensemble
from syncline.strategies.gossip import Gossip
from syncline.strategies.hogwild import Hogwild
from syncline.strategies.local import Local
from syncline.strategies.master import Master
from syncline.strategies.onesided import OneSided
from syncline.strategies.ssp import Ssp

__all__ = ["build_strategy", "default_presets", "strategy_names"]

STRATEGIES: tuple[type[Strategy], ...] = (
    AllReduce,
    Bsp,
    Ssp,
    Downpour,
    Hogwild,
    Master,
    Local,
    AdaComm,
    DiLoCo,
    Easgd,
    Gossip,
    OneSided,
    Average,
    Ensemble,
)

WHOLE_MODEL = "every worker holds the whole model here, and no strategy splits it."
OTHER_NAMES = {
    **dict.fromkeys(("ddp", "distributeddataparallel", "dataparallel", "dp", "horovod"), "allreduce"),
    **dict.fromkeys(("sync", "synchronous", "syncsgd", "synchronoussgd", "ssgd"), "allreduce;bsp"),
    **dict.fromkeys(("ps", "parameterserver"), "bsp;ssp;downpour"),
    **dict.fromkeys(("async", "asynchronous", "asyncsgd"), "downpour;master(sync=False);hogwild"),
    "asgd": "downpour;onesided",
    "bulksynchronousparallel": "bsp",
    **dict.fromkeys(("stalesynchronousparallel", "stalesynchronous", "boundedstaleness"), "ssp"),
    **dict.fromkeys(("localsgd", "fedavg", "federatedaveraging", "modelaveraging", "parameteraveraging"), "local"),
    **dict.fromkeys(("postlocal", "postlocalsgd"), "local(after=100)"),
    **dict.fromkeys(("slowmo", "bmuf", "blockmomentum"), "diloco"),
    **dict.fromkeys(("elasticaveraging", "elasticaveragingsgd", "elastic"), "easgd"),
    "eamsgd": "easgd(momentum=0.9)",
    **dict.fromkeys(("dpsgd", "decentralized", "decentralised", "decentralizedsgd", "choco", "chocosgd"), "gossip"),
    "adpsgd": "gossip(pairwise=True)",
    **dict.fromkeys(("rma", "onesidedsgd"), "onesided"),
    **dict.fromkeys(("fsdp", "fullyshardeddataparallel", "zero", "zero1", "zero2", "zero3", "deepspeed"), WHOLE_MODEL),
    **dict.fromkeys(("tensorparallel", "modelparallel", "pipeline", "pipelineparallel"), WHOLE_MODEL),
}
"""Names that users may know a strategy by, and our specs for them."""


def build_strategy(spec: str | Strategy) -> Strategy:
    """The strategy that a spec describes.

    >>> build_strategy("allreduce(delay=1)")
    allreduce(delay=1)
    """
    return spec if isinstance(spec, Strategy) else _registry().build(spec)


def strategy_names() -> list[str]:
    """Every name that a strategy spec may begin with."""
    return _registry().names()


def default_presets() -> list[Preset]:
    """What every strategy sends into a race by default.

    >>> [preset.spec for preset in default_presets()][:2]
    ['allreduce', 'allreduce(delay=1)']
    """
    return [preset for strategy in STRATEGIES for preset in strategy.presets]


def _registry() -> Registry[Strategy]:
    registry = Registry[Strategy]("strategy", OTHER_NAMES)
    for strategy in STRATEGIES:
        registry.add(strategy.name, strategy)
    return registry
