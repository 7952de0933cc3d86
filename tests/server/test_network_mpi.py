"""A server network on MPI: servers among the processes that mpiexec starts, and workers that serve each other."""

from __future__ import annotations

import pytest

from syncline.launch.local import WORKER
from tests.mpi import Flavour, mpiexec, one_or_both

pytestmark = pytest.mark.xdist_group("mpi")

USE = """
import syncline as sl
from syncline.server.network import server_network
from tests.server.network_cases import use
with sl.init() as world:
    answers = use(world)
    assert server_network(world).transport.name == "mpi"
    print(" ".join(map(str, [world.rank, world.size, *map(int, answers)])) + "\\n", end="", flush=True)
"""
NOT_USE = """
import syncline as sl
with sl.init() as world:
    world.barrier()
    print(f"{world.rank} {world.size}\\n", end="", flush=True)
"""


def serve(flavour: Flavour, script: str, servers: int) -> tuple[int, list[str], str]:
    """Two workers, and so many servers; the exit code, what was printed, and that with what else was said."""
    told = {"SYNCLINE_WORKERS": "2", "SYNCLINE_SERVERS": str(servers), "SYNCLINE_TRANSPORT": "mpi"}
    beside = [str(WORKER), "-m", "tests.server.echo_server"]
    ended = mpiexec(flavour, "-c", script, beside=beside, others=servers, variables=told)
    return ended.code, sorted(ended.out.split("\n"))[1:], ended.out + ended.err


@one_or_both
def test_servers_beside_the_workers(flavour: Flavour) -> None:
    code, said, all_said = serve(flavour, USE, servers=2)
    assert (code, said) == (0, ["0 2 2000 3000", "1 2 2001 3001"]), all_said


@one_or_both
def test_servers_that_nobody_uses_end_with_the_workers(flavour: Flavour) -> None:
    code, said, all_said = serve(flavour, NOT_USE, servers=1)
    assert (code, said) == (0, ["0 2", "1 2"]), all_said


@one_or_both
def test_workers_serve_each_other(flavour: Flavour) -> None:
    code, said, all_said = serve(flavour, USE, servers=0)
    assert (code, said) == (0, ["0 2 0 1000", "1 2 1 1001"]), all_said


@one_or_both
def test_another_number_of_processes_is_refused(flavour: Flavour) -> None:
    script = NOT_USE.replace("import", "import os; os.environ['SYNCLINE_WORKERS'] = '3'\nimport", 1)
    code, _, all_said = serve(flavour, script, servers=1)
    assert code != 0
    assert "SYNCLINE_WORKERS=3 and SYNCLINE_SERVERS=1, but MPI has 3 processes" in all_said
