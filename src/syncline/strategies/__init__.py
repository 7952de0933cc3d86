"""Ways of agreeing: when workers talk, with whom, and what they exchange. One per file."""

from syncline.strategies.adacomm import AdaComm
from syncline.strategies.allreduce import AllReduce
from syncline.strategies.base import Preset, Run, Settings, Strategy
from syncline.strategies.bsp import Bsp
from syncline.strategies.catalog import build_strategy, default_presets, strategy_names
from syncline.strategies.diloco import DiLoCo
from syncline.strategies.downpour import Downpour
from syncline.strategies.easgd import Easgd
from syncline.strategies.ensemble import Average, Ensemble
from syncline.strategies.gossip import Gossip
from syncline.strategies.hogwild import Hogwild
from syncline.strategies.local import Local
from syncline.strategies.master import Master
from syncline.strategies.onesided import OneSided
from syncline.strategies.reading import Shard, Step, Steps
from syncline.strategies.ssp import Ssp

__all__ = [
    "AdaComm",
    "AllReduce",
    "Average",
    "Bsp",
    "DiLoCo",
    "Downpour",
    "Easgd",
    "Ensemble",
    "Gossip",
    "Hogwild",
    "Local",
    "Master",
    "OneSided",
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
