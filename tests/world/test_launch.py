"""Real processes: launchers, lost peers, forgotten worlds, strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from syncline.testing.processes import free_port
from tests.forking import forked_python
from tests.hunting import only_hunting
from tests.launching import finish, launch, start, torch_variables

pytestmark = pytest.mark.xdist_group("gloo")


def test_torchrun_runs_the_example_unchanged() -> None:
    options = ["--nproc-per-node", "2", "--master-port", str(free_port()), "--no-python"]
    script = forked_python(["examples/hello.py"], {"OMP_NUM_THREADS": "1"})
    (done,) = finish([start(["-m", "torch.distributed.run", *options, *script], {})])
    assert done.code == 0, done.err
    assert "started by torchrun" in done.out
    assert "mean 0.5, ranks [0, 1]" in done.out


def test_srun_and_mpiexec_run_it_too() -> None:
    """With the variables that a real srun, Open MPI and Intel MPI set."""
    slurm = [
        {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": str(os.getpid())}
        | {"SLURM_STEP_ID": "0"}
        for rank in range(2)
    ]
    openmpi = [
        {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        for rank in range(2)
    ]
    ended = finish([start(["examples/hello.py"], each) for each in (*slurm, *openmpi)])
    assert [one.code for one in ended] == [0] * 4, ended
    assert "started by Slurm" in ended[0].out
    assert "started by Open MPI" in ended[2].out


KILLED = """
import os, signal, sys, torch, syncline as sl
from syncline.transports import liveness
liveness.CLOSE_TIMEOUT_S = 0.1                      # the one that is killed does not leave
world = sl.init(timeout=60)
big = torch.zeros(4_000_000)
for step in range(1000):
    if step == 3:
        print("ready", flush=True)
    try:
        sl.allreduce(big, op="mean", algorithm=sys.argv[1])
    except sl.errors.PeerLostError as error:
        print("LOST", error.peer, error)
        break
"""


@pytest.mark.parametrize(
    ("algorithm", "victim"),
    [
        ("native", 2),
        ("ring", 0),
        pytest.param("native", 0, marks=only_hunting),
        pytest.param("ring", 2, marks=only_hunting),
    ],
)
def test_all_survivors_name_the_rank_that_was_killed(algorithm: str, victim: int) -> None:
    """Kill -9 in the middle of an all-reduce; rank 0 also serves the store."""
    processes = [start(["-c", KILLED, algorithm], each) for each in torch_variables(4)]
    stream = processes[victim].stdout
    assert stream is not None
    assert stream.readline() == "ready\n"
    processes[victim].send_signal(signal.SIGKILL)
    ended = finish(processes)
    assert ended[victim].code == -signal.SIGKILL
    for rank in set(range(4)) - {victim}:
        assert f"LOST {victim} rank {rank} lost rank {victim}" in ended[rank].out, ended[rank]
        assert ended[rank].code == 0


FORGOTTEN = """
import torch, syncline as sl
world = sl.init(timeout=60)
pending = sl.allreduce(torch.ones(10), op="mean", algorithm="ring", async_=True)
pending.wait()
world.transport.recv(torch.zeros(1), None, 7)      # nobody will ever answer
print("end of script", flush=True)
"""


def test_a_forgotten_close_does_not_hang_the_exit() -> None:
    ended = launch(FORGOTTEN, torch_variables(2))
    assert [(one.code, one.out) for one in ended] == [(0, "end of script\n")] * 2, ended
    assert not any("Traceback" in one.err or "terminate" in one.err for one in ended), ended


LATE = """
import logging, os, torch, syncline as sl
from syncline.transports import liveness
logging.basicConfig(format="%(message)s")
world = sl.init(timeout=60)
world.transport.timeout = 2.0
world.transport.liveness.warn_after_s = 0.5
liveness.CLOSE_TIMEOUT_S = 0.1                      # rank 1 does not leave before rank 0 has ended
if world.rank == 1:
    open(os.environ["PIPE"]).read()                 # alive, but not there: until the test opens the other end
else:
    try:
        sl.allreduce(torch.zeros(3), op="mean")
    except sl.errors.PeerLostError as error:
        print("LOST", error.peer, error)
"""


def test_a_long_wait_says_for_whom_and_ends_at_the_timeout(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    processes = [start(["-c", LATE], {**each, "PIPE": str(pipe)}) for each in torch_variables(2)]
    (ended,) = finish(processes[:1])
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # refused if nobody reads: rank 1 is no more
    finish(processes[1:])
    assert "rank 0 has waited" in ended.err
    assert "not there yet: rank 1" in ended.err
    assert "LOST 1 rank 0 lost rank 1" in ended.out
    assert "alive but has not entered" in ended.out


def test_a_rank_that_never_comes_is_named() -> None:
    variables = torch_variables(3)[:2]
    script = (
        "import syncline as sl\ntry:\n    sl.init(timeout=2)\nexcept sl.errors.WorldError as error:\n    print(error)"
    )
    for one in launch(script, variables):
        assert "ranks [2] did not join" in one.out, one


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = torch_variables(2)[0] | {"MASTER_PORT": str(taken.getsockname()[1])}
        (ended,) = launch("import syncline as sl\nsl.init(timeout=5)", [variables])
    assert ended.code != 0
    assert "cannot listen at 127.0.0.1" in ended.err
    assert "MASTER_PORT" in ended.err


STRANGER = """
import torch, syncline as sl
from syncline.transports.torch_dist.transport import HEADER
world = sl.init(timeout=60)
right, left = (world.rank + 1) % 2, (world.rank - 1) % 2
garbage = world.transport.post_send(torch.arange(32, dtype=torch.uint8), right, HEADER + 9)
try:
    world.transport.recv(torch.zeros(8), left, 9).wait()
except sl.errors.ProtocolError as error:
    print("REFUSED", error.peer, error)
garbage.wait()
print(sl.allreduce(torch.ones(1), op="sum").item())
world.close()
"""


def test_a_foreign_header_is_refused_and_the_world_continues() -> None:
    for rank, one in enumerate(launch(STRANGER, torch_variables(2))):
        assert f"REFUSED {1 - rank} header from rank {1 - rank} refused: it starts with" in one.out, one
        assert one.out.endswith("2.0\n")
        assert one.code == 0


AGAIN = """
import torch, syncline as sl
for round in range(3):
    with sl.init(timeout=60) as world:
        team = world.group()
        assert sl.allreduce(torch.ones(1), op="sum", group=team).item() == 2.0
        team.close()
print("again and again")
"""


def test_a_world_is_closed_and_made_again() -> None:
    for one in launch(AGAIN, torch_variables(2)):
        assert (one.code, one.out) == (0, "again and again\n"), one


IDLE = """
import torch, syncline as sl
world = sl.init(timeout=60)
world.transport.timeout = 1.5
buffer = torch.zeros(1)
if world.rank == 1:
    sl.send(torch.ones(1), to=0)
    sl.send(torch.ones(1), to=0)
else:
    sl.recv(buffer)
for step in range(6):
    world.compute(0.4)                              # longer than the timeout in all, with a receive from anyone open
    sl.allreduce(torch.ones(1), op="mean", algorithm="ring")
    sl.allreduce(torch.ones(1), op="mean")
if world.rank == 0:
    print("heard", sl.recv(buffer))
"""


def test_a_receive_from_anyone_may_idle_longer_than_the_timeout() -> None:
    ended = launch(IDLE, torch_variables(2))
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[0].out == "heard 1\n"


FLOOD = """
import torch, syncline as sl
from syncline.transports import messages
messages.MAX_UNRECEIVED_BYTES = 1000                                # a small one, to be filled quickly
world = sl.init(timeout=60)
if world.rank == 0:
    first = torch.zeros(1)
    sl.recv(first)                                  # from now on a task reads what comes from anyone
    world.barrier()
    seen = []
    for _ in range(100):
        buffer = torch.zeros(100)
        sl.recv(buffer)
        seen.append(int(buffer[0]))
    print(seen == list(range(100)))
else:
    sl.send(torch.ones(1), to=0)
    world.barrier()
    for number in range(100):
        sl.send(torch.full((100,), float(number)), to=0)
"""


def test_a_full_mailbox_holds_its_sender_back_and_loses_nothing() -> None:
    ended = launch(FLOOD, torch_variables(2))
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[0].out == "True\n"


SERVER = """
import sys, torch, syncline as sl
world = sl.init(timeout=60)
buffer = torch.zeros(1)
if world.rank == 0:
    sl.recv(buffer)
    print("serving", flush=True)
    for source in (None, 1):                        # one that waits when it happens, one that comes after
        try:
            sl.recv(buffer, source)
        except sl.errors.PeerLostError as error:
            print("LOST", error.peer)
else:
    sl.send(buffer, to=0)
    sys.stdin.readline()
"""


def test_a_gloo_server_notices_the_end_of_its_last_client() -> None:
    variables = torch_variables(2)
    server = start(["-c", SERVER], variables[0])
    client = start(["-c", SERVER], variables[1], stdin=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "serving\n"
    client.kill()
    client.communicate()
    (ended,) = finish([server])
    assert (ended.code, ended.out) == (0, "LOST 1\nLOST 1\n"), ended


CHECKED = """
import sys, torch, syncline as sl
world = sl.init(timeout=60, check=True)
try:
    sl.allreduce(torch.zeros(3 + world.rank), op="mean")
except sl.errors.IncompatibleError as error:
    print(error)
print(sl.allreduce(torch.ones(1), op="sum").item())
"""


def test_ranks_that_differ_are_named_and_nothing_aborts() -> None:
    for one in launch(CHECKED, torch_variables(3)):
        assert "rank 0: #1 allreduce(float32[3]" in one.out, one
        assert "rank 2: #1 allreduce(float32[5]" in one.out
        assert one.out.endswith("3.0\n")


def test_nothing_listens_to_the_outside() -> None:
    script = (
        "import os, syncline as sl\n"
        "world = sl.init(timeout=60, process_group=True)\n"
        "team = world.group()\n"
        "print('up', os.getpid(), flush=True)\n"
        "input()"
    )
    processes = [start(["-c", script], each, stdin=subprocess.PIPE) for each in torch_variables(2)]
    pids = []
    try:
        for process in processes:
            assert process.stdout is not None
            word, pid = process.stdout.readline().split()
            assert word == "up"
            pids.append(int(pid))
        owned = {f"socket:[{inode}]" for pid in pids for inode in _sockets(pid)}
        listening = [row for row in _listeners() if f"socket:[{row[1]}]" in owned]
        assert listening, "the store and gloo listen somewhere"
        assert {address for address, _ in listening} == {"127.0.0.1"}
    finally:
        for process in processes:  # all together: each waits for the others to leave
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        finish(processes)


def _sockets(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            found.append(target[8:-1])
    return found


def _listeners() -> list[tuple[str, str]]:
    """Address and inode of every listening TCP socket."""
    rows = []
    for table, parse in (("tcp", _v4), ("tcp6", _v6)):
        with open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    rows.append((parse(fields[1].split(":")[0]), fields[9]))
    return rows


def _v4(text: str) -> str:
    return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])


def _v6(text: str) -> str:
    words = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, 32, 8))
    return socket.inet_ntop(socket.AF_INET6, words).removeprefix("::ffff:")
