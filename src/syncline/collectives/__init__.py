"""Which messages carry a tensor: pure schedules, and the executor that runs them over any transport."""

from syncline.collectives.base import Move, Operation, Round, Schedule, Setting
from syncline.collectives.buffers import Buffers
from syncline.collectives.catalog import NATIVE, build, names
from syncline.collectives.run import Channel

__all__ = ["NATIVE", "Buffers", "Channel", "Move", "Operation", "Round", "Schedule", "Setting", "build", "names"]
