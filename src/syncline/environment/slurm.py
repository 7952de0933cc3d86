"""srun. A batch script's own shell is no worker: only a job step is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from syncline.environment.base import Environment, Variables
from syncline.errors import WorldError

__all__ = ["expand_hosts", "read", "tasks_per_node"]


def read(environ: Mapping[str, str]) -> Environment | None:
    """The environment of a task of an srun step, or None when this is not one."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    read = Variables("Slurm", environ)
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = read.whole("SLURM_NODEID", 0)
    if node >= len(tasks):
        raise WorldError(f"Slurm: SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    first = "127.0.0.1" if len(tasks) == 1 else (hosts[0] if hosts else None)
    return Environment(
        source="Slurm",
        rank=read.whole("SLURM_PROCID"),
        size=read.whole("SLURM_STEP_NUM_TASKS"),
        local_rank=read.whole("SLURM_LOCALID", 0),
        local_size=tasks[node],
        rendezvous=read.rendezvous(job, first),
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length list of tasks.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"Slurm: SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Slurm's compressed host list.

    >>> expand_hosts("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    hosts: list[str] = []
    for match in re.finditer(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", text):
        prefix, ranges, suffix = match[1], match[2], match[3]
        if ranges is None:
            hosts.append(prefix)
            continue
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            if not low.isdigit() or (high and not high.isdigit()):
                raise WorldError(f"Slurm: host list {text!r} cannot be read")
            numbers = range(int(low), int(high or low) + 1)
            hosts += [f"{prefix}{number:0{len(low)}d}{suffix}" for number in numbers]
    return hosts
