"""One backward pass: gradients arrive, buckets leave in index order, the sums come back.

arrive(i) … arrive(j)      a bucket is full: its reduction begins while backward goes on
end()                      backward is over: what is missing is filled up, the rest leaves
complete()                 wait; now every rank holds the same bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncline.codecs import TensorSlice
from syncline.errors import DivergedError, IncompatibleError
from syncline.reduction.buckets import Bucket, BucketSet, flattened, owns_memory
from syncline.reduction.coded import Coded
from syncline.reduction.coding import ALIKE
from syncline.reduction.communicator import Reduction
from syncline.reduction.control import ControlNumbers, write_control
from syncline.reduction.line import Line, Plain
from syncline.reduction.plans import work_for
from syncline.reduction.sparse import sum_sparse

if TYPE_CHECKING:
    from syncline.reduction.gradients import GradientReducer

__all__ = ["ReductionPass", "Scaling"]

AT_ONCE = 1 << 19
"""Bytes of gradients that may wait to be put into their buckets: while they do, they are in memory twice."""
NEVER = 1 << 62
"""What is missing of those that have no bucket."""


@dataclass(frozen=True)
class Scaling:
    """What gradients are multiplied with before they are summed and after it, in place of 1/ranks before it."""

    before: float
    after: float = 1.0


class ReductionPass:
    """The state of one backward pass on this rank."""

    def __init__(self, gradients: GradientReducer, buckets: BucketSet) -> None:
        self.buckets = buckets
        self.arrivals: list[int] = []
        """Parameters in the order in which their gradients came."""
        self.control: ControlNumbers | None = None
        self._gradients = gradients
        self._exchange = gradients.exchange
        self._step = gradients.exchange.stats.steps
        told, size = gradients.scaling, gradients.exchange.size
        self._scale = gradients.weight / size if told is None else gradients.weight * told.before
        self._after = 1.0 if told is None else told.after
        self._after_coded = 1.0 if told is None else told.before * told.after * size  # a codec's sum is a mean already
        self.arrived = [False] * len(gradients.parameters)
        """Whether the autograd engine has reached a parameter."""
        self._absent: set[int] = set()
        """Parameters that it has reached without a gradient: a Function's backward returned None for them."""
        self._queue: list[int] = []
        """Gradients that are there and not yet in their buckets."""
        self._queued = 0
        self._bytes = buckets.bytes
        self._homes = buckets.homes
        self._missing = [*(len(bucket.items) for bucket in buckets.buckets), NEVER]
        self._reductions: list[Reduction | Coded | Plain] = []
        self._coding = gradients.coding
        self._line = None if self._coding is None else Line(gradients.exchange)
        self._diagnosis = gradients.diagnosis()
        self._rows: dict[int, Tensor] = {}
        """Of coded gradients that are not float32 themselves: what the codec works on."""
        self._kept: dict[int, Tensor] = {}
        self._sparse: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}
        self._large: dict[int, Tensor] = {}
        self._suspects: list[tuple[Tensor | bool, str]] = []
        """What of this rank was not finite: perhaps, on a device that was not asked yet."""
        self._bad: Tensor | None = None
        # A gradient that has no place in the buckets may come last, and the control numbers must know of it.
        self._hold = any(gradients.parameters[index].requires_grad for index in buckets.outside)

    @property
    def launched(self) -> int:
        """How many buckets have left."""
        return len(self._reductions)

    def owed(self) -> int | None:
        """The first parameter that the next bucket waits for; None when all have left."""
        if self.launched == len(self.buckets.buckets):
            return None
        items = self.buckets.buckets[self.launched].items
        return next((index for index in items if not self.arrived[index]), None)

    def arrive(self, index: int) -> None:
        """The gradient of a parameter is there. Called between the operations of backward, so as short as can be."""
        self.arrived[index] = True
        self.arrivals.append(index)
        self._queue.append(index)
        self._queued += self._bytes[index]
        home = self._homes[index]
        missing = self._missing[home] = self._missing[home] - 1
        if missing == 0:
            self._collect()
            self._launch()
        elif self._queued > AT_ONCE:
            self._collect()

    def end(self) -> None:
        """Backward is over: fill up what has not come, and let the rest leave."""
        for index in self._gradients.take_accumulated() if self._gradients.active else ():
            if not self.arrived[index] and self._gradients.parameters[index].grad is not None:
                self.arrive(index)
        self._collect()
        for index in self.buckets.home:
            if not self.arrived[index]:
                self._fill(index)
        self._hold = False
        self._missing = [0] * len(self._missing)
        self._launch()
        if self._line is not None:
            self._line.close()

    def complete(self) -> ControlNumbers:
        """Wait for the sums and make means of them; what the ranks told one another about this step."""
        if self.control is not None:
            return self.control
        now = self._exchange.world.runtime.now
        start = now()
        if self._line is not None:
            self._wait_for_codecs()
            self._take_control()
        else:
            for reduction in self._reductions:
                reduction.wait()  # type: ignore[union-attr]
        self._exchange.stats.waited(start, now())
        self.control = control = self._read_control()
        if self._diagnosis is not None and not control.not_finite:
            self._diagnosis.tell()
        size = self._exchange.size
        rescale = size / control.weight if control.weight > 0 and control.weight != size else 1.0
        for bucket in self.buckets.buckets:
            if bucket.codec is not None:
                self._finish_coded(bucket, rescale * self._after_coded, poisoned=control.not_finite > 0)
            elif rescale * self._after != 1.0:
                self._data(bucket).mul_(rescale * self._after)
        for index, gradient in self._kept.items():
            if not control.dense[index]:  # else this rank had nothing to add, and the others' mean counts
                self.buckets.views[index].copy_(gradient)
        if any(control.sparse) or self.buckets.outside:
            self._sum_the_others(control, self._scale * self._after * rescale)
        if self._gradients.find_unused_parameters and self._gradients.active and self._lacks:
            for index in self.buckets.home:
                if control.dense[index] and not self._has(index):
                    self._gradients.parameters[index].grad = self._gradient(index)
        return control

    def _wait_for_codecs(self) -> None:
        assert self._line is not None, "there is a codec"
        try:
            self._line.wait()
        except DivergedError as error:  # a codec does not count the steps
            raise error.at_step(self._step) from None

    def _has(self, index: int) -> bool:
        """Whether this rank has a new gradient of a parameter."""
        return self.arrived[index] and index not in self._absent

    @property
    def _lacks(self) -> bool:
        """Whether a gradient that others may have has not come here."""
        return len(self.arrivals) < len(self.arrived) and not all(map(self._has, self.buckets.home))

    def _read_control(self) -> ControlNumbers:
        """What the ranks told. On a GPU that would be a wait for the device: where nothing hangs on it, it is read
        before the next round, and what is wrong is raised then. With a codec it is read now: some NaN was left out.
        """
        gradients, numbers = self._gradients, self.buckets.control
        needed = gradients.careful or self._coding is not None or not gradients.observed
        if numbers.is_cuda and not (needed or self.buckets.outside):
            gradients.read_later(numbers, self._suspects, self._present(), self._step)
            return ControlNumbers.read(numbers) if self._lacks else gradients.usual.control  # who has it?
        if not numbers.is_cuda and torch.equal(numbers, gradients.usual.summed):
            return gradients.usual.control
        control = ControlNumbers.read(numbers)
        gradients.judge(control, self._suspects, self._present(), self._step)
        return control

    def _present(self) -> list[bool]:
        """For each parameter whether this rank has a new gradient."""
        return [self._has(index) for index in range(len(self.arrived))] if self._absent else self.arrived

    def install(self) -> None:
        """Make these the gradients of the parameters: None for those that no rank had one of."""
        control = self.complete()
        for index, parameter in enumerate(self._gradients.parameters):
            if control.sparse[index]:
                parameter.grad = self._sparse[index]
            elif control.dense[index]:
                parameter.grad = self._gradient(index)
            else:
                parameter.grad = None

    def _fill(self, index: int) -> None:
        """A parameter without a new gradient adds nothing; the gradient it may still have from before is kept.

        With `find_unused_parameters` the one from before is added: it is a part of the other ranks' new ones.
        """
        added = self._counted_before(index, torch.strided)
        parameter = self._gradients.parameters[index]
        if index in self.buckets.large:
            row = self._large[index] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if added is not None:
                torch.mul(added, self._scale_of(index), out=row)
            return
        view, gradient = self.buckets.views[index], parameter.grad
        if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() == view.data_ptr():
            self._kept[index] = view.clone()
        if added is None:
            view.zero_()
        elif added.data_ptr() != view.data_ptr():
            view.copy_(added)

    def _counted_before(self, index: int, layout: torch.layout) -> Tensor | None:
        """The gradient from before this pass, where it counts in the mean; None where it does not, or there is none."""
        gradient = self._gradients.parameters[index].grad
        if not (self._gradients.find_unused_parameters and self._gradients.active) or gradient is None:
            return None
        return gradient.detach() if gradient.layout == layout else None

    def _launch(self) -> None:
        """Let full buckets leave, in index order: the same on every rank."""
        buckets = self.buckets.buckets
        while self.launched < len(buckets) and self._missing[self.launched] == 0:
            number = self.launched
            last = number == len(buckets) - 1
            if last and self._hold:
                return
            bucket = buckets[number]
            if bucket.codec is not None:
                self._encode(number, bucket, last)
                continue
            if bucket.data is not None and self._scale != 1.0:
                bucket.data.mul_(self._scale)
            if self._gradients.check_finite and bucket.items:
                self._check(self._data(bucket), bucket.items)
            if last and self._line is None:
                self.write_control()
            flat = self._data(bucket) if bucket.flat is None else bucket.flat
            if self._line is None:
                self._reductions.append(self._exchange.start(flat, self._gradients.labels[number]))
            else:
                # Those before it may still be looked at in the comm task: what it finds belongs to the control numbers.
                before = self.write_control if last else None
                self._reductions.append(Plain(self._exchange, flat, self._gradients.labels[number], before))
                self._line.add(self._reductions[-1])  # type: ignore[arg-type]

    def _encode(self, number: int, bucket: Bucket, last: bool) -> None:
        """Let a bucket leave by its codec. NaN and Inf stay here, for codecs cannot say them; all ranks are told."""
        coding, line, codec = self._coding, self._line, bucket.codec
        assert coding is not None, "there is a codec"
        assert line is not None, "so there is a line"
        assert codec is not None, "of this bucket"
        parts = []
        for index in bucket.items:
            row = flattened(self._large[index])
            if row.dtype != torch.float32:
                row = self._rows[index] = row.float()
            parts.append(coding.part(index, row, self._has(index) and index not in self._sparse))
        what = self._gradients.labels[number]
        if self._diagnosis is not None:
            self._diagnosis.look(codec, parts)
        guard = _Guard(self, bucket.items, last)
        control = self.buckets.control if last else None
        work = work_for(self._exchange, coding, coding.rng, codec, parts, control, guard)
        logical = sum(self._large[index].nbytes for index in bucket.items)
        self._reductions.append(Coded(self._exchange, work, what, logical))
        line.add(self._reductions[-1])  # type: ignore[arg-type]

    def _take_control(self) -> None:
        """The ranks' control numbers, where they came behind a payload: added up in the same order everywhere."""
        last = self._reductions[-1]
        if isinstance(last, Coded) and last.result is not None:
            rows = last.result.clone().view(self.buckets.control.dtype)
            self.buckets.control.copy_(rows.sum(dim=0))

    def _finish_coded(self, bucket: Bucket, rescale: float, poisoned: bool) -> None:
        """Put the means in place."""
        for index in bucket.items:
            gradient = flattened(self._large[index])
            if index in self._rows:
                gradient.copy_(self._rows[index])
            if poisoned:  # some rank had NaN: a GradScaler must see it everywhere
                gradient.fill_(float("nan"))
            elif rescale != 1.0:
                gradient.mul_(rescale)
            assert self._coding is not None, "there is a codec"
            self._coding.note_reduced(index, self._large[index], self._exchange.stats.steps)

    def _collect(self) -> None:
        """Put what has come into the buckets: many small gradients in one go, for each call has its price."""
        views, gradients = [], []
        for index in self._queue:
            parameter = self._gradients.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                self._note_absent(index)
            elif gradient.layout != torch.strided:
                self._sparse[index] = gradient
                self._check_outside(index, gradient._values())
                if index in self.buckets.views:
                    self.buckets.views[index].zero_()
                elif index in self.buckets.large:
                    self._large[index] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            elif index in self.buckets.large:
                self._take(index, gradient)
            elif index in self.buckets.views:
                view = self.buckets.views[index]
                if gradient.data_ptr() != view.data_ptr():
                    views.append(view)
                    gradients.append(gradient.detach())
                    try:
                        parameter.grad = view
                    except RuntimeError as error:
                        raise self._gradients.converted(index, gradient) from error
            else:
                self._late[index] = gradient
                self._check_outside(index, gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        self._queue.clear()
        self._queued = 0

    def _note_absent(self, index: int) -> None:
        """The autograd engine has reached a parameter that has no gradient."""
        self._gradients.check_hooks(index)
        self._absent.add(index)
        self.arrivals.remove(index)
        if index in self.buckets.home:
            self._fill(index)

    def _take(self, index: int, gradient: Tensor) -> None:
        """A large gradient is reduced where it lies, unless autograd may still read that memory for another one."""
        if self._coding is not None:
            self._coding.check_whole_step(index, gradient, self._exchange.stats.steps)
        if not (gradient.is_contiguous() and owns_memory(gradient)):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            self._gradients.parameters[index].grad = gradient
        scale = self._scale_of(index)
        if scale != 1.0:
            gradient.mul_(scale)
        self._large[index] = gradient

    def _scale_of(self, index: int) -> float:
        """The factor of a large gradient. An encoded sum is divided after decoding, when most of it is often zero."""
        coded = self._coding is not None and self._coding.picked[index] is not None
        return self._gradients.weight if coded else self._scale

    def _gradient(self, index: int) -> Tensor:
        for place in (self.buckets.views, self._large, self._late):
            if index in place:
                return place[index]
        raise AssertionError(f"{self._gradients.names[index]} has no gradient in this round")

    def _data(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket, without control numbers."""
        return flattened(self._large[bucket.items[0]]) if bucket.data is None else bucket.data

    def write_control(self) -> None:
        gradients = self._gradients
        usual = gradients.active and gradients.weight == 1.0 and self._bad is None and not self._sparse
        if usual and len(self.arrivals) == len(self.arrived):
            self.buckets.control.copy_(gradients.usual.own)
            return
        sparse = [index in self._sparse for index in range(len(self.arrived))]
        dense = [present and not other for present, other in zip(self._present(), sparse, strict=True)]
        bad = self._bad if self._bad is not None else False
        write_control(self.buckets.control, gradients.active, gradients.weight, bad, dense, sparse)

    def _check(self, data: Tensor, items: tuple[int, ...]) -> None:
        """Note NaN and Inf: the sum of all has one if any has, and is quick to take."""
        if data.is_cuda:  # no wait for the device here: it is asked when somebody has told of trouble
            bad = torch.logical_not(torch.isfinite(data.sum(dtype=torch.float32)))
            names = [self._gradients.names[index] for index in items]
            self._suspects.append((bad, names[0] if len(names) == 1 else f"one of {names[0]} … {names[-1]}"))
            self._bad = bad if self._bad is None else torch.logical_or(self._bad, bad)
        elif data.numel() and not torch.isfinite(data.sum(dtype=torch.promote_types(data.dtype, torch.float32))):
            found = [index for index in items if not bool(torch.isfinite(self._gradient(index)).all())]
            self._suspects += [(True, self._gradients.names[index]) for index in found]
            if found:
                self._bad = torch.tensor(True)

    def finite(self, index: int, row: Tensor) -> bool:
        """Whether a gradient holds neither NaN nor Inf; noted where it does."""
        if bool(torch.isfinite(row.sum(dtype=torch.float32))) or bool(torch.isfinite(row).all()):
            return True
        self.note(index, row.device)
        return False

    def note(self, index: int, device: torch.device) -> None:
        """A gradient cannot be sent."""
        self._suspects.append((True, self._gradients.names[index]))
        self._bad = torch.tensor(True, device=device)

    def land(self) -> None:
        """Wait for the sums."""
        if self._line is not None:
            self._line.wait()

    def number(self, name: str) -> int:
        """Of the parameter that is called so."""
        return self._gradients.names.index(name)

    def _check_outside(self, index: int, values: Tensor) -> None:
        if self._gradients.check_finite and not bool(torch.isfinite(values).all()):
            self._suspects.append((True, self._gradients.names[index]))
            self._bad = torch.tensor(True, device=values.device)

    def _sum_the_others(self, control: ControlNumbers, scale: float) -> None:
        """Gradients outside the buckets: sparse ones, and dense ones that came unexpected."""
        for index, parameter in enumerate(self._gradients.parameters):
            if control.sparse[index]:
                if control.dense[index]:
                    name = self._gradients.names[index]
                    raise IncompatibleError(f"{name} has a sparse gradient on some ranks and a dense one on others")
                own = self._sparse.get(index, self._counted_before(index, torch.sparse_coo))
                summed = sum_sparse(self._exchange, own, parameter, scale)
                parameter.grad = self._sparse[index] = summed
            elif control.dense[index] and index not in self.buckets.home:
                own = self._late.get(index, self._counted_before(index, torch.strided))
                summed = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                if own is not None:
                    torch.mul(own.detach(), scale, out=summed)
                self._exchange.sum_now(flattened(summed), self._gradients.names[index])
                parameter.grad = self._late[index] = summed


class _Guard:
    """Keeps NaN and Inf of one bucket away from its codec, and tells all ranks of them."""

    def __init__(self, found: ReductionPass, items: tuple[int, ...], last: bool) -> None:
        self._round = found
        self._items = items
        self._last = last

    def check(self, parts: Sequence[TensorSlice], whole: bool = False) -> None:
        for index, part in zip(self._items, parts, strict=True):
            row = part.flat if part.residual is None or not whole else part.flat + part.residual
            if not self._round.finite(index, row):
                part.flat.zero_()
                part.residual = None
                part.memory = {key: value for key, value in part.memory.items() if key == ALIKE}
        self.write_control()

    def broken(self, part: TensorSlice) -> None:
        self._round.note(self._round.number(part.name), part.flat.device)
        self.write_control()

    def write_control(self) -> None:
        if self._last:
            self._round.write_control()
