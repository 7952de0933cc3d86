"""The user's model and optimizer before, during and after a pipeline."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.partition import StagePartition
from syncline.world import World
from tests.parallel.models import MODELS, loss_of


def attach(world: World, model: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A pipeline of two stages, or of as many as the options say."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return sl.pipeline(model, optimizer, loss_of, **{"stages": ["4"], "microbatches": 2, **options}), optimizer


def step(run: Any, number: int) -> None:
    """Train on a batch."""
    run.step(*MODELS["mlp"].batch(8, number))


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(
    ("backend", "recompute", "autocast"),
    [("eager", "never", False), ("aot_eager", "never", False), ("aot_eager", "always", True)],
)
def test_compiled_stages_train_as_others_do(
    monkeypatch: pytest.MonkeyPatch, backend: str, recompute: str, autocast: bool
) -> None:
    """Six stages in one process, with batches of two sizes: each stage may have as many versions as torch allows."""
    compiler, graphs = lookup_backend(backend), []

    def count(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return compiler(graph, inputs, **options)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))

    def train(world: World, compiled: bool) -> dict[str, Tensor]:
        model = MODELS["mlp"].model().float()
        options = {"stages": 6, "schedule": "interleaved(chunks=3)", "recompute": recompute}
        run, _ = attach(world, model, compile=compiled, **options)
        for number in range(2):
            x, y = MODELS["mlp"].batch(8 - number, number)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                run.step(x.float(), y)
        run.close()
        return {name: each.detach() for name, each in model.named_parameters()}

    expected = sl.simulate(lambda world: train(world, False), 2).results[0]
    assert not graphs
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        results = sl.simulate(lambda world: train(world, True), 2, threads=True).results
    assert len(graphs) >= 6
    for found in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_a_dropped_step_does_not_stop_the_reduction() -> None:
    def train(world: World) -> list[Tensor]:
        model = MODELS["mlp"].model()
        run, _ = attach(world, model)
        run.backward(*MODELS["mlp"].batch(8, world.rank % 2))
        run.clip_grad_norm_(1.0)
        model.zero_grad()
        run.backward(*MODELS["mlp"].batch(8, 2 + world.rank % 2))
        run.update()
        return [each.detach().clone() for each in run.team_run.model.parameters()]

    results = sl.simulate(train, 4).results
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(a, b) for a, b in zip(results[one], results[other], strict=True))


def test_the_optimizer_is_whole_after_the_run() -> None:
    def train(world: World) -> bool:
        model = MODELS["mlp"].model()
        run, optimizer = attach(world, model)
        step(run, 0)
        run.close()
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        assert all(each in optimizer.state for each in model.parameters())
        again = sl.pipeline(model, optimizer, loss_of, stages=["2"], microbatches=2)
        step(again, 1)
        again.close()
        return True

    assert all(sl.simulate(train, 2).results)


class Counter(nn.Module):
    """A module that assigns a new tensor to its buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


def test_a_buffer_that_was_assigned_anew_reaches_all_workers() -> None:
    def train(world: World) -> float:
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Counter(), nn.Linear(6, 3))).double()
        run, _ = attach(world, model, stages=["1"])
        step(run, 0)
        run.close()
        return float(model.get_buffer("1.0.calls"))

    assert sl.simulate(train, 2).results == (2.0, 2.0)


def test_vertical_sync_continues_after_a_flush() -> None:
    def train(world: World) -> int:
        model = MODELS["mlp"].model()
        run, _ = attach(world, model, stages=["2", "4"], schedule="pipedream(vertical_sync=True)", microbatches=3)
        for number in range(3):
            step(run, number)
            with run.agreed():
                pass
        run.close()
        return int(run.stats.steps)

    assert len(set(sl.simulate(train, 3).results)) == 1


def test_the_whole_model_can_be_copied_and_a_part_cannot_be_saved() -> None:
    def train(world: World) -> bool:
        model = MODELS["mlp"].model()
        run, _ = attach(world, model)
        with run.agreed():
            twin = copy.deepcopy(model)
            assert twin(torch.ones(1, 6, dtype=torch.float64)).shape == (1, 3)
        with pytest.raises(IncompatibleError, match="only its own part"):
            model.state_dict()
        with pytest.raises(IncompatibleError, match=r"outside"), run.agreed():
            step(run, 0)
        run.close()
        model.state_dict()
        return True

    assert all(sl.simulate(train, 2).results)


def test_a_pipeline_that_is_refused_leaves_the_model_whole() -> None:
    def attempt(world: World) -> int:
        model = MODELS["mlp"].model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises((SpecError, IncompatibleError)):
            sl.pipeline(model, optimizer, loss_of, stages=["4"], algorithm="nonsense")
        with pytest.raises((SpecError, IncompatibleError)):
            sl.pipeline(model, optimizer, loss_of, stages=["4"], codec="powersgd(2)", algorithm="gather")
        assert model(torch.ones(1, 6, dtype=torch.float64)).shape == (1, 3)
        return len(optimizer.param_groups[0]["params"])

    assert set(sl.simulate(attempt, 2).results) == {16}


def test_groups_added_later_are_trained_and_saved(tmp_path: Path) -> None:
    def train(world: World) -> list[int]:
        model = MODELS["mlp"].model()
        first = list(model.parameters())[:4]
        optimizer = torch.optim.SGD(first, lr=0.1, momentum=0.9)
        run = sl.pipeline(model, optimizer, loss_of, stages=["4"], microbatches=2)
        step(run, 0)
        optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.01})
        step(run, 1)
        sl.save(tmp_path, step=2, run=run)
        step(run, 2)
        run.close()
        return [len(group["params"]) for group in optimizer.param_groups]

    assert sl.simulate(train, 2).results == ([4, 12], [4, 12])


def test_a_frozen_stage_follows_the_scale_of_the_others() -> None:
    def train(world: World) -> dict[str, Any]:
        model = MODELS["mlp"].model().float()
        for each in list(model.parameters())[:8]:
            each.requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        run, _ = attach(world, model, scaler=scaler)
        for number in range(3):
            x, y = MODELS["mlp"].batch(8, number)
            run.step(x.float(), y)
        with pytest.raises(IncompatibleError, match="clip_norm"):
            run.clip_grad_norm_(1.0)
        run.close()
        return dict(scaler.state_dict())

    one, other = sl.simulate(train, 2).results
    assert one == other
    assert (one["scale"], one["_growth_tracker"]) == (8.0, 1)


def test_inputs_that_require_a_gradient_are_refused() -> None:
    def attempt(world: World) -> str:
        run, _ = attach(world, MODELS["mlp"].model())
        x, y = MODELS["mlp"].batch(8, 0)
        with pytest.raises(IncompatibleError) as caught:
            run.step(x.requires_grad_(), y)
        run.close()
        return str(caught.value)

    assert all("x.detach()" in message for message in sl.simulate(attempt, 2).results)


class TiedSparse(nn.Module):
    """A sparse embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.embed(tokens))
        return output


def test_a_sparse_embedding_is_tied_to_a_dense_layer() -> None:
    def train(world: World) -> Tensor:
        torch.manual_seed(0)
        model = TiedSparse()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, loss_of, stages=["head"], microbatches=2)
        run.step(torch.tensor([1, 2, 3, 1]), torch.tensor([0, 1, 2, 3]))
        run.close()
        return model.head.weight.detach()

    torch.manual_seed(0)
    model = TiedSparse()
    model.embed.sparse = False
    torch.autograd.backward(loss_of(model(torch.tensor([1, 2, 3, 1])), torch.tensor([0, 1, 2, 3])))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in sl.simulate(train, 2).results:
        torch.testing.assert_close(found, model.head.weight.detach())


def test_targets_may_have_values_that_are_no_tensors() -> None:
    def weighted(output: Tensor, target: tuple[Tensor, float]) -> Tensor:
        return loss_of(output, target[0]) * target[1]

    def train(world: World) -> float:
        model = MODELS["mlp"].model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, weighted, stages=StagePartition(("4",), (2, 1)), microbatches=2)
        x, y = MODELS["mlp"].batch(8, 0)
        loss = run.step(x, (y, 0.5)).item()
        run.close()
        return loss

    model = MODELS["mlp"].model()
    x, y = MODELS["mlp"].batch(8, 0)
    for loss in sl.simulate(train, 3).results:
        assert loss == pytest.approx(0.5 * loss_of(model(x), y).item(), rel=1e-6)
