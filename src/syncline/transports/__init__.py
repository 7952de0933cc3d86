"""Moving bytes between ranks, on engines that already exist; they know nothing of what they move."""

from syncline.transports import faults
from syncline.transports.base import (
    BytesHandle,
    Handle,
    NativeCollectives,
    Op,
    RequestListener,
    TeamConnector,
    Timing,
    Transport,
    Window,
)
from syncline.transports.network import Link, Network
from syncline.transports.simulated import Message, SimulatedConnector, SimulatedNetwork, SimulatedTransport
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
    "SimulatedConnector",
    "SimulatedNetwork",
    "SimulatedTransport",
    "SingleTransport",
    "TeamConnector",
    "Timing",
    "Transport",
    "Window",
    "faults",
]
