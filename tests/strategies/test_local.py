"""Local SGD: what a round does to weights, to optimizers' memory and to what codecs keep back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.strategies.local import Local, LocalRun
from syncline.testing import Pool
from tests.strategies.averaging_cases import Scale, batch, check_resumes, everywhere, net, push, take, train
from tests.strategies.cases import backward, flat, on_gloo


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-5 * float(one.norm())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_period_of_one_is_synchronous(optimizer: str) -> None:
    ours = everywhere("local(period=1)", optimizer=optimizer)
    theirs = everywhere("allreduce", optimizer=optimizer, algorithm="ring")
    for one, other in zip(ours, theirs, strict=True):
        assert all(close(a, b) for a, b in zip(one, other, strict=True))


def test_a_longer_period_is_not() -> None:
    ours, theirs = (everywhere(spec, algorithm="ring")[0][-1] for spec in ("local(period=2)", "allreduce"))
    assert not close(ours, theirs)


def test_weights_are_equal_after_rounds_and_only_then() -> None:
    seen = everywhere("local(period=3)", steps=9)
    for step in range(9):
        alike = torch.equal(seen[0][step], seen[1][step])
        assert alike == ((step + 1) % 3 == 0), step


def test_by_hand() -> None:
    """f_i = (w − a_i)²/2: after τ steps w_i = a_i + (w − a_i)(1 − η)^τ, and w is their mean."""

    def work(world: sl.World) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(5.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = sl.distribute(model, optimizer, "local(period=2)")
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            backward((model.weight - world.rank).square().sum() / 2)
            optimizer.step()
            seen.append(float(model.weight.detach()))
        run.close()
        return seen

    assert sl.simulate(work, ranks=2).results == ([2.5, 1.625, 0.8125, 0.78125], [3.0, 1.625, 1.3125, 0.78125])


# Post-local.


def test_the_first_steps_are_synchronous() -> None:
    ours = everywhere("local(period=3, after=4)", steps=10, optimizer="momentum")
    theirs = everywhere("allreduce", steps=10, optimizer="momentum", algorithm="ring")
    for step in range(10):
        alike = torch.equal(ours[0][step], ours[1][step])
        assert alike == (step < 4 or step in (6, 9)), step
        assert close(ours[0][step], theirs[0][step]) == (step < 4), step


def test_what_nobody_uses_stays_without_a_gradient() -> None:
    def work(world: sl.World) -> bool:
        used, idle = nn.Linear(2, 1), nn.Linear(2, 1)
        model = nn.ModuleList([used, idle])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        run = sl.distribute(model, optimizer, "local(period=2, after=2)")
        before = idle.weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            backward(used(torch.ones(1, 2)).sum())
            optimizer.step()
        run.close()
        return torch.equal(before, idle.weight)

    assert all(sl.simulate(work, ranks=2).results)


def test_gradient_residuals_are_not_added_to_weights() -> None:
    """Rounds move no weights that no step moves, whatever the synchronous steps have left."""

    def work(world: sl.World) -> float:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, "local(period=1, after=3)", codec="topk(0.1)")
        before = flat(model)
        for step in range(6):
            take(model, optimizer, world.rank, step)
        run.close()
        return float((flat(model) - before).norm())

    assert sl.simulate(work, ranks=2).results == (0.0, 0.0)


# The optimizer's memory.


def memory(run: Any, step: int) -> list[Tensor]:
    state = run.optimizer.state
    return [state[each]["momentum_buffer"].clone() for each in run.model.parameters() if state.get(each)]


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
def test_what_a_round_does_to_momentum(state: str) -> None:
    def looks(spec: str) -> list[list[Tensor]]:
        # Before the first round all do the same: the memory of `keep` is what the others begin with.
        return [seen[2] for seen in everywhere(spec, steps=3, optimizer="momentum", look=memory)]

    kept, found = looks("local(period=3)"), looks(f"local(period=3, state={state!r})")
    if state == "keep":
        assert not torch.equal(kept[0][0], kept[1][0])
    elif state == "reset":
        assert found == [[], [], []]
    else:
        for number, row in enumerate(found[0]):
            torch.testing.assert_close(row, torch.stack([rows[number] for rows in kept]).mean(dim=0))
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_averaged_memory_counts_as_sent() -> None:
    def sent(run: Any, step: int) -> int:
        return int(run.stats.bytes_wire)

    plain, more = (
        everywhere(f"local(period=3, state={state!r})", steps=3, optimizer="momentum", look=sent)[0][2]
        for state in ("keep", "average")
    )
    assert more - plain == flat(net()).nbytes


def test_adam_keeps_the_count_of_its_steps() -> None:
    def counts(run: Any, step: int) -> set[float]:
        return {float(run.optimizer.state[each]["step"]) for each in run.model.parameters()}

    assert everywhere("local(period=2, state='average')", steps=5, optimizer="adam", look=counts)[1][4] == {5.0}


# A part of the workers.


def drawn(world: sl.World, spec: str, rounds: int) -> list[float]:
    """Worker i has 2^i at the start of each round: the mean tells who counted."""
    model = Scale(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = sl.distribute(model, optimizer, spec)
    seen = []
    for _ in range(rounds):
        with torch.no_grad():
            model.row.fill_(2.0**world.rank)
        push(model, optimizer, 0.0)
        seen.append(float(model.row.detach()))
    run.close()
    return seen


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 2), (0.3, 2), (0.25, 1), (0.01, 1), (0.75, 3)])
def test_a_random_part_counts_and_all_take_it_over(fraction: float, count: int) -> None:
    results = sl.simulate(lambda w: drawn(w, f"local(period=1, fraction={fraction}, seed=5)", 30), ranks=4).results
    assert all(each == results[0] for each in results)
    parts = [round(value * count) for value in results[0]]
    assert {bin(part).count("1") for part in parts} == {count}
    assert {worker for part in parts for worker in range(4) if part >> worker & 1} == {0, 1, 2, 3}


def test_another_seed_draws_others() -> None:
    specs = [f"local(period=1, fraction=0.5, seed={seed})" for seed in (1, 2)]
    one, other = (sl.simulate(partial(drawn, spec=spec, rounds=30), ranks=4).results for spec in specs)
    assert one != other


def test_data_never_leaves_its_worker() -> None:
    """What is sent is as long as the weights, whatever the worker's own data is; and it reads no other's."""

    def work(world: sl.World) -> tuple[set[int], int]:
        model = Scale(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, "local(period=2, fraction=0.5)")
        own = [torch.full((50,), float(world.rank)) for _ in range(4)]
        seen = set()
        for x in run.shard(own, split=False):
            seen |= {int(value) for value in x}
            push(model, optimizer, float(x[0]))
        sent = run.stats.bytes_wire
        run.close()
        return seen, sent

    for rank, (seen, sent) in enumerate(sl.simulate(work, ranks=3).results):
        assert seen == {rank}
        assert sent < 4 * 50 * 4


# Codecs.

CODECS = ["quantize(8)", "topk(0.05)|quantize(4)", "powersgd(2)"]


@pytest.mark.parametrize("codec", CODECS)
def test_coded_rounds_leave_all_workers_with_the_same_bits(codec: str) -> None:
    seen = everywhere("local(period=2)", steps=8, codec=codec)
    for step in (1, 3, 5, 7):
        assert all(torch.equal(seen[0][step], other[step]) for other in seen)
    assert not torch.equal(seen[0][2], seen[1][2])


def settled(forgetful: bool) -> tuple[Tensor, Tensor]:
    """Workers begin far apart and do not step: what rounds with a sparse codec end in, and the mean they began with."""

    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = Scale(40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, "local(period=1)", codec="topk(0.05)")
        assert isinstance(run, LocalRun)
        with torch.no_grad():
            model.row.copy_(torch.randn(40, generator=torch.Generator().manual_seed(world.rank)))
        mean = sl.allreduce(model.row.detach(), op="mean")
        for _ in range(60):
            push(model, optimizer, 0.0)
            if forgetful:
                run.deltas.forget()
        run.close()
        return model.row.detach().clone(), mean

    return sl.simulate(work, ranks=2).results[0]  # type: ignore[no-any-return]


def test_what_a_codec_keeps_back_is_sent_later() -> None:
    torch.testing.assert_close(*settled(forgetful=False))
    found, mean = settled(forgetful=True)
    assert float((found - mean).norm()) > 0.5 * float(mean.norm())  # the test sees the mistake


def test_a_codec_saves_bytes() -> None:
    def sent(run: Any, step: int) -> tuple[int, int]:
        return run.stats.bytes_wire, run.stats.bytes_logical

    wire, logical = everywhere("local(period=2)", steps=4, codec="quantize(8)", look=sent)[0][3]
    assert wire < 0.6 * logical


# Uneven data.


def uneven(world: sl.World, spec: str, lengths: list[int], **options: Any) -> tuple[Tensor, int, float]:
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=options.pop("momentum", 0.0))
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 1.0)
    run = sl.distribute(model, optimizer, spec, schedulers=[scheduler], **options)
    for _ in range(2):
        for _ in run.shard([torch.zeros(1)] * lengths[world.rank], split=False):
            push(model, optimizer, 2.0**world.rank)
            scheduler.step()
    steps = run.stats.steps
    run.close()
    return model.row.detach().clone(), steps, float(scheduler.last_epoch)


@pytest.mark.parametrize("lengths", [[1, 5, 3, 3], [4, 1, 2, 7], [3, 3, 3, 2]])
@pytest.mark.parametrize("period", [1, 2, 100])
def test_workers_without_data_take_part_in_rounds(lengths: list[int], period: int) -> None:
    results = sl.simulate(lambda world: uneven(world, f"local(period={period})", lengths), ranks=4).results
    total = sum(2 * length * 2.0**rank for rank, length in enumerate(lengths))  # every step counts once
    for row, steps, scheduled in results:
        assert row.tolist() == [total / 4] * 4
        assert steps == scheduled == 2 * max(lengths)


def test_average_optimizer_state_without_one_on_a_worker() -> None:
    """A worker that has not used a parameter yet remembers nothing of it: nothing is averaged until all do."""

    def work(world: sl.World) -> tuple[bool, Tensor]:
        both, late = nn.Linear(2, 1), nn.Linear(2, 1)
        model = nn.ModuleList([both, late])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = sl.distribute(model, optimizer, "local(period=2, state='average')")
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 2), world.rank + 1.0)
            loss = both(x).sum()
            backward(loss + late(x).sum() if world.rank == 0 or step > 1 else loss)
            optimizer.step()
            if step == 1:
                missing = late.weight not in optimizer.state
        run.close()
        return missing, optimizer.state[both.weight]["momentum_buffer"].clone()

    (one, first), (other, second) = sl.simulate(work, ranks=2).results
    assert (one, other) == (False, True)
    assert torch.equal(first, second)  # by the second round all remember


def test_synchronous_steps_want_even_data() -> None:
    with pytest.raises(IncompatibleError, match=r"first 4 steps.*drop_last=True"):
        sl.simulate(lambda world: uneven(world, "local(period=2, after=4)", [1, 2]), ranks=2)


# Checkpoints.


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("local(period=3)", {"optimizer": "momentum"}),
        ("local(period=3, state='average')", {"optimizer": "adam"}),
        ("local(period=2, after=3)", {"optimizer": "momentum"}),
        ("local(period=2, fraction=0.5)", {"codec": "topk(0.1)|quantize(4)"}),
        ("local(period=2, after=2)", {"codec": "topk(0.1)"}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, spec: str, options: dict[str, Any]) -> None:
    check_resumes(tmp_path, spec, 7, ranks=2, **options)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_on_another_number_of_workers(tmp_path: Path, ranks: int) -> None:
    saved = everywhere("local(period=4)", 3, steps=6, save=tmp_path, optimizer="momentum")[0][-1]
    resumed = everywhere("local(period=4)", ranks, steps=6, first=6, load=tmp_path, optimizer="momentum")
    assert all(close(saved, found[-1]) for found in resumed)  # they begin with the model of all
    later = everywhere("local(period=4)", ranks, steps=11, first=6, load=tmp_path, optimizer="momentum")
    assert all(torch.equal(later[0][1], found[1]) for found in later)  # and meet at the eighth step, all of them
    assert ranks == 1 or not torch.equal(later[0][2], later[1][2])


def test_a_synchronous_checkpoint_starts_an_asynchronous_run(tmp_path: Path) -> None:
    saved = everywhere("allreduce", 2, steps=4, save=tmp_path, algorithm="ring")[0][-1]
    found = everywhere("local(period=2)", 2, steps=4, first=4, load=tmp_path)
    assert all(torch.equal(saved, each[-1]) for each in found)


def test_looking_at_the_agreed_model_changes_nothing() -> None:
    def look(run: Any, step: int) -> Tensor:
        with run.agreed():
            return flat(run.model)

    looked, plain = everywhere("local(period=3)", look=look), everywhere("local(period=3)")
    assert all(torch.equal(one[-1], other[-1]) for one, other in zip(looked, plain, strict=True))
    assert all(torch.equal(looked[0][step], looked[2][step]) for step in range(12))


# Kinds of models.


def test_batch_norms_statistics_are_agreed_on_at_the_end() -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor, int]:
        model = net(norm=True)
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, "local(period=2)")
        for step in range(5):
            take(model, optimizer, world.rank, step)
        assert norm.running_mean is not None
        own = norm.running_mean.clone()
        run.close()
        assert norm.num_batches_tracked is not None
        return own, norm.running_mean, int(norm.num_batches_tracked)

    found = sl.simulate(work, ranks=3).results
    mean = torch.stack([own for own, _, _ in found]).mean(dim=0)
    assert not torch.equal(found[0][0], found[1][0])
    for _, agreed, count in found:
        torch.testing.assert_close(agreed, mean)
        assert torch.equal(agreed, found[0][1])
        assert count == 5


@pytest.mark.parametrize("codec", [None, "quantize(8)"])
def test_half_precision_and_frozen_parameters(codec: str | None) -> None:
    def work(world: sl.World) -> tuple[Tensor, bool]:
        model = net().to(torch.bfloat16)
        first = model[0]
        assert isinstance(first, nn.Linear)
        first.bias.requires_grad_(False)
        before = first.bias.clone()
        wanted = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(wanted, lr=0.1)
        run = sl.distribute(model, optimizer, "local(period=2)", codec=codec)
        for step in range(5):
            x, y = batch(world.rank, step)
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x.to(torch.bfloat16)), y))
            optimizer.step()
        run.close()
        return flat(model), torch.equal(before, first.bias)

    found = sl.simulate(work, ranks=2).results
    assert found[0][0].dtype == torch.bfloat16
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1]


# What is told, and what is refused.


def test_it_tells_how_far_apart_workers_were() -> None:
    seen = everywhere("local(period=3)", steps=3, look=lambda run, step: run.stats.consensus)
    rows = torch.stack([found[2] for found in everywhere("local(period=4)", steps=3)])  # just before a round
    apart = (rows - rows.mean(dim=0)).double().square().sum() / 3
    assert seen[0][:2] == [None, None]
    assert all(found[2] == pytest.approx(float(apart.sqrt()), rel=1e-4) for found in seen)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"period": 0}, "period=0"),
        ({"period": 2.5}, "period=2.5"),
        ({"period": True}, "period=True"),
        ({"after": -1}, "after=-1"),
        ({"state": "drop"}, "keep, average, reset"),
        ({"fraction": 0.0}, "above 0"),
        ({"fraction": 1.5}, "at most 1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        Local(**arguments)


@pytest.mark.xdist_group("gloo")
def test_real_processes_end_with_the_simulators_bits(gloo: Pool) -> None:
    spec = "local(period=3)"
    real = gloo.run(on_gloo, 2, on_ring, spec)
    simulated = sl.simulate(lambda world: on_ring(world, spec), ranks=2).results
    assert all(torch.equal(one, other) for one, other in zip(real, simulated, strict=True))


def on_ring(world: sl.World, spec: str) -> Tensor:
    found: Tensor = train(world, spec, optimizer="momentum", algorithm="ring")[-1]
    return found
