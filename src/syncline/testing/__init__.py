"""Contract tests anyone can run against their own transport or schedule, and tools to hunt for bad interleavings.

Not imported by the library; needs pytest (`pip install syncline[test]`).
"""

from syncline.testing.hunting import hunt
from syncline.testing.processes import Pool
from syncline.testing.schedules import ScheduleContract, check_schedule
from syncline.testing.transports import TransportContract

__all__ = ["Pool", "ScheduleContract", "TransportContract", "check_schedule", "hunt"]
