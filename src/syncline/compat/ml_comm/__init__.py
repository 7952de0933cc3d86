"""The API of Cray's Machine Learning Plugin: `import syncline.compat.ml_comm as mc`.

```text
functions       broadcast, gradients, average, … on lists of NumPy arrays and tensors
  ├─ arrays        the script's arrays as tensors, joined in few buffers
  └─ team          averages lists, at once or a step later
optimizer       DistributedOptimizer of ml_comm_torch and dl_comm.torch: sl.distribute with a strategy
schedule        ksteps and max_steps as a strategy; config: the arguments of config_team
report          the lines of rank 0
context         init_mpi() and finalize()
install         lets `import ml_comm`, `import ml_comm_torch` and `import dl_comm.torch` work
```
"""

from syncline.compat.ml_comm.context import finalize, init_mpi
from syncline.compat.ml_comm.functions import (
    average,
    barrier,
    broadcast,
    check_buffers_match,
    config_team,
    get_n_ranks,
    get_nranks,
    get_rank,
    gradients,
    init,
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
