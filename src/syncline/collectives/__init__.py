"""Collectives as pure schedules of messages, and the executor that runs them over any transport."""

from syncline.collectives.base import Move, Operation, Round, Schedule, Setting
from syncline.collectives.channel import BufferPool, Channel
from syncline.collectives.schedules import AUTO, NATIVE, build, names

__all__ = [
    "AUTO",
    "NATIVE",
    "BufferPool",
    "Channel",
    "Move",
    "Operation",
    "Round",
    "Schedule",
    "Setting",
    "build",
    "names",
]
