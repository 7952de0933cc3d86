"""Master and workers: in step, with a fraction, each at its own pace, and with sub-masters between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, PeerLostError, SpecError
from syncline.server import network_of
from syncline.strategies import Master, strategy_run
from syncline.strategies.master import MasterRun, momentum_left
from syncline.testing import hunt
from syncline.transports import Transport
from syncline.transports.faults import Fault, Kill, Slow
from syncline.world import Simulation
from syncline.world.simulation import ExtraProcess
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp
from tests.strategies.served_cases import Tags, apart, loss_of, results, servers, step_tag, together

SEEDS = 1000 if os.environ.get("SYNCLINE_HUNT") else 4
"""For each of the hunts below."""
WORKERS, STEPS = 4, 4


# In step.


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize(("workers", "dedicated"), [(2, 0), (3, 1), (4, 2)])
def test_with_sync_it_has_the_bits_of_synchronous_training(optimizer: str, workers: int, dedicated: int) -> None:
    due = together(optimizer, workers, 5)
    for found in results(apart(optimizer, "master", 5), workers, dedicated):
        assert torch.equal(found, due)


@pytest.mark.parametrize(("workers", "masters"), [(2, 2), (3, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("dedicated", [0, 5])
def test_a_tree_with_the_same_order_of_sums_has_the_same_bits(workers: int, masters: int, dedicated: int) -> None:
    """((g0 + g1) + g2) + g3 is also what a tree adds up if only its first group has several workers."""
    due = together("momentum", workers, 5)
    for found in results(apart("momentum", f"master(masters={masters})", 5), workers, dedicated):
        assert torch.equal(found, due)


@pytest.mark.parametrize(("workers", "masters"), [(4, 2), (6, 2), (7, 3)])
def test_other_trees_differ_by_rounding(workers: int, masters: int) -> None:
    """(g0 + g1) + (g2 + g3): floats add up otherwise."""
    due = together("momentum", workers, 5)
    found = results(apart("momentum", f"master(masters={masters})", 5), workers)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], due, rtol=1e-5, atol=1e-6)


def test_a_fraction_of_the_workers_makes_a_step() -> None:
    """The slowest of four is late in every step: its gradients do not count, and the others never wait for it."""
    steps = 4

    def work(world: sl.World) -> tuple[Tensor, int, float]:
        model = mlp()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        run = sl.distribute(model, optimizer, strategy="master(fraction=0.75)", algorithm="ring")
        assert isinstance(run, MasterRun)
        for step in range(steps if world.rank < 3 else 1):
            optimizer.zero_grad()
            world.compute(1.0 if world.rank < 3 else 2.5)
            backward(loss_of(model, world.rank, step))
            optimizer.step()
        ended = float(world.runtime.now())
        run.close()
        return flat(model), run.late_steps, ended

    found = results(work, 4)
    due = together("momentum", 3, steps)
    assert all(torch.equal(found[rank][0], due) for rank in range(3))
    assert [late for _, late, _ in found] == [0, 0, 0, 1]
    assert max(ended for _, _, ended in found[:3]) < 1.1 * steps


# At their own pace.


def test_each_gradient_is_a_step() -> None:
    """Worker 1 takes turns with worker 0, a second later: the weights are those of one process that does the same."""
    steps = 4

    def work(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with sl.distribute(model, optimizer, strategy="master(sync=False)", algorithm="ring"):
            world.compute(1.0 + world.rank)
            for step in range(steps):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
                world.compute(2.0)
        return flat(model)

    def alone() -> Tensor:
        synchronous, views = mlp(), [mlp(), mlp()]
        optimizer = OPTIMIZERS["momentum"](synchronous.parameters())
        for turn in range(2 * steps):
            rank, step = turn % 2, turn // 2
            views[rank].zero_grad()
            backward(loss_of(views[rank], rank, step))
            for parameter, other in zip(synchronous.parameters(), views[rank].parameters(), strict=True):
                parameter.grad = other.grad
            optimizer.step()
            views[rank].load_state_dict(synchronous.state_dict())
        return flat(synchronous)

    assert torch.equal(results(work, 2)[1], alone())


def pushed_by(rate: float, strategy: str) -> Tensor:
    """Worker 0 takes three steps while worker 1 computes one; one weight, gradient 1: what worker 1's step has done."""

    def work(world: sl.World) -> Tensor:
        weight = nn.Parameter(torch.zeros(2))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        run = sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")
        for _ in range(3 if world.rank == 0 else 1):
            world.compute(1.0 if world.rank == 0 else 3.5)
            optimizer.zero_grad()
            backward(weight[world.rank])
            optimizer.step()
        run.close()
        return weight.detach().clone()

    found: Tensor = results(work, 2)[1]
    return found


def test_a_stale_gradient_counts_less_with_damp() -> None:
    assert pushed_by(0.3, "master(sync=False)").tolist() == pytest.approx([-0.9, -0.3])
    assert pushed_by(0.3, "master(sync=False, damp=True)").tolist() == pytest.approx([-0.9, -0.1])


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_momentum_left_keeps_the_mean_age_of_gradients(workers: int) -> None:
    """The two filters are played: an impulse of a gradient, and when it comes into the weights."""

    def mean_age(momentum: float, others: float) -> float:
        velocity = smeared = weight = total = 0.0
        for age in range(2000):
            smeared = others * smeared + (1.0 - others) * (1.0 if age == 0 else 0.0)
            velocity = momentum * velocity + smeared
            weight += velocity
            total += age * velocity
        return total / weight

    left = momentum_left(0.9, workers)
    assert mean_age(left, 1.0 - 1.0 / workers) == pytest.approx(mean_age(0.9, 0.0), rel=1e-6)


def test_many_workers_leave_no_momentum() -> None:
    assert momentum_left(0.9, 10) == pytest.approx(0.0, abs=1e-9)
    assert momentum_left(0.9, 11) == 0.0
    assert momentum_left(0.0, 1) == 0.0


def rules_of(strategy: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[str]:
    def work(world: sl.World) -> list[str]:
        model = mlp()
        run = sl.distribute(model, make(list(model.parameters())), strategy=strategy, algorithm="ring")
        assert isinstance(run, MasterRun)
        run.close()
        return [repr(rule) for rule in run.rules]

    found: list[str] = results(work, 4)[0]
    return found


def test_the_master_uses_momentum_left() -> None:
    corrected = "master(sync=False, correct_momentum=True)"
    (rule,) = rules_of(corrected, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.75, nesterov=True))
    assert rule == "torch('SGD', lr=0.1)"
    (rule,) = rules_of(corrected, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.8))
    assert rule == f"torch('SGD', lr=0.1, momentum={momentum_left(0.8, 4)})"
    (rule,) = rules_of("master(sync=False)", lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.8))
    assert rule == "torch('SGD', lr=0.1, momentum=0.8)"
    with pytest.raises(IncompatibleError, match="lowers the momentum of SGD"):
        rules_of(corrected, lambda own: torch.optim.Adam(own))


# Refusals.


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("master(fraction=0.0)", "in \\(0, 1\\]"),
        ("master(fraction=True)", "in \\(0, 1\\]"),
        ("master(masters=0)", "at least 1"),
        ("master(sync=1)", "True or False"),
        ("master(damp=True)", "give sync=False too"),
        ("master(correct_momentum=True)", "give sync=False too"),
        ("master(sync=False, fraction=0.5)", "leave fraction out"),
    ],
)
def test_contradictory_arguments_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        sl.simulate(lambda world: sl.distribute(mlp(), OPTIMIZERS["sgd"](mlp().parameters()), strategy=spec), 1)


def test_its_repr_is_its_spec() -> None:
    assert repr(Master(fraction=0.5, masters=2)) == "master(fraction=0.5, masters=2)"


# State, and faults.


@pytest.mark.parametrize("strategy", ["master", "master(masters=2)"])
def test_a_resumed_run_equals_an_uninterrupted_one(strategy: str) -> None:
    def train(world: sl.World, stop: int | None) -> Tensor:
        model = mlp(seed=world.rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        run = sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")
        for step in range(6):
            if step == stop:
                world.barrier()
                state = strategy_run(run).state_dict()
                assert state["shared"]["state"]["clocks"] == [step] * world.size
                run.close()
                model = mlp(seed=7)
                optimizer = OPTIMIZERS["momentum"](model.parameters())
                run = sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")
                strategy_run(run).load_state_dict(state)
            optimizer.zero_grad()
            backward(loss_of(model, world.rank, step))
            optimizer.step()
        world.compute(0.1)  # the step counts are published at intervals
        control = strategy_run(run).control_channel()
        assert control is not None
        assert control.steps() == [6] * world.size
        world.barrier()
        run.close()
        return flat(model)

    whole, cut = results(partial(train, stop=None), 4), results(partial(train, stop=3), 4)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


def test_a_codec_works_both_ways_in_a_tree() -> None:
    """fp16 on every link: near to exact, and the same on all workers."""
    due = together("sgd", 4, 5)

    def work(world: sl.World) -> Tensor:
        model = mlp(seed=world.rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with sl.distribute(model, optimizer, strategy="master(masters=2)", codec="cast('fp16')", algorithm="ring"):
            for step in range(5):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
        return flat(model)

    for found in results(work, 4):
        torch.testing.assert_close(found, due, rtol=0, atol=2e-3)


def test_buffers_reach_the_root() -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        torch.manual_seed(world.rank)
        norm = nn.BatchNorm1d(3)
        model = nn.Sequential(norm, nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy="master(masters=2)", algorithm="ring")
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(torch.randn(4, 3) + world.rank).sum())
            optimizer.step()
        control = strategy_run(run).control_channel()
        assert control is not None
        control.finish()
        world.barrier()
        assert norm.running_mean is not None
        own = norm.running_mean.clone()
        with run.agreed():
            agreed = norm.running_mean.clone()
        world.barrier()
        run.close()
        return own, agreed

    found = results(work, 4)
    for _, agreed in found:
        assert torch.equal(agreed, found[0][0])
    assert not torch.equal(found[3][0], found[0][0])


def test_an_evaluator_observes_the_root_of_a_tree() -> None:
    seen: list[Tensor] = []

    def evaluate(channel: Transport) -> None:
        model = mlp(seed=5)
        control = Master(masters=2).observe(model, network_of(channel, 4, 3, 1))
        assert control is not None
        while control.steps() != [3] * 4:
            channel.runtime.sleep(0.01)
        control.load_weights(model)
        seen.append(flat(model))
        control.request_stop()
        control.close()

    def work(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with sl.distribute(model, optimizer, strategy="master(masters=2)", algorithm="ring") as run:
            for step in range(3):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
            weights, control = flat(model), strategy_run(run).control_channel()
            assert control is not None
            while not control.stop_requested():  # any answer of the root tells
                control.steps()
                world.runtime.sleep(0.01)
        return weights

    aside = [*servers(4, 3, evaluators=1), ExtraProcess(evaluate, role="evaluator")]
    found = sl.simulate(work, 4, extra=aside).results
    assert all(torch.equal(seen[0], weights) for weights in found)


@pytest.mark.parametrize(
    ("strategy", "victim", "words"),
    [
        ("master", 0, "worker 0 was the master"),
        ("master(masters=2)", 2, r"worker 2 was the sub-master of workers \[2, 3\]"),
    ],
)
def test_an_error_names_the_lost_master(strategy: str, victim: int, words: str) -> None:
    found = sl.simulate(
        apart("sgd", strategy, 5, pace=lambda rank, step: 1.0), 4, faults=[Kill(victim, at=2.5)], return_exceptions=True
    )
    with pytest.raises(PeerLostError, match=words) as raised:
        raise found.results[3]
    assert raised.value.peer == victim


# Hunts.


class Journal:
    """What the workers know themselves: pushed, acknowledged, late."""

    def __init__(self) -> None:
        self.pushed: set[tuple[int, int]] = set()
        self.kept: set[tuple[int, int]] = set()
        self.late: set[tuple[int, int]] = set()
        self.last = torch.zeros(0)

    def check(self, weights: Tensor, own: set[tuple[int, int]]) -> None:
        seen = {(int(worker), int(step)) for worker, step in weights.nonzero()}
        assert seen <= self.pushed, f"{seen - self.pushed} were never pushed"
        assert own <= seen, f"{own - seen} were acknowledged, and are not there"
        assert not self.late & seen, f"{self.late & seen} were late, and are there"

    def check_end(self, found: Simulation) -> None:
        self.check(self.last, self.kept)
        alive = set(range(WORKERS)) - set(found.killed)
        assert {(worker, STEPS - 1) for worker in alive} <= self.kept | self.late


def tagged(journal: Journal, strategy: str, once: float | None, deaths: bool = False) -> Callable[[sl.World], None]:
    """Every step leaves its mark; `once` is what a mark must be where no step's mean is of fewer than all."""

    def work(world: sl.World) -> None:
        model = Tags(WORKERS, STEPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=WORKERS)
        run = sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")
        assert isinstance(run, MasterRun)
        own: set[tuple[int, int]] = set()
        draw = random.Random(world.rank)
        for step in range(STEPS):
            world.compute(draw.choice([0.1, 0.2, 1.0]))
            journal.pushed.add((world.rank, step))
            late = run.late_steps
            step_tag(model, optimizer, world.rank, step)
            (own if run.late_steps == late else journal.late).add((world.rank, step))
            journal.kept |= own
            journal.check(model.seen.detach(), own)
            if once is not None:
                assert set(model.seen.detach().view(-1).tolist()) <= {0.0, once}
        control = run.control_channel()
        assert control is not None
        control.finish()
        while deaths and any(
            count < STEPS for rank, count in enumerate(control.steps()) if rank not in world.transport.lost()
        ):
            world.runtime.sleep(0.05)
        if not deaths:
            world.barrier()
        with run.agreed():
            journal.last = model.seen.detach().clone()
        run.close()

    return work


@pytest.mark.hunt
@pytest.mark.parametrize("masters", [1, 2])
@pytest.mark.parametrize(("sync", "once"), [(True, -1.0), (False, -float(WORKERS))])
@pytest.mark.parametrize("faults", [(), (Slow(1, 4.0),)])
def test_every_step_counts_once(masters: int, sync: bool, once: float, faults: tuple[Fault, ...]) -> None:
    strategy = f"master(sync={sync}, masters={masters})"
    for seed in range(SEEDS):
        journal = Journal()
        hunt(tagged(journal, strategy, once), WORKERS, [seed], faults=faults, invariant=journal.check_end)


@pytest.mark.hunt
def test_a_late_step_does_not_count() -> None:
    late = 0
    for seed in range(SEEDS):
        journal = Journal()
        faults = (Slow(1 + seed % 3, 5.0),)
        found = sl.simulate(tagged(journal, "master(fraction=0.5)", None), WORKERS, faults=faults, seed=seed)
        journal.check_end(found)
        late += len(journal.late)
    assert late


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", ["master", "master(sync=False)", "master(fraction=0.7)", "master(masters=2)"])
def test_no_worker_waits_for_a_killed_one(strategy: str) -> None:
    """Not in chaos mode, where a kill may strike before there is a master."""
    for seed in range(SEEDS):
        journal, victim = Journal(), seed % WORKERS
        faults = (Kill(victim, at=random.Random(seed).uniform(0.05, 3.0)), Slow((victim + 1) % WORKERS, 3.0))
        work = tagged(journal, strategy, None, deaths=True)
        found = sl.simulate(work, WORKERS, faults=faults, seed=seed, extra=servers(WORKERS, 3))
        assert found.killed == (victim,)
        journal.check_end(found)
