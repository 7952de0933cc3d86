"""Moving bytes between ranks, on engines that already exist; they know nothing of what they move."""

from syncline.transports import faults
from syncline.transports.base import (
    BytesHandle,
    Handle,
    NativeCollectives,
    Op,
    RequestListener,
    Timing,
    Transport,
    Window,
)
from syncline.transports.network import Link, Network
from syncline.transports.simulated import Message, SimulatedNetwork, SimulatedTransport
from syncline.transports.single import SingleTransport

__all__ = [
    "BytesHandle",
    "Handle",
    "Link",
    "Message",
    "NativeCollectives",
    "Network",
    "Op",
    "RequestListener",
    "SimulatedNetwork",
    "SimulatedTransport",
    "SingleTransport",
    "Timing",
    "Transport",
    "Window",
    "faults",
]
