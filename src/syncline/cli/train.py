"""Train a workload on many workers: progress while it runs, test metric and time at the end, and a run folder.

examples:
  syncline train digits -n 4                                    until the workload's epochs are over
  syncline train digits -n 2 --target 0.96                      until the validation accuracy is 0.96
  syncline train "fashion(model='cnn')" -n 4 --scaling linear --warmup 1
  syncline train digits -n 4 --strategy "allreduce(delay=1)" --collective ring
  syncline train digits -n 4 --strategy "auto(allow='local(period=8)')"     what the planner predicts to be faster
  syncline train fashion --lab 4@100mbit --codec "topk(0.01)|quantize(4)"
  syncline train digits --lab 4@100mbit --trace                 on four emulated hosts; a trace of every rank
  syncline train digits --lab 4@100mbit --mpi                   the same by mpiexec, on MPI
  syncline train digits -n 2 --out runs/a --resume auto         continue runs/a, or start it
  syncline train workload.py -n 2                               a workload of your own: see syncline new
  syncline train digits -n 4 --strategy hogwild --pace 0.001 --slow rank=2,factor=4      one of four is slow
  syncline train digits -n 4 --strategy "ssp(slack=3)" --servers 1 --on-failure continue      survives lost workers
  syncline train vgg -n 2 --pipeline "1f1b(microbatches=8)"     the layers split over two workers
  syncline train transformer -n 4 --pipeline zero_bubble --stages 2         two stages, two workers each
  syncline train transformer -n 2 --pipeline 1f1b --stages blocks.2         stage 1 begins with blocks.2
  syncline train kmeans -n 4 --strategy aggregate               k-means by one all-reduce per round

Workloads: digits, fashion, stdlib, transformer, vgg, regression, logistic, or a script of yours by its path. The run
folder (runs/… or --out) has log.jsonl, config.json, system.json, summary.json and checkpoints/. Ctrl-C or SIGTERM ends
the run after a step, with a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.start import Job
from syncline.training.run_folder import RunFolder, fresh_name
from syncline.training.settings import DECAYS, Settings

if TYPE_CHECKING:
    from syncline.workloads.base import Workload

__all__ = ["configure", "is_kmeans", "run", "train_kmeans"]

HINTS = {
    **dict.fromkeys(("--learning-rate", "--learning_rate", "--rate"), "write --lr"),
    **dict.fromkeys(("--batch-size", "--batch_size"), "write --batch"),
    **dict.fromkeys(("--algorithm", "--allreduce"), "write --collective"),
    **dict.fromkeys(("--compression", "--compress"), "write --codec"),
    **dict.fromkeys(("--elastic", "--restart"), "run a script of your own by syncline run --elastic MIN:MAX"),
    **dict.fromkeys(("--pp", "--pipeline-parallel", "--schedule"), "write --pipeline 1f1b --stages 2"),
    **dict.fromkeys(("--microbatches", "--micro-batches"), 'write --pipeline "1f1b(microbatches=8)"'),
    "--checkpoint": "write --checkpoint-every STEPS, or --resume auto to continue",
}

logger = logging.getLogger("syncline")

AUTO = "auto"
"""The value of --resume for the newest checkpoint in --out."""
NETWORK_OPTIONS = (
    *(
        "codec",
        "pipeline",
        "stages",
        "diagnose",
        "global_batch",
        "steps",
        "warmup",
        "momentum",
        "target",
        "evaluate_every",
    ),
    *("evaluations_after", "out", "resume", "checkpoint_every", "trace", "tensorboard"),
    *("servers", "replicas", "on_failure", "lab", "hosts", "pace", "slow"),
)
"""Options of `train` that k-means does not have."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    usual = Settings()
    parser.add_argument(
        "workload", metavar="WORKLOAD|script.py", help="what to train: digits, \"digits(model='cnn')\", …, or your own"
    )
    add_placement_options(parser, "-n", help={"-n": "number of workers; default 1, in a lab one for each host"})
    _configure_training(parser, usual)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FOLDER", help="the run's folder; default runs/WORKLOAD-time")
    files.add_argument("--resume", metavar="auto|FOLDER", help="continue from the newest checkpoint there")
    files.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="0: never; default: at times between epochs"
    )
    files.add_argument("--trace", action="store_true", help="a trace of each rank, for ui.perfetto.dev")
    files.add_argument("--tensorboard", action="store_true", help="scalars for TensorBoard")
    _configure_place(parser)


def _configure_training(parser: argparse.ArgumentParser, usual: Settings) -> None:
    """Add the options of synchronisation and training."""
    how = parser.add_argument_group("synchronisation")
    how.add_argument("--strategy", default=usual.strategy, help="allreduce, ssp(slack=3), auto, …; default allreduce")
    how.add_argument("--codec", help="compression of gradients; default: none")
    how.add_argument("--diagnose", type=int, default=0, metavar="STEPS", help="log the codec's error at this interval")
    how.add_argument("--collective", default=usual.collective, help="auto, native, ring, …; default auto")
    split = parser.add_argument_group("pipeline")
    split.add_argument(
        "--pipeline", metavar="SCHEDULE", help='split the model over the workers: 1f1b, "gpipe(microbatches=8)", …'
    )
    split.add_argument(
        "--stages",
        metavar="N|NAMES|FILE",
        help="a number, modules with which stages begin (blocks.2,head), or a partition (.json); default: as many as "
        "workers. Further workers are replicas of the stages",
    )
    what = parser.add_argument_group("training; defaults are the workload's")
    what.add_argument("--batch", type=int, help="samples of each worker, or of each pipeline, in a step")
    what.add_argument("--global-batch", type=int, help="samples of all workers in a step, by micro-batches of --batch")
    what.add_argument("--epochs", type=int, help="times over the training data")
    what.add_argument("--steps", type=int, help="end after so many steps")
    what.add_argument("--lr", type=float, dest="learning_rate", help="learning rate for one worker")
    what.add_argument("--scaling", default=usual.scaling, help="none, linear or sqrt: the rate for all; default none")
    what.add_argument("--warmup", type=float, default=0.0, metavar="EPOCHS", help="rise to the scaled rate; default 0")
    what.add_argument("--decay", default=usual.decay, help=f"{' or '.join(DECAYS)}; default none")
    what.add_argument("--target", type=float, help="end when the validation metric is as good as this")
    what.add_argument("--evaluate-every", type=int, metavar="STEPS", help="default: after each epoch")
    what.add_argument(
        "--evaluations-after",
        type=int,
        default=0,
        metavar="N",
        help="evaluations after the target is reached; default 0",
    )
    what.add_argument("--momentum", type=float, help="the optimizer's; 0 for a codec that brings its own")
    what.add_argument("--seed", type=int, default=usual.seed, help="of weights, order and dropout; default 0")
    what.add_argument("--no-check-finite", dest="check_finite", action="store_false", help="let NaN and Inf pass")


def _configure_place(parser: argparse.ArgumentParser) -> None:
    """Say where it runs, beside what, and who is slow there."""
    where = parser.add_argument_group("where")
    add_placement_options(
        where,
        *("--servers", "--replicas", "--on-failure", "--lost-after", "--lab", "--mpi", "--hosts"),
        help={"--hosts": "hosts and their numbers of workers, over ssh; all see the run's folder"},
    )
    where.add_argument(
        "--pace", type=float, metavar="SECONDS", help="a worker also sleeps so long for each sample: a stand-in"
    )
    where.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="rank=2,factor=4,start=1,stop=3",
        help="a straggler: its pace times the factor, from so many seconds to so many; may be given again",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit code."""
    if is_kmeans(arguments.workload):
        return train_kmeans(arguments)
    from syncline.strategies import build_strategy
    from syncline.training.evaluator import wants_evaluator
    from syncline.training.stragglers import check_slow, parse_slow
    from syncline.training.worker import TrainPlan
    from syncline.workloads import build

    placement = _placement(arguments)
    _check_servers(arguments)
    _check_memory(arguments, placement.ranks)
    workload = build(arguments.workload)
    settings = _settings(arguments, workload, placement.ranks)
    slow = tuple(parse_slow(text) for text in arguments.slow)
    check_slow(slow, placement.ranks, arguments.pace, settings.pipeline)
    folder, resume = _folder(arguments, workload)
    if resume is not False:
        _check_resumed(folder if resume is True else RunFolder(str(resume)), workload, settings)
    if arguments.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UnsupportedError("--tensorboard needs the package tensorboard: pip install 'syncline[tensorboard]'")
    terminal = sys.stdout.isatty()
    plan = TrainPlan(
        workload=workload.spec,
        settings=settings,
        folder=str(folder.path.absolute()),
        resume=resume,
        trace=arguments.trace,
        tensorboard=arguments.tensorboard,
        terminal=terminal,
        width=shutil.get_terminal_size().columns if terminal else 0,
        seconds_a_sample=arguments.pace,
        slow=slow,
    )
    target = ("-m", "syncline.training.worker", plan.as_json())
    job = Job(
        target=target,
        evaluators=int(wants_evaluator(build_strategy(settings.strategy))),
        servers=arguments.servers,
        replicas=arguments.replicas,
        policy=arguments.on_failure or "stop",
        mpi=arguments.mpi,
        saves=True,
        announce=True,
        lost_after=arguments.lost_after,
    )
    try:
        with folder.lock():
            if resume is False and folder.used():  # another job may have started there since the first check
                raise IncompatibleError(folder.refusal())
            folder.remove("summary")  # of an earlier attempt
            return placement.run(job, mpiexec="supervise")
    finally:
        with contextlib.suppress(OSError):
            folder.path.rmdir()  # where nothing was written


def _placement(arguments: argparse.Namespace) -> Placement:
    if arguments.mpi and arguments.hosts:
        raise IncompatibleError("--mpi trains here or in a --lab, not on --hosts; leave one out")
    return Placement.read(arguments, default_ranks=1)


def _check_servers(arguments: argparse.Namespace) -> None:
    """Refuse servers that the strategy does not use, and --on-failure continue if it needs all workers."""
    from syncline.strategies import Gossip, build_strategy
    from syncline.strategies.parameter_server import ParameterServerStrategy

    strategy, servers = build_strategy(arguments.strategy), arguments.servers
    served = isinstance(strategy, ParameterServerStrategy) and strategy.asynchronous
    pairwise = isinstance(strategy, Gossip) and strategy.pairwise  # a server keeps its control channel
    if servers and not (served or pairwise):
        raise IncompatibleError(f"--servers {servers}: {strategy!r} uses no servers; leave it out, or take bsp, ssp, …")
    if arguments.on_failure in (None, "stop"):
        return
    if arguments.on_failure == "restart":
        raise IncompatibleError(
            "--on-failure restart: syncline train cannot take workers into a run; run a script of your own by syncline "
            "run --elastic MIN:MAX --restart K"
        )
    if arguments.mpi:
        raise IncompatibleError("--on-failure continue: mpiexec ends all workers when one fails; leave it out")
    if not strategy.survives:
        raise IncompatibleError(
            f"--on-failure continue: every step of {strategy!r} needs all workers; leave it out, or take a strategy "
            "that is asynchronous, such as ssp with --servers 1"
        )
    if served and not servers:
        raise IncompatibleError(
            f"--on-failure continue: without --servers each worker of {strategy!r} keeps a part of the weights, which "
            "is lost with it; add --servers 1"
        )


def _check_memory(arguments: argparse.Namespace, workers: int) -> None:
    """Refuse strategies that access other workers' memory where that is not possible."""
    from syncline.strategies import Hogwild, OneSided, build_strategy

    strategy = build_strategy(arguments.strategy)
    if workers == 1:
        return
    if isinstance(strategy, OneSided) and not arguments.mpi:
        raise IncompatibleError(
            f"--strategy {strategy!r} writes into other workers' memory, which needs MPI: add --mpi"
        )
    if isinstance(strategy, Hogwild) and (arguments.lab or arguments.hosts):
        where = f"--lab {arguments.lab}" if arguments.lab else f"--hosts {arguments.hosts}"
        raise IncompatibleError(f"{where}: {strategy!r} needs the memory of one host; use one host, or downpour")


def _settings(arguments: argparse.Namespace, workload: Workload, workers: int) -> Settings:
    """The settings. Errors are raised here, before any rank starts."""
    from syncline.codecs import build_codec
    from syncline.reduction import check_collective
    from syncline.strategies import build_strategy
    from syncline.workloads import ScriptWorkload

    settings = Settings(**{name: getattr(arguments, name) for name in asdict(Settings())})
    if settings.stages is not None and settings.stages.endswith(".json"):
        settings = replace(settings, stages=os.path.abspath(settings.stages))
    settings.check()
    if settings.diagnose and build_codec(settings.codec) is None:
        raise IncompatibleError(
            f"--diagnose {settings.diagnose} logs the error of a codec: give --codec, or leave it out"
        )
    strategy = build_strategy(settings.strategy)
    check_collective(settings.collective, build_codec(settings.codec))
    if settings.target is not None:
        workload.check_target(settings.target)
    if not arguments.hosts:  # other hosts may have data that this one does not
        if isinstance(workload, ScriptWorkload):
            workload.check()
        samples = workload.splits().sizes()["train"]
        if samples < settings.readers(workers):
            raise IncompatibleError(
                f"{workload} has {samples} samples to train on, too few for {workers} workers; take fewer (-n)"
            )
    if settings.pipeline is not None:
        from syncline.training.pipeline_training import check_pipeline

        check_pipeline(workload, settings, strategy, workers, data=not arguments.hosts)
    return settings


def _folder(arguments: argparse.Namespace, workload: Workload) -> tuple[RunFolder, bool | str]:
    """The run's folder, and the checkpoints from which it continues."""
    from syncline.checkpoint import latest
    from syncline.checkpoint.files import MANIFEST
    from syncline.training.run_folder import checkpoints_in

    resume = arguments.resume
    if resume is None and _requeued() and arguments.out is not None and RunFolder(arguments.out).used():
        logger.warning("Slurm has started this job again: it continues %s, as with --resume auto", arguments.out)
        resume = AUTO
    if resume is None:
        folder = RunFolder(arguments.out or Path("runs") / fresh_name(workload.spec))
        if folder.used():
            raise IncompatibleError(folder.refusal())
        return folder, False
    if resume == AUTO:
        if arguments.out is None:
            raise SpecError(
                "--resume auto continues in the run's own folder: name it with --out, or write --resume FOLDER"
            )
        return RunFolder(arguments.out), True
    source = checkpoints_in(resume)
    if latest(source) is None and not (source / MANIFEST).exists():
        raise SpecError(f"--resume {resume}: there is no checkpoint in that folder")
    if arguments.out is not None and arguments.out.resolve() != Path(resume).resolve():
        folder = RunFolder(arguments.out)
        if folder.used():
            raise IncompatibleError(folder.refusal())
        return folder, str(Path(resume).absolute())
    if source == Path(resume):
        raise SpecError(f"--resume {resume} is not a run's folder: give --out for the files of this run")
    return RunFolder(resume), True


def _requeued() -> bool:
    """Whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _check_resumed(folder: RunFolder, workload: Workload, settings: Settings) -> None:
    """Refuse another workload or learning rate; warn if other settings differ from those of the run."""
    from syncline.workloads import ScriptWorkload

    before = folder.read("config") or {}
    if before.get("workload", workload.spec) != workload.spec:
        raise IncompatibleError(f"{folder.path} has a run of {before['workload']}, not of {workload.spec}")
    usual = workload.defaults
    now: dict[str, Any] = asdict(settings)
    for name in ("batch", "learning_rate"):
        now[name] = getattr(usual, name) if now[name] is None else now[name]
    rates = ["learning_rate", "scaling", "warmup", "decay"]
    shaping = ["strategy", "codec", "collective", "pipeline", "stages", "batch", "global_batch", *rates, "seed"]
    if now["decay"] != "none":  # the decay depends on them
        rates += [name for name in ("epochs", "steps") if now[name] is not None]
    changed, refused = (
        [f"{name} {now[name]} (it was {before[name]})" for name in names if before.get(name, now[name]) != now[name]]
        for names in (shaping, rates)
    )
    if isinstance(workload, ScriptWorkload):
        digest = workload.script.sha256
        if before.get("script_sha256", digest) != digest:
            changed.append(f"a script of SHA-256 {digest[:12]}… (it was {before['script_sha256'][:12]}…)")
    if refused:
        raise IncompatibleError(
            f"{folder.path} continues with the learning rates that it was saved with, and cannot use "
            f"{', '.join(refused)}; start a new run for others"
        )
    if changed:
        logger.warning("%s continues with other settings than it started with: %s", folder.path, ", ".join(changed))


def is_kmeans(spec: str) -> bool:
    """Whether the workload is k-means, which is not a network."""
    return spec.partition("(")[0].strip() == "kmeans"


def train_kmeans(arguments: argparse.Namespace) -> int:
    """Solve k-means. Returns the exit code. One-sided SGD on several workers runs under mpiexec."""
    from syncline.bench.kmeans import KMeansPlan, build_blobs

    ranks = 1 if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise SpecError(f"-n {ranks}: a run takes at least one worker")
    parser = argparse.ArgumentParser()
    configure(parser)
    for name in NETWORK_OPTIONS:
        if getattr(arguments, name) != parser.get_default(name):
            raise IncompatibleError(
                f"--{name.replace('_', '-')}: kmeans is no network and has no use for it; it takes -n, --strategy, "
                "--batch, --epochs, --lr and --seed"
            )
    options = {"batch": arguments.batch, "epochs": arguments.epochs, "rate": arguments.learning_rate}
    given = {name: value for name, value in options.items() if value is not None}
    plan = KMeansPlan(problem=arguments.workload, strategy=arguments.strategy, given=given, seed=arguments.seed)
    problem = build_blobs(plan.problem)
    name, _, _ = plan.solver()
    if problem.points < ranks:
        raise IncompatibleError(f"{problem} has too few points for {ranks} workers; take fewer (-n)")
    target = ("-m", "syncline.bench.kmeans", plan.as_json())
    return Placement(ranks, mpi=name == "onesided" and ranks > 1).run(Job(target=target))
