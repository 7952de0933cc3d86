"""`syncline bench stragglers`: its options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from syncline.bench.stragglers import SCENARIOS, StragglersPlan, measure, table
from syncline.training.folder import make_writable

__all__ = ["configure", "run"]

USUAL = StragglersPlan(out="")


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    usual = USUAL
    parser.add_argument("-n", type=int, dest="workers", default=usual.workers, help="workers; default %(default)s")
    parser.add_argument("--entries", default=";".join(usual.entries), help="strategies by ';'; default %(default)s")
    parser.add_argument(
        "--scenarios", default=",".join(usual.scenarios), help=f"of {', '.join(SCENARIOS)}; default all"
    )
    parser.add_argument("--workload", default=usual.workload, help="what to train; default %(default)s")
    parser.add_argument("--target", type=float, default=usual.target, help="of its metric; default %(default)s")
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="runs of each; default %(default)s")
    parser.add_argument("--factor", type=float, default=usual.factor, help="how slow; default %(default)s")
    parser.add_argument("--step", type=float, default=usual.step, help="seconds of a step; default %(default)s")
    parser.add_argument("--batch", type=int, default=usual.batch, help="samples of a step; default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate, help="default %(default)s")
    parser.add_argument("--simulate", action="store_true", help="on the simulator alone")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Measure; the exit code."""
    plan = StragglersPlan(
        out=str((folder / "stragglers.json").absolute()),
        workload=arguments.workload,
        entries=tuple(spec.strip() for spec in arguments.entries.split(";") if spec.strip()),
        scenarios=tuple(name.strip() for name in arguments.scenarios.split(",") if name.strip()),
        workers=arguments.workers,
        seeds=arguments.seeds,
        factor=arguments.factor,
        step=arguments.step,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        target=arguments.target,
        simulate=arguments.simulate,
    )
    plan.check()
    make_writable(folder)
    document = measure(plan, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{table(document)}\n\nwritten: {plan.out}")
    return 0
