"""`ml_comm_torch` for scripts that import it by this name."""

from syncline.compat.ml_comm.ml_comm_torch import *  # noqa: F403
