"""Watches a model's backward passes and reduces its gradients meanwhile.

A hook on every parameter reports its gradient. The first one of a pass also asks autograd to call back when the pass
is over. So gradients are final when `backward()` returns, whatever the training loop looks like.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from syncline.codecs import Codec
from syncline.errors import DivergedError, IncompatibleError
from syncline.reduction.buckets import BUCKET_BYTES, BucketSet
from syncline.reduction.codec_cost import compressed_seconds, dense_seconds, slowdown_warning
from syncline.reduction.codec_state import CodecDiagnosis, CodecState
from syncline.reduction.communicator import Communicator
from syncline.reduction.control import ControlNumbers, ExpectedControl
from syncline.reduction.reduction_pass import ReductionPass
from syncline.world import RepeatedCall, allgather, barrier

__all__ = ["GradientReducer", "ReducerOptions", "ReductionPolicy", "Scaling", "plain_name"]

logger = logging.getLogger("syncline")

Suspects = Sequence[tuple[Tensor | bool, str]]
"""Gradients of this rank that may hold NaN or Inf: a flag, and the name."""
MAX_NAMED_PARAMETERS = 3
"""Largest number of one rank's parameters that an error names."""
MAX_GATHERED_TEXT_BYTES = 400


@dataclass(frozen=True)
class Scaling:
    """Factors of gradients before and after they are summed. Without it gradients are divided by the ranks before."""

    before: float
    after: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ReductionPolicy:
    """What the user of a reducer decides. The defaults reduce every backward pass to the mean over the ranks."""

    after_backward: Callable[[ReductionPass], None] | None = None
    """Called when a backward pass is over. It completes the pass now or later. None: only `reduce` is called."""
    reduces_pass: Callable[[int], bool] | None = None
    """Called at the first gradient of a pass, with the index of its parameter. False: gradients only accumulate."""
    scaling: Scaling | None = None
    subject: str = "gradients"
    """What is reduced, for messages."""


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of a `GradientReducer`."""

    codec: Codec | None = None
    bucket_bytes: int = BUCKET_BYTES
    check_finite: bool = False
    """Raise an error on every rank if a gradient holds NaN or Inf."""
    find_unused_parameters: bool = False
    """A rank without a gradient that others have adds zeros to the mean. False: that is an error."""
    sparse: frozenset[str] = frozenset()
    """Names of parameters whose gradients are known to be sparse."""
    attach_hooks: bool = True
    """False: gradients are passed to `reduce`, or there is one rank and nothing to reduce."""
    seed: int = 0
    """Of the codec's random bits."""
    diagnose_every: int = 0
    """Steps between two records of the codec's error. 0: never."""


class GradientReducer:
    """Reduces the gradients of one model, in buckets, while backward runs."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        communicator: Communicator,
        policy: ReductionPolicy,
        options: ReducerOptions,
    ) -> None:
        self.names = [plain_name(name) for name in parameters]
        self.parameters = list(parameters.values())
        self.communicator = communicator
        self.policy = policy
        self.check_finite = options.check_finite
        self.find_unused_parameters = options.find_unused_parameters
        self.elastic = communicator.world.elastic
        """The changing team of an elastic world; None if the ranks are fixed."""
        self.weight = 1.0
        """The weight of this rank's gradients in the mean."""
        self.active = True
        """This rank has data in this step."""
        self.uneven = False
        """Some ranks may have less data than others in this step. The same on every rank."""
        self.observed = False
        """A first pass has shown which gradients arrive, and in which order."""
        self.completed = 0
        """The number of passes whose means this rank has."""
        self.codec_state: CodecState | None = None
        if options.codec is not None:
            ranks = (communicator.rank, communicator.size)
            self.codec_state = CodecState(options.codec, self.names, self.parameters, *ranks, options.seed)
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        self._diagnose_every = options.diagnose_every
        self._cost_checked = False
        self._deferred_check: Callable[[], None] | None = None
        wanted = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self._bucket_bytes = options.bucket_bytes
        self._order = [index for index in reversed(wanted) if self.names[index] not in options.sparse]
        """The order of gradients in the buckets from the next layout on."""
        self._used_order = list(self._order)
        self._layout_outdated = True
        self._free: list[BucketSet] = []
        self._in_flight = 0
        """Passes that are not released yet."""
        self._pass: ReductionPass | None = None
        self._pass_callback: weakref.ref[Callable[[], None]] | None = None
        """Ends the current pass. Autograd drops the callback when an error ends the pass."""
        self._previous: ReductionPass | None = None
        """The pass before, if its sums decide the residuals."""
        self._paused = False
        self._accumulating_task = -1
        """The graph task of a pass whose gradients only accumulate."""
        self._accumulated: dict[int, int] = {}
        """Number of gradients of each parameter that were accumulated and not reduced yet."""
        self._hooks: dict[int, _GradientHook] = self._attach_hooks() if options.attach_hooks else {}
        self._handles_seen = RemovableHandle.next_id
        communicator.group.transport.monitor.set_undelivered(self._missing_text)
        if self._hooks:  # now, while there are no activations in memory
            try:
                self._lay_out_anew()
            except BaseException:  # a rank is lost
                self.close()
                raise

    @property
    def attached(self) -> bool:
        """Whether backward passes are watched and reduced."""
        return bool(self._hooks)

    def close(self) -> None:
        """Remove the hooks. Gradients stay as they are."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.check_deferred()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate gradients on this rank without reducing them."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def join_idle(self, weight: float = 0.0) -> ReductionPass:
        """Take part in the others' reductions without data; with a weight, zeros count in the mean."""
        before = self.weight, self.uneven
        self.weight, self.active, self.uneven = weight, False, True  # the result decides whether training continues
        try:
            found = self._begin()
            found.end()
            found.complete()
        finally:
            (self.weight, self.uneven), self.active = before, True
        return found

    def reduce(self, tensors: Sequence[Tensor], weight: float = 1.0, active: bool = True) -> ReductionPass:
        """Start to reduce tensors of no backward pass: one for each parameter that requires a gradient.

        They may be overwritten. `weight` is their weight in the mean. `active`: this rank still has data.
        """
        before = self.weight, self.active
        self.weight, self.active = weight, active
        try:
            found = self._begin()
            wanted = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
            for index, tensor in zip(wanted, tensors, strict=True):
                if tensor.dtype != self.parameters[index].dtype:
                    raise self.converted(index, tensor)
                self.parameters[index].grad = tensor
                found.arrive(index)
            found.end()
        finally:
            self.weight, self.active = before
        return found

    def reduce_now(self) -> ReductionPass:
        """Start to reduce the present gradients, outside of a backward pass."""
        found = self._begin()
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and parameter.grad is not None:
                found.arrive(index)
        found.end()
        return found

    def release(self, finished: ReductionPass) -> None:
        """A pass is complete and its gradients are used: its buckets may be reused."""
        self._in_flight -= 1
        self._free.append(finished.buckets)
        control = finished.complete()
        if not self.observed and control.active:
            self._observe(finished, control)
        if finished.buckets.outside:
            missing = [index for index in finished.buckets.outside if control.dense[index]]
            added = [index for index in missing if index not in self._order]
            if added:
                self._order += added
                self._layout_outdated = True

    # Accumulation.

    @property
    def accumulating(self) -> bool:
        """True if gradients were accumulated that no step has reduced yet."""
        return bool(self._accumulated)

    def accumulated(self, index: int) -> int:
        """Number of accumulated gradients of a parameter that no step has reduced yet."""
        return self._accumulated.get(index, 0)

    def take_accumulated(self) -> set[int]:
        """The parameters with accumulated gradients; afterwards there are none."""
        taken, self._accumulated = set(self._accumulated), {}
        return taken

    # The bucket layout.

    def lay_out(self, choose: bool = True) -> None:
        """Create the buckets. `choose`: choose how each is reduced, together with the other ranks."""
        self._layout_outdated = False
        self._used_order = list(self._order)
        self._free = []  # first, to free memory for the new ones
        found = self._new_buckets(self._order)
        self._free = [found]
        communicator = self.communicator
        self.labels = [self._label(number, bucket.items) for number, bucket in enumerate(found.buckets)]
        self._expect_control(found.control)
        if not choose:
            return
        communicator.prepare(found.sizes(self.parameters))
        encoded = [bucket for bucket in found.buckets if bucket.codec is not None]
        communicator.prepare_compressed([(bucket.codec, bucket.sizes) for bucket in encoded if bucket.codec])
        if self.codec_state is not None and encoded and not self._cost_checked:
            self._cost_checked = True
            self.codec_state.warn_of_rounding()
            warning = slowdown_warning(communicator, self._encoded(found))
            if warning is not None and communicator.rank == 0:
                logger.warning("%s", warning)

    def _expect_control(self, like: Tensor) -> None:
        elastic = self.elastic is not None
        self.expected = ExpectedControl(len(self.parameters), self.communicator.size, like, elastic)

    def _lay_out_anew(self) -> None:
        """Lay out together with the other ranks, which may lose one meanwhile."""
        if self.elastic is None:
            self.lay_out()
        else:
            self.elastic.run(self.communicator.world, RepeatedCall(self._lay_out_together))

    def _lay_out_together(self) -> None:
        """Lay out in an elastic world: the choice of an algorithm may communicate, and no rank ends before another."""
        self.lay_out()
        barrier(self.communicator.group)

    def layout(self) -> dict[str, Any]:
        """The order of parameters in the buckets, by name: it decides the order of additions."""
        orders = (("order", self._order), ("used", self._used_order))
        named = {key: [self.names[index] for index in order] for key, order in orders}
        return {**named, "anew": self._layout_outdated, "observed": self.observed}

    def load_layout(self, layout: Mapping[str, Any]) -> None:
        """Use the layout of a saved run: another order would round differently."""
        numbers = {name: index for index, name in enumerate(self.names)}
        unknown = sorted({*layout["order"], *layout["used"]} - set(numbers))
        if unknown:
            raise IncompatibleError(f"the state is of another model: it has {unknown[0]}, which this one has not")
        self._order = [numbers[name] for name in layout["used"]]
        if self._hooks or self.elastic is not None:
            self.lay_out(choose=self.elastic is None)  # a newcomer takes the choices of the others
        self._order = [numbers[name] for name in layout["order"]]
        self.observed = bool(layout["observed"])
        self._layout_outdated = bool(layout["anew"]) or (not self._hooks and self.elastic is None)

    def rebind(self) -> None:
        """Continue with another team of an elastic world, in the same buckets."""
        if self.codec_state is not None:
            self.codec_state.use_ranks(self.communicator.rank, self.communicator.size)
        if self._free or self._in_flight:  # there is a layout
            self._expect_control(self.expected.own)

    def predict(self) -> dict[str, float]:
        """Predicted seconds of a step on this network: sending, and the codec's work. Every rank calls it."""
        if self.communicator.size == 1 or not self._hooks:
            return {"communication": 0.0, "codec": 0.0, "buckets": 0}
        found = self._new_buckets(self._order)
        buckets = [bucket for bucket in found.buckets if bucket.items]
        plain = [bucket.items for bucket in buckets if bucket.codec is None]
        dense = [sum(self.parameters[index].nbytes for index in items) for items in plain]
        encoded = self._encoded(found)
        sending, working = compressed_seconds(self.communicator, encoded) if encoded else (0.0, 0.0)
        sending += dense_seconds(self.communicator, dense)
        return {"communication": float(sending), "codec": float(working), "buckets": float(len(buckets))}

    def _new_buckets(self, order: Sequence[int]) -> BucketSet:
        codecs = None if self.codec_state is None else self.codec_state.codecs
        return BucketSet(self.parameters, order, self._bucket_bytes, codecs, elastic=self.elastic is not None)

    def _encoded(self, found: BucketSet) -> list[tuple[Codec, list[Parameter]]]:
        """The codec and the parameters of each bucket that has a codec."""
        return [
            (bucket.codec, [self.parameters[index] for index in bucket.items])
            for bucket in found.buckets
            if bucket.codec is not None
        ]

    def _label(self, number: int, items: Sequence[int]) -> str:
        """A bucket's name in messages and traces."""
        names = [self.names[index] for index in items]
        shown = f"{names[0]}" if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "control"
        return f"bucket {number} ({shown})"

    def _observe(self, finished: ReductionPass, control: ControlNumbers) -> None:
        """Order the buckets as gradients arrived on rank 0; leave out parameters that no rank has used."""
        self.observed = True
        used = [index for index, count in enumerate(control.dense) if count]
        arrived = [index for index in finished.arrivals if index in set(used)]
        order = arrived if sorted(arrived) == used else [index for index in self._order if index in set(used)]
        if sorted(order) != used:
            order = list(reversed(used))
        shared = self.communicator.from_root(torch.tensor(order, dtype=torch.int64)).tolist()
        if shared != self._order:
            self._order = shared
            self._layout_outdated = True

    # Errors that all ranks raise together.

    def check(self, control: ControlNumbers, suspects: Suspects, arrived: Sequence[bool], step: int) -> None:
        """Raise the same error on every rank if the control numbers report one. `step`: steps complete before."""
        if control.not_finite and self.check_finite:
            raise self._nonfinite_error([name for bad, name in suspects if bad], step)
        if self.find_unused_parameters:
            return
        counts = [dense + sparse for dense, sparse in zip(control.dense, control.sparse, strict=True)]
        partial_use = [index for index, count in enumerate(counts) if 0 < count < control.active]
        if partial_use:
            index = partial_use[0]
            status = "idle" if not self.active else "has" if arrived[index] else "lacks"
            texts = self._gather_text(status)
            users, others = ([rank for rank, text in texts.items() if text == w] for w in ("has", "lacks"))
            more = f" (and {len(partial_use) - 1} more parameters)" if len(partial_use) > 1 else ""
            raise IncompatibleError(
                f"{self.names[index]} got a gradient on ranks {users} but not on ranks {others}{more}: use the same "
                "parameters on every rank, or give find_unused_parameters=True, which counts zeros for the "
                "ranks without one"
            )

    def read_later(self, numbers: Tensor, suspects: Suspects, arrived: Sequence[bool], step: int) -> None:
        """Copy the control numbers off the device without waiting for it; check them before the next pass."""
        self.check_deferred()
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        then = list(arrived)

        def check() -> None:
            event.synchronize()
            self.check(ControlNumbers.read(copied), suspects, then, step)

        self._deferred_check = check

    def check_deferred(self) -> None:
        """Check the control numbers of the previous pass, if that was postponed."""
        deferred, self._deferred_check = self._deferred_check, None
        if deferred is not None:
            deferred()

    def diagnosis(self) -> CodecDiagnosis | None:
        """The diagnosis of the pass that begins, if one is due."""
        state, every = self.codec_state, self._diagnose_every
        return (
            None if state is None or not every or state.step % every else CodecDiagnosis(self.communicator, state.rng)
        )

    def _nonfinite_error(self, names: Sequence[str], step: int) -> DivergedError:
        """The error that names the parameters of all ranks. Every rank calls it."""
        more = len(names) - MAX_NAMED_PARAMETERS
        own = ", ".join(names[:MAX_NAMED_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
        found = {rank: text for rank, text in self._gather_text(own).items() if text}
        who = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
        rank, text = next(iter(found.items()), (None, ""))
        parameter = text.split(",")[0].split(" and ")[0] or None
        message = f"NaN or Inf in the {self.policy.subject} of {who or 'some rank'}"
        return DivergedError(message, rank=rank, parameter=parameter, step=step)

    def _gather_text(self, text: str) -> dict[int, str]:
        """The texts of all ranks, by their numbers in the world."""
        ranks = self.communicator.group.ranks
        if self.communicator.size == 1:
            return {ranks[0]: text}
        data = text.encode()[:MAX_GATHERED_TEXT_BYTES].ljust(MAX_GATHERED_TEXT_BYTES, b"\0")
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1)
        table = allgather(row, group=self.communicator.group)
        texts = (bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table)
        return dict(zip(ranks, texts, strict=True))

    def converted(self, index: int, tensor: Tensor) -> IncompatibleError:
        """The error for a parameter whose dtype or device has changed since `distribute`."""
        dtype, device = self._kinds[index]
        return IncompatibleError(
            f"{self.names[index]} was {_kind(dtype, device)} in distribute and is {_kind(tensor.dtype, tensor.device)} "
            "now: convert the model first (model.to(…), model.half()), then make the optimizer and call distribute"
        )

    def _missing_text(self) -> str:
        """For ranks that wait: what this one has not sent yet."""
        found = self._pass
        if found is None:
            return "any gradient of its next step (it is outside backward)"
        index = found.missing_parameter()
        return "" if index is None else self.names[index]

    # Backward passes.

    def _attach_hooks(self) -> dict[int, _GradientHook]:
        # Only these dtypes can have a gradient.
        trainable = [p.is_floating_point() or p.is_complex() for p in self.parameters]
        return {
            index: _GradientHook(parameter, partial(self._gradient_arrived, index))
            for index, parameter in enumerate(self.parameters)
            if trainable[index]
        }

    def _gradient_arrived(self, index: int, parameter: Tensor) -> None:
        found = self._pass
        if found is None or self._paused or found.arrived[index]:
            self._first_gradient(index, found)
        else:
            found.arrive(index)

    def _first_gradient(self, index: int, found: ReductionPass | None) -> None:
        """The first gradient of a pass, one that only accumulates, or an error: the second of a pass."""
        task = torch._C._current_graph_task_id()
        if self._paused or task == self._accumulating_task:
            self._accumulated[index] = self._accumulated.get(index, 0) + 1
            return
        if found is not None:
            raise IncompatibleError(
                f"{self.names[index]} got its gradient twice in one backward pass, as in a layer that reentrant "
                "activation checkpointing runs more than once: give checkpoint(…, use_reentrant=False)"
            )
        reduces_pass = self.policy.reduces_pass
        if reduces_pass is not None and not reduces_pass(index):
            self._accumulating_task = task
            self._accumulated[index] = self._accumulated.get(index, 0) + 1
            return
        self._check_pass(index)
        moved = () if RemovableHandle.next_id == self._handles_seen else self._move_hooks_last()
        found = self._pass = self._begin()
        callback = partial(self._backward_is_over, found)
        self._pass_callback = weakref.ref(callback, self._pass_ended)
        Variable._execution_engine.queue_callback(callback)
        if index in moved:  # in this pass the script's hooks on it run after ours
            self._accumulated[index] = 1
        else:
            found.arrive(index)

    def _begin(self) -> ReductionPass:
        if self._deferred_check is not None:
            self.check_deferred()
        self.communicator.stats.next_round()
        state = self.codec_state
        if state is not None:
            if self._previous is not None:
                self._previous.wait_for_sums()
            state.step += 1
        if self._layout_outdated and not self._in_flight:
            self._lay_out_anew()
        buckets = self._free.pop() if self._free else self._new_buckets(self._used_order)
        self._in_flight += 1
        found = ReductionPass(self, buckets)
        if state is not None and state.residual_needs_sum:
            self._previous = found
        return found

    def _check_pass(self, index: int) -> None:
        """Refuse a pass whose gradients could not be reduced. Called at the first gradient of the pass."""
        parameter = self.parameters[index]
        if (parameter.dtype, parameter.device) != self._kinds[index]:
            raise self.converted(index, parameter)
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
            raise IncompatibleError(
                "compiled autograd does not tell when a backward pass is over, so gradients could not be averaged: "
                "leave torch._dynamo.config.compiled_autograd off; torch.compile(model) works without it"
            )

    def _backward_is_over(self, found: ReductionPass) -> None:
        self._pass = None
        found.end()
        after_backward = self.policy.after_backward
        assert after_backward is not None, "a reducer with hooks has a policy for the end of backward"
        after_backward(found)

    def _pass_ended(self, callback: weakref.ref[Callable[[], None]]) -> None:
        """Autograd has dropped the callback. If the pass is still open, an error has ended it."""
        if self._pass is not None and callback is self._pass_callback:
            self._in_flight -= 1
            self._pass = None

    # Hooks.

    def _move_hooks_last(self) -> set[int]:
        """Move our hooks behind those that the script has registered since: these may still change a gradient.

        Returns the parameters whose hooks were moved.
        """
        self._handles_seen = RemovableHandle.next_id
        for index, parameter in enumerate(self.parameters):
            if hasattr(parameter, "_in_backward_optimizers"):
                raise self._stepped_in_backward(index)
        return {index for index, hook in self._hooks.items() if hook.move_last()}

    def check_hooks(self, index: int) -> None:
        """Raise if a hook of the script may have removed a parameter's gradient during backward."""
        if self._hooks and not self._hooks[index].alone:
            raise self._stepped_in_backward(index)

    def check_attached(self) -> None:
        """Refuse parameters whose tensors were swapped: their hooks have gone with the old ones."""
        for index, hook in self._hooks.items():
            if not hook.attached:
                raise IncompatibleError(
                    f"the tensor of {self.names[index]} was exchanged for another after sl.distribute (by "
                    "torch.utils.swap_tensors, which load_state_dict() and model.to() use with "
                    "torch.__future__.set_swap_module_params_on_conversion(True)), and its gradients are no longer "
                    "averaged: change the model first, then call sl.distribute"
                )

    def _stepped_in_backward(self, index: int) -> IncompatibleError:
        return IncompatibleError(
            f"a hook removes the gradient of {self.names[index]} while backward runs, before the workers have averaged "
            "it (an optimizer that steps in backward?): the mean is there when backward() returns, so step the "
            "optimizer then"
        )


def plain_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


class _GradientHook:
    """A hook that is called after a gradient was accumulated; on frozen parameters too, which may be trained later."""

    def __init__(self, parameter: Parameter, fn: Callable[[Tensor], None]) -> None:
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._handle = register(fn)
        finally:
            if frozen:
                parameter.requires_grad_(False)
        self._fn = fn
        self._parameter = parameter
        self._tensor: int = parameter._cdata
        """The tensor that has the hook: torch may swap the parameter's tensor."""
        self._table: dict[int, Any] = parameter._post_accumulate_grad_hooks
        """All hooks of the parameter, in the order of their calls."""

    @property
    def attached(self) -> bool:
        """The parameter still has this hook."""
        return bool(self._parameter._cdata == self._tensor)

    @property
    def alone(self) -> bool:
        """The script has no hook on the parameter."""
        others = [fn for number, fn in self._table.items() if number != self._handle.id]
        return all(str(getattr(fn, "__module__", "")).startswith("syncline.") for fn in others)

    def move_last(self) -> bool:
        """Move this hook behind all others. Returns False if it was last already."""
        if next(reversed(self._table)) == self._handle.id:
            return False
        del self._table[self._handle.id]
        self._table[self._handle.id] = self._fn
        return True

    def remove(self) -> None:
        self._handle.remove()
