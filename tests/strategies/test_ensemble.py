"""The two ends: nobody talks, and then one mean of weights, or one of predictions."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.strategies.ensemble import Average, Ensemble, mean_prediction
from syncline.testing import Pool
from syncline.training.loop import train as train_loop
from syncline.training.settings import Settings
from tests.strategies.averaging_cases import batch, check_resumes, everywhere, net, take
from tests.strategies.cases import flat, on_gloo
from tests.training.tiny import Tiny


def test_average_is_the_mean_of_trainings_alone() -> None:
    found = everywhere(Average(), optimizer="momentum")
    alone = []
    for worker in range(3):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(12):
            take(model, optimizer, worker, step)
        alone.append(flat(model))
        assert torch.equal(found[worker][-2], alone[-1])  # bit for bit as if there were nobody else
    for worker in range(3):
        torch.testing.assert_close(found[worker][-1], torch.stack(alone).mean(dim=0))
        assert torch.equal(found[worker][-1], found[0][-1])


@pytest.mark.parametrize("strategy", [Average(), Ensemble()], ids=repr)
def test_nothing_is_sent_while_they_train(strategy: Any) -> None:
    def work(world: sl.World) -> tuple[float, float, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy)
        before = world.runtime.now()
        for step in range(20):
            take(model, optimizer, world.rank, step)
        after, sent = world.runtime.now(), run.stats.bytes_wire
        run.close()
        return before, after, sent

    for before, after, sent in sl.simulate(work, ranks=3).results:
        assert before == after  # on the simulator only messages take time
        assert sent == 0


def ensemble(world: sl.World, rule: Ensemble, steps: int = 6, norm: bool = True) -> dict[str, Any]:
    model = net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = sl.distribute(model, optimizer, rule)
    first = flat(model)
    for step in range(steps):
        take(model, optimizer, world.rank, step)
    model.eval()
    x, _ = batch(99, 0)
    own, member = model(x).detach(), {key: value.clone() for key, value in model.state_dict().items()}
    with run.agreed(), torch.no_grad():
        shown, together = flat(model), model(x)
        again = model(x[: world.rank + 1])  # each may ask for what it likes, as often as it likes
        with run.agreed():
            nested = model(x)
    found = {"first": first, "own": own, "shown": shown, "together": together, "again": again, "nested": nested}
    found["back"] = all(torch.equal(value, member[key]) for key, value in model.state_dict().items())
    found["alone"] = model(x).detach()
    found["consensus"] = run.stats.consensus
    run.close()
    found["left"] = flat(model)
    found["member"] = torch.cat([member[name].reshape(-1) for name, _ in model.named_parameters()])
    return found


@pytest.mark.parametrize("rule", [Ensemble(), Ensemble(seed=3), Ensemble(mean="outputs")], ids=repr)
def test_inside_agreed_the_model_predicts_as_all_do(rule: Ensemble) -> None:
    results = sl.simulate(lambda world: ensemble(world, rule), ranks=3).results
    outputs = torch.stack([found["own"] for found in results])
    likely = outputs.softmax(dim=-1).mean(dim=0).log()
    wanted = outputs.mean(dim=0) if rule.mean == "outputs" else likely
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["together"], wanted)
        assert torch.equal(found["together"], results[0]["together"])  # bit for bit everywhere
        assert torch.equal(found["nested"], found["together"])
        torch.testing.assert_close(found["again"], wanted[: rank + 1])
        assert torch.equal(found["shown"], results[0]["member"])
        assert found["back"]
        assert torch.equal(found["alone"], found["own"])
        assert torch.equal(found["left"], found["member"])  # close() leaves each its own


def test_the_mean_of_weights_would_predict_something_else() -> None:
    results = sl.simulate(lambda world: ensemble(world, Ensemble(seed=3)), ranks=3).results
    model = net(norm=True)
    rows = torch.stack([found["member"] for found in results]).mean(dim=0)
    torch.nn.utils.vector_to_parameters(rows, model.parameters())
    model.eval()
    wrong = model(batch(99, 0)[0]).detach().log_softmax(dim=-1)
    assert float((wrong - results[0]["together"]).norm()) > 0.1


def test_members_begin_alike_or_each_with_its_own_weights() -> None:
    alike = sl.simulate(lambda world: ensemble(world, Ensemble(), steps=1), ranks=3).results
    assert all(torch.equal(found["first"], alike[0]["first"]) for found in alike)
    rules = Ensemble(seed=1), Ensemble(seed=2)
    one, other = (sl.simulate(partial(ensemble, rule=rule, steps=1), ranks=3).results for rule in rules)
    assert torch.equal(one[0]["first"], alike[0]["first"])  # the first keeps what it was given
    assert not torch.equal(one[1]["first"], one[0]["first"])
    assert not torch.equal(one[1]["first"], one[2]["first"])
    assert not torch.equal(one[1]["first"], other[1]["first"])
    again = sl.simulate(lambda world: ensemble(world, Ensemble(seed=1), steps=1), ranks=3).results
    assert torch.equal(one[1]["first"], again[1]["first"])


def test_the_draw_leaves_the_scripts_own_randomness_alone() -> None:
    def work(world: sl.World, rule: Ensemble) -> float:
        torch.manual_seed(4)
        model = net()
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule)
        run.close()
        return float(torch.rand(1))

    rules = Ensemble(), Ensemble(seed=1)
    plain, drawn = (sl.simulate(partial(work, rule=rule), ranks=2).results for rule in rules)
    assert plain == drawn


def test_how_far_apart_members_are() -> None:
    results = sl.simulate(lambda world: ensemble(world, Ensemble(seed=3)), ranks=3).results
    rows = torch.stack([found["member"] for found in results]).double()
    wanted = float(((rows - rows.mean(dim=0)).square().sum() / 3).sqrt())
    assert [found["consensus"] for found in results] == pytest.approx([wanted] * 3)


def test_mean_predictions_are_stable() -> None:
    outputs = [torch.tensor([[1e4, 0.0, -1e4]]), torch.tensor([[-1e4, 0.0, 1e4]])]
    found = mean_prediction(outputs)
    assert found.exp().sum().item() == pytest.approx(1.0)
    assert found.exp()[0, 0].item() == pytest.approx(0.5)


@pytest.mark.parametrize("members", [1, 3])
def test_the_loop_evaluates_the_ensemble(members: int) -> None:
    """What the loop reports for the test split is what the members say together, not what rank 0 says alone."""
    workload = Tiny(samples=48)

    def work(world: sl.World) -> float | None:
        settings = Settings(epochs=2, batch=4, seed=5)
        return train_loop(workload, settings, world=world, strategy=Ensemble(seed=2)).test

    test = sl.simulate(work, ranks=members).results[0]
    inputs, targets = next(iter(torch.utils.data.DataLoader(workload.splits().test, batch_size=100)))
    with torch.no_grad():
        outputs = [workload.models[rank].eval()(inputs) for rank in range(members)]
    together = mean_prediction(outputs)
    assert test == pytest.approx(float((together.argmax(1) == targets).double().mean()))


def test_the_loop_charges_for_every_member() -> None:
    def seconds(strategy: Any) -> float:
        def work(world: sl.World) -> float:
            settings = Settings(steps=1, batch=4)
            return train_loop(Tiny(samples=48), settings, world=world, strategy=strategy, seconds_a_sample=1.0).elapsed

        return float(sl.simulate(work, ranks=4).results[0])

    # Twenty samples each of validation and test, at a third of a second, for three members more.
    assert seconds(Ensemble()) - seconds(Average()) == pytest.approx(40.0, abs=1.0)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    check_resumes(tmp_path / "average", Average(), 4, ranks=2, optimizer="momentum")
    check_resumes(tmp_path / "ensemble", Ensemble(seed=1), 4, ranks=2, optimizer="momentum")


def test_members_find_their_own_on_another_number_of_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = everywhere(Ensemble(seed=1), 3, steps=4, save=tmp_path)
    with caplog.at_level(logging.WARNING, logger="syncline"):
        fewer = everywhere(Ensemble(seed=1), 2, steps=4, first=4, load=tmp_path)
        more = everywhere(Ensemble(seed=1), 4, steps=4, first=4, load=tmp_path)
    assert [torch.equal(found[-1], saved[rank][-1]) for rank, found in enumerate(fewer)] == [True] * 2
    assert [torch.equal(found[-1], saved[rank % 3][-1]) for rank, found in enumerate(more)] == [True] * 4
    assert sum("another number of workers" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("strategy", [Average(), Ensemble()], ids=repr)
def test_workers_without_data_do_not_wait(strategy: Any) -> None:
    def work(world: sl.World) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy)
        for _ in range(2):
            for number in run.shard([torch.tensor(i) for i in range(2 + 3 * world.rank)], split=False):
                take(model, optimizer, world.rank, int(number))
        steps = run.stats.steps
        run.close()
        return steps

    assert sl.simulate(work, ranks=2).results == (10, 10)


# Refusals.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.row, x


def attach(world: sl.World, model: nn.Module, strategy: Any, **options: Any) -> None:
    run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **options)
    with run.agreed():
        model(torch.ones(2))
    run.close()


def test_what_is_no_tensor_has_no_mean() -> None:
    with pytest.raises(IncompatibleError, match="gives a tuple, not a tensor"):
        sl.simulate(lambda world: attach(world, Pair(), Ensemble()), ranks=2)


def test_no_module_that_draws_weights() -> None:
    with pytest.raises(IncompatibleError, match=r"reset_parameters\(\).*leave the seed out"):
        sl.simulate(lambda world: attach(world, Pair(), Ensemble(seed=0)), ranks=2)


@pytest.mark.parametrize("strategy", [Average(), Ensemble()], ids=repr)
def test_a_codec_has_nothing_to_do(strategy: Any) -> None:
    with pytest.raises(IncompatibleError, match=r"leave the codec out"):
        sl.simulate(lambda world: attach(world, net(), strategy, codec="quantize(8)"), ranks=2)


@pytest.mark.parametrize("arguments", [{"mean": "votes"}, {"seed": -1}, {"seed": 1.5}])
def test_what_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="ensemble"):
        Ensemble(**arguments)


class Mixed(nn.Module):
    """Attention, whose reset has an underscore before its name, and a parameter of its own that nothing draws."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.0)
        self.scale = nn.Parameter(torch.ones(3))


def test_parameters_that_nothing_draws_anew_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = Mixed()
        sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ensemble(seed=1)")
        weight = model.attention.in_proj_weight
        assert weight is not None
        return weight.detach().clone(), model.scale.detach().clone()

    (first, scale), (second, other) = sl.simulate(work, ranks=2).results
    assert not torch.equal(first, second)
    assert torch.equal(scale, other)
    assert [record.getMessage().count("scale") for record in caplog.records] == [1]


@pytest.mark.xdist_group("gloo")
def test_real_processes(gloo: Pool) -> None:
    real = gloo.run(on_gloo, 2, ensemble, Ensemble(seed=3))
    simulated = sl.simulate(lambda world: ensemble(world, Ensemble(seed=3)), ranks=2).results
    for one, other in zip(real, simulated, strict=True):
        torch.testing.assert_close(one["together"], other["together"])
        torch.testing.assert_close(one["left"], other["left"])


def test_a_regression_has_no_mean_of_probabilities() -> None:
    outputs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    with pytest.raises(sl.errors.IncompatibleError, match="mean='outputs'"):
        mean_prediction(outputs)
    assert mean_prediction(outputs, "outputs").tolist() == [[2.0], [3.0]]
