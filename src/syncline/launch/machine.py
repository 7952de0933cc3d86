"""The processors and the memory of this machine, within the limits of its control group."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

logger = logging.getLogger("syncline")

WORKER_BYTES = 300 << 20
"""Memory of a worker that has imported torch and has a small model."""
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Number of processors that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_quota() -> float | None:
    """Number of processors that the control group allows; None without a limit."""
    text = _read(CGROUP / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota = _read(CGROUP / "cpu/cpu.cfs_quota_us") or "-1"
    period = _read(CGROUP / "cpu/cpu.cfs_period_us") or "100000"
    return None if int(quota) <= 0 else int(quota) / int(period)


def memory_limit() -> int | None:
    """Bytes of memory that the control group allows; None without a limit."""
    text = _read(CGROUP / "memory.max") or _read(CGROUP / "memory/memory.limit_in_bytes")
    if text is None or text == "max":
        return None
    limit = int(text)
    return limit if limit < _meminfo("MemTotal") else None


def available_memory() -> int:
    """Bytes of memory for new processes, by the kernel's estimate and the control group's limit."""
    limit = memory_limit()
    free = _meminfo("MemAvailable")
    return free if limit is None else min(free, limit)


def warn_if_oversubscribed(workers: int) -> None:
    """Warn if this machine has fewer processors or less memory than these workers need."""
    have = cores()
    if workers > have:
        logger.warning("%d workers share %d core%s: they take turns", workers, have, "s" * (have > 1))
    free = available_memory()
    if workers * WORKER_BYTES > free:
        logger.warning(
            "%d workers take about %.1f GiB before they hold any model (%d MiB each), and %.1f GiB are free",
            workers,
            workers * WORKER_BYTES / 2**30,
            WORKER_BYTES >> 20,
            free / 2**30,
        )


def _meminfo(name: str) -> int:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
