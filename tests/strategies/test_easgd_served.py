"""Elastic averaging with the centre at the servers: nobody waits for anybody, and nothing is lost on the way."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.server import Client, Future, network_of
from syncline.strategies.easgd import EASGD
from syncline.testing import Pool
from syncline.transports import Transport
from syncline.transports.faults import Kill
from syncline.world.simulation import ExtraProcess
from tests.strategies.cases import backward, flat, mlp, on_gloo
from tests.strategies.hunts.easgd_bowls import Bowl, bowls, distributed, reference, shown, step
from tests.strategies.served_cases import results, servers

CATCH = EASGD(period=1, alpha=0.225, sync=False)


def test_the_gradient_and_the_pull_are_taken_at_the_same_x() -> None:
    """f = x²/2, x = 1, x̃ = 0, α = .225, η = .1: x = 1 − .1 − .225, x̃ = .225."""
    (x, centre), (other, same) = results(bowls(CATCH, (1.0, 0.0), 0.1, 1), 2, dedicated=1)
    assert x == pytest.approx(0.675)
    assert centre == same == pytest.approx(0.225)
    # Whoever comes second finds the centre moved: 0 − .225 (0 − .225), or nothing at all.
    assert other in (0.0, pytest.approx(0.225**2))


@pytest.mark.parametrize("dedicated", [0, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_rate_the_sum_stays(dedicated: int, momentum: float) -> None:
    starts = (1.0, -0.5, 4.0)

    def work(world: sl.World) -> tuple[float, float]:
        model = Bowl()
        optimizer, run = distributed(model, EASGD(period=2, sync=False, momentum=momentum), 0.0)
        with torch.no_grad():
            for own in (model.x, *run.lookahead.x.values()):
                own.fill_(starts[world.rank])
        world.barrier()
        for _ in range(9):
            world.compute(0.1 * (1 + world.rank))
            step(model, optimizer)
        run.control_channel().finish()
        world.barrier()
        found = model.x.item(), shown(run).item()
        run.close()
        return found

    found = results(work, 3, dedicated=dedicated)
    assert sum(x for x, _ in found) + found[0][1] == pytest.approx(sum(starts), rel=1e-6)


def test_an_exchange_comes_with_every_period() -> None:
    """One worker moves, from 0 by 1 a step; the other stands still. α = .25, period 2."""

    def work(world: sl.World) -> list[float]:
        model = Bowl()
        optimizer, run = distributed(model, EASGD(period=2, alpha=0.25, sync=False), 1.0)
        seen = []
        for _ in range(5 if world.rank == 0 else 0):
            optimizer.zero_grad()
            backward(-model.x.sum())
            optimizer.step()
            seen.append(model.x.item())
        run.control_channel().finish()
        world.barrier()
        seen.append(shown(run).item())
        run.close()
        return seen

    moved, still = results(work, 2, dedicated=1)
    #                  1 before the second: d = .25     2.75 before the fourth, x̃ = .25: d = .625
    assert moved == [1.0, 1.75, 2.75, 3.125, 4.125, 0.875]
    assert still == [0.875]


def test_the_test_notices_a_push_that_replaces() -> None:
    """The planted mistake: the centre is set, not added to, and what others gave is gone."""
    push = Client.push

    def replace(client: Client, keys: Any, values: Tensor, **options: Any) -> Future:
        if values.numel() == 1 and options.get("handler") is None:
            options["handler"] = "assign"
        return push(client, keys, values, **options)

    starts = (1.0, -0.5, 4.0)
    with mock.patch.object(Client, "push", replace):
        found = results(bowls(EASGD(period=1, sync=False), starts, 0.0, 4), 3, dedicated=1)
    assert abs(sum(x for x, _ in found) + found[0][1] - sum(starts)) > 0.1


def test_no_worker_waits_for_a_slow_one() -> None:
    def work(world: sl.World) -> float:
        model = Bowl(1.0)
        optimizer, run = distributed(model, EASGD(period=2, sync=False), 0.1)
        for _ in range(20):
            world.compute(1.0 if world.rank else 10.0)
            step(model, optimizer)
        ended = world.runtime.now()
        run.close()
        return float(ended)

    slow, *fast = sl.simulate(work, ranks=3).results
    assert slow >= 200.0
    assert all(ended < 25.0 for ended in fast)


def test_the_others_continue_without_a_killed_worker() -> None:
    def work(world: sl.World) -> tuple[int, list[int]]:
        model = Bowl(1.0)
        optimizer, run = distributed(model, EASGD(period=3, sync=False), 0.1)
        for _ in range(10):
            world.compute(1.0)
            step(model, optimizer)
        run.control_channel().finish()
        steps = run.control_channel().steps()
        run.close()
        return run.stats.steps, steps

    found = sl.simulate(work, 3, faults=(Kill(1, at=4.5),), extra=servers(3, 1))
    assert set(found.killed) == {1}
    for rank in (0, 2):
        steps, told = found.results[rank]
        assert steps == told[rank] == 10, "the exact number, though a tick stands for three"


def test_close_leaves_the_centre_and_the_buffers_of_one() -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        optimizer, run = distributed(model, EASGD(period=2, sync=False), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            backward(model(torch.randn(8, 6)).square().mean())
            optimizer.step()
        run.control_channel().finish()
        world.barrier()
        centre = shown(run)
        world.barrier()
        run.close()
        return centre, flat(model)

    found = results(work, 3)
    for centre, left in found:
        assert torch.equal(centre, found[0][0])
        assert torch.equal(left, centre)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_continues_from_its_state(momentum: float) -> None:
    """Each worker has its own weights again, and the servers the centre; the sum is what it was."""

    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        strategy = EASGD(period=2, sync=False, momentum=momentum)
        model = Bowl(float(2 + world.rank))
        optimizer, run = distributed(model, strategy, 0.1)
        for _ in range(5):
            step(model, optimizer)
        world.barrier()
        state = run.state_dict()
        world.barrier()
        own, centre = torch.cat([flat(model), *(each.clone() for each in run.own)]), shown(run)
        world.barrier()
        run.close()
        fresh = Bowl()
        optimizer, run = distributed(fresh, strategy, 0.1)
        run.load_state_dict(state)
        world.barrier()
        found = own, centre, torch.cat([flat(fresh), *(each.clone() for each in run.own)]), shown(run)
        assert run.steps_since_average == 1
        world.barrier()
        step(fresh, optimizer)
        run.close()
        return found

    for own, centre, again, likewise in results(work, 2):
        assert torch.equal(own, again)
        assert torch.equal(centre, likewise)


def test_one_worker_trains_alone_and_is_its_own_centre() -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor, list[int]]:
        model = mlp()
        optimizer, run = distributed(model, EASGD(period=2, sync=False, momentum=0.9), 0.1)
        train_plainly(model, optimizer)
        run.control_channel().finish()
        centre, steps = shown(run), run.control_channel().steps()
        run.close()
        return flat(model), centre, steps

    model = mlp()
    train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own, centre, steps = results(work, 1)[0]
    assert torch.equal(own, flat(model))
    assert torch.equal(centre, own)
    assert steps == [5]


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    draw = torch.Generator().manual_seed(3)
    for _ in range(5):
        x, y = torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def test_with_a_codec_the_sum_stays_up_to_the_residual() -> None:
    """Σ x_i + x̃ + Σ residual_i; the centre is read as it is."""

    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = nn.Linear(400, 1, bias=False)
        optimizer, run = distributed(model, EASGD(period=1, sync=False), 0.0, codec="topk(0.25)")
        with torch.no_grad():
            model.weight.add_(torch.randn(1, 400, generator=torch.Generator().manual_seed(world.rank)))
        world.barrier()
        before = flat(model).clone()
        centre = shown(run)
        world.barrier()
        for _ in range(4):
            optimizer.zero_grad()
            backward(model(torch.ones(1, 400)).sum())
            optimizer.step()
        run.control_channel().finish()
        world.barrier()
        found = before + centre / world.size, flat(model).clone(), shown(run), run.client.residual.clone()
        assert run.stats.bytes_wire < run.stats.bytes_logical
        run.close()
        return found

    found = results(work, 3, dedicated=1)
    before, own, kept = (sum(each[at] for each in found) for at in (0, 1, 3))
    torch.testing.assert_close(own + found[0][2] + kept, before, rtol=1e-5, atol=1e-5)
    assert kept.abs().max() > 1e-3


def test_a_codec_of_whole_matrices_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="servers hold one row of keys"):
        sl.simulate(lambda world: distributed(Bowl(), EASGD(sync=False), 0.1, codec="powersgd(1)", algorithm="auto"), 2)


def test_an_observer_reads_the_centre() -> None:
    def work(world: sl.World) -> float:
        model = Bowl(1.0)
        optimizer, run = distributed(model, EASGD(period=2, sync=False), 0.1)
        for _ in range(4):
            step(model, optimizer)
        run.control_channel().finish()
        world.barrier()
        found = shown(run).item()
        run.control_channel().post("done", [found])
        while not any(post.kind == "seen" for post in run.control_channel().read_posts(0)):
            world.runtime.sleep(0.01)
        run.close()
        return found

    seen: list[float] = []

    def watch(transport: Transport) -> None:
        network = network_of(transport, 2, 1, 1)
        model = Bowl()
        control = EASGD(period=2, sync=False).observe(model, network)
        assert control is not None
        while not any(post.kind == "done" for post in control.read_posts(0)):
            transport.runtime.sleep(0.01)
        control.load_weights(model)
        seen.append(model.x.item())
        control.post("seen", [])
        control.close()

    aside: list[Any] = [*servers(2, 1, evaluators=1), ExtraProcess(watch, "evaluator")]
    found = sl.simulate(work, 2, extra=aside).results
    assert seen == [found[0]]


def real(world: sl.World) -> tuple[float, float]:
    return bowls(EASGD(period=2, sync=False), (1.0, 3.0), 0.0, 8)(world)


def real_case(transport: Transport) -> Any:
    return on_gloo(transport, real)


@pytest.mark.xdist_group("zeromq")
def test_the_sum_stays_on_real_processes(zeromq: Pool) -> None:
    found = zeromq.run(real_case, 2)
    assert sum(x for x, _ in found) + found[0][1] == pytest.approx(4.0, rel=1e-5)
    assert found[0][1] == found[1][1]
    assert found[0][1] > 1.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_equals_a_computation_in_one_process(momentum: float) -> None:
    """One worker moves, with Nesterov's momentum or without; the other takes no steps."""

    def gradient(worker: int, number: int, x: float) -> float:
        return x - 1.0 + math.sin(number)

    def work(world: sl.World) -> tuple[float, float]:
        model = Bowl()
        optimizer, run = distributed(model, EASGD(period=3, alpha=0.25, sync=False, momentum=momentum), 0.1)
        for number in range(14 if world.rank == 0 else 0):
            optimizer.zero_grad()
            backward(model() + (math.sin(number) - 1.0) * model.x.sum())
            optimizer.step()
        run.control_channel().finish()
        world.barrier()
        found = run.own[0].item(), shown(run).item()
        run.close()
        return found

    (own,), centre = reference((0.0,), gradient, steps=14, period=3, alpha=0.25, rate=0.1, momentum=momentum)
    (x, found), _ = results(work, 2, dedicated=1)
    assert x == pytest.approx(own, rel=1e-4, abs=1e-5)
    assert found == pytest.approx(centre, rel=1e-4, abs=1e-5)
