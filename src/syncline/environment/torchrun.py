"""torchrun, `syncline run`, and anyone who sets torch's own variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.environment.base import Environment, Variables
from syncline.errors import WorldError

MARKS = {"SYNCLINE_RUN_ID": "syncline run", "TORCHELASTIC_RUN_ID": "torchrun"}
"""By which variable who is known."""


def read(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a worker of torchrun or `syncline run`, or None when this is not one."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    source = next((name for mark, name in MARKS.items() if mark in environ), "RANK and WORLD_SIZE")
    read = Variables(source, environ)
    size = read.whole("WORLD_SIZE")
    local_rank = read.whole("LOCAL_RANK", 0)
    rendezvous = read.rendezvous(None, None)
    if rendezvous is None and size > 1:
        raise WorldError(f"{read.source}: a world of {size} needs MASTER_ADDR and MASTER_PORT to meet")
    return Environment(
        source=read.source,
        rank=read.whole("RANK"),
        size=size,
        local_rank=local_rank,
        local_size=read.whole("LOCAL_WORLD_SIZE", local_rank + 1),
        local_known="LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ,
        rendezvous=rendezvous,
    )
