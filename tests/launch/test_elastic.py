"""Elastic jobs as users start them: ranks are killed and started again, others join, and too few end the job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Embedding, Linear, Sequential, Tanh

from syncline.checkpoint import latest, load
from syncline.control import LogEntry
from syncline.errors import SpecError
from syncline.launch.elastic import open_control_log, started_members
from syncline.launch.job_folder import open_job_store, read_job
from tests.launch.runs import Run, Runs, wait_for

MEMBER = """
import json
member = int(os.environ["SYNCLINE_MEMBER"])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SYNCLINE_LOCAL_RANK", "SYNCLINE_ELASTIC")
names += ("SYNCLINE_JOIN", "SYNCLINE_PROGRAM", "SYNCLINE_LOST_AFTER")
post(f"member{member}", json.dumps([os.getpid(), *(os.environ.get(name) for name in names)]))
"""
WAITING = f"""{MEMBER}
until("go")
say("done", member)
"""


def told(runs: Runs, member: int) -> list[Any]:
    """The process id of a member, and its variables."""
    found: list[Any] = json.loads(runs.read(f"member{member}"))
    return found


def logged(runs: Runs) -> list[LogEntry]:
    """The control log of the job in the folder `job`."""
    folder = runs.folder / "job"
    return open_control_log(open_job_store(folder, read_job(folder))).read()


def kill(runs: Runs, member: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(told(runs, member)[0], number)


def end(runs: Runs, run: Run) -> Run:
    runs.post("go")
    return run.finish()


def test_killed_rank_is_started_again_as_a_new_member(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", "--elastic", "1:3", "--restart", "2", "--folder", "job", runs.script(WAITING))
    told(runs, 0)
    kill(runs, 1)
    first, new = told(runs, 0)[1:], told(runs, 2)[1:]
    assert first == ["0", "2", "0", "2", None, "1:3", None, "rank 0", "10"]
    assert new == ["0", "1", "0", "1", "1", "1:3", "1", "rank 2", "10"]
    second = runs.run("run", "-n", "2", "--elastic", "1:3", "--folder", "job", runs.script(WAITING))
    assert second.code == 2
    assert f"job is in use by another job (process {run.pid} on " in second.err
    wait_for(lambda: len(logged(runs)) == 6, "the new rank is in the log")
    found = json.loads(runs.run("status", "job", "--json").out)
    assert [(one["member"], one["pid"]) for one in found["members"]] == [(0, told(runs, 0)[0]), (2, told(runs, 2)[0])]
    assert [one["kind"] for one in found["events"]] == ["job", "started", "started", "ended", "restart", "started"]
    assert found["events"][3]["reason"] == "it was killed by signal 9 (SIGKILL)"
    shown = runs.run("status", "job")
    assert "job: 2 members (1 to 3), running for " in shown.out
    assert "ended     member 1: it was killed by signal 9 (SIGKILL)" in shown.out
    assert "restart   member 2 replaces member 1 after 1 s, restart 1" in shown.out
    assert end(runs, run).code == 0, run.describe()
    assert run.err.splitlines() == [
        "syncline: rank 1 was killed by signal 9 (SIGKILL); it is started again in 1 s (restart 1 of 2)",
        "syncline: the job ended well; 1 rank was lost, 1 was started again",
    ]
    assert "[2] done 2\n" in run.out
    ended = runs.run("status", "job")
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.startswith("the job in job ended at ")
    assert ended.out.endswith("with exit code 0\n")
    assert runs.run("join", "job").err.endswith("with exit code 0; start a new job\n")
    runs.assert_nothing_left()


FAILING = f"""{MEMBER}
if rank == 1 or "SYNCLINE_JOIN" in os.environ:
    raise ValueError("boom")
until("go")
"""


def test_restarts_are_limited_and_the_others_end_well(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", "--elastic", "1:2", "--restart", "1", runs.script(FAILING))
    told(runs, 2)
    wait_for(lambda: "already" in run.err, "the second failure is reported")
    assert end(runs, run).code == 0, run.describe()
    assert not (runs.folder / "member3").exists()
    assert run.err.count("Traceback") == 1
    assert "rank 1 failed (exit code 1); it is started again in 1 s (restart 1 of 1)\nTraceback" in run.err
    assert "rank 2 failed (exit code 1) with the same error as rank 1; it was started again once already" in run.err
    assert run.err.endswith("syncline: the job ended well; 2 ranks were lost, 1 was started again\n")


def test_too_few_ranks_end_the_job(runs: Runs) -> None:
    run = runs.start("run", "-n", "3", "--elastic", "2:3", "--folder", "job", runs.script(WAITING))
    for member in (2, 1):
        told(runs, 0)
        kill(runs, member)
    run.finish()
    assert run.code == 137, run.describe()
    assert run.err.endswith("syncline: 1 rank is left of 3, and the job needs at least 2: it ends\n")
    found = read_job(runs.folder / "job")
    assert found.ended is not None
    assert (found.ended["code"], found.key) == (137, "")
    assert (runs.folder / "job" / "job.json").stat().st_mode & 0o777 == 0o600
    runs.assert_nothing_left()


def test_script_that_cannot_start_is_not_restarted_forever(runs: Runs) -> None:
    run = runs.run("run", "-n", "2", "--elastic", "1:2", "--restart", "1", runs.script("def"))
    assert run.code == 1, run.describe()
    assert run.err.count("SyntaxError") == 1
    assert run.err.endswith("syncline: 0 ranks are left of 2, and the job needs at least 1: it ends\n")


JOINED = f"""{MEMBER}
if "SYNCLINE_JOIN" in os.environ:
    until("fail")
    sys.exit(7)
until("go")
"""


def test_rank_joins_from_another_shell(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", "--elastic", "1:3", "--folder", "job", runs.script(JOINED))
    told(runs, 0)
    told(runs, 1)
    joining = runs.start("join", "job")
    assert told(runs, 2)[1:] == ["0", "1", "0", "1", "2", "1:3", "1", "rank 2", "10"]
    wait_for(lambda: len(started_members(logged(runs))) == 3, "the joined rank is in")
    refused = runs.run("join", "job")
    assert refused.code == 2
    assert "the job has 3 ranks, and its maximum is 3 (--elastic 1:3)" in refused.err
    runs.post("fail")
    assert joining.finish().code == 7, joining.describe()
    assert joining.err.splitlines() == [
        "syncline: joining as rank 2; Ctrl-C ends it, and the job goes on",
        "syncline: rank 2 failed (exit code 7)",
    ]
    last = logged(runs)[-1]
    assert (last.kind, last.fields) == ("ended", {"member": 2, "code": 7, "reason": "it failed (exit code 7)"})
    wait_for(lambda: "has ended" in run.err, "the supervisor has read it")
    assert end(runs, run).code == 0, run.describe()
    assert "syncline: rank 2, which had joined, has ended: it failed (exit code 7)" in run.err
    runs.assert_nothing_left()


def test_ctrl_c_ends_a_joined_rank_alone(runs: Runs) -> None:
    run = runs.start("run", "-n", "1", "--elastic", "1:2", "--folder", "job", runs.script(WAITING))
    told(runs, 0)
    joining = runs.start("join", "job")
    told(runs, 1)
    os.kill(joining.pid, signal.SIGINT)
    assert joining.finish().code == 130, joining.describe()
    assert logged(runs)[-1].kind == "ended"
    assert end(runs, run).code == 0, run.describe()
    runs.assert_nothing_left()


def test_folders_without_a_running_job(runs: Runs, tmp_path: Path) -> None:
    for command in ("status", "join"):
        run = runs.run(command, "nowhere")
        assert run.code == 2
        assert "nowhere has no job.json" in run.err
    run = runs.start("run", "-n", "1", "--elastic", "1:2", "--folder", "job", runs.script(WAITING))
    told(runs, 0)
    path = tmp_path / "job" / "job.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "version": "0.0.1"}))
    assert "job runs Syncline 0.0.1, this command runs " in runs.run("join", "job").err
    path.write_text(json.dumps({**found, "port": 1}))
    assert "does not answer at 127.0.0.1:1 within 5 s" in runs.run("status", "job").out
    path.write_text(json.dumps({**found, "environment": {"SYNCLINE_RUN_ID": "other"}}))
    assert "another job answers" in runs.run("status", "job").out
    os.kill(run.pid, signal.SIGKILL)
    run.finish()
    path.write_text(json.dumps(found))
    assert f"its supervisor, process {run.pid}, is gone" in runs.run("status", "job").out
    path.write_text("{}")
    assert "another version of Syncline" in runs.run("status", "job").err


def test_job_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="was started with --elastic"):
        read_job(tmp_path)


FULL_DISK = f"""{MEMBER}
if rank == 1:
    with open("/dev/full", "w") as log:
        log.write("step 1")
until("go")
"""


def test_worker_whose_disk_is_full_is_named_and_the_others_go_on(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", "--elastic", "1:2", "--folder", "job", runs.script(FULL_DISK))
    told(runs, 0)
    wait_for(lambda: "disk is full" in run.err, "the failure is reported")
    full = "its disk is full (OSError: [Errno 28] No space left on device)"
    wait_for(lambda: any(entry.kind == "ended" for entry in logged(runs)), "it is in the log")
    assert [entry.fields["reason"] for entry in logged(runs) if entry.kind == "ended"] == [
        f"it failed (exit code 1): {full}"
    ]
    assert end(runs, run).code == 0, run.describe()
    assert f"syncline: rank 1 failed (exit code 1): {full}; the others go on\n" in run.err


TRAINING = """
import torch, syncline as sl
member = int(os.environ["SYNCLINE_MEMBER"])
world = sl.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = sl.distribute(model, optimizer, strategy=STRATEGY)
data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
shard = run.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
steps = joined = 0
while not joined:
    for x in shard:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        steps += 1
        if member == 1 and steps == 5:
            os.kill(os.getpid(), int(os.environ.get("SIGNAL", 9)))
    # The worker that was started again is in. Until then it is alone, and has taken no step.
    joined = int(sl.allreduce(torch.tensor([member]), op="max")) > 2 and run.stats.steps > 0
run.close()
weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
say("done", member, world.rank, world.size, repr(weights), run.stats.steps)
"""


@pytest.mark.parametrize(
    ("transport", "strategy", "sent"),
    [
        ("torch_dist", "allreduce", signal.SIGSTOP),
        ("torch_dist", "allreduce", signal.SIGKILL),
        ("zeromq", "allreduce", signal.SIGKILL),
        ("torch_dist", "easgd(period=1)", signal.SIGKILL),
    ],
)
def test_training_continues_and_a_restarted_worker_joins(
    runs: Runs, transport: str, strategy: str, sent: signal.Signals
) -> None:
    """The worker is killed in a step, or frozen: then the launcher kills it."""
    options = ("-n", "3", "--elastic", "2:3", "--restart", "1", "--folder", "job")
    lost_after = ("--lost-after", "3") if sent == signal.SIGSTOP else ()
    script = runs.script(TRAINING.replace("STRATEGY", repr(strategy)))
    variables = {"SYNCLINE_TRANSPORT": transport, "SIGNAL": str(int(sent))}
    run = runs.run("run", *options, *lost_after, script, variables=variables)
    assert run.code == 0, run.describe()
    assert ("rank 1 sent no heartbeat for" in run.err) == (sent == signal.SIGSTOP)
    assert "it is started again in 1 s" in run.err
    lines = sorted(line[line.index("done") :].split() for line in run.out.splitlines() if "done" in line)
    assert [line[1:4] for line in lines] == [["0", "0", "3"], ["2", "1", "3"], ["3", "2", "3"]], run.describe()
    assert len({tuple(line[4:]) for line in lines}) == 1, "the same weights and steps on all"
    assert "team 2 continues with 2 workers (members [0, 2])" in run.err
    assert "team 3 continues with 3 workers (members [0, 2, 3])" in run.err


def test_survivors_save_a_checkpoint_if_too_few_are_left(runs: Runs) -> None:
    script = runs.script(TRAINING.replace("STRATEGY", '"allreduce"'))
    run = runs.run("run", "-n", "3", "--elastic", "3:3", "--folder", "job", script)
    assert run.code == 137, run.describe()
    folder = runs.folder / "job" / "checkpoints"
    step = latest(folder)
    assert step is not None
    assert step >= 5
    assert f"2 workers are left, and the job needs at least 3: step {step} is saved in {folder}\n" in run.err
    assert "syncline: 2 ranks are left of 3, and the job needs at least 3: it ends\n" in run.err
    assert run.err.splitlines()[-1] == (
        f"syncline: step {step} is saved in {folder}: to continue from there, call sl.load('{folder}', run=run) after "
        "sl.distribute"
    )
    assert load(folder, run=Sequential(Linear(8, 64), Tanh(), Linear(64, 1))) == {"step": step}
    runs.assert_nothing_left()


LEAVING = (
    TRAINING.replace(
        """            os.kill(os.getpid(), int(os.environ.get("SIGNAL", 9)))
""",
        """            os.kill(os.getpid(), SIGNAL)
""",
    )
    .replace("joined = int(", "joined = steps > 60 or int(")
    .replace("STRATEGY", '"allreduce"')
)


def test_preempted_worker_leaves_between_two_steps(runs: Runs) -> None:
    script = runs.script(LEAVING.replace("SIGNAL", str(int(signal.SIGTERM))))
    run = runs.run("run", "-n", "3", "--elastic", "2:3", "--restart", "1", script)
    assert run.code == 0, run.describe()
    lines = sorted(line[line.index("done") :].split() for line in run.out.splitlines() if "done" in line)
    assert [line[1:4] for line in lines] == [["0", "0", "2"], ["2", "1", "2"]], run.describe()
    assert len({tuple(line[4:]) for line in lines}) == 1, "the same weights and steps on all"
    assert "member 1 leaves the job: it received SIGTERM" in run.err
    assert "rank 1 has left the job, and the others go on" in run.err
    assert "is started again" not in run.err


def test_leaving_below_the_minimum_ends_the_job(runs: Runs) -> None:
    script = runs.script(LEAVING.replace("SIGNAL", str(int(signal.SIGUSR1))))
    run = runs.run("run", "-n", "2", "--elastic", "2:2", script)
    assert run.code == 143, run.describe()
    assert "1 rank is left of 2, and the job needs at least 2: it ends" in run.err


PREEMPTED = TRAINING.replace("STRATEGY", 'os.environ["STRATEGY"]').replace(
    """        if member == 1 and steps == 5:
            os.kill(os.getpid(), int(os.environ.get("SIGNAL", 9)))
""",
    """        if steps == 5:
            post(f"training{member}")
""",
)


@pytest.mark.parametrize(
    ("sent", "code", "strategy"), [(signal.SIGUSR1, 138, "allreduce"), (signal.SIGTERM, 143, "ssp(slack=2)")]
)
def test_preempted_launcher_makes_the_workers_save_and_leave(
    runs: Runs, sent: signal.Signals, code: int, strategy: str
) -> None:
    """As by Slurm, before it puts the job into the queue again."""
    options = ("--elastic", "1:3", "--folder", "job", *(("--servers", "1") if "ssp" in strategy else ()))
    run = runs.start("run", "-n", "2", *options, runs.script(PREEMPTED), variables={"STRATEGY": strategy})
    for member in range(2):
        runs.read(f"training{member}")
    os.kill(run.pid, sent)
    assert run.finish().code == code, run.describe()
    folder = runs.folder / "job" / "checkpoints"
    step = latest(folder)
    assert step is not None
    assert step >= 5
    why = f"the launcher received {sent.name}"
    assert f"{why}: step {step} is saved in {folder}\n" in run.err
    for member in range(2):
        assert f"member {member} leaves the job: {why}\n" in run.err
    assert run.err.splitlines()[-1] == (
        f"syncline: step {step} is saved in {folder}: to continue from there, call sl.load('{folder}', run=run) after "
        "sl.distribute"
    )
    assert load(folder, run=Sequential(Linear(8, 64), Tanh(), Linear(64, 1))) == {"step": step}
    runs.assert_nothing_left()


def server_of(runs: Runs) -> int:
    """The process id of one of the servers."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in runs.processes()}
    return min(pid for pid, words in lines.items() if b"syncline.server" in words)


ASYNCHRONOUS = """
import torch, syncline as sl
member = int(os.environ["SYNCLINE_MEMBER"])
world = sl.init()
torch.manual_seed(0)
model = torch.nn.Embedding(96, 2)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
resized = []
run = sl.distribute(
    model, optimizer, strategy=os.environ["STRATEGY"], on_resize=lambda old, new: resized.extend([old, new])
)
shard = run.shard(torch.utils.data.DataLoader(torch.arange(96), batch_size=4, shuffle=True))
steps, joined = 0, torch.ones(96, dtype=torch.bool)
while joined.any():  # until an epoch in which the worker that was started again has taken a step
    for x in shard:
        optimizer.zero_grad()
        model(x)[:, int(member > 2)].sum().backward()
        optimizer.step()
        steps += 1
        if member == 1 and steps == 3:
            post("training")
            os.kill(os.getpid(), 9)
    with run.agreed():
        joined = (model.weight[:, 1] == 0).all().reshape(1)
        trained = bool((model.weight.sum(1) < 0).all())
sl.save("saved", step=run.stats.steps, run=run)
run.close()
say("done", member, trained, repr(float(model.weight.detach().double().sum())), *resized)
"""


HALF_A_MESSAGE = """
import threading, time, torch, syncline as sl
member = int(os.environ["SYNCLINE_MEMBER"])
sl.init()
other = int(sl.allreduce(torch.tensor([0 if member else os.getpid()]), op="max", algorithm="ring"))
numbers = torch.ones(25_000_000)

def is_sending():
    queues = [line.split()[4].split(":") for line in open("/proc/self/net/tcp").readlines()[1:]]
    return any(int(sent, 16) + int(received, 16) > 1 << 16 for sent, received in queues)

def die():
    while not is_sending():
        time.sleep(0.001)
    os.kill(other, 19)  # it reads no more
    time.sleep(0.3)
    os.kill(other, 18)
    os.kill(os.getpid(), 9)

if member == 1:
    threading.Thread(target=die).start()
    while True:
        sl.send(numbers, 0)
try:
    while True:
        sl.recv(numbers, 1)
except sl.errors.PeerLostError as error:
    say("lost", error)
"""


def test_a_worker_that_is_killed_in_the_middle_of_a_message_holds_nobody(runs: Runs) -> None:
    """gloo ends no wait for a message of which a part has arrived: it would last until the timeout of 300 s."""
    run = runs.start("run", "-n", "2", "--elastic", "1:2", "--folder", "job", runs.script(HALF_A_MESSAGE))
    assert run.finish().code == 0, run.describe()
    assert "lost rank 0 lost rank 1" in run.out


@pytest.mark.parametrize(
    ("strategy", "replicas"), [("ssp(slack=2)", 2), ("downpour(push=2, fetch=2)", 1), ("gossip(pairwise=True)", 0)]
)
def test_a_restarted_worker_joins_an_asynchronous_run(runs: Runs, strategy: str, replicas: int) -> None:
    """Column 1 is trained by the worker that was started again for worker 1, column 0 by the others.

    With two replicas a server is frozen too.
    """
    servers = ("--servers", "2", "--replicas", str(replicas)) if replicas else ()
    options = (*servers, "--elastic", "1:3", "--restart", "1", "--folder", "job")
    options += ("--lost-after", "3") if replicas == 2 else ()
    run = runs.start("run", "-n", "3", *options, runs.script(ASYNCHRONOUS), variables={"STRATEGY": strategy})
    if replicas == 2:
        runs.read("training")
        os.kill(server_of(runs), signal.SIGSTOP)
    assert run.finish().code == 0, run.describe()
    assert ("sent no heartbeat for" in run.err) == (replicas == 2), run.describe()
    lines = sorted(line[line.index("done") :].split() for line in run.out.splitlines() if "done" in line)
    assert [line[1:3] for line in lines] == [["0", "True"], ["2", "True"], ["3", "True"]], run.describe()
    assert len({line[3] for line in lines}) == 1, "the same weights on all"
    assert "worker 3 joins at epoch" in run.err
    resized = ["3", "2"], ["3", "2", "2", "3"]  # a worker without a further batch is not told of the newcomer
    assert all(line[4:] in resized for line in lines[:2]), run.describe()
    saved = Embedding(96, 2)
    assert load(runs.folder / "saved", run=saved) is not None
    assert repr(float(saved.weight.detach().double().sum())) == lines[0][3]
