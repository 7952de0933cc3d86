"""`DistributedOptimizer`: the script's own optimizer, whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from syncline.codecs import Codec, check_optimizer_momentum
from syncline.compat.horovod.adasum_optimizer import adasum_optimizer
from syncline.compat.horovod.basics import Adasum, Average, Sum
from syncline.compat.horovod.compression import Coded, Compression, codec_of
from syncline.compat.horovod.context import Context, context
from syncline.compat.horovod.guest import Guest
from syncline.compat.horovod.parameters import NO_NEW_GROUPS, below, check_groups, loading_in_place, named_of
from syncline.compat.horovod.process_sets import ProcessSet, global_process_set
from syncline.compat.horovod.reducer import Reducer
from syncline.errors import IncompatibleError
from syncline.strategies import Run, Strategy
from syncline.training.distribute import momentum_of

__all__ = ["Distributed", "DistributedOptimizer"]


SYNCHRONIZED_BEFORE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Horovod's text: scripts filter the warning by it. Here the gradients are not reduced a second time."""


class Way(Protocol):
    """How an optimizer's ranks agree: a `Reducer`, or the `Guest` of a strategy."""

    context: Context
    passes: int
    run: Run | None

    def synchronize(self) -> None: ...
    def zero(self) -> None: ...
    def stepping(self, now: bool) -> None: ...
    def stepped(self) -> None: ...
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]: ...
    def close(self) -> None: ...


class Distributed(Optimizer):
    """What `DistributedOptimizer` puts before the class of the script's optimizer."""

    _way: Way | None = None
    """None in a copy: a plain optimizer."""
    _make: Callable[[Context], Way]
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

    def _current(self) -> Way | None:
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
    made = below(Distributed, optimizer)
    made._origin = optimizer
    made._parameter_names = {parameter: name for name, parameter in named.items()}
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    made.sparse_as_dense, made.process_set = sparse_as_dense, process_set
    told: dict[str, Any] = {"codec": codec, "passes": passes}
    if strategy is None:
        told |= {"named": named, "mean": op == Average, "predivide": gradient_predivide_factor}
        told |= {"sparse_as_dense": sparse_as_dense, "process_set": process_set}
        told |= {"sparse_only": isinstance(optimizer, SparseAdam)}
        told |= {"codes_alone": isinstance(compression, (str, Codec, Coded))}
        made._make = cast(Callable[[Context], Way], partial(Reducer, **told))
    else:
        # Numbers are the keys of checkpoints, where the script gives no names.
        numbered = {f"parameter.{number}": parameter for number, parameter in enumerate(named.values())}
        told["named"] = numbered if named_parameters is None else named
        made._make = cast(Callable[[Context], Way], partial(Guest, optimizer=made, strategy=strategy, **told))
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
