"""What all processes of a job see alike: an ordered log, the control channel on it, and the team of workers."""

from syncline.control.channel import ControlBarrier, ControlChannel, Post, WorkerMembership, poll
from syncline.control.log import ControlLog, LogEntry
from syncline.control.team import Arrival, Team, TeamFormation
from syncline.transports.memory_store import MemoryStore

__all__ = [
    "Arrival",
    "ControlBarrier",
    "ControlChannel",
    "ControlLog",
    "LogEntry",
    "MemoryStore",
    "Post",
    "Team",
    "TeamFormation",
    "WorkerMembership",
    "poll",
]
