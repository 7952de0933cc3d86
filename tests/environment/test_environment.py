"""Launchers, as their own recorded variables tell it (host names replaced)."""

from __future__ import annotations

import os
import socket

import pytest

from syncline.environment import Environment, Rendezvous, detect
from syncline.environment.launchers import expand_hosts, tasks_per_node
from syncline.errors import WorldError

Recording = list[dict[str, str]]

# torchrun --nproc-per-node 2, torch 2.13.
TORCHRUN: Recording = [
    {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "34189",
        "RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "bf4dfa5c-e0c7-4dd5-8cb1-746d05b1d4b4",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
    }
    for rank in ("0", "1")
]

# mpiexec -n 2 of Open MPI 5.0.11.
OPENMPI: Recording = [
    {
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": rank,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_UNIVERSE_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-node1-2656@1",
        "PMIX_RANK": rank,
    }
    for rank in ("0", "1")
]

# mpiexec -n 2 of MPICH.
MPICH: Recording = [
    {
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": rank,
        "PMI_FD": fd,
        "PMI_HOSTNAME": "node1",
        "PMI_RANK": rank,
        "PMI_SIZE": "2",
    }
    for rank, fd in (("0", "9"), ("1", "11"))
]

# mpiexec -n 2 of Intel MPI 2021.18.1.
INTEL: Recording = [
    {
        "I_MPI_HYDRA_TOPOLIB": "ipl2",
        "I_MPI_HYDRA_UUID": "dd0e0000-00c4-7182-4760-0600589fb655",
        "I_MPI_INFO_NUMA_NODE_MAP": "",
        "I_MPI_INFO_NUMA_NODE_NUM": "1",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": rank,
        "PMI_FD": fd,
        "PMI_RANK": rank,
        "PMI_SIZE": "2",
    }
    for rank, fd in (("0", "9"), ("1", "11"))
]

# The same once more: only the name of the job differs.
INTEL_AGAIN: Recording = [
    variables | {"I_MPI_HYDRA_UUID": "37110000-f670-3985-4760-060010b77839"} for variables in INTEL
]


def slurm(
    job: str, step: str, nodes: str, tasks: str, places: list[tuple[str, str]], job_nodes: str | None = None
) -> Recording:
    """What Slurm 22.05 sets for each task of a step; `places` has the node and the local number of each."""
    count = str(len(places))
    node_count = str(len({node for node, _ in places}))
    return [
        {
            "SLURM_JOBID": job,
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": job_nodes or nodes,
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_LOCALID": local,
            "SLURM_NNODES": node_count,
            "SLURM_NODEID": node,
            "SLURM_NODELIST": job_nodes or nodes,
            "SLURM_NPROCS": count,
            "SLURM_NTASKS": count,
            "SLURM_PROCID": str(rank),
            "SLURM_STEPID": step,
            "SLURM_STEP_ID": step,
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_STEP_NUM_NODES": node_count,
            "SLURM_STEP_NUM_TASKS": count,
            "SLURM_STEP_TASKS_PER_NODE": tasks,
            "SLURM_SUBMIT_HOST": "node1",
            "SLURM_TASKS_PER_NODE": tasks,
        }
        for rank, (node, local) in enumerate(places)
    ]


TWO_AND_ONE = [("0", "0"), ("0", "1"), ("1", "0")]
FOUR_AND_TWO = [("0", "0"), ("0", "1"), ("0", "2"), ("0", "3"), ("1", "0"), ("1", "1")]
TWO_AND_TWO = [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]

# srun -n 3
SRUN_ONE_NODE = slurm("1", "0", "n1", "3", [("0", "0"), ("0", "1"), ("0", "2")])
# srun -N 2 -n 3
SRUN_TWO_NODES = slurm("2", "0", "n[1-2]", "2,1", TWO_AND_ONE)
# srun -N 2 -n 6
SRUN_SIX = slurm("3", "0", "n[1-2]", "4,2", FOUR_AND_TWO)
# srun --mpi=pmi2 -N 2 -n 3
SRUN_PMI2 = [
    variables | {"PMI_FD": fd, "PMI_JOBID": "4.0", "PMI_RANK": str(rank), "PMI_SIZE": "3", "SLURM_MPI_TYPE": "pmi2"}
    for rank, (fd, variables) in enumerate(
        zip(("11", "13", "11"), slurm("4", "0", "n[1-2]", "2,1", TWO_AND_ONE), strict=True)
    )
]
# salloc -N 2 -n 3; the second srun in it, and (not recorded: the same but for its number) the first
SRUN_FIRST_STEP = slurm("5", "0", "n[1-2]", "2,1", TWO_AND_ONE)
SRUN_SECOND_STEP = slurm("5", "1", "n[1-2]", "2,1", TWO_AND_ONE)
# srun -N 2 --ntasks-per-node=2
SRUN_REPEATED = slurm("8", "0", "n[1-2]", "2(x2)", TWO_AND_TWO)
# salloc -N 2 -n 3; srun -N 1 -n 1 -w n2
SRUN_NARROW = slurm("9", "0", "n2", "1", [("0", "0")], job_nodes="n[1-2]")

# The shell of `sbatch -n 4`, by Slurm's manual: it is task 0 of nothing, and no step's variables are set.
BATCH_SHELL = {
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

LAUNCHES: dict[str, tuple[Recording, str, list[tuple[int, int]]]] = {
    "torchrun": (TORCHRUN, "torchrun", [(0, 2), (1, 2)]),
    "openmpi": (OPENMPI, "Open MPI", [(0, 2), (1, 2)]),
    "mpich": (MPICH, "MPICH", [(0, 2), (1, 2)]),
    "intel": (INTEL, "Intel MPI", [(0, 2), (1, 2)]),
    "srun, one node": (SRUN_ONE_NODE, "Slurm", [(0, 3), (1, 3), (2, 3)]),
    "srun, two nodes": (SRUN_TWO_NODES, "Slurm", [(0, 2), (1, 2), (0, 1)]),
    "srun, six tasks": (SRUN_SIX, "Slurm", [(0, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2)]),
    "srun, PMI-2": (SRUN_PMI2, "Slurm", [(0, 2), (1, 2), (0, 1)]),
    "srun, second step": (SRUN_SECOND_STEP, "Slurm", [(0, 2), (1, 2), (0, 1)]),
    "srun, repeated": (SRUN_REPEATED, "Slurm", [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "srun, narrow": (SRUN_NARROW, "Slurm", [(0, 1)]),
}


def meeting(recording: Recording) -> Rendezvous | None:
    """The rendezvous of a job, which all its ranks must share."""
    places = {detect(variables).rendezvous for variables in recording}
    assert len(places) == 1
    return places.pop()


@pytest.mark.parametrize(("recording", "source", "local"), LAUNCHES.values(), ids=LAUNCHES)
def test_who_each_rank_is(recording: Recording, source: str, local: list[tuple[int, int]]) -> None:
    """Rank, size, local rank, local size, launcher and host, of every rank of every recording."""
    found = [detect(variables) for variables in recording]
    assert [env.rank for env in found] == list(range(len(recording)))
    assert [env.size for env in found] == [len(recording)] * len(recording)
    assert [(env.local_rank, env.local_size) for env in found] == local
    assert {env.source for env in found} == {source}
    assert {env.host for env in found} == {socket.gethostname()}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_ranks_of_a_job_meet(name: str) -> None:
    """All ranks are told the same place, on a port that Linux does not give out by itself."""
    recording, source, _ = LAUNCHES[name]
    place = meeting(recording)
    assert place is not None
    assert place.hosted == (source == "torchrun")
    if source == "torchrun":
        assert place == Rendezvous("localhost", 34189, hosted=True)
    else:
        assert 20000 <= place.port < 32000
        nodes = {variables.get("SLURM_NODEID", "0") for variables in recording}
        assert place.address == ("n1" if len(nodes) > 1 else "127.0.0.1")


def test_two_steps_meet_at_different_ports() -> None:
    """Two steps of one Slurm job, and two jobs of Intel MPI, do not meet each other."""
    pairs = [(SRUN_FIRST_STEP, SRUN_SECOND_STEP), (INTEL, INTEL_AGAIN), (SRUN_TWO_NODES, SRUN_SIX)]
    for one, other in pairs:
        first, second = meeting(one), meeting(other)
        assert first is not None
        assert second is not None
        assert first.address == second.address
        assert first.port != second.port


def test_two_openmpi_jobs_meet_at_different_ports() -> None:
    """The name space names the job of Open MPI."""
    again = [variables | {"PMIX_NAMESPACE": "prterun-node1-2700@1"} for variables in OPENMPI]
    assert meeting(OPENMPI) != meeting(again)


def test_two_mpich_jobs_meet_at_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH names its job in no variable: the process manager that all ranks share does."""
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    first = meeting(MPICH)
    assert meeting(MPICH) == first
    monkeypatch.setattr(os, "getppid", lambda: 4712)
    assert meeting(MPICH) != first


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "torchrun"])
def test_master_address_and_port_win(name: str) -> None:
    """MASTER_ADDR and MASTER_PORT are obeyed under every launcher, each also without the other."""
    recording = LAUNCHES[name][0]
    derived = meeting(recording)
    assert derived is not None
    address, port = {"MASTER_ADDR": "10.0.0.7"}, {"MASTER_PORT": "12345"}
    assert meeting([variables | address | port for variables in recording]) == Rendezvous("10.0.0.7", 12345)
    assert meeting([variables | address for variables in recording]) == Rendezvous("10.0.0.7", derived.port)
    assert meeting([variables | port for variables in recording]) == Rendezvous(derived.address, 12345)


@pytest.mark.parametrize("recording", [OPENMPI, MPICH, INTEL], ids=["openmpi", "mpich", "intel"])
def test_mpi_over_several_hosts_must_be_told_where(recording: Recording) -> None:
    """No variable of mpiexec names the first host: without MASTER_ADDR there is no rendezvous."""
    local = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    local |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    apart = [v | {name: value for name, value in local.items() if name in v} for v in recording]
    assert [(detect(v).rank, detect(v).local_rank, detect(v).local_size) for v in apart] == [(0, 0, 1), (1, 0, 1)]
    assert meeting(apart) is None
    told = [v | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"} for v in apart]
    assert meeting(told) == Rendezvous("node1", 29500)


def test_torch_variables_set_by_hand() -> None:
    """RANK, WORLD_SIZE and the meeting point are enough; the store is then ours to serve."""
    env = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert (env.source, env.rank, env.size, env.local_rank, env.local_size) == ("RANK and WORLD_SIZE", 1, 2, 0, 1)
    assert env.rendezvous == Rendezvous("node1", 29500, hosted=False)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_without_a_meeting_point(missing: str) -> None:
    """A world of two that cannot meet is refused, with the variables to set; a world of one need not meet."""
    with pytest.raises(WorldError, match="a world of 2 needs MASTER_ADDR and MASTER_PORT"):
        detect({name: value for name, value in TORCHRUN[0].items() if name != missing})
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).rendezvous is None


def test_half_of_the_variables_are_nobody() -> None:
    """RANK without WORLD_SIZE, or PMI_RANK alone, is not a launcher."""
    for variables in ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"PMI_RANK": "0", "PMI_SIZE": "2"}, {"SLURM_PROCID": "0"}):
        assert detect(variables).source == "no launcher"


@pytest.mark.parametrize(
    ("recording", "source"), [(TORCHRUN, "torchrun"), (OPENMPI, "Open MPI"), (MPICH, "MPICH"), (INTEL, "Intel MPI")]
)
def test_the_innermost_launcher_wins(recording: Recording, source: str) -> None:
    """torchrun and mpiexec inside a Slurm job, be it a batch script or a step, are read as themselves."""
    for outer in (BATCH_SHELL, SRUN_NARROW[0], SRUN_TWO_NODES[2], SRUN_PMI2[0]):
        found = [detect(outer | variables) for variables in recording]
        assert [(env.source, env.rank, env.size) for env in found] == [(source, 0, 2), (source, 1, 2)]
        assert meeting([outer | variables for variables in recording]) == meeting(recording)


def test_torchrun_inside_mpiexec() -> None:
    """torchrun started by an mpiexec is read as torchrun."""
    assert detect(OPENMPI[1] | TORCHRUN[0]).source == "torchrun"


def test_the_shell_of_a_batch_script_is_alone() -> None:
    """It has a SLURM_PROCID and a SLURM_NTASKS, but is no task of a step."""
    env = detect(BATCH_SHELL)
    assert (env.source, env.rank, env.size, env.rendezvous) == ("no launcher", 0, 1, None)


def test_a_step_narrower_than_its_job() -> None:
    """The step's own variables count, not those of the job around it."""
    job = {"SLURM_NTASKS": "3", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_NPROCS": "3"}
    env = detect(SRUN_NARROW[0] | job)
    assert (env.source, env.rank, env.size, env.local_size) == ("Slurm", 0, 1, 1)
    assert env.rendezvous is not None
    assert env.rendezvous.address == "127.0.0.1"


def test_nobody() -> None:
    """Without a launcher a process is alone, and says so."""
    assert detect({}) == Environment(source="no launcher")
    assert detect({"PATH": "/bin", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}) == Environment(source="no launcher")


def test_the_process_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, os.environ is read."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    assert detect().source == "no launcher"
    for name, value in SRUN_SIX[4].items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(SRUN_SIX[4])
    assert detect().rank == 4


@pytest.mark.parametrize("value", ["two", "", "1.5", "0x1"])
@pytest.mark.parametrize(
    ("recording", "name"),
    [
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (TORCHRUN, "MASTER_PORT"),
        (OPENMPI, "OMPI_COMM_WORLD_RANK"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "PMI_RANK"),
        (MPICH, "PMI_SIZE"),
        (INTEL, "MPI_LOCALRANKID"),
        (INTEL, "MPI_LOCALNRANKS"),
        (SRUN_TWO_NODES, "SLURM_PROCID"),
        (SRUN_TWO_NODES, "SLURM_STEP_NUM_TASKS"),
        (SRUN_TWO_NODES, "SLURM_LOCALID"),
        (SRUN_TWO_NODES, "SLURM_NODEID"),
    ],
)
def test_values_that_are_no_whole_numbers(recording: Recording, name: str, value: str) -> None:
    """The message has the variable and its value."""
    with pytest.raises(WorldError) as caught:
        detect(recording[0] | {name: value})
    assert f"{name}={value!r} is not a whole number" in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN[0] | {"RANK": "2"}, "torchrun says rank 2 of 2"),
        (TORCHRUN[0] | {"RANK": "-1"}, "torchrun says rank -1 of 2"),
        (TORCHRUN[0] | {"WORLD_SIZE": "0"}, "torchrun says rank 0 of 0"),
        (TORCHRUN[0] | {"LOCAL_RANK": "2"}, "torchrun says local rank 2 of 2"),
        (TORCHRUN[0] | {"LOCAL_RANK": "-1"}, "torchrun says local rank -1 of 2"),
        (TORCHRUN[0] | {"LOCAL_WORLD_SIZE": "3"}, "local rank 0 of 3 in a world of 2"),
        (OPENMPI[0] | {"OMPI_COMM_WORLD_RANK": "2"}, "Open MPI says rank 2 of 2"),
        (MPICH[0] | {"PMI_RANK": "7"}, "MPICH says rank 7 of 2"),
        (INTEL[0] | {"MPI_LOCALRANKID": "2"}, "Intel MPI says local rank 2 of 2"),
        (SRUN_TWO_NODES[0] | {"SLURM_PROCID": "3"}, "Slurm says rank 3 of 3"),
        (SRUN_TWO_NODES[0] | {"SLURM_LOCALID": "2"}, "Slurm says local rank 2 of 2"),
        (SRUN_TWO_NODES[0] | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2 but .* names 2 nodes"),
        (SRUN_TWO_NODES[0] | {"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1"),
        (SRUN_TWO_NODES[0] | {"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "SLURM_STEP_TASKS_PER_NODE='2;1' cannot be read"),
        (SRUN_TWO_NODES[0] | {"SLURM_STEP_NODELIST": "n[1-x]"}, r"host list 'n\[1-x\]' cannot be read"),
        (TORCHRUN[0] | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        (TORCHRUN[0] | {"MASTER_PORT": "-1"}, "MASTER_PORT=-1 is not a port"),
        (TORCHRUN[0] | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        (SRUN_TWO_NODES[0] | {"MASTER_PORT": "65536"}, "Slurm: MASTER_PORT=65536 is not a port"),
    ],
)
def test_values_out_of_range(variables: dict[str, str], message: str) -> None:
    """A rank, place or port that cannot be is refused with its value."""
    with pytest.raises(WorldError, match=message):
        detect(variables)


def test_the_last_port() -> None:
    """Port 65535 is a port."""
    assert meeting([variables | {"MASTER_PORT": "65535"} for variables in TORCHRUN]) == Rendezvous(
        "localhost", 65535, hosted=True
    )


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("a[1-2],b[3],c", ["a1", "a2", "b3", "c"]),
        ("n[1-2].cluster,x-1.cluster", ["n1.cluster", "n2.cluster", "x-1.cluster"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    """Slurm's compressed lists, padding and suffixes included."""
    assert expand_hosts(text) == hosts


def test_host_lists_with_two_ranges() -> None:
    """Names with two ranges are expanded as Slurm does, or refused; never misread."""
    try:
        hosts = expand_hosts("r[0-1]n[0-1]")
    except WorldError:
        return
    assert hosts == ["r0n0", "r0n1", "r1n0", "r1n1"]


@pytest.mark.parametrize("text", ["n[a-b]", "n[]", "n[-3]", "n[1-2-3]", "n[1-2", "n1-2]", "n[1-]", "n[3-1]", "n[²]"])
def test_bad_host_lists(text: str) -> None:
    """A list that cannot be read is refused with its text; it never becomes a host that is not there."""
    with pytest.raises(WorldError, match="cannot be read") as caught:
        expand_hosts(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tasks"), [("3", [3]), ("2,1", [2, 1]), ("2(x2)", [2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("4, 2", [4, 2])]
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    """Slurm's run-length lists of tasks."""
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "2(x", "2(3)", "2,", "-1", "2 1"])
def test_bad_tasks_per_node(text: str) -> None:
    """A list of tasks that cannot be read is refused with its text."""
    with pytest.raises(WorldError, match="SLURM_STEP_TASKS_PER_NODE=") as caught:
        tasks_per_node(text)
    assert repr(text) in str(caught.value)
