"""Synchronises the ranks of a `DistributedOptimizer`: with the reducer of `sl.distribute`, a strategy or Adasum.

```text
backward 1 … n−1      gradients are added on this rank         n = backward_passes_per_step
backward n            reduces them while it runs; complete when it returns
step()                reduces what no backward has reduced: after fewer passes, or if gradients were set by hand
```

Every rank reduces once per step, in backward or in `step()`. A backward pass may reach the parameters of two optimizers
(the loss of a generator passes through the discriminator). When the other optimizer steps, the pass no longer counts
here, and `zero_grad()` may clear its gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.compat.horovod.compression import Compressor
from syncline.compat.horovod.context import Adasum, HorovodContext, ProcessSet, Sum
from syncline.compat.horovod.errors import HorovodInternalError, UnsupportedAdasumError
from syncline.compat.horovod.messages import TensorInfo
from syncline.compat.horovod.objects import broadcast_object
from syncline.compat.horovod.ops import allreduce_async_, check_adasum, synchronize
from syncline.compat.horovod.pending import CollectiveCounter
from syncline.compat.parameter_module import ParameterModule
from syncline.errors import IncompatibleError, PeerLostError, SynclineError
from syncline.reduction import (
    Communicator,
    GradientReducer,
    ReducerOptions,
    ReductionPass,
    ReductionPolicy,
    Scaling,
    check_same,
)
from syncline.strategies import Strategy, StrategyRun, strategy_run
from syncline.training.distribute import distribute

ZEROED_TOO_SOON = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize()"
)
GROUPS_ARE_NEWER = "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
"""Horovod's text, by which scripts filter the warning."""


class PassesError(SynclineError, AssertionError):
    """Backward passes, `zero_grad()` and `step()` in an order that would lose gradients."""


def _too_many_passes(name: str, passes: int) -> PassesError:
    return PassesError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally ({name}, backward_passes_per_step={passes}), or "
        "call optimizer.step() after each pass"
    )


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[str, Parameter]:
    """The parameters of an optimizer by name, in the order of the script; with Horovod's names if the script has none.

    Parameters that the optimizer does not have are left out: scripts often name all parameters of a model.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    >>> list(name_parameters(optimizer, None)), list(name_parameters(optimizer, model.named_parameters()))
    (['allreduce.noname.0.0', 'allreduce.noname.1.0'], ['weight', 'bias'])
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            f"allreduce.noname.{group}.{place}": parameter
            for group, each in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(each["params"])
        }
    pairs = list(named_parameters)
    strange = next((pair for pair in pairs if not _is_pair(pair)), None)
    if strange is not None:
        raise IncompatibleError(
            f"named_parameters holds a {type(strange).__name__}, and takes pairs (name, parameter): give "
            "model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise IncompatibleError(
            f"named_parameters has {', '.join(twice)} more than once: names must be unique; put the model's name "
            "before those of several models"
        )
    wanted = {id(parameter) for parameter in held}
    named: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if id(parameter) in wanted:
            wanted.discard(id(parameter))  # a parameter with two names keeps the first
            named[name] = parameter  # type: ignore[assignment]
    if wanted:
        shapes = [tuple(parameter.shape) for parameter in held if id(parameter) in wanted]
        raise IncompatibleError(
            f"{len(shapes)} of the optimizer's {len(held)} parameters have no name in named_parameters (the first has "
            f"shape {shapes[0]}): name those of every model that it trains, or leave named_parameters out"
        )
    return named


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)


def check_groups(num_groups: Any, groups: Any) -> None:
    """Raise for values of `num_groups` and `groups` that Horovod refuses."""
    if not isinstance(num_groups, int) or isinstance(num_groups, bool) or num_groups < 0:
        raise IncompatibleError(f"num_groups={num_groups!r}: a number of groups, not negative")
    if num_groups:
        warnings.warn(GROUPS_ARE_NEWER, DeprecationWarning, stacklevel=3)
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    lists = isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups)
    if not lists or not all(isinstance(each, Tensor) for group in groups for each in group):
        raise IncompatibleError(f"groups={groups!r:.80}: a number that is not negative, or a list of lists of tensors")
    members = [id(each) for group in groups for each in group]
    if len(set(members)) < len(members):
        raise IncompatibleError("groups: a parameter is in two of the lists, and may be in one only")


class OptimizerSync:
    """Synchronises the ranks of an optimizer. The methods here do nothing beyond the hooks."""

    run: StrategyRun | None = None

    def __init__(self, held: HorovodContext, passes: int) -> None:
        self.context = held
        self.passes = passes
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def synchronize(self) -> None:
        """Reduce the gradients that no backward pass has reduced."""

    def zero(self) -> None:
        """Called before the gradients are cleared."""

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Wraps `step()`, in which a closure may clear gradients and compute new ones."""
        yield

    def stepped(self) -> None:
        """Earlier backward passes no longer count."""

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure that `step()` of the script's optimizer calls."""
        return closure

    def join_rounds(self) -> None:
        """Contribute zeros to the reductions of other ranks until every rank has joined."""

    def close(self) -> None:
        """Remove the hooks; gradients stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self in self.context.optimizers:
            self.context.optimizers.remove(self)

    def _call_after_gradients(self, parameters: Iterable[Tensor], fn: Callable[[Tensor], None]) -> None:
        """Call `fn` after a gradient was accumulated in one of the parameters."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(fn))  # type: ignore[no-untyped-call]


class GradientSync(OptimizerSync):
    """Reduces the gradients of an optimizer, and counts its backward passes and steps."""

    def __init__(
        self,
        held: HorovodContext,
        named: Mapping[str, Parameter],
        *,
        mean: bool,
        predivide: float,
        codec: Codec | None,
        passes: int,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        sparse_only: bool = False,
        encodes_alone: bool = True,
    ) -> None:
        """`sparse_only`: the optimizer takes only sparse gradients. `encodes_alone`: the codec is also applied in a
        world of one rank. Horovod's compressors are not: they round what is sent, and one rank sends nothing.
        """
        super().__init__(held, passes)
        self._mean = mean
        self._predivide = predivide
        self._dense = sparse_as_dense
        parameters = list(named.values())
        self._sparse_dims = {id(parameter): 1 for parameter in parameters} if sparse_as_dense and sparse_only else {}
        """Number of sparse dimensions of parameters with sparse gradients, by id."""
        self._set = process_set
        self._steps: CollectiveCounter | None = None
        self._open: set[int] = set()
        """Backward passes with gradients since the last step or `synchronize()`."""
        self._past: set[int] = set()
        """Backward passes before `synchronize()`, since the last step."""
        self._settled: set[int] = set()
        """Open passes after which another optimizer has stepped."""
        self._reduced: set[int] = set()
        self._rounds = 0
        self._stepping = False
        self._communicator: Communicator | None = None
        self._gradients: GradientReducer | None = None
        self._loss_name = f"the loss of {min(named, default='')}"
        self.watched = {id(parameter) for parameter in parameters}
        self._close_older()
        if process_set.included():
            try:
                self._attach(named, codec if process_set.size() > 1 or encodes_alone else None)
            except SynclineError:
                self.close()  # the hooks that it has registered
                raise
        held.optimizers.append(self)

    def synchronize(self) -> None:
        if self._gradients is not None and (not self._rounds or self._gradients.accumulating):
            self._complete(self._gradients.reduce_now())
        self._past |= self._open
        self._open.clear()
        self._reduced.clear()

    def zero(self) -> None:
        """Raises if no optimizer has stepped with the gradients."""
        if not self._stepping:
            elsewhere = {number for other in self._others() for number in other._open | other._past}
            if self._open - self._settled - elsewhere:
                raise PassesError(f"{ZEROED_TOO_SOON}: it would drop gradients that were reduced")
        self.forget()

    def stepped(self) -> None:
        """The optimizer has stepped: earlier passes no longer count, here and in other optimizers."""
        for other in self._others():
            other._settled |= (self._open | self._past) & other._open
        self.forget(keep_sums=True)

    def forget(self, keep_sums: bool = False) -> None:
        """Start a new step. `keep_sums`: accumulated gradients will still be reduced."""
        for numbers in (self._open, self._past, self._settled, self._reduced):
            numbers.clear()
        self._rounds = 0
        if self._gradients is not None and not keep_sums:
            self._gradients.take_accumulated()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: reduce the gradients of each evaluation, and return the mean loss, which line searches use.

        The loss is summed by name, so that joined ranks contribute zeros, as for gradients.
        """

        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            self._rounds = 0
            if loss is None or self._communicator is None or self._communicator.size == 1:
                return loss
            value = loss.detach() if isinstance(loss, Tensor) else loss
            total = torch.tensor([float(value)], dtype=torch.float64)
            handle = allreduce_async_(total, name=self._loss_name, op=Sum, process_set=self._set)
            mean = float(synchronize(handle)) / self._communicator.size
            return torch.full_like(value, mean) if isinstance(value, Tensor) else mean

        return evaluate

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            self.stepped()

    def join_rounds(self) -> None:
        active = 0 if self._gradients is None or self._communicator is None or self._communicator.size == 1 else 1
        while active and self._gradients is not None:
            with self._in_step("the gradients could not be reduced after join()"):
                found = self._gradients.join_idle(weight=1.0)
                active = found.complete().active
            self._gradients.release(found)

    def close(self) -> None:
        super().close()
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self._communicator is not None and not self._communicator.world.closed:
            self._communicator.group.release()  # no rank waits for reductions in flight
        self._communicator = None

    def _close_older(self) -> None:
        """Close older optimizers of the same parameters: only the newest reduces a gradient."""
        for other in self._others():
            if other.watched & self.watched:
                other.close()

    def _others(self) -> list[GradientSync]:
        return [other for other in self.context.optimizers if isinstance(other, GradientSync) and other is not self]

    def _attach(self, named: Mapping[str, Parameter], codec: Codec | None) -> None:
        # Requested by name, so that a rank that does not create this optimizer is reported.
        team, self._steps = self.context.data_team(self._set)
        communicator = self._communicator = Communicator(self.context.world, "auto", codec, team)
        with self._in_step("the ranks could not agree on this optimizer"):
            ordered = self._agree(communicator, named, codec)
        alone = communicator.size == 1 and codec is None
        if self._dense and not alone:  # registered before the reducer's hooks, which need dense gradients
            self._call_after_gradients(ordered.values(), self._densify)
        self._gradients = GradientReducer(
            ordered,
            communicator,
            ReductionPolicy(
                after_backward=self._after_backward,
                reduces_pass=self._reduces_pass,
                scaling=self._scaling(communicator.size),
            ),
            ReducerOptions(codec=codec, find_unused_parameters=True, attach_hooks=not alone),
        )
        if alone:
            self._gradients = None

    def _agree(
        self, communicator: Communicator, named: Mapping[str, Parameter], codec: Codec | None
    ) -> dict[str, Parameter]:
        """Compare parameters and settings of all ranks; return the parameters in the order of the first rank."""
        names = sorted(named)
        check_same(communicator, "parameters", {name: _describe(named[name]) for name in names})
        settings = {"op": "Average" if self._mean else "Sum", "gradient_predivide_factor": repr(self._predivide)}
        settings |= {"compression": repr(codec), "sparse_as_dense": repr(self._dense)}
        check_same(communicator, "settings of DistributedOptimizer", settings)
        places = {name: place for place, name in enumerate(names)}
        mine = torch.tensor([places[name] for name in named], dtype=torch.int64)
        order = communicator.from_root(mine).tolist()  # the order of the script is usually the order of the model
        return {names[place]: named[names[place]] for place in order}

    def _scaling(self, size: int) -> Scaling | None:
        if not self._mean:
            return Scaling(1.0)
        return None if self._predivide == 1.0 else Scaling(1.0 / self._predivide, self._predivide / size)

    def _reduces_pass(self, index: int) -> bool:
        """Called at the first gradient of a pass: whether the pass is the last before a step and is reduced."""
        assert self._gradients is not None, "its hook calls this"
        task = torch._C._current_graph_task_id()
        if self._open and self._open <= self._settled:
            self.forget()
        if index in self._reduced:
            raise _too_many_passes(self._gradients.names[index], self.passes)
        gradient = self._gradients.parameters[index].grad
        if gradient is not None and gradient.requires_grad:
            raise PassesError(
                f"{self._gradients.names[index]} got a gradient that can be differentiated: a DistributedOptimizer "
                "does not support backward(create_graph=True), because its reductions are not part of the graph; use "
                "torch.autograd.grad(…, create_graph=True) for the inner gradients"
            )
        self._open.add(task)
        return self._gradients.accumulated(index) + 1 >= self.passes

    def _after_backward(self, found: ReductionPass) -> None:
        # Later: another optimizer of the same pass must start its last reductions before this one waits.
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(partial(self._complete, found))

    def _complete(self, found: ReductionPass) -> None:
        assert self._gradients is not None, "it has started the reduction"
        with self._in_step("the gradients could not be reduced"):
            found.complete()
        self._gradients.release(found)
        if self._sparse_dims:
            self._make_sparse(self._gradients.parameters)
        self._reduced.update(found.arrivals)
        self._rounds += 1

    @contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Wraps a wait for all ranks: errors of the transport become Horovod's, and are reported to the other ranks."""
        steps = self._steps
        assert steps is not None, "there are other ranks"
        try:
            with steps.waiting():
                yield
        except SynclineError as error:
            if not isinstance(error, (PeerLostError, HorovodInternalError)) and not steps.why:
                raise
            problem = HorovodInternalError(f"{what}: {steps.why or error}")
            self.context.engine(self._set).leave(str(problem))
            raise problem from error

    def _densify(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            self._sparse_dims[id(parameter)] = parameter.grad.sparse_dim()
            parameter.grad = parameter.grad.to_dense()

    def _make_sparse(self, parameters: Sequence[Tensor]) -> None:
        """Make gradients sparse again that were sparse before: some optimizers need that."""
        for parameter in parameters:
            dims = self._sparse_dims.get(id(parameter))
            if dims is not None and parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad = parameter.grad.to_sparse(dims)


def _describe(parameter: Tensor) -> str:
    """The description of a parameter, which must be equal on every rank."""
    frozen = "" if parameter.requires_grad else " (frozen)"
    return f"{TensorInfo(parameter.dtype, tuple(parameter.shape))}{frozen}"


class StrategySync(OptimizerSync):
    """Synchronises an optimizer by a strategy, with a run of `sl.distribute`, in backward or in `step()`."""

    run: StrategyRun

    def __init__(
        self,
        held: HorovodContext,
        optimizer: Optimizer,
        named: Mapping[str, Parameter],
        *,
        strategy: str | Strategy,
        codec: Codec | None,
        passes: int,
    ) -> None:
        super().__init__(held, passes)
        self._pausing = ExitStack()
        self._task = -1
        self._counts: dict[int, int] = {}
        # Registered before the run's own hooks, because they pause or resume the run.
        self._call_after_gradients(named.values(), self._arrived)
        first = broadcast_object(list(named))  # the order of rank 0; `distribute` refuses names that differ
        ordered = {name: named[name] for name in (first if set(first) == set(named) else named)}
        model = ParameterModule(ordered)
        self.run = strategy_run(distribute(model, optimizer, strategy=strategy, codec=codec))
        held.optimizers.append(self)

    def zero(self) -> None:
        self._counts.clear()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Raises if the strategy reduces gradients and has not reduced them yet."""
        done = max(self._counts.values(), default=self.passes)
        if done < self.passes and self.run.strategy.name == "allreduce":
            raise PassesError(
                f"optimizer.step() after {done} of backward_passes_per_step={self.passes} backward passes: "
                f"{self.run.strategy!r} has not reduced the gradients yet; run all passes, or leave strategy out"
            )
        try:
            yield
        finally:
            self.stepped()

    def stepped(self) -> None:
        self._counts.clear()

    def join_rounds(self) -> None:
        while not self.run.asynchronous and self.run.join_idle():
            pass

    def close(self) -> None:
        """Every rank calls it."""
        super().close()
        self._pausing.close()
        if not self.run.world.closed:
            self.run.close()

    def _arrived(self, parameter: Tensor) -> None:
        task, count = torch._C._current_graph_task_id(), self._counts.get(id(parameter), 0) + 1
        self._counts[id(parameter)] = count
        if task == self._task:
            return
        self._task = task
        self._pausing.close()
        if count < self.passes:
            self._pausing.enter_context(self.run.no_sync())


class AdasumSync(OptimizerSync):
    """Combines the steps Δ_i of all ranks: w ← w + adasum(Δ_0, …, Δ_{p−1}).

    Gradients stay local, so the learning rate need not be scaled by the number of ranks. Maleki et al., MLSys 2021.
    """

    def __init__(
        self,
        held: HorovodContext,
        named: Mapping[str, Parameter],
        *,
        compressor: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        if process_set.process_set_id != 0:
            raise UnsupportedAdasumError(f"op=Adasum on {process_set!r}: it works on the global process set")
        check_adasum(process_set)
        super().__init__(held, passes)
        self._stepping = False
        self._named = {name: named[name] for name in sorted(named)}
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._compressor = compressor
        self._counts: dict[int, int] = {}
        self._call_after_gradients(self._named.values(), self._arrived)

    def zero(self) -> None:
        if self._counts and not self._stepping:
            raise PassesError(f"{ZEROED_TOO_SOON}: it would drop gradients that no step has used")
        self._counts.clear()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Sets the parameters to their old values plus the combined steps."""
        trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        starts = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
        self._counts.clear()
        pending = []
        for name, start in starts.items():  # a rank without a gradient adds zeros
            sent, kept = self._compressor.compress(trained[name].detach() - start)
            pending.append((name, allreduce_async_(sent, name=f"adasum.{name}", op=Adasum), kept))
        for name, handle, kept in pending:
            delta = self._compressor.decompress(synchronize(handle), kept)
            trained[name].detach().copy_(starts[name] + delta)

    def _arrived(self, parameter: Tensor) -> None:
        count = self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if count > self.passes and not self._stepping:
            raise _too_many_passes(self._names[id(parameter)], self.passes)
