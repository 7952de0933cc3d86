"""Moving bytes between ranks, on engines that already exist; they know nothing of what they move."""

from syncline.transports import faults
from syncline.transports.base import Handle, Listening, NativeCollectives, Op, Taking, Transport, Window
from syncline.transports.network import Link, Network
from syncline.transports.simulated import Hub, Message, SimulatedTransport
from syncline.transports.single import SingleTransport

__all__ = [
    "Handle",
    "Hub",
    "Link",
    "Listening",
    "Message",
    "NativeCollectives",
    "Network",
    "Op",
    "SimulatedTransport",
    "SingleTransport",
    "Taking",
    "Transport",
    "Window",
    "faults",
]
