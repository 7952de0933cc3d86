"""LARS and LAMB against steps worked out by hand and by a plain loop, parameter for parameter."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from syncline.errors import SpecError, UnsupportedError
from syncline.optim import LAMB, LARS, warmup

SHAPES = [(3, 4), (4,), (), (2, 3, 2), (5, 1)]
STEPS = 6


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in SHAPES]


def feed(tensors: list[Tensor], step: int) -> list[Tensor]:
    """Give each parameter a gradient that depends on the step alone."""
    draw = torch.Generator().manual_seed(100 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.dtype)
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def test_lars_by_hand() -> None:
    """‖w‖ = 5, ‖g‖ = 1, decay 0.2: local = 0.1 · 5 / (1 + 0.2 · 5) = 0.25."""
    w = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    optimizer = LARS([w], lr=2.0, momentum=0.5, weight_decay=0.2, trust=0.1)
    w.grad = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    optimizer.step()
    # v = 0.25 · (0.6 + 0.2·3, 0.8 + 0.2·4) = (0.3, 0.4); w = (3, 4) − 2·v = (2.4, 3.2)
    torch.testing.assert_close(w.data, torch.tensor([[2.4, 3.2]], dtype=torch.float64))
    torch.testing.assert_close(optimizer.state[w]["momentum_buffer"], torch.tensor([[0.3, 0.4]], dtype=torch.float64))
    w.grad = torch.tensor([[1.2, 1.6]], dtype=torch.float64)
    optimizer.step()
    # ‖w‖ = 4, ‖g‖ = 2: local = 0.1 · 4 / 2.8 = 1/7; v = (0.15, 0.2) + (1.2 + 0.48, 1.6 + 0.64) / 7 = (0.39, 0.52)
    torch.testing.assert_close(w.data, torch.tensor([[2.4 - 0.78, 3.2 - 1.04]], dtype=torch.float64))


def test_lamb_by_hand() -> None:
    """Adam's first move is the sign of the gradient; with ‖w‖ = 5 and ‖r‖ = √2 it is stretched by 5 / √2."""
    w = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    optimizer = LAMB([w], lr=0.1, eps=1e-30)
    w.grad = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    optimizer.step()
    moved = 0.1 * 5 / math.sqrt(2)
    torch.testing.assert_close(w.data, torch.tensor([[3.0 - moved, 4.0 + moved]], dtype=torch.float64))
    assert float(optimizer.state[w]["step"]) == 1


def plain_lars(w: Tensor, v: Tensor, g: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    adapted = o["exclude"] == "none" or (o["exclude"] == "vectors" and w.ndim > 1)
    if adapted:
        local = o["trust"] * w.norm() / (g.norm() + o["weight_decay"] * w.norm())
        g = local * (g + o["weight_decay"] * w)
    v = o["momentum"] * v + g
    return w - o["lr"] * (g + o["momentum"] * v if o["nesterov"] else v), v


@pytest.mark.parametrize("exclude", ["vectors", "none", "all"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_over_several_steps(nesterov: bool, exclude: str) -> None:
    """Matrices adapted, vectors and scalars as told, a rate that changes on the way."""
    ours = parameters()
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "trust": 0.05, "nesterov": nesterov}
    optimizer = LARS(ours, lr=1.0, exclude=exclude, **options)
    theirs = [(w.detach().clone(), torch.zeros_like(w)) for w in ours]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate = 1 / (1 + step)
        gradients = feed(ours, step)
        optimizer.step()
        options |= {"lr": rate, "exclude": exclude}
        theirs = [plain_lars(w, v, g, options) for (w, v), g in zip(theirs, gradients, strict=True)]
    for mine, (w, v) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.data, w)
        torch.testing.assert_close(optimizer.state[mine]["momentum_buffer"], v)


def plain_lamb(w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: int, exclude: str) -> tuple[Tensor, Tensor, Tensor]:
    m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
    r = m / (1 - 0.8**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-6)
    if exclude == "none" or (exclude == "vectors" and w.ndim > 1):
        r = r + 0.01 * w
        r = r * w.norm() / r.norm()
    return w - 0.02 * r, m, v


@pytest.mark.parametrize("exclude", ["vectors", "none", "all"])
def test_lamb_over_several_steps(exclude: str) -> None:
    ours = parameters()
    optimizer = LAMB(ours, lr=0.02, betas=(0.8, 0.95), weight_decay=0.01, exclude=exclude)
    theirs = [(w.detach().clone(), torch.zeros_like(w), torch.zeros_like(w)) for w in ours]
    for step in range(STEPS):
        gradients = feed(ours, step)
        optimizer.step()
        theirs = [plain_lamb(*each, g, step + 1, exclude) for each, g in zip(theirs, gradients, strict=True)]
    for mine, (w, m, v) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.data, w)
        torch.testing.assert_close(optimizer.state[mine]["exp_avg"], m)
        torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"], v)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda p: LARS(p, lr=0.1, momentum=0.9, exclude="all"), lambda p: SGD(p, lr=0.1, momentum=0.9)),
        (
            lambda p: LARS(p, lr=0.1, momentum=0.9, nesterov=True, exclude="all"),
            lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (lambda p: LARS(p, lr=0.1, momentum=0, exclude="all"), lambda p: SGD(p, lr=0.1)),
        (lambda p: LAMB(p, lr=0.1, eps=1e-8, exclude="all"), lambda p: Adam(p, lr=0.1)),
    ],
)
def test_what_is_excluded_takes_torchs_step(
    ours: Callable[[list[Tensor]], Optimizer], torchs: Callable[[list[Tensor]], Optimizer]
) -> None:
    """Every parameter excluded: SGD and Adam as torch has them."""
    mine, theirs = parameters(), parameters()
    optimizers = ours(mine), torchs(theirs)
    for step in range(STEPS):
        for tensors, optimizer in zip((mine, theirs), optimizers, strict=True):
            feed(tensors, step)
            optimizer.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.data, other.data)


@pytest.mark.parametrize("make", [lambda p: LARS(p, lr=1.0, momentum=0.0, weight_decay=0.5), lambda p: LAMB(p, lr=1.0)])
def test_weights_of_zero_can_leave_it(make: Callable[[list[Tensor]], Optimizer]) -> None:
    """A layer that begins at zero has no norm to scale by: the ratio is 1."""
    w = torch.zeros(2, 2, requires_grad=True)
    w.grad = torch.ones(2, 2)
    make([w]).step()
    torch.testing.assert_close(w.data, -torch.ones(2, 2))


def test_lars_with_a_gradient_of_zero() -> None:
    """The ratio is 1 and the decay alone acts."""
    w = torch.full((2, 2), 4.0, requires_grad=True)
    w.grad = torch.zeros(2, 2)
    LARS([w], lr=1.0, weight_decay=0.5).step()
    assert w.data.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_lamb_with_a_gradient_of_zero() -> None:
    w = torch.full((2, 2), 4.0, requires_grad=True)
    w.grad = torch.zeros(2, 2)
    LAMB([w], lr=1.0).step()
    assert w.data.tolist() == [[4.0, 4.0], [4.0, 4.0]]


BOTH = pytest.mark.parametrize("make", [LARS, LAMB])
Made = Callable[..., Optimizer]


@BOTH
def test_groups_have_options_of_their_own(make: Made) -> None:
    """The embedding in a group of its own is excluded, and its rate is its own."""
    first, second = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    first.grad, second.grad = torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)
    optimizer = make([{"params": [first]}, {"params": [second], "exclude": "all", "lr": 0.5}], lr=0.0)
    optimizer.step()
    assert first.data.tolist() == [[1, 1], [1, 1]], "the rate of its group is 0"
    expected = 1 - 0.5 * (0.5 if make is LARS else 1.0)
    torch.testing.assert_close(second.data, torch.full((2, 2), expected), atol=1e-5, rtol=0)


@BOTH
def test_parameters_without_a_gradient_stay(make: Made) -> None:
    used, unused = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    optimizer = make([used, unused], lr=0.1)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert used.data[0, 0] != 1
    assert unused.data.tolist() == [[1, 1], [1, 1]]
    assert unused not in optimizer.state


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_side_by_side(make: Made, dtype: torch.dtype) -> None:
    """Half precision beside single: norms are taken in float32, which a large layer of float16 needs."""
    narrow = torch.full((400, 400), 200.0, dtype=dtype, requires_grad=True)  # ‖w‖ = 80,000 overflows float16
    wide = torch.full((400, 400), 200.0, requires_grad=True)
    scalar = torch.ones((), dtype=dtype, requires_grad=True)
    narrow.grad, wide.grad, scalar.grad = torch.ones_like(narrow), torch.ones_like(wide), torch.ones_like(scalar)
    make([narrow, wide, scalar], lr=0.5).step()
    assert (narrow.dtype, wide.dtype, scalar.dtype) == (dtype, torch.float32, dtype)
    torch.testing.assert_close(narrow.data.float(), wide.data, rtol=0.01, atol=0)
    assert not torch.equal(wide.data, torch.full_like(wide, 200.0))


@BOTH
def test_the_gradient_is_left_alone(make: Made) -> None:
    """`p.grad` may be a view of a bucket that others read."""
    for shape in [(2, 2), (3,)]:
        w = torch.ones(shape, requires_grad=True)
        gradient = w.grad = torch.full(shape, 0.25)
        optimizer = make([w], lr=0.1, weight_decay=0.1)
        optimizer.step()
        optimizer.step()
        assert w.grad is gradient
        assert torch.equal(gradient, torch.full(shape, 0.25))


@BOTH
def test_a_closure_is_called_with_gradients_on(make: Made) -> None:
    w = torch.ones(2, 2, requires_grad=True)
    optimizer = make([w], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (w * w).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert closure() < 4.0


@BOTH
def test_a_sparse_gradient_is_refused(make: Made) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = make(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match=rf"{make.__name__} needs dense.*parameter 0.*\(10, 3\).*sparse=False"):
        optimizer.step()


@BOTH
def test_a_resumed_run_is_the_same_to_the_bit(make: Made) -> None:
    """The state passes through a file that holds no code, and the options through JSON."""
    whole, cut = parameters(), parameters()
    first, second = make(whole, lr=0.1, weight_decay=0.01), make(cut, lr=0.1, weight_decay=0.01)
    for step in range(STEPS):
        feed(whole, step)
        first.step()
        if step == 3:
            file = io.BytesIO()
            torch.save(second.state_dict(), file)
            file.seek(0)
            second = make(cut, lr=0.7)
            second.load_state_dict(torch.load(file, weights_only=True))
        feed(cut, step)
        second.step()
    assert json.loads(json.dumps(second.state_dict()["param_groups"]))[0]["weight_decay"] == 0.01
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.data, other.data)


@BOTH
def test_it_learns_under_a_schedule(make: Made) -> None:
    """With a warm-up, on a problem with a known optimum."""
    torch.manual_seed(0)
    x, goal = torch.randn(64, 4), torch.randn(4, 2)
    model = nn.Linear(4, 2, bias=False)
    optimizer = make(model.parameters(), lr=0.02, **({"trust": 1.0} if make is LARS else {}))
    scheduler = warmup(optimizer, 10, 0.1)
    before = after = float("nan")
    for step in range(200):
        optimizer.zero_grad()
        loss = ((model(x) - x @ goal) ** 2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        before, after = (loss.item() if step == 0 else before), loss.item()
    assert after < 0.05 * before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: LARS(p, lr=-1.0), "lr must be a finite number, 0 or more, not -1.0"),
        (lambda p: LARS(p, lr=math.nan), "lr must be a finite number, 0 or more, not nan"),
        (lambda p: LARS(p, lr=1.0, momentum=1.0), "momentum must lie between 0 and 1 and be less than 1, not 1.0"),
        (lambda p: LARS(p, lr=1.0, weight_decay=-1e-4), "weight_decay must be a finite number, 0 or more, not -0.0001"),
        (lambda p: LARS(p, lr=1.0, trust=0.0), "trust must be a finite number above 0, not 0.0"),
        (lambda p: LARS(p, lr=1.0, momentum=0.0, nesterov=True), "momentum is 0: give momentum=0.9"),
        (lambda p: LARS(p, lr=1.0, exclude="vector"), "unknown exclude 'vector'; did you mean 'vectors'"),
        (lambda p: LARS([{"params": p, "trust": -1}], lr=1.0), "trust must be a finite number above 0, not -1"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "each of betas must lie between 0 and 1 and be less than 1, not 1.0"),
        (
            lambda p: LAMB(p, betas=0.9),  # type: ignore[arg-type]
            "betas must be two numbers, such as .*, not 0.9",
        ),
        (lambda p: LAMB(p, eps=0.0), "eps must be a finite number above 0, not 0.0"),
        (lambda p: LAMB(p, exclude="biases"), "unknown exclude 'biases'; available: 'all', 'none', 'vectors'"),
    ],
)
def test_refused(make: Callable[[Any], Optimizer], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make(parameters())
