"""The API of `dl_comm`, the successor of `ml_comm`: the same functions. For PyTorch, `dl_comm.torch`."""

from syncline.compat.ml_comm import (
    average,
    barrier,
    broadcast,
    check_buffers_match,
    config_team,
    finalize,
    get_n_ranks,
    get_nranks,
    get_rank,
    gradients,
    init,
    init_mpi,
)

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "finalize",
    "get_n_ranks",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
]
