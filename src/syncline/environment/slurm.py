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
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = read.whole("SLURM_NODEID", 0)
    if not 0 <= node < len(tasks):
        raise WorldError(f"Slurm: SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    first: str | None = "127.0.0.1"
    if len(tasks) > 1 and "MASTER_ADDR" not in environ:
        first = next(iter(expand_hosts(environ.get("SLURM_STEP_NODELIST", ""))), None)
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
    parts = re.split(r",(?![^\[]*\])", text) if text else []  # commas outside brackets
    return [host for part in parts for host in _expand(part, text)]


def _expand(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\],]*)(?:\[([0-9,-]+)\](.*))?", part)
    if match is None or not part:
        raise WorldError(f"Slurm: host list {text!r} cannot be read")
    prefix, ranges, rest = match[1], match[2], match[3]
    if ranges is None:
        return [prefix]
    numbers: list[str] = []
    for span in ranges.split(","):
        limits = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", span)
        if limits is None or int(limits[1]) > int(limits[2] or limits[1]):
            raise WorldError(f"Slurm: host list {text!r} cannot be read")
        low, high = limits[1], limits[2] or limits[1]
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    tails = _expand(rest, text) if rest else [""]
    return [prefix + number + tail for number in numbers for tail in tails]
