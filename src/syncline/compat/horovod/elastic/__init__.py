"""Horovod's elastic training, as far as a launcher without restarts allows: state that is committed and restored.

```text
hvd.elastic.run(train)(state)
   sync ──► train(state) ──► its result
    ▲          ├─ HorovodInternalError: restore the last commit ─┐
    │          └─ HostsUpdatedInterrupt: keep what there is ─────┤
    └── reset callbacks ◄── shutdown and init, all ranks meet ◄──┘   a rank is gone: nobody comes in its place, it ends
```
"""

from syncline.compat.horovod.elastic.run import run
from syncline.compat.horovod.elastic.sampler import ElasticSampler
from syncline.compat.horovod.elastic.state import ObjectState, State
from syncline.compat.horovod.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
