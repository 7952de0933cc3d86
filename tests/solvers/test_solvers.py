"""`asgd` and the aggregations on problems whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import syncline as sl
from syncline.solvers import KMeans, LeastSquares, Logistic, Solution, aggregate, asgd
from syncline.solvers.asgd import AsgdOptions, Final, agree
from syncline.solvers.base import Data, Objective
from syncline.strategies.onesided.update import Array

TRUTH = np.array([1.0, -2.0, 0.5])
NETWORK = sl.Network(latency=5e-5, bandwidth=1e9)


def a_regression(samples: int = 2000) -> Data:
    random = np.random.default_rng(3)
    inputs = random.normal(size=(samples, 3))
    return inputs, inputs @ TRUTH + 0.1 * random.normal(size=samples)


def a_choice(samples: int = 4000) -> Data:
    random = np.random.default_rng(4)
    inputs = random.normal(size=(samples, 3))
    return inputs, (random.random(samples) < 1 / (1 + np.exp(-inputs @ TRUTH))).astype(float)


def blobs(points: int = 3000) -> Array:
    random = np.random.default_rng(5)
    centres = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0], [4.0, 4.0]])
    return centres[random.integers(5, size=points)] + 0.5 * random.normal(size=(points, 2))


def cost(samples: int) -> float:
    return 1e-5 * samples


def simulated(ranks: int, objective: Objective, data: Any, **options: Any) -> Solution:
    run = options.pop("run", {})
    results = sl.simulate(
        lambda world: asgd(objective, data, cost=cost, **options), ranks, network=NETWORK, **run
    ).results
    assert all(np.array_equal(each.state, results[0].state) for each in results), "all agree"
    assert all(each.efforts == results[0].efforts and each.value == results[0].value for each in results)
    first: Solution = results[0]
    return first


# What it finds.


@pytest.mark.parametrize("ranks", [1, 4])
def test_least_squares_reaches_the_closed_form(ranks: int) -> None:
    data = a_regression()
    exact = np.linalg.lstsq(data[0], data[1], rcond=None)[0]
    found = simulated(ranks, LeastSquares(), data, rate=0.3, rate_end=0.01, batch=20, epochs=10)
    np.testing.assert_allclose(found.state, exact, atol=0.01)
    assert found.value == pytest.approx(LeastSquares().value(exact, data), rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
def test_logistic_regression_reaches_newtons_answer(ranks: int) -> None:
    data, objective = a_choice(), Logistic(l2=0.01)
    exact = np.zeros(3)
    for _ in range(20):
        chances = 1 / (1 + np.exp(-data[0] @ exact))
        hessian = (data[0].T * (chances * (1 - chances))) @ data[0] / len(data[0]) + 0.01 * np.eye(3)
        exact = exact - np.linalg.solve(hessian, objective.delta(exact, data))
    found = simulated(ranks, objective, data, rate=2.0, rate_end=0.05, batch=20, epochs=10)
    np.testing.assert_allclose(found.state, exact, atol=0.03)
    assert found.value < objective.value(exact, data) + 1e-3


@pytest.mark.parametrize("final", ["mean", "first", "best"])
@pytest.mark.parametrize("part", [1.0, 0.3])
def test_k_means_finds_the_blobs(final: str, part: float) -> None:
    found = simulated(4, KMeans(5), blobs(), rate=0.3, rate_end=0.02, batch=25, epochs=2, final=final, part=part)
    assert found.value == pytest.approx(2 * 0.25, rel=0.05)
    assert found.total("accepted") > 0
    assert found.total("rejected") > 0


def test_with_one_worker_it_is_plain_sgd() -> None:
    data = a_regression(200)
    found = simulated(1, LeastSquares(), data, rate=0.1, batch=50, seed=7)
    state = np.zeros(3)
    order = np.random.default_rng([7, 0]).permutation(200)
    for first in range(0, 200, 50):
        chosen = order[first : first + 50]
        state = state - 0.1 * LeastSquares().delta(state, (data[0][chosen], data[1][chosen]))
    np.testing.assert_allclose(found.state, state, rtol=1e-12)
    assert found.efforts[0].sent == 0


def test_what_others_put_helps() -> None:
    """Rank 1 has no say in what rank 0 looks for, but a state of its own to offer."""
    data = a_regression()

    def case(world: sl.World, buffers: bool) -> Solution:
        # Rank 0 sees noise alone; who listens to the other comes nearer to the truth.
        own = data if world.rank else (data[0][:40], data[1][:40] + 3 * np.random.default_rng(0).normal(size=40))
        every = 1 if buffers else 10**9
        return asgd(
            LeastSquares(), own, rate=0.2, batch=10, epochs=200 if world.rank == 0 else 4, split=False, every=every,
            final="first", cost=cost,
        )  # fmt: skip

    alone = sl.simulate(lambda world: case(world, False), 2, network=NETWORK).results[0]
    heard = sl.simulate(lambda world: case(world, True), 2, network=NETWORK).results[0]
    assert alone.total("accepted") == 0
    assert heard.efforts[0].accepted > 0
    assert np.linalg.norm(heard.state - TRUTH) < np.linalg.norm(alone.state - TRUTH)


@pytest.mark.parametrize(("final", "wanted"), [("mean", 2.0), ("first", 3.0), ("best", 1.0)])
def test_what_all_agree_on(final: Final, wanted: float) -> None:
    def case(world: sl.World) -> float:
        own = np.ones((3, 1)), np.full(3, 1.1)  # the middle worker's state is nearest to it
        state = np.array([[3.0], [1.0], [2.0]][world.rank])
        return float(agree(LeastSquares(), own, state, final, world)[0])

    assert sl.simulate(case, 3).results == (wanted,) * 3


def test_the_same_seed_gives_the_same_bits() -> None:
    found = [simulated(3, KMeans(5), blobs(), batch=25, seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(found[0].state, found[1].state)
    assert not np.array_equal(found[0].state, found[2].state)


# How it goes.


def test_a_slow_worker_slows_nobody() -> None:
    even = simulated(4, KMeans(5), blobs(), batch=25)
    slowed = simulated(4, KMeans(5), blobs(), batch=25, run={"faults": [sl.faults.Slow(2, 8.0)]})
    for rank in (0, 1, 3):
        assert slowed.efforts[rank].seconds == pytest.approx(even.efforts[rank].seconds)
        assert slowed.efforts[rank].steps == even.efforts[rank].steps
    assert slowed.efforts[2].seconds == pytest.approx(8 * even.efforts[2].seconds)


def test_within_a_time_the_slow_worker_takes_fewer_steps() -> None:
    options: dict[str, Any] = {"batch": 25, "seconds": 0.05, "epochs": 1000}
    found = simulated(4, KMeans(5), blobs(), run={"faults": [sl.faults.Slow(2, 5.0)]}, **options)
    assert [effort.steps for effort in found.efforts] == [200, 200, 40, 200]


@pytest.mark.parametrize("ranks", [2, 16])
def test_time_falls_with_the_workers(ranks: int) -> None:
    points = blobs(6400)
    one, many = (simulated(size, KMeans(5), points, batch=10, buffers=2).seconds for size in (1, ranks))
    assert many == pytest.approx(one / ranks)


def test_the_mini_batch_follows_the_outgoing_queue() -> None:
    def last_batches(latency: float) -> list[int]:
        def case(world: sl.World) -> Solution:
            return asgd(LeastSquares(), a_regression(20000), batch=20, batch_most=160, cost=cost)

        found = sl.simulate(case, 2, network=sl.Network(latency=latency)).results[0]
        return [effort.batch for effort in found.efforts]

    assert last_batches(1e-6) == [20, 20], "every put is in place before the next"
    assert last_batches(1.0) == [160, 160], "none ever is"
    between = last_batches(5e-4)  # as long as 50 samples take
    assert all(20 < batch < 160 for batch in between)


def test_nothing_is_sent_beyond_what_is_counted() -> None:
    world_messages = sl.simulate(
        lambda world: asgd(LeastSquares(), a_regression(), batch=100, part=0.34, cost=cost), 2, network=NETWORK
    )
    found = world_messages.results[0]
    assert [effort.sent for effort in found.efforts] == [effort.steps for effort in found.efforts] == [10, 10]
    assert found.sent_bytes == 20 * (32 + 8), "a head and one element of three"


# The aggregations.


@pytest.mark.parametrize("ranks", [1, 3])
def test_least_squares_from_sums_is_exact(ranks: int) -> None:
    data = a_regression(100)
    found = sl.simulate(lambda world: aggregate(LeastSquares(), data), ranks).results[-1]
    np.testing.assert_allclose(found.state, np.linalg.lstsq(data[0], data[1], rcond=None)[0], rtol=1e-9)
    assert found.efforts[0].steps == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_lloyds_rounds_are_those_of_one_process(ranks: int) -> None:
    points, start = blobs(300), blobs(300)[:5].reshape(-1)
    found = sl.simulate(lambda world: aggregate(KMeans(5), points, start=start, iterations=4, tolerance=0), ranks)
    centres = start.reshape(5, 2)
    for _ in range(4):
        owners = ((points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        centres = np.array([points[owners == number].mean(axis=0) for number in range(5)])
    np.testing.assert_allclose(found.results[-1].state, centres.reshape(-1), rtol=1e-9)


def test_the_full_gradient_reaches_the_least_value() -> None:
    data, objective = a_choice(), Logistic(l2=0.01)
    found = sl.simulate(lambda world: aggregate(objective, data, rate=4.0, tolerance=1e-9), 3).results[0]
    assert np.abs(objective.delta(found.state, data)).max() < 1e-6
    assert found.efforts[0].steps < 100


def test_an_aggregation_waits_for_the_slowest() -> None:
    def seconds(*slow: sl.faults.Slow) -> float:
        def case(world: sl.World) -> Solution:
            return aggregate(KMeans(5), blobs(300), iterations=3, tolerance=0, cost=cost)

        found: Solution = sl.simulate(case, 4, faults=slow).results[0]
        return found.efforts[0].seconds

    assert seconds(sl.faults.Slow(2, 8.0)) > 5 * seconds()


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, r"asgd\(rate=0.0\): a number above 0"),
        ({"rate": float("nan")}, r"asgd\(rate=nan\)"),
        ({"part": 1.5}, "a share of the state, at most 1"),
        ({"batch": 0}, r"asgd\(batch=0\): a whole number, at least 1"),
        ({"buffers": 2.5}, r"asgd\(buffers=2.5\)"),
        ({"batch": 10, "batch_most": 5}, r"batch_most=5\): the most is less than the least"),
        ({"batch_most": 600.5}, r"asgd\(batch_most=600.5\): a whole number"),
        ({"final": "means"}, "unknown final 'means'; did you mean 'mean'"),
        ({"seconds": -1.0}, r"asgd\(seconds=-1.0\)"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.errors.SpecError, match=message):
        AsgdOptions(**options)


def test_data_that_cannot_be() -> None:
    with sl.init():
        with pytest.raises(sl.errors.IncompatibleError, match=r"have 3, 2 samples"):
            asgd(LeastSquares(), (np.ones((3, 1)), np.ones(2)))
        with pytest.raises(sl.errors.IncompatibleError, match=r"not \(3, 1\)"):
            asgd(LeastSquares(), np.ones((3, 1)))
        with pytest.raises(sl.errors.IncompatibleError, match="has 3 points and is to choose 4 centres"):
            asgd(KMeans(4), np.ones((3, 1)))
        with pytest.raises(sl.errors.SpecError, match=r"KMeans\(k=0\)"):
            KMeans(0)


def test_fewer_samples_than_workers() -> None:
    with pytest.raises(sl.errors.IncompatibleError, match="2 samples are too few for 3 workers"):
        sl.simulate(lambda world: asgd(KMeans(1), np.ones((2, 1))), 3)


def test_samples_that_differ_between_workers() -> None:
    def case(world: sl.World) -> Solution:
        return asgd(KMeans(1), np.ones((4, 1 + world.rank)), split=False)

    with pytest.raises(
        sl.errors.IncompatibleError, match="a sample of rank 1 is 2 numbers in 1 arrays, one of rank 0 is 1"
    ):
        sl.simulate(case, 2)


def test_a_rate_that_is_too_high_is_named() -> None:
    with (
        sl.init(),
        pytest.raises(
            sl.errors.DivergedError, match=r"rank 0 is not finite after \d+ steps?: lower the rate, which is 100"
        ),
    ):
        asgd(LeastSquares(), a_regression(), rate=100.0, batch=10, epochs=10)
