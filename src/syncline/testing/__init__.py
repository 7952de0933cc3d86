"""Contract tests for your own transport, schedule, codec, strategy or workload, and tools that search for races.

A contract is a class of tests. Inherit from it and define how the object under test is made; pytest then runs every
test of the contract:

    from syncline.testing import CodecContract

    class TestMyCodec(CodecContract):
        @classmethod
        def make(cls):
            return MyCodec(bits=4)

The library does not import this package. It needs pytest (`pip install syncline[test]`).
"""

from syncline.testing.codecs import CodecContract, sum_in_lockstep
from syncline.testing.collectives import ScheduleContract, check_schedule
from syncline.testing.hunting import hunt, hunt_cases, kill_soon
from syncline.testing.processes import Pool
from syncline.testing.strategies import StrategyContract
from syncline.testing.transports import TransportContract
from syncline.testing.workloads import WorkloadContract

__all__ = [
    "CodecContract",
    "Pool",
    "ScheduleContract",
    "StrategyContract",
    "TransportContract",
    "WorkloadContract",
    "check_schedule",
    "hunt",
    "hunt_cases",
    "kill_soon",
    "sum_in_lockstep",
]
