"""Norms and dropouts on a part of the sequence, and dropout on a part of the features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel import cross_entropy
from syncline.parallel.team import LayerTeam
from syncline.parallel.tensor_layers.plan import TensorPlan, plan_divisions
from syncline.parallel.tensor_layers.random_streams import split_random
from syncline.world import World
from tests.parallel.divided import backward, check_training, divide, numbers, seeded

WIDTH = 12


class Block(nn.Module):
    """A transformer block whose sequence is divided between attention and MLP."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 12, batch_first=batch_first)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(x)
        x = x + self.attn(hidden, hidden, hidden, need_weights=False)[0]
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return output


class Model(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.start = nn.Dropout(0.0)
        self.blocks = nn.Sequential(Block(batch_first), Block(batch_first))
        self.end = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.end(self.blocks(self.start(self.embed(words)))))
        return output


BLOCK = {
    "blocks.*.norm?": "sequence",
    "blocks.*.attn": "sequence+heads+sequence",
    "blocks.*.up": "sequence+columns",
    "blocks.*.down": "rows+sequence",
}
WHOLE_EMBEDDING = BLOCK | {"start": "slice+sequence", "end": "sequence+gather"}
DIVIDED_EMBEDDING = BLOCK | {
    "embed": "vocabulary+sequence",
    "start": "sequence",
    "end": "sequence",
    "head": "sequence+vocabulary",
}


def plain_loss(model: nn.Module, words: Tensor) -> Tensor:
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def divided_loss(model: nn.Module, words: Tensor) -> Tensor:
    return cross_entropy(model(words).flatten(0, 1), words.flatten(), model.get_submodule("head"))


def word_batches(count: int, *shape: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, 9, shape, generator=draw) for _ in range(count)]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_divided_sequences_train_as_whole_ones(workers: int) -> None:
    check_training(seeded(Model), WHOLE_EMBEDDING, plain_loss, word_batches(10, 2, 12), workers, "adam", 1e-9)


def test_divided_sequences_with_a_divided_vocabulary() -> None:
    check_training(seeded(Model), DIVIDED_EMBEDDING, divided_loss, word_batches(10, 2, 6), 2)


def test_the_sequence_may_be_the_first_dimension() -> None:
    plan = TensorPlan(WHOLE_EMBEDDING, sequence_dim=0)
    check_training(seeded(lambda: Model(False)), plan, plain_loss, word_batches(3, 4, 3), 2)


def test_a_gather_and_a_reduce_scatter_replace_each_all_reduce() -> None:
    def work(world: World) -> tuple[dict[str, int], dict[str, int]]:
        divided = divide(world, nn.ModuleDict({"blocks": nn.ModuleList([Block()])}), BLOCK)
        for parameter in divided.model.parameters():  # the sums of the gradients of norms and biases are not counted
            parameter.requires_grad_(parameter.dim() > 1)
        x = torch.randn(2, 2, WIDTH, requires_grad=True)
        output = divided.model.get_submodule("blocks.0")(x)
        forward = dict(divided.team.calls)
        backward(output.sum())
        return forward, dict(divided.team.calls)

    for forward, both in sl.simulate(work, 2).results:
        assert forward == {"allgather": 2, "reduce_scatter": 2}
        assert both == {"allgather": 4, "reduce_scatter": 4}


def test_sequences_that_cannot_be_divided_are_refused() -> None:
    def run(plan: dict[str, str]) -> None:
        sl.simulate(lambda world: divide(world, Model(), plan).model(word_batches(1, 2, 5)[0]), 2)

    with pytest.raises(IncompatibleError, match=r"start divides a sequence, and 5 positions.*2 workers.*pad it to 6"):
        run(WHOLE_EMBEDDING)
    with pytest.raises(IncompatibleError, match=r"a sequence of 5 positions.*2 workers.*pad it to 6"):
        run(DIVIDED_EMBEDDING)


def test_statistics_of_a_part_are_refused() -> None:
    for module in (nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)), nn.LSTM(2, 2)):
        with pytest.raises(IncompatibleError, match=r"BatchNorm1d, whose statistics|LSTM: it needs whole"):
            plan_divisions(nn.Sequential(module), {"0": "split"}, 2)


@pytest.mark.parametrize("role", ["sequence", "split"])
def test_dropout_of_parts_differs_between_workers(role: str) -> None:
    def work(world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        divided = divide(world, model, {"0": role})
        torch.manual_seed(3)
        x = torch.ones(2, 40)
        return model[0](x), model[0](x), model[1](x), divided.model.eval()(x)

    first, second = sl.simulate(work, 2).results
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[3], torch.ones(2, 40))
    assert sl.simulate(work, 2).results[1][0].equal(second[0])


def test_the_global_generator_advances_equally() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        team = LayerTeam(world.group())
        torch.manual_seed(3)
        with split_random(team):
            inside = torch.rand(world.rank + 2)
        return inside[:2], torch.rand(2)

    results = sl.simulate(work, 3).results
    assert all(torch.equal(after, results[0][1]) for _, after in results)
    assert len({tuple(inside.tolist()) for inside, _ in results}) == 3


def test_parameters_are_what_they_were_after_an_error() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    def work(world: World) -> bool:
        layer = Failing(2, 2)
        divided = divide(world, nn.Sequential(layer), {"0": "split"})
        with pytest.raises(ValueError, match="no"):
            divided.model(torch.ones(1, 2))
        return isinstance(layer.weight, nn.Parameter) and "weight" not in vars(layer)

    assert sl.simulate(work, 2).results == (True, True)


def test_gradients_of_modules_on_parts_are_summed() -> None:
    class Scaled(nn.Module):
        """Parameters in modules inside, one of them frozen."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.PReLU(), nn.PReLU())
            self.inner[0].weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output

    make = seeded(lambda: nn.Sequential(nn.Linear(4, 7), Scaled(), nn.Linear(7, 2)))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.square().mean()

    check_training(make, {"0": "columns", "1": "split", "2": "rows"}, loss, numbers(4, 3, 4), 3)
