"""Averages of two, each worker at its own pace: atomic, and nobody waits for anybody's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies.gossip import Gossip, PairwiseRun
from syncline.strategies.gossip.pairwise import AVERAGE, HEADER_BYTES, OK, READ, PairMessage, comes_before, mean_of
from syncline.testing import hunt
from syncline.training.loop import train
from syncline.training.run_state import Outcome
from syncline.training.settings import Settings
from syncline.transports.faults import Kill, Slow
from tests.strategies.gossip.cases import Drawn, begin, distance, row, take_step
from tests.training.tiny import Tiny

PAIRS = Gossip(pairwise=True)


def pairwise(run: Any) -> PairwiseRun:
    assert isinstance(run, PairwiseRun)
    assert run.peers is not None
    return run


def weights_of(run: PairwiseRun) -> Tensor:
    assert run.peers is not None
    return run.peers.weights.clone()


def test_an_average_is_the_mean_of_two() -> None:
    """Two workers, no gradients: after the first average both have the mean."""

    def work(world: sl.World) -> tuple[Tensor, float | None, Tensor]:
        model, optimizer, run = begin(world, PAIRS, 0.0)
        pairwise(run).absorb()
        world.barrier()
        take_step(model, optimizer)
        world.barrier()
        found = weights_of(pairwise(run)), run.stats.consensus
        run.close()
        return *found, row(model)

    for weights, consensus, left in sl.simulate(work, 2).results:
        assert torch.equal(weights, torch.full((6,), -0.5, dtype=torch.float64)), "of 1 and −2"
        assert torch.equal(left, weights)
        assert consensus is None or consensus == pytest.approx(1.5 * 6**0.5)


def test_two_tasks_ask_at_once() -> None:
    """An evaluation reads while an average is being asked for: each gets its own answer."""

    def work(world: sl.World) -> tuple[int, int, list[int]]:
        _, _, run = begin(world, PAIRS, 0.0)
        peers = pairwise(run).peers
        assert peers is not None
        world.barrier()
        numbers = []
        if world.rank == 0:
            receive = peers.channel.recv
            between: list[Any] = []

            def recv(*what: Any, **how: Any) -> Any:
                if not between:
                    between.append(None)
                    between[0] = peers.request(1, READ, None)
                return receive(*what, **how)

            peers.channel.recv = recv  # type: ignore[method-assign]
            first = peers.request(1, AVERAGE, peers.weights)
            numbers = [first.wait().number, between[0].wait().number]
        world.barrier()
        run.close()
        return len(peers.lost), peers.requests, numbers

    assert sl.simulate(work, 2).results == ((0, 2, [1, 2]), (0, 0, []))


def test_a_peer_given_up_by_mistake_learns_of_the_end() -> None:
    def work(world: sl.World) -> tuple[bool, float]:
        _, _, run = begin(world, PAIRS, 0.0)
        peers = pairwise(run).peers
        assert peers is not None
        world.barrier()
        if world.rank == 0:
            peers.forget(1, "a mistake")
        begun = world.runtime.now()
        run.close()
        return 1 in peers.lost, world.runtime.now() - begun

    for rank, (gave_up, seconds) in enumerate(sl.simulate(work, 2).results):
        assert gave_up == (rank == 0)
        assert seconds < 1.0, "nobody waits for the timeout"


def test_nobody_asks_somebody_that_may_wait_for_it() -> None:
    for one in range(7):
        assert not comes_before(one, one)
        for other in range(7):
            assert comes_before(one, other) + comes_before(other, one) == (one != other)
    assert [other for other in range(6) if comes_before(0, other)] == [1, 2, 3, 4, 5]
    assert not any(comes_before(5, other) for other in range(5))


@pytest.mark.parametrize("graph", ["ring", "complete", "0-1, 1-2, 2-3, 3-4"])
def test_without_gradients_workers_come_together(graph: str) -> None:
    def work(world: sl.World) -> Tensor:
        model, optimizer, run = begin(world, Gossip(graph, pairwise=True), 0.0)
        pairwise(run).absorb()
        for _ in range(60):
            world.compute(0.01)
            take_step(model, optimizer)
        world.barrier()
        found = weights_of(pairwise(run))
        run.close()
        return found

    found = torch.stack(list(sl.simulate(work, 5).results))
    assert distance(found) < 0.05
    torch.testing.assert_close(found.mean(dim=0), torch.full((6,), 11 / 5, dtype=torch.float64))


def test_a_slow_worker_does_not_slow_the_others() -> None:
    def work(world: sl.World) -> tuple[int, list[int], float]:
        model, optimizer, run = begin(world, PAIRS, 0.01)
        board = pairwise(run).control_channel()
        until = world.runtime.now() + 1.0
        while world.runtime.now() < until:
            world.compute(0.01)
            take_step(model, optimizer)
        taken, staleness = run.stats.steps, run.stats.staleness_mean
        board.finish()
        world.barrier()
        steps = board.steps()
        run.close()
        return taken, steps, staleness

    found = sl.simulate(work, 4, faults=[Slow(1, 10.0)]).results
    taken = [each[0] for each in found]
    assert all(steps == taken for _, steps, _ in found), "the board counts everybody's"
    assert all(taken[rank] >= 90 for rank in (0, 2, 3)), taken
    assert 5 <= taken[1] <= 11, taken
    assert all(found[rank][2] > 0 for rank in (0, 2)), "their weights were changed while they computed"


def test_others_average_with_a_worker_that_computes() -> None:
    """Worker 1 takes one long step: what the others bring meanwhile is in its weights, and its step comes on top."""

    def work(world: sl.World) -> Tensor:
        model, optimizer, run = begin(world, PAIRS, 1.0, scattered=False)
        if world.rank == 1:
            optimizer.zero_grad()
            loss = -model.second.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            world.compute(10.0)
            optimizer.step()
        else:
            for _ in range(20):
                world.compute(0.01)
                optimizer.zero_grad()
                (model().detach() - model.first.sum()).backward()
                optimizer.step()
        world.barrier()
        found = weights_of(pairwise(run))
        run.close()
        return found

    first, second = sl.simulate(work, 2).results
    total = first + second
    torch.testing.assert_close(total, torch.tensor([20.0] * 4 + [1.0] * 2, dtype=torch.float64))
    assert float(second[0]) > 9.0, "half of what worker 0 had done, before its own step ended"


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_worker_does_not_stop_the_others(killed: int) -> None:
    """Even worker 0 may go: the control channel does not go with it."""

    def work(world: sl.World) -> tuple[int, list[int], Tensor]:
        model, optimizer, run = begin(world, PAIRS, 0.1)
        for _ in range(100):
            world.compute(0.01)
            take_step(model, optimizer)
        steps = pairwise(run).control_channel().steps()
        run.close()
        return run.stats.steps, steps, row(model)

    found = sl.simulate(work, 4, faults=[Kill(killed, at=0.3)])
    assert found.killed == (killed,)
    left = [result for result in found.results if result is not None]
    assert [taken for taken, _, _ in left] == [100] * 3
    assert all(5 <= steps[killed] < 100 for _, steps, _ in left)
    for _, _, weights in left:
        assert torch.equal(weights, left[0][2])


def means_of(model: nn.Sequential) -> Tensor:
    return torch.cat([model[1].get_buffer("running_mean"), model[1].get_buffer("running_var")])


def test_the_model_of_all_is_the_mean_and_has_the_buffers() -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor, float | None]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = pairwise(sl.distribute(model, optimizer, PAIRS))
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(4):
            world.compute(0.01 * (world.rank + 1))
            optimizer.zero_grad()
            model(torch.randn(5, 2, generator=draw)).square().sum().backward()
            optimizer.step()
        world.barrier()
        own, other = torch.cat([weights_of(run), means_of(model)]), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        run.control_channel().load_weights(other)
        with run.agreed():
            assert torch.equal(row(model), row(other))
        shown = torch.cat([row(other).float(), means_of(other)])
        consensus = run.stats.consensus
        world.barrier()
        run.close()
        return own, shown, torch.cat([row(model).float(), means_of(model)]), consensus

    found = sl.simulate(work, 3).results
    rows = torch.stack([own for own, _, _, _ in found])
    for _, shown, left, consensus in found:
        assert torch.equal(shown, mean_of(list(rows)))
        assert torch.equal(left, shown)
        assert consensus == pytest.approx(distance(rows[:, :-6].double()), rel=1e-5)


def test_a_checkpoint_holds_rows_of_one_moment(tmp_path: Path) -> None:
    """Each step adds one to a weight of the worker's own: nothing may be there twice, or not at all."""

    def work(world: sl.World, resume: bool) -> tuple[Tensor, int, list[int]]:
        model, optimizer, run = begin(world, PAIRS, 1.0, scattered=False)
        if resume:
            sl.load(tmp_path, run=run)
        for _ in range(5 + world.rank):
            world.compute(0.003 * (world.rank + 1))
            optimizer.zero_grad()
            loss = 0.0 * model() - model.second.sum() - model.first.sum()
            loss.backward()
            optimizer.step()
        if not resume:
            sl.save(tmp_path, step=5, run=run)
        world.barrier()
        world.compute(0.1)  # the step counts are published at intervals
        found = weights_of(pairwise(run)), run.stats.steps, pairwise(run).control_channel().steps()
        world.barrier()
        run.close()
        return found

    first = sl.simulate(lambda world: work(world, resume=False), 3).results
    assert torch.stack([weights for weights, _, _ in first]).sum(dim=0).tolist() == pytest.approx([18.0] * 6)
    again = sl.simulate(lambda world: work(world, resume=True), 3, seed=1).results
    assert torch.stack([weights for weights, _, _ in again]).sum(dim=0).tolist() == pytest.approx([36.0] * 6)
    assert [steps for _, steps, _ in again] == [10, 12, 14]
    assert all(board == [10, 12, 14] for _, _, board in again)
    fewer = sl.simulate(lambda world: work(world, resume=True), 2).results
    assert torch.stack([weights for weights, _, _ in fewer]).sum(dim=0).tolist() == pytest.approx([12.0 + 11] * 6)


def test_the_loop_trains_with_it(tmp_path: Path) -> None:
    def work(world: sl.World) -> Outcome:
        settings = Settings(epochs=4, target=0.7, checkpoint_every=6)
        return train(Tiny(), settings, world=world, strategy=PAIRS, folder=tmp_path, seconds_a_sample=0.01)

    found = sl.simulate(work, 3).results
    assert len({(outcome.test, outcome.stopped_by) for outcome in found}) == 1
    assert found[0].test is not None
    assert found[0].stopped_by == "target"


def test_a_closed_worker_answers_until_all_have_closed() -> None:
    def work(world: sl.World) -> tuple[int, Tensor]:
        model, optimizer, run = begin(world, PAIRS, 0.1)
        for _ in range(5 if world.rank else 50):
            world.compute(0.01)
            take_step(model, optimizer)
        run.close()
        return run.stats.steps, row(model)

    found = hunted = sl.simulate(work, 3).results
    assert [steps for steps, _ in found] == [50, 5, 5]
    assert all(torch.equal(left, hunted[0][1]) for _, left in found)


def test_in_any_order_of_events_it_ends() -> None:
    def work(world: sl.World) -> None:
        model, optimizer, run = begin(world, Gossip("complete", pairwise=True), 0.1)
        for _ in range(6):
            take_step(model, optimizer)
        with run.agreed():
            pass
        run.close()

    assert hunt(work, 4, range(10)) == 10


def test_invalid_messages_are_refused() -> None:
    whole = PairMessage.write(AVERAGE, 3, torch.arange(4.0))
    read = PairMessage.read(whole, peer=2)
    assert (read.kind, read.number, read.row(torch.float32, 4).tolist()) == (AVERAGE, 3, [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(sl.errors.ProtocolError, match=r"rank 2 sent a row of 16 B instead of 20 B"):
        read.row(torch.float32, 5)
    with pytest.raises(
        sl.errors.ProtocolError, match=rf"rank 2 .* 7 B are shorter than its header of {HEADER_BYTES} B"
    ):
        PairMessage.read(whole[:7], peer=2)
    with pytest.raises(sl.errors.ProtocolError, match="12 B instead of 16 B"):
        PairMessage.read(whole[:-4], peer=2)
    for at in range(HEADER_BYTES - 4):
        broken = whole.clone()
        broken[at] ^= 0x40
        if at not in (6, 7):  # spare bytes, which the checksum covers too
            with pytest.raises(sl.errors.ProtocolError):
                PairMessage.read(broken, peer=2)
    assert PairMessage.read(PairMessage.write(OK, 1), peer=0).body.numel() == 0


def test_an_invalid_message_changes_nothing() -> None:
    """It is refused and logged, and the next one is handled."""

    def work(world: sl.World) -> Tensor:
        model, optimizer, run = begin(world, PAIRS, 0.0)
        pairwise(run).absorb()
        world.barrier()
        if world.rank == 0:
            peers = pairwise(run).peers
            assert peers is not None
            peers.channel.send(torch.full((40,), 7, dtype=torch.uint8), 1, 1).wait()
        take_step(model, optimizer)
        run.close()
        return row(model)

    for left in sl.simulate(work, 2).results:
        assert torch.equal(left, torch.full((6,), -0.5, dtype=torch.float64))


def test_one_model_for_all_is_refused_where_it_is_not_finite() -> None:
    def work(world: sl.World) -> None:
        model = Drawn(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, PAIRS, check_finite=True)
        model.first.grad = torch.full((2, 2), float("inf") if world.rank else 1.0)
        optimizer.step()

    with pytest.raises(sl.errors.DivergedError, match="gradient of first on rank 1 after 0 steps"):
        sl.simulate(work, 2)
