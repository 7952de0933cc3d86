"""`horovod.torch.sync_batch_norm` for scripts that import it by this name."""

from syncline.compat.horovod.torch import *  # noqa: F403
