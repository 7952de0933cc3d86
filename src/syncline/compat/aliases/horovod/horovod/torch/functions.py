"""`horovod.torch.functions` for scripts that import it by this name."""

from syncline.compat.horovod.torch import *  # noqa: F403
