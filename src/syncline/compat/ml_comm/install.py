"""After this import, a script may import `ml_comm`, `ml_comm_torch` and `dl_comm.torch`."""

from syncline.compat.module_aliases import install_aliases

install_aliases("ml_comm")
