"""The MPI transport on MPICH and on Open MPI, started by their own mpiexec."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.environment import Environment
from syncline.errors import UnsupportedError
from syncline.testing import TransportContract
from syncline.testing.transports import Case
from syncline.transports.mpi import connect
from tests.forking import forked_python
from tests.mpi import MPICH, OPEN_MPI, Flavour, both, collect, job_environ, mpiexec, need, one_or_both
from tests.transports import mpi_cases

pytestmark = pytest.mark.xdist_group("mpi")


@dataclass
class Told:
    """How a job ended: mpiexec's code, what it printed, what each rank wrote."""

    code: int
    out: str
    ranks: list[list[dict[str, Any]]]


def run_job(launcher: Flavour, job: str, ranks: int, folder: Path, library: Flavour | None = None) -> Told:
    """Run a job of mpi_cases.py to its end."""
    ended = mpiexec(launcher, "-m", "tests.transports.mpi_cases", job, str(folder), ranks=ranks, library=library)
    files = [folder / f"{rank}.jsonl" for rank in range(ranks)]
    lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
    return Told(ended.code, ended.out + ended.err, [[json.loads(line) for line in each] for each in lines])


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flavour], Told]:
    """One job for each MPI runs every case on every size: starting its ranks takes longer than all of them."""
    ended: dict[str, Told] = {}

    def run(flavour: Flavour) -> Told:
        if flavour.name not in ended:
            ended[flavour.name] = run_job(flavour, "contract", flavour.ranks, tmp_path_factory.mktemp("contract"))
        return ended[flavour.name]

    return run


def check(ended: Told, case: Callable[..., Any], size: int) -> None:
    """Each rank of a channel of that size has run the case to its end."""
    for rank, lines in enumerate(ended.ranks[:size]):
        found = [line for line in lines if (line.get("case"), line.get("size")) == (case.__name__, size)]
        assert found, f"rank {rank} of {size} did not come to {case.__name__}:\n{ended.out[-4000:]}"
        assert not found[0]["problem"], f"rank {rank} of {size}: {found[0]['problem']}"


class OnMpi(TransportContract):
    """The contract, and what MPI alone must keep."""

    flavour: Flavour

    @pytest.fixture(autouse=True)
    def _ended(self, contract: Callable[[Flavour], Told]) -> None:
        self.ended = contract(self.flavour)

    def run(self, case: Case, size: int) -> None:
        check(self.ended, case, size)

    @pytest.mark.parametrize("case", mpi_cases.MORE, ids=lambda case: case.__name__)
    def test_more(self, case: Callable[..., Any]) -> None:
        for size in mpi_cases.MORE_SIZES:
            check(self.ended, case, size)

    def test_the_job_ends_well(self) -> None:
        assert self.ended.code == 0, self.ended.out[-4000:]
        assert all("closed" in lines[-1] for lines in self.ended.ranks)

    def test_a_put_lands_while_its_target_computes(self) -> None:
        """The target multiplies matrices for a second and never calls MPI, yet sees the value in its own memory."""
        origin, target = (next(line for line in lines if "landing" in line) for lines in self.ended.ranks[:2])
        assert (origin["landing"], target["landing"]) == ("origin", "target")
        assert target["ended"] - target["started"] >= 1.0
        assert target["seen"] is not None
        assert target["started"] <= target["seen"] <= target["ended"]
        assert target["started"] <= origin["started"] < origin["flushed"] < target["ended"]
        assert target["whole"]

    def test_a_world_over_mpi(self) -> None:
        size = self.flavour.ranks
        for lines in self.ended.ranks:
            assert lines[-2] == {"joined": size, "total": [size * (size + 1) / 2], "ring": [1.0] * 9}


class TestMpich(OnMpi):
    flavour = MPICH
    sizes = mpi_cases.sizes(MPICH.ranks)


class TestOpenMpi(OnMpi):
    flavour = OPEN_MPI
    sizes = mpi_cases.sizes(OPEN_MPI.ranks)


def test_a_put_lands_while_its_target_computes_on_the_simulator() -> None:
    """The same in virtual time: put and flush take microseconds of the target's second."""

    def landing(world: sl.World) -> tuple[float, float]:
        window = world.transport.memory.window(1 << 20, torch.float32)
        world.barrier()
        start = world.runtime.now()
        if world.rank == 0:
            window.put(torch.full((1 << 20,), 7.0), 1)
            window.flush(1)
            return world.runtime.now() - start, 0.0
        seen = 0.0
        for _ in range(100):
            world.compute(0.01)
            if not seen and float(window.local[-1]) == 7.0:
                seen = world.runtime.now() - start
        return world.runtime.now() - start, seen

    (flushed, _), (computed, seen) = sl.simulate(landing, ranks=2).results
    assert computed == pytest.approx(1.0)
    assert 0 < flushed < 1.0
    assert flushed - 0.01 <= seen <= flushed + 0.02

    def at_once(world: sl.World) -> tuple[float, float]:
        window = world.transport.memory.window(4, torch.float32)
        world.barrier()
        start = world.runtime.now()
        if world.rank == 0:
            window.put(torch.full((4,), 7.0), 1)
            window.flush(1)
        else:
            world.compute(1.0)
        return world.runtime.now() - start, float(window.local[0])

    (flushed, _), (computed, value) = sl.simulate(at_once, ranks=2).results
    assert flushed < computed == pytest.approx(1.0)
    assert value == 7.0


@both
def test_an_uncaught_exception_ends_the_whole_job(flavour: Flavour, tmp_path: Path) -> None:
    """The other waits ten minutes for the failed rank; mpiexec ends it long before, with the traceback shown."""
    ended = run_job(flavour, "raises", 2, tmp_path)
    assert ended.code != 0
    assert "ValueError: rank 1 fails on purpose" in ended.out
    assert all("closed" not in line for lines in ended.ranks for line in lines)


@one_or_both
def test_a_lost_peer_is_named_and_the_job_ends(flavour: Flavour, tmp_path: Path) -> None:
    ended = run_job(flavour, "loses", 2, tmp_path)
    assert ended.code != 0
    (lost,) = ended.ranks[0]
    assert lost["peer"] == 1
    assert lost["pending"] == "a message from rank 1 (tag 4, 4 B)"
    assert "rank 0 lost rank 1 after" in lost["message"]


@one_or_both
def test_a_long_wait_names_the_peer_and_an_early_exit_aborts(flavour: Flavour, tmp_path: Path) -> None:
    """Nobody is told of a sys.exit(3): the rank that made it waits for the others at its end, and says so."""
    ended = run_job(flavour, "leaves", 2, tmp_path)
    assert ended.code != 0
    assert re.search(r"rank 0 has waited \d s for a message from rank 1 \(tag 4, 4 B\)\n", ended.out), ended.out
    assert re.search(r"rank 0 has waited \d s for allreduce of float32\[3\] among 2 ranks\n", ended.out)
    assert re.search(r"rank 1 has waited \d+ s for the other ranks to come to their end", ended.out)
    assert "rank 1 has waited up to 1 s at its end for the other ranks to end too: aborting the job" in ended.out


@both
def test_a_failing_exit_from_a_world_ends_the_job_with_its_code(flavour: Flavour, tmp_path: Path) -> None:
    """The other rank waits for it in a collective for a minute; the world's end has seen the exit."""
    ended = run_job(flavour, "exits", 2, tmp_path)
    assert ended.code == 3, ended.out
    assert "PeerLostError" not in ended.out


@one_or_both
def test_a_rank_that_nobody_joins_can_end(flavour: Flavour, tmp_path: Path) -> None:
    """The other one has started MPI and waits for ever: MPI's own end would too."""
    ended = run_job(flavour, "late", 2, tmp_path)
    assert ended.code != 0
    (refusal,) = ended.ranks[0]
    assert "rank 0 of 2 has waited 0.2 s for the others to join" in refusal["refused"]
    assert re.search(r"rank 0 has waited \d s for all 2 ranks to join\n", ended.out), ended.out
    assert not ended.ranks[1]


@pytest.mark.parametrize(("launcher", "library"), [(MPICH, OPEN_MPI), (OPEN_MPI, MPICH)], ids=["MPICH", "OpenMPI"])
def test_two_mpis_at_once_are_refused(launcher: Flavour, library: Flavour, tmp_path: Path) -> None:
    """By name, before the library starts: MPICH's would end the process there."""
    ended = run_job(launcher, "joins", 2, tmp_path, library)
    assert ended.code != 0
    for lines in ended.ranks:
        (refusal,) = lines
        assert refusal["kind"] == "WorldError"
        assert f"mpiexec is of {launcher.name} but mpi4py loaded {library.name}" in refusal["refused"]
        assert "install one of mpich and openmpi" in refusal["refused"].lower()


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ALONE: dict[str, tuple[str, dict[str, str]]] = {
    "MPICH": ("", MPICH.variables),
    "Open MPI": ("", OPEN_MPI.variables),
    "torchrun": ("", TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}),
    "no library": ("", {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}),
    "one thread": ("start_with_one_thread", {}),
    "finalised": ("start_and_end", {}),
}
"""What a process does to MPI before it joins, and its variables."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Plain python, no mpiexec: how each of ALONE ended, and under "" what they have in common."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "alone.json").write_text(json.dumps([(name, *each) for name, each in ALONE.items()]))
    environ = job_environ({})
    done = collect(forked_python(["-m", "tests.transports.mpi_cases", "alone", str(folder)], environ), environ)
    ended = {"": Told(done.code, done.out + done.err, [])}
    for name in ALONE:
        code, out = folder / f"{name}.code", folder / f"{name}.out"
        assert code.exists(), f"{name} was not run: {done}"
        ended[name] = Told(int(code.read_text()), out.read_text(), [])
    return ended


@both
def test_plain_python_is_a_world_of_one(flavour: Flavour, alone: dict[str, Told]) -> None:
    need(flavour)
    ended = alone[flavour.name]
    assert ended.code == 0, ended.out
    assert "0 1 [1.0, 1.0]" in ended.out


def test_a_launcher_that_is_not_for_mpi_is_told_how(alone: dict[str, Told]) -> None:
    need(MPICH)
    ended = alone["torchrun"]
    assert ended.code == 1
    assert "says rank 1 of 2, MPI says rank 0 of 1. It was not started for MPI" in ended.out
    assert "mpiexec -n 2" in ended.out


def test_no_mpi_library_is_a_sentence(alone: dict[str, Told]) -> None:
    ended = alone["no library"]
    assert ended.code == 1
    assert "UnsupportedError: mpi4py found no MPI library it can use" in ended.out
    assert "pip install 'syncline[mpi]'" in ended.out


def test_less_thread_support_is_refused(alone: dict[str, Told]) -> None:
    need(MPICH)
    ended = alone["one thread"]
    assert ended.code == 1
    assert "UnsupportedError: MPICH Version: 5" in ended.out
    assert "THREAD_MULTIPLE" in ended.out


def test_a_finalised_mpi_is_refused(alone: dict[str, Told]) -> None:
    need(MPICH)
    ended = alone["finalised"]
    assert ended.code == 1
    assert "WorldError: MPI was finalised in this process" in ended.out


def test_importing_the_transport_starts_no_mpi(alone: dict[str, Told]) -> None:
    assert alone[""].code == 0, alone[""].out
    assert alone[""].out == "False\n"


def test_no_mpi4py_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UnsupportedError, match=r"needs mpi4py .* pip install 'syncline\[mpi\]'"):
        connect(Environment(source="no launcher"), 1.0)
