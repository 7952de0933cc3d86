"""Models whose layers are divided over workers train as undivided ones do."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.checkpoint import load
from syncline.errors import DivergedError, IncompatibleError, SpecError
from syncline.parallel.division_specs import ExpertParallel, WeirdTrick
from syncline.testing import Pool
from syncline.world import World
from tests.strategies.cases import on_gloo
from tests.training.mesh_models import (
    DIVIDED,
    TransformerNet,
    assert_equal,
    assert_trained,
    batch_of,
    make_model,
    make_optimizer,
    optimizer_state,
    own_batch,
    train,
    train_alone,
    train_divided,
)

EXPERTS = ExpertParallel(2)
HEAD = WeirdTrick("b", size=2)
BOTH = "experts(2) x tensor(2)"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("name", "parallel"),
    [("experts", EXPERTS), ("experts", None), ("cnn", HEAD), ("language", BOTH), ("tied language", BOTH)],
)
def test_divided_layers_train_as_one_process_does(name: str, parallel: Any, optimizer: str) -> None:
    expected = train_alone(name, optimizer=optimizer)
    for found in sl.simulate(lambda world: train(world, name, parallel, optimizer=optimizer), ranks=4).results:
        assert_equal(found, expected)


@pytest.mark.parametrize(("name", "workers"), [("experts", 1), ("experts", 2), ("three experts", 3), ("experts", 4)])
def test_ten_steps_of_experts_on_any_number_of_workers(name: str, workers: int) -> None:
    expected = train_alone(name, range(10))
    found = sl.simulate(lambda world: train(world, name, ExpertParallel(workers), range(10)), ranks=workers)
    for state in found.results:
        assert_equal(state, expected)


@pytest.mark.parametrize(("name", "parallel"), [("experts", EXPERTS), ("cnn", HEAD), ("transformer", "tensor(2)")])
def test_parameters_that_are_thawed_later_train_too(name: str, parallel: Any) -> None:
    expected = train_alone(name, thaw=2)
    for found in sl.simulate(lambda world: train(world, name, parallel, thaw=2), ranks=4).results:
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("experts", EXPERTS), ("cnn", HEAD), ("transformer", "tensor(2)"), ("cnn", "spatial('1', 2)")],
)
def test_one_worker_trains_the_model_as_it_is(name: str, parallel: Any) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = make_model(name)
        kinds = [type(each) for each in model.modules()]
        run = sl.distribute(model, make_optimizer(model), parallel=parallel)
        assert [type(each) for each in model.modules()] == kinds
        run.close()
        return train(world, name, parallel)

    assert_equal(sl.simulate(work, ranks=1).results[0], train_alone(name))


def test_one_worker_trains_a_pipeline_as_one_stage() -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = make_model("transformer")
        parallel = "pipeline(2, microbatches=1) x tensor(2)"
        optimizer = make_optimizer(model)
        run: Any = sl.distribute(model, optimizer, parallel=parallel, loss_fn=functional.cross_entropy)
        for step in range(4):
            run.step(*batch_of(step))
        run.close()
        return dict(model.state_dict())

    assert_equal(sl.simulate(work, ranks=1).results[0], train_alone("transformer", clip=None))


@pytest.mark.parametrize(("name", "parallel"), [("experts", EXPERTS), ("cnn", HEAD), ("tied language", BOTH)])
def test_a_checkpoint_continues_on_another_mesh(name: str, parallel: Any, tmp_path: Path) -> None:
    expected = train_alone(name, optimizer="adamw")
    sl.simulate(lambda world: train(world, name, parallel, range(2), optimizer="adamw", save=tmp_path), ranks=4)
    others = {"experts": ExpertParallel(1), "cnn": None, "tied language": "tensor(2)"}
    for ranks, other in ((4, parallel), (2, others[name] if parallel == BOTH else parallel), (2, others[name])):
        resumed = sl.simulate(
            lambda world, other=other: train(  # type: ignore[misc]
                world, name, other, range(2, 4), optimizer="adamw", load=tmp_path
            ),
            ranks=ranks,
        )
        for found in resumed.results:
            assert_equal(found, expected)
    whole = make_model(name)
    load(tmp_path, run=whole)
    assert_equal(dict(whole.state_dict()), train_alone(name, range(2), optimizer="adamw"))


@pytest.mark.parametrize(
    ("name", "parallel", "workers"),
    [("experts", EXPERTS, 4), ("language", BOTH, 4), ("three experts", "experts(3) x tensor(2)", 6)],
)
def test_the_same_mesh_continues_with_the_same_bits(name: str, parallel: Any, workers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "local(period=2)", "codec": "quantize(8)"}
    whole = sl.simulate(lambda world: train(world, name, parallel, range(5), **options), ranks=workers).results
    sl.simulate(lambda world: train(world, name, parallel, range(3), save=tmp_path, **options), ranks=workers)
    again = sl.simulate(
        lambda world: train(world, name, parallel, range(3, 5), load=tmp_path, **options), ranks=workers
    ).results
    for found, expected in zip(again, whole, strict=True):
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.xdist_group("gloo")
def test_two_gloo_processes_divide_layers(gloo: Pool) -> None:
    for found in gloo.run(on_gloo, 2, train_divided):
        assert_trained(found)


STRATEGIES = ("local(period=2)", "diloco(period=2)", "easgd(period=2)", "gossip", "average", "adacomm(start=2)")


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *((strategy, None) for strategy in STRATEGIES),
        ("allreduce", "topk(0.2)|quantize(4)"),
        ("allreduce", "powersgd(1)"),
        ("local(period=2)", "quantize(4)"),
    ],
)
def test_every_synchronous_strategy_leaves_one_model_with_experts(strategy: str, codec: str | None) -> None:
    first, *others = sl.simulate(
        lambda world: train(world, "experts", EXPERTS, range(5), strategy=strategy, codec=codec), ranks=4
    ).results
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)
    assert not torch.equal(
        first["moe.experts.3.0.weight"], make_model("experts").get_parameter("moe.experts.3.0.weight")
    )


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        *((strategy, None) for strategy in ("allreduce", "allreduce(delay=1)", *STRATEGIES, "gossip(form='beside')")),
        ("allreduce", "topk(0.2)|quantize(4)"),
        ("allreduce", "powersgd(1)"),
        ("diloco(period=2)", "quantize(4)"),
        ("gossip('0-1')", "topk(0.5)"),
        ("easgd(period=2)", "quantize(8)"),
    ],
)
def test_every_synchronous_strategy_acts_on_tensor_teams(strategy: str, codec: str | None) -> None:
    """Whole parameters have the same bits within a team at every step, and the result is that of undivided layers."""

    def work(world: World, parallel: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        run, model, optimizer = in_training(world, "transformer", parallel, strategy=strategy, codec=codec)
        whole = []
        for step in range(5):
            x, y = own_batch(world, step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            run.note_loss(loss)
            optimizer.step()
            whole.append(model.head.weight.detach().clone())
        run.close()
        return whole, {key: value.clone() for key, value in model.state_dict().items()}

    found = sl.simulate(lambda world: work(world, "tensor(2)"), ranks=4).results
    for one, other in ((0, 1), (2, 3)):
        assert all(map(torch.equal, found[one][0], found[other][0]))
    for _, state in found:
        assert all(torch.equal(state[key], found[0][1][key]) for key in state)
    if codec is None:
        expected = sl.simulate(lambda world: work(world, None), ranks=2).results
        assert_equal(found[0][1], expected[0][1])
        for (whole, _), own in zip(found[::2], expected, strict=True):
            torch.testing.assert_close(whole, own[0], rtol=1e-9, atol=1e-12)


SLOW = sl.Link(latency=1e-7, bandwidth=1e5)
ODD_RANKS_ARE_SLOW = sl.Network(
    latency=1e-2, bandwidth=1e12, links={(a, b): SLOW for a in range(1, 8, 2) for b in range(1, 8, 2) if a != b}
)
"""Data parallelism over tensor 1 has another network than over tensor 0: each alone would choose otherwise."""


@pytest.mark.parametrize("options", [{}, {"codec": "quantize(4)"}, {"strategy": "adacomm(start=4, seconds=0.3)"}])
def test_whole_parameters_are_reduced_alike_by_all_tensor_ranks(options: dict[str, Any]) -> None:
    def work(world: World) -> tuple[Tensor, dict[str, str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = make_optimizer(model)
        plan = sl.parallel.tensor({"2": "columns", "4": "rows"}, size=2)
        run = sl.distribute(model, optimizer, parallel=plan, **options)
        for step in range(8):
            x, y = own_batch(world, step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x.float()), y)
            torch.autograd.backward(loss)
            run.note_loss(loss)
            optimizer.step()
        weight = model.get_parameter("0.weight").detach().clone()
        return weight, run.config["collectives_chosen"]

    (weight, choices), *others = sl.simulate(work, ranks=8, network=ODD_RANKS_ARE_SLOW).results
    assert choices
    for other, its_choices in others:
        assert its_choices == choices
        # After a round of adacomm workers of another place along "data" may have other weights.
        assert "strategy" in options or torch.equal(other, weight)
    if "strategy" in options:
        assert torch.equal(others[0][0], weight)


def test_agreed_shows_the_whole_model_and_training_continues() -> None:
    expected = train_alone("cnn")

    def work(world: World) -> tuple[Tensor, dict[str, Tensor]]:
        model = make_model("cnn")
        optimizer = make_optimizer(model)
        run: Any = sl.distribute(model, optimizer, parallel=HEAD)
        for step in range(4):
            x, y = own_batch(world, step)
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x), y))
            run.clip_grad_norm_(0.5)
            optimizer.step()
            with run.agreed(), torch.no_grad():
                shown = model(batch_of(9)[0])
                assert model[4][0].weight.shape == (10, 24)
                buffer = io.BytesIO()
                torch.save(model, buffer)  # a plain module of its own class
        run.close()
        return shown, dict(model.state_dict())

    for shown, state in sl.simulate(work, ranks=2).results:
        assert_equal(state, expected)
        whole = make_model("cnn")
        whole.load_state_dict(expected)
        torch.testing.assert_close(shown, whole(batch_of(9)[0]))


def in_training(world: World, name: str, parallel: Any, optimizer: str = "sgd", **options: Any) -> Any:
    """A run in training, its model and its optimizer."""
    model = make_model(name)
    trainer = make_optimizer(model, optimizer)
    return sl.distribute(model, trainer, parallel=parallel, **options), model, trainer


def backward(world: World, model: nn.Module, step: int = 0) -> None:
    x, y = own_batch(world, step)
    torch.autograd.backward(functional.cross_entropy(model(x), y))


def test_the_config_the_mesh_and_the_bytes_are_shown() -> None:
    def work(world: World) -> tuple[str, str, int]:
        run, model, optimizer = in_training(world, "experts", EXPERTS)
        before = run.stats.bytes_wire
        backward(world, model)
        optimizer.step()
        return str(world.mesh), run.config["parallel"]["mesh"], run.stats.bytes_wire - before

    for shown, config, sent in sl.simulate(work, ranks=4).results:
        assert shown == config == "mesh of 4 ranks: data 2 x shared 2"
        assert sent > 0


def test_a_divided_model_is_saved_by_its_run_only() -> None:
    def work(world: World) -> None:
        run, model, optimizer = in_training(world, "cnn", HEAD)
        with pytest.raises(IncompatibleError, match=r"divided over workers.*sl\.save\(folder, step=step, run=run\)"):
            model.state_dict()
        with pytest.raises(IncompatibleError, match=r"pickle it inside run\.agreed\(\)"):
            pickle.dumps(model)
        with pytest.raises(IncompatibleError, match="save the run"):
            sl.save("nowhere", step=1, optimizer=optimizer)
        with run.agreed():
            assert model.state_dict()["4.0.weight"].shape == (10, 24)

    sl.simulate(work, ranks=2)


def test_a_copy_computes_where_the_model_does() -> None:
    def work(world: World) -> None:
        run, model, _ = in_training(world, "cnn", HEAD)
        x = own_batch(world, 0)[0]
        part = copy.deepcopy(model)
        torch.testing.assert_close(part(x), model(x))
        with run.agreed():
            whole = copy.deepcopy(model)
            torch.testing.assert_close(whole(x), model(x))
            with pytest.raises(IncompatibleError, match="only this worker's part"):
                part(x)
        with pytest.raises(IncompatibleError, match=r"made inside run\.agreed\(\)"):
            whole(x)
        run.close()
        torch.testing.assert_close(whole(x), model(x))

    sl.simulate(work, ranks=2)


def test_a_run_that_is_refused_leaves_the_model_as_it_was() -> None:
    def work(world: World) -> None:
        model = make_model("cnn")
        optimizer = make_optimizer(model)
        backward(world, model)
        optimizer.step()
        before, kind = copy.deepcopy(dict(model.state_dict())), type(model[4])
        momentum = optimizer.state[model[4][0].weight]["momentum_buffer"].clone()
        with pytest.raises(IncompatibleError, match="ssp"):
            sl.distribute(model, optimizer, "ssp(slack=1)", parallel=HEAD)
        with pytest.raises(SpecError, match=r"algorithm|nosuch"):
            sl.distribute(model, optimizer, parallel=HEAD, algorithm="nosuch")
        assert_equal(dict(model.state_dict()), before)
        assert type(model[4]) is kind
        torch.testing.assert_close(optimizer.state[model[4][0].weight]["momentum_buffer"], momentum)

    sl.simulate(work, ranks=2)


def test_the_optimizers_state_is_divided_and_made_whole() -> None:
    def work(world: World) -> dict[str, Tensor]:
        run, model, optimizer = in_training(world, "experts", EXPERTS, "adamw")
        own = world.mesh.position(world.rank)[2]
        for step in range(2):
            optimizer.zero_grad()
            backward(world, model, step)
            optimizer.step()
        absent = model.moe.experts[3 - 3 * own].get_parameter("0.weight")
        assert absent.numel() == 0
        assert absent not in optimizer.state
        run.close()
        return optimizer_state(model, optimizer)

    model = make_model("experts")
    optimizer = make_optimizer(model, "adamw")
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch_of(step)
        torch.autograd.backward(functional.cross_entropy(model(x), y))
        optimizer.step()
    expected = optimizer_state(model, optimizer)
    for found in sl.simulate(work, ranks=4).results:
        assert_equal(found, expected)


def test_incomplete_batches_are_left_out() -> None:
    def work(world: World) -> int:
        run, model, optimizer = in_training(world, "experts", EXPERTS)
        data: Any = [(x, y) for x, y in zip(*batch_of(0), strict=True)] * 2
        steps = 0
        for x, y in run.shard(torch.utils.data.DataLoader(data, batch_size=5)):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            steps += 1
        with pytest.raises(IncompatibleError, match="take every step together"):
            run.shard([1, 2, 3], split=False)
        with pytest.raises(IncompatibleError, match="micro-batches"):
            run.steps(data, global_batch=4)
        return steps

    assert sl.simulate(work, ranks=4).results == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "parallel", "divided"),
    [("experts", EXPERTS, "moe.experts.0.0.weight"), ("transformer", "tensor(2)", "blocks.0.up.weight")],
)
def test_a_grad_scaler_skips_the_same_steps_everywhere(name: str, parallel: Any, divided: str) -> None:
    """A gradient of a divided parameter is NaN on worker 2, and on the worker with which it is reduced."""

    def work(world: World) -> list[float]:
        model = make_model(name).float()
        optimizer = make_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        run = sl.distribute(model, optimizer, parallel=parallel, schedulers=[scaler])
        scales, first = [], model.head.weight.detach().clone()
        bad = [False]
        model.get_parameter(divided).register_hook(lambda gradient: gradient * float("nan") if bad[0] else gradient)
        for step in range(3):
            bad[0] = step == 1 and world.rank == 2
            x, y = own_batch(world, step)
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(functional.cross_entropy(model(x.float()), y)))
            before = model.head.weight.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(before, model.head.weight) == (step == 1)
            scaler.update()
            scales.append(scaler.get_scale())
        assert not torch.equal(first, model.head.weight)
        run.close()
        return scales

    assert sl.simulate(work, ranks=4).results == ([4.0, 2.0, 2.0],) * 4


def test_a_scaler_that_is_not_named_is_refused() -> None:
    def work(world: World) -> None:
        model = make_model("experts").float()
        optimizer = make_optimizer(model)
        sl.distribute(model, optimizer, parallel=EXPERTS)
        scaler = torch.amp.GradScaler("cpu")
        x, y = own_batch(world, 0)
        torch.autograd.backward(scaler.scale(functional.cross_entropy(model(x.float()), y)))
        with pytest.raises(IncompatibleError, match=r"schedulers=\[scaler\]"):
            scaler.step(optimizer)

    sl.simulate(work, ranks=2)


@pytest.mark.parametrize(
    ("name", "parallel", "options", "words"),
    [
        ("cnn", EXPERTS, {}, "the model has none"),
        ("experts", ExpertParallel(3), {}, "multiple of 3 workers, and there are 4"),
        ("cnn", [HEAD, WeirdTrick("a", size=4)], {}, "give both the same size"),
        ("experts", EXPERTS, {"strategy": "ensemble"}, "no worker has a whole one"),
        ("experts", EXPERTS, {"strategy": "gossip(pairwise=True)"}, "compute it together"),
        ("experts", EXPERTS, {"strategy": "easgd(centres=2)"}, "groups all workers, and here"),
        ("experts", "experts(2) x expert(2)", {}, "did you mean 'experts'"),
        ("experts", [EXPERTS, 3], {}, "a text, the result of"),
    ],
)
def test_what_cannot_work_is_refused(name: str, parallel: Any, options: dict[str, Any], words: str) -> None:
    def work(world: World) -> None:
        with pytest.raises((SpecError, IncompatibleError), match=words):
            in_training(world, name, parallel, **options)

    sl.simulate(work, ranks=4)


@pytest.mark.parametrize("kind", [sl.optim.LARS, sl.optim.LAMB])
def test_optimizers_that_need_the_whole_tensor_are_refused(kind: Any) -> None:
    def work(world: World) -> None:
        model = make_model("cnn")
        with pytest.raises(IncompatibleError, match=f"{kind.__name__} computes an update from the whole"):
            sl.distribute(model, kind(model.parameters(), lr=0.1), parallel=HEAD)

    sl.simulate(work, ranks=2)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_fused_optimizers_update_slices(options: dict[str, Any]) -> None:
    expected = train_alone("cnn", optimizer="adamw", clip=None)

    def work(world: World) -> dict[str, Tensor]:
        model = make_model("cnn")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        with sl.distribute(model, optimizer, parallel=DIVIDED["cnn"]):
            for step in range(4):
                optimizer.zero_grad()
                backward(world, model, step)
                optimizer.step()
        return dict(model.state_dict())

    for found in sl.simulate(work, ranks=4).results:
        assert_equal(found, expected)


def test_a_closure_is_refused() -> None:
    def work(world: World) -> None:
        _, model, optimizer = in_training(world, "transformer", "tensor(2)")
        backward(world, model)
        with pytest.raises(IncompatibleError, match=r"step\(closure\) with divided layers"):
            optimizer.step(lambda: 0.0)

    sl.simulate(work, ranks=2)


class SomeUnused(TransformerNet):
    """The first block, which is divided, is used by the first data-parallel worker only."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.reshape(-1, 3, 2))
        hidden = self.blocks(hidden) if self.first else self.blocks[1](hidden)
        output: Tensor = self.head(hidden.mean(1))
        return output


def test_unused_divided_layers_count_as_zeros() -> None:
    def work(world: World, parallel: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = SomeUnused().double()
        optimizer = make_optimizer(model)
        with sl.distribute(model, optimizer, parallel=parallel, find_unused_parameters=True):
            model.first = world.mesh.position(world.rank)[1] == 0
            for step in range(3):
                optimizer.zero_grad()
                backward(world, model, step)
                optimizer.step()
        return dict(model.state_dict())

    expected = sl.simulate(lambda world: work(world, None), ranks=2).results[0]
    for found in sl.simulate(lambda world: work(world, "tensor(2)"), ranks=4).results:
        assert_equal(found, expected)


def test_nan_in_a_slice_is_reported() -> None:
    def work(world: World) -> None:
        _, model, _ = in_training(world, "transformer", "tensor(2)", check_finite=True)
        if world.rank in (1, 3):
            model.blocks[0].up.weight.register_hook(lambda gradient: gradient * float("nan"))
        backward(world, model)

    errors = sl.simulate(work, ranks=4, return_exceptions=True).results
    assert isinstance(errors[1], DivergedError)
    assert "blocks.0.up.weight" in str(errors[1])


class Dropped(TransformerNet):
    """With dropout of whole activations, and of features that are divided."""

    tensor_plan: ClassVar[dict[str, str]] = {**TransformerNet.tensor_plan, "inner": "split"}

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.outer(self.embed(x.reshape(-1, 3, 2)))
        block: Any
        for block in self.blocks:
            hidden = hidden + block.down(self.inner(torch.tanh(block.up(block.norm(hidden)))))
        output: Tensor = self.head(hidden.mean(1))
        return output


def test_dropout_continues_with_the_same_bits(tmp_path: Path) -> None:
    def work(world: World, steps: range, load_it: bool = False, save: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Dropped().double()
        optimizer = make_optimizer(model)
        torch.manual_seed(5 + load_it)  # torch's own generator does not matter
        with sl.distribute(model, optimizer, parallel="tensor(2)", find_unused_parameters=True) as run:
            if load_it:
                load(tmp_path, run=run)
            for step in steps:
                optimizer.zero_grad()
                backward(world, model, step)
                optimizer.step()
            if save:
                sl.save(tmp_path, step=2, run=run)
        return {key: value.clone() for key, value in model.state_dict().items()}

    expected = sl.simulate(lambda world: work(world, range(4)), ranks=4).results[0]
    sl.simulate(lambda world: work(world, range(2), save=True), ranks=4)
    for found in sl.simulate(lambda world: work(world, range(2, 4), load_it=True), ranks=4).results:
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_has_the_gradients_of_the_plain_one() -> None:
    def work(world: World) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = make_optimizer(model)
        with sl.distribute(model, optimizer, parallel="tensor({'0': 'columns', '2': 'rows'}, size=2)"):
            found = []
            compiled: Any = torch.compile(model, backend="aot_eager")
            for each in (model, compiled):
                optimizer.zero_grad()
                torch.autograd.backward(each(own_batch(world, 0)[0].float()).square().sum())
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return found

    for plain, compiled in sl.simulate(work, ranks=2).results:
        torch.testing.assert_close(compiled, plain)


def test_a_copy_of_a_tensor_model_computes_where_the_model_does() -> None:
    def work(world: World) -> None:
        run, model, _ = in_training(world, "transformer", "tensor(2)")
        x = batch_of(0)[0]
        part = copy.deepcopy(model)
        torch.testing.assert_close(part(x), model(x))
        with run.agreed():
            whole = copy.deepcopy(model)
            with pytest.raises(IncompatibleError, match="only this worker's part"):
                part(x)
        run.close()
        torch.testing.assert_close(whole(x), model(x))

    sl.simulate(work, ranks=2)
