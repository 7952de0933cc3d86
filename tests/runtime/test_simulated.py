"""The simulator: virtual time, replay, deadlocks, random numbers, failures."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

import syncline as sl
from syncline.runtime import simulator
from syncline.runtime.thread_state import ThreadState
from syncline.transports import Message, messages
from syncline.transports.faults import Fault

NETWORK = sl.Network(latency=100e-6, bandwidth=1e8, jitter=0.5)


def busy(world: sl.World) -> list[tuple[float, int, float]]:
    """Two tasks a rank: rank 0 serves anyone, the others ask at times of their own; timers tick beside."""
    transport, runtime = world.transport, world.runtime
    seen: list[tuple[float, int, float]] = []

    def tick() -> None:
        for _ in range(20):
            runtime.sleep(random.random() * 1e-3)
            seen.append((runtime.now(), -1, float(torch.rand(()))))

    ticker = runtime.spawn(tick, name="ticker")
    if world.rank == 0:
        for _ in range(5 * (world.size - 1)):
            buffer = torch.zeros(8)
            handle = transport.recv(buffer, None, tag=1)
            handle.wait()
            seen.append((runtime.now(), handle.source, float(buffer[0])))
            transport.send(buffer * 2, handle.source, tag=2)
    else:
        for _ in range(5):
            world.compute(float(np.random.rand()) * 1e-3)
            transport.send(torch.rand(8), 0, tag=1)
            answer = torch.zeros(8)
            transport.recv(answer, 0, tag=2).wait()
            seen.append((runtime.now(), 0, float(answer[0])))
    ticker.join()
    return seen


@pytest.mark.parametrize("chaos", [False, True], ids=["in order", "chaos"])
def test_the_same_seed_replays_bit_by_bit(chaos: bool) -> None:
    for seed in range(5):
        first = sl.simulate(busy, 5, network=NETWORK, seed=seed, chaos=chaos)
        again = sl.simulate(busy, 5, network=NETWORK, seed=seed, chaos=chaos)
        assert first.results == again.results
        assert first.messages == again.messages
        assert first.time == again.time
    assert sl.simulate(busy, 5, network=NETWORK, seed=99, chaos=chaos).messages != first.messages


@pytest.mark.parametrize("chaos", [False, True], ids=["in order", "chaos"])
def test_no_message_is_seen_before_it_arrives(chaos: bool) -> None:
    run = sl.simulate(busy, 5, network=NETWORK, seed=3, chaos=chaos)
    for message in run.messages:
        assert message.arrived >= message.sent + 100e-6 + message.nbytes / 1e8 - 1e-12
    served = [(when, source) for when, source, _ in run.results[0] if source >= 0]
    arrivals: dict[int, list[Message]] = {}
    for message in run.messages:
        if message.to == 0:
            arrivals.setdefault(message.source, []).append(message)
    for source, received in arrivals.items():
        times = [when for when, who in served if who == source]
        assert len(times) == len(received) == 5
        assert all(when >= message.arrived for when, message in zip(times, received, strict=True))


def test_time_is_virtual() -> None:
    run = sl.simulate(lambda world: world.compute(3600.0 * (world.rank + 1)), 4)
    assert run.time == 4 * 3600.0


def test_one_message_costs_what_the_model_says() -> None:
    def once(world: sl.World) -> float:
        if world.rank == 0:
            sl.send(torch.zeros(250), to=1)
        else:
            sl.recv(torch.zeros(250), source=0)
        return world.runtime.now()

    run = sl.simulate(once, 2, network=sl.Network(latency=1e-3, bandwidth=1e6))
    assert run.results == pytest.approx((1e-3, 2e-3))  # the port is free after nβ; it arrives after α + nβ
    assert run.messages == (Message(0, 1, 0, 1000, 0.0, run.results[1]),)


def test_a_deadlock_is_named_at_once() -> None:
    def circle(world: sl.World) -> None:
        sl.recv(torch.zeros(1), source=(world.rank + 1) % world.size, tag=world.rank)

    with pytest.raises(sl.errors.DeadlockError) as caught:
        sl.simulate(circle, 3, timeout=1e9)
    for rank in range(3):
        assert f"rank {rank} (main) waits since t=0 s for a message from rank {(rank + 1) % 3}" in str(caught.value)


def test_waiting_for_a_rank_that_has_returned_is_a_deadlock() -> None:
    def early(world: sl.World) -> None:
        if world.rank == 0:
            sl.recv(torch.zeros(1), source=1)

    with pytest.raises(sl.errors.DeadlockError, match="ended already: rank 1"):
        sl.simulate(early, 2)


def test_random_numbers_belong_to_the_rank() -> None:
    def draw(world: sl.World) -> list[float]:
        mine = []
        for _ in range(3):
            mine += [float(torch.rand(())), float(np.random.rand()), random.random()]
            world.barrier()
        return mine

    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = (float(torch.rand(())), float(np.random.rand()), random.random())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    first = sl.simulate(draw, 4, seed=1).results
    after = (float(torch.rand(())), float(np.random.rand()), random.random())
    assert after == before, "the caller's own state was touched"
    assert len({tuple(numbers) for numbers in first}) == 4
    assert sl.simulate(draw, 4, seed=1, chaos=True).results == first, "numbers depend on the order of events"


def test_a_seeded_script_draws_alike_on_all_ranks() -> None:
    def draw(world: sl.World) -> list[float]:
        torch.manual_seed(0)
        world.barrier()
        return torch.rand(3).tolist()

    results = sl.simulate(draw, 3).results
    assert results[0] == results[1] == results[2]


def test_an_exception_of_a_rank_says_how_to_replay_it() -> None:
    def fail(world: sl.World) -> None:
        world.compute(world.rank * 1.0)
        if world.rank == 2:
            raise KeyError("lost")
        sl.recv(torch.zeros(1), source=2)

    with pytest.raises(KeyError) as caught:
        sl.simulate(fail, 4, seed=42)
    if sys.version_info >= (3, 11):
        assert any("seed=42" in note and "rank 2" in note for note in caught.value.__notes__)
    outcome = sl.simulate(fail, 4, seed=42, return_exceptions=True).results
    assert isinstance(outcome[2], KeyError)
    assert all(isinstance(outcome[rank], sl.errors.PeerLostError) and outcome[rank].peer == 2 for rank in (0, 1, 3))


def test_a_task_that_fails_unseen_is_not_forgotten() -> None:
    def careless(world: sl.World) -> None:
        world.runtime.spawn(lambda: 1 // 0, name="careless")
        world.compute(1.0)

    with pytest.raises(ZeroDivisionError):
        sl.simulate(careless, 1)

    def careful(world: sl.World) -> None:
        task = world.runtime.spawn(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            task.join()

    sl.simulate(careful, 1)


def test_events_queues_and_locks() -> None:
    def script(world: sl.World) -> list[Any]:
        runtime = world.runtime
        log: list[Any] = []
        queue, lock, event = runtime.queue(2), runtime.lock(), runtime.event()

        def produce() -> None:
            for item in range(5):
                queue.put(item)
            with lock:
                runtime.sleep(1.0)
                log.append("first")
            event.set()

        task = runtime.spawn(produce)
        assert not event.wait(timeout=0.5)
        assert len(queue) == 2  # full: the producer waits
        with pytest.raises(TimeoutError):
            queue.put(None, timeout=0.1)
        assert [queue.get() for _ in range(5)] == list(range(5))
        with pytest.raises(TimeoutError):
            queue.get(timeout=0.1)
        with lock:
            log.append("second")
        assert event.wait(timeout=10)
        assert task.join()
        assert task.done()
        log.append(runtime.now())
        return log

    (log,) = sl.simulate(script, 1).results
    assert log[:2] == ["first", "second"]
    assert log[2] == pytest.approx(1.6)


def test_join_times_out() -> None:
    def script(world: sl.World) -> bool:
        return world.runtime.spawn(world.runtime.sleep, 10.0).join(timeout=1.0)

    run = sl.simulate(script, 1)
    assert run.results == (False,)
    assert run.time == 1.0, "a task left behind ends with its rank"


def test_chaos_finds_what_order_hides() -> None:
    """A lost update that time order never shows."""

    def race(world: sl.World) -> int:
        total = [0]

        def add() -> None:
            value = total[0]
            world.runtime.sleep(1e-6)
            total[0] = value + 1

        tasks = []
        for _ in range(2):
            tasks.append(world.runtime.spawn(add))
            world.runtime.sleep(1e-3)
        for task in tasks:
            task.join()
        return total[0]

    assert {sl.simulate(race, 1, seed=seed).results[0] for seed in range(20)} == {2}
    assert {sl.simulate(race, 1, seed=seed, chaos=True).results[0] for seed in range(20)} == {1, 2}


def test_the_caller_gets_its_processor_and_threads_back() -> None:
    import os

    before = (os.sched_getaffinity(0), torch.get_num_threads())
    sl.simulate(lambda world: None, 3)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_control_c_ends_a_simulation() -> None:
    script = (
        "import syncline as sl, torch\n"
        "def forever(world):\n"
        "    print('running', flush=True) if world.rank == 0 else None\n"
        "    while True: world.barrier()\n"
        "sl.simulate(forever, 4)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors


def test_a_simulation_needs_ranks() -> None:
    with pytest.raises(sl.errors.WorldError, match="ranks: 0"):
        sl.simulate(lambda world: None, 0)


def test_networks_refuse_nonsense() -> None:
    for bad in ({"latency": -1.0}, {"bandwidth": 0.0}, {"combine": -1.0}, {"ranks_per_host": 2}, {"slow": {0: 0.0}}):
        with pytest.raises(sl.errors.SpecError):
            sl.Network(**bad)


def train(world: sl.World) -> list[torch.Tensor]:
    """Gradients are averaged by hooks that wait, in the middle of each backward pass."""
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    sums: list[torch.Tensor] = []
    parameters: Any = model.parameters()
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda leaf: sums.append(sl.allreduce(leaf.grad, op="mean", algorithm="ring"))
        )
    for _ in range(2):
        world.compute(random.random() * 1e-3)
        torch.autograd.backward(model(torch.rand(2, 3)).sum())
    return sums


@pytest.mark.parametrize("chaos", [False, True], ids=["in order", "chaos"])
def test_greenlets_and_threads_run_the_same(chaos: bool) -> None:
    def both(world: sl.World) -> tuple[Any, Any]:
        return busy(world), [each.tolist() for each in train(world)]

    faults: list[Fault] = [sl.faults.Slow(1, 3.0), sl.faults.Delay(1e-3, probability=0.3)]
    for seed in range(8):
        first, second = (
            sl.simulate(both, 4, network=NETWORK, faults=faults, seed=seed, chaos=chaos, threads=threads)
            for threads in (False, True)
        )
        assert first == second


def test_waiting_tasks_keep_the_thread_state_of_torch_apart() -> None:
    def state() -> tuple[Any, ...]:
        x = torch.ones(2, 2, requires_grad=True)
        y = x @ x
        made = torch.empty(0)
        return (torch.is_grad_enabled(), y.requires_grad, y.dtype, y.is_inference(), made.device.type)

    def work(world: sl.World) -> list[tuple[Any, ...]]:
        seen = []
        contexts: list[Any] = [
            torch.no_grad(),
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
        ]
        with contexts[world.rank] if world.rank < len(contexts) else torch.enable_grad():
            for _ in range(3):
                seen.append(state())
                world.runtime.sleep(1e-3)
            seen.append(state())
        return [*seen, state()]

    results = sl.simulate(work, 5).results
    assert results == sl.simulate(work, 5, threads=True).results
    assert len({result[0] for result in results}) == 5
    assert len({result[-1] for result in results}) == 1, "what a context has set ends with it"


def test_saved_tensor_hooks_belong_to_the_task_that_set_them() -> None:
    def work(world: sl.World) -> int:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(2):
                world.runtime.sleep(1e-3)
                x.exp()
        return len(packed)

    assert sl.simulate(work, 3).results == (2, 2, 2)


def thread_state() -> tuple[Any, ...]:
    """The parts of the state of this thread that a task may set and leave set."""
    return (
        torch.is_grad_enabled(),
        str(torch.get_default_device()),
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("xpu"),
        torch._C._is_multithreading_enabled(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


SETTERS: list[Callable[[], object]] = [
    lambda: torch.set_grad_enabled(False),
    lambda: torch.set_default_device("meta"),
    lambda: torch.set_autocast_enabled("cpu", True),
    lambda: torch.set_autocast_enabled("xpu", True),
    lambda: torch._C._set_multithreading_enabled(False),
    lambda: torch._C._autograd._saved_tensors_hooks_disable("refused"),
]


def test_state_that_a_task_leaves_set_stays_with_it() -> None:
    def work(world: sl.World) -> list[tuple[Any, ...]]:
        seen = [thread_state()]
        if world.rank < len(SETTERS):
            SETTERS[world.rank]()
        for _ in range(world.rank + 1):  # the ranks that have set something end first
            world.runtime.sleep(1e-3)
            seen.append(thread_state())
        return seen

    results = sl.simulate(work, 7).results
    assert results == sl.simulate(work, 7, threads=True).results
    assert len({result[-1] for result in results}) == 7
    assert set(results[6]) == {results[0][0]}, "the rank that sets nothing sees a new thread's state"


def test_default_devices_belong_to_the_rank() -> None:
    def work(world: sl.World) -> list[str]:
        seen = []
        for device in ("meta", "cpu", None):
            torch.set_default_device(device)
            world.barrier()
            seen.append(f"{torch.empty(1).device} {torch._C._len_torch_function_stack()}")
        return seen

    assert sl.simulate(work, 3).results == (["meta 1", "cpu 1", "cpu 0"],) * 3


def test_each_rank_may_run_an_event_loop_of_asyncio() -> None:
    async def numbers(world: sl.World) -> AsyncIterator[int]:
        for number in range(2):
            world.barrier()
            await asyncio.sleep(0)
            yield number

    async def total(world: sl.World) -> int:
        return sum([number async for number in numbers(world)]) + world.rank

    hooks = []

    def work(world: sl.World) -> int:
        result = asyncio.run(total(world))
        hooks.append(tuple(sys.get_asyncgen_hooks()))
        return result

    assert sl.simulate(work, 3).results == (1, 2, 3)
    assert set(hooks) == {(None, None)}


def test_the_refusal_of_a_wait_names_where_it_is() -> None:
    def work(world: sl.World) -> Any:
        return torch.func.grad(lambda x: (x * sl.allreduce(torch.ones(1), op="mean")).sum())(torch.ones(1))

    with pytest.raises(sl.errors.UnsupportedError, match=r"torch\.func transform .*FuncTorch.*threads=True"):
        sl.simulate(work, 2)


def test_a_wait_in_a_thread_of_the_user_needs_threads() -> None:
    def work(world: sl.World) -> list[torch.Tensor]:
        got: list[torch.Tensor] = []
        errors: list[Exception] = []

        def reduce() -> None:
            try:
                got.append(sl.allreduce(torch.ones(1), op="sum"))
            except sl.SynclineError as error:
                errors.append(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(reduce,))
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return got

    with pytest.raises(sl.errors.UnsupportedError, match="threads=True"):
        sl.simulate(work, 2)
    assert sl.simulate(work, 2, threads=True).results[1] == [torch.tensor([2.0])]


def backward(world: sl.World, hook: Callable[[], object]) -> float:
    """The gradient of 2x, by a backward pass that calls `hook`."""
    x: Any = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: (hook(), None)[1])
    (2 * x).sum().backward()
    world.barrier()
    return float(x.grad)


def test_a_backward_pass_that_neither_ends_nor_waits_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warned = threading.Event()

    def noticed(record: logging.LogRecord) -> bool:
        warned.set()
        return True

    monkeypatch.setattr(simulator, "SLOW_BACKWARD_S", 0.01)
    monkeypatch.setattr(simulator.logger, "filters", [noticed])

    def work(world: sl.World) -> float:
        return backward(world, lambda: warned.wait(30) if world.rank == 1 else None)

    assert sl.simulate(work, 2).results == (2.0, 2.0)
    (record,) = caplog.records
    assert re.search(r"backward pass of rank 1 .*threads=True", record.getMessage())


def test_threads_have_the_names_of_their_tasks() -> None:
    def work(world: sl.World) -> list[str]:
        names = [threading.current_thread().name]
        backward(world, lambda: names.append(threading.current_thread().name))
        threading.current_thread().name = f"mine {world.rank}"
        world.barrier()
        return [*names, threading.current_thread().name]

    results = sl.simulate(work, 2).results
    assert results[1] == ["rank1-main", "rank1-main-backward", "mine 1"]
    assert results[0][-1] == "mine 0"


def test_a_hook_may_reset_a_context_variable_by_its_token() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def work(world: sl.World) -> int:
        token = variable.set(5)
        backward(world, lambda: variable.reset(token))
        return variable.get()

    assert sl.simulate(work, 2).results == (0, 0)


def test_a_home_thread_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no state")

    monkeypatch.setattr(simulator, "ThreadState", fail)
    with pytest.raises(ValueError, match="no state"):
        sl.simulate(lambda world: world.barrier(), 2)


def test_state_left_by_a_hook_that_cannot_be_saved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(ThreadState):
        def save_and_reset(self, default_modes: bool = False) -> Callable[[], None] | None:
            if threading.current_thread().name == "rank1-main-backward":
                raise sl.errors.UnsupportedError("refused")
            return super().save_and_reset(default_modes)

    monkeypatch.setattr(simulator, "ThreadState", Refusing)
    with pytest.raises(sl.errors.UnsupportedError, match="refused"):
        sl.simulate(lambda world: backward(world, lambda: None), 2)


@pytest.mark.parametrize(("threads", "refused"), [(False, "rank1-main-backward"), (True, "rank1-main")])
def test_a_thread_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, threads: bool, refused: str) -> None:
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name == refused:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        sl.simulate(lambda world: backward(world, lambda: None), 2, threads=threads)


@pytest.mark.parametrize("threads", [False, True], ids=["greenlets", "threads"])
def test_an_event_that_fails_after_a_task_is_an_error(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    def work(world: sl.World) -> None:
        if world.rank == 0:
            world.transport.send(torch.zeros(100), 1)
        else:
            world.compute(1.0)

    monkeypatch.setattr(messages, "MAX_UNRECEIVED_BYTES", 10)
    with pytest.raises(sl.errors.ProtocolError, match="wait unreceived"):
        sl.simulate(work, 2, threads=threads)


def test_a_second_control_c_ends_a_simulation_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "PROGRESS_EVERY_S", 0.05)
    ended, homes = threading.Event(), []
    waited: list[bool] = []

    def work(world: sl.World) -> None:
        homes.append(threading.current_thread())
        main: Any = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)
        simulation: Any = world.transport
        while not simulation.network.simulator.stopping:
            time.sleep(1e-3)
        signal.pthread_kill(main, signal.SIGINT)
        waited.append(ended.wait(30))

    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt):
        sl.simulate(work, 1)
    drawn = torch.rand(2)
    ended.set()
    homes[0].join(30)
    assert waited == [True], "the simulation waited for the rank"
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)


def test_a_simulation_in_a_simulated_task() -> None:
    def outer(world: sl.World) -> float:
        inner = sl.simulate(lambda world: sl.allreduce(torch.ones(1), op="sum"), 3)
        return float(inner.results[0]) + float(sl.allreduce(torch.ones(1), op="sum"))

    assert sl.simulate(outer, 2).results == (5.0, 5.0)


def test_context_variables_set_in_a_hook_are_kept() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def work(world: sl.World) -> int:
        x: Any = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: (variable.set(world.rank + 1), None)[1])
        (2 * x).sum().backward()
        world.barrier()
        return variable.get()

    assert sl.simulate(work, 3).results == (1, 2, 3)
