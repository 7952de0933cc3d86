"""Ways of agreeing: when workers talk, with whom, and what they exchange. One per file."""

from syncline.strategies.allreduce import AllReduce
from syncline.strategies.base import Preset, Run, Settings, Strategy
from syncline.strategies.catalog import build_strategy, default_presets, strategy_names
from syncline.strategies.reading import Shard, Step, Steps

__all__ = [
    "AllReduce",
    "Preset",
    "Run",
    "Settings",
    "Shard",
    "Step",
    "Steps",
    "Strategy",
    "build_strategy",
    "default_presets",
    "strategy_names",
]
