"""The gradients of one `DistributedOptimizer`: reduced during backward, by the machinery of `sl.distribute`.

```text
backward 1 … n−1      gradients add up on this rank           n = backward_passes_per_step
backward n            reduced while it runs; complete when it returns
step()                reduces here what no backward has: a rank's passes were fewer, or gradients were set by hand
```

Every rank reduces once a step, in its backward or in `step()`. A pass whose gradients went to another optimizer too
(a generator's loss goes through the discriminator) may have been meant for that one: when that one steps, the pass no
longer counts here, and `zero_grad()` may drop what it brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from syncline.codecs import Codec
from syncline.compat.horovod import ops
from syncline.compat.horovod.basics import Sum
from syncline.compat.horovod.context import Context
from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.lockstep import Lockstep
from syncline.compat.horovod.parameters import (
    TOO_MANY_PASSES,
    ZEROED_TOO_SOON,
    PassesError,
    after_gradient,
    describe,
)
from syncline.compat.horovod.process_sets import ProcessSet
from syncline.errors import PeerLostError, SynclineError
from syncline.reduction import BUCKET_BYTES, Communicator, GradientReducer, ReductionPass, check_same
from syncline.reduction.rounds import Scaling

__all__ = ["Reducer"]


class Reducer:
    """Hooks on an optimizer's parameters, and who has stepped with what came of them."""

    run = None
    """The run of a strategy: here there is none."""

    def __init__(
        self,
        held: Context,
        named: Mapping[str, Parameter],
        *,
        mean: bool,
        predivide: float,
        codec: Codec | None,
        passes: int,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        sparse_only: bool = False,
        codes_alone: bool = True,
    ) -> None:
        """`sparse_only`: the optimizer takes sparse gradients only. `codes_alone`: the codec is applied in a world of
        one, too. Horovod's compressors are not: they round what is sent, and there nothing is sent.
        """
        self.context = held
        self.passes = passes
        self._mean = mean
        self._predivide = predivide
        self._dense = sparse_as_dense
        parameters = list(named.values())
        self._sparse_dims = {id(parameter): 1 for parameter in parameters} if sparse_as_dense and sparse_only else {}
        """Of parameters whose gradients are sparse: in how many dimensions."""
        self._set = process_set
        self._steps: Lockstep | None = None
        self._open: set[int] = set()
        """Backward passes that have brought gradients since the last step or `synchronize()`."""
        self._past: set[int] = set()
        """Those before `synchronize()`, since the last step."""
        self._settled: set[int] = set()
        """Those of them that another optimizer has stepped with."""
        self._reduced: set[int] = set()
        self._rounds = 0
        self._stepping = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._exchange: Communicator | None = None
        self._gradients: GradientReducer | None = None
        self._loss_name = f"the loss of {min(named, default='')}"
        self.watched = {id(parameter) for parameter in parameters}
        self._take_over()
        if process_set.included():
            self._attach(named, codec if process_set.size() > 1 or codes_alone else None)
        held.optimizers.append(self)

    # What the optimizer asks.

    def synchronize(self) -> None:
        """Reduce what no backward pass has reduced."""
        if self._gradients is not None and (not self._rounds or self._gradients.accumulating):
            self._complete(self._gradients.reduce_now())
        self._past |= self._open
        self._open.clear()
        self._reduced.clear()

    def zero(self) -> None:
        """The gradients are about to be dropped: refused where nobody has stepped with them."""
        if not self._stepping:
            elsewhere = {number for other in self._others() for number in other._open | other._past}
            if self._open - self._settled - elsewhere:
                raise PassesError(f"{ZEROED_TOO_SOON}: it would drop gradients that were reduced")
        self.forget()

    def stepped(self) -> None:
        """The optimizer has stepped: the passes before count no more, here or elsewhere."""
        for other in self._others():
            other._settled |= (self._open | self._past) & other._open
        self.forget(keep_sums=True)

    def forget(self, keep_sums: bool = False) -> None:
        """Begin a step anew; `keep_sums`: gradients that have added up are still to be reduced."""
        for numbers in (self._open, self._past, self._settled, self._reduced):
            numbers.clear()
        self._rounds = 0
        if self._gradients is not None and not keep_sums:
            self._gradients.take_accumulated()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Reduces the gradients of each evaluation; its loss, which line searches go by, is the mean of the ranks'.

        It is summed by name, so that ranks which have joined take part: with zeros, as in the gradients.
        """

        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            self._rounds = 0
            if loss is None or self._exchange is None or self._exchange.size == 1:
                return loss
            told = loss.detach() if isinstance(loss, Tensor) else loss
            total = torch.tensor([float(told)], dtype=torch.float64)
            handle = ops.allreduce_async_(total, name=self._loss_name, op=Sum, process_set=self._set)
            mean = float(ops.synchronize(handle)) / self._exchange.size
            return torch.full_like(told, mean) if isinstance(told, Tensor) else mean

        return evaluate

    def stepping(self, now: bool) -> None:
        """Within `step()`, a closure may drop gradients and make new ones as it likes."""
        self._stepping = now

    def join_rounds(self) -> None:
        """Take part in the others' reductions with zeros until nobody has gradients any more."""
        active = 0 if self._gradients is None or self._exchange is None or self._exchange.size == 1 else 1
        while active and self._gradients is not None:
            with self._in_step("the gradients could not be reduced after join()"):
                found = self._gradients.empty_round(weighing=1.0)
                active = found.complete().active
            self._gradients.done(found)

    def close(self) -> None:
        """Take the hooks off; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self._exchange is not None and not self._exchange.world.closed:
            self._exchange.team.release()  # no rank waits for reductions that are still in flight
        self._exchange = None
        if self in self.context.optimizers:
            self.context.optimizers.remove(self)

    # Within.

    def _take_over(self) -> None:
        """One optimizer at a time reduces a gradient: the last that was made."""
        for other in self._others():
            if other.watched & self.watched:
                other.close()

    def _others(self) -> list[Reducer]:
        return [other for other in self.context.optimizers if isinstance(other, Reducer) and other is not self]

    def _attach(self, named: Mapping[str, Parameter], codec: Codec | None) -> None:
        # Requested by name: a rank that does not create this optimizer is reported at once.
        team, self._steps = self.context.data_team(self._set)
        exchange = self._exchange = Communicator(self.context.world, "auto", codec, team)
        with self._in_step("the ranks could not agree on this optimizer"):
            ordered = self._agree(exchange, named, codec)
        alone = exchange.size == 1 and codec is None
        if self._dense and not alone:  # before the hooks that reduce, so that those find it done
            self._hooks = [
                after_gradient(parameter, self._densify) for parameter in ordered.values() if parameter.requires_grad
            ]
        self._gradients = GradientReducer(
            ordered,
            exchange,
            self._after_backward,
            bucket_bytes=BUCKET_BYTES,
            idle=alone,
            codec=codec,
            opens=self._opens,
            find_unused_parameters=True,
            scaling=self._scaling(exchange.size),
        )
        if alone:
            self._gradients = None

    def _agree(
        self, exchange: Communicator, named: Mapping[str, Parameter], codec: Codec | None
    ) -> dict[str, Parameter]:
        """Compare parameters and settings; the parameters in the order of the first rank."""
        names = sorted(named)
        check_same(exchange, "parameters", describe(names, [named[name] for name in names]))
        told = {"op": "Average" if self._mean else "Sum", "gradient_predivide_factor": repr(self._predivide)}
        told |= {"compression": repr(codec), "sparse_as_dense": repr(self._dense)}
        check_same(exchange, "settings of DistributedOptimizer", told)
        places = {name: place for place, name in enumerate(names)}
        mine = torch.tensor([places[name] for name in named], dtype=torch.int64)
        order = exchange.from_root(mine).tolist()  # the first rank's: a script's order is the model's as a rule
        return {names[place]: named[names[place]] for place in order}

    def _scaling(self, size: int) -> Scaling | None:
        if not self._mean:
            return Scaling(1.0)
        return None if self._predivide == 1.0 else Scaling(1.0 / self._predivide, self._predivide / size)

    def _opens(self, index: int) -> bool:
        """The first gradient of a pass: whether the pass is the last before a step, and so is reduced."""
        assert self._gradients is not None, "its hook has called"
        task = torch._C._current_graph_task_id()
        if self._open and self._open <= self._settled:
            self.forget()
        if index in self._reduced:
            raise PassesError(
                f"{TOO_MANY_PASSES} ({self._gradients.names[index]}, backward_passes_per_step={self.passes}), or call "
                "optimizer.step() after each pass"
            )
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
        # Not here: another optimizer of the same pass must begin its last reductions before this one waits.
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(partial(self._complete, found))

    def _complete(self, found: ReductionPass) -> None:
        assert self._gradients is not None, "it has begun the round"
        with self._in_step("the gradients could not be reduced"):
            found.complete()
        self._gradients.done(found)
        if self._sparse_dims:
            self._make_sparse(self._gradients.parameters)
        self._reduced.update(found.arrivals)
        self._rounds += 1

    @contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Wraps a wait for all ranks: errors of the transport become Horovod's, and the other ranks are told."""
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
        """Make gradients sparse again that were sparse before: some optimizers take no others."""
        for parameter in parameters:
            dims = self._sparse_dims.get(id(parameter))
            if dims is not None and parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad = parameter.grad.to_sparse(dims)
