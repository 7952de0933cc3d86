"""Tasks, events, queues, locks, sleep and the clock: real (threads) and simulated (virtual time).

Everything concurrent in the library goes through this seam, so that the same code runs on both.
"""

from syncline.runtime.base import Event, Lock, Queue, Runtime, Task
from syncline.runtime.real import RealRuntime, caller
from syncline.runtime.simulated import SimulatedRuntime
from syncline.runtime.simulator import Simulator

__all__ = ["Event", "Lock", "Queue", "RealRuntime", "Runtime", "SimulatedRuntime", "Simulator", "Task", "caller"]
