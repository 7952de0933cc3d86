"""What a server does with pushed values: each rule against its formula and against torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.optim import LAMB, LARS
from syncline.server.rules import RULES, Add, Sgd, TorchRule, UpdateRule, build_rule, rule_of, torch_rule
from syncline.server.rules.handlers import handler

ELEMENTWISE = [
    *("add", "assign", "sgd(lr=0.1)", "momentum(lr=0.1)", "momentum(lr=0.1, mu=0.5, nesterov=True)"),
    *("adagrad(lr=0.1)", "adam(lr=0.01)", "adam(lr=0.01, b1=0.0, b2=0.9, eps=0.001)"),
]

STEPS, NUMEL = 20, 1037


def pushes(count: int = STEPS, numel: int = NUMEL, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def start(numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def run(rule: UpdateRule, updates: list[Tensor], weights: Tensor, rate: float | None = None) -> dict[str, Tensor]:
    """Push everything as a whole; the state afterwards."""
    state = rule.state(weights.numel())
    for update in updates:
        rule.apply(weights, update.clone(), state, rate)
    return state


def trained(make: Callable[[list[nn.Parameter]], Optimizer], updates: list[Tensor], weights: Tensor) -> Tensor:
    """Weights after torch's own optimizer has stepped, as a matrix: a rule sees them in one row."""
    parameter = nn.Parameter(weights.clone().view(17, 61))
    optimizer = make([parameter])
    for update in updates:
        parameter.grad = update.clone().view(17, 61)
        optimizer.step()
    return parameter.detach().view(-1)


# Names and specs.


def test_every_name() -> None:
    assert RULES.names() == ["adagrad", "adam", "add", "assign", "handler", "momentum", "sgd", "torch"]


@pytest.mark.parametrize(
    "spec",
    [
        *ELEMENTWISE,
        *("adagrad", "adam", "momentum", "sgd", "handler('anything')", "torch('SGD')"),
        "torch('AdamW', lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, amsgrad=True)",
    ],
)
def test_repr_is_the_spec(spec: str) -> None:
    rule = build_rule(spec)
    assert repr(rule) == spec
    assert build_rule(repr(rule)) == rule
    assert hash(build_rule(spec)) == hash(rule)
    assert build_rule(rule) is rule


def test_options_come_in_any_order() -> None:
    assert torch_rule("Adam", eps=1e-6, lr=0.1) == torch_rule("Adam", lr=0.1, eps=1e-6)
    assert torch_rule("Adam", betas=[0.5, 0.9]) == torch_rule("Adam", betas=(0.5, 0.9))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("sdg(lr=0.1)", "did you mean 'sgd'"),
        ("sgd|add", "not a chain"),
        ("sgd(rate=0.1)", "rate"),
        ("sgd(lr=-0.1)", "sgd's lr is a finite number, 0 or more, not -0.1"),
        ("sgd(lr=1e999)", "sgd's lr"),
        ("sgd(lr=True)", "sgd's lr"),
        ("momentum(mu=1.0)", "momentum's mu is a finite number, 0 or more and below 1, not 1.0"),
        ("momentum(nesterov=1)", "True or False"),
        ("adagrad(eps=-1)", "adagrad's eps"),
        ("adam(b2='x')", "adam's b2"),
        ("handler('no name')", "the name of one"),
        ("torch('Adamm')", "did you mean 'Adam'"),
        ("torch('Optimizer')", "unknown optimizer"),
        ("torch('Adam', rate=1)", "rate"),
        ("torch('Adam', lr=-1)", "Invalid learning rate"),
        ("torch('Adam', capturable=True)", "means nothing at a server"),
        ("torch('SGD', lr=__import__('os'))", "not a literal"),
        ("torch('SGD', lr={1: 2})", "cannot be written in a spec"),
    ],
)
def test_bad_specs_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        build_rule(spec)


def test_objects_that_are_no_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="a rule is a spec"):
        build_rule(3)  # type: ignore[arg-type]


# Formulas.


def test_adagrad_catch() -> None:
    """γ = 1, pushes 3 then 4 on one weight: steps 1.0 and 0.8."""
    rule, weights = build_rule("adagrad(lr=1.0)"), torch.zeros(1)
    state = rule.state(1)
    seen = []
    for push in (3.0, 4.0):
        rule.apply(weights, torch.tensor([push]), state, None)
        seen.append(weights.item())
    assert seen == pytest.approx([-1.0, -1.8], abs=1e-6)


def test_adagrad_leaves_what_was_never_pushed() -> None:
    rule, weights = build_rule("adagrad(lr=1.0)"), torch.ones(2)
    rule.apply(weights, torch.tensor([0.0, 1.0]), rule.state(2), None)
    assert weights.tolist() == [1.0, 0.0]


def test_add_and_assign() -> None:
    weights = torch.tensor([1.0, 2.0])
    Add().apply(weights, torch.tensor([10.0, 20.0]), {}, None)
    assert weights.tolist() == [11.0, 22.0]
    Add().apply(weights, torch.tensor([10.0, 20.0]), {}, -0.5)
    assert weights.tolist() == [6.0, 12.0]
    assign = build_rule("assign")
    assign.apply(weights, torch.tensor([7.0, 8.0]), {}, None)
    assert weights.tolist() == [7.0, 8.0]
    with pytest.raises(ProtocolError, match="means nothing there"):
        assign.apply(weights, torch.zeros(2), {}, 0.1)
    assert weights.tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        ("sgd(lr=0.1)", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum(lr=0.1, mu=0.8)", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
        ("momentum(lr=0.1, nesterov=True)", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("adagrad(lr=0.1)", lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ("adagrad(lr=0.1, eps=0.01)", lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.01)),
        ("adam(lr=0.01)", lambda p: torch.optim.Adam(p, lr=0.01)),
        ("adam(0.01, 0.8, 0.95, 1e-4)", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-4)),
    ],
)
def test_rules_are_torchs_to_rounding(spec: str, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    weights = start()
    run(build_rule(spec), pushes(), weights)
    torch.testing.assert_close(weights, trained(make, pushes(), start()), rtol=1e-6, atol=1e-6)


def test_adam_counts_each_weights_own_pushes() -> None:
    """A weight that is pushed for the first time takes the same step, however often others were."""
    rule = build_rule("adam(lr=0.01)")
    weights, alone = torch.zeros(8), torch.zeros(8)
    state = rule.state(8)
    late = torch.tensor([1, 5])
    for number, update in enumerate(pushes(6, 8)):
        keys = torch.arange(8) if number >= 4 else torch.tensor([0, 2, 3, 4, 6, 7])
        push_keys(rule, weights, state, keys, update[keys])
    run(rule, [update[late] for update in pushes(6, 8)[4:]], few := torch.zeros(2))
    run(rule, pushes(6, 8), alone)
    assert torch.equal(weights[late], few)
    assert torch.equal(weights[[0, 2, 3, 4, 6, 7]], alone[[0, 2, 3, 4, 6, 7]])
    assert state["steps"].tolist() == [6, 2, 6, 6, 6, 2, 6, 6]


@pytest.mark.parametrize("spread", [0, 1, 30, 400, 5000])
def test_adam_corrects_the_bias_for_any_counts(spread: int) -> None:
    """Few counts or as many as weights: each weight steps as one alone with its count would, bit for bit."""
    rule, update = build_rule("adam(lr=0.01)"), pushes(1)[0]
    counts = torch.randint(0, spread + 1, (NUMEL,), generator=torch.Generator().manual_seed(2)).float()
    state = {"mean": start(), "square": start().square(), "steps": counts}
    weights, kept = torch.zeros(NUMEL), {name: each.clone() for name, each in state.items()}
    rule.apply(weights, update.clone(), state, None)
    for place in range(0, NUMEL, 7):
        alone, own = torch.zeros(1), {name: each[place : place + 1].clone() for name, each in kept.items()}
        rule.apply(alone, update[place : place + 1].clone(), own, None)
        assert alone.item() == weights[place].item()


# Parts of the weights.


def push_keys(rule: UpdateRule, weights: Tensor, state: dict[str, Tensor], keys: Tensor, update: Tensor) -> None:
    """As a server does with a list of keys: gather, apply, scatter."""
    rows, own = weights[keys], {name: each[keys] for name, each in state.items()}
    rule.apply(rows, update.clone(), own, None)
    weights[keys] = rows
    for name, each in own.items():
        state[name][keys] = each


@pytest.mark.parametrize("spec", ELEMENTWISE)
def test_ranges_give_the_same_bits_as_the_whole(spec: str) -> None:
    rule, weights, whole = build_rule(spec), start(), start()
    state, cuts = rule.state(NUMEL), [0, 3, 64, 501, 501, 508, NUMEL]
    for update in pushes():
        for first, after in pairwise(cuts):
            own = {name: each[first:after] for name, each in state.items()}
            rule.apply(weights[first:after], update[first:after].clone(), own, None)
    told = run(rule, pushes(), whole)
    assert torch.equal(weights, whole)
    assert all(torch.equal(state[name], told[name]) for name in told)


@pytest.mark.parametrize("spec", ELEMENTWISE)
def test_lists_of_keys_give_the_same_bits_as_the_whole(spec: str) -> None:
    rule, weights, whole = build_rule(spec), start(), start()
    state = rule.state(NUMEL)
    order = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(3))
    for update in pushes():
        for keys in (order[:400].sort().values, order[400:].sort().values):
            push_keys(rule, weights, state, keys, update[keys])
    run(rule, pushes(), whole)
    assert torch.equal(weights, whole)


@pytest.mark.parametrize("spec", ELEMENTWISE)
def test_all_memory_of_a_rule_is_in_its_state(spec: str) -> None:
    """Ten pushes, the state copied, ten more: as twenty in one go. And it is as long as the weights."""
    rule, weights, whole = build_rule(spec), start(), start()
    kept = {name: each.clone() for name, each in run(rule, pushes()[:10], weights).items()}
    assert all(each.shape == (NUMEL,) and each.dtype == torch.float32 for each in kept.values())
    for update in pushes()[10:]:
        rule.apply(weights, update.clone(), kept, None)
    run(build_rule(spec), pushes(), whole)
    assert torch.equal(weights, whole)


# Rates.


@pytest.mark.parametrize("spec", ["sgd", "momentum", "momentum(nesterov=True)", "adagrad", "adam"])
def test_the_rate_of_a_push_replaces_the_rules_own(spec: str) -> None:
    rated, own, untouched = start(), start(), start()
    run(build_rule(spec), pushes(3), rated, rate=0.25)
    run(build_rule(f"{spec.rstrip(')')}{', ' if '(' in spec else '('}lr=0.25)"), pushes(3), own)
    run(build_rule(spec), pushes(3), untouched)
    assert torch.equal(rated, own)
    assert not torch.equal(rated, untouched)


# Optimizers of torch.

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adam", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.3, "fused": True}),
    ("Adamax", {"weight_decay": 0.01}),
    ("NAdam", {"momentum_decay": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"rho": 0.8, "weight_decay": 0.01}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    ("ASGD", {"lr": 0.1, "t0": 5.0, "weight_decay": 0.01}),
    ("Rprop", {"lr": 0.1, "etas": (0.4, 1.1)}),
]
NAMES = [f"{name}-{number}" for number, (name, _) in enumerate(OPTIONS)]
CUTS = [0, 3, 64, 501, 508, NUMEL]


def maker(name: str, options: dict[str, Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    kind: Callable[..., Optimizer] = getattr(torch.optim, name)
    return lambda parameters: kind(parameters, **options)


def apply_rule(rule: UpdateRule, updates: list[Tensor], weights: Tensor) -> None:
    """Pushes ranges that no parameter has, to both kinds of rules."""
    for first, after in pairwise(CUTS):
        piece = weights[first:after]
        if rule.elementwise:
            run(rule, [update[first:after] for update in updates], piece)
            continue
        applier = rule.open(piece)
        for update in updates:
            applier.apply(update[first:after].clone(), None)


def check_same(found: Tensor, expected: Tensor, options: dict[str, Any]) -> None:
    """Bit for bit; but torch's fused kernels round the last elements of a tensor otherwise, so there it depends on the
    cuts.
    """
    if options.get("fused"):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NAMES)
def test_an_optimizer_of_torch_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    weights = start()
    apply_rule(torch_rule(name, **options), pushes(), weights)
    check_same(weights, trained(maker(name, options), pushes(), start()), options)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NAMES)
def test_rule_of_an_optimizer_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    parameter, weights = nn.Parameter(start().view(17, 61)), start()
    (rule,) = rule_of(maker(name, options)([parameter]))
    assert build_rule(repr(rule)) == rule
    apply_rule(build_rule(repr(rule)), pushes(), weights)
    check_same(weights, trained(maker(name, options), pushes(), start()), options)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NAMES)
@pytest.mark.parametrize("spread", [False, True], ids=["as it is", "numbers as rows"])
def test_the_state_of_a_piece_is_restored(name: str, options: dict[str, Any], spread: bool) -> None:
    rule, weights, whole = torch_rule(name, **options), start(), start()
    first, second, once = rule.open(weights), rule.open(weights), rule.open(whole)
    for update in pushes()[:10]:
        first.apply(update.clone())
    state = first.state_dict()
    if spread:
        state = {key: each.expand(NUMEL).contiguous() for key, each in state.items()}
    first.apply(torch.ones(NUMEL))  # what was taken out is a copy
    weights.copy_(start())
    for update in pushes()[:10]:
        once.apply(update.clone())
    weights.copy_(whole)
    second.load_state_dict(state)
    for update in pushes()[10:]:
        once.apply(update.clone())
        second.apply(update.clone())
    assert torch.equal(weights, whole)


def test_the_state_of_another_rule_or_piece_is_refused() -> None:
    adam, sgd = torch_rule("Adam"), torch_rule("SGD", momentum=0.9)
    piece = adam.open(torch.zeros(4))
    piece.apply(torch.ones(4))
    state = piece.state_dict()
    with pytest.raises(IncompatibleError, match="keeps \\['momentum_buffer'\\]"):
        sgd.open(torch.zeros(4)).load_state_dict(state)
    with pytest.raises(IncompatibleError, match="saved of other pieces"):
        adam.open(torch.zeros(5)).load_state_dict(state)
    with pytest.raises(IncompatibleError, match="step of torch"):
        piece.load_state_dict({**state, "step": torch.arange(4.0)})


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_an_empty_state_is_a_fresh_start(name: str) -> None:
    rule, weights, fresh = torch_rule(name, lr=0.1), torch.zeros(4), torch.zeros(4)
    piece = rule.open(weights)
    piece.apply(torch.ones(4))
    piece.load_state_dict({})
    weights.zero_()
    piece.apply(torch.full((4,), 2.0))
    rule.open(fresh).apply(torch.full((4,), 2.0))
    assert torch.equal(weights, fresh)


def test_the_rate_of_a_push_to_a_piece_applies_once() -> None:
    weights = torch.zeros(2)
    piece = torch_rule("SGD", lr=0.5).open(weights)
    piece.apply(torch.ones(2), 0.25)
    assert weights.tolist() == [-0.25, -0.25]
    piece.apply(torch.ones(2))
    assert weights.tolist() == [-0.75, -0.75]


def test_each_push_has_the_scheduled_rate() -> None:
    """Rates that a scheduler gave, sent along, reproduce the optimizer that had them."""
    parameter, weights = nn.Parameter(start()), start()
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    (rule,) = rule_of(optimizer)
    piece = rule.open(weights)
    for update in pushes():
        piece.apply(update.clone(), float(optimizer.param_groups[0]["lr"]))
        parameter.grad = update.clone()
        optimizer.step()
        scheduler.step()
    assert torch.equal(weights, parameter.detach())


def test_each_group_has_its_rule() -> None:
    layer = nn.Linear(3, 2)
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # leaves keys of its own in the groups
    assert rule_of(optimizer) == [torch_rule("SGD", lr=0.25, weight_decay=0.1), Sgd(0.5)]


def test_plain_sgd_takes_any_keys() -> None:
    (rule,) = rule_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert rule == Sgd(0.001)
    assert rule.elementwise


class Mine(torch.optim.SGD):
    """Could do anything."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS.*evaluates the loss itself"),
        (lambda p: torch.optim.Muon(p), "Muon.*orthogonalises"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam.*sparse"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor.*rows and columns"),
        (lambda p: LARS(p, lr=1.0), "LARS.*norms of whole layers"),
        (lambda p: LAMB(p, lr=1.0), "LAMB.*norms of whole layers"),
        (lambda p: Mine(p), "Mine.*only optimizers of torch.optim"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused(
    make: Callable[[list[nn.Parameter]], Optimizer], reason: str
) -> None:
    with pytest.raises(IncompatibleError, match=reason):
        rule_of(make([nn.Parameter(torch.zeros(2, 2))]))


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "SparseAdam", "Adafactor", "LARS"])
def test_other_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{name} cannot run at a server"):
        build_rule(f"torch('{name}')")


@pytest.mark.parametrize("weights", [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(2).double()])
def test_a_piece_is_a_1d_float32_tensor(weights: Tensor) -> None:
    with pytest.raises(IncompatibleError, match="a 1-D float32 tensor"):
        torch_rule("SGD").open(weights)


def test_a_rule_is_elementwise_or_by_pieces() -> None:
    with pytest.raises(AssertionError, match="elementwise: apply"):
        build_rule("sgd").open(torch.zeros(1))
    rule = torch_rule("SGD")
    assert isinstance(rule, TorchRule)
    assert not rule.elementwise
    with pytest.raises(AssertionError, match="open"):
        rule.apply(torch.zeros(1), torch.zeros(1), {}, None)


# HandlerRegistry as rules.


def test_a_registered_handler_is_a_rule() -> None:
    @handler("test_rules_mean", state={"seen": 0.0})
    def mean(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
        state["seen"] += 1
        weights += (values - weights) / state["seen"]

    rule = build_rule("test_rules_mean")
    assert repr(rule) == "handler('test_rules_mean')"
    assert build_rule(repr(rule)) == rule
    weights = torch.zeros(2)
    state = run(rule, [torch.tensor([2.0, 4.0]), torch.tensor([4.0, 0.0])], weights)
    assert weights.tolist() == [3.0, 2.0]
    assert state["seen"].tolist() == [2.0, 2.0]
    with pytest.raises(SpecError, match="too many positional"):
        build_rule("test_rules_mean(3)")


def test_an_unknown_handler_raises_when_it_is_applied() -> None:
    rule = build_rule("handler('test_rules_nobody')")
    with pytest.raises(ProtocolError, match="no handler 'test_rules_nobody'"):
        rule.state(2)
