"""MPI as a transport: two-sided messages, MPI's own collectives, and one-sided windows. Needs mpi4py."""

from syncline.transports.mpi.connect import connect
from syncline.transports.mpi.transport import MpiTransport

__all__ = ["MpiTransport", "connect"]
