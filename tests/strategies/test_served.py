"""What the strategies of the parameter server share: keys, rates, buffers, states, boards, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import DivergedError, IncompatibleError, PeerLostError
from syncline.server import network_of
from syncline.strategies.bsp import BSP
from syncline.strategies.key_map import KeyMap
from syncline.transports import Transport
from syncline.transports.faults import Kill
from syncline.world.simulation import ExtraProcess
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp
from tests.strategies.served_cases import Tags, apart, batch, loss_of, results, servers, step_tag


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str = "bsp", **options: Any) -> Any:
    algorithm = "ring" if options.get("codec") is None else "auto"
    return sl.distribute(model, optimizer, strategy=strategy, algorithm=algorithm, **options)


def in_groups(model: nn.Sequential) -> torch.optim.Optimizer:
    """Groups that do not follow the model's order, one of them with nothing to train."""
    frozen = next(model[2].parameters())
    frozen.requires_grad_(False)
    return torch.optim.SGD(
        [
            {"params": [*model[4].parameters()], "lr": 0.1, "momentum": 0.5},
            {"params": [frozen], "lr": 9.0},
            {"params": [*model[0].parameters(), *list(model[2].parameters())[1:]], "lr": 0.02},
        ],
        lr=0.1,
    )


def test_keys_follow_the_groups() -> None:
    model = mlp()
    keys = KeyMap.of(model, in_groups(model))
    assert [field.name for field in keys.parameters] == ["4.weight", "4.bias", "0.weight", "0.bias", "2.bias"]
    assert [(group.number, group.first, group.after) for group in keys.groups] == [(0, 0, 27), (2, 27, 147)]
    row = keys.read(model)
    other = mlp(seed=1)
    KeyMap.in_order(other, keys.order).write(other, row)
    for field in keys.parameters:
        assert torch.equal(other.get_parameter(field.name), model.get_parameter(field.name))
    assert not torch.equal(other.get_parameter("2.weight"), model.get_parameter("2.weight"))


# Steps.


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.5**step, lambda _: 1.0, lambda step: 1.0 + step]
    )


def test_each_group_has_its_rule_and_its_current_rate() -> None:
    model = mlp()
    optimizer = in_groups(model)
    scheduler = scheduled(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        backward(loss_of(model, 0, step))
        optimizer.step()
        scheduler.step()

    def work(world: sl.World) -> Tensor:
        own = mlp()
        optimizer = in_groups(own)
        scheduler = scheduled(optimizer)
        with distributed(own, optimizer):
            for step in range(5):
                optimizer.zero_grad()
                backward(loss_of(own, 0, step))  # the same batch everywhere: the mean of two is one's
                optimizer.step()
                scheduler.step()
        return flat(own)

    assert all(torch.equal(found, flat(model)) for found in results(work, 2, dedicated=1))


def test_gradients_are_back_after_the_step() -> None:
    def work(world: sl.World) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with distributed(model, optimizer):
            backward(loss_of(model, world.rank, 0))
            before = [parameter.grad for parameter in model.parameters()]
            weights = flat(model)
            optimizer.step()
            assert all(kept is parameter.grad for kept, parameter in zip(before, model.parameters(), strict=True))
            assert not torch.equal(weights, flat(model))
            assert not optimizer.state, "the optimizer here has taken no step"

    results(work, 2)


def test_accumulated_gradients_are_pushed_together() -> None:
    def work(world: sl.World, halves: bool) -> Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distributed(model, optimizer) as run:
            x, y = batch(world.rank, 0, rows=8)
            for rows in (slice(0, 4), slice(4, 8)) if halves else (slice(0, 8),):
                with run.no_sync():
                    backward(nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum"))
            optimizer.step()
        return flat(model)

    halves, whole = (results(partial(work, halves=halves), 2)[0] for halves in (True, False))
    torch.testing.assert_close(halves, whole)


def test_missing_and_sparse_gradients() -> None:
    """Where there is none it counts as zeros; an embedding's is made dense."""

    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        words, spare = nn.Embedding(4, 2, sparse=True), nn.Linear(1, 1, bias=False)
        nn.init.zeros_(words.weight)
        nn.init.ones_(spare.weight)
        model = nn.ModuleList([words, spare])
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        with distributed(model, optimizer):
            loss = words(torch.tensor([world.rank])).sum()
            if world.rank == 1:
                loss = loss + spare(torch.ones(1, 1)).sum()
            backward(loss)
            optimizer.step()
        return words.weight.detach(), spare.weight.detach()

    for words, spare in results(work, 2):
        assert words.tolist() == [[-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
        assert spare.item() == 0.0


def test_half_precision_is_cast() -> None:
    def work(world: sl.World) -> nn.Linear:
        model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with distributed(model, optimizer):
            backward(model(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
            optimizer.step()
        return model

    found = results(work, 2)[0].weight
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[-1.0, -1.0]]


def test_a_batch_counts_by_its_weight() -> None:
    def work(world: sl.World) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with distributed(model, optimizer) as run:
            run.set_weight(1.5 if world.rank == 0 else 0.5)
            backward(model(torch.full((1, 1), 1.0 + world.rank)).sum())
            optimizer.step()
        return model.weight.item()

    assert results(work, 2) == (-1.25, -1.25)  # (1.5 · 1 + 0.5 · 2) / 2


def test_no_worker_waits_for_one_without_data() -> None:
    def work(world: sl.World) -> list[int]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distributed(model, optimizer) as run:
            for step in range(6 if world.rank else 3):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
            run.control_channel().finish()
            world.barrier()
            steps: list[int] = run.control_channel().steps()
        return steps

    assert results(work, 3) == ([3, 6, 6],) * 3


# Buffers, agreed weights, boards.


@pytest.mark.parametrize("strategy", ["bsp", "ssp(slack=2)", "downpour(push=2, fetch=2)"])
def test_agreed_has_the_servers_weights_and_rank_0s_buffers(strategy: str) -> None:
    def work(world: sl.World) -> None:
        layer, norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        model = nn.Sequential(layer, norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distributed(model, optimizer, strategy) as run:
            for step in range(4):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
            run.control_channel().finish()
            world.barrier()
            assert norm.running_mean is not None
            means = sl.allgather(norm.running_mean).view(2, -1)
            own = norm.running_mean.clone()
            assert not torch.equal(means[0], means[1])
            with run.agreed():
                assert torch.equal(norm.running_mean, means[0])
                weights = sl.allgather(layer.weight.detach().reshape(-1)).view(2, -1)
                assert torch.equal(weights[0], weights[1])
            assert torch.equal(norm.running_mean, own)

    results(work, 2)


def test_a_channel_carries_posts_and_the_request_to_stop() -> None:
    def work(world: sl.World) -> list[Any]:
        model = Tags(2, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with distributed(model, optimizer) as run:
            control = run.control_channel()
            for step in range(50):
                world.compute(0.01)
                step_tag(model, optimizer, world.rank, step)
                if world.rank == 0 and step == 4:
                    control.post("news", [1.5, 2.0])
                    control.request_stop()
                if control.stop_requested():
                    break
            world.barrier()
            return [post.values for post in control.read_posts(0) if post.kind == "news"] + [step < 10]

    assert results(work, 2) == ([(1.5, 2.0), True],) * 2


def test_an_observer_reads_weights_and_steps() -> None:
    """An evaluator has the model and no optimizer: the workers tell it where each parameter lies."""
    seen: list[Any] = []

    def evaluate(channel: Transport) -> None:
        model = mlp(seed=5)
        control = BSP().observe(model, network_of(channel, 2, 1, 1))
        assert control is not None
        while control.steps() != [3, 3]:
            channel.runtime.sleep(0.01)
        control.load_weights(model)
        seen.append(model)
        control.post("seen", [1.0])
        control.close()

    def work(world: sl.World) -> nn.Module:
        model = mlp()
        optimizer = in_groups(model)
        with distributed(model, optimizer) as run:
            for step in range(3):
                optimizer.zero_grad()
                backward(loss_of(model, world.rank, step))
                optimizer.step()
            while not any(post.kind == "seen" for post in run.control_channel().read_posts(0)):
                world.runtime.sleep(0.01)
        return model

    aside = [*servers(2, 1, evaluators=1), ExtraProcess(evaluate, role="evaluator")]
    trained = sl.simulate(work, 2, extra=aside).results[0]
    for name, parameter in seen[0].named_parameters():
        if name != "2.weight":  # frozen: it is each model's own
            assert torch.equal(parameter, trained.get_parameter(name)), name


# State.


@pytest.mark.parametrize("strategy", ["bsp", "bsp(factors=True)"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer: str, strategy: str) -> None:
    def train(run: Any, own: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            own.zero_grad()
            backward(loss_of(run.model, run.world.rank, step))
            own.step()

    def work(world: sl.World) -> Tensor:
        model = mlp()
        own = OPTIMIZERS[optimizer](model.parameters())
        run = distributed(model, own, strategy)
        train(run, own, range(4))
        world.barrier()
        state = run.state_dict()
        train(run, own, range(4, 6))  # what comes after is forgotten
        run.close()
        fresh = mlp(seed=9)
        own = OPTIMIZERS[optimizer](fresh.parameters())
        run = distributed(fresh, own, strategy)
        run.load_state_dict(state)
        assert run.control_channel().steps() == [4, 4]
        world.barrier()
        train(run, own, range(4, 10))
        run.close()
        return flat(fresh)

    wanted = results(apart(optimizer, strategy, 10), 2, dedicated=1)
    assert all(map(torch.equal, results(work, 2, dedicated=1), wanted))


def test_unsent_values_are_in_the_state() -> None:
    def work(world: sl.World, options: dict[str, Any]) -> dict[str, Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distributed(model, optimizer, **options) as run:
            backward(loss_of(model, world.rank, 0))
            optimizer.step()
            world.barrier()
            state = run.state_dict()
            world.barrier()
            run.load_state_dict(state)
            again = run.state_dict()["local"]["strategy"]
        own: dict[str, Any] = state["local"]["strategy"]
        assert all(torch.equal(again[kind][name], kept) for kind in own for name, kept in own[kind].items())
        return own

    for options, kind in (
        ({"codec": "topk(0.1)"}, "residual"),
        ({"strategy": "bsp(filters='significant(0.05)')"}, "kept"),
    ):
        for own in results(partial(work, options=options), 2):
            assert list(own) == [kind]
            assert any(bool(kept.any()) for kept in own[kind].values())


# Fewer bytes.


def wide_step(world: sl.World, strategy: str, steps: int = 3, **options: Any) -> tuple[Tensor, int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with distributed(model, optimizer, strategy, **options) as run:
        for step in range(steps):
            optimizer.zero_grad()
            backward(loss_of(model, world.rank, step))
            optimizer.step()
    return flat(model), run.stats.bytes_wire


@pytest.mark.parametrize("dedicated", [0, 1, 3])
def test_factors_are_multiplied_at_the_servers(dedicated: int) -> None:
    plain = results(lambda world: wide_step(world, "bsp"), 2, dedicated)[0]
    factored = results(lambda world: wide_step(world, "bsp(factors=True)"), 2, dedicated)[0]
    torch.testing.assert_close(factored[0], plain[0], rtol=1e-4, atol=1e-6)
    assert factored[1] < 0.8 * plain[1]


def digits(strategy: str, codec: str | None = None, epochs: int = 6) -> Callable[[sl.World], tuple[float, float]]:
    """The share of digits that are told right afterwards, and bytes on the wire for each that was to be said."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)

    def work(world: sl.World) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        run = distributed(model, optimizer, strategy, codec=codec)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x[:1500], y[:1500]), batch_size=25, shuffle=True
        )
        for _ in range(epochs):
            for images, labels in run.shard(loader):
                world.compute(0.01 * (1 + world.rank))
                optimizer.zero_grad()
                backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
        run.control_channel().finish()
        world.barrier()
        with run.agreed(), torch.no_grad():
            right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
        run.close()
        return right, run.stats.bytes_wire / run.stats.bytes_logical

    return work


@pytest.mark.parametrize(
    ("strategy", "codec", "most"),
    [
        ("bsp", "quantize(4)", 0.3),
        ("bsp", "topk(0.1)|quantize(8)", 0.3),
        ("downpour(push=2, fetch=2, rule='sgd')", "quantize(8)", 0.5),
        ("bsp(filters='significant(2e-2)|cache')", None, 0.9),
        ("ssp(slack=2, filters='skip(0.75)')", None, 0.95),
        ("downpour(push=2, fetch=2, rule='adagrad', lr=0.02, filters='significant(5e-2)')", None, 0.9),
    ],
)
def test_digits_are_learned_through_codecs_and_filters(strategy: str, codec: str | None, most: float) -> None:
    for right, share in results(digits(strategy, codec), 2):
        assert right > 0.8
        assert share < most


# Faults.


@pytest.mark.parametrize("strategy", ["bsp", "ssp(slack=1)", "downpour(push=2, fetch=2)"])
def test_the_others_continue_with_dedicated_servers(strategy: str) -> None:
    def pace(rank: int, step: int) -> float:
        return 1.0

    found = sl.simulate(apart("momentum", strategy, 12, pace), 3, faults=(Kill(1, at=4.5),), extra=servers(3, 2))
    assert found.killed == (1,)
    assert all(isinstance(found.results[rank], Tensor) for rank in (0, 2))


def test_an_error_names_a_killed_worker_with_weights() -> None:
    def pace(rank: int, step: int) -> float:
        return 1.0

    found = sl.simulate(apart("sgd", "bsp", 12, pace), 3, faults=(Kill(1, at=4.5),), return_exceptions=True)
    errors = [found.results[rank] for rank in (0, 2)]
    assert all(isinstance(error, PeerLostError) and error.peer == 1 for error in errors)
    assert all("--servers" in str(error) for error in errors)


# Refused.


def refused(optimizer: Callable[[nn.Module], torch.optim.Optimizer], strategy: str = "bsp", **options: Any) -> str:
    model = mlp()
    with sl.init(), pytest.raises(IncompatibleError) as caught:
        distributed(model, optimizer(model), strategy, **options)
    return str(caught.value)


def test_incompatible_options_are_refused() -> None:
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS["momentum"](model.parameters())

    assert "LBFGS" in refused(lambda model: torch.optim.LBFGS(model.parameters()))
    assert "whole matrices" in refused(momentum, codec="powersgd(2)")
    assert "names of parameters" in refused(momentum, codec="per_layer({'*': 'quantize(4)'})")
    assert "takes all of them" in refused(momentum, "bsp(filters='significant(0.1)')")
    both = "bsp(rule='momentum', filters='significant(0.1)', factors=True)"
    assert "leave one of the two out" in refused(momentum, both)


def test_a_closure_is_refused() -> None:
    with sl.init():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = distributed(model, optimizer)
        with pytest.raises(IncompatibleError, match="closure"):
            optimizer.step(lambda: 0.0)
        run.close()


def test_gradients_that_are_not_finite_are_not_pushed() -> None:
    with sl.init():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = distributed(model, optimizer, check_finite=True)
        backward(loss_of(model, 0, 0))
        gradient = model.get_parameter("0.bias").grad
        assert gradient is not None
        gradient[0] = torch.nan
        with pytest.raises(DivergedError, match=r"0\.bias"):
            optimizer.step()
        with run.agreed():
            assert bool(torch.isfinite(flat(model)).all())
        run.close()


def test_a_loaded_optimizer_reaches_servers_without_a_state() -> None:
    """A server whose parameters nobody has used remembers nothing: all workers ask for its state at once."""

    def case(world: sl.World) -> list[float]:
        model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with distributed(model, optimizer):
            state = {0: {"momentum_buffer": torch.full((1, 2), 10.0)}}  # of the one that is used
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            backward(model[0](torch.ones(1, 2)).sum())
            optimizer.step()
        return [*map(float, optimizer.state[next(model.parameters())]["momentum_buffer"].view(-1))]

    for found in sl.simulate(case, ranks=2).results:
        assert found == pytest.approx([10.0, 10.0])  # 0.9 · 10 + 1
