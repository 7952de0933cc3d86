"""`horovod.torch.mpi_ops` for scripts that import it by this name."""

from syncline.compat.horovod.torch import *  # noqa: F403
