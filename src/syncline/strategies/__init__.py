"""Ways of agreeing: when workers talk, with whom, and what they exchange. One per file."""

from syncline.strategies.allreduce import AllReduce
from syncline.strategies.base import Preset, Run, Settings, Strategy
from syncline.strategies.bsp import Bsp
from syncline.strategies.catalog import build_strategy, default_presets, strategy_names
from syncline.strategies.downpour import Downpour
from syncline.strategies.hogwild import Hogwild
from syncline.strategies.local import Local
from syncline.strategies.master import Master
from syncline.strategies.reading import Shard, Step, Steps
from syncline.strategies.ssp import Ssp

__all__ = [
    "AllReduce",
    "Bsp",
    "Downpour",
    "Hogwild",
    "Local",
    "Master",
    "Preset",
    "Run",
    "Settings",
    "Shard",
    "Ssp",
    "Step",
    "Steps",
    "Strategy",
    "build_strategy",
    "default_presets",
    "strategy_names",
]
