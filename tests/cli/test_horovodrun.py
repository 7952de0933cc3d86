"""`syncline horovodrun`: what it makes of horovodrun's words, and what it refuses in one sentence."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import syncline
from syncline.cli import horovodrun, placement
from syncline.cli.main import main
from syncline.errors import IncompatibleError, SpecError, SynclineError, UnsupportedError
from syncline.launch import start
from syncline.launch.programs import Host, LaunchHost, forwarded_variables, rank_programs
from syncline.launch.start import Job
from tests.launch.runs import PRELUDE, Runs, wait_for
from tests.launch.sshd import SSHD, ssh_server


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("#!/usr/bin/env python\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    horovodrun.configure(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def started(script: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been started, in the place of starting it."""
    told: dict[str, Any] = {}

    def here(job: Job, ranks: int) -> int:
        told.update(job=job, hosts=(Host("localhost", ranks),))
        return 7

    def on_hosts(job: Job, hosts: tuple[Host, ...]) -> int:
        told.update(job=job, hosts=hosts, ssh=os.environ.get("SYNCLINE_SSH"))
        return 7

    def over(command: list[str], variables: dict[str, str], mpi: bool) -> int:
        assert mpi, "what MPICH leaves behind is removed"
        told.update(command=command, variables=variables)
        return 7

    monkeypatch.setattr(placement, "run_here", here)
    monkeypatch.setattr(placement, "run_on_hosts", on_hosts)
    monkeypatch.setattr(start, "become_launcher", over)
    monkeypatch.setattr(start, "mpi_command", lambda *told: ["mpiexec", *told[6], str(told[1]), *told[0]])
    monkeypatch.setattr(placement, "warn_if_oversubscribed", lambda workers: None)
    return told


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("-np 2", SpecError, "no command is named: syncline horovodrun -np 4 python train.py"),
        ("-np 2 python", SpecError, "names no script and no module"),
        ("-np 2 python -m", SpecError, "names no script and no module"),
        ("-np 2 python nowhere.py", SpecError, "there is no script 'nowhere.py' in /"),
        ("-np 2 nowhere", SpecError, "there is no command 'nowhere' in /"),
        ("-np 2 sh train.sh", UnsupportedError, "'sh' is not a Python script"),
        ("-np 2 python -c pass", UnsupportedError, "put the code into a file"),
        ("-np 2 python -I train.py", UnsupportedError, "python -I: this option cannot be passed on; those that can: "),
        ("-np 2 python -X tracemalloc train.py", UnsupportedError, "python -X tracemalloc"),
        ("-np 2 /nowhere/python train.py", UnsupportedError, "/nowhere/python: workers run on this Python"),
        ("-np 2 python3.1 train.py", UnsupportedError, "python3.1: workers run on this Python"),
        ("python train.py", SpecError, "how many workers. Give -np N, or hosts"),
        ("-np 0 python train.py", SpecError, "-np 0: a run takes at least one worker"),
        ("-np 5 -H localhost:4 python train.py", SpecError, "-np 5 but localhost:4 has 4 slots; give more as a:5"),
        ("-np 2 -H localhost python train.py", SpecError, "-np 2 but localhost has 1 slot; give more as a:2"),
        ("-H a:x python train.py", SpecError, "'a:x' is not a host"),
        ("-np 1 --hostfile nowhere python train.py", SpecError, "the hostfile 'nowhere' cannot be read"),
        ("-np 2 --min-np 3 python train.py", SpecError, "--min-np 3 --max-np 2 with 2 workers: the minimum is"),
        ("-np 2 --max-np 1 python train.py", SpecError, "the maximum at least 2"),
        ("-np 2 --min-np 1 --mpi python train.py", IncompatibleError, "mpiexec ends all workers when one fails"),
        ("-np 2 --host-discovery-script x python train.py", SpecError, "no such file, or it cannot be executed"),
        ("-np 2 -H a:2 --host-discovery-script x python train.py", IncompatibleError, "leave -H and --hostfile out"),
        ("-np 2 --slots-per-host 2 python train.py", SpecError, "with --host-discovery-script"),
        ("-np 2 --mpi --output-filename x python train.py", IncompatibleError, "its own option by --mpi-args"),
        (
            "-np 2 --output-filename train.py python train.py",
            SpecError,
            "train.py cannot be written to .*name another folder with --output-f",
        ),
        ("-np 2 --config-file nowhere python train.py", SpecError, "--config-file nowhere cannot be read"),
        ("-np 2 --jsrun python train.py", UnsupportedError, "--jsrun"),
        ("-np 2 --gloo --mpi python train.py", IncompatibleError, "leave one out"),
        ("-np 2 --mpi -p 22 python train.py", IncompatibleError, "set them in ~/.ssh/config"),
        ("-np 2 --mpi-args=-v python train.py", IncompatibleError, "add --mpi"),
        ("-np 2 --cycle-time-ms soon python train.py", SpecError, "HOROVOD_CYCLE_TIME='soon'"),
        ("-np 2 --fusion-threshold-mb -1 python train.py", SpecError, "0 or more"),
        ("-np 2 --log-level loud python train.py", SpecError, "trace, debug, info"),
    ],
)
def test_refused(script: Path, line: str, kind: type[SynclineError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        horovodrun.run(parsed(*line.split()))
    assert "\n" not in str(caught.value)


def test_an_unknown_flag_gives_the_nearest(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["horovodrun", "-np", "2", "--fusion-treshold-mb", "3", "python", "train.py"])
    assert caught.value.code == 2
    assert "--fusion-treshold-mb; did you mean --fusion-threshold-mb?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "target", "variables"),
    [
        ("python train.py --lr 3", ("train.py", "--lr", "3"), {}),
        ("python3 -u train.py -np 9", ("train.py", "-np", "9"), {}),
        ("python -m package.train -H x", ("-m", "package.train", "-H", "x"), {}),
        ("./train.py", ("./train.py",), {}),
        ("-- python train.py", ("train.py",), {}),
        (
            "python -OO -W error -B train.py",
            ("train.py",),
            {"OPTIMIZE": "2", "WARNINGS": "error", "DONTWRITEBYTECODE": "1"},
        ),
        ("python -Wignore -X dev train.py", ("train.py",), {"WARNINGS": "ignore", "DEVMODE": "1"}),
    ],
)
def test_commands(started: dict[str, Any], command: str, target: tuple[str, ...], variables: dict[str, str]) -> None:
    assert horovodrun.run(parsed("-np", "2", *command.split())) == 7
    assert started["job"].target == target
    assert started["job"].variables == {f"PYTHON{name}": value for name, value in variables.items()}


def test_this_very_python_may_be_named(started: dict[str, Any]) -> None:
    horovodrun.run(parsed("-np", "2", sys.executable, "train.py"))
    assert started["job"].target == ("train.py",)


def test_a_script_without_an_ending_is_known_by_its_first_line(started: dict[str, Any], script: Path) -> None:
    script.rename(script.with_name("train"))
    horovodrun.run(parsed("-np", "2", "./train"))
    assert started["job"].target == ("./train",)


def test_where_ranks_go(started: dict[str, Any], script: Path) -> None:
    def hosts(*words: str) -> list[tuple[str, int]]:
        assert horovodrun.run(parsed(*words, "python", "train.py")) == 7
        return [(host.name, host.slots) for host in started["hosts"]]

    assert hosts("-np", "3") == [("localhost", 3)]
    assert hosts("-H", "localhost:4") == [("localhost", 4)]
    assert hosts("-np", "2", "-H", "localhost:4", "--min-np", "2") == [("localhost", 2)]
    assert hosts("-H", f"127.0.0.1:2,{socket.gethostname()}:1") == [("localhost", 3)]
    assert hosts("-np", "5", "-H", "a:2,localhost:2,b:2,c:2") == [("a", 2), ("localhost", 2), ("b", 1)]
    Path("hosts").write_text("# two hosts\na slots=2\n\nb   slots = 4  # big\n")
    assert hosts("-np", "3", "-hostfile", "hosts") == hosts("-np", "3", "--hostfile", "hosts") == [("a", 2), ("b", 1)]


@pytest.mark.parametrize(
    ("text", "words"), [("a 2\n", "line 1: 'a 2'; write lines like: a slots=2"), ("\n", "no host")]
)
def test_a_bad_hostfile(script: Path, text: str, words: str) -> None:
    Path("hosts").write_text(text)
    with pytest.raises(SpecError, match=words):
        horovodrun.run(parsed("--hostfile", "hosts", "python", "train.py"))


def test_ssh_is_called_with_port_and_key(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_SSH", raising=False)
    horovodrun.run(parsed("-H", "a:1", "-p", "2222", "-i", "my key", "python", "train.py"))
    assert started["ssh"] == "ssh -p 2222 -i 'my key'"
    assert "SYNCLINE_SSH" not in os.environ
    monkeypatch.setenv("SYNCLINE_SSH", "ssh -F config")
    horovodrun.run(parsed("-H", "a:1", "-p", "2222", "python", "train.py"))
    assert started["ssh"] == "ssh -F config -p 2222"
    assert os.environ["SYNCLINE_SSH"] == "ssh -F config"


def test_flags_become_variables(started: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    line = (
        "-np 2 --fusion-threshold-mb 32 --cycle-time-ms 2.5 --cache-capacity 7 --timeline-filename t.json "
        "--timeline-mark-cycles --no-stall-check --stall-check-warning-time-seconds 9 --log-level DEBUG "
        "--stall-check-shutdown-time-seconds 10 --hierarchical-allreduce --network-interface eth0 --nics eth1 --tcp "
        "--autotune --autotune-log-file x --blacklist-cooldown-range 1 2 -prefix-timestamp --disable-cache --gloo "
        "--torus-allreduce python train.py"
    )
    with caplog.at_level(logging.WARNING, logger="syncline"):
        horovodrun.run(parsed(*line.split()))
    assert started["job"].variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_CACHE_CAPACITY": "7",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_IB_DISABLE": "1",
    }
    idle = "--blacklist-cooldown-range, --torus-allreduce, --autotune, --autotune-log-file"
    assert caplog.messages == [f"without effect here: {idle}, --prefix-output-with-timestamp"]


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: false
autotune:
  enabled: true
  warmup_samples: 5
timeline:
  filename: t.json
  mark_cycles: true
stall_check:
  enabled: false
library_options:
logging:
  level: INFO
"""


def test_a_configuration_file(started: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    Path("job.yaml").write_text(CONFIG)
    line = "-np 2 --config-file job.yaml --cycle-time-ms 2 --stall-check --no-timeline-mark-cycles python train.py"
    with caplog.at_level(logging.WARNING, logger="syncline"):
        horovodrun.run(parsed(*line.split()))
    assert started["job"].variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "2",  # the options win
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_LOG_LEVEL": "INFO",
    }
    assert caplog.messages == ["without effect here: --autotune, --autotune-warmup-samples"]
    Path("empty.yaml").write_text("# nothing\n")
    horovodrun.run(parsed("-np", "2", "--config-file", "empty.yaml", "python", "train.py"))
    assert started["job"].variables == {}
    Path("mpi.yaml").write_text("controller: MPI\n")
    horovodrun.run(parsed(*["-np", "3", "--config-file", "mpi.yaml", "python", "train.py"]))
    assert started["command"][0] == "mpiexec"
    started.clear()
    horovodrun.run(parsed(*["-np", "3", "--gloo", "--config-file", "mpi.yaml", "python", "train.py"]))
    assert started["hosts"] == (Host("localhost", 3),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- params", "sections such as params: with keys are needed, not a list"),
        ("params: [1", "job.yaml cannot be read"),
        ("parms: {}", "'parms' is no section; did you mean 'params'"),
        ("params: 3", "params: 3: keys with values are needed, such as fusion_threshold_mb: …, cycle_time_ms"),
        ("params: {cycle_time: 3}", "params has no key 'cycle_time'; did you mean 'cycle_time_ms'"),
        ("params: {cycle_time_ms: true}", "params: cycle_time_ms: True: a value is needed"),
        ("timeline: {mark_cycles: 1}", "true or false is needed"),
        ("params: {fusion_threshold_mb: much}", "fusion-threshold-mb: 'much' is not a whole number"),
        ("controller: jsrun", "controller: jsrun is not one of gloo, mpi"),
    ],
)
def test_a_bad_configuration_file(script: Path, text: str, words: str) -> None:
    Path("job.yaml").write_text(text)
    with pytest.raises(SpecError, match=words):
        horovodrun.run(parsed("-np", "2", "--config-file", "job.yaml", "python", "train.py"))


def test_configuration_files_need_pyyaml(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[horovod\]'"):
        horovodrun.run(parsed("-np", "2", "--config-file", "job.yaml", "python", "train.py"))


def test_mpiexec_starts_them_where_asked(started: dict[str, Any]) -> None:
    horovodrun.run(
        parsed("-np", "3", "--mpi", "--mpi-args=-bind-to none", "--cycle-time-ms", "2", "python", "train.py")
    )
    assert started["command"] == ["mpiexec", "-bind-to", "none", "3", "train.py"]
    told = started["variables"]
    assert (told["SYNCLINE_TRANSPORT"], told["SYNCLINE_WORKERS"], told["HOROVOD_CYCLE_TIME"]) == ("mpi", "3", "2")


def test_check_build_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "--check-build"]) == 0
    told = capsys.readouterr().out
    assert "    [X] PyTorch\n" in told
    assert "    [ ] TensorFlow\n" in told
    assert "    [X] Gloo" in told
    with pytest.raises(SystemExit):
        main(["horovodrun", "-v"])
    assert capsys.readouterr().out == f"syncline {syncline.__version__}\n"


def test_variables_are_forwarded_without_those_of_an_outer_run() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}
    assert forwarded_variables(environ) == {"HOROVOD_CYCLE_TIME": "5"}


def test_no_rank_of_syncline_run_is_told_horovods_words() -> None:
    [[program]] = rank_programs([LaunchHost(name="a", slots=1)], ["train.py"], {})
    assert not [name for name in program.variables if name.startswith("HOROVOD_")]


TELL = """
import json
post(f"told{rank}", json.dumps({name: os.environ[name] for name in os.environ if name.startswith("HOROVOD_")}))
print("hello", sys.argv[1:])
if "fail" in sys.argv and rank == 1:
    sys.exit(9)
"""


def told(runs: Runs, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((runs.folder / f"told{rank}").read_text())
    return found


def output(runs: Runs, rank: str) -> tuple[str, str]:
    """The files of --output-filename."""
    folder = runs.folder / "logs" / rank
    return (folder / "stdout").read_text(), (folder / "stderr").read_text()


def test_a_run(runs: Runs) -> None:
    script = runs.script(TELL)
    (runs.folder / "job.yaml").write_text("params: {cycle_time_ms: 3}")
    words = ("-np", "2", "-H", "localhost:4", "--config-file", "job.yaml", "--output-filename", "logs")
    run = runs.run("horovodrun", *words, "python", "-u", script, "-np", "x")
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["[1] hello ['-np', 'x']", "hello ['-np', 'x']"]
    for rank in (0, 1):
        assert output(runs, f"rank.{rank}") == ("hello ['-np', 'x']\n", "")
    common = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    for rank in (0, 1):
        own = {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_CYCLE_TIME": "3"}
        assert told(runs, rank) == {**common, **own}


def test_the_exit_code_is_the_workers(runs: Runs) -> None:
    run = runs.run("horovodrun", "-np", "2", "python", runs.script(TELL), "fail")
    assert run.code == 9, run.describe()
    assert "rank 1 failed (exit code 9)" in run.err


def test_ctrl_c_ends_all(runs: Runs) -> None:
    run = runs.start("horovodrun", "-np", "2", "python", runs.script('post(f"up{rank}")\nuntil("never")'))
    wait_for(lambda: all((runs.folder / f"up{rank}").exists() for rank in (0, 1)), "both run")
    os.kill(run.pid, signal.SIGINT)
    assert run.finish().code == 130


@pytest.mark.skipif(SSHD is None or not os.access("/run", os.W_OK), reason="needs sshd and the right to start it")
def test_over_ssh(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "sshd").mkdir()
    with ssh_server(tmp_path / "sshd") as command:
        environ = {"SYNCLINE_SSH": command, "HOROVOD_CACHE_CAPACITY": "7"}
        words = ("horovodrun", "-np", "3", "-H", "localhost:2,alpha:4", "--cycle-time-ms", "3")
        more = ("--output-filename", "logs", "python")
        # Over ssh a worker finds nothing of our environment but what is forwarded_variables.
        script = runs.script("")
        Path(script).write_text(f"import os\nos.environ['HERE'] = {str(runs.folder)!r}\n{PRELUDE}{TELL}")
        run = runs.run(*words, *more, script, variables=environ)
    assert run.code == 0, run.describe()
    assert [output(runs, f"rank.{rank}")[0] for rank in range(3)] == ["hello []\n"] * 3
    last = told(runs, 2)
    assert (last["HOROVOD_RANK"], last["HOROVOD_LOCAL_RANK"], last["HOROVOD_LOCAL_SIZE"]) == ("2", "0", "1")
    assert (last["HOROVOD_CROSS_RANK"], last["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert (last["HOROVOD_CYCLE_TIME"], last["HOROVOD_CACHE_CAPACITY"]) == ("3", "7")
