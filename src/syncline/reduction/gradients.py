"""Watches a model's backward passes and has its gradients reduced meanwhile.

A hook on every parameter tells when its gradient is there; the first one of a pass also asks the autograd engine to
call back when the pass is over. So a gradient is final when `backward()` returns, whatever the loop looks like.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from syncline.codecs import Codec
from syncline.errors import DivergedError, IncompatibleError
from syncline.reduction.buckets import BucketSet
from syncline.reduction.coding import CodecState
from syncline.reduction.communicator import Communicator
from syncline.reduction.control import ControlNumbers, ExpectedControl
from syncline.reduction.diagnosis import Diagnosis
from syncline.reduction.pays import coded_seconds, dense_seconds, judge
from syncline.reduction.rounds import ReductionPass, Scaling
from syncline.world import allgather

__all__ = ["GradientReducer", "plain_name"]

logger = logging.getLogger("syncline")

Suspects = Sequence[tuple[Tensor | bool, str]]
"""What of this rank may not be finite, with its name."""
MAX_NAMED_PARAMETERS = 3
"""Largest number of one rank's parameters that an error names."""


class GradientReducer:
    """The gradients of one model: in buckets, with hooks. `finish(round)` says what happens when backward is over."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        exchange: Communicator,
        finish: Callable[[ReductionPass], None],
        *,
        bucket_bytes: int,
        check_finite: bool = False,
        sparse: frozenset[str] = frozenset(),
        idle: bool = False,
        codec: Codec | None = None,
        seed: int = 0,
        diagnose: int = 0,
        opens: Callable[[int], bool] | None = None,
        find_unused_parameters: bool = False,
        scaling: Scaling | None = None,
        kind: str = "gradients",
    ) -> None:
        self.names = [plain_name(name) for name in parameters]
        self.parameters = list(parameters.values())
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        self.exchange = exchange
        self.kind = kind
        """The name of what is reduced, for messages."""
        self.coding = (
            None
            if codec is None
            else CodecState(codec, self.names, self.parameters, exchange.rank, exchange.size, seed)
        )
        self.find_unused_parameters = find_unused_parameters
        """Whether a rank without a gradient that others have adds zeros to the mean; False: that is refused."""
        self.scaling = scaling
        self._opens = opens
        """Asked at the first gradient of a pass, that of this parameter: whether the pass is reduced, or adds up."""
        self._adding = -1
        """The pass that adds up."""
        self._diagnose = diagnose
        self._judged = False
        self.check_finite = check_finite
        self.weight = 1.0
        """What this rank's gradients count in the mean."""
        self.active = True
        self.careful = False
        """Whether ranks may have less data than others in this step: the same on every rank."""
        self.observed = False
        """Whether a first round has shown which gradients come, and in which order."""
        self._deferred: Callable[[], None] | None = None
        wanted = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self._finish = finish
        self._bucket_bytes = bucket_bytes
        self._order = [index for index in reversed(wanted) if self.names[index] not in sparse]
        self._used = list(self._order)
        self._lay_out_anew = True
        self._free: list[BucketSet] = []
        self._in_flight = 0
        self._round: ReductionPass | None = None
        self._pass: weakref.ref[Callable[[], None]] | None = None
        """The callback that ends the pass of this round; the autograd engine drops it when an error ends the pass."""
        self._latest: ReductionPass | None = None
        self._paused = False
        self._accumulated: dict[int, int] = {}
        """Parameters that have got gradients which nobody has reduced yet, and how many."""
        self._hooks: dict[int, _Hook] = {}
        if not idle:  # idle: a world of one
            for index, parameter in enumerate(self.parameters):
                if parameter.is_floating_point() or parameter.is_complex():  # no other dtype can have a gradient
                    self._hooks[index] = _Hook(parameter, partial(self._arrived, index))
        self._handles_seen = RemovableHandle.next_id
        exchange.team.transport.monitor.set_pending(self._owes)
        if self._hooks:
            self.lay_out()  # now, when there are no activations in memory yet

    def close(self) -> None:
        """Take the hooks off; gradients stay where they are."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self.judge_deferred()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up on this rank alone."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def empty_round(self, weighing: float = 0.0) -> ReductionPass:
        """Take part in the others' reductions with nothing to add; with a weight, as zeros that count in the mean."""
        weight, careful = self.weight, self.careful
        self.weight, self.active, self.careful = weighing, False, True  # the answer decides whether to go on
        try:
            found = self._begin()
            self._round = None
            found.end()
            found.complete()
        finally:
            self.weight, self.active, self.careful = weight, True, careful
        return found

    def reduce(self, tensors: Sequence[Tensor], weight: float = 1.0, active: bool = True) -> ReductionPass:
        """Begin to reduce tensors that came from no backward pass: one for each parameter that wants a gradient.

        They may be written to. `weight` is what they count in the mean; `active`: whether this rank has data still.
        """
        before = self.weight, self.active
        self.weight, self.active = weight, active
        try:
            found = self._begin()
            self._round = None
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
        """Begin to reduce the gradients that are there, outside of a backward pass."""
        found = self._begin()
        self._round = None
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and parameter.grad is not None:
                found.arrive(index)
        found.end()
        return found

    @property
    def accumulating(self) -> bool:
        """Whether gradients have added up that no step has reduced yet."""
        return bool(self._accumulated)

    def accumulated(self, index: int) -> int:
        """How many gradients of a parameter have added up that no step has reduced yet."""
        return self._accumulated.get(index, 0)

    def take_accumulated(self) -> set[int]:
        """The parameters that got a gradient in passes that add up, once."""
        taken, self._accumulated = set(self._accumulated), {}
        return taken

    def done(self, finished: ReductionPass) -> None:
        """A round is complete: its buckets may be used again, once its gradients are."""
        self._in_flight -= 1
        self._free.append(finished.buckets)
        control = finished.complete()
        if not self.observed and control.active:
            self._observe(finished, control)
        missing = [index for index in finished.buckets.outside if control.dense[index]]
        if not set(missing) <= set(self._order):
            self._order += [index for index in missing if index not in self._order]
            self._lay_out_anew = True

    def diagnosis(self) -> Diagnosis | None:
        """Of the round that begins, if it is one of those that are looked at."""
        if self.coding is None or not self._diagnose or self.coding.step % self._diagnose:
            return None
        return Diagnosis(self.exchange, self.coding.rng)

    def layout(self) -> dict[str, Any]:
        """The order in the buckets from the next step on, by name: it decides in which order numbers are added."""
        named = {key: [self.names[i] for i in order] for key, order in (("order", self._order), ("used", self._used))}
        return {**named, "anew": self._lay_out_anew, "observed": self.observed}

    def adopt(self, layout: Mapping[str, Any]) -> None:
        """Lay out the buckets as a run that was saved did: another order would round in another way."""
        numbers = {name: index for index, name in enumerate(self.names)}
        strangers = sorted({*layout["order"], *layout["used"]} - set(numbers))
        if strangers:
            raise IncompatibleError(f"the state is of another model: it has {strangers[0]}, which this one has not")
        self._order = [numbers[name] for name in layout["used"]]
        if self._hooks:
            self.lay_out()
        self._order = [numbers[name] for name in layout["order"]]
        self.observed, self._lay_out_anew = bool(layout["observed"]), bool(layout["anew"]) or not self._hooks

    def _label(self, number: int, items: Sequence[int]) -> str:
        """A bucket, for people."""
        names = [self.names[index] for index in items]
        shown = f"{names[0]}" if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "control"
        return f"bucket {number} ({shown})"

    def judge(self, control: ControlNumbers, suspects: Suspects, arrived: Sequence[bool], step: int) -> None:
        """Raise the same error on every rank if the control numbers report one. `step`: steps complete before."""
        if control.not_finite and self.check_finite:
            raise self._not_finite([name for bad, name in suspects if bad], step)
        if self.find_unused_parameters:
            return
        counts = [dense + sparse for dense, sparse in zip(control.dense, control.sparse, strict=True)]
        partial_use = [index for index, count in enumerate(counts) if 0 < count < control.active]
        if partial_use:
            index = partial_use[0]
            word = "idle" if not self.active else "has" if arrived[index] else "lacks"
            told = self._gather_text(word)
            users, others = ([r for r, text in enumerate(told) if text == w] for w in ("has", "lacks"))
            more = f" (and {len(partial_use) - 1} more parameters)" if len(partial_use) > 1 else ""
            raise IncompatibleError(
                f"{self.names[index]} got a gradient on ranks {users} but not on ranks {others}{more}: use the same "
                "parameters on every rank, or give distribute(find_unused_parameters=True), which counts zeros for the "
                "ranks without one"
            )

    def _not_finite(self, names: Sequence[str], step: int) -> DivergedError:
        """The error that names the parameters of this rank and of the others; every rank calls it."""
        more = len(names) - MAX_NAMED_PARAMETERS
        told = self._gather_text(", ".join(names[:MAX_NAMED_PARAMETERS]) + (f" and {more} more" if more > 0 else ""))
        found = {rank: text for rank, text in enumerate(told) if text}
        who = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
        rank, text = next(iter(found.items()), (None, ""))
        parameter = text.split(",")[0].split(" and ")[0] or None
        return DivergedError(
            f"NaN or Inf in the {self.kind} of {who or 'some rank'}", rank=rank, parameter=parameter, step=step
        )

    def read_later(self, numbers: Tensor, suspects: Suspects, arrived: Sequence[bool], step: int) -> None:
        """Copy the control numbers off the device without waiting for it; judge them before the next round."""
        self.judge_deferred()
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        then = list(arrived)

        def judge() -> None:
            event.synchronize()
            self.judge(ControlNumbers.read(copied), suspects, then, step)

        self._deferred = judge

    def judge_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred()

    # What the autograd engine tells.

    def _arrived(self, index: int, parameter: Tensor) -> None:
        found = self._round
        if found is None or self._paused or found.arrived[index]:
            self._arrived_first(index, found)
        else:
            found.arrive(index)

    def _arrived_first(self, index: int, found: ReductionPass | None) -> None:
        """The first gradient of a pass, one of an accumulation, or one too many."""
        task = torch._C._current_graph_task_id()
        if self._paused or task == self._adding:
            self._accumulated[index] = self._accumulated.get(index, 0) + 1
            return
        if found is not None:
            raise IncompatibleError(
                f"{self.names[index]} got its gradient twice in one backward pass, as in a layer that reentrant "
                "activation checkpointing runs more than once: give checkpoint(…, use_reentrant=False)"
            )
        if self._opens is not None and not self._opens(index):
            self._adding = task
            self._accumulated[index] = self._accumulated.get(index, 0) + 1
            return
        self._check_pass(index)
        moved = () if RemovableHandle.next_id == self._handles_seen else self._put_hooks_last()
        found = self._begin()
        over = partial(self._backward_is_over, found)
        self._pass = weakref.ref(over, self._pass_ended)
        Variable._execution_engine.queue_callback(over)
        if index in moved:  # the script's hooks on it are still called after this one in this pass
            self._accumulated[index] = 1
        else:
            found.arrive(index)

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
        self._round = None
        found.end()
        self._finish(found)

    def _pass_ended(self, over: weakref.ref[Callable[[], None]]) -> None:
        """The autograd engine has dropped the callback: an error has ended the pass of a round that is still open."""
        if self._round is not None and over is self._pass:
            self._in_flight -= 1
            self._round = None

    def _put_hooks_last(self) -> set[int]:
        """Move our hooks behind those that the script has registered since, which may still change a gradient.

        Returns the parameters whose hooks were moved.
        """
        self._handles_seen = RemovableHandle.next_id
        for index, parameter in enumerate(self.parameters):
            if hasattr(parameter, "_in_backward_optimizers"):
                raise self.stepped_in_backward(index)
        return {index for index, hook in self._hooks.items() if hook.put_last()}

    def check_hooks(self, index: int) -> None:
        """Raise where a hook of the script may have removed a parameter's gradient during backward."""
        if self._hooks and not self._hooks[index].alone:
            raise self.stepped_in_backward(index)

    def check_attached(self) -> None:
        """Refuse parameters whose tensors were exchanged: their hooks have gone with the old ones."""
        for index, hook in self._hooks.items():
            if not hook.attached:
                raise IncompatibleError(
                    f"the tensor of {self.names[index]} was exchanged for another after sl.distribute (by "
                    "torch.utils.swap_tensors, which load_state_dict() and model.to() use with "
                    "torch.__future__.set_swap_module_params_on_conversion(True)), and its gradients are no longer "
                    "averaged: change the model first, then call sl.distribute"
                )

    def stepped_in_backward(self, index: int) -> IncompatibleError:
        """The error for a hook that has used a gradient before the ranks have averaged it."""
        return IncompatibleError(
            f"a hook removes the gradient of {self.names[index]} while backward runs, before the workers have averaged "
            "it (an optimizer that steps in backward?): the mean is there when backward() returns, so step the "
            "optimizer then"
        )

    def converted(self, index: int, tensor: Tensor) -> IncompatibleError:
        """The error for a parameter whose dtype or device has changed since `distribute`."""
        dtype, device = self._kinds[index]
        return IncompatibleError(
            f"{self.names[index]} was {_kind(dtype, device)} in distribute and is {_kind(tensor.dtype, tensor.device)} "
            "now: convert the model first (model.to(…), model.half()), then make the optimizer and call distribute"
        )

    def _begin(self) -> ReductionPass:
        self.judge_deferred()
        self.exchange.stats.next_round()
        if self.coding is not None:
            if self._latest is not None:
                self._latest.land()
            self.coding.step += 1
        if self._lay_out_anew and not self._in_flight:
            self.lay_out()
        buckets = self._free.pop() if self._free else self._buckets(self._used)
        self._in_flight += 1
        found = self._round = ReductionPass(self, buckets)
        if self.coding is not None and self.coding.residual_needs_sum:
            self._latest = found
        return found

    def lay_out(self) -> None:
        """Make the buckets, and choose how each is sent."""
        self._lay_out_anew = False
        self._used = list(self._order)
        self._free = []  # first, so that there is room for the new ones
        found = self._buckets(self._order)
        self._free = [found]
        self.labels = [self._label(number, bucket.items) for number, bucket in enumerate(found.buckets)]
        self.usual = ExpectedControl(len(self.parameters), self.exchange.size, found.control)
        self.exchange.prepare(found.sizes(self.parameters))
        coded = [
            (bucket.codec, [self.parameters[index] for index in bucket.items])
            for bucket in found.buckets
            if bucket.codec is not None
        ]
        self.exchange.prepare_coded([(codec, [p.numel() for p in parameters]) for codec, parameters in coded])
        if self.coding is not None and coded and not self._judged:
            self._judged = True
            self.coding.warn_of_rounding()
            word = judge(self.exchange, coded)
            if word is not None and self.exchange.rank == 0:
                logger.warning("%s", word)

    def predict(self) -> dict[str, float]:
        """What a step is expected to take on this network: sending, and the codec's own work. Every rank calls it."""
        if self.exchange.size == 1 or not self._hooks:
            return {"communication": 0.0, "codec": 0.0, "buckets": 0}
        held = [
            (bucket.codec, [self.parameters[i] for i in bucket.items])
            for bucket in self._buckets(self._order).buckets
            if bucket.items
        ]
        dense = [sum(parameter.nbytes for parameter in parameters) for codec, parameters in held if codec is None]
        coded = [(codec, parameters) for codec, parameters in held if codec is not None]
        sending, working = coded_seconds(self.exchange, coded) if coded else (0.0, 0.0)
        told = {"communication": sending + dense_seconds(self.exchange, dense), "codec": working, "buckets": len(held)}
        return {key: float(value) for key, value in told.items()}

    def _buckets(self, order: Sequence[int]) -> BucketSet:
        codecs = None if self.coding is None else self.coding.picked
        return BucketSet(self.parameters, order, self._bucket_bytes, codecs)

    def _observe(self, finished: ReductionPass, control: ControlNumbers) -> None:
        """Order the buckets as the gradients really came on rank 0; leave out what no rank has used."""
        self.observed = True
        used = [index for index, count in enumerate(control.dense) if count]
        came = [index for index in finished.arrivals if index in set(used)]
        order = came if sorted(came) == used else [index for index in self._order if index in set(used)]
        if sorted(order) != used:
            order = list(reversed(used))
        shared = self.exchange.from_root(torch.tensor(order, dtype=torch.int64)).tolist()
        if shared != self._order:
            self._order = shared
            self._lay_out_anew = True

    def _owes(self) -> str:
        """For ranks that wait: what this one has not delivered."""
        found = self._round
        if found is None:
            return "any gradient of its next step (it is outside backward)"
        index = found.owed()
        return "" if index is None else self.names[index]

    def _gather_text(self, text: str) -> list[str]:
        size = self.exchange.size
        if size == 1:
            return [text]
        data = text.encode()[:400].ljust(400, b"\0")
        table = allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1), group=self.exchange.team)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


class _Hook:
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
        """Which tensor the parameter is, for torch: the one that has the hook."""
        self._table: dict[int, Any] = parameter._post_accumulate_grad_hooks
        """All hooks of the parameter, in the order in which they are called."""

    @property
    def attached(self) -> bool:
        """Whether the parameter still has it."""
        return bool(self._parameter._cdata == self._tensor)

    @property
    def alone(self) -> bool:
        """Whether the parameter has no hook of the script's."""
        others = [fn for number, fn in self._table.items() if number != self._handle.id]
        return all(str(getattr(fn, "__module__", "")).startswith("syncline.") for fn in others)

    def put_last(self) -> bool:
        """Put this hook behind all others. Returns whether it was not there already."""
        if next(reversed(self._table)) == self._handle.id:
            return False
        del self._table[self._handle.id]
        self._table[self._handle.id] = self._fn
        return True

    def remove(self) -> None:
        self._handle.remove()
