"""Contract tests for anyone's own transport, schedule or codec, and tools to hunt for bad interleavings.

Not imported by the library; needs pytest (`pip install syncline[test]`).
"""

from syncline.testing.codecs import CodecContract, sum_in_lockstep
from syncline.testing.hunting import hunt, hunt_cases, kill_soon
from syncline.testing.processes import Pool
from syncline.testing.schedules import ScheduleContract, check_schedule
from syncline.testing.strategies import StrategyContract
from syncline.testing.transports import TransportContract

__all__ = [
    "CodecContract",
    "Pool",
    "ScheduleContract",
    "StrategyContract",
    "TransportContract",
    "check_schedule",
    "hunt",
    "hunt_cases",
    "kill_soon",
    "sum_in_lockstep",
]
