"""`horovod.common.process_sets` for scripts that import it by this name."""

from syncline.compat.horovod.torch import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
