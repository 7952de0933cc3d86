"""Predict training plans: how long a step takes, how much memory it needs, what limits it. Nothing is run.

examples:
  syncline plan --model "gpt(layers=32, hidden=4096)" --cluster "16 hosts x 8 a100, 100gbit"
  syncline plan --model "resnet(50)" --cluster "4 hosts x 8 v100, 100gbit" --batch 4096 --codec "topk(0.01)"
  syncline plan profile.json --cluster cluster.toml --batch 512 --html plan.html
  syncline plan profile.json --machine machine.json --codec "topk(0.01)" --strategy allreduce --strategy ssp
  syncline plan profile.json --measure here -n 2              two workers here, measured now
  syncline plan profile.json --hosts a:2,b:2                  workers on these hosts, measured now
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
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError, WorldError

if TYPE_CHECKING:
    from syncline.planner.answer import PlanAnswer, PlanRequest

__all__ = ["HINTS", "configure", "run"]

HINTS = {
    **dict.fromkeys(("--nodes", "--gpus"), 'write --cluster "16 hosts x 8 a100, 100gbit"'),
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
    measured = parser.add_argument_group("instead: measure now what --machine has, for a profile of this machine")
    measured.add_argument("--measure", choices=["here"], help="with -n workers on this machine")
    add_placement_options(
        measured,
        "-n",
        "--hosts",
        "--lab",
        help={
            "-n": "number of workers; default 2, in a lab one for each host",
            "--hosts": "with workers on hosts, over ssh; all see this folder",
            "--lab": "on the hosts of an emulated cluster",
        },
    )
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
    measured = _measured_placement(arguments)
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
    answer = answer_request(request) if measured is None else _measure_and_answer(request, measured)
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


def _measured_placement(arguments: argparse.Namespace) -> Placement | None:
    """Where the machine is measured now. None: it is described, or was measured before."""
    ways = ("cluster", "machine", "measure", "hosts", "lab")
    given = [f"--{name}" for name in ways if getattr(arguments, name) is not None]
    if not given:
        raise SpecError(
            'on which cluster? Give one of them: --cluster "16 hosts x 8 a100, 100gbit", --machine with a measurement, '
            "or to measure now --measure here, --hosts a:2,b:2 or --lab 4@100mbit"
        )
    if len(given) > 1:
        raise IncompatibleError(f"{' and '.join(given)} name different clusters: give one of them")
    if given[0] in ("--cluster", "--machine"):
        if arguments.ranks is not None:
            raise IncompatibleError(f"-n {arguments.ranks}: {given[0]} says how many workers there are; leave -n out")
        return None
    if arguments.profile is None:
        raise SpecError(f"{given[0]} needs a profile that was measured here: syncline profile; then name its file")
    placement = Placement.read(arguments, default_ranks=2)
    if placement.ranks < 2:
        raise SpecError("a machine is measured by at least 2 workers, which exchange messages: -n 2")
    return placement


def _measure_and_answer(request: PlanRequest, placement: Placement) -> PlanAnswer:
    """Measure as `syncline bench machine` does, with the codecs of the request, and answer."""
    from syncline.bench.machine import MachinePlan
    from syncline.codecs import build_codec
    from syncline.launch.start import Job
    from syncline.launch.supervisor import STOPPED
    from syncline.planner.answer import answer_request
    from syncline.planner.profile import TrainingProfile

    assert request.profile is not None
    TrainingProfile.read(request.profile)  # refused before anything takes time
    for codec in request.codecs:
        build_codec(codec)
    print("syncline plan: measuring", file=sys.stderr, flush=True)
    # The first worker writes the file, perhaps on another host: the folder of the command is one that all see.
    with TemporaryDirectory(dir=Path.cwd() if placement.hosts else None, prefix="syncline-plan-") as folder:
        out = Path(folder) / "machine.json"
        options = asdict(MachinePlan(out=str(out), codecs=request.codecs))
        code = placement.run(Job(target=("-m", "syncline.bench.machine", json.dumps(options))))
        if code == STOPPED:
            raise KeyboardInterrupt
        if code:
            raise WorldError(f"the machine could not be measured: the workers ended with exit code {code}")
        return answer_request(replace(request, machine=out))
