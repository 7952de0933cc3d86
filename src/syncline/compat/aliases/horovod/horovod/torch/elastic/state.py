"""`horovod.torch.elastic.state` for scripts that import it by this name."""

from syncline.compat.horovod.elastic import *  # noqa: F403
