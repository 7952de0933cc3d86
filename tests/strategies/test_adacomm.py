"""AdaComm: the rule, the loss that drives it, and that all workers have the same period at all times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.errors import SpecError
from syncline.strategies import strategy_run
from syncline.strategies.adacomm import AdaComm, next_period
from syncline.training.loop import train as train_loop
from syncline.training.settings import Settings
from tests.strategies.averaging_cases import Scale, batch, net, push
from tests.strategies.cases import backward, flat
from tests.training.tiny import Tiny


def periods(losses: Sequence[float], start: int = 16) -> list[int]:
    found = [start]
    for loss in losses[1:]:
        found.append(next_period(start, found[-1], loss / losses[0]))
    return found


def test_the_catch() -> None:
    assert periods([2, 1, 0.5, 0.125]) == [16, 12, 8, 4]
    assert periods([2, 1, 0.5, 0.125, 0.125, 0.125, 0.125]) == [16, 12, 8, 4, 2, 1, 1]


def test_a_loss_that_grows_halves_it() -> None:
    assert periods([1, 4, 9]) == [16, 8, 4]


def test_a_smaller_rate_bears_a_longer_period() -> None:
    assert next_period(16, 4, 1 / 64, slower=4.0, before=4.0) == 2  # wanted 4: a plateau
    assert next_period(16, 4, 1 / 256, slower=4.0, before=4.0) == 2
    assert next_period(16, 4, 1 / 16, slower=4.0, before=1.0) == 4  # √(4/16)·16 = 8, as before at this rate
    assert next_period(16, 4, 1 / 30, slower=4.0, before=1.0) == 6  # better than before: from 4 to 6
    assert next_period(16, 16, 0.9, slower=100.0, before=1.0) == 16  # never above where it began


def told(
    world: sl.World, rule: AdaComm, losses: Sequence[float], steps: int, rates: Sequence[float] = (), **options: Any
) -> list[int]:
    """The period after each step, where worker i is told the step's loss times its own factor, of mean 1."""
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run: Any = sl.distribute(model, optimizer, rule, **options)
    factor = 2.0 * (world.rank + 1) / (world.size + 1)
    seen = []
    for step in range(steps):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        world.compute(0.01 * (world.rank + 1))
        if losses:
            run.note_loss(losses[min(step, len(losses) - 1)] * factor)
        push(model, optimizer, 1.0)
        seen.append(run.period)
    run.close()
    return seen


def shared(rule: AdaComm, losses: Sequence[float], steps: int, **how: Any) -> list[int]:
    """The period after each step, the same on all workers."""
    results = sl.simulate(lambda world: told(world, rule, losses, steps, **how), ranks=3).results
    assert all(each == results[0] for each in results)
    found: list[int] = results[0]
    return found


def test_the_period_follows_the_mean_loss_of_all_workers() -> None:
    # The first round of 4 steps has F₀ = 2; then intervals of 4 steps or a period, whatever is longer.
    losses = [2.0] * 4 + [0.5] * 4 + [0.5] * 100
    found = shared(AdaComm(start=4, interval=4), losses, 14)
    assert found[:7] == [4] * 7
    assert found[7:11] == [2] * 4  # √(1/4) · 4
    assert found[11:] == [1] * 3  # a plateau


def test_losses_that_differ_give_one_period() -> None:
    """Worker 1 has two thirds of the loss, and loses them: a third is left, and √⅓ · 4 is above 2."""

    def work(world: sl.World) -> list[int]:
        return told(world, AdaComm(start=4, interval=4), [2.0] * 4 + [0.0 if world.rank else 2.0] * 4, 8)

    assert [found[-1] for found in sl.simulate(work, ranks=2).results] == [3, 3]


def test_a_period_never_falls_below_the_least() -> None:
    losses = [2.0] * 4 + [0.01] * 100
    assert min(shared(AdaComm(start=4, interval=4, least=3), losses, 20)) == 3


def test_a_rate_that_falls_keeps_the_period_up() -> None:
    falling = shared(AdaComm(start=8, interval=8), [2.0] * 8 + [0.4] * 100, 16, rates=[1.0] * 8 + [0.25] * 8)
    assert falling[-1] == 8  # √(4 · .2) · 8 = 7.2, and up
    assert shared(AdaComm(start=8, interval=8), [2.0] * 8 + [0.4] * 100, 16)[-1] == 4


def test_a_warm_up_is_no_reason_to_meet_more_often() -> None:
    losses = [2.0] * 4 + [1.0] * 100
    found = shared(AdaComm(start=4, interval=4), losses, 8, rates=[0.01] * 4 + [1.0] * 4)
    assert found[-1] == 3  # √½ · 4; a hundredth of η₀ / η would make it 1


def test_by_the_clock_of_rank_0() -> None:
    # A step takes 0.03 s at the pace of the slowest; the clocks of the workers differ.
    found = shared(AdaComm(start=2, seconds=0.25), [2.0] * 2 + [0.3] * 100, 30)
    assert found[0] == 2
    assert found[-1] == 1
    assert found.index(1) > 4


def test_without_a_loss_it_says_so_once_and_keeps_its_period(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="syncline"):
        found = shared(AdaComm(start=2, interval=4), [], 20)
    assert set(found) == {2}
    words = [record.getMessage() for record in caplog.records if "note_loss" in record.getMessage()]
    assert len(words) == 1
    assert "keeps its period of 2" in words[0]


def test_a_round_without_steps_is_no_interval_without_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Where data ends, workers meet once more with nothing done since the last round."""

    def work(world: sl.World) -> int:
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = sl.distribute(model, optimizer, AdaComm(start=2, interval=1))
        for _ in range(2):
            for _ in run.shard([torch.zeros(1)] * (2 + 2 * world.rank), split=False):
                run.note_loss(1.0)
                push(model, optimizer, 1.0)
        rounds: int = run.rounds  # type: ignore[attr-defined]
        run.close()
        return rounds

    with caplog.at_level(logging.WARNING, logger="syncline"):
        assert min(sl.simulate(work, ranks=2).results) > 4
    assert not [record for record in caplog.records if "note_loss" in record.getMessage()]


def test_a_loss_that_is_not_finite_is_none() -> None:
    assert set(shared(AdaComm(start=2, interval=2), [float("nan")] * 30, 10)) == {2}


def test_one_worker_is_asked_for_nothing() -> None:
    def work(world: sl.World) -> bool:
        model = Scale()
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AdaComm())
        wanted = strategy_run(run).wants_loss
        run.close()
        return wanted

    assert sl.simulate(work, ranks=1).results == (False,)
    assert sl.simulate(work, ranks=2).results == (True, True)


def test_the_loop_tells_the_loss() -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}
    found: list[int] = []

    class Watched(AdaComm):
        def attach(self, model: Any, optimizer: Any, communicator: Any, settings: Any) -> Any:
            run = super().attach(model, optimizer, communicator, settings)
            note = run.note_loss

            def watch(loss: Any) -> None:
                seen[communicator.rank].append(float(loss))
                found.append(run.period)  # type: ignore[attr-defined]
                note(loss)

            run.note_loss = watch  # type: ignore[method-assign]
            return run

    def work(world: sl.World) -> int:
        outcome = train_loop(
            Tiny(samples=64), Settings(epochs=4, batch=4), world=world, strategy=Watched(start=4, interval=4)
        )
        return outcome.steps

    [steps, _] = sl.simulate(work, ranks=2).results
    assert len(seen[0]) == len(seen[1]) == steps
    assert seen[0] != seen[1]
    assert found[0] == 4
    assert min(found) < 4


def test_micro_batches_are_one_loss() -> None:
    seen: list[float] = []

    class Watched(AdaComm):
        def attach(self, model: Any, optimizer: Any, communicator: Any, settings: Any) -> Any:
            run = super().attach(model, optimizer, communicator, settings)
            run.note_loss = lambda loss: seen.append(float(loss))  # type: ignore[method-assign]
            return run

    def work(world: sl.World) -> int:
        settings = Settings(epochs=1, batch=2, global_batch=16)
        return train_loop(Tiny(samples=64), settings, world=world, strategy=Watched()).steps

    [steps, _] = sl.simulate(work, ranks=2).results
    assert len(seen) == 2 * steps
    assert all(0.2 < loss < 2.0 for loss in seen)  # about log 2, the mean of four; not their sum


def told_and_saved(
    world: sl.World, first: int, last: int, load: Path | None, save: Path | None
) -> tuple[list[Any], list[int]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    run: Any = sl.distribute(model, optimizer, AdaComm(start=4, interval=5))
    if load is not None:
        sl.load(load, run=run)
    seen, had = [], []
    for step in range(first, last):
        x, y = batch(world.rank, step % 3)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        backward(loss)
        run.note_loss(loss)
        optimizer.step()
        seen.append(flat(model))
        had.append(run.period)
    if save is not None:
        sl.save(save, step=last, run=run)
    run.close()
    return seen, had


def test_a_resumed_run_has_the_same_periods_and_bits(tmp_path: Path) -> None:
    whole = sl.simulate(lambda world: told_and_saved(world, 0, 20, None, None), ranks=2).results
    assert len(set(whole[0][1])) > 2
    for stop in (1, 4, 6, 9, 14):
        place = tmp_path / str(stop)
        sl.simulate(partial(told_and_saved, first=0, last=stop, load=None, save=place), ranks=2)
        rest = sl.simulate(partial(told_and_saved, first=stop, last=20, load=place, save=None), ranks=2).results
        for (bits, had), (bits_wanted, had_wanted) in zip(rest, whole, strict=True):
            assert had == had_wanted[stop:], stop
            assert all(torch.equal(a, b) for a, b in zip(bits, bits_wanted[stop:], strict=True)), stop


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"start": 0}, "start=0"),
        ({"interval": 0}, "interval=0"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": True}, "seconds=True"),
        ({"seconds": 1.0, "interval": 5}, "leave one of them out"),
        ({"start": 4, "least": 5}, "at most that"),
        ({"state": "drop"}, "keep, average, reset"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        AdaComm(**arguments)
