"""`dl_comm.torch` for scripts that import it by this name."""

from syncline.compat.ml_comm.dl_comm.torch import *  # noqa: F403
