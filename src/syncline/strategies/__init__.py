"""Synchronisation strategies: when workers communicate, with which workers, and what they exchange. One per file."""

from __future__ import annotations

import warnings
from typing import Any

from syncline.specs import Registry
from syncline.strategies.adacomm import AdaComm
from syncline.strategies.allreduce import AllReduce
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.auto import AutoCandidate, AutoStrategy
from syncline.strategies.base import Preset, RunSettings, Strategy, StrategyRun, strategy_run
from syncline.strategies.bsp import BSP
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.downpour import Downpour
from syncline.strategies.easgd import EASGD
from syncline.strategies.ensemble import Average, Ensemble
from syncline.strategies.gossip import Gossip
from syncline.strategies.hogwild import Hogwild
from syncline.strategies.local import Local
from syncline.strategies.master import Master
from syncline.strategies.onesided import OneSided
from syncline.strategies.run import Run, Shard, Step, Steps
from syncline.strategies.ssp import SSP

__all__ = [
    "BSP",
    "EASGD",
    "SSP",
    "AdaComm",
    "AllReduce",
    "AsynchronousRun",
    "AutoCandidate",
    "AutoStrategy",
    "Average",
    "DiLoCo",
    "Downpour",
    "Ensemble",
    "Gossip",
    "Hogwild",
    "Local",
    "Master",
    "OneSided",
    "Preset",
    "Run",
    "RunSettings",
    "Shard",
    "Step",
    "Steps",
    "Strategy",
    "StrategyRun",
    "build_strategy",
    "default_presets",
    "strategy_names",
    "strategy_run",
]

STRATEGIES: tuple[type[Strategy], ...] = (
    *(AllReduce, BSP, SSP, Downpour, Hogwild, Master),
    *(Local, AdaComm, DiLoCo, EASGD, Gossip, OneSided, Average, Ensemble),
    AutoStrategy,
)

WHOLE_MODEL = (
    "no strategy splits a model: sl.pipeline(…) splits it into stages, and sl.distribute(…, parallel=…) divides layers."
)
DIVISION = (
    'layers are not divided by a strategy: write parallel=sl.parallel.tensor(plan, size=2), or parallel="experts(2)".'
)
PIPELINE = 'a pipeline is no strategy: call sl.pipeline(…), or write parallel="pipeline(2) x allreduce".'
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
    "modelparallel": WHOLE_MODEL,
    **dict.fromkeys(
        ("tp", "tensor", "tensorparallel", "megatron", "spatial", "experts", "moe", "weirdtrick"), DIVISION
    ),
    **dict.fromkeys(("pp", "pipeline", "pipelineparallel", "gpipe", "1f1b", "pipedream"), PIPELINE),
}
"""Names from papers and other libraries, and the specs that an error message suggests for them."""

REGISTRY = Registry[Strategy]("strategy", OTHER_NAMES)
for _strategy in STRATEGIES:
    REGISTRY.add(_strategy.name, _strategy)

RENAMED = {"Bsp": "BSP", "Ssp": "SSP", "Easgd": "EASGD", "Settings": "RunSettings"}
"""Old class names, which still work with a warning."""


def build_strategy(spec: str | Strategy) -> Strategy:
    """The strategy that a spec describes.

    >>> build_strategy("allreduce(delay=1)")
    allreduce(delay=1)
    """
    return spec if isinstance(spec, Strategy) else REGISTRY.build(spec)


def strategy_names() -> list[str]:
    """Every name that a strategy spec may begin with."""
    return REGISTRY.names()


def default_presets() -> list[Preset]:
    """The presets of every strategy, which take part in a race by default.

    >>> [preset.spec for preset in default_presets()][:2]
    ['allreduce', 'allreduce(delay=1)']
    """
    return [preset for strategy in STRATEGIES for preset in strategy.presets]


def __getattr__(name: str) -> Any:
    """Old class names keep working."""
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now called {RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[RENAMED[name]]
