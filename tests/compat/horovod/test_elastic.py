"""Elastic training: committed, restored, sent to all; called again after a failure while all ranks are alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.compat.horovod.context import Sum, init, is_initialized, size
from syncline.compat.horovod.elastic import ADDED, REMOVED, ElasticSampler, ObjectState, State, TorchState, run
from syncline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from syncline.compat.horovod.objects import allgather_object
from syncline.compat.horovod.ops import allreduce
from syncline.compat.horovod.optimizer import DistributedOptimizer
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Join, Kill
from tests.hunting import only_hunting, seeds
from tests.launch.runs import Runs


def on_ranks(ranks: int, what: Callable[[sl.World], Any], **options: Any) -> tuple[Any, ...]:
    def begin(world: sl.World) -> Any:
        init()
        return what(world)

    return sl.simulate(begin, ranks=ranks, **options).results


def alone(**values: Any) -> ObjectState:
    return ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, **values)


def model_of(world: sl.World) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + world.rank), momentum=0.9)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 3), value)).square().sum().backward()
    optimizer.step()


def weights(model: torch.nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


# State.


def test_a_commit_is_a_copy() -> None:
    state = alone(epoch=1, losses=[0.5])
    state.losses.append(0.25)
    state.commit()
    state.epoch, state.losses[0] = 2, 9.0
    state.losses.append(0.125)
    state.restore()
    assert (state.epoch, state.losses) == (1, [0.5, 0.25])
    state.losses.append(7.0)  # what was restored is not the commit itself either
    state.restore()
    assert state.losses == [0.5, 0.25]


def test_what_was_never_committed_goes_back_to_the_beginning() -> None:
    state = alone(epoch=1, losses=[0.5])
    state.epoch = 5
    state.losses.append(1.0)
    state.restore()
    assert (state.epoch, state.losses) == (1, [0.5])


def test_sync_sends_what_rank_0_has_now() -> None:
    def sync(world: sl.World) -> tuple[int, str]:
        state = TorchState(epoch=0, name="")
        state.epoch, state.name = 10 + world.rank, f"rank {world.rank}"  # as after a checkpoint was loaded
        state.sync()
        state.restore()  # and it counts as committed
        return state.epoch, state.name

    assert on_ranks(3, sync) == ((10, "rank 0"),) * 3


def test_a_value_with_a_methods_name_is_refused() -> None:
    with pytest.raises(SpecError, match=r"save=…: ObjectState has a method save\(\); give the value another name"):
        alone(save=1)
    with pytest.raises(SpecError, match="TorchState has a method restore"):
        TorchState(restore=torch.nn.Linear(1, 1))


def test_own_state_must_define_its_methods() -> None:
    state = State(bcast_object=lambda value: value, get_rank=lambda: 0)
    for name in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError, match=rf"State must define {name}\(\)"):
            getattr(state, name)()


def test_models_optimizers_and_schedulers_are_restored() -> None:
    def train(world: sl.World) -> None:
        model, optimizer = model_of(world)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, batch=0)
        state.sync()
        step(model, optimizer)
        scheduler.step()
        state.batch = 1
        state.commit()
        for _ in range(2):  # twice: restoring must not hand out the commit itself
            kept = weights(model), optimizer.param_groups[0]["lr"]
            for _ in range(3):
                step(model, optimizer)
                scheduler.step()
            after = weights(model)
            state.batch = 9
            assert after != kept[0]
            state.restore()
            assert (weights(model), optimizer.param_groups[0]["lr"], state.batch) == (*kept, 1)
            for _ in range(3):
                step(model, optimizer)
                scheduler.step()
            assert weights(model) == after  # the momentum was restored too
            state.restore()

    on_ranks(2, train)


def test_sync_makes_all_ranks_rank_0() -> None:
    def train(world: sl.World) -> tuple[list[float], float, int]:
        model, optimizer = model_of(world)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
        if world.rank == 0:  # the others' optimizers hold nothing yet
            step(model, optimizer)
            scheduler.step()
        state.sync()
        step(model, optimizer)
        return weights(model), optimizer.param_groups[0]["lr"], scheduler.last_epoch

    first, *others = on_ranks(3, train)
    assert others == [first, first]


def test_a_new_model_takes_the_place_of_the_old_one() -> None:
    def train(world: sl.World) -> bool:
        state = TorchState(model=torch.nn.Linear(1, 1))
        torch.manual_seed(world.rank)
        state.model = torch.nn.Linear(5, 5)
        state.sync()
        with pytest.raises(TypeError, match="was a Linear, not 3"):
            state.model = 3
        before = weights(state.model)
        state.commit()
        torch.nn.init.zeros_(state.model.weight)
        state.restore()
        return weights(state.model) == before

    assert on_ranks(2, train) == (True, True)


def test_a_commit_gathers_what_all_ranks_have_done() -> None:
    def train(world: sl.World) -> tuple[list[int], list[int]]:
        sampler = ElasticSampler(range(12))
        state = TorchState(sampler=sampler)
        done = sampler.get_indices(0, 2)
        sampler.record_indices(done)
        state.commit()
        sampler.record_indices(sampler.get_indices(1, 2))  # lost: it was not committed
        state.restore()
        return done, list(sampler)

    found = on_ranks(3, train)
    done = [index for one, _ in found for index in one]
    rest = [index for _, one in found for index in one]
    assert sorted(done + rest) == list(range(12))


# Hosts.


def test_nothing_interrupts_by_itself() -> None:
    def train(world: sl.World) -> int:
        state = TorchState(epoch=0)
        for _ in range(3):
            state.epoch += 1
            state.commit()
        return int(state.epoch)

    assert on_ranks(2, train) == (3, 3)


@pytest.mark.parametrize(("told", "skip"), [((ADDED,), False), ((REMOVED,), True), ((REMOVED, ADDED), False)])
def test_changed_hosts_interrupt_all_ranks_at_the_same_step(told: tuple[int, ...], skip: bool) -> None:
    def train(world: sl.World) -> tuple[int, bool]:
        state = TorchState(epoch=0)
        for _ in range(5):
            state.epoch += 1
            if state.epoch == 3 and world.rank == 0:
                for number, what in enumerate(told, start=1):
                    state.on_hosts_updated(float(number), what)
            try:
                state.commit()
            except HostsUpdatedInterrupt as interrupt:
                state.commit()  # once only
                return state.epoch, interrupt.skip_sync
        raise AssertionError("no interrupt")

    assert on_ranks(3, train) == ((3, skip),) * 3


# Running.


def test_after_a_failure_it_goes_on_from_the_last_commit() -> None:
    def main(world: sl.World) -> Any:
        model, optimizer = model_of(world)
        state = TorchState(model=model, optimizer=optimizer, batch=0)
        calls: list[list[Any]] = []

        @run
        def train(state: TorchState, most: int) -> list[float]:
            calls.append([state.batch, weights(model)])
            while state.batch < most:
                step(model, optimizer)
                state.batch += 1
                if state.batch == 3 and len(calls) == 1:
                    state.commit()
                if state.batch == 5 and len(calls) == 1:
                    shape = 2 if world.rank == 1 else 3  # differs: an error on every rank
                    allreduce(torch.ones(shape), name="loss")
            return weights(model)

        return train(state, most=8), [batch for batch, _ in calls], is_initialized()

    def straight(world: sl.World) -> list[float]:
        model, optimizer = model_of(world)
        TorchState(model=model, optimizer=optimizer).sync()
        for _ in range(8):
            step(model, optimizer)
        return weights(model)

    undisturbed = on_ranks(3, straight)
    for found, expected in zip(on_ranks(3, main), undisturbed, strict=True):
        assert found == (expected, [0, 3], True)


def test_a_distributed_optimizer_goes_on_in_the_new_world() -> None:
    def main(world: sl.World, fails: bool) -> list[float]:
        model, plain = model_of(world)
        optimizer = DistributedOptimizer(plain, named_parameters=model.named_parameters())
        state = TorchState(model=model, optimizer=optimizer, batch=0, failed=not fails)
        state.register_reset_callbacks([lambda: setattr(state, "failed", True)])

        @run
        def train(state: TorchState) -> list[float]:
            while state.batch < 6:
                step(model, optimizer, value=0.1 * (1 + world.rank))
                state.batch += 1
                if state.batch == 2:
                    state.commit()
                if state.batch == 4 and not state.failed:
                    raise HorovodInternalError("an operation failed")
            return weights(model)

        return train(state)

    disturbed = on_ranks(2, lambda world: main(world, True))
    assert disturbed == on_ranks(2, lambda world: main(world, False))
    assert disturbed[0] == disturbed[1]


def test_an_interrupt_restores_nothing() -> None:
    def main(world: sl.World) -> tuple[list[int], int]:
        state = TorchState(batch=0)
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(state.batch)])

        @run
        def train(state: TorchState) -> list[int]:
            state.batch += 1
            if state.batch == 1:
                raise HostsUpdatedInterrupt(skip_sync=False)
            if state.batch == 2:
                state.batch = 2 + 10 * world.rank
                raise HostsUpdatedInterrupt(skip_sync=True)
            return resets

        return train(state), state.batch

    assert on_ranks(2, main) == (([1, 2], 3), ([1, 12], 13))  # the second time nothing was sent


def test_callbacks_are_called_in_order_in_the_new_world() -> None:
    def main(world: sl.World) -> list[str]:
        state = TorchState(failed=False)
        heard: list[str] = []

        def first() -> None:
            state.failed = True
            state.commit()
            heard.append(f"first of {int(allreduce(torch.ones(1), op=Sum, name='count'))}")

        state.register_reset_callbacks([first, lambda: heard.append("second")])

        @run
        def train(state: TorchState) -> None:
            if not state.failed:
                raise HorovodInternalError("an operation failed")

        train(state)
        return heard

    assert on_ranks(2, main) == (["first of 2", "second"],) * 2


def test_repeated_failures_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: sl.World) -> int:
        state = TorchState(batch=0)
        calls: list[int] = []

        @run
        def train(state: TorchState) -> None:
            calls.append(state.batch)
            if len(calls) == 1:
                state.batch = 4
                state.commit()
            raise HorovodInternalError("as always")

        with pytest.raises(HorovodInternalError, match="as always"):
            train(state)
        assert calls == [0, 4, 4]
        return int(state.batch)

    with caplog.at_level(logging.ERROR, logger="syncline"):
        assert on_ranks(2, main) == (4, 4)
    assert "3 failures without a commit between them" in caplog.text


def test_other_errors_are_the_users() -> None:
    def main(world: sl.World) -> None:
        @run
        def train(state: TorchState) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            train(TorchState(epoch=0))

    on_ranks(2, main)


def test_lost_rank_ends_training_with_the_last_commit(caplog: pytest.LogCaptureFixture) -> None:
    left: dict[int, int] = {}

    def main(world: sl.World) -> str:
        state = TorchState(batch=0)

        @run
        def train(state: TorchState) -> None:
            while True:
                world.compute(0.1)
                allreduce(torch.ones(3), name="gradient")
                state.batch += 1
                if state.batch == 4:
                    state.commit()

        try:
            train(state)
        except HorovodInternalError as error:
            left[world.rank] = state.batch
            return str(error)
        raise AssertionError("it went on")

    with caplog.at_level(logging.ERROR, logger="syncline"):
        found = on_ranks(3, main, faults=[Kill(2, at=1.0)], timeout=20.0, return_exceptions=True)
    assert found[2] is None
    assert left == {0: 4, 1: 4}
    assert all("rank 2" in error for error in found[:2]), found
    assert caplog.text.count("rank 2 is gone") == 2
    assert "it is not replaced" in caplog.text


# Real processes.

AGAIN = """
import torch
from syncline.compat.horovod.context import init, shutdown
from syncline.compat.horovod.elastic import ElasticSampler, TorchState, run
from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.ops import allreduce
from syncline.compat.horovod.optimizer import DistributedOptimizer

init()
torch.manual_seed(rank)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = ElasticSampler(range(24))
state = TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0)
calls = []

@run
def train(state):
    calls.append(state.batch)
    for number, index in enumerate(sampler):
        optimizer.zero_grad()
        model(torch.full((1, 3), 0.01 * index)).sum().backward()
        optimizer.step()
        sampler.record_batch(number, 1)
        state.batch += 1
        if state.batch % 4 == 0:
            state.commit()
        if state.batch == 6 and len(calls) < 3:
            WRONG
    return state.batch

total = train(state)
post(f"done{rank}", [calls, total, [float(w) for p in model.parameters() for w in p.detach().flatten()]])
shutdown()
"""
"""Three steps of eight are done twice: the first failure goes back to the commit at 4, and so does the second."""


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(  # an error on every rank, from the coordinator
            'allreduce(torch.ones(2 + rank % 2), name="differs")', marks=only_hunting
        ),
        pytest.param('raise HorovodInternalError("on every rank by itself")', marks=only_hunting),
        'if rank == 1: raise HorovodInternalError("on one rank alone")',  # the others learn of it at their next call
    ],
)
def test_processes_meet_again(runs: Runs, wrong: str) -> None:
    script = runs.script(AGAIN.replace("WRONG", wrong))
    done = runs.run("run", "-n", "3", script)
    assert done.code == 0, done.describe()
    found = [runs.read(f"done{rank}") for rank in range(3)]
    assert found[1] == found[2] == found[0]
    assert found[0].startswith("[[0, 4, 4], 8, [")


LOST = """
import signal, torch
from syncline.compat.horovod.context import init
from syncline.compat.horovod.elastic import TorchState, run
from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.ops import allreduce

init()
state = TorchState(batch=0)

@run
def train(state):
    while state.batch < 1000:
        allreduce(torch.ones(3), name="gradient")
        state.batch += 1
        if state.batch == 4:
            state.commit()
        if state.batch == 6 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

try:
    train(state)
except HorovodInternalError as error:
    post(f"left{rank}", f"{state.batch} {error}")
    raise
"""


def test_killed_process_is_not_replaced(runs: Runs) -> None:
    done = runs.run("run", "-n", "3", "--on-failure", "continue", runs.script(LOST))
    assert done.code == 137, done.describe()
    for rank in (0, 1):
        assert runs.read(f"left{rank}").startswith("4 "), done.describe()
    assert "rank 2 is gone (" in done.err
    assert "save checkpoints to files besides commits" in done.err


# Elastic jobs: the number of workers changes.

EPOCHS, SAMPLES = 4, 24


def train_elastic(world: sl.World) -> tuple[int, list[int], list[float], list[int]]:
    """Steps since the start, the sizes after each reset, the weights, and the samples of each epoch."""
    init()
    model, plain = model_of(world)
    optimizer = DistributedOptimizer(plain, named_parameters=model.named_parameters())
    sampler = ElasticSampler(range(SAMPLES))
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0, epoch=0, trained=[])
    sizes: list[int] = []
    state.register_reset_callbacks([lambda: sizes.append(size())])

    @run
    def train(state: TorchState) -> int:
        while state.epoch < EPOCHS:
            for number, index in enumerate(sampler):
                world.compute(0.1)
                step(model, optimizer, value=0.01 * index)
                sampler.record_batch(number, 1)
                state.batch += 1
                state.trained = state.trained + allgather_object(index)
                if state.batch % 2 == 0:
                    state.commit()
            assert set(state.trained) == set(range(SAMPLES)), "each sample at least once"
            state.epoch += 1
            state.trained = []
            sampler.set_epoch(state.epoch)
            state.commit()
        return int(state.batch)

    return train(state), sizes, weights(model), list(sampler)


def survive_elastic(seed: int) -> None:
    """Three workers, two of which may be killed; up to two join. The seed draws the moments."""
    random = Random(seed)
    victims = random.sample(range(3), random.randrange(3))
    faults: list[Fault] = [Kill(victim, at=random.uniform(0.0, 4.0)) for victim in victims]
    faults += [Join(at=random.uniform(0.0, 1.5)) for _ in range(random.randrange(3))]
    found = sl.simulate(train_elastic, ranks=3, elastic=(1, 5), faults=faults, seed=seed, timeout=30.0).results
    ended = [one for one in found if one is not None]
    assert len(ended) >= 3 - len(victims)
    assert len({(steps, tuple(weights)) for steps, _, weights, _ in ended}) == 1, "the same on all workers"


@pytest.mark.hunt
def test_survivors_restore_and_newcomers_get_the_state() -> None:
    hunt_cases(survive_elastic, seeds(8, 1000), "tests.compat.horovod.test_elastic.survive_elastic({seed})")


def test_a_newcomer_enters_at_a_commit_and_nothing_is_repeated() -> None:
    found = sl.simulate(train_elastic, ranks=2, elastic=(1, 3), faults=[Join(at=1.0)]).results
    assert [sizes for _, sizes, _, _ in found] == [[3], [3], []]
    assert len({tuple(weights) for _, _, weights, _ in found}) == 1


def test_elastic_job_refuses_two_ways_of_training() -> None:
    def both(world: sl.World, first: bool) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if first:
            init()
        sl.distribute(model, optimizer)
        init()

    text = r"by sl\.distribute or by Horovod's API, not by both"
    with pytest.raises(IncompatibleError, match=text):
        sl.simulate(lambda world: both(world, True), ranks=2, elastic=(1, 2))
    with pytest.raises(UnsupportedError, match=text):
        sl.simulate(lambda world: both(world, False), ranks=2, elastic=(1, 2))


CHANGING = """
import signal, torch
import syncline.compat.horovod.torch as hvd

member = int(os.environ["SYNCLINE_MEMBER"])
hvd.init()
torch.manual_seed(member)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, ended=False)

@hvd.elastic.run
def train(state):
    post(f"in{member}of{hvd.size()}", state.batch)
    while not state.ended:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state.batch += 1
        if member == 1 and state.batch == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.batch % 4 == 0:
            state.ended = bool(hvd.broadcast_object((here / "go").exists()))
            state.commit()

train(state)
post(f"done{member}", [float(w) for p in model.parameters() for w in p.detach().flatten()])
hvd.shutdown()
"""


def test_horovodrun_follows_the_hosts_of_a_script(runs: Runs) -> None:
    discover = runs.folder / "hosts.sh"
    discover.write_text(f"#!/bin/sh\ncat {runs.folder}/hosts\n")
    discover.chmod(0o755)
    hosts = runs.folder / "hosts"
    hosts.write_text("localhost:2\n")
    options = ("-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover))
    job = runs.start("horovodrun", *options, "python", runs.script(CHANGING))
    assert runs.read("in0of2") == "0"
    assert runs.read("in0of1") == "4", "the survivor is back at its last commit"
    assert int(runs.read("in2of2")) % 4 == 0, "the restarted worker has the state of a commit"
    hosts.write_text("localhost:3\n")
    runs.read("in3of3")
    (runs.folder / "in0of2").unlink()
    hosts.write_text("localhost:2\n")
    runs.read("in0of2")
    runs.post("go")
    assert job.finish().code == 0, job.describe()
    assert runs.read("done0") == runs.read("done2"), job.describe()
    assert not (runs.folder / "done3").exists()
    assert "rank 3 has left the job, and the others go on" in job.err
    runs.assert_nothing_left()
