"""Pipelines with teams train as data parallelism does: strategies, shared, unused and sparse parameters, precisions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.partition import StagePartition
from syncline.world import World
from tests.parallel.models import loss_of

WORDS, WIDTH, STEPS = 7, 4, 3
Weights = dict[str, Tensor]


class Sometimes(nn.Module):
    """A layer that some steps of some replicas leave out, so that its parameters get no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layer(x) if self.used else x
        return found


class Net(nn.Module):
    """An embedding, three layers of which one may be unused, and an output layer that may be the embedding."""

    def __init__(self, tied: bool, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.sometimes = Sometimes()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value = torch.tanh(self.first(self.embed(tokens)))
        output: Tensor = self.head(torch.tanh(self.last(self.sometimes(value))))
        return output


CUTS = {2: ("sometimes",), 3: ("sometimes", "head"), 4: ("first", "sometimes", "head")}
"""By the number of stages: the modules with which stages 1, 2, … begin."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.2),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}


CHANGES_RESULT = ("optimizer", "tied", "unused", "clip_norm", "dtype")
"""The fields of a case on which the result of data parallelism depends."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training with a pipeline, which must equal the same training without one."""

    schedule: str = "1f1b"
    replicas: tuple[int, ...] = (2, 2)
    strategy: str = "allreduce"
    codec: str | None = None
    optimizer: str = "momentum"
    kernel: str | None = None
    """How the optimizer is computed: "fused" or "foreach"."""
    tied: bool = False
    sparse: bool = False
    unused: str = ""
    """Who leaves out the layer `sometimes` in every second step: "all" or "some" of the replicas, or nobody."""
    clip_norm: float | None = None
    scaler: bool = False
    dtype: torch.dtype | None = None
    """The dtype of autocast. None: everything is float64."""

    def reference(self) -> Case:
        """The same training without what must not change its result, so that cases share it."""
        fields = {name: getattr(self, name) for name in CHANGES_RESULT}
        return Case(replicas=self.replicas[:1], **fields)

    def make(self) -> tuple[Net, torch.optim.Optimizer]:
        """The model with its first weights, and its optimizer."""
        torch.manual_seed(3)
        model = Net(self.tied, self.sparse).to(torch.float64 if self.dtype is None else torch.float32)
        options = {} if self.kernel is None else {self.kernel: True}
        return model, OPTIMIZERS[self.optimizer](model.parameters(), **options)

    def batch(self, model: Net, step: int, replica: int) -> tuple[Tensor, Tensor]:
        """The data of a replica, and whether it uses all layers."""
        model.sometimes.used = step % 2 == 0 or not (self.unused == "all" or (self.unused == "some" and replica == 0))
        generator = torch.Generator().manual_seed(100 * step + replica)
        x, y = torch.randint(WORDS, (2, 6), generator=generator)
        return x, y

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        return contextlib.nullcontext() if self.dtype is None else torch.autocast("cpu", self.dtype)


def train_in_pipeline(world: World, case: Case) -> Weights:
    """The weights of a training in stages."""
    model, optimizer = case.make()
    chunks = 2 if case.schedule in ("interleaved", "zbv") else 1
    cuts = CUTS[chunks * len(case.replicas)]
    run = sl.pipeline(
        model,
        optimizer,
        loss_of,
        stages=cuts if chunks > 1 else StagePartition(cuts, case.replicas),
        schedule=case.schedule,
        microbatches=2,
        strategy=case.strategy,
        codec=case.codec,
        clip_norm=case.clip_norm,
        find_unused_parameters=case.unused == "some",
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0) if case.scaler else None,
    )
    with run:
        for step in range(STEPS):
            batch = case.batch(model, step, world.rank % case.replicas[0])
            with case.autocast():
                run.step(*batch)
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def train_replicas(world: World, case: Case) -> Weights:
    """The weights of data parallelism."""
    model, optimizer = case.make()
    with sl.distribute(model, optimizer, find_unused_parameters=case.unused == "some") as run:
        for step in range(STEPS):
            x, y = case.batch(model, step, world.rank)
            optimizer.zero_grad()
            with case.autocast():
                loss = loss_of(model(x), y)
            torch.autograd.backward(loss)
            if case.clip_norm is not None:
                run.clip_grad_norm_(case.clip_norm)
            optimizer.step()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@cache
def expected(case: Case) -> Weights:
    """The weights without a pipeline."""
    found: Weights = sl.simulate(lambda world: train_replicas(world, case), case.replicas[0]).results[0]
    return found


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
CASES: Sequence[Case] = (
    *(Case(schedule=name, strategy=each) for name in SCHEDULES for each in ("allreduce", "local(period=1)")),
    Case(replicas=(3, 1, 1), tied=True),
    Case(replicas=(1, 3, 1), tied=True, schedule="gpipe", clip_norm=0.1),
    *(Case(unused=who, codec=codec) for who in ("all", "some") for codec in (None, "topk(1.0)")),
    Case(sparse=True, optimizer="sgd", clip_norm=0.1),
    Case(sparse=True, optimizer="sgd", clip_norm=0.1, replicas=(3, 1), schedule="gpipe"),
    *(
        Case(optimizer="adamw", kernel=kind, scaler=True, clip_norm=0.1, schedule=name)
        for kind, name in (("fused", "1f1b"), ("foreach", "zero_bubble"))
    ),
    Case(dtype=torch.float16, scaler=True),
    Case(dtype=torch.bfloat16, schedule="zero_bubble"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_teams_train_as_data_parallelism_does(case: Case) -> None:
    tolerance = 1e-6 if case.dtype is None else 2e-3
    start, wanted = dict(case.make()[0].named_parameters()), expected(case.reference())
    assert max(float((wanted[name] - start[name].detach()).abs().max()) for name in wanted) > 10 * tolerance
    for found in sl.simulate(lambda world: train_in_pipeline(world, case), sum(case.replicas)).results:
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=f"{name} of {case}")


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused() -> None:
    def attempt(world: World) -> None:
        model = Net(tied=False, sparse=False)
        with pytest.raises(IncompatibleError, match="LBFGS calls the loss function several times"):
            sl.pipeline(model, torch.optim.LBFGS(model.parameters()), loss_of, stages=["last"])

    assert not sl.simulate(attempt, 2).messages
