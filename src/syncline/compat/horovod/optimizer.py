"""`DistributedOptimizer`: the script's own optimizer, whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from syncline.codecs import Codec, check_optimizer_momentum
from syncline.compat.horovod.compression import (
    CodecCompression,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    codec_of,
)
from syncline.compat.horovod.context import (
    Adasum,
    Average,
    HorovodContext,
    ProcessSet,
    Sum,
    context,
    global_process_set,
)
from syncline.compat.horovod.errors import UnsupportedAdasumError
from syncline.compat.horovod.objects import loading_in_place
from syncline.compat.horovod.ops import allreduce_async_, check_adasum, synchronize
from syncline.compat.horovod.optimizer_sync import (
    NO_NEW_GROUPS,
    TOO_MANY_PASSES,
    ZEROED_TOO_SOON,
    GradientSync,
    PassesError,
    StrategySync,
    after_gradient,
    below,
    check_groups,
    named_of,
)
from syncline.errors import IncompatibleError
from syncline.strategies import Run, Strategy
from syncline.training.distribute import momentum_of

__all__ = ["AdasumOptimizerMixin", "DistributedOptimizer", "DistributedOptimizerMixin", "adasum_optimizer"]


class AdasumOptimizerMixin(Optimizer):
    """What `DistributedOptimizer(op=Adasum)` puts before the class of the script's optimizer."""

    _deltas: _StepDeltas | None = None
    """None in a copy: a plain optimizer."""
    _origin: Optimizer
    _parameter_names: dict[Parameter, str]
    op = Adasum
    process_set: ProcessSet

    @property
    def backward_passes_per_step(self) -> int:
        """Passes whose gradients add up before a step."""
        return 1 if self._deltas is None else self._deltas.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, add up the gradients of so many passes."""
        if self._deltas is not None:
            self._deltas.passes = passes

    def synchronize(self) -> None:
        """Nothing: gradients are not exchanged, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: a step that is not exchanged would part the ranks."""
        raise PassesError(
            "Skipping synchronization is not supported when using Adasum optimizer: the steps are exchanged, and none "
            "can skip it; call optimizer.step() alone"
        )
        yield

    def step(self, closure: Any = None) -> Any:
        """Step on this rank, and combine the step with those of the others."""
        deltas = self._deltas
        if deltas is None:
            return super().step(closure)
        self._origin._opt_called = True  # type: ignore[attr-defined]  # a scheduler may have been made for it
        starts = deltas.starts()
        deltas.stepping = True
        try:
            loss = super().step() if closure is None else super().step(closure)
        finally:
            deltas.stepping = False
        deltas.combine(starts)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch: hooks around a step run in the class below

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; refused between a backward pass and the step that it was for."""
        if self._deltas is not None:
            self._deltas.zero()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's."""
        with loading_in_place(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; refused once the ranks have agreed on the parameters."""
        if self._deltas is not None:
            raise IncompatibleError(NO_NEW_GROUPS)
        super().add_param_group(param_group)


class _StepDeltas:
    """What each step of this rank adds to its parameters, and how the ranks' are combined."""

    def __init__(
        self, named: Mapping[str, Parameter], compressor: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        self.passes = passes
        self.stepping = False
        self._named = {name: named[name] for name in sorted(named)}
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._compressor = compressor
        self._set = process_set
        self._counts: dict[int, int] = {}
        self._hooks = [
            after_gradient(parameter, self._arrived) for parameter in self._named.values() if parameter.requires_grad
        ]

    def starts(self) -> dict[str, Tensor]:
        """The parameters before a step, without those that are frozen."""
        return {name: parameter.detach().clone() for name, parameter in self._named.items() if parameter.requires_grad}

    def combine(self, starts: Mapping[str, Tensor]) -> None:
        """Make the parameters what they were, plus all ranks' steps. A rank that had no gradient adds zeros."""
        self._counts.clear()
        under_way = []
        for name, start in starts.items():
            parameter = self._named[name]
            delta = parameter.detach() - start
            sent, kept = self._compressor.compress(delta)
            handle = allreduce_async_(sent, name=f"adasum.{name}", op=Adasum, process_set=self._set)
            under_way.append((name, parameter, handle, kept))
        for name, parameter, handle, kept in under_way:
            delta = self._compressor.decompress(synchronize(handle), kept)
            parameter.detach().copy_(starts[name] + delta)

    def zero(self) -> None:
        """The gradients are about to be dropped."""
        if self._counts and not self.stepping:
            raise PassesError(f"{ZEROED_TOO_SOON}: it would drop gradients that no step has used")
        self._counts.clear()

    def _arrived(self, parameter: Tensor) -> None:
        count = self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if count > self.passes and not self.stepping:
            raise PassesError(
                f"{TOO_MANY_PASSES} ({self._names[id(parameter)]}, backward_passes_per_step={self.passes}), or call "
                "optimizer.step() after each pass"
            )


def adasum_optimizer(
    optimizer: Optimizer, named: Mapping[str, Parameter], compression: Any, passes: int, process_set: ProcessSet
) -> AdasumOptimizerMixin:
    """The optimizer, as one whose steps are combined by Adasum."""
    if process_set.process_set_id != 0:
        raise UnsupportedAdasumError(f"op=Adasum on {process_set!r}: it works on the global process set")
    compressor = _compressor(compression)
    check_adasum(process_set)
    made = below(AdasumOptimizerMixin, optimizer)
    made._origin = optimizer
    made._parameter_names = {parameter: name for name, parameter in named.items()}
    made.process_set = process_set
    made._deltas = _StepDeltas(named, compressor, passes, process_set)
    return made


def _compressor(compression: Any) -> type[Compressor]:
    """Adasum weighs whole tensors, so that a step must travel as one: as it is, or in half precision."""
    for known in (NoneCompressor, FP16Compressor):
        if compression is known or (compression is None and known is NoneCompressor):
            return known
    codec = codec_of(compression)
    raise IncompatibleError(f"op=Adasum with {codec!r}: it takes Compression.none or Compression.fp16")


SYNCHRONIZED_BEFORE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Horovod's text: scripts filter the warning by it. Here the gradients are not reduced a second time."""


class OptimizerSync(Protocol):
    """How an optimizer's ranks agree: a `GradientSync`, or the `StrategySync` of a strategy."""

    context: HorovodContext
    passes: int
    run: Run | None

    def synchronize(self) -> None: ...
    def zero(self) -> None: ...
    def stepping(self, now: bool) -> None: ...
    def stepped(self) -> None: ...
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]: ...
    def close(self) -> None: ...


class DistributedOptimizerMixin(Optimizer):
    """What `DistributedOptimizer` puts before the class of the script's optimizer."""

    _way: OptimizerSync | None = None
    """None in a copy: a plain optimizer."""
    _make: Callable[[HorovodContext], OptimizerSync]
    _origin: Optimizer
    _parameter_names: dict[Parameter, str]
    _synchronized = False
    _skipping = False
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def run(self) -> Run | None:
        """The run of the strategy, with `agreed()`, `stats` and `close()`; None without a strategy."""
        return None if self._way is None else self._way.run

    @property
    def backward_passes_per_step(self) -> int:
        """Passes whose gradients add up before they are reduced."""
        return 1 if self._way is None else self._way.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, add up the gradients of so many passes."""
        way = self._current()
        if way is not None:
            way.passes = _checked_passes(passes)

    def synchronize(self) -> None:
        """Have all gradients reduced now. Those of complete backward passes are already."""
        way = self._current()
        if way is not None:
            way.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step()` takes the gradients as they are: after `synchronize()` they are those of all ranks."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Any = None) -> Any:
        """Take the optimizer's step with the gradients of all ranks."""
        way = self._current()
        if way is None:
            return super().step(closure)
        if self._synchronized and not self._skipping:
            warnings.warn(SYNCHRONIZED_BEFORE, stacklevel=2)
        if closure is None and not self._skipping:
            way.synchronize()
        self._synchronized = False
        self._origin._opt_called = True  # type: ignore[attr-defined]  # a scheduler may have been made for it
        way.stepping(True)
        try:
            return super().step() if closure is None else super().step(way.closure(closure))
        finally:
            way.stepping(False)
            way.stepped()

    step.hooked = True  # type: ignore[attr-defined]  # torch: hooks around a step run in the class below

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; refused between a backward pass and the step that it was for."""
        way = self._current()
        if way is not None:
            way.zero()
        self._synchronized = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's; what was under way is forgotten."""
        way = self._current()
        if way is not None:
            way.stepped()
        self._synchronized = False
        with loading_in_place(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; refused once ranks agree on the parameters."""
        if self._way is not None:
            raise IncompatibleError(NO_NEW_GROUPS)
        super().add_param_group(param_group)

    def _current(self) -> OptimizerSync | None:
        """The way in the world at hand: after shutdown() and init() a new one is made."""
        way = self._way
        if way is None:
            return None
        now = context()
        if way.context is not now:
            way.close()
            way = self._way = self._make(now)
        return way


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    strategy: str | Strategy | None = None,
) -> Any:
    """The optimizer, as one that steps with the mean (or the sum) of all ranks' gradients.

    It is of a class of its own below the optimizer's class, and shares its groups and state. Gradients are reduced
    during `backward()` and complete when it returns. It does not send parameters: call `broadcast_parameters`.

    A gradient that this rank lacks and another has counts as zero here, and the mean is over all ranks of the set. A
    parameter that no rank has a gradient of keeps `grad=None`, where Horovod puts zeros: so weight decay and momentum
    leave it alone, as they do in one process. `num_groups` and `groups` are checked and have no effect: which
    gradients share a message is chosen here, and changes no result. With `sparse_as_dense` sparse gradients are reduced
    as dense ones, and are sparse again afterwards.

    `compression` may be a codec of ours too, `strategy` any strategy: "local(period=16)", "ssp(slack=3)", …; the ranks
    then start from rank 0's parameters, and `optimizer.run` is what `sl.distribute` returns.

    >>> import torch, syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def train(world):
    ...     hvd.init()
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ...     model(torch.tensor([[float(hvd.rank())]])).sum().backward()
    ...     return model.weight.grad.item()          # the mean of 0 and 1
    >>> sl.simulate(train, ranks=2).results
    (0.5, 0.5)
    """
    here = context()
    _check(op, gradient_predivide_factor, process_set, strategy)
    check_groups(num_groups, groups)
    passes = _checked_passes(backward_passes_per_step)
    named = named_of(optimizer, named_parameters)
    if op == Adasum and here.world.size > 1:
        return adasum_optimizer(optimizer, named, compression, passes, process_set)
    codec = codec_of(compression)
    if codec is not None:
        check_optimizer_momentum(codec, momentum_of(optimizer))
    made = below(DistributedOptimizerMixin, optimizer)
    made._origin = optimizer
    made._parameter_names = {parameter: name for name, parameter in named.items()}
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    made.sparse_as_dense, made.process_set = sparse_as_dense, process_set
    told: dict[str, Any] = {"codec": codec, "passes": passes}
    if strategy is None:
        told |= {"named": named, "mean": op == Average, "predivide": gradient_predivide_factor}
        told |= {"sparse_as_dense": sparse_as_dense, "process_set": process_set}
        told |= {"sparse_only": isinstance(optimizer, SparseAdam)}
        told |= {"codes_alone": isinstance(compression, (str, Codec, CodecCompression))}
        made._make = cast(Callable[[HorovodContext], OptimizerSync], partial(GradientSync, **told))
    else:
        # Numbers are the keys of checkpoints, where the script gives no names.
        numbered = {f"parameter.{number}": parameter for number, parameter in enumerate(named.values())}
        told["named"] = numbered if named_parameters is None else named
        made._make = cast(
            Callable[[HorovodContext], OptimizerSync], partial(StrategySync, optimizer=made, strategy=strategy, **told)
        )
    made._way = made._make(here)
    return made


def _check(op: Any, predivide: float, process_set: ProcessSet, strategy: str | Strategy | None) -> None:
    if op not in (Average, Sum, Adasum):
        raise IncompatibleError(f"op={op!r}: DistributedOptimizer takes Average, Sum or Adasum")
    if predivide != 1.0 and op != Average:
        raise IncompatibleError(f"gradient_predivide_factor={predivide} divides a mean in two: it needs op=Average")
    if not predivide > 0:
        raise IncompatibleError(f"gradient_predivide_factor={predivide}: a number above zero")
    if strategy is not None and (op != Average or predivide != 1.0 or process_set.process_set_id != 0):
        raise IncompatibleError(
            f"strategy={strategy!r} goes with op=Average, gradient_predivide_factor=1 and the global process set: a "
            "strategy says itself what is averaged, among all ranks"
        )


def _checked_passes(passes: int) -> int:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise IncompatibleError(f"backward_passes_per_step must be > 0: {passes!r} is not a whole number, at least 1")
    return passes
