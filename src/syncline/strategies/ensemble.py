"""Workers that do not communicate in training; at the end their weights, or their predictions, are averaged.

`average`: one model, w = (1/p) Σ w_i, computed when it is needed. `ensemble`: p models, and the mean of their
predictions, P(y|x) = (1/p) Σ softmax(f(x; w_i))::

    worker 0   w0 ─ step ─ step ─ step ─ … ─┐
    worker 1   w1 ─ step ─ step ─ step ─ … ─┼─ at the end: the mean of weights, or of predictions
    worker 2   w2 ─ step ─ step ─ step ─ … ─┘

Model averaging once: Zinkevich et al., Parallelized stochastic gradient descent (2010); ensembles: Lakshminarayanan et
al., Simple and scalable predictive uncertainty estimation using deep ensembles (2017).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import plain_name
from syncline.strategies.base import FlatLayout, Preset, Strategy, StrategyRun, all_tensors, check_counts
from syncline.strategies.local_weights import LocalWeightsRun
from syncline.world import RepeatedCall, allgather, barrier
from syncline.world.hooks import ModuleHook

__all__ = ["Average", "Ensemble", "mean_prediction"]

logger = logging.getLogger("syncline")

MEANS = ("probabilities", "outputs")


@dataclass(frozen=True, repr=False)
class Average(Strategy):
    """Every worker trains alone. *The* model is the mean of their weights, computed when it is needed.

    >>> Average()
    average
    """

    name: ClassVar[str] = "average"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="average"),)

    def run_type(self) -> type[StrategyRun]:
        return _AloneRun


@dataclass(frozen=True, repr=False)
class Ensemble(Strategy):
    """Every worker trains its own model. Inside `agreed()` the model returns the mean prediction of all workers.

    With `mean="probabilities"` the model's outputs are logits in their last dimension, and the logarithm of the mean
    is returned; with "outputs" they are averaged directly. With `seed` every worker except the first begins with
    its own random weights, drawn by the modules' `reset_parameters()`.

    >>> Ensemble(seed=1)
    ensemble(seed=1)
    """

    mean: Literal["probabilities", "outputs"] = "probabilities"
    seed: int | None = None

    name: ClassVar[str] = "ensemble"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="ensemble(seed=0)"),)

    def __post_init__(self) -> None:
        if self.mean not in MEANS:
            raise SpecError(f"ensemble(mean={self.mean!r}): one of {', '.join(MEANS)}")
        if self.seed is not None:
            check_counts(self, seed=0)

    def run_type(self) -> type[StrategyRun]:
        return _EnsembleRun


def mean_prediction(outputs: Sequence[Tensor], mean: str = "probabilities") -> Tensor:
    """The mean prediction of several models, in the form of one model's output.

    >>> sure, unsure = torch.tensor([[0.0, 100.0]]), torch.tensor([[0.0, 0.0]])
    >>> mean_prediction([sure, unsure]).exp()
    tensor([[0.2500, 0.7500]])
    """
    if mean == "outputs":
        return torch.stack(list(outputs)).mean(dim=0)
    if outputs[0].dim() == 0 or outputs[0].shape[-1] == 1:
        raise IncompatibleError(
            f"the model gives one value per sample (output of shape {tuple(outputs[0].shape)}), so there are no class "
            "probabilities to average: write ensemble(mean='outputs')"
        )
    rows = torch.stack([output.log_softmax(dim=-1) for output in outputs])
    return rows.logsumexp(dim=0) - math.log(len(outputs))


class _AloneRun(LocalWeightsRun):
    """A run without communication in training. The model of all workers is the mean of their weights."""

    needs_every_step = False
    first_exchange = None

    def setup(self) -> None:
        super().setup()
        codec = self.communicator.codec
        if codec is not None:
            raise IncompatibleError(
                f"{self.strategy!r} sends nothing while it trains that {codec!r} could make smaller: leave the codec "
                "out, or take local(period=…)"
            )

    @property
    def elastic_refusal(self) -> str:
        """Lost workers are left out of the mean. No worker joins: it would begin as a copy of another."""
        elastic = self.world.elastic
        if elastic is None or not elastic.joining:
            return ""
        return (
            f"{self.strategy!r} survives the loss of a worker, but no worker can join: the others do not communicate "
            "while they train; leave --restart out"
        )

    @property
    def counted_steps(self) -> int:
        """The steps: the work of a lost worker is lost with its model, and its samples are not distributed again."""
        return self.progress

    def between_steps(self, missed: int = 0) -> bool:
        """A worker that leaves does so after its own step: no reduction would tell the others before."""
        elastic = self.world.elastic
        if elastic is not None and elastic.leave_reason:
            self.warn_of_no_checkpoint()
            elastic.leave(self.world, elastic.leave_reason)
        return super().between_steps(missed)

    def after_step(self) -> None:
        """No communication."""

    def sync(self, active: bool = True) -> int:
        return 0


class _EnsembleRun(_AloneRun):
    strategy: Ensemble
    needs_same_parameters = False
    """False: each member continues with all of its weights."""

    def setup(self) -> None:
        super().setup()
        if self.strategy.seed is not None and self.communicator.size > 1:
            _draw_weights(self.strategy, self.model, self.communicator.rank)
        self._evaluating = False
        """Whether the members are being evaluated: they are the model itself, with other weights."""
        self._others: list[dict[str, Tensor]] = []
        """The other workers' members, inside `agreed()`."""

    @property
    def members(self) -> int:
        return 1 + len(self._others) if self.inside_agreed else self.communicator.size

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, the model holds the first worker's weights, and its forward evaluates every member.

        Every worker enters it and receives all of them: p models in memory.
        """
        if self.inside_agreed or self.communicator.size == 1:
            yield
            return
        with super().agreed():
            hook = self.model.register_forward_hook(ModuleHook(self._predict), with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()
                self._others = []

    def shown_tensors(self) -> dict[str, Tensor]:
        """All tensors of a member, including frozen ones."""
        return all_tensors(self.model)

    def show_agreed(self) -> None:
        tensors = {name: each.detach() for name, each in (*self.model.named_parameters(), *self.model.named_buffers())}
        first, *self._others = self._gather_members(tensors)
        self._note_spread([first, *self._others])
        for name, tensor in tensors.items():
            tensor.copy_(first[name])

    def finish(self) -> None:
        """Every worker keeps its own member: there is no single model."""

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Members continue; those without a worker are dropped."""
        if not self.same_size and self.communicator.rank == 0:
            logger.warning(
                "the checkpoint is of another number of workers than these %d: members without a worker are left out, "
                "and workers without a member begin with a copy of the first",
                self.communicator.size,
            )
        self.same_size = True
        super().load_local_states(states)

    def _gather_members(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of every worker. In an elastic job all of them are of the same workers."""
        elastic, group = self.world.elastic, self.communicator.group
        if elastic is None:
            return self._gathered(tensors)

        def attempt() -> list[dict[str, Tensor]]:
            found = self._gathered(tensors)
            barrier(group)  # no worker has all members before all have
            return found

        return elastic.run(self.world, RepeatedCall(attempt))

    def _gathered(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of every worker, with one all-gather for each dtype."""
        own = list(tensors.values())
        layout = FlatLayout(own)
        gathered = [allgather(row.view(1, -1), group=self.communicator.group) for row in layout.flatten(own)]
        members = []
        for rank in range(self.communicator.size):
            views = layout.views([rows[rank] for rows in gathered])
            copies = [view.to(tensor.device, copy=True) for view, tensor in zip(views, own, strict=True)]
            members.append(dict(zip(tensors, copies, strict=True)))
        return members

    def _note_spread(self, members: Sequence[Mapping[str, Tensor]]) -> None:
        spread = 0.0
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                rows = torch.stack([member[name] for member in members]).double()
                spread += float((rows - rows.mean(dim=0)).square().sum()) / len(members)
        self.stats.consensus = math.sqrt(spread)

    def _predict(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The mean prediction of all members. `output` is that of the first."""
        if self._evaluating:
            return None
        if not isinstance(output, Tensor):
            raise IncompatibleError(
                f"{self.strategy!r} averages predictions, and the model gives a {type(output).__name__}, not a "
                "tensor: take average, or local"
            )
        self._evaluating = True
        try:
            others = [functional_call(module, member, args, kwargs) for member in self._others]
        finally:
            self._evaluating = False
        return mean_prediction([output, *others], self.strategy.mean)


def _draw_weights(strategy: Ensemble, model: nn.Module, rank: int) -> None:
    """Draw this worker's initial weights. The first worker keeps the given ones."""
    fresh = [(module, reset) for module in model.modules() if (reset := _reset_of(module)) is not None]
    covered = {id(parameter) for module, _ in fresh for parameter in module.parameters(recurse=False)}
    alike = [plain_name(name) for name, parameter in model.named_parameters() if id(parameter) not in covered]
    if not covered:
        raise IncompatibleError(
            f"{strategy!r}: no module of the model ({type(model).__name__}) has reset_parameters() to draw new weights "
            "with; leave the seed out, and all begin with the same"
        )
    if alike and rank == 0:
        shown = ", ".join(alike[:5]) + (f" and {len(alike) - 5} more" if len(alike) > 5 else "")
        logger.warning(
            "%r draws new weights by reset_parameters(), and the modules of %s have none: these begin alike on every "
            "worker",
            strategy,
            shown,
        )
    if rank == 0:
        return
    devices = sorted({each.device.index for each in model.parameters() if each.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(random.Random(f"{strategy.seed}/{rank}").getrandbits(32))
        for _, reset in fresh:
            reset()


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """The method that initialises a module's own weights. That of attention is private."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None
