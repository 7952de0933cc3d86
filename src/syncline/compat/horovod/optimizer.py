"""`DistributedOptimizer`: the optimizer of the script, which steps with the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
    reset,
)
from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.objects import loading_in_place
from syncline.compat.horovod.optimizer_sync import (
    AdasumSync,
    GradientSync,
    OptimizerSync,
    PassesError,
    StrategySync,
    check_groups,
    name_parameters,
)
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError
from syncline.strategies import Run, Strategy
from syncline.training.distribute import momentum_of


def _compressor(compression: Any) -> type[Compressor]:
    """The compressor of Adasum, which needs whole tensors: none, or half precision."""
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
"""Horovod's text, by which scripts filter the warning. Gradients are not reduced a second time."""
NO_NEW_GROUPS = (
    "add_param_group on a DistributedOptimizer: its ranks have agreed on the parameters; add the group to the plain "
    "optimizer, and create a new DistributedOptimizer from it"
)


class DistributedOptimizerMixin(Optimizer):
    """The methods that `DistributedOptimizer` adds to the class of the script's optimizer."""

    _sync: OptimizerSync | None = None
    """None in a copy, which is a plain optimizer."""
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
        """The run of the strategy, as `sl.distribute` returns it; None without a strategy."""
        return None if self._sync is None else self._sync.run

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes whose gradients are added before they are reduced."""
        return 1 if self._sync is None else self._sync.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes of a step, from the next step on."""
        sync = self._current()
        if sync is not None:
            sync.passes = _checked_passes(passes)

    def synchronize(self) -> None:
        """Reduce all gradients that no backward pass has reduced."""
        sync = self._current()
        if sync is not None:
            sync.synchronize()
        self._synchronized = not isinstance(sync, AdasumSync)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` does not synchronise: after `synchronize()` the gradients are those of all ranks."""
        if isinstance(self._sync, AdasumSync):
            raise PassesError(
                "Skipping synchronization is not supported when using Adasum optimizer: the steps are exchanged, and "
                "none can skip it; call optimizer.step() alone"
            )
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Any = None) -> Any:
        """Take a step of the optimizer with the gradients of all ranks."""
        sync = self._current()
        if sync is None:
            return super().step(closure)
        if self._synchronized and not self._skipping:
            warnings.warn(SYNCHRONIZED_BEFORE, stacklevel=2)
        if closure is None and not self._skipping:
            sync.synchronize()
        self._synchronized = False
        self._origin._opt_called = True  # type: ignore[attr-defined]  # a scheduler may belong to it
        with sync.stepping():
            return super().step() if closure is None else super().step(sync.closure(closure))

    step.hooked = True  # type: ignore[attr-defined]  # torch then runs its step hooks in the base class

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises between a backward pass and its step."""
        sync = self._current()
        if sync is not None:
            sync.zero()
        self._synchronized = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """As in the optimizer itself; gradients of unfinished steps are forgotten."""
        # Not the one of the current world: a state is restored before the ranks meet again.
        if self._sync is not None:
            self._sync.stepped()
        self._synchronized = False
        with loading_in_place(self):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the optimizer itself. Raises after the ranks have agreed on the parameters."""
        if self._sync is not None:
            raise IncompatibleError(NO_NEW_GROUPS)
        super().add_param_group(param_group)

    def _current(self) -> OptimizerSync | None:
        """The synchronisation in the current world; a new one after shutdown() and init()."""
        sync = self._sync
        if sync is None:
            return None
        now = context()
        if sync.context is not now:
            sync.close()
            sync = self._sync = self._make(now)
        return sync


def _derive(optimizer: Optimizer) -> DistributedOptimizerMixin:
    """An object of a new class, derived from the mixin and the optimizer's class, with its groups and state."""
    made_of: Any = type(type(optimizer).__name__, (DistributedOptimizerMixin, type(optimizer)), {})
    made: DistributedOptimizerMixin = made_of.__new__(made_of)
    # A scheduler replaces the `step` of its optimizer; that one would bypass the mixin's `step`.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return made


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
    """Make an optimizer that steps with the mean (or the sum) of the gradients of all ranks.

    Its class derives from the optimizer's class, and it shares the optimizer's groups and state. Gradients are reduced
    during `backward()`, and are complete when it returns. It does not send parameters: call `broadcast_parameters`.

    A gradient that is missing on one rank counts as zero there, and the mean is over all ranks of the set. A parameter
    without a gradient on any rank keeps `grad=None`, where Horovod writes zeros: so weight decay and momentum do not
    change it, as in one process. `num_groups` and `groups` are checked and have no effect, because Syncline chooses the
    buckets itself; they change no result. With `sparse_as_dense`, sparse gradients are reduced as dense ones, and are
    sparse again afterwards.

    `compression` may also be a codec of Syncline, and `strategy` any strategy: "local(period=16)", "ssp(slack=3)", ….
    With a strategy, ranks start from rank 0's parameters, and `optimizer.run` is what `sl.distribute` returns.

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
    named = name_parameters(optimizer, named_parameters)
    combines_steps = op == Adasum and here.world.size > 1
    codec = None if combines_steps else codec_of(compression)
    if codec is not None:
        check_optimizer_momentum(codec, momentum_of(optimizer))
    made = _derive(optimizer)
    made._origin = optimizer
    made._parameter_names = {parameter: name for name, parameter in named.items()}
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    made.sparse_as_dense, made.process_set = sparse_as_dense, process_set
    kind: Callable[..., OptimizerSync]
    options: dict[str, Any] = {"named": named, "passes": passes}
    if combines_steps:
        kind = AdasumSync
        options |= {"compressor": _compressor(compression), "process_set": process_set}
    elif strategy is None:
        kind = GradientSync
        options |= {"codec": codec, "mean": op == Average, "predivide": gradient_predivide_factor}
        options |= {"sparse_as_dense": sparse_as_dense, "process_set": process_set}
        options |= {"sparse_only": isinstance(optimizer, SparseAdam)}
        options |= {"encodes_alone": isinstance(compression, (str, Codec, CodecCompression))}
    else:
        kind = StrategySync
        options |= {"optimizer": made, "strategy": strategy, "codec": codec}
        if named_parameters is None:  # numbers are the keys of checkpoints
            options["named"] = {f"parameter.{number}": each for number, each in enumerate(named.values())}
    made._make = lambda held: kind(held, **options)
    made._sync = _attach_in_team(made._make)
    return made


def _attach_in_team(make: Callable[[HorovodContext], OptimizerSync]) -> OptimizerSync:
    """Attach a new optimizer. If a worker of an elastic job is lost meanwhile, the others form the next team."""
    while True:
        held = context()
        try:
            return make(held)
        except (HorovodInternalError, PeerLostError, ProtocolError) as error:
            if held.world.elastic is None:
                raise
            held.leave(str(error))
            reset()


def _check(op: Any, predivide: float, process_set: ProcessSet, strategy: str | Strategy | None) -> None:
    if op not in (Average, Sum, Adasum):
        raise IncompatibleError(f"op={op!r}: DistributedOptimizer takes Average, Sum or Adasum")
    if predivide != 1.0 and op != Average:
        raise IncompatibleError(f"gradient_predivide_factor={predivide} divides a mean in two: it needs op=Average")
    if not predivide > 0:
        raise IncompatibleError(f"gradient_predivide_factor={predivide}: a number above zero")
    if strategy is not None and (op != Average or predivide != 1.0 or process_set.process_set_id != 0):
        raise IncompatibleError(
            f"strategy={strategy!r} needs op=Average, gradient_predivide_factor=1 and the global process set: a "
            "strategy decides itself what is averaged, over all ranks"
        )


def _checked_passes(passes: int) -> int:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise IncompatibleError(f"backward_passes_per_step must be > 0: {passes!r} is not a whole number, at least 1")
    return passes
