"""Linear layers divided by outputs and by inputs equal whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.world import World
from tests.parallel.divided import assert_close, backward, check_training, divide, numbers, seeded


class GatedMLP(nn.Module):
    """SwiGLU: the gate and the up layer read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 7, bias=False)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output + x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.mlp = GatedMLP()
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.mlp(self.norm(x)))
        return output


GATED = {"mlp.gate": "columns", "mlp.up": "columns", "mlp.down": "rows"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 5, bias=False))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.square().mean()


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (mlp, {"0": "columns", "2": "rows", "4": "columns+gather"}),
    "whole inputs": (mlp, {"0": "columns+gather", "2": "slice+rows", "4": "slice+rows"}),
    "gated": (Gated, GATED | {"head": "columns+gather"}),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_divided_layers_train_as_whole_ones(model: str, workers: int, optimizer: str) -> None:
    make, plan = MODELS[model]
    width = 5 if model == "gated" else 6
    check_training(seeded(make), plan, squares, numbers(10, 4, width), workers, optimizer)


def test_layers_that_read_the_same_tensor_share_one_all_reduce() -> None:
    def work(world: World) -> tuple[dict[str, int], dict[str, int], int]:
        divided = divide(world, seeded(Gated)(), GATED)
        x = numbers(1, 4, 5)[0]
        loss = squares(divided.model, x)
        forward = dict(divided.team.calls)
        backward(loss)
        return forward, dict(divided.team.calls), divided.team.sent_bytes

    for forward, both, sent in sl.simulate(work, 2).results:
        assert (forward, both) == ({"allreduce": 1}, {"allreduce": 2})
        assert sent == 2 * 4 * 5 * 8


def test_a_tensor_that_changes_between_two_reads_is_copied_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 6), nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.one(x)  # its copy has no gradient
            x = torch.tanh(x)
            first = self.one(x * 1)
            x = x * 1
            before: Tensor = self.two(x).detach()
            x.add_(1)
            output: Tensor = first + self.two(x) + before
            return output

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.twice = nn.Linear(5, 5), Twice()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.twice(self.start(x))
            return output

    plan = {"twice.one": "columns+gather", "twice.two": "columns+gather"}
    check_training(seeded(Nested), plan, squares, numbers(3, 4, 5), 2)


def test_a_copy_of_a_divided_model_is_divided() -> None:
    def work(world: World) -> list[Tensor]:
        divided = divide(world, seeded(Gated)(), GATED)
        again = copy.deepcopy(divided.model)
        with torch.no_grad():
            again.get_parameter("mlp.down.weight").zero_()
        x = numbers(1, 4, 5)[0]
        return [divided.model(x).detach(), again(x).detach()]

    whole = seeded(Gated)()
    x = numbers(1, 4, 5)[0]
    expected = whole(x).detach()
    with torch.no_grad():
        whole.get_parameter("mlp.down.weight").zero_()
    for found in sl.simulate(work, 2).results:
        assert_close(found[0], expected)
        assert_close(found[1], whole(x).detach())


def test_detached_layers_are_what_they_were() -> None:
    def work(world: World) -> tuple[bool, set[str]]:
        model = seeded(Gated)()
        classes = [type(each) for each in model.modules()]
        before = {name: set(vars(each)) for name, each in model.named_modules()}
        divided = divide(world, model, GATED)
        divided.detach()
        changed = {name for name, each in model.named_modules() if set(vars(each)) != before[name]}
        return classes == [type(each) for each in model.modules()], changed

    assert sl.simulate(work, 2).results[0] == (True, set())


def test_layers_compute_alone_while_every_worker_has_the_whole_model() -> None:
    def work(world: World) -> tuple[Tensor, int]:
        divided = divide(world, seeded(Gated)(), GATED)
        divided.team.divided = False
        divided.model.load_state_dict({}, strict=False)
        whole = seeded(Gated)()
        for own, each in zip(divided.model.parameters(), whole.parameters(), strict=True):
            own.data = each.data
        return divided.model(numbers(1, 4, 5)[0]).detach(), sum(divided.team.calls.values())

    found, calls = sl.simulate(work, 2).results[1]
    assert calls == 0
    assert torch.equal(found, seeded(Gated)()(numbers(1, 4, 5)[0]))


def test_frozen_layers_and_evaluation() -> None:
    def work(world: World) -> tuple[Tensor, Tensor, int]:
        divided = divide(world, seeded(Gated)(), GATED)
        for parameter in divided.model.parameters():
            parameter.requires_grad_(False)
        x = numbers(1, 4, 5)[0].requires_grad_()
        output = divided.model(x)
        backward(output.square().sum())
        assert x.grad is not None
        with torch.no_grad():
            divided.model.eval()(x)
        return output.detach(), x.grad, divided.team.calls["allreduce"]

    x = numbers(1, 4, 5)[0].requires_grad_()
    expected = seeded(Gated)()(x)
    backward(expected.square().sum())
    assert x.grad is not None
    for output, gradient, calls in sl.simulate(work, 3).results:
        assert_close(output, expected.detach())
        assert_close(gradient, x.grad)
        assert calls == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_have_the_dtype_of_the_activations(dtype: torch.dtype) -> None:
    def work(world: World) -> tuple[torch.dtype, int, Tensor, int]:
        divided = divide(world, seeded(Gated)().float(), GATED)
        x = numbers(1, 4, 5)[0].float()
        with torch.autocast("cpu", dtype):
            inner = divided.model.get_submodule("mlp.down")(
                x.new_ones(4, len(divided.model.get_parameter("mlp.up.bias")))
            )
            before = divided.team.sent_bytes
            output = divided.model(x)
        return inner.dtype, before, output, divided.team.sent_bytes

    whole = seeded(Gated)().float()
    with torch.autocast("cpu", dtype):
        expected = whole(numbers(1, 4, 5)[0].float())
    inner, before, output, after = sl.simulate(work, 2).results[0]
    assert inner == dtype
    assert (before, after - before) == (4 * 5 * 2, 4 * 5 * 2)
    assert output.dtype == expected.dtype
    assert_close(output.float(), expected.float(), 0.05)


def test_gradients_of_gradients_are_exact() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    check_training(seeded(Gated), GATED, penalty, numbers(3, 4, 5), 2)


def test_checkpointed_blocks_sum_again() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = checkpoint(model.get_submodule("mlp"), model.get_submodule("norm")(x), use_reentrant=False)
        output: Tensor = model.get_submodule("head")(hidden)
        return output.square().mean()

    check_training(seeded(Gated), GATED, loss, numbers(3, 4, 5), 2)


def test_rows_refuse_an_input_that_is_whole() -> None:
    def work(world: World) -> None:
        divide(world, nn.Sequential(nn.Linear(8, 2)), {"0": "rows"}).model(torch.ones(3, 8))

    with pytest.raises(
        IncompatibleError, match=r"0 is divided by its inputs: worker . of 2 has 4 of 8 and got 8.*slice"
    ):
        sl.simulate(work, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_the_same() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        divided = divide(world, seeded(Gated)(), GATED)
        compiled = torch.compile(divided.model, backend="eager")
        x = numbers(1, 4, 5)[0].requires_grad_()
        compiled(x.detach() + 1)
        output = compiled(x)
        backward(output.square().sum())
        assert x.grad is not None
        return output.detach(), x.grad

    x = numbers(1, 4, 5)[0].requires_grad_()
    expected = seeded(Gated)()(x)
    backward(expected.square().sum())
    assert x.grad is not None
    for output, gradient in sl.simulate(work, 2).results:
        assert_close(output, expected.detach())
        assert_close(gradient, x.grad)
