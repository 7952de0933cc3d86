"""Elastic averaging in its synchronous form: the centre is the same everywhere, and nothing is lost on the way."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.strategies.easgd import EASGD
from syncline.strategies.easgd.synchronous import ElasticRun
from syncline.strategies.local_weights import LocalWeightsRun
from syncline.testing import Pool
from syncline.transports import Transport
from tests.strategies.cases import backward, data, flat, mlp, on_gloo
from tests.strategies.hunts.easgd_bowls import Bowl, bowls, distributed, reference, shown, step

CATCH = EASGD(period=1, alpha=0.225)


def test_the_gradient_and_the_pull_are_taken_at_the_same_x() -> None:
    """f = x²/2, x = 1, x̃ = 0, α = .225, η = .1: x = 1 − .1 − .225, x̃ = .225."""
    (x, centre), (other, same) = sl.simulate(bowls(CATCH, (1.0, 0.0), 0.1, 1), ranks=2).results
    assert x == pytest.approx(0.675)
    assert centre == pytest.approx(0.225)
    assert other == 0.0
    assert same == centre


def test_the_other_order_would_be_noticed() -> None:
    """A pull after the step is that of another x: .9 − .225 · .9 = .6975."""

    def late(run: ElasticRun) -> None:
        run.sync()

    with (
        mock.patch.object(ElasticRun, "before_step", LocalWeightsRun.before_step),
        mock.patch.object(ElasticRun, "after_step", late),
    ):
        (x, _), _ = sl.simulate(bowls(CATCH, (1.0, 0.0), 0.1, 1), ranks=2).results
    assert x == pytest.approx(0.6975)


@pytest.mark.parametrize("period", [1, 3])
def test_without_a_rate_the_sum_stays(period: int) -> None:
    starts = (1.0, -0.5, 4.0)
    found = sl.simulate(bowls(EASGD(period=period), starts, 0.0, 12), ranks=3).results
    assert sum(x for x, _ in found) + found[0][1] == pytest.approx(sum(starts), rel=1e-6)
    spread = max(x for x, _ in found) - min(x for x, _ in found)
    assert spread < 4.5 * (1 - 0.3) ** (12 // period) + 1e-6, "each round takes α of the way"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("period", [1, 4])
def test_it_does_what_one_process_does_by_hand(momentum: float, period: int) -> None:
    """With and without Nesterov's momentum; each worker has a bowl of its own."""

    def gradient(worker: int, number: int, x: float) -> float:
        return x - worker + math.sin(number + worker)

    def work(world: sl.World) -> tuple[float, float]:
        model = Bowl()
        optimizer, run = distributed(model, EASGD(period=period, momentum=momentum), 0.1)
        for number in range(15):
            optimizer.zero_grad()
            away = math.sin(number + world.rank) - world.rank
            backward(model() + away * model.x.sum())
            optimizer.step()
        found = run.own[0].item(), shown(run).item()
        run.close()
        return found

    own, centre = reference((0.0, 0.0, 0.0), gradient, steps=15, period=period, alpha=0.3, rate=0.1, momentum=momentum)
    for worker, (x, found) in enumerate(sl.simulate(work, ranks=3).results):
        assert x == pytest.approx(own[worker], rel=1e-4, abs=1e-5)
        assert found == pytest.approx(centre, rel=1e-4, abs=1e-5)


def train(world: sl.World, strategy: EASGD, steps: int = 20, **options: Any) -> tuple[Tensor, Tensor]:
    """A small network: this worker's weights, and the centre."""
    model = mlp()
    optimizer, run = distributed(model, strategy, 0.1, **options)
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        x, y = torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    found = flat(model).clone(), shown(run)
    assert run.stats.steps == steps
    assert run.stats.bytes_wire > 0
    assert run.stats.consensus is not None
    assert run.stats.staleness == 0
    run.close()
    assert torch.equal(flat(model), found[1]), "close() leaves the centre"
    return found


@pytest.mark.parametrize("options", [{}, {"codec": "topk(0.1)"}, {"codec": "quantize(4)"}, {"algorithm": "auto"}])
def test_every_worker_has_the_same_centre_bit_for_bit(options: dict[str, Any]) -> None:
    found = sl.simulate(lambda world: train(world, EASGD(period=3), **options), ranks=4).results
    for own, centre in found:
        assert torch.equal(centre, found[0][1])
        assert not torch.equal(own, centre), "a worker has weights of its own"


def test_with_a_codec_the_sum_stays_but_for_what_is_kept_back() -> None:
    """Σ x_i + x̃ + α Σ residual_i; without the residuals it would not."""

    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = nn.Linear(8, 2, bias=False)
        optimizer, run = distributed(model, EASGD(period=1), 0.0, codec="topk(0.25)")
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 8, generator=torch.Generator().manual_seed(world.rank)))
        world.barrier()
        before = flat(model) + shown(run) / world.size
        for _ in range(5):
            optimizer.zero_grad()
            backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
        kept = run.deltas.local_state()["residuals"]["weight"].clone()
        found = before, flat(model).clone(), shown(run), kept
        run.close()
        return found

    found = sl.simulate(work, ranks=3).results
    before = sum(each[0] for each in found)
    bare = sum(each[1] for each in found) + found[0][2]
    kept = sum(each[3] for each in found)
    torch.testing.assert_close(bare + 0.3 * kept, before, rtol=1e-5, atol=1e-5)
    assert (bare - before).abs().max() > 1e-3


def test_all_meet_until_the_last_has_no_more_data() -> None:
    """13 batches of 4 for 3 workers: some have one more step than others."""

    def work(world: sl.World) -> tuple[int, Tensor]:
        model = mlp()
        optimizer, run = distributed(model, EASGD(period=2, momentum=0.5), 0.1)
        loader = torch.utils.data.DataLoader(data(50), batch_size=4)
        for _ in range(2):
            for x, y in run.shard(loader):
                optimizer.zero_grad()
                backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        steps, rounds = run.stats.steps, run.rounds
        run.close()
        return steps * 1000 + rounds, flat(model)

    found = sl.simulate(work, ranks=3).results
    for counted, weights in found:
        assert counted == found[0][0]
        assert torch.equal(weights, found[0][1])


@pytest.mark.parametrize("strategy", [EASGD(period=3), EASGD(period=3, momentum=0.9), EASGD(period=2, centres=2)])
@pytest.mark.parametrize("codec", [None, "topk(0.2)"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Any, strategy: EASGD, codec: str | None) -> None:
    def work(world: sl.World, first: int, last: int) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer, run = distributed(model, strategy, 0.1, codec=codec)
        if first:
            assert sl.load(tmp_path, run=run) is not None
        for number in range(first, last):
            draw = torch.Generator().manual_seed(100 * world.rank + number)
            x, y = torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if last == 7:
            sl.save(tmp_path, step=last, run=run)
        found = flat(model).clone(), shown(run)
        run.close()
        return found

    whole = sl.simulate(lambda world: work(world, 0, 14), ranks=4).results
    sl.simulate(lambda world: work(world, 0, 7), ranks=4)
    rest = sl.simulate(lambda world: work(world, 7, 14), ranks=4).results
    for one, other in zip(whole, rest, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("strategy", [EASGD(period=2), EASGD(period=2, momentum=0.5), EASGD(period=2, centres=2)])
def test_a_checkpoint_serves_more_workers(tmp_path: Any, strategy: EASGD) -> None:
    """Those it does not know begin at the centre."""

    def work(world: sl.World, resume: bool) -> tuple[Tensor, Tensor]:
        model = Bowl()
        optimizer, run = distributed(model, strategy, 0.1)
        if resume:
            assert sl.load(tmp_path, run=run) is not None
        else:
            with torch.no_grad():
                model.x.fill_(1.0 + world.rank)
            for _ in range(4):
                step(model, optimizer)
            sl.save(tmp_path, step=4, run=run)
        found = flat(model).clone(), shown(run)
        step(model, optimizer)
        step(model, optimizer)
        ended = shown(run)
        run.close()
        return found[0], torch.cat([found[1], ended])

    before = sl.simulate(lambda world: work(world, resume=False), ranks=2).results
    after = sl.simulate(lambda world: work(world, resume=True), ranks=3).results
    assert all(torch.equal(told[:1], before[0][1][:1]) for _, told in after)
    assert torch.equal(after[2][0], before[0][1][:1])
    assert all(torch.equal(told, after[0][1]) for _, told in after)


def test_one_worker_is_plain_training() -> None:
    def work(world: sl.World) -> Tensor:
        model = Bowl(1.0)
        optimizer, run = distributed(model, EASGD(period=1, momentum=0.9), 0.1)
        for _ in range(5):
            step(model, optimizer)
        run.close()
        return flat(model)

    model = Bowl(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        step(model, optimizer)
    assert torch.equal(sl.simulate(work, ranks=1).results[0], flat(model))


@pytest.mark.parametrize(
    "options",
    [
        {"period": 0},
        {"period": True},
        {"period": 2.5},
        {"alpha": 0.0},
        {"alpha": -0.1},
        {"alpha": 1.5},
        {"alpha": "x"},
        {"alpha": float("nan")},
        {"alpha": float("inf"), "unstable": True},
        {"sync": 1},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"unstable": "yes"},
        {"centres": 0},
        {"centres": "host"},
        {"root_every": 0, "centres": 2},
        {"root_every": 2},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="easgd"):
        EASGD(**options)


@pytest.mark.parametrize("sync", [True, False])
def test_a_pull_that_jumps_beyond_the_workers_is_refused(sync: bool) -> None:
    def work(world: sl.World, unstable: bool) -> None:
        distributed(Bowl(), EASGD(alpha=0.4, sync=sync, unstable=unstable), 0.1)[1].close()

    with pytest.raises(IncompatibleError, match=r"alpha · 3 = 1\.2.*at most 0\.3333.*unstable=True"):
        sl.simulate(lambda world: work(world, unstable=False), ranks=3)
    sl.simulate(lambda world: work(world, unstable=True), ranks=3)


def test_momentum_on_top_of_momentum_is_refused() -> None:
    def work(world: sl.World) -> None:
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sl.distribute(model, optimizer, strategy=EASGD(momentum=0.5))

    with pytest.raises(IncompatibleError, match=r"the optimizer's is 0\.9"):
        sl.simulate(work, ranks=2)


def test_its_repr_is_its_spec() -> None:
    assert repr(EASGD()) == "easgd"
    assert repr(EASGD(period=4, alpha=0.1, sync=False)) == "easgd(period=4, alpha=0.1, sync=False)"
    assert repr(EASGD(centres="hosts", root_every=4)) == "easgd(centres='hosts', root_every=4)"


def on_processes(world: sl.World, spec: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return train(world, EASGD(**spec), algorithm="native")


def gloo_case(transport: Transport, spec: dict[str, Any]) -> Any:
    return on_gloo(transport, on_processes, spec)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("spec", [{"period": 3}, {"period": 3, "momentum": 0.9}, {"period": 2, "centres": 2}])
def test_on_real_processes_as_on_simulated_ones(gloo: Pool, spec: dict[str, Any]) -> None:
    real = gloo.run(gloo_case, 2, spec)
    simulated = sl.simulate(lambda world: train(world, EASGD(**spec)), ranks=2).results
    for (own, centre), (same, likewise) in zip(real, simulated, strict=True):
        torch.testing.assert_close(own, same, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(centre, likewise, rtol=1e-5, atol=1e-6)
        assert torch.equal(centre, real[0][1])
