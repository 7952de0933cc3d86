"""The evaluator alone, with scripted workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import syncline as sl
from syncline.control import ControlChannel
from syncline.errors import PeerLostError
from syncline.strategies import AllReduce, Strategy
from syncline.training.control_state import REASONS, ControlState, post_staleness
from syncline.training.evaluator import Evaluator, is_evaluator, wants_evaluator
from syncline.training.settings import Settings
from syncline.world import World
from tests.hunting import seeds
from tests.training.asynchronous_strategy import Common, MemoryChannel, PlainAsynchronous
from tests.training.tiny import Tiny

Script = Callable[[World, MemoryChannel], None]


def watched(
    script: Script, settings: Settings, seed: int = 0, timeout: float = 300.0, late: float = 0.0
) -> ControlState:
    """Rank 0 imitates two workers; rank 1 evaluates, with its own clock. Returns the posts."""
    common = Common(2)
    workload = Tiny()
    resolved = settings.resolved(workload, 2)

    def work(world: World) -> None:
        board = MemoryChannel(common, world, latency=1e-4)
        model = workload.model(0)
        if world.rank == 1:
            world.compute(late)
        if world.rank == 0:
            common.weights |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
            world.compute(0.5)  # preparing
            notes = ControlState(board)
            while not notes.ready:
                world.compute(0.01)
                notes.read()
            script(world, board)
            return
        Evaluator(board, workload, resolved, model, workers=2, runtime=world.runtime, timeout=timeout).run()

    sl.simulate(work, ranks=2, seed=seed)
    notes = ControlState(MemoryChannel(common))
    notes.read()
    return notes


def steady(world: World, board: MemoryChannel, steps: int = 10, seconds: float = 0.1) -> None:
    nan = float("nan")
    board.post("start", [0.0, -1, nan, 0, nan])
    for _ in range(steps):
        if board.stop_requested():
            break
        world.compute(seconds)
        board.common.steps = [count + 1 for count in board.common.steps]
    board.post("over", [REASONS.index("steps"), 0.0, 10])


@pytest.mark.parametrize("late", [0.0, 2.0])
@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_evaluates_after_each_multiple_of_steps(seed: int, late: float) -> None:
    """Also if its process starts seconds after the workers: they wait for it, and it uses their clock."""
    notes = watched(steady, Settings(epochs=9, evaluate_every=3), seed, late=late)
    assert [one.rounds for one in notes.evaluations] == [6, 12, 18, 20]
    assert [one.samples for one in notes.evaluations][:2] == [24, 48]
    assert notes.test is not None
    for one in notes.evaluations[:3]:
        true = one.rounds / 2 * 0.1
        assert true <= one.elapsed < true + 0.1, "soon after; and its own clock never says earlier than it was"


def test_a_slow_evaluator_skips_multiples() -> None:
    """Steps are faster than evaluations: it evaluates the current weights, and no multiple twice."""
    notes = watched(lambda world, board: steady(world, board, 60, 1e-5), Settings(epochs=99, evaluate_every=1))
    rounds = [one.rounds for one in notes.evaluations]
    assert rounds == sorted(set(rounds))
    assert len(rounds) < 60
    assert rounds[-1] == 120


def test_the_target_ends_the_run() -> None:
    settings = Settings(epochs=99, evaluate_every=2, target=0.01, evaluations_after=1)
    notes = watched(lambda world, board: steady(world, board, 50), settings)
    assert notes.target
    assert len(notes.evaluations) == 2
    assert notes.over is not None


def test_a_run_that_never_starts_times_out() -> None:
    with pytest.raises(PeerLostError, match="waited 2 s for rank 0"):
        watched(lambda world, board: world.compute(10.0), Settings(epochs=1), timeout=2.0)


def test_a_run_without_steps_times_out() -> None:
    def still(world: World, board: MemoryChannel) -> None:
        board.post("start", [0.0, -1, float("nan"), 0, float("nan")])
        world.compute(10.0)

    with pytest.raises(PeerLostError, match=r"no step of any worker for 2 s \(steps: \[0, 0\]\)"):
        watched(still, Settings(epochs=1), timeout=2.0)


def test_a_stopped_run_is_not_tested() -> None:
    def stopped(world: World, board: MemoryChannel) -> None:
        board.post("start", [0.0, -1, float("nan"), 0, float("nan")])
        board.post("over", [REASONS.index("signal"), 1.0, 3])

    notes = watched(stopped, Settings(epochs=1))
    assert notes.test is not None
    assert notes.test[0] != notes.test[0], "NaN: its last word, and no result"
    assert notes.evaluations == []


def test_long_histograms_are_split_over_posts() -> None:
    counts = {staleness: staleness + 1 for staleness in range(40)}

    def work(world: World) -> dict[int, dict[int, int]]:
        board = MemoryChannel(Common(1), world)
        post_staleness(board, 0, counts)
        post_staleness(board, 3, {2: 5})
        notes = ControlState(board)
        notes.read()
        return notes.staleness

    assert sl.simulate(work, ranks=1).results[0] == {0: counts, 3: {2: 5}}


def test_strategies_that_want_an_evaluator_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(PlainAsynchronous):
        def observe(self, model: torch.nn.Module, network: object) -> ControlChannel | None:
            return None

    found: list[Strategy] = [AllReduce(), PlainAsynchronous(), Seen()]
    assert [wants_evaluator(strategy) for strategy in found] == [False, False, True]
    assert not is_evaluator()
    monkeypatch.setenv("SYNCLINE_ROLE", "evaluator")
    assert is_evaluator()
