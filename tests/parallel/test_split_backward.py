"""The private functions of torch that divide a backward pass: the ones that we call, and what they must compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.stage_runner import MAX_CLONED_ELEMENTS, check_split_backward
from syncline.world import World

WHO = f"torch {torch.__version__} divides a backward pass in another way: see StageRunner._backward_inputs"


class SharedLayer(nn.Module):
    """A weight that is used twice, a skip connection, and two inputs of which one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3, dtype=torch.float64)
        self.last = nn.Linear(3, 2, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        output: Tensor = self.last(hidden * scale + x)
        return output


def test_both_halves_equal_the_whole_backward() -> None:
    """The gradients of inputs come first; those of weights are added to `.grad`, once for each use of a weight."""
    torch.manual_seed(0)
    model = SharedLayer()
    x, scale = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    seed = torch.randn(4, 2, dtype=torch.float64)
    expected = torch.autograd.grad(model(x, scale), [x, *model.parameters()], seed)
    for times in (1, 2):
        gradients, groups = _backward.stage_backward_input([model(x, scale)], [seed], [x, scale], model.parameters())
        torch.testing.assert_close(gradients[0], expected[0], msg=WHO)
        assert gradients[1] is None, WHO
        assert all(each.grad is None for each in model.parameters()) or times == 2, WHO
        _backward.stage_backward_weight(model.parameters(), groups)
        x.grad = None
        for parameter, gradient in zip(model.parameters(), expected[1:], strict=True):
            torch.testing.assert_close(parameter.grad, times * gradient, msg=WHO)


def test_another_version_of_torch_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    check_split_backward()

    def attempt(world: World) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(IncompatibleError) as caught:
            sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=["1"], schedule="zero_bubble")
        return str(caught.value)

    monkeypatch.setattr(_backward, "stage_backward_weight", lambda weights, groups: None)
    changed = sl.simulate(attempt, 2)
    monkeypatch.delattr(_backward, "stage_backward_input")
    missing = sl.simulate(attempt, 2)
    for words, found in (("stage_backward_weight(weights, groups)", changed), ("stage_backward_input", missing)):
        assert not found.messages
        assert all(words in message and "take 1f1b" in message for message in found.results)


def test_a_stage_may_return_a_large_view() -> None:
    """torch detaches the outputs of a stage in place, which is refused for views."""

    def train(schedule: str) -> tuple[float, ...]:
        def work(world: World) -> float:
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(4, 8), nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 3)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_fn = nn.functional.cross_entropy
            run = sl.pipeline(model, optimizer, loss_fn, stages=["1", "3"], schedule=schedule, microbatches=2)
            rows = MAX_CLONED_ELEMENTS // 2
            x, y = torch.randn(rows, 4), torch.randint(0, 3, (rows,))
            return [run.step(x, y).item() for _ in range(2)][-1]

        return tuple(sl.simulate(work, 3).results)

    assert train("zero_bubble") == train("gpipe")
