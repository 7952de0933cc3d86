"""The API of `dl_comm`, the successor of `ml_comm`: the same functions. For PyTorch, `dl_comm.torch`."""

from syncline.compat.ml_comm import *  # noqa: F403
