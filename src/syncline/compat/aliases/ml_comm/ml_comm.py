"""`ml_comm` for scripts that import it by this name."""

from syncline.compat.ml_comm import *  # noqa: F403
