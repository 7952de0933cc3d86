"""`syncline bench pipeline`: steps of pipeline schedules, with what was predicted for them.

examples:
  syncline bench pipeline                                            1f1b with two stages on this machine
  syncline bench pipeline -n 4 --schedule "1f1b;gpipe;zero_bubble;interleaved(chunks=2)"
  syncline bench pipeline --against torch                            beside the 1F1B of torch.distributed.pipelining
  syncline bench pipeline --lab 4@100mbit --width 2048 --batch 256   on four emulated hosts
  syncline bench pipeline -n 4 --replicas 2                          two pipelines of two stages
  syncline bench pipeline -n 4 --stages layer6 --replicas 3-1 --batch 480
  syncline bench pipeline -n 8 --simulate 1gbit                      in virtual time, with times profiled here

The ranks measure the network and profile the model, and a player predicts each schedule from both. The table has step
times, bubbles and live activations, predicted and measured, bytes, and beside them one process without a pipeline and
data parallelism. pipeline.svg shows when each rank computes which micro-batch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.start import Job
from syncline.training.run_folder import make_writable

if TYPE_CHECKING:
    from syncline.bench.pipeline_plan import PipelinePlan

__all__ = ["HINTS", "configure", "read_plan", "run"]

HINTS = {
    **dict.fromkeys(("--schedules", "--pp-schedule", "--pipeline-schedule"), "write --schedule '1f1b;gpipe'"),
    **dict.fromkeys(
        ("--chunks", "--micro-batches", "--n-microbatches", "--num-microbatches"), "write --microbatches 8"
    ),
    "--micro-batch-size": "write --batch 128 --microbatches 8, for micro-batches of 16 samples",
    **dict.fromkeys(("--pp", "--pp-degree", "--pipeline-parallel-size", "--balance", "--cuts"), "write --stages"),
    **dict.fromkeys(("--dp", "--dp-degree", "--data-parallel-size"), "write --replicas"),
    **dict.fromkeys(("--hidden", "--hidden-size", "--dim"), "write --width 1024"),
    **dict.fromkeys(("--models", "--workload"), "write --model vgg"),
    "--virtual": "write --schedule 'interleaved(chunks=2)'",
}
"""Options that users of other tools may try, and what to write instead."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--schedule", action="append", help="schedules, separated by ';' or given several times; default 1f1b"
    )
    parser.add_argument(
        "--microbatches", type=int, default=8, metavar="M", help="of each pipeline; default %(default)s"
    )
    parser.add_argument(
        "--stages",
        default="",
        metavar="S",
        help="how many, or the modules with which they begin (layer2,layer5), or auto; default: one for each worker, "
        "or several if the schedule has several",
    )
    parser.add_argument(
        "--replicas",
        dest="stage_workers",
        default="",
        metavar="R",
        help="workers of each stage: 2, or 3-1 for two stages; default 1",
    )
    parser.add_argument(
        "--model", default="mlp", help="mlp, or a workload such as 'vgg(side=32)' or transformer; default %(default)s"
    )
    parser.add_argument("--width", type=int, default=512, help="of the layers of mlp; default %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="of mlp; default %(default)s")
    parser.add_argument("--batch", type=int, default=512, help="samples of a step; default %(default)s")
    parser.add_argument("--against", default="", metavar="torch", help="also measure torch's own 1F1B on gloo")
    parser.add_argument("--rounds", type=int, default=5, help="repeats; default 5")
    parser.add_argument("--turns", type=int, default=20, help="steps of each contender in a repeat; default 20")
    parser.add_argument(
        "--simulate",
        metavar="NETWORK",
        help="in virtual time, with times profiled here: 100mbit, or network(latency=…, bandwidth=…)",
    )
    add_placement_options(parser, "-n", "--lab", "--hosts", help={"-n": "number of ranks; default 2"})


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark; return the exit code."""
    if arguments.simulate is not None and (arguments.lab or arguments.hosts):
        place = "--lab" if arguments.lab else "--hosts"
        raise IncompatibleError(f"--simulate and {place} exclude each other; leave one out")
    placement = Placement.read(arguments, default_ranks=2)
    result = folder / "pipeline.json"
    plan = read_plan(arguments, result)
    plan.check(placement.ranks)
    make_writable(folder)
    if plan.simulate:
        from syncline.bench.pipeline import measure_simulated

        print(_show(measure_simulated(plan, placement.ranks), result))
        return 0
    code = placement.run(Job(target=("-m", "syncline.bench.pipeline", json.dumps(asdict(plan)))))
    if code == 0:
        print(_show(json.loads(result.read_text()), result))
    return code


def read_plan(arguments: argparse.Namespace, result: Path) -> PipelinePlan:
    """The plan of the options, which is not checked yet."""
    from syncline.bench.pipeline_plan import PipelinePlan
    from syncline.parallel.schedules import build_schedule

    texts = arguments.schedule or ["1f1b"]
    schedules = [repr(build_schedule(spec)) for text in texts for spec in text.split(";") if spec.strip()]
    if not schedules:
        raise SpecError(f"--schedule {' '.join(texts)!r} names none: write --schedule '1f1b;gpipe'")
    return PipelinePlan(
        out=str(result.absolute()),
        schedules=list(dict.fromkeys(schedules)),
        model=arguments.model,
        width=arguments.width,
        layers=arguments.layers,
        batch=arguments.batch,
        microbatches=arguments.microbatches,
        stages=arguments.stages.strip(),
        replicas=arguments.stage_workers.strip(),
        against=[name.strip() for name in arguments.against.split(",") if name.strip()],
        repeats=arguments.rounds,
        turns=arguments.turns,
        simulate=arguments.simulate or "",
    )


def _show(document: dict[str, Any], result: Path) -> str:
    from syncline.bench.pipeline_results import gantt, pipeline_table

    picture = result.with_suffix(".svg")
    picture.write_text(gantt(document), encoding="utf-8")
    return f"{pipeline_table(document)}\n\nwritten: {result}, {picture}"
