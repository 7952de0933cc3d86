"""The functional collectives on every transport, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import syncline as sl
from syncline.testing import Pool
from syncline.transports import SingleTransport
from tests.hunting import HUNTING, seeds
from tests.world.functional_checks import check_functional

SIZES = range(1, 10) if HUNTING else (1, 2, 3, 5, 8)


def test_single() -> None:
    import contextvars

    assert contextvars.copy_context().run(check_functional, SingleTransport()) > 100


@pytest.mark.parametrize("size", SIZES)
def test_simulated(size: int) -> None:
    assert min(sl.simulate(lambda world: check_functional(world.transport), size, seed=size).results) > 100


@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_simulated_in_any_order(seed: int) -> None:
    network = sl.Network(eager=0, jitter=0.5)
    run = sl.simulate(lambda world: check_functional(world.transport, True), 3, network=network, seed=seed, chaos=True)
    assert min(run.results) > 100


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", SIZES)
def test_gloo(gloo: Pool, size: int) -> None:
    assert min(gloo.run(check_functional, size)) > 100


@pytest.mark.xdist_group("gloo")
def test_gloo_checked(gloo: Pool) -> None:
    assert min(gloo.run(check_functional, 4, True)) > 100


def differ(how: str, world: sl.World) -> Any:
    odd = world.rank == 1
    if how == "shape":
        return sl.allreduce(torch.zeros(3 if odd else 4), op="mean")
    if how == "refused":
        return sl.allreduce(torch.zeros(3, dtype=torch.int64 if odd else torch.float32), op="mean")
    if how == "dtype":
        return sl.allreduce(torch.zeros(3, dtype=torch.float64 if odd else torch.float32), op="mean")
    if how == "reduction":
        return sl.allreduce(torch.zeros(3), op="max" if odd else "sum")
    if how == "algorithm":
        return sl.allreduce(torch.zeros(3), op="mean", algorithm="ring" if odd else "tree")
    if how == "root":
        return sl.broadcast(torch.zeros(3), root=1 if odd else 0)
    return sl.allgather(torch.zeros(3)) if odd else sl.allreduce(torch.zeros(3), op="mean")


HOWS = ("refused", "shape", "dtype", "reduction", "algorithm", "root", "operation")


@pytest.mark.parametrize("how", HOWS)
def test_a_difference_between_ranks_is_named_on_every_rank(how: str) -> None:
    run = sl.simulate(lambda world: differ(how, world), 3, check=True, return_exceptions=True)
    for error in run.results:
        assert isinstance(error, sl.errors.IncompatibleError)
        assert "ranks 0, 2:" in str(error)
        assert "rank 1:" in str(error)


def test_allgather_refuses_what_does_not_join_without_check() -> None:
    run = sl.simulate(lambda world: sl.allgather(torch.zeros(2, 2 + world.rank)), 2, return_exceptions=True)
    assert all(isinstance(error, sl.errors.IncompatibleError) for error in run.results)


def read_only() -> Any:
    array = np.zeros(1)
    array.flags.writeable = False
    return array


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "reduction": (lambda: sl.allreduce(torch.zeros(1), op="avg"), sl.errors.SpecError, "did you mean 'mean'"),  # type: ignore[arg-type]
    "algorithm": (
        lambda: sl.allreduce(torch.zeros(1), "mean", "rinng"),
        sl.errors.SpecError,
        "did you mean 'ring'",
    ),
    "code": (
        lambda: sl.allreduce(torch.zeros(1), "mean", "ring(exit())"),
        sl.errors.SpecError,
        "never evaluated",
    ),
    "mean of whole numbers": (
        lambda: sl.allreduce(torch.arange(3), op="mean"),
        sl.errors.IncompatibleError,
        "op='sum'",
    ),
    "order of complex": (
        lambda: sl.allreduce(torch.zeros(1, dtype=torch.complex64), op="max"),
        sl.errors.IncompatibleError,
        "no order",
    ),
    "sparse": (lambda: sl.allreduce(torch.zeros(3).to_sparse(), op="mean"), sl.errors.IncompatibleError, "to_dense"),
    "a list": (lambda: sl.allreduce([1.0], op="mean"), sl.errors.IncompatibleError, "torch.tensor"),
    "strings": (lambda: sl.allreduce(np.array(["a"]), op="max"), sl.errors.IncompatibleError, "NumPy dtype"),
    "root": (lambda: sl.broadcast(torch.zeros(1), root=3), sl.errors.IncompatibleError, "root=3"),
    "splits": (lambda: sl.alltoall(torch.zeros(3), splits=[1]), sl.errors.IncompatibleError, "add up to 3"),
    "no rows": (
        lambda: sl.reduce_scatter(torch.tensor(1.0), op="mean"),
        sl.errors.IncompatibleError,
        "first dimension",
    ),
    "a group that is none": (
        lambda: sl.allreduce(torch.zeros(1), op="mean", group=[0]),  # type: ignore[arg-type]
        sl.errors.IncompatibleError,
        "world.group",
    ),
    "foreign byte order": (
        lambda: sl.allreduce(np.zeros(1, dtype=">f4"), "mean"),
        sl.errors.IncompatibleError,
        "byte order",
    ),
    "a bad tag": (lambda: sl.send(torch.zeros(1), to=0, tag=-1), sl.errors.IncompatibleError, "tag=-1"),
    "into the unwritable": (lambda: sl.recv(read_only()), sl.errors.IncompatibleError, "writable"),
    "to nobody": (lambda: sl.send(torch.zeros(1), to=7), sl.errors.WorldError, "not a rank"),
    "into a number": (lambda: sl.recv(3.0), sl.errors.IncompatibleError, "not float"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_a_word(name: str) -> None:
    call, kind, message = BAD[name]
    with sl.init(), pytest.raises(kind, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()


def test_a_message_of_another_length_is_refused() -> None:
    def mismatch(world: sl.World) -> None:
        if world.rank == 0:
            sl.send(torch.zeros(3), to=1)
        else:
            sl.recv(torch.zeros(5), source=0)

    run = sl.simulate(mismatch, 2, return_exceptions=True)
    assert isinstance(run.results[1], sl.errors.ProtocolError)
    assert run.results[1].peer == 0


def test_counters_say_what_was_moved() -> None:
    with sl.init() as world:
        sl.allreduce(torch.zeros(100), op="mean")
        assert world.events.totals["sl_comm_bytes_logical"] == 400
        assert world.events.totals["sl_comm_seconds"] > 0


def test_the_error_of_an_asynchronous_call_is_raised_by_wait() -> None:
    def lonely(world: sl.World) -> None:
        if world.rank == 0:
            pending = sl.allreduce(torch.zeros(1), op="mean", algorithm="ring", async_=True)
            with pytest.raises(sl.errors.PeerLostError, match="lost rank 1"):
                pending.wait()
        world.compute(1.0)

    sl.simulate(lonely, 2, faults=[sl.faults.Kill(1, at=1e-6)])


def test_two_threads_on_one_team_are_refused() -> None:
    def both(world: sl.World) -> None:
        first = world.runtime.spawn(sl.allreduce, torch.ones(1), "sum", "ring")
        world.compute(1e-6)  # the task is in its call now, and waits for rank 1
        with pytest.raises(sl.errors.WorldError, match=r"two threads.*world.group\(\)"):
            sl.allreduce(torch.ones(1), op="mean", algorithm="ring")
        first.join()

    sl.simulate(lambda world: both(world) if world.rank == 0 else sl.allreduce(torch.ones(1), "sum", "ring"), 2)


def test_close_waits_for_asynchronous_calls() -> None:
    def script(world: sl.World) -> list[float]:
        with world:
            pending = [sl.allreduce(torch.ones(1), "sum", "ring", async_=True) for _ in range(20)]
        return [one.wait().item() for one in pending]

    assert sl.simulate(script, 3).results == ([3.0] * 20,) * 3


class Tracer:
    """As JAX's: it has an array's methods, and no values."""

    __module__ = "jax._src.core"

    def __array_namespace__(self) -> Any:
        raise AttributeError("'Traced<float32[3]>' is not concrete")

    __dlpack__ = __array_namespace__


class Borrowed:
    """An array on a device that torch does not know."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not on this device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (99, 0)


@pytest.mark.parametrize(
    "call", [lambda x: sl.allreduce(x, "sum"), sl.allgather, lambda x: sl.send(x, to=0), lambda x: sl.recv(x, source=0)]
)
def test_arrays_without_values_are_refused(call: Any) -> None:
    with sl.init():
        with pytest.raises(sl.errors.IncompatibleError, match=r"DynamicTracer of JAX.*io_callback"):
            call(type("DynamicTracer", (Tracer,), {})())
        with pytest.raises(sl.errors.IncompatibleError, match="Borrowed cannot be read through DLPack"):
            call(Borrowed())


def test_a_meta_tensor_is_refused() -> None:
    with sl.init(), pytest.raises(sl.errors.IncompatibleError, match="meta device has no data"):
        sl.allreduce(torch.zeros(2, device="meta"), op="mean")


def test_op_must_be_given() -> None:
    """Without it the result is the mean, with a warning: torch and MPI take the sum."""

    def work(world: sl.World) -> list[float]:
        x = torch.tensor([1.0 + world.rank, 3.0])
        with pytest.warns(DeprecationWarning, match="sl.allreduce without op"):
            whole = sl.allreduce(x)
        with pytest.warns(DeprecationWarning, match="sl.reduce_scatter without op"):
            part = sl.reduce_scatter(x)
        return [*whole.tolist(), *part.tolist()]

    assert sl.simulate(work, 2).results == ([1.5, 3.0, 1.5], [1.5, 3.0, 3.0])


def test_old_names_of_groups_still_work() -> None:
    with sl.init() as world:
        with pytest.warns(DeprecationWarning, match=r"world\.group"):
            group = world.team()
        with pytest.warns(DeprecationWarning, match="duplicate"):
            assert world.twin(group).ranks == (0,)
    with pytest.warns(DeprecationWarning, match=r"sl\.Group"):
        assert sl.Team is sl.Group
