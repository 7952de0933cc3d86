"""`syncline bench parallel`: plans that divide layers, beside data parallelism and one process.

examples:
  syncline bench parallel                                              tensor(2) for transformer blocks
  syncline bench parallel --against dtensor                            beside torch's parallelize_module
  syncline bench parallel -n 4 --plan "tensor(2);tensor(4)" --width 1024
  syncline bench parallel --lab 4@100mbit --model "vgg(side=32)" --batch 96 --plan "weird_trick('b')"
  syncline bench parallel -n 2 --model "vgg(side=32)" --batch 32 --plan "spatial('features', 2)"

Every contender trains on the same batch in each step. The table has step times, the bytes that a worker sends, the
memory of its parameters, and what was predicted for data parallelism and one weird trick.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import SpecError
from syncline.launch.start import Job
from syncline.training.run_folder import make_writable

if TYPE_CHECKING:
    from syncline.bench.parallel import ParallelBenchPlan

__all__ = ["HINTS", "configure", "read_plan", "run"]

HINTS = {
    **dict.fromkeys(("--plans", "--parallel"), "write --plan 'tensor(2);experts(2)'"),
    **dict.fromkeys(("--tp", "--tp-degree", "--tensor-parallel-size"), "write --plan 'tensor(2)'"),
    **dict.fromkeys(("--hidden", "--hidden-size", "--dim"), "write --width 1024"),
    **dict.fromkeys(("--models", "--workload"), "write --model vgg"),
}
"""Options that users of other tools may try, and what to write instead."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--plan", action="append", help="plans, separated by ';' or given several times; default tensor(2)"
    )
    parser.add_argument(
        "--model",
        default="blocks",
        help="blocks (transformer blocks), mlp, or a workload such as 'vgg(side=32)'; default %(default)s",
    )
    parser.add_argument("--width", type=int, default=512, help="of the layers of blocks and mlp; default %(default)s")
    parser.add_argument("--layers", type=int, default=2, help="of blocks and mlp; default %(default)s")
    parser.add_argument(
        "--batch", type=int, default=16, help="samples of a step, of all workers together; default %(default)s"
    )
    parser.add_argument("--against", default="", metavar="dtensor", help="also measure torch's parallelize_module")
    parser.add_argument("--rounds", type=int, default=5, help="repeats; default 5")
    parser.add_argument("--turns", type=int, default=20, help="steps of each contender in a repeat; default 20")
    add_placement_options(parser, "-n", "--lab", "--hosts", help={"-n": "number of ranks; default 2"})


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark; return the exit code."""
    placement = Placement.read(arguments, default_ranks=2)
    result = folder / "parallel.json"
    plan = read_plan(arguments, result)
    plan.check(placement.ranks)
    make_writable(folder)
    code = placement.run(Job(target=("-m", "syncline.bench.parallel", json.dumps(asdict(plan)))))
    if code == 0:
        from syncline.bench.parallel import parallel_table

        print(f"{parallel_table(json.loads(result.read_text()))}\n\nwritten: {result}")
    return code


def read_plan(arguments: argparse.Namespace, result: Path) -> ParallelBenchPlan:
    """The plan of the options, which is not checked yet."""
    from syncline.bench.parallel import ParallelBenchPlan

    texts = arguments.plan or ["tensor(2)"]
    plans = [each.strip() for text in texts for each in text.split(";") if each.strip()]
    if not plans:
        raise SpecError(f"--plan {' '.join(texts)!r} names none: write --plan 'tensor(2);tensor(4)'")
    return ParallelBenchPlan(
        out=str(result.absolute()),
        plans=list(dict.fromkeys(plans)),
        model=arguments.model,
        width=arguments.width,
        layers=arguments.layers,
        batch=arguments.batch,
        against=[name.strip() for name in arguments.against.split(",") if name.strip()],
        repeats=arguments.rounds,
        turns=arguments.turns,
    )
