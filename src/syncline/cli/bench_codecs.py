"""`syncline bench codecs`: its options; it runs in this process, without ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from syncline.bench.sizes import parse_sizes
from syncline.errors import UnsupportedError
from syncline.training.folder import make_writable

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    parser.add_argument("--codecs", default="", help="specs, separated by ';'; default: every codec and two chains")
    parser.add_argument("--sizes", default="1MB,16MB", help="bytes of float32; default 1MB,16MB")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender; default 15")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads; default 1")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Measure; the exit code."""
    from syncline.bench.codecs import CodecsPlan, measure
    from syncline.bench.codecs_report import codecs_plot, codecs_table

    named = [spec.strip() for spec in arguments.codecs.split(";") if spec.strip()]
    usual = CodecsPlan(sizes=parse_sizes(arguments.sizes), rounds=arguments.rounds, threads=arguments.threads)
    plan = CodecsPlan(usual.sizes, named, usual.rounds, usual.threads) if named else usual
    make_writable(folder)
    document = measure(plan)
    result = folder / "codecs.json"
    result.write_text(json.dumps(document, indent=1))
    print(codecs_table(document))
    try:
        pictures = codecs_plot(document, folder / "codecs")
        print("\nwritten: " + ", ".join(map(str, [result, *pictures])))
    except UnsupportedError as error:
        print(f"\nwritten: {result}; {error}")
    return 0
