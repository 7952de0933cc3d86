"""Horovod's API: `import syncline.compat.horovod.torch as hvd`.

```text
ops               the operations that the script calls
  └─ engine           one for each process set: takes requests by name, executes what all ranks have requested
       ├─ negotiation    the coordinator's table of requests; a pure state machine
       ├─ messages       requests and answers as bytes
       ├─ pending        operations in flight, and the end of waits for a rank that has left
       └─ execution      runs each kind of operation, many small ones in one buffer
optimizer         DistributedOptimizer
  └─ optimizer_sync   synchronises it: by the reducer of `sl.distribute`, by a strategy, or by Adasum
context           hvd.init(), ranks and process sets
objects           broadcast and allgather of parameters, optimizer states and objects
elastic           hvd.elastic: state that is committed and restored
```
"""
