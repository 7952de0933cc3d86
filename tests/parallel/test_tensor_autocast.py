"""Divided attention, convolutions and sequences under autocast: as whole ones, up to half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.world import World
from tests.parallel.divided import assert_close, divide, numbers, seeded, train
from tests.parallel.test_tensor_convolution import ALEXNET, alexnet, squares
from tests.parallel.test_tensor_heads import WIDTH, Attend
from tests.parallel.test_tensor_sequence import WHOLE_EMBEDDING, Model, plain_loss, word_batches

CASES: dict[str, tuple[Any, Any, Any, list[Tensor]]] = {
    "heads": (
        lambda: Attend(batch_first=True, need_weights=False),
        {"attn": "heads"},
        squares,
        [each.float() for each in numbers(3, 2, 4, WIDTH)],
    ),
    "convolutions": (alexnet, ALEXNET, squares, [each.float() for each in numbers(3, 2, 3, 8, 8)]),
    "sequence": (Model, WHOLE_EMBEDDING, plain_loss, word_batches(3, 2, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_autocast(case: str) -> None:
    make, plan, loss, batches = CASES[case]

    def cast(model: Any, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value: Tensor = loss(model, batch)
        return value

    expected = train(seeded(make)().float(), cast, batches, "sgd")

    def work(world: World) -> tuple[Any, set[str]]:
        divided = divide(world, seeded(make)().float(), plan)
        return train(divided.model, cast, batches, "sgd"), set(divided.slices)

    for found, slices in sl.simulate(work, 2).results:
        assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), 0.05)
        for name, gradient in expected.gradients.items():
            if name not in slices:
                assert found.gradients[name].dtype == torch.float32
                assert_close(found.gradients[name], gradient, 0.05, name)
