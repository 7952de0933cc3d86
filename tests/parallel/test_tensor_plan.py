"""Plans: what patterns match, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from syncline.errors import IncompatibleError, SpecError
from syncline.parallel import Heads, TensorPlan
from syncline.parallel.tensor_layers.plan import default_plan, plan_divisions


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "norm": nn.LayerNorm(4)}) for _ in range(2)]
        )


def names(plan: Any, model: nn.Module | None = None) -> list[str]:
    return [division.name for division in plan_divisions(model or Model(), plan, 2)]


def test_patterns_match_part_by_part() -> None:
    assert names({"blocks.*.up": "columns", "blocks.1.down": "rows"}) == ["blocks.0.up", "blocks.1.up", "blocks.1.down"]
    assert names({"blocks.[0].u?": "columns"}) == ["blocks.0.up"]
    assert names({"blocks.*.norm": "whole", "embed": "vocabulary"}) == ["embed"]


def test_stars_do_not_match_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert names({"*": "columns+gather"}, model) == ["0", "1"]
    assert names({"": "columns+gather"}, nn.Linear(2, 2)) == [""]
    assert names({"": "heads"}, nn.MultiheadAttention(4, 2)) == [""]


def test_a_role_may_be_given_twice_alike() -> None:
    assert names({"blocks.*.up": "columns", "blocks.0.up": "columns"}) == ["blocks.0.up", "blocks.1.up"]


def test_a_module_with_two_names_is_divided_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    assert names({"2": "columns+gather"}, model) == ["2"]
    assert names({"0": "columns+gather"}, model) == ["0"]
    with pytest.raises(
        SpecError, match=r"2 has two roles: '0' says 'columns' \(of 0, the same module\), and '2' says 'rows'"
    ):
        names({"0": "columns", "2": "rows"}, model)


REFUSED: dict[str, tuple[Any, str]] = {
    "no module": ({"blocks.*.upp": "columns"}, r"'blocks.\*.upp' of the plan matches no module.*'blocks.0.up'"),
    "parts": ({"*.up": "columns"}, "matches no module"),
    "two roles": ({"blocks.*.up": "columns", "blocks.1.*": "split"}, r"blocks.1.up has two roles.*'columns'.*'split'"),
    "type": ({"embed": "rows"}, "embed is a Embedding, and the role 'rows' divides a Linear"),
    "role": ({"embed": "words"}, "role of embed is 'words': it must be one of 'columns', 'rows'"),
    "addition": ({"blocks.0.up": "columns+sequence"}, r"one of 'columns', 'sequence\+columns', 'columns\+gather'"),
    "no role": ({"embed": 3}, "role of embed is 3"),
    "empty": ({}, "the plan is empty"),
    "no mapping": (["columns"], "a plan is a dict"),
    "inside": (
        {"blocks.*": "split", "blocks.0.up": "columns"},
        "two roles divide blocks.0.up: its own, and that of blocks.0",
    ),
    "around": ({"blocks.*": Heads(("up",), "down", 2), "blocks.0.up": "columns"}, "two roles divide blocks.0.up"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_plans_are_refused(case: str) -> None:
    plan, message = REFUSED[case]
    if case == "around":
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 12), "down": nn.Linear(4, 4)})])
        with pytest.raises(SpecError, match=message):
            names(plan, model)
        return
    with pytest.raises((SpecError, IncompatibleError), match=message):
        names(plan)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


MODULES: dict[str, tuple[Any, str, int, str]] = {
    "lazy": (lambda: nn.LazyLinear(4), "columns", 2, "0 is a LazyLinear, whose weights have no shape yet: call"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "rows", 2, "0.weight is computed"),
    "parametrized bias": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4), "weight"),
        "columns",
        2,
        "0.weight is computed",
    ),
    "forward": (lambda: Doubled(4, 4), "columns", 2, "0 is a Doubled with a forward of its own"),
    "few inputs": (lambda: nn.Linear(3, 8), "rows", 4, "0 has 3 inputs, which cannot be divided over 4 workers"),
    "few outputs": (lambda: nn.Linear(8, 3), "columns", 4, "0 has 3 outputs.*4 workers"),
    "few words": (lambda: nn.Embedding(2, 3), "vocabulary", 3, "0 has 2 words.*3 workers"),
    "words of a part": (lambda: nn.Linear(4, 4), "vocabulary+sequence", 2, "linear layer, whose output is divided"),
}


@pytest.mark.parametrize("case", MODULES)
def test_layers_that_cannot_be_divided_are_refused(case: str) -> None:
    make, role, size, message = MODULES[case]
    with pytest.raises((SpecError, IncompatibleError), match=message):
        plan_divisions(nn.Sequential(make()), {"0": role}, size)


def test_the_default_is_the_plan_of_the_model() -> None:
    model: Any = Model()
    model.tensor_plan = {"embed": "vocabulary"}
    assert default_plan(model) == TensorPlan({"embed": "vocabulary"})
    model.tensor_plan = TensorPlan({"embed": "vocabulary"}, sequence_dim=0)
    assert default_plan(model).sequence_dim == 0


def test_the_default_divides_known_layers() -> None:
    transformer = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)
    assert default_plan(transformer).roles == {"encoder.layers.0": "transformer", "decoder.layers.0": "transformer"}
    assert default_plan(nn.Sequential(nn.MultiheadAttention(4, 2))).roles == {"0": "heads"}
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert len(plan_divisions(layer, default_plan(layer), 2)) == 5
    with pytest.raises(SpecError, match="no plan was given, and Model has neither an attribute tensor_plan"):
        default_plan(Model())


def test_a_parameter_of_a_divided_and_a_whole_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(
        IncompatibleError, match=r"1.weight and 0.weight are the same.*0 to 2 of 4 in dimension 0.*1.weight is whole"
    ):
        plan_divisions(model, {"0": "columns"}, 2)
    assert len(plan_divisions(model, {"0": "columns+gather", "1": "columns+gather"}, 2)) == 2


def test_nothing_changes_before_a_layer_is_attached() -> None:
    model = Model()
    before = [(type(each), dict(vars(each))) for each in model.modules()]
    plan_divisions(model, {"blocks.*.up": "columns", "embed": "vocabulary"}, 2)
    after = [(type(each), dict(vars(each))) for each in model.modules()]
    assert [kind for kind, _ in before] == [kind for kind, _ in after]
    assert [set(values) for _, values in before] == [set(values) for _, values in after]
    assert model.embed.weight.shape == torch.Size([10, 4])
