"""A model in stages computes what the model computes, with the model's own modules; what cannot be split is refused."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.splitting import cut_candidates, split, stage_container
from syncline.parallel.stages import MODEL_INPUT, StageGraph, TiedParameter
from tests.parallel.split_models import (
    CASES,
    RandomModel,
    SplitCase,
    Transformer,
    TwoTowers,
    UNet,
    loss_of,
    mlp,
    run_stages,
    tensors,
)

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(graph: StageGraph, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Outputs, gradients and buffers of the stages are those of a copy of the model."""
    whole = copy.deepcopy(model)
    model.zero_grad()
    expected = whole(*(each.clone() for each in inputs))
    torch.autograd.backward(loss_of(expected))
    result = run_stages(graph, inputs)
    torch.testing.assert_close(result, expected, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()), rtol=0.0, atol=1e-12)


@CASE
def test_stages_compute_what_the_model_computes(case: SplitCase) -> None:
    model = case.model()
    graph = split(model, case.cuts)
    assert len(graph.stages) == len(case.cuts) + 1
    for batch in (5, 2, 1):
        assert_same(graph, model, case.inputs(batch))


@CASE
def test_stages_follow_evaluation_mode(case: SplitCase) -> None:
    model = case.model()
    graph = split(model, case.cuts)
    model.eval()
    assert_same(graph, model, case.inputs(3))
    model.train()
    assert_same(graph, model, case.inputs(3))


@CASE
def test_stages_hold_the_models_own_objects(case: SplitCase) -> None:
    model = case.model()
    graph = split(model, case.cuts)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    modules = dict(model.named_modules())
    seen = set(graph.unused)
    for stage in graph.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            assert parameter is parameters[name]
            seen.add(name)
        for name, buffer in stage.module.named_buffers():
            assert buffer is buffers[name]
            seen.add(name)
        assert set(stage.module.state_dict()) <= set(model.state_dict())
        for name, module in stage.module.named_modules():
            if name and list(module.parameters()) and type(module) is type(modules[name]):
                assert module is modules[name]
    assert seen == {*parameters, *buffers}


@CASE
def test_splitting_leaves_the_model_unchanged(case: SplitCase) -> None:
    model = case.model()
    model.register_buffer("flag", torch.zeros(1))
    model.get_submodule(case.cuts[0]).eval()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    split(model, case.cuts)
    cut_candidates(model)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert torch.zeros(2).tolist() == [0.0, 0.0]


@CASE
def test_a_container_of_all_stages_is_the_model(case: SplitCase) -> None:
    model = case.model()
    graph = split(model, case.cuts)
    container = stage_container(graph, range(len(graph.stages)))
    expected = {name: each for name, each in model.named_parameters() if name not in graph.unused}
    assert [(name, id(each)) for name, each in container.named_parameters()] == [
        (name, id(each)) for name, each in expected.items()
    ]
    assert list(container.state_dict()) == [name for name in model.state_dict() if name not in graph.unused]


def test_a_container_of_some_stages_has_only_theirs() -> None:
    model = mlp()
    graph = split(model, ["2", "4"])
    assert list(stage_container(graph, [2, 0, 2]).state_dict()) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert list(stage_container(split(model, []), [0]).state_dict()) == list(model.state_dict())
    with pytest.raises(SpecError, match="no stage 3: the model has stages 0 to 2"):
        stage_container(graph, [3])


# Values


def ways(graph: StageGraph) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(value.name, value.source, value.consumers) for value in graph.values]


def test_a_skip_goes_directly_to_its_consumers() -> None:
    graph = split(UNet(), ["down.1", "bottom", "up.1"])
    assert ways(graph) == [
        ("x", MODEL_INPUT, (0,)),
        ("down.0.relu()", 0, (2,)),
        ("pool", 0, (1,)),
        ("down.1.relu()", 1, (2,)),
        ("pool", 1, (2,)),
        ("cat((interpolate_1, relu), 1)", 2, (3,)),
    ]


def test_inputs_and_outputs_go_directly_to_the_last_stage() -> None:
    graph = split(TwoTowers(), ["right", "join"])
    assert ways(graph) == [
        ("x", MODEL_INPUT, (0,)),
        ("y", MODEL_INPUT, (1, 2)),
        ("left.relu()", 0, (2,)),
        ("x.shape", 0, (2,)),
        ("right.relu()", 1, (2,)),
    ]
    assert [value.input_index for value in graph.values] == [0, 1, -1, -1, -1]
    assert graph.unused == ("unused.weight", "unused.bias")
    assert graph.cuts == ("right", "join")


def test_tied_parameters_are_named_in_each_stage() -> None:
    graph = split(Transformer(), ["layers.0", "norm"])
    assert graph.tied == (TiedParameter((0, 2), ("embed.weight", "head.weight")),)


def test_a_root_parameter_is_shared_by_the_stages_that_read_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x * self.scale)) * self.scale.shape[0] + self.scale
            return result

    model = Scaled().double()
    graph = split(model, ["second"])
    assert graph.tied == (TiedParameter((0, 1), ("scale", "scale")),)
    assert_same(graph, model, (torch.randn(3, 2).double(),))


def test_parts_of_a_tuple_are_sent_one_by_one() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            result = self.lstm(x)
            hidden = self.middle(result[0])
            output: Tensor = self.head(hidden[:, -1] + result[1][0][0])
            return output

    model = Recurrent().double()
    graph = split(model, ["middle", "head"])
    assert ways(graph)[1:3] == [("lstm[0]", 0, (1,)), ("getitem_3[0]", 0, (1,))]
    assert_same(graph, model, (torch.randn(3, 5, 3).double(),))


def test_changes_in_place_stay_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            other = x
            x += 1
            x[:, 0] = 0
            x.mul_(2)
            functional.relu(other, True)
            y = self.second(x)
            y += other
            y.sub_(1)
            result: Tensor = y * 2 + x
            return result

    model = InPlace().double()
    assert_same(split(model, ["second"]), model, (torch.randn(4, 3).double(),))


def test_defaults_are_kept_unless_the_example_has_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.second(self.first(x))
            return x if mask is None else x * mask

    model, x, mask = Masked().double(), torch.randn(2, 3).double(), torch.rand(2, 3).double()
    assert_same(split(model, ["second"]), model, (x,))
    assert_same(split(model, ["second"], example=(x, mask)), model, (x, mask))


def test_factories_are_recorded_and_not_frozen() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x)) + torch.randn(x.shape[0], 1)
            return result

    graph = split(Noisy(), ["second"])
    x = torch.ones(3, 1)
    assert not torch.equal(run_stages(graph, [x], backward=False), run_stages(graph, [x], backward=False))


def test_other_threads_make_tensors_while_a_model_is_traced() -> None:
    made = []

    def make(self: Traced, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: made.append(torch.zeros(2)))
        thread.start()
        thread.join()
        result: Tensor = self.second(x)
        return result

    split(Traced(make), ["second"])
    assert all(type(each) is Tensor for each in made)
    assert made


def test_one_stage_is_the_model() -> None:
    model = mlp()
    graph = split(model, [])
    assert graph.stages[0].module is model
    assert ways(graph) == [("input", MODEL_INPUT, (0,))]


def test_children_may_have_names_that_fx_uses() -> None:
    model = nn.Sequential()
    for name in ("graph", "code", "meta", "training_"):
        model.add_module(name, nn.Linear(2, 2))
    assert_same(split(model.double(), ["code", "training_"]), model, (torch.randn(3, 2).double(),))


def test_a_batch_changes_a_stages_own_batch_norm() -> None:
    model = CASES[1].model()
    graph = split(model, CASES[1].cuts)
    run_stages(graph, CASES[1].inputs(4))
    for name, buffer in model.named_buffers():
        assert float(buffer.abs().sum()) > 0, name


def test_random_models_are_split_exactly_or_refused() -> None:
    """Skips, shared memory and sizes in any order; the refusals are of changes that another stage would not see."""
    exact, refusals = 0, []
    for seed in range(150):
        torch.manual_seed(seed)
        model = RandomModel(seed).double()
        x = torch.randn(3, 4).double()
        try:
            torch.autograd.backward(loss_of(copy.deepcopy(model)(x.clone())))
        except RuntimeError:  # autograd refuses what the model changes in place
            continue
        draw = random.Random(seed)
        count = len(model.layers)
        cuts = sorted(draw.sample(range(1, count), draw.randint(1, min(3, count - 1))))
        try:
            graph = split(model, [f"layers.{cut}" for cut in cuts])
        except IncompatibleError as error:
            refusals.append(str(error))
        else:
            assert_same(graph, model, (x,))
            exact += 1
    assert all("in place" in each or "computes nothing" in each for each in refusals), refusals
    assert exact > len(refusals) > 0


# Candidates


def test_candidates_are_called_modules_in_order() -> None:
    assert cut_candidates(CASES[1].model()) == (
        *("0.0.1.0", "0.0.1.1", "0.1.0", "0.1.1.0", "0.1.1.1"),
        *("1", "2", "3"),
    )
    assert cut_candidates(Transformer()) == ("layers.0", "layers.1", "layers.2", "norm", "head")
    assert cut_candidates(UNet()) == ("down.1", "bottom", "up.0", "up.1")


def test_every_candidate_can_be_cut() -> None:
    for case in CASES:
        model = case.model()
        graph = split(model, cut_candidates(model))
        assert_same(graph, model, case.inputs(2))


def test_candidates_look_into_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer()

        def forward(self, ids: Tensor) -> Any:
            return self.model(ids)

    assert cut_candidates(Wrapper()) == tuple(f"model.{name}" for name in cut_candidates(Transformer()))


def test_too_few_candidates_are_refused() -> None:
    assert len(cut_candidates(mlp(), stages=5)) == 4
    with pytest.raises(IncompatibleError, match=r"6 stages .* 4 modules .* at most 5 stages"):
        cut_candidates(mlp(), stages=6)


# Refusals


class Traced(nn.Module):
    """Two layers, and code between them that some test brings."""

    def __init__(self, code: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.code = code
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.items: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.code(self, x)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def refused(code: Callable[[Any, Any], Any], match: str, cuts: tuple[str, ...] = ("second",)) -> None:
    model = Traced(code)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(IncompatibleError, match=match):
        split(model, cuts)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert model.items == []


def test_unknown_and_repeated_cuts_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SpecError, match=r"no module 'l'.*available: '0', '1'"):
        split(model, ["l"])
    with pytest.raises(SpecError, match=r"no module 'heads'.*did you mean 'head'"):
        split(Transformer(), ["heads"])
    with pytest.raises(SpecError, match=r"no module ''"):
        split(model, [""])
    with pytest.raises(SpecError, match="'1' is given twice"):
        split(model, ["1", "1"])
    with pytest.raises(SpecError, match=r"write cuts=\['1'\]"):
        split(model, "1")
    with pytest.raises(SpecError, match="unknown tracer 'dynamo'"):
        split(model, ["1"], tracer="dynamo")  # type: ignore[arg-type]
    model.append(model[1])
    with pytest.raises(SpecError, match=r"'2' \(also called '1'\) is given twice"):
        split(model, ["1", "2"])


def test_cuts_out_of_order_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"\['3', '1'\] are not in the order .*: \['1', '3'\]"):
        split(mlp(), ["3", "1"])


def test_cuts_that_begin_no_stage_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"ModuleList is never called; cut at .*'layers\.0', 'layers\.1'"):
        split(Transformer(), ["layers"])
    with pytest.raises(IncompatibleError, match=r"'unused': .*does not call this module"):
        split(TwoTowers(), ["unused"])
    refused(lambda self, x: self.second(self.second(x)), "'second': .*calls this module 2 times")


def test_stages_without_work_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"stage 0 computes nothing: .*before the cut '0\.0'"):
        split(CASES[1].model(), ["0.0"])
    with pytest.raises(IncompatibleError, match=r"stage 1 computes nothing: .*between the cuts '0\.1' and '0\.1\.0'"):
        split(CASES[1].model(), ["0.1", "0.1.0"])


def test_untraceable_code_is_refused_with_its_place() -> None:
    def branches(self: Traced, x: Tensor) -> Tensor:
        result: Tensor = self.second(x) if x.sum() > 0 else x
        return result

    refused(
        branches,
        r"cannot trace the forward of the model \(Traced\) \(.*test_splitting\.py, line \d+: .*x\.sum\(\) > 0.*control "
        r"flow; it is traced because the cut 'second' is inside; cut elsewhere.*tracer=\"export\"",
    )
    inner = nn.Sequential(Traced(branches), nn.Linear(3, 3))
    assert_same(split(inner.double(), ["1"]), inner, (torch.ones(2, 3).double(),))
    with pytest.raises(IncompatibleError, match=r"forward of '0' \(Traced\).*the cut '0\.second' is inside"):
        split(inner, ["0.second", "1"])
    refused(lambda self, x: self.second(torch.stack([*x])), "cannot be iterated")
    refused(lambda self, x: self.second(x) if not x.sum() else x, "control flow")


def test_code_that_depends_on_the_mode_is_refused() -> None:
    refused(
        lambda self, x: self.second(functional.dropout(x, 0.5, self.training)),
        r"the forward of the model \(Traced\) depends on self\.training: it has dropout\(first, .*training=True.*in "
        r"training mode and dropout\(.*training=False.* in evaluation mode.*nn\.Dropout",
    )
    refused(lambda self, x: self.second(self.third(x) if self.training else x), r"third\(first\) in training mode")
    kept = Traced(lambda self, x: self.second(functional.dropout(x, 0.5, self.training)))
    outer = nn.Sequential(kept, nn.Linear(3, 3)).double()
    graph = split(outer, ["1"])
    outer.eval()
    assert_same(graph, outer, (torch.ones(2, 3).double(),))


def test_contexts_in_traced_code_are_refused() -> None:
    def ungraded(self: Traced, x: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.second(x)
        return result + 1

    refused(ungraded, r"torch\.no_grad\(\) or torch\.autocast\(\)")

    def autocast(self: Traced, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = self.second(x)
        return result + 1

    refused(autocast, r"torch\.no_grad\(\) or torch\.autocast\(\)")


def test_side_effects_of_traced_code_are_refused() -> None:
    def assigns(self: Traced, x: Tensor) -> Tensor:
        self.last = x
        result: Tensor = self.second(x)
        return result

    def appends(self: Traced, x: Tensor) -> Tensor:
        self.items.append(x)
        result: Tensor = self.second(x)
        return result

    refused(assigns, "assigns 'last'")
    refused(appends, "assigns 'items'")
    model = mlp()
    model.register_forward_pre_hook(lambda module, inputs: None)
    with pytest.raises(IncompatibleError, match="the model has hooks"):
        split(model, ["1"])


def test_values_that_are_no_tensors_are_refused() -> None:
    refused(
        lambda self, x: (lambda total: self.second(x) * total)(x.sum().item()),
        r"stage 1 uses sum_1\.item\(\) of stage 0, which is neither a tensor nor a size",
    )
    model = nn.Sequential(Traced(lambda self, x: Pair(x, x)), Traced(lambda self, x: x))
    with pytest.raises(IncompatibleError, match=r"0\(input\) is a Pair, and only tensors .*to stage 1"):
        run_stages(split(model, ["1"]), [torch.ones(2, 3)])


def test_changes_that_another_stage_would_not_see_are_refused() -> None:
    def late(self: Traced, x: Tensor) -> Tensor:
        y, other = self.second(x), x
        x += 1
        result: Tensor = self.third(y) + other
        return result

    def views(self: Traced, x: Tensor) -> Tensor:
        part = x.view(-1, 3)[:2]
        y = self.second(x)
        part += 1
        result: Tensor = self.third(y) + x
        return result

    def seen(self: Traced, x: Tensor) -> Tensor:
        y = self.second(x * 2)
        part = x.view(-1, 3)[:2]
        part += 1
        result: Tensor = self.third(y + x)
        return result

    refused(late, r"iadd\(first, 1\) in stage 1 changes first in place, and stage 2 uses first", ("second", "third"))
    refused(views, r"iadd\(.* in stage 1 changes getitem in place, and stage 1 uses first, .*same memory")
    for cuts in (["second"], ["third"], ["second", "third"]):
        model = Traced(seen).double()
        assert_same(split(model, cuts), model, (torch.randn(4, 3).double(),))


def test_state_of_several_stages_is_refused() -> None:
    class Shared(nn.Module):
        counter: Tensor

        def __init__(self, change: bool) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("counter", torch.zeros(()))
            self.change = change

        def forward(self, x: Tensor) -> Tensor:
            if self.change:
                self.counter.add_(1)
            result: Tensor = self.norm(self.second(self.norm(self.first(x)) if not self.change else self.first(x)))
            return result * self.counter

    with pytest.raises(IncompatibleError, match=r"stages \[0, 1\] call 'norm', .*buffer 'running_mean'"):
        split(Shared(False), ["second"])
    with pytest.raises(IncompatibleError, match=r"stage 0 changes 'counter' in place, and stages \[0, 1\] use it"):
        split(Shared(True), ["second"])


def test_parameters_that_share_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    last.weight = nn.Parameter(first.weight.data)
    with pytest.raises(IncompatibleError, match=r"'0\.weight' of stage 0 and '2\.weight' of stage 1 .*same memory"):
        split(model, ["1"])
    last.weight = first.weight
    assert split(model, ["1"]).tied == (TiedParameter((0, 1), ("0.weight", "2.weight")),)


def test_models_that_cannot_be_traced_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"'1\.weight' of a lazy module .*run the model once"):
        split(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), ["1"])

    class Compiled(nn.Sequential):
        _orig_mod = None  # as torch.compile names it

    with pytest.raises(IncompatibleError, match="compiled model"):
        split(Compiled(nn.Linear(2, 2), nn.ReLU()), ["1"])


def test_inputs_that_are_not_clear_are_refused() -> None:
    class Keyword(nn.Linear):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    class Anything(nn.Linear):
        def forward(self, *inputs: Tensor) -> Tensor:
            return super().forward(inputs[0] + inputs[1])

    with pytest.raises(IncompatibleError, match="'scale' only as a keyword"):
        split(Keyword(2, 2), [])
    with pytest.raises(SpecError, match=r"give example="):
        split(Anything(2, 2), [])
    assert ways(split(Anything(2, 2), [], example=(torch.ones(1), torch.ones(1))))[1] == ("inputs_1", MODEL_INPUT, (0,))
    with pytest.raises(SpecError, match="example has 2 inputs, and forward takes 1 to 1: input"):
        split(mlp(), ["1"], example=(torch.ones(1), torch.ones(1)))
    with pytest.raises(SpecError, match="tuple of tensors"):
        split(mlp(), ["1"], example=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r'tracer="export" needs'):
        split(mlp(), ["1"], tracer="export")


def test_stages_can_be_copied_and_called_with_other_weights() -> None:
    model = CASES[4].model()
    graph = split(model, CASES[4].cuts)
    inputs = CASES[4].inputs(2)
    stage = graph.stages[0].module
    other = copy.deepcopy(stage)
    weights = {name: each.detach() * 2 for name, each in stage.named_parameters()}
    changed = torch.func.functional_call(stage, weights, inputs)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(2)
    torch.testing.assert_close(changed, other(*inputs), rtol=0.0, atol=0.0)
    assert any(not torch.equal(one, two) for one, two in zip(changed, stage(*inputs), strict=True))


# torch.export


class Branching(nn.Module):
    """Control flow on sizes; dropout and batch norm; a tied head; a constant; parts of it without gradients."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6)) for _ in range(2))
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, ids: Tensor, weights: Tensor) -> dict[str, Any]:
        x = self.drop(self.embed(ids).mean(1))
        if ids.shape[1] > 100:
            raise ValueError(ids.shape)
        with torch.no_grad():
            y = x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
        for block in self.blocks:
            x = x + block(x)
        return {"logits": self.head(x * self.scale), "both": (x.view(ids.shape[0], 2, -1), y), "w": weights.sum()}


def branching_inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (batch, 3 + batch)), torch.randn(batch, 2).double()


def test_exported_stages_compute_what_the_model_computes() -> None:
    torch.manual_seed(0)
    model = Branching(rate=0.5).double()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    graph = split(model, ["blocks.0.1", "blocks.1", "head"], example=branching_inputs(4), tracer="export")
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert graph.tied == (TiedParameter((0, 3), ("embed.weight", "head.weight")),)
    container = stage_container(graph, range(4))
    assert [(name, id(each)) for name, each in container.named_parameters()] == [
        (name, id(each)) for name, each in model.named_parameters()
    ]
    assert list(container.state_dict()) == list(model.state_dict())
    model.eval()
    for batch in (4, 9, 2, 1):
        assert_same(graph, model, branching_inputs(batch))
    model.train()
    model.drop.p = 0.0
    assert_same(graph, model, branching_inputs(5))
    model.drop.p = 0.5
    logits = [run_stages(graph, branching_inputs(3), backward=False)["both"][1] for _ in range(2)]
    assert int((logits[0] == 0).sum()) > 0
    with pytest.raises(IncompatibleError, match=r"input 'ids' has size 101 in dimension 1, .*accepts 0 to 100"):
        run_stages(graph, (torch.zeros(2, 101, dtype=torch.int64), torch.ones(2, 2).double()))


def test_what_cannot_be_exported_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.second, self.same = nn.Linear(3, 3), nn.Linear(3, 3), nn.Identity()
            self.code = code

        def forward(self, x: Tensor) -> Any:
            return self.code(self, self.same(self.first(x)))

    def exported(code: Callable[[Any, Any], Any], cut: str = "second") -> StageGraph:
        return split(Fixed(code), [cut], example=(torch.ones(4, 3),), tracer="export")

    graph = exported(lambda self, x: self.second(x).view(4, 3))
    with pytest.raises(IncompatibleError, match=r"'x' has size 5 in dimension 0, .*accepts 4: .*another example"):
        run_stages(graph, (torch.ones(5, 3),))
    with pytest.raises(IncompatibleError, match=r"torch\.export cannot trace Fixed: .*data-dependent"):
        exported(lambda self, x: self.second(x) if x.sum() > 0 else x)
    with pytest.raises(IncompatibleError, match=r"depends on self\.training.*dropout"):
        exported(lambda self, x: self.second(functional.dropout(x, 0.5, self.training)))
    with pytest.raises(IncompatibleError, match="calls this module 2 times"):
        exported(lambda self, x: self.second(self.second(x)))
    with pytest.raises(IncompatibleError, match="'same'"):
        exported(lambda self, x: self.second(x), cut="same")


def test_exported_stages_equal_those_of_torchs_pipeline() -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    model, cuts = TwoTowers().double(), ["right", "join"]
    inputs = (torch.randn(4, 4).double(), torch.randn(4, 3).double())
    pipe = pipeline(copy.deepcopy(model), inputs, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))
    graph = split(model, cuts, example=inputs, tracer="export")
    torch.testing.assert_close(tensors(run_stages(graph, inputs)), list(pipe(*inputs))[:3], rtol=0.0, atol=1e-12)
    for stage in graph.stages:
        theirs = pipe.get_stage_module(stage.index).named_parameters()
        assert [name for name, _ in stage.module.named_parameters()] == [name for name, _ in theirs]
    assert_same(graph, model, (torch.randn(7, 4).double(), torch.randn(7, 3).double()))  # theirs has a fixed batch
