"""The door for Horovod's scripts: `import syncline.compat.horovod.torch as hvd`.

```text
ops          what the script calls
  └─ engine      one for each process set: takes requests by name, runs what all ranks have asked for
       ├─ negotiation   the coordinator's table: who has asked for what; a pure state machine
       ├─ requests      what is told about an operation, as bytes
       ├─ operations    how each kind is carried out, many small ones in one buffer
       └─ lockstep      counts completed collectives, and ends waits for a rank that has left
optimizer    DistributedOptimizer, on the machinery of `sl.distribute`
```
"""
