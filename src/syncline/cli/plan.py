"""Predict training plans: how long a step takes, how much memory it needs, what limits it. Nothing is run.

examples:
  syncline plan --model "gpt(layers=32, hidden=4096)" --cluster "16 hosts x 8 a100, 100gbit"
  syncline plan --model "resnet(50)" --cluster "4 hosts x 8 v100, 100gbit" --batch 4096 --codec "topk(0.01)"
  syncline plan profile.json --cluster cluster.toml --batch 512 --html plan.html
  syncline plan profile.json --machine machine.json --codec "topk(0.01)" --strategy allreduce --strategy ssp
  syncline plan --model "resnet(50)" --cluster '8 hosts x 8 v100, 100gbit, $2.5 an hour' --batch 8192 \\
                --epochs "1664:36.2, 3328:41, 33280:56" --samples 1281167

A profile is what `syncline profile` writes. Models: gpt, bert, mlp, vgg, resnet, inception, cnn. A cluster
is a text, or a TOML file. A machine is what `syncline bench machine` writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from syncline.errors import SpecError

__all__ = ["HINTS", "configure", "run"]

HINTS = {
    **dict.fromkeys(("--hosts", "--nodes", "--gpus", "-n"), 'write --cluster "16 hosts x 8 a100, 100gbit"'),
    **dict.fromkeys(("--global-batch-size", "--batch-size", "-b"), "write --batch 1024"),
    **dict.fromkeys(("--compression", "--codecs"), 'write --codec "topk(0.01)"'),
    **dict.fromkeys(("--fp16", "--bf16", "--dtype"), "write --precision half"),
    **dict.fromkeys(("--profile",), "write the file without an option: syncline plan profile.json"),
}
"""Options that users of other tools may try, and what to write instead."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("profile", nargs="?", metavar="profile.json", help="the measured profile of a model")
    parser.add_argument("--model", help="a description of a model instead, such as 'gpt(layers=32, hidden=4096)'")
    parser.add_argument("--cluster", help="a description of a cluster, or a TOML file")
    parser.add_argument("--machine", metavar="FILE", help="instead: a measurement by syncline bench machine")
    parser.add_argument("--batch", type=int, help="samples of a step, of all ranks together; default 8 a rank")
    parser.add_argument("--optimizer", help="sgd, momentum, adam or adam-mixed; default adam-mixed in half precision")
    parser.add_argument("--precision", choices=["half", "single"], help="of a described model; default its family's")
    parser.add_argument(
        "--strategy", action="append", default=[], help="data parallelism; several times to compare; default allreduce"
    )
    parser.add_argument("--codec", action="append", default=[], help="also try a codec; several times for several")
    parser.add_argument("--epochs", help="epochs to a target by batch size, such as '256:30, 4096:38'")
    parser.add_argument("--samples", type=int, help="samples of an epoch, for --epochs")
    parser.add_argument("--top", type=int, default=10, help="plans that are printed; default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write all plans to a file")
    parser.add_argument("--html", metavar="PAGE", help="also write a page: plans, scaling, parts of a step, memory")


def run(arguments: argparse.Namespace) -> int:
    """Print the ranked plans, and what limits the best one."""
    from syncline.planner.answer import PlanRequest, answer_request, format_answer
    from syncline.planner.target import read_curve

    if arguments.top < 1:
        raise SpecError(f"--top {arguments.top}: print at least one plan")
    if arguments.samples is not None and arguments.samples < 1:
        raise SpecError(f"--samples {arguments.samples}: an epoch has at least one sample")
    request = PlanRequest(
        cluster=arguments.cluster,
        model=arguments.model,
        profile=None if arguments.profile is None else Path(arguments.profile),
        machine=None if arguments.machine is None else Path(arguments.machine),
        batch=arguments.batch,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        strategies=tuple(dict.fromkeys(arguments.strategy)) or ("allreduce",),
        codecs=tuple(dict.fromkeys(arguments.codec)),
        curve=None if arguments.epochs is None else read_curve(arguments.epochs),
        samples=arguments.samples,
    )
    answer = answer_request(request)
    print(format_answer(answer, arguments.top))
    if arguments.json is not None:
        from syncline.parallel.partition.json_files import write_json_text

        write_json_text(arguments.json, json.dumps(answer.as_json(), indent=1) + "\n")
        print(f"written: {arguments.json}")
    if arguments.html is not None:
        from syncline.bench.report.plan_page import write_plan_page

        write_plan_page(arguments.html, answer, arguments.top, shlex.join(["syncline", *sys.argv[1:]]))
        print(f"written: {arguments.html}")
    return 0
