"""What mpiexec runs for tests/transports/test_mpi.py: `python -m tests.transports.mpi_cases JOB FOLDER`.

Each rank writes its results to a file of its own in the folder, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.environment import Environment, detect
from syncline.errors import PeerLostError, ProtocolError, UnsupportedError, WorldError
from syncline.testing.transports import CASES, withdraw_a_receive
from syncline.transports.mpi import MpiTransport, connect
from syncline.transports.mpi.connect import load
from tests.parallel.training import compare, has_stages, train_alone, train_in_pipeline
from tests.strategies.cases import on_gloo
from tests.training.mesh_models import assert_trained, train_divided
from tests.world.functional_checks import check_functional

TIMEOUT = 60.0


def wait_for_sends_first(transport: MpiTransport) -> None:
    """Large messages both ways, lengths not agreed: whoever waits for its send first has still posted its receive."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = torch.zeros(1 << 20)
    receipt = transport.recv(received, source, 1)
    other = torch.zeros(1)
    never = transport.recv(other, source, 2)
    transport.send(torch.full((1 << 20,), float(transport.rank)), to, 1).wait()
    receipt.wait()
    assert bool((received == source).all())
    transport.send(torch.ones(1), to, 2)
    never.wait()


def keep_posting_order(transport: MpiTransport) -> None:
    """Receives are served in the order they were posted, directed ones and those from anyone alike."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    buffers = [torch.zeros(1) for _ in range(4)]
    wanted = [None, source, None, source]
    handles = [transport.recv(buffer, whom, 5) for buffer, whom in zip(buffers, wanted, strict=True)]
    for number in range(4):
        transport.send(torch.tensor([float(number)]), to, 5)
    for handle in reversed(handles):
        handle.wait()
    assert [float(buffer) for buffer in buffers] == [0, 1, 2, 3]


def deliver_what_nobody_holds(transport: MpiTransport) -> None:
    """Many large messages whose handles are dropped at once arrive whole."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for number in range(40):
        transport.send(torch.full((50_000,), number), to, 6)
    for number in range(40):
        buffer = torch.zeros(50_000, dtype=torch.int64)
        transport.recv(buffer, source, 6).wait()
        assert bool((buffer == number).all())


def hold_exact_to_its_word(transport: MpiTransport) -> None:
    """A message that breaks its promise of a length is refused; the channel goes on."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for length in (10, 100_000):
        receipt = transport.recv(torch.zeros(20, dtype=torch.uint8), source, 7, exact=True)
        handle = transport.send(torch.zeros(length, dtype=torch.uint8), to, 7, exact=True)
        with pytest.raises(ProtocolError, match=rf"rank {source} sent .* where exactly 20 B were expected"):
            receipt.wait()
        handle.wait()
    buffer = torch.zeros(3)
    receipt = transport.recv(buffer, source, 7, exact=True)
    transport.send(torch.ones(3), to, 7, exact=True)
    receipt.wait()
    assert buffer.tolist() == [1, 1, 1]


def refuse_a_very_long_message(transport: MpiTransport) -> None:
    """Too long even for MPI's eager way: the sender does not hang, and the channel goes on."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    handle = transport.send(torch.zeros(3_000_000, dtype=torch.uint8), to, 8)
    with pytest.raises(ProtocolError, match=rf"rank {source} sent 3 MB .*at most 40 B"):
        transport.recv(torch.zeros(40, dtype=torch.uint8), source, 8).wait()
    handle.wait()


def give_up_on_a_peer(transport: MpiTransport) -> None:
    """A receive that timed out names the peer and what was pending, and takes no later message."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for exact in (False, True):
        with pytest.raises(PeerLostError, match=rf"lost rank {source} after .* \(tag 9, 4 B\)") as caught:
            transport.recv(torch.zeros(1), source, 9, exact=exact).wait(timeout=0.01)
        assert caught.value.peer == source
        assert transport.native is not None
        transport.native.barrier().wait()
        transport.send(torch.ones(1), to, 9, exact=exact)
        buffer = torch.zeros(1)
        transport.recv(buffer, source, 9, exact=exact).wait()
        assert float(buffer) == 1


def break_off(transport: MpiTransport) -> None:
    """abort() ends a wait of another task; a closed channel takes nothing more."""
    channel = transport.split(range(transport.size))
    assert channel is not None
    started = transport.runtime.event()

    def listen() -> None:
        handle = channel.recv(torch.zeros(1), None, 3)
        started.set()
        handle.wait()

    task = transport.runtime.spawn(listen, name="listener")
    assert started.wait(TIMEOUT)
    channel.abort()
    with pytest.raises(PeerLostError, match="aborted the channel"):
        task.join(TIMEOUT)
    channel.close()
    channel.close()
    with pytest.raises(WorldError, match="is closed"):
        channel.send(torch.zeros(1), 0)


def come_and_go(transport: MpiTransport) -> None:
    """Channels that are closed are freed: alone, where that is quick, more of them than MPICH can have at once."""
    for _ in range(2100 if transport.size == 1 else 100):
        channel = transport.split(range(transport.size))
        assert channel is not None
        channel.close()


def close_before_the_others(transport: MpiTransport) -> None:
    """A collective takes nothing of another rank's closing for that rank's part: it waits."""
    channel = transport.split(range(transport.size))
    assert channel is not None
    assert transport.native is not None
    last = transport.rank == transport.size - 1
    if last:
        channel.close()
    transport.native.barrier().wait()
    if not last and channel.native is not None:
        landed = torch.ones(2)
        with pytest.raises(PeerLostError, match="allreduce"):
            channel.native.allreduce(landed, "sum").wait(timeout=0.05)
        channel.close()


def fill_windows_of_every_kind(transport: MpiTransport) -> None:
    """Dtypes that MPI does not know are moved but not added; values may change after put; closed ones are refused."""
    rank, size = transport.rank, transport.size
    to, source = (rank + 1) % size, (rank - 1) % size
    assert transport.native is not None
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.complex128, torch.int16, torch.float64):
        window = transport.memory.window(5, dtype)
        assert window.local.tolist() == torch.zeros(5, dtype=dtype).tolist()
        transport.native.barrier().wait()
        values = torch.ones(2, dtype=dtype)
        window.put(values, to, offset=1)
        values.zero_()
        window.flush(to)
        transport.native.barrier().wait()
        assert window.local.tolist() == torch.tensor([0, 1, 1, 0, 0], dtype=dtype).tolist()
        copy = torch.zeros(5, dtype=dtype)
        handle = window.get(copy, source)
        handle.wait()
        assert torch.equal(copy, window.local)
        assert handle.nbytes == 5 * dtype.itemsize
        transport.native.barrier().wait()
        if dtype in (torch.int16, torch.float64):
            window.accumulate(torch.ones(5, dtype=dtype), to)
        else:
            with pytest.raises(UnsupportedError, match="cannot add"):
                window.accumulate(torch.ones(5, dtype=dtype), to)
        window.close()
        window.close()
        with pytest.raises(WorldError, match="is closed"):
            window.put(torch.ones(1, dtype=dtype), to)
    with pytest.raises(WorldError, match="not a rank"):
        transport.memory.window(1, torch.float32).put(torch.ones(1), size)  # forgotten: the channel's end closes it


def add_at_once(transport: MpiTransport) -> None:
    """Every rank adds to the same elements at the same time: nothing is lost."""
    window = transport.memory.window(100, torch.float32)
    for _ in range(50):
        window.accumulate(torch.ones(100), 0)
    window.flush()
    assert transport.native is not None
    transport.native.barrier().wait()
    if transport.rank == 0:
        assert window.local.tolist() == [50.0 * transport.size] * 100
    window.close()


def leave_a_flush(transport: MpiTransport) -> None:
    """Over a network a flush runs in its own task. This one acts as if no rank were on this host."""
    neighbours, transport.engine.neighbours = transport.engine.neighbours, frozenset()
    window = transport.memory.window(4, torch.int32)
    transport.engine.neighbours = neighbours
    window.put(torch.full((4,), transport.rank, dtype=torch.int32), (transport.rank + 1) % transport.size)
    window.flush()
    assert transport.native is not None
    transport.native.barrier().wait()
    assert window.local.tolist() == [(transport.rank - 1) % transport.size] * 4
    window.close()


def work_as_a_world(transport: MpiTransport) -> None:
    """The functional collectives, every dtype and kind of array."""
    assert check_functional(transport) > 0


def train_a_pipeline(transport: MpiTransport) -> None:
    """Stages on all ranks train as one process does."""
    for model, schedule in (("unet", "1f1b"), ("mlp", "zbv")):
        found = on_gloo(transport, train_in_pipeline, model, schedule)
        compare(found, train_alone(model, has_stages(schedule, transport.size)))


def divide_layers(transport: MpiTransport) -> None:
    """Two ranks divide layers, and train as one process does."""
    if transport.size == 2:
        assert_trained(on_gloo(transport, train_divided))


MORE: tuple[Callable[[MpiTransport], None], ...] = (
    withdraw_a_receive,
    wait_for_sends_first,
    keep_posting_order,
    deliver_what_nobody_holds,
    hold_exact_to_its_word,
    refuse_a_very_long_message,
    give_up_on_a_peer,
    break_off,
    close_before_the_others,
    come_and_go,
    fill_windows_of_every_kind,
    add_at_once,
    leave_a_flush,
    work_as_a_world,
    train_a_pipeline,
    divide_layers,
)
MORE_SIZES = (1, 2, 3)


def sizes(largest: int) -> tuple[int, ...]:
    """The sizes of the contract: one to three, and the largest."""
    return tuple(sorted({1, 2, 3, largest}))


class Report:
    """One rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"{rank}.jsonl"

    def write(self, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def contract(transport: MpiTransport, report: Report) -> None:
    """Every case on several sizes, on channels of the first ranks."""
    for size in sizes(transport.size):
        channel: Any = transport.split(range(size))
        cases: list[Callable[[Any], Any]] = [*CASES, *(MORE if size in MORE_SIZES else ())]
        for case in cases if channel is not None else []:
            start = time.monotonic()
            try:
                case(channel)
            except BaseException:
                report.write(case=case.__name__, size=size, problem=traceback.format_exc())
                raise  # the others wait for this rank: end them
            report.write(case=case.__name__, size=size, problem="", seconds=time.monotonic() - start)
        if channel is not None:
            channel.close()
    pair: Any = transport.split((0, 1))
    if pair is not None:
        landing(pair, report)
        pair.close()
    Context().run(joins, transport, report)  # the cases have left a current world of their own


def landing(transport: MpiTransport, report: Report) -> None:
    """Rank 0 puts 4 MB into rank 1's window while that one computes for a second and never calls MPI."""
    window = transport.memory.window(1 << 20, torch.float32)
    token = torch.zeros(1)
    if transport.rank == 0:
        transport.recv(token, 1).wait()
        values = torch.full((1 << 20,), 7.0)
        start = time.monotonic()
        window.put(values, 1)
        window.flush(1)
        report.write(landing="origin", started=start, flushed=time.monotonic())
    else:
        local, matrix = window.local, torch.eye(64)
        transport.send(token, 0).wait()
        start = time.monotonic()
        seen: float | None = None
        while (elapsed := time.monotonic() - start) < 1.0 or (seen is None and elapsed < TIMEOUT):
            matrix = matrix @ matrix
            if seen is None and float(local[-1]) == 7.0:
                seen = time.monotonic()
        whole = bool((local == 7.0).all())
        report.write(landing="target", started=start, seen=seen, ended=time.monotonic(), whole=whole)
    window.close()


def raises(transport: MpiTransport, report: Report) -> None:
    """Rank 1 fails; the other waits for it in a receive with a long timeout."""
    transport.memory.window(4, torch.float32)
    if transport.rank == 1:
        raise ValueError("rank 1 fails on purpose")
    transport.recv(torch.zeros(1), 1).wait(timeout=10 * TIMEOUT)


def loses(transport: MpiTransport, report: Report) -> None:
    """Rank 0 waits for what rank 1 never sends, catches the error and ends with a code of its own."""
    if transport.rank == 0:
        transport.timeout = 0.2
        try:
            transport.recv(torch.zeros(1), 1, 4).wait()
        except PeerLostError as error:
            report.write(peer=error.peer, pending=error.pending, message=str(error))
            sys.exit(3)
    transport.recv(torch.zeros(1), 0).wait(timeout=10 * TIMEOUT)


def leaves(transport: MpiTransport, report: Report) -> None:
    """Rank 0 waits long, and says so; then rank 1 ends early by sys.exit(3), of which nobody is told."""
    engine = transport.engine
    engine.warn_after_s = 0.05
    if transport.rank == 1:
        transport.recv(torch.zeros(1), 0).wait()
        engine.exit_timeout_s = 1.0
        sys.exit(3)
    with pytest.raises(PeerLostError):
        transport.recv(torch.zeros(1), 1, 4).wait(timeout=0.2)
    assert transport.native is not None
    with pytest.raises(PeerLostError):
        transport.native.allreduce(torch.ones(3), "sum").wait(timeout=0.2)
    transport.send(torch.ones(1), 1).wait()
    engine.warn_after_s = 10 * TIMEOUT  # what follows is rank 1's to tell
    transport.recv(torch.zeros(1), 1).wait(timeout=10 * TIMEOUT)


def exits(transport: MpiTransport, report: Report) -> None:
    """Rank 1 leaves a world's `with` by sys.exit(3) while rank 0 waits for it in a collective."""
    with sl.init(transport=transport) as world:
        if world.rank == 1:
            sys.exit(3)
        sl.allreduce(torch.ones(3), op="mean")


def joins(transport: MpiTransport, report: Report) -> None:
    """A world over the transport; its end is the script's."""
    world = sl.init(transport=transport)
    total = sl.allreduce(torch.tensor([world.rank + 1.0]), op="sum")
    report.write(
        joined=world.size, total=total.tolist(), ring=sl.allreduce(torch.ones(9), "mean", algorithm="ring").tolist()
    )


JOBS: dict[str, Callable[[MpiTransport, Report], None]] = {
    job.__name__: job for job in (contract, raises, loses, leaves, exits, joins)
}


def send_to_oneself() -> None:
    """A world of one under plain python, or a refusal."""
    transport = connect(detect(), TIMEOUT)
    transport.send(torch.ones(2), 0).wait()
    buffer = torch.zeros(2)
    transport.recv(buffer, 0).wait()
    window = transport.memory.window(2, torch.float32)
    window.put(buffer, 0)
    window.flush()
    print(transport.rank, transport.size, window.local.tolist())


def alone(folder: Path) -> None:
    """Each line of alone.json in a process of its own, forked before MPI starts. A warning is an error."""
    warnings.simplefilter("error")
    print("mpi4py" in sys.modules)
    for name, first, variables in json.loads((folder / "alone.json").read_text()):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            out = os.open(folder / f"{name}.out", os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(variables)
            BEFORE[first]()
            send_to_oneself()
            return
        _, status = os.waitpid(child, 0)
        (folder / f"{name}.code").write_text(str(os.waitstatus_to_exitcode(status)))


def start_with_one_thread() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "single"
    import mpi4py.MPI


def start_and_end() -> None:
    import mpi4py.MPI

    mpi4py.MPI.Finalize()


BEFORE: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "start_with_one_thread": start_with_one_thread,
    "start_and_end": start_and_end,
}
"""What a script has done to MPI before it joins."""


def be_late(environment: Environment) -> float:
    """Rank 1 starts MPI and never joins; the seconds that rank 0 is to wait for it."""
    if environment.rank == 1:
        load(environment).COMM_WORLD.recv(source=0)
    module: Any = sys.modules["syncline.transports.mpi.connect"]
    module.WARN_AFTER_S = 0.05
    return 0.2


def main(job: str, folder: Path) -> None:
    if job == "alone":
        alone(folder)
        return
    torch.set_num_threads(1)
    environment = detect()
    timeout = TIMEOUT
    if job == "late":
        timeout = be_late(environment)
    try:
        transport = connect(environment, timeout)
    except (WorldError, UnsupportedError) as error:
        Report(folder, environment.rank).write(refused=str(error), kind=type(error).__name__)
        sys.exit(5)
    JOBS[job](transport, Report(folder, transport.rank))
    if job not in ("contract", "joins"):
        transport.close()
    Report(folder, transport.rank).write(closed=os.getpid())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
