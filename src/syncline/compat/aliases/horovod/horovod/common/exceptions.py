"""`horovod.common.exceptions` for scripts that import it by this name."""

from syncline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
