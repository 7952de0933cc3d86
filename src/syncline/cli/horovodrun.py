"""Run a script with horovodrun's options; workers start as with `syncline run`.

examples:
  syncline horovodrun -np 4 python train.py                        four workers here
  syncline horovodrun -np 4 -H localhost:4 python train.py         the same
  syncline horovodrun -np 8 -H a:4,b:4 python -u train.py          over ssh; every host has the same paths
  syncline horovodrun -np 8 --hostfile hosts -p 2222 python -m package.train
  syncline horovodrun -np 3 --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python train.py      elastic
  syncline horovodrun -np 2 --timeline-filename t.json --fusion-threshold-mb 32 python train.py
  syncline horovodrun --alias -np 4 python train.py                a script that imports horovod.torch
  syncline horovodrun --config-file job.yaml --output-filename logs -np 4 python train.py
  syncline horovodrun --check-build

Output, exit code and Ctrl-C are those of `syncline run`. Without --alias, change one line of the script: import
syncline.compat.horovod.torch as hvd. Workers have HOROVOD_RANK, HOROVOD_SIZE and similar variables, except with --mpi.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import syncline
from syncline.cli.placement import Placement, add_placement_options
from syncline.cli.run import check_readable
from syncline.compat.horovod.settings import PREFIX, read
from syncline.compat.module_aliases import alias_variables
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.discovery import HostDiscovery
from syncline.launch.elastic import DEFAULT_RESTARTS, ElasticOptions
from syncline.launch.mpi import why_no_mpi
from syncline.launch.programs import LOCALHOST, Host, parse_hosts
from syncline.launch.ssh import ssh_command
from syncline.launch.start import Job, run_by_mpiexec
from syncline.specs import nearest
from syncline.training.run_folder import make_writable
from syncline.training.system import has_backend

__all__ = ["PythonCommand", "config_options", "configure", "parse_command", "place_ranks", "read_hostfile", "run"]

logger = logging.getLogger("syncline")

MAX_WORKERS = 1 << 20
"""The most workers of an elastic job without --max-np."""
VALUES = (
    ("--cycle-time-ms", "CYCLE_TIME", "MS", "how long requests are collected before they are sent"),
    ("--cache-capacity", "CACHE_CAPACITY", "N", "number of cached requests; 0: none"),
    ("--timeline-filename", "TIMELINE", "FILE", "write a Chrome trace; {rank} in the name: one for each rank"),
    ("--stall-check-warning-time-seconds", "STALL_CHECK_TIME_SECONDS", "S", "report missing ranks after this time"),
    ("--stall-check-shutdown-time-seconds", "STALL_SHUTDOWN_TIME_SECONDS", "S", "fail after this time"),
    ("--log-level", "LOG_LEVEL", "LEVEL", "trace, debug, info, warning, error or fatal"),
)
"""Flags that set variables: the flag, the variable without HOROVOD_, its value, and the help text."""
SWITCHES = (
    ("--hierarchical-allreduce", "HIERARCHICAL_ALLREDUCE", "1"),
    ("--no-hierarchical-allreduce", "HIERARCHICAL_ALLREDUCE", "0"),
    ("--timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "1"),
    ("--no-timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "0"),
    ("--no-stall-check", "STALL_CHECK_DISABLE", "1"),
    ("--stall-check", "STALL_CHECK_DISABLE", "0"),
)
IDLE = {
    "--start-timeout": 1,
    "--reset-limit": 1,
    "--blacklist-cooldown-range": 2,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
    "--autotune": 0,
    "--no-autotune": 0,
    "--autotune-log-file": 1,
    "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1,
    "--autotune-gaussian-process-noise": 1,
    "--mpi-threads-disable": 0,
    "--no-mpi-threads-disable": 0,
    "--num-nccl-streams": 1,
    "--ccl-bgt-affinity": 1,
    "--thread-affinity": 1,
    "--gloo-timeout-seconds": 1,
    "--prefix-output-with-timestamp": 0,
    "--log-with-timestamp": 0,
    "--log-without-timestamp": 0,
    "--log-hide-timestamp": 0,
    "--no-log-hide-timestamp": 0,
}
"""Flags of horovodrun without effect, and their numbers of values."""
REFUSED = {
    "--jsrun": "LSF's jsrun is not supported; use -H with ssh, --mpi, or syncline run --hosts slurm",
}
"""Flags of horovodrun that are not supported, and what to do instead."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("-v", "--version", action="version", version=f"syncline {syncline.__version__}")
    parser.add_argument(
        "-np", "--num-proc", type=int, dest="ranks", metavar="N", help="number of workers; -H may give it too"
    )
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what is built in, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print more messages of the launcher")
    parser.add_argument("--disable-cache", action="store_true", help="no effect: nothing is cached between runs")
    parser.add_argument(
        "--alias", action="store_true", help="let the script `import horovod.torch`; it need not be changed"
    )
    parser.add_argument(
        "--output-filename",
        type=Path,
        metavar="FOLDER",
        help="also write the output of each rank to FOLDER/rank.0/stdout and stderr, …, without its rank in the lines",
    )
    parser.add_argument("--config-file", metavar="FILE", help="a YAML file with settings; options take precedence")
    hosts = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="a:2,b:2", help="hosts and their slots; the first are filled first")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same as lines: a slots=2")
    ssh = parser.add_argument_group("ssh and the network")
    ssh.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="ssh's port on all hosts")
    ssh.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="ssh's private key")
    ssh.add_argument(
        *("--network-interfaces", "--network-interface", "--nics"),
        action="append",
        dest="nics",
        metavar="eth0,…",
        help="the network interfaces to use",
    )
    ssh.add_argument("--tcp", action="store_true", help="no InfiniBand for NCCL")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--gloo", action="store_true", help="gloo, or NCCL between GPUs: the default")
    add_placement_options(engine, "--mpi")
    engine.add_argument("--mpi-args", metavar='="…"', default="", help="more options for mpiexec")
    engine.add_argument("--binding-args", metavar='="…"', default="", help="more options for mpiexec")
    _configure_elastic(parser)
    _configure_tuning(parser)
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="python train.py args…", help="what to run")


def _configure_elastic(parser: argparse.ArgumentParser) -> None:
    elastic = parser.add_argument_group("elastic", "the job goes on without lost workers, and takes new ones")
    for flag, name, text in (
        ("min", "min_np", "the fewest workers; the job ends with fewer. Default: -np"),
        ("max", "max_np", "the most workers. Default: -np, or no limit with a script"),
    ):
        elastic.add_argument(f"--{flag}-np", f"--{flag}-num-proc", type=int, dest=name, metavar="N", help=text)
    elastic.add_argument(
        "--host-discovery-script", metavar="FILE", help="is run every second, and prints a line host:slots for each"
    )
    elastic.add_argument(
        "--slots-per-host", type=int, metavar="N", help="slots of hosts for which the script prints none; default 1"
    )
    elastic.add_argument(
        "--elastic-timeout",
        dest=PREFIX + "ELASTIC_TIMEOUT",
        metavar="S",
        help="how long the job waits for enough hosts, and a new worker for the others; default 600",
    )


def _configure_tuning(parser: argparse.ArgumentParser) -> None:
    tuning = parser.add_argument_group("tuning", "each sets a variable, HOROVOD_…")
    tuning.add_argument(
        "--fusion-threshold-mb",
        type=_in_bytes,
        dest=PREFIX + "FUSION_THRESHOLD",
        metavar="MB",
        help="maximum size of a fused reduction; 0: each tensor alone",
    )
    for flag, name, metavar, text in VALUES:
        tuning.add_argument(flag, dest=PREFIX + name, metavar=metavar, help=text)
    for flag, name, value in SWITCHES:
        tuning.add_argument(flag, dest=PREFIX + name, action="store_const", const=value)
    idle = parser.add_argument_group("without effect here", "options of horovodrun; a message names those that are set")
    for flag, count in IDLE.items():
        names = ("-prefix-timestamp", flag) if flag == "--prefix-output-with-timestamp" else (flag,)
        values: dict[str, object] = {"nargs": count, "metavar": "X"} if count else {"action": "store_true"}
        idle.add_argument(*names, dest=flag, **values)  # type: ignore[arg-type]
    refused = parser.add_argument_group("refused", "options of horovodrun; a message says what to do instead")
    for flag in REFUSED:
        refused.add_argument(flag, dest=flag, action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    if arguments.check_build:
        print(_describe_build())
        return 0
    if arguments.verbose:
        logger.setLevel(logging.INFO)
    if arguments.config_file is not None:
        _read_config(arguments, arguments.config_file)
    _check(arguments)
    words = arguments.command_line
    command = parse_command(words[1:] if words[:1] == ["--"] else words)
    aliases = alias_variables(["horovod"] if arguments.alias else [], os.environ)
    variables = {**command.variables, **_variables(arguments), **aliases}
    settings = read({**os.environ, **variables})  # an invalid value is refused here, not on every rank
    with _discovery(arguments) as discovery:
        hosts = _hosts(arguments, discovery, settings.elastic_timeout)
        elastic = _elastic_options(arguments, sum(host.slots for host in hosts))
        if elastic is not None:
            variables.setdefault("HOROVOD_ELASTIC", "1")
        job = Job(
            target=command.target,
            mpi=arguments.mpi,
            variables=variables,
            horovod=True,
            elastic=elastic,
            policy="stop" if elastic is None else "continue",
            discovery=discovery,
            elastic_timeout_s=settings.elastic_timeout,
            output=arguments.output_filename,
        )
        return _start(arguments, job, hosts)


def _start(arguments: argparse.Namespace, job: Job, hosts: Sequence[Host]) -> int:
    idle = [flag for flag in IDLE if vars(arguments)[flag] not in (None, False)]
    if idle:
        logger.warning("without effect here: %s", ", ".join(idle))
    here = [host.name for host in hosts] == [LOCALHOST] and job.discovery is None
    ranks, elsewhere = sum(host.slots for host in hosts), () if here else tuple(hosts)
    if arguments.mpi:
        return run_by_mpiexec(job, ranks, elsewhere, shlex.split(f"{arguments.mpi_args} {arguments.binding_args}"))
    with _ssh_options(arguments.ssh_port, arguments.ssh_identity_file):
        return Placement(ranks, elsewhere).run_elastic(job, None)


@contextlib.contextmanager
def _discovery(arguments: argparse.Namespace) -> Iterator[HostDiscovery | None]:
    """The script that names the hosts; None if there is none."""
    if arguments.host_discovery_script is None:
        yield None
        return
    names = _names_of_this_machine()
    slots = 1 if arguments.slots_per_host is None else arguments.slots_per_host
    found = HostDiscovery(arguments.host_discovery_script, slots, lambda name: LOCALHOST if name in names else name)
    with contextlib.closing(found):
        yield found


def _hosts(arguments: argparse.Namespace, discovery: HostDiscovery | None, timeout_s: float) -> tuple[Host, ...]:
    ranks: int | None = arguments.ranks
    if discovery is not None:
        least = ranks or arguments.min_np or 1
        found = discovery.wait(least, timeout_s)
        slots = sum(host.slots for host in found)
        most = slots if arguments.max_np is None else min(slots, arguments.max_np)
        return place_ranks(",".join(f"{host.name}:{host.slots}" for host in found), most)
    if arguments.hostfile is not None:
        return place_ranks(read_hostfile(arguments.hostfile), ranks)
    if arguments.hosts is not None:
        return place_ranks(arguments.hosts, ranks)
    if ranks is None:
        raise SpecError("how many workers? Give -np N, or hosts with their slots as -H a:2,b:2")
    return (Host(LOCALHOST, ranks),)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse invalid options, and options that cannot be used together."""
    given = vars(arguments)
    for flag, instead in REFUSED.items():
        if given[flag] not in (None, False):
            raise UnsupportedError(f"{flag}: {instead}")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise SpecError(f"-np {arguments.ranks}: a run takes at least one worker")
    script = arguments.host_discovery_script
    if script is not None and (arguments.hosts is not None or arguments.hostfile is not None):
        raise IncompatibleError(f"--host-discovery-script {script} names the hosts; leave -H and --hostfile out")
    if arguments.slots_per_host is not None and (script is None or arguments.slots_per_host < 1):
        raise SpecError(f"--slots-per-host {arguments.slots_per_host}: at least 1, with --host-discovery-script")
    if arguments.mpi and arguments.gloo:
        raise IncompatibleError("--gloo and --mpi are two backends; leave one out")
    if arguments.mpi and (arguments.ssh_port is not None or arguments.ssh_identity_file is not None):
        raise IncompatibleError("-p and -i are for ssh, and with --mpi mpiexec calls it; set them in ~/.ssh/config")
    if not arguments.mpi and (arguments.mpi_args or arguments.binding_args):
        raise IncompatibleError("--mpi-args and --binding-args are for mpiexec; add --mpi, or leave them out")
    if arguments.output_filename is not None:
        if arguments.mpi:
            raise IncompatibleError("--output-filename: mpiexec handles the output; give its own option by --mpi-args")
        make_writable(arguments.output_filename, "--output-filename")


def _elastic_options(arguments: argparse.Namespace, ranks: int) -> ElasticOptions | None:
    """The limits of an elastic job; None if no option asks for one."""
    least, most, script = arguments.min_np, arguments.max_np, arguments.host_discovery_script
    if least is None and most is None and script is None:
        return None
    if arguments.mpi:
        raise IncompatibleError("--mpi: mpiexec ends all workers when one fails; leave it out, or the elastic options")
    least = (ranks if arguments.ranks is None else arguments.ranks) if least is None else least
    most = (ranks if script is None else MAX_WORKERS) if most is None else most
    if not 1 <= least <= ranks <= most:
        raise SpecError(
            f"--min-np {least} --max-np {most} with {ranks} worker{'s' * (ranks > 1)}: the minimum is at least 1 and "
            f"at most {ranks}, the maximum at least {ranks}"
        )
    return ElasticOptions(least, most, DEFAULT_RESTARTS)


CONFIG = {
    "params": {
        **{name: f"--{name.replace('_', '-')}" for name in ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity")},
        "hierarchical_allreduce": "--hierarchical-allreduce",
        "hierarchical_allgather": "--hierarchical-allgather",
    },
    "autotune": {
        "enabled": "--autotune",
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "--timeline-filename", "mark_cycles": "--timeline-mark-cycles"},
    "stall_check": {
        "enabled": "--stall-check",
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": "--mpi-threads-disable",
        "num_nccl_streams": "--num-nccl-streams",
        "ccl_bgt_affinity": "--ccl-bgt-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {"level": "--log-level", "with_timestamp": "--log-with-timestamp"},
}
"""The sections of a configuration file, and the option of each key. `controller` stands beside them."""
CONTROLLERS = ("gloo", "mpi")


def _read_config(arguments: argparse.Namespace, path: str) -> None:
    """Set the options that a configuration file names and the command line does not."""
    words = config_options(_load_yaml(path), path)
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    try:
        found = vars(parser.parse_args(words))
    except argparse.ArgumentError as error:
        raise SpecError(f"--config-file {path}: {error}") from None
    given = vars(arguments)
    if given["gloo"] or given["mpi"]:
        found.update(gloo=False, mpi=False)
    for name, value in found.items():
        if given[name] in (None, False) and value not in (None, False):
            given[name] = value


def _load_yaml(path: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError("--config-file needs PyYAML: pip install 'syncline[horovod]', or give options") from None
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"--config-file {path} cannot be read: {' '.join(str(error).split())}") from error


def config_options(document: Any, path: str) -> list[str]:
    """The options that a configuration file means.

    >>> config_options({"controller": "gloo", "params": {"cycle_time_ms": 5}, "stall_check": {"enabled": False}}, "f")
    ['--gloo', '--cycle-time-ms=5', '--no-stall-check']
    """
    where = f"--config-file {path}"
    if document is None:
        return []  # an empty file
    if not isinstance(document, dict):
        raise SpecError(f"{where}: sections such as params: with keys are needed, not a {type(document).__name__}")
    words = []
    for section, keys in document.items():
        if section == "controller":
            if str(keys).lower() not in CONTROLLERS:
                raise SpecError(f"{where}: controller: {keys} is not one of {', '.join(CONTROLLERS)}")
            words.append(f"--{str(keys).lower()}")
            continue
        if section not in CONFIG:
            raise SpecError(f"{where}: {section!r} is no section; {nearest(str(section), ['controller', *CONFIG])}")
        if keys is not None and not isinstance(keys, dict):
            raise SpecError(f"{where}: {section}: {keys!r}: keys with values are needed, such as {_example(section)}")
        for key, value in (keys or {}).items():
            if key not in CONFIG[section]:
                raise SpecError(f"{where}: {section} has no key {key!r}; {nearest(str(key), list(CONFIG[section]))}")
            words += _config_option(CONFIG[section][key], value, f"{where}: {section}: {key}: {value}")
    return words


def _example(section: str) -> str:
    return ", ".join(f"{key}: …" for key in list(CONFIG[section])[:2])


def _config_option(flag: str, value: Any, where: str) -> list[str]:
    switch = IDLE.get(flag) == 0 or any(flag == name for name, _, _ in SWITCHES)
    if value is None:
        return []
    if switch != isinstance(value, bool):
        raise SpecError(f"{where}: {'true or false' if switch else 'a value'} is needed")
    if not switch:
        return [f"{flag}={value}"]
    if value:
        return [flag]
    opposite = flag.replace("--", "--no-", 1)
    return [opposite] if opposite in IDLE or any(opposite == name for name, _, _ in SWITCHES) else []


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that the flags set."""
    variables = {
        name: value for name, value in vars(arguments).items() if name.startswith(PREFIX) and value is not None
    }
    if arguments.nics:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), ",".join(arguments.nics))
    if arguments.tcp:
        variables["NCCL_IB_DISABLE"] = "1"
    return variables


@contextlib.contextmanager
def _ssh_options(port: int | None, key: str | None) -> Iterator[None]:
    """Add options to the ssh command inside the context."""
    before = os.environ.get("SYNCLINE_SSH")
    options = [*(["-p", str(port)] if port is not None else []), *(["-i", key] if key is not None else [])]
    os.environ["SYNCLINE_SSH"] = shlex.join([*ssh_command(), *options])
    try:
        yield
    finally:
        if before is None:
            del os.environ["SYNCLINE_SSH"]
        else:
            os.environ["SYNCLINE_SSH"] = before


def _in_bytes(text: str) -> str:
    try:
        return str(int(text) << 20)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of MB") from None


def _describe_build() -> str:
    mpi = why_no_mpi() is None
    gloo, nccl = has_backend("Gloo"), has_backend("NCCL")
    groups = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"MPI": mpi, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": mpi, "Gloo": gloo},
    }
    lines = [f"Syncline v{syncline.__version__} in the place of Horovod:"]
    for title, found in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in found.items())]
    return "\n".join(lines)


PYTHON = re.compile(r"python(?:3(?:\.(\d+))?)?")
OPTIONS = {
    "-u": "",  # workers are always unbuffered
    "-q": "",
    "-B": "PYTHONDONTWRITEBYTECODE=1",
    "-O": "PYTHONOPTIMIZE=1",
    "-OO": "PYTHONOPTIMIZE=2",
    "-P": "PYTHONSAFEPATH=1",
    "-s": "PYTHONNOUSERSITE=1",
    "-v": "PYTHONVERBOSE=1",
    "-W": "PYTHONWARNINGS",
    "-X dev": "PYTHONDEVMODE=1",
    "-X faulthandler": "PYTHONFAULTHANDLER=1",
    "-X utf8": "PYTHONUTF8=1",
}
"""Options of Python, and the equivalent variables, because the launcher starts Python itself."""


@dataclass(frozen=True)
class PythonCommand:
    """The target of a job, and the variables that replace options of Python."""

    target: tuple[str, ...]
    variables: dict[str, str]


def parse_command(words: Sequence[str]) -> PythonCommand:
    """Parse a command that begins with `python` or is a Python script.

    >>> parse_command(["python3", "-u", "-m", "package.train", "--epochs", "3"])
    PythonCommand(target=('-m', 'package.train', '--epochs', '3'), variables={})
    """
    if not words:
        raise SpecError("no command is named: syncline horovodrun -np 4 python train.py")
    first, rest = words[0], list(words[1:])
    found = PYTHON.fullmatch(os.path.basename(first))
    if found is None:
        return PythonCommand((_script(first), *rest), {})
    _check_python(first, found[1])
    variables: dict[str, str] = {}
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        _take_option(rest, variables)
    if not rest or rest == ["-m"]:
        raise SpecError(f"{' '.join(words)} names no script and no module: syncline horovodrun -np 4 python train.py")
    if rest[0] != "-m":
        _check_script(rest[0])
    return PythonCommand(tuple(rest), variables)


def _check_python(word: str, minor: str | None) -> None:
    """Refuse another Python than this one: workers need the installed syncline."""
    here = os.path.dirname(os.path.abspath(sys.executable))
    elsewhere = "/" in word and os.path.dirname(os.path.abspath(word)) != here
    if elsewhere or (minor is not None and int(minor) != sys.version_info.minor):
        raise UnsupportedError(f"{word}: workers run on this Python, {sys.executable}; write python in its place")


def _take_option(rest: list[str], variables: dict[str, str]) -> None:
    option = rest.pop(0)
    value = ""
    if option.startswith(("-W", "-X")):
        value = option[2:] or (rest.pop(0) if rest else "")
        option = f"-X {value}" if option.startswith("-X") else "-W"
    if option == "-c":
        raise UnsupportedError("python -c: only scripts and modules can be run; put the code into a file")
    if option not in OPTIONS:
        known = ", ".join(OPTIONS)
        raise UnsupportedError(f"python {option}: this option cannot be passed on; those that can: {known}")
    name, _, fixed = OPTIONS[option].partition("=")
    if name:
        variables[name] = fixed or value


def _script(word: str) -> str:
    """The path of a Python script, or of a command on PATH that `pip` has installed."""
    path = word if os.path.exists(word) else shutil.which(word)
    if path is None:
        raise SpecError(f"there is no command {word!r} in {os.getcwd()} or on PATH; write python train.py")
    if not path.endswith(".py") and not _begins_with_python(path):
        raise UnsupportedError(
            f"{word!r} is not a Python script: the command must be python train.py or python -m module"
        )
    _check_script(path)
    return path


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise SpecError(f"there is no script {path!r} in {os.getcwd()}; for a module use python -m")
    check_readable(path)


def _begins_with_python(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def read_hostfile(path: str) -> str:
    """Read a file of lines like `a slots=2`, as `a:2,b:2`. Empty lines and text after a # are ignored."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the hostfile {path!r} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        found = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)", text)
        if found is not None:
            hosts.append(f"{found[1]}:{found[2]}")
        elif text:
            raise SpecError(f"the hostfile {path!r}, line {number}: {text!r}; write lines like: a slots=2")
    if not hosts:
        raise SpecError(f"the hostfile {path!r} names no host; write lines like: a slots=2")
    return ",".join(hosts)


def place_ranks(text: str, ranks: int | None) -> tuple[Host, ...]:
    """The hosts of `a:2,b:2` that `ranks` ranks fill, the first hosts first; all slots if `ranks` is None.

    >>> place_ranks("127.0.0.1:4", 2)
    (Host(name='localhost', slots=2),)
    >>> place_ranks("a:2,b:2,c:2", 3)
    (Host(name='a', slots=2), Host(name='b', slots=1))
    """
    slots: dict[str, int] = {}
    for host in parse_hosts(text):
        name = LOCALHOST if host.name in _names_of_this_machine() else host.name
        slots[name] = slots.get(name, 0) + host.slots
    total = sum(slots.values())
    left = total if ranks is None else ranks
    if left > total:
        raise SpecError(f"-np {ranks} but {text} has {total} slot{'s' * (total > 1)}; give more as a:{ranks}")
    placed = []
    for name, count in slots.items():
        if left > 0:
            placed.append(Host(name, min(count, left)))
            left -= count
    return tuple(placed)


def _names_of_this_machine() -> set[str]:
    name = socket.gethostname()
    return {LOCALHOST, "127.0.0.1", name, name.partition(".")[0]}
