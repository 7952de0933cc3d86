"""What all processes of a job see alike: an ordered log of joins and losses, and the team that they agree on."""

from syncline.control.log import ControlLog, LogEntry
from syncline.control.team import Arrival, Team, TeamFormation
from syncline.transports.memory_store import MemoryStore

__all__ = ["Arrival", "ControlLog", "LogEntry", "MemoryStore", "Team", "TeamFormation"]
