"""Embeddings, output layers and losses divided by the vocabulary equal whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel import cross_entropy
from syncline.parallel.tensor_layers.plan import plan_divisions
from syncline.world import World
from tests.parallel.divided import assert_close, backward, check_training, divide, numbers, seeded

WORDS, WIDTH = 11, 4


class Language(nn.Module):
    """An embedding and an output layer, which may be one parameter."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.embed(words)))
        return output


def word_batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, WORDS, (3, 5), generator=draw) for _ in range(count)]


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    targets = words[:, 1:].reshape(-1)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, model.get_submodule("head"))


PLAN = {"embed": "vocabulary", "head": "vocabulary"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "padding": {"padding_idx": 7},
    "sparse": {"sparse": True},
    "frequencies": {"scale_grad_by_freq": True},
    "largest norm": {"max_norm": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_divided_vocabularies_train_as_whole_ones(options: str, workers: int) -> None:
    optimizer = "sgd" if options == "sparse" or workers == 3 else "adam"
    check_training(seeded(lambda: Language(**OPTIONS[options])), PLAN, next_word, word_batches(10), workers, optimizer)


def test_gathered_logits_are_whole() -> None:
    def loss(model: nn.Module, words: Tensor) -> Tensor:
        return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    check_training(seeded(Language), {"head": "vocabulary+gather"}, loss, word_batches(2), 3)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "ignore_index": 3},
    "none": {"reduction": "none", "ignore_index": 0},
    "smooth": {"label_smoothing": 0.2, "ignore_index": 3},
    "smooth sum": {"label_smoothing": 0.1, "reduction": "none"},
    "weights": {"weight": torch.linspace(0.5, 2, WORDS, dtype=torch.float64), "ignore_index": 3},
    "smooth weights": {
        "weight": torch.linspace(0.5, 2, WORDS, dtype=torch.float64),
        "label_smoothing": 0.3,
        "ignore_index": 1,
    },
}


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_of_divided_logits_is_exact(case: str, shape: tuple[int, ...]) -> None:
    options = LOSSES[case]
    draw = torch.Generator().manual_seed(4)
    targets = torch.randint(4, WORDS, shape, generator=draw)
    if shape:
        targets.view(-1)[0] = options.get("ignore_index", 0)
    x = numbers(1, *shape, WIDTH)[0] * 5

    def compute(head: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        inputs = x.clone().requires_grad_()
        logits = head(inputs)
        logits = logits if len(shape) < 2 else logits.movedim(-1, 1)
        loss = cross_entropy(logits, targets, head, **options)
        backward(loss.square().sum())
        gradient = head.weight.grad
        assert inputs.grad is not None
        assert isinstance(gradient, Tensor)
        return loss.detach(), inputs.grad, gradient

    def work(world: World) -> tuple[Tensor, Tensor, Tensor, int]:
        divided = divide(world, nn.Sequential(seeded(lambda: nn.Linear(WIDTH, WORDS))()), {"0": "vocabulary"})
        return *compute(divided.model[0]), divided.team.calls["allreduce"]  # type: ignore[index]

    loss, gradient, weights = compute(seeded(lambda: nn.Linear(WIDTH, WORDS))())
    results = sl.simulate(work, 3).results
    for found in results:
        assert_close(found[0], loss)
        assert_close(found[1], gradient)
        assert found[3] == 3  # the largest logits, the sums, and the gradient of the input
    assert_close(torch.cat([found[2] for found in results]), weights)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_of_half_precision_logits(scale: float) -> None:
    x = numbers(1, 6, WIDTH)[0].to(torch.bfloat16) * scale
    targets = torch.arange(6)

    def work(world: World) -> Tensor:
        head = seeded(lambda: nn.Linear(WIDTH, WORDS))().to(torch.bfloat16)
        divide(world, nn.Sequential(head), {"0": "vocabulary"})
        return cross_entropy(head(x), targets, head).detach()

    head = seeded(lambda: nn.Linear(WIDTH, WORDS))().to(torch.bfloat16)
    expected = functional.cross_entropy(head(x), targets)
    for found in sl.simulate(work, 2).results:
        assert found.dtype == torch.bfloat16
        assert_close(found.float(), expected.detach().float(), 0.02)


def test_all_targets_ignored_give_nan_as_in_torch() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        head = nn.Linear(WIDTH, WORDS)
        divide(world, nn.Sequential(head), {"0": "vocabulary"})
        logits, targets = head(torch.ones(2, WIDTH)), torch.full((2,), -100)
        losses = [cross_entropy(logits, targets, head, reduction=each) for each in ("mean", "sum")]
        return losses[0], losses[1]

    mean, total = sl.simulate(work, 2).results[0]
    assert mean.isnan()
    assert total == 0


def test_wrong_losses_are_refused() -> None:
    def refused(error: type[Exception], message: str, change: Any) -> None:
        def work(world: World) -> None:
            head = nn.Linear(WIDTH, WORDS)
            divide(world, nn.Sequential(head), {"0": "vocabulary"})
            logits, targets, options = change(head(torch.ones(2, WIDTH)), torch.tensor([3, 10]))
            cross_entropy(logits, targets, head, **options)

        with pytest.raises(error, match=message):
            sl.simulate(work, 2)

    refused(IndexError, "index 11 is out of range for 11", lambda z, y: (z, y + 1, {}))
    refused(IncompatibleError, "class numbers.*columns.gather", lambda z, y: (z, torch.rand(2, WORDS), {}))
    refused(IncompatibleError, "dimension 1: pass the logits", lambda z, y: (z[:, :2], y, {}))
    refused(IncompatibleError, "all 11 classes", lambda z, y: (z, y, {"weight": torch.ones(3)}))
    refused(IncompatibleError, "reduction='max'", lambda z, y: (z, y, {"reduction": "max"}))


def test_words_outside_the_vocabulary_are_refused() -> None:
    def work(world: World) -> None:
        divide(world, nn.Sequential(nn.Embedding(WORDS, 2)), {"0": "vocabulary"}).model(torch.tensor([WORDS]))

    with pytest.raises(IndexError, match="0: index 11 is out of range for 11 words"):
        sl.simulate(work, 2)


def test_a_shared_parameter_divided_in_two_ways_is_refused() -> None:
    for plan in (
        {"embed": "vocabulary"},
        {"head": "columns+gather"},
        {"embed": "vocabulary", "head": "slice+rows"},
    ):
        with pytest.raises(IncompatibleError, match=r"(?s)head.weight and embed.weight are the same parameter"):
            plan_divisions(Language(tied=True), plan, 2)


def test_an_embedding_is_not_gathered() -> None:
    with pytest.raises(SpecError, match="embed is an embedding"):
        plan_divisions(Language(), {"embed": "vocabulary+gather"}, 2)
