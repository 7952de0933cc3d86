"""Measures how long workers take to start, forked from the prefork process and as new processes.

The time runs from the request until the last worker runs the first line of its script.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncline.bench.measuring import ratios, summarize
from syncline.errors import WorldError
from syncline.launch.process_events import serve_store
from syncline.launch.start import Job, local_host, run_logged

__all__ = ["START_METHODS", "measure", "table"]

START_METHODS = {"forked": "1", "new processes": "0"}
"""The value of SYNCLINE_PREFORK for each way to start workers."""
SCRIPT = """import os, pathlib, sys, time
began = time.time()
import torch, syncline
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{began} {time.time()}")
"""


def measure(ranks: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Start `ranks` workers in both ways, alternately, `rounds` times; return the samples in seconds.

    One round before is not counted, because the prefork process imports torch in it.
    """
    first_line: dict[str, list[float]] = {way: [] for way in START_METHODS}
    imported: dict[str, list[float]] = {way: [] for way in START_METHODS}
    for turn in range(rounds + 1):
        for way, value in START_METHODS.items():
            began, ready = _start(ranks, value)
            if turn == 0:
                say(f"first start, {way}: {began:.2f} s to the first line; not counted")
                continue
            first_line[way].append(began)
            imported[way].append(ready)
            say(f"{turn}/{rounds}, {way}: {began:.2f} s to the first line, {ready:.2f} s to the end of its imports")
    return {"ranks": ranks, "first_line_s": first_line, "imported_s": imported}


def table(document: dict[str, Any]) -> str:
    """Medians with their 95 % intervals, and the ratio of new processes to forked ones.

    >>> document = {"ranks": 2, "first_line_s": {"forked": [0.1], "new processes": [0.4]}}
    >>> print(table(document | {"imported_s": document["first_line_s"]}))
    start of 2 workers, seconds  forked     new processes  new processes / forked
    to the first line            0.1 (n=1)  0.4 (n=1)      4 (n=1)
    to the end of its imports    0.1 (n=1)  0.4 (n=1)      4 (n=1)
    """
    rows = [[f"start of {document['ranks']} workers, seconds", *START_METHODS, "new processes / forked"]]
    for name, key in (("to the first line", "first_line_s"), ("to the end of its imports", "imported_s")):
        forked, new = (document[key][way] for way in START_METHODS)
        rows.append([name, *(str(each) for each in (summarize(forked), summarize(new), ratios(new, forked)))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _start(ranks: int, prefork: str) -> tuple[float, float]:
    """Seconds from the request until the last worker runs its first line, and until it has finished its imports."""
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder:
        script, log = Path(folder, "script.py"), Path(folder, "log")
        script.write_text(SCRIPT)
        job = Job(target=(str(script), folder), variables={"SYNCLINE_PREFORK": prefork})
        asked = time.time()
        with open(log, "wb") as file:
            store = serve_store("127.0.0.1", ranks)
            ending = run_logged(job, [local_host(ranks)], store, "127.0.0.1", file, lambda: None)
        if ending.code:
            raise WorldError(f"the workers ended with exit code {ending.code}: {log.read_text().strip()}")
        times = [[float(word) - asked for word in Path(folder, str(rank)).read_text().split()] for rank in range(ranks)]
    return max(began for began, _ in times), max(ready for _, ready in times)
