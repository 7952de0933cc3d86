"""`strategy="auto"` on the simulator, where time is exact: what it chooses, why, and that all ranks choose alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.planner.choice import measure_gradients
from syncline.planner.measured_cluster import describe_network, measured_device
from syncline.strategies import AutoStrategy
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.transports.faults import Join
from syncline.transports.network import Link
from syncline.world import World
from tests.training.tiny import Tiny

SLOW, FAST = sl.Network(latency=50e-6, bandwidth=12.5e6), sl.Network(latency=5e-6, bandwidth=100e9)
COMPUTE_S = 0.01
"""Virtual seconds of forward and backward."""
INSIDE = Link(latency=1e-6, bandwidth=1e10)
LOCAL, TOPK = "local(period=8)", "topk(0.01)"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Dropout(0.1), nn.Linear(512, 10))


def step_of(world: World, model: nn.Module) -> Callable[[], None]:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(world.rank))

    def step() -> None:
        world.compute(COMPUTE_S)
        model(inputs).sum().backward()

    return step


def choose(auto: Any, *, ranks: int = 4, network: sl.Network = SLOW, timed: bool = True, **options: Any) -> Any:
    """What `auto` chooses, and the mean virtual seconds of 16 steps with it. All ranks must agree."""

    def run(world: World) -> tuple[dict[str, Any], float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = step_of(world, model)
        strategy = AutoStrategy(allow=auto, step=step if timed else None) if isinstance(auto, (tuple, list)) else auto
        with sl.distribute(model, optimizer, strategy, **options) as found:
            begin = world.runtime.now()
            for _ in range(16):
                step()
                optimizer.step()
                optimizer.zero_grad()
            return found.config, (world.runtime.now() - begin) / 16

    results = sl.simulate(run, ranks=ranks, network=network).results
    assert all(config["auto"] == results[0][0]["auto"] for config, _ in results)
    return results[0]


@pytest.mark.parametrize(
    ("allow", "network", "wanted"),
    [
        ((), SLOW, ("allreduce", None)),
        ((LOCAL,), SLOW, ("local(period=8)", None)),
        ((LOCAL, TOPK), SLOW, ("allreduce", TOPK)),
        ((LOCAL, TOPK), FAST, ("allreduce", None)),
    ],
)
def test_the_fastest_candidate_is_chosen(allow: tuple[str, ...], network: sl.Network, wanted: tuple[str, Any]) -> None:
    config, seconds = choose(allow, network=network)
    choice = config["auto"]
    assert (choice["strategy"], choice["codec"]) == wanted
    assert config["codec"] == choice["codec"]
    assert choice["step_s"] == pytest.approx(seconds, rel=0.05)
    assert choice["step_s"] <= 1.02 * min(choice["predicted"].values())
    assert len(choice["predicted"]) == 1 + len(allow)


def test_without_the_seconds_of_a_step_nothing_changes_training() -> None:
    """Nothing is guessed: what is not known is named, and all-reduce stays."""
    config, _ = choose(f"auto(allow='{LOCAL}')")
    assert config["strategy"] == "allreduce"
    assert "the step time is not known" in config["auto"]["reason"]
    assert "local(period=8)" in config["auto"]["reason"]
    config, _ = choose("auto")
    assert "nothing else is allowed" in config["auto"]["reason"]
    config, _ = choose((LOCAL,), ranks=1)
    assert config["auto"]["reason"] == "allreduce: one worker exchanges nothing"


def test_a_codec_of_the_user_is_that_of_every_candidate() -> None:
    config, _ = choose((LOCAL,), codec="cast('fp16')")
    assert (config["strategy"], config["codec"]) == ("local", "cast('fp16')")
    assert list(config["auto"]["predicted"]) == ["allreduce with cast('fp16')", "local(period=8) with cast('fp16')"]
    with pytest.raises(IncompatibleError, match="strategy allreduce alone"):
        choose((LOCAL,), codec="topk(0.1, clip=1.0)")
    with pytest.raises(SpecError, match="leave 'topk"):
        choose((TOPK,), codec="cast('fp16')")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto(allow='ssp(slack=2)')", "does not predict well enough"),
        ("auto(allow='allreduce')", "a candidate anyway"),
        ("auto(allow='local(period=4, after=10)')", "by its period alone"),
        ("auto(allow='locale')", "did you mean 'local'"),
        ("auto(allow=3)", "a spec such as"),
        ("auto(allow=['quantize(99)'])", "quantize"),
        ("auto(profile='none.json')", r"none\.json"),
        ("auto(step=1)", "a function"),
        ("auto(earlier=1)", "config.json of an earlier run"),
    ],
)
def test_what_cannot_be_chosen_is_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        choose(spec, ranks=2)


@pytest.mark.parametrize("other", ["allreduce", f"auto(allow='{LOCAL}')"])
def test_ranks_that_ask_for_different_strategies_are_refused(other: str) -> None:
    def run(world: World) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, "auto" if world.rank else other)

    with pytest.raises(IncompatibleError, match="different"):
        sl.simulate(run, ranks=2)


@pytest.mark.parametrize("parallel", ["pipeline(2) x auto", "tensor({'0': 'columns', '3': 'rows'}, 2)"])
def test_divided_models_are_refused(parallel: str) -> None:
    def run(world: World) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = None if "auto" in parallel else "auto"
        loss_fn = nn.functional.cross_entropy if strategy is None else None
        sl.distribute(model, optimizer, strategy, parallel=parallel, loss_fn=loss_fn)

    with pytest.raises(IncompatibleError, match="every worker has whole"):
        sl.simulate(run, ranks=2)


@pytest.mark.parametrize(
    ("allow", "several", "algorithm", "message"),
    [(LOCAL, True, "auto", "local takes one optimizer"), (TOPK, False, "ring", "cannot be added")],
)
def test_candidates_that_cannot_train_are_refused_before_a_step(
    allow: str, several: bool, algorithm: str, message: str
) -> None:
    """Whether they would be the fastest does not matter: the same call is refused on every network."""

    def run(world: World) -> None:
        model = make_model()
        every = list(model.parameters())
        parts = [every[:1], every[1:]] if several else [every]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        strategy = AutoStrategy(allow=allow, step=lambda: pytest.fail("a step was timed"))
        sl.distribute(model, optimizers, strategy, algorithm=algorithm)

    with pytest.raises(IncompatibleError, match=message):
        sl.simulate(run, ranks=2, network=FAST)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_whose_step_cannot_be_timed_counts_as_nothing(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """LBFGS needs a closure, SparseAdam sparse gradients. Both train with `auto` as with the strategy that it takes."""

    def run(world: World) -> str:
        model = nn.Embedding(8, 64, sparse=kind is torch.optim.SparseAdam)
        places = torch.arange(4)
        optimizer = kind(model.parameters())
        strategy = AutoStrategy(allow=LOCAL, step=lambda: model(places).square().sum().backward())
        with sl.distribute(model, optimizer, strategy) as found:
            return str(found.config["auto"]["strategy"])

    assert set(sl.simulate(run, ranks=2, network=SLOW).results) == {LOCAL}
    assert f"cannot time a step of {kind.__name__}" in caplog.text


def test_measuring_leaves_the_model_as_it_is() -> None:
    """Weights, buffers, gradients, modes and random numbers, although the step draws and accumulates."""
    model = make_model().eval()
    inputs = torch.randn(4, 64)
    model(inputs).sum().backward()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    held = [each.grad for each in model.parameters()]
    random_state = torch.get_rng_state()
    clock = iter(range(10_000))
    profile = measure_gradients(model, lambda: model(inputs).sum().backward(), lambda: float(next(clock)))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(now.grad is then for now, then in zip(model.parameters(), held, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training
    assert set(profile.names) == {name for name, _ in model.named_parameters()}
    assert {"3.weight", "3.bias"} == set(profile.names[-2:])
    assert sum(each.parameter_bytes for each in profile.layers) == sum(each.nbytes for each in model.parameters())
    # One tick of the clock passes before each gradient, and one after the last: 6 gradients, 7 ticks.
    assert profile.seconds == pytest.approx(7)
    assert [each.backward_s for each in profile.layers] == [1, 1, 1, 1, 1, 0]
    with pytest.raises(SpecError, match="backward"):
        measure_gradients(model, lambda: None, lambda: 0.0)


def test_the_measured_network_is_a_cluster() -> None:
    device = measured_device(1e10)
    network = sl.Network(latency=1e-4, bandwidth=1e8, per_message=1e-5, ranks_per_host=4, inside=INSIDE)
    cluster = describe_network(network, 16, 4, device, step_noise=0.0)
    assert (cluster.hosts, cluster.devices_per_host) == (4, 4)
    assert cluster.levels[1].bandwidth == pytest.approx(4e8)  # of a host: its four ranks send at the same time
    assert cluster.levels[1].latency_s == pytest.approx(1.1e-4)
    assert cluster.group(16, stride=1).slowest == "network"
    flat = sl.Network(latency=1e-4, bandwidth=1e8, combine=2e-8)
    assert describe_network(flat, 3, 1, device, step_noise=0.0).hosts == 1
    apart = describe_network(flat, 3, 3, device, step_noise=0.0)
    assert (apart.hosts, apart.devices_per_host) == (3, 1)
    assert apart.group(3, stride=1).bandwidth == pytest.approx(5e7)  # 1/β' = 1/β + γ/2


def trained(folder: Path, allow: str, *, ranks: int = 4, epochs: int = 1, resume: bool = False) -> dict[str, Any]:
    """The config.json of a simulated `syncline train --strategy auto`."""
    settings = Settings(strategy=f"auto(allow={allow!r})" if allow else "auto", epochs=epochs)
    options: dict[str, Any] = {"folder": folder, "resume": resume, "seconds_a_sample": 1e-4}
    sl.simulate(lambda world: train(Tiny(), settings, world=world, **options), ranks=ranks, network=SLOW)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_train_writes_the_choice_and_keeps_it(tmp_path: Path) -> None:
    """A run that is continued keeps the choice, unless it has other workers or may choose among others."""
    first = trained(tmp_path, LOCAL)
    choice = first["run"]["auto"]
    assert (first["strategy"], first["run"]["strategy"]) == (f"auto(allow={LOCAL!r})", "local")
    assert choice["step_s"] == pytest.approx(4e-4, rel=0.5)
    assert choice["interval_s"][0] <= choice["step_s"] <= choice["interval_s"][1]
    assert choice["reason"].startswith("local(period=8): a step of")
    assert not choice["kept"]
    again = trained(tmp_path, LOCAL, epochs=2, resume=True)["run"]["auto"]
    assert again == {**choice, "kept": True}
    fewer = trained(tmp_path, LOCAL, ranks=2, epochs=3, resume=True)["run"]["auto"]
    assert (fewer["workers"], fewer["kept"]) == (2, False)
    other = trained(tmp_path, "", ranks=2, epochs=4, resume=True)
    assert (other["run"]["strategy"], other["run"]["auto"]["kept"]) == ("allreduce", False)


def test_auto_trains_like_the_strategy_that_it_takes(tmp_path: Path) -> None:
    """Measuring draws no random number and changes no weight: the same bits."""
    weights = []
    for strategy in ("auto", "allreduce"):
        workload = Tiny()
        settings = Settings(strategy=strategy, epochs=1, collective="ring")
        sl.simulate(lambda world, w=workload, s=settings: train(w, s, world=world), ranks=2)  # type: ignore[misc]
        weights.append(workload.weights())
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


def test_a_newcomer_of_an_elastic_job_takes_the_choice_of_the_others() -> None:
    """It measures nothing, and would choose all-reduce: its own step takes long."""

    def run(world: World) -> dict[str, Any]:
        assert world.elastic is not None
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        joins = world.elastic.joining
        timed = []

        def step() -> None:
            timed.append(world.rank)
            step_of(world, model)()

        strategy = AutoStrategy(allow=(LOCAL,), step=step)
        with sl.distribute(model, optimizer, strategy) as found:
            assert bool(timed) != joins
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 64)), batch_size=4)
            for (batch,) in found.shard(loader):
                world.compute(COMPUTE_S)
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {**found.config["auto"], "joins": joins, "size": world.size}

    found = sl.simulate(run, ranks=2, network=SLOW, elastic=(1, 3), faults=[Join(at=0.3)])
    assert [each["joins"] for each in found.results] == [False, False, True]
    assert {(each["strategy"], each["workers"], each["size"]) for each in found.results} == {(LOCAL, 2, 3)}
