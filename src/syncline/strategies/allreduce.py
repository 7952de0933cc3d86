"""Synchronous data parallelism: all workers take the same step, with the mean of their gradients.

w ← w − η · (1/p) Σ g_i(w). With `delay=d` a step applies the mean of d steps ago, so that a reduction may take a whole
step and more::

    step          0     1     2     3    …          delay=1, warmup=2
    gradient      g0    g1    g2    g3
    applied       g0    g1    –     g2              the first d delayed steps apply nothing

Pipelined all-reduce: Cray's Machine Learning Plugin (Balma et al. 2018), CaffeGPI's overlay (Kuehn et al. 2017).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import ReductionPass, ReductionPolicy, plain_name
from syncline.strategies.base import Preset, RunReducer, Strategy, StrategyRun, check_counts

__all__ = ["AllReduce"]

logger = logging.getLogger("syncline")

AMP_SCALING = "_step_supports_amp_scaling"
"""The attribute of optimizers that unscale gradients in step(): a GradScaler always calls it, and sets `found_inf`."""
FOUND_INF = "found_inf"
"""The attribute that a GradScaler sets on such an optimizer."""


@dataclass(frozen=True, repr=False)
class AllReduce(Strategy):
    """Synchronous data parallelism, or stale by exactly `delay` steps.

    The first `warmup` and the last `cooldown` steps are synchronous. `cooldown` needs the number of steps, by `steps`
    or `run.expect()`. Gradients in flight when the cool-down begins are dropped.

    >>> AllReduce(delay=1, warmup=100)
    allreduce(delay=1, warmup=100)
    """

    delay: int = 0
    warmup: int = 0
    cooldown: int = 0
    steps: int | None = None

    name: ClassVar[str] = "allreduce"
    several_optimizers: ClassVar[bool] = True
    reduces_gradients: ClassVar[bool] = True
    # Staleness acts as momentum (Mitliagkas et al. 2016), so the optimizer's own must be smaller.
    presets: ClassVar[tuple[Preset, ...]] = (
        Preset(spec="allreduce"),
        Preset(spec="allreduce(delay=1)", momentum=0.7),
    )

    def __post_init__(self) -> None:
        check_counts(self, delay=0, warmup=0, cooldown=0)
        if self.steps is not None:
            check_counts(self, steps=1)
        if self.delay == 0 and (self.warmup or self.cooldown):
            raise SpecError(f"{self!r}: without a delay every step is synchronous; leave warmup and cooldown out")

    @property
    def state_format(self) -> str:
        """With a delay the state has the gradients in flight."""
        return f"allreduce(delay={self.delay})" if self.delay else "allreduce"

    def run_type(self) -> type[StrategyRun]:
        return AllReduceRun

    def is_stale(self, step: int, total: int | None = None) -> bool:
        """Whether a step, counted from 0, applies earlier gradients. `total`: the number of steps, for a cool-down.

        >>> [AllReduce(delay=1, warmup=2, cooldown=1, steps=5).is_stale(step) for step in range(5)]
        [False, False, True, True, False]
        """
        if self.delay == 0 or step < self.warmup:
            return False
        if not self.cooldown:
            return True
        total = self.steps if total is None else total
        if total is None:
            raise IncompatibleError(
                f"{self!r}: cooldown needs to know the number of steps; give steps= or call run.expect()"
            )
        return step < total - self.cooldown


class _StepGradients(Protocol):
    """The reduced gradients of a step, which may still be in flight."""

    def install(self) -> None: ...


class AllReduceRun(StrategyRun):
    """The run of `AllReduce`: averages the gradients of every backward pass."""

    strategy: AllReduce
    needs_same_parameters = False
    """False: the codec's residuals and gradients in flight are saved by parameter name."""

    def setup(self) -> None:
        super().setup()
        model, communicator, settings = self.model, self.communicator, self.settings
        self._delay = self.strategy.delay
        self.total_steps = self.strategy.steps
        self._rounds = 0
        self._in_flight: deque[_StepGradients] = deque()
        # Frozen parameters may be trained later.
        self.synchronised = {id(parameter) for parameter in model.parameters()}
        codec = communicator.codec
        self._gradients = RunReducer(
            dict(model.named_parameters()),
            communicator,
            settings,
            ReductionPolicy(after_backward=self._after_backward),
            codec=codec,
            attach_hooks=communicator.size > 1
            or communicator.world.elastic is not None
            or self._delay > 0
            or settings.check_finite
            or codec is not None,
            find_unused_parameters=settings.find_unused_parameters,
            sparse=_sparse_names(model),
        )
        self._arrivals: set[int] = set()
        """Every number of gradients that a pass has had."""
        self._stepped_at = 0
        """`_rounds` at the latest step."""
        self.hooks += [
            *(each.register_step_pre_hook(self._check_step) for each in self.optimizers),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._marked = [each for each in self.optimizers if self._delay and not hasattr(each, AMP_SCALING)]
        for each in self._marked:
            setattr(each, AMP_SCALING, True)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.paused()

    def predict(self) -> dict[str, float] | None:
        return self._gradients.predict()

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        self._gradients.weight = weight
        self._gradients.uneven = uneven

    def reduce_gradients(self) -> None:
        if self._gradients.attached:
            self._after_backward(self._gradients.reduce_now())

    def join_idle(self) -> bool:
        reduction = self._gradients.join_idle()
        anybody = reduction.complete().active > 0
        if anybody:
            self._finish(reduction)
        else:
            self._gradients.release(reduction)
        return anybody

    @property
    def elastic_refusal(self) -> str:
        return "" if not self._delay else f"{self.strategy!r} has gradients in flight: leave the delay or --elastic out"

    @property
    def counted_steps(self) -> int:
        return self._gradients.completed

    def use_team(self) -> None:
        self._gradients.rebind()

    def detach(self) -> None:
        super().detach()
        self._gradients.close()
        for each in self._marked:
            delattr(each, AMP_SCALING)
        self._marked = []

    def restart(self) -> None:
        self._rounds, self._in_flight = 0, deque()
        if self._gradients.codec_state is not None:
            self._gradients.codec_state.load_shared_state({})
            self._gradients.codec_state.load([])

    def shared_state(self) -> dict[str, Any]:
        """Waits for gradients in flight. A resumed run applies them as this one would."""
        self._gradients.check_deferred()
        if self._gradients.accumulating:
            logger.warning(
                "gradients that were accumulated under no_sync() are not part of the state: save after a step"
            )
        in_flight = [self._named(reduction) for reduction in self._in_flight]
        return {"rounds": self._rounds, "waiting": in_flight, **self._gradients.shared_state()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._rounds = int(state.get("rounds", 0))
        if len(state.get("waiting", [])) > self._delay:
            raise IncompatibleError(
                f"the checkpoint holds {len(state['waiting'])} steps of gradients in flight, and {self.strategy!r} "
                f"keeps {self._delay}: resume with the strategy that was saved"
            )
        self._gradients.load_shared_state(state)
        parameters = {plain_name(name): parameter for name, parameter in self.model.named_parameters()}
        self._in_flight = deque(_Restored(parameters, gradients) for gradients in state.get("waiting", []))

    def local_state(self) -> dict[str, Any]:
        return self._gradients.local_state()

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._gradients.load_local_states(states)
        if self._gradients.codec_state is None and any(state.get("residuals") for state in states):
            logger.warning("the checkpoint was made with a codec, and there is none now: its residuals are dropped")

    # Steps.

    def _after_backward(self, reduction: ReductionPass) -> None:
        if self.uneven.rates is not None:
            self.uneven.note_rates()
        self._finish(reduction)
        self.reductions += 1  # note_reduction() in line: this runs in every step
        if len(reduction.arrivals) not in self._arrivals and self.communicator.size > 1:
            self._arrivals.add(len(reduction.arrivals))
            self._check_parameters()

    def _finish(self, reduction: ReductionPass) -> None:
        """Backward has ended: choose the gradients that the step applies."""
        stale = self.stale()
        self._rounds += 1
        if not stale:
            while self._in_flight:  # the cool-down begins: drop gradients in flight
                late = self._in_flight.popleft()
                if isinstance(late, ReductionPass):
                    late.complete()
                    self._gradients.release(late)
            reduction.complete()
            self.stats.staleness = 0
            self._gradients.release(reduction)
            return
        self._in_flight.append(reduction)
        if len(self._in_flight) <= self._delay:
            for parameter in self._gradients.parameters:
                parameter.grad = None
            return
        oldest = self._in_flight.popleft()
        oldest.install()
        self.stats.staleness = self._delay
        if isinstance(oldest, ReductionPass):
            self._gradients.release(oldest)

    def stale(self) -> bool:
        """Whether the step whose gradients have just been computed applies earlier ones."""
        return self.strategy.is_stale(self._rounds, self.total_steps)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Average a closure's loss over the workers, because line searches depend on it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the optimizer comes first
        if closure is None:
            return None
        if self._delay:
            raise IncompatibleError(f"{self.strategy!r} cannot be used with step(closure): its gradients come later")
        if self._gradients.uneven:
            raise IncompatibleError(
                "step(closure) needs data for every worker in every step: give the loader drop_last=True, or a length "
                "that the workers divide"
            )
        if self.communicator.size == 1:
            return None

        def mean_closure() -> Any:
            loss = closure()
            if loss is None:
                return None
            if not isinstance(loss, Tensor):
                return self.communicator.mean(float(loss))
            return torch.full_like(loss.detach(), self.communicator.mean(float(loss.detach())))

        return (args[0], mean_closure), {key: value for key, value in kwargs.items() if key != "closure"}

    def _check_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a step with gradients that are not the mean over the workers."""
        if self.communicator.size > 1:
            if torch._C._current_graph_task_id() != -1:
                raise IncompatibleError(
                    "the optimizer steps while backward runs, before the workers have averaged the gradients: the mean "
                    "is there when backward() returns, so step then"
                )
            if self._rounds == self._stepped_at and optimizer is self.optimizer:  # no gradient since the latest step
                self._check_parameters()
            self._stepped_at = self._rounds
        if self._delay and FOUND_INF in vars(optimizer):
            for key in (FOUND_INF, "grad_scale"):
                vars(optimizer).pop(key, None)
            raise IncompatibleError(
                f"{self.strategy!r} cannot be used with a GradScaler: a gradient that was scaled {self._delay} steps "
                "ago would be unscaled with today's scale; train with bfloat16, which needs no scaler, or without delay"
            )

    def _check_parameters(self) -> None:
        """Refuse parameters that are no longer averaged. Called when the number of gradients is new."""
        self.watch.check_replaced()
        self._gradients.check_attached()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1

    def _named(self, reduction: _StepGradients) -> dict[str, Tensor]:
        """A step's gradients by parameter name. The gradients that the model holds do not change."""
        before = [parameter.grad for parameter in self._gradients.parameters]
        reduction.install()
        named = {
            plain_name(name): parameter.grad.detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        for parameter, gradient in zip(self._gradients.parameters, before, strict=True):
            parameter.grad = gradient
        return named


class _Restored:
    """Gradients in flight, from a checkpoint."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._gradients = gradients

    def install(self) -> None:
        for name, parameter in self._parameters.items():
            gradient = self._gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device).clone()


def _sparse_names(model: nn.Module) -> frozenset[str]:
    """Parameters whose gradients are known to be sparse before the first backward pass."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in sparse)
