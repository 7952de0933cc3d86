"""ZeroMQ as a transport: messages any to any among processes that come and go."""

from syncline.transports.zeromq.connect import ZmqConnector, connect, join
from syncline.transports.zeromq.transport import ZmqTransport

__all__ = ["ZmqConnector", "ZmqTransport", "connect", "join"]
