"""Centres in a tree: groups have one each, alike on their workers, and the root is alike on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.strategies.easgd import EASGD
from syncline.strategies.easgd.synchronous import groups_of
from tests.strategies.cases import backward, data, flat, mlp
from tests.strategies.hunts.easgd_bowls import Bowl, distributed, shown, step
from tests.strategies.served_cases import results


def test_workers_are_grouped_with_their_neighbours_or_their_host() -> None:
    assert sl.simulate(lambda world: groups_of(world, 2), ranks=5).results[0] == [[0, 1, 2], [3, 4]]
    assert sl.simulate(lambda world: groups_of(world, 3), ranks=3).results[0] == [[0], [1], [2]]
    hosts = sl.Network(ranks_per_host=2, inside=sl.Link(latency=1e-6, bandwidth=1e10))
    assert sl.simulate(lambda world: groups_of(world, "hosts"), 5, network=hosts).results[0] == [[0, 1], [2, 3], [4]]


def by_hand(starts: tuple[float, ...], rounds: int, root_every: int) -> tuple[list[float], list[float], float]:
    """Two groups of two, without gradients: every worker's x, the groups' centres, the root."""
    own, centres, root = list(starts), [0.0, 0.0], 0.0
    for number in range(1, rounds + 1):
        for group in (0, 1):
            gaps = [own[worker] - centres[group] for worker in (2 * group, 2 * group + 1)]
            for at, gap in enumerate(gaps):
                own[2 * group + at] -= 0.45 * gap
            centres[group] += 0.45 * sum(gaps)
        if number % root_every == 0:
            gaps = [centre - root for centre in centres]
            centres = [centre - 0.45 * gap for centre, gap in zip(centres, gaps, strict=True)]
            root += 0.45 * sum(gaps)
    return own, centres, root


@pytest.mark.parametrize("root_every", [1, 3])
def test_it_does_what_one_process_does_by_hand(root_every: int) -> None:
    starts = (1.0, 2.0, -3.0, 8.0)

    def work(world: sl.World) -> tuple[float, float, float]:
        model = Bowl()
        optimizer, run = distributed(model, EASGD(period=2, centres=2, root_every=root_every), 0.0)
        with torch.no_grad():
            model.x.fill_(starts[world.rank])
        for _ in range(8):
            step(model, optimizer)
        found = model.x.item(), run.centre.values[0].item(), shown(run).item()
        run.close()
        assert model.x.item() == found[2], "close() leaves the root"
        return found

    own, centres, root = by_hand(starts, 4, root_every)
    found = sl.simulate(work, ranks=4).results
    for worker, (x, centre, top) in enumerate(found):
        assert x == pytest.approx(own[worker], abs=1e-5)
        assert centre == pytest.approx(centres[worker // 2], abs=1e-5)
        assert top == pytest.approx(root, abs=1e-5)
    assert sum(own) + sum(centres) + root == pytest.approx(sum(starts)), "nothing is lost"
    assert root != 0.0


@pytest.mark.parametrize("codec", [None, "topk(0.2)"])
def test_centres_are_alike_bit_for_bit_and_the_groups_differ(codec: str | None) -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer, run = distributed(model, EASGD(period=2, centres=2, root_every=2), 0.1, codec=codec)
        draw = torch.Generator().manual_seed(world.rank)
        for _ in range(14):
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(torch.randn(4, 6, generator=draw)), torch.tensor([0, 1, 2, 0])))
            optimizer.step()
        group = torch.cat([value.reshape(-1) for value in run.centre.values]).clone()
        found = group, shown(run)
        run.close()
        return found

    found = sl.simulate(work, ranks=5).results
    groups, roots = [each[0] for each in found], [each[1] for each in found]
    assert all(torch.equal(root, roots[0]) for root in roots)
    assert all(torch.equal(group, groups[0]) for group in groups[:3])
    assert torch.equal(groups[3], groups[4])
    assert not torch.equal(groups[0], groups[3])


def test_the_root_is_asked_seldom() -> None:
    """Between hosts goes what the root needs alone: with it in every fourth round, less than half as much."""

    def work(world: sl.World, root_every: int) -> int:
        model = nn.Linear(200, 10)
        optimizer, run = distributed(model, EASGD(period=1, centres=2, root_every=root_every), 0.1)
        for _ in range(8):
            optimizer.zero_grad()
            backward(model(torch.ones(1, 200)).sum())
            optimizer.step()
        sent = run.stats.bytes_wire
        run.close()
        return int(sent)

    often = sl.simulate(lambda world: work(world, 1), ranks=4).results
    seldom = sl.simulate(lambda world: work(world, 4), ranks=4).results
    assert seldom[0] < 0.6 * often[0], "the first of a group: rounds with the root cost as much as those of the group"
    assert seldom[1] < often[1]


def test_groups_without_data_take_part_at_the_root() -> None:
    """9 batches for 4 workers of two groups: the first has more steps than all others."""

    def work(world: sl.World) -> tuple[int, int, Tensor]:
        model = mlp()
        optimizer, run = distributed(model, EASGD(period=1, centres=2, root_every=2), 0.1)
        loader = torch.utils.data.DataLoader(data(36), batch_size=4)
        for _ in range(2):
            for x, y in run.shard(loader):
                optimizer.zero_grad()
                backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        told = run.stats.steps, run.rounds
        run.close()
        return *told, flat(model)

    found = sl.simulate(work, ranks=4).results
    for steps, rounds, weights in found:
        assert (steps, rounds) == found[0][:2]
        assert torch.equal(weights, found[0][2])
    assert found[0][0] == 6


def test_one_host_has_one_centre() -> None:
    def work(world: sl.World) -> bool:
        _, run = distributed(Bowl(), EASGD(centres="hosts"), 0.1)
        plain = run.centre.root is run.centre.values
        run.close()
        return plain

    one = sl.Network(ranks_per_host=3, inside=sl.Link(latency=1e-6, bandwidth=1e10))
    assert sl.simulate(work, 3, network=one).results == (True, True, True)


@pytest.mark.parametrize(
    ("options", "codec", "match"),
    [
        ({"centres": 4}, None, "on 3 workers"),
        ({"centres": 2, "alpha": 0.6}, None, r"alpha · 2 = 1\.2"),
        ({"centres": 2}, "powersgd(1)", "one centre"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], codec: str | None, match: str) -> None:
    def work(world: sl.World) -> None:
        distributed(mlp(), EASGD(**options), 0.1, codec=codec, algorithm="auto")

    with pytest.raises(IncompatibleError, match=match):
        sl.simulate(work, ranks=3)


def traded(world: sl.World, strategy: EASGD, times: int) -> tuple[Bowl, Any]:
    """A worker that begins at 1 and trades so often, without gradients; all others have done so too."""
    model = Bowl()
    optimizer, run = distributed(model, strategy, 0.0)
    with torch.no_grad():
        model.x.fill_(1.0)
    for _ in range(times):
        step(model, optimizer)
    run.control_channel().finish()
    world.barrier()
    return model, run


def test_at_the_servers_it_does_what_one_does_by_hand() -> None:
    """Two groups of one; the first trades twice: d = .5, D = .45 · .5, d = .5 (.5 − .275), D = .45 (.3875 − .225)."""

    def work(world: sl.World) -> tuple[float, float, float]:
        model, run = traded(world, EASGD(period=1, alpha=0.5, sync=False, centres=2), 2 if world.rank == 0 else 0)
        found = model.x.item(), run.near.get().item(), shown(run).item()
        run.close()
        assert model.x.item() == found[2], "close() leaves the root"
        return found

    (x, group, root), (other, idle, same) = results(work, 2, dedicated=1)
    assert x == pytest.approx(0.3875)
    assert group == pytest.approx(0.3875 - 0.073125)
    assert root == same == pytest.approx(0.225 + 0.073125)
    assert (other, idle) == (1.0, 0.0)


def test_a_group_reaches_the_root_without_its_first_worker() -> None:
    """The first worker of a group of two takes no steps: the other climbs in every second of its own exchanges."""

    def work(world: sl.World) -> float:
        _, run = traded(world, EASGD(period=1, sync=False, centres=2), 4 if world.rank == 1 else 0)
        found = shown(run).item()
        run.close()
        return found

    assert results(work, 4)[0] > 0.1


def test_at_the_servers_a_run_goes_on_from_its_state() -> None:
    """Each group finds its centre again; with other groups all begin at the root's."""

    def work(world: sl.World, again: int) -> tuple[list[float], list[float]]:
        model = Bowl(2.0)
        optimizer, run = distributed(model, EASGD(period=1, sync=False, centres=2), 0.1)
        with torch.no_grad():
            model.x.add_(float(world.rank))
        for _ in range(4):
            step(model, optimizer)
        world.barrier()
        state = run.state_dict()
        world.barrier()
        before = [run.near.get().item(), shown(run).item()]
        world.barrier()
        run.close()
        _, run = distributed(Bowl(), EASGD(period=1, sync=False, centres=again), 0.1)
        run.load_state_dict(state)
        world.barrier()
        after = [run.near.get().item(), shown(run).item()]
        world.barrier()
        run.close()
        return before, after

    same = results(lambda world: work(world, 2), 4)
    assert all(before == after for before, after in same)
    assert same[0][0][0] != same[3][0][0], "the groups differ"
    assert all(after == [before[1], before[1]] for before, after in results(lambda world: work(world, 3), 4))
