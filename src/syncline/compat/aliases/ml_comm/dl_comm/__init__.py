"""`dl_comm` for scripts that import it by this name."""

from syncline.compat.ml_comm.dl_comm import *  # noqa: F403
