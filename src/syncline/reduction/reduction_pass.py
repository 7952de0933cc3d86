"""One backward pass: gradients arrive, full buckets are sent in index order, the sums come back.

arrive(i) … arrive(j)      a bucket is full: its reduction starts while backward continues
end()                      backward is over: missing gradients are filled in, the rest is sent
complete()                 wait; afterwards every rank holds the same bits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.codecs import TensorSlice
from syncline.collectives.compressed import NonfiniteGuard, compressed_allreduce
from syncline.errors import DivergedError, IncompatibleError, PeerLostError, ProtocolError, SynclineError
from syncline.reduction.buckets import Bucket, BucketSet
from syncline.reduction.communicator import Communicator
from syncline.reduction.control import ControlNumbers, write_control
from syncline.reduction.queue import CompressedReduction, PlainReduction, ReductionQueue, ignore_errors
from syncline.world import allgather

if TYPE_CHECKING:
    from syncline.reduction.reducer import GradientReducer

__all__ = ["ReductionPass", "sum_sparse"]

MAX_WAITING_BYTES = 1 << 19
"""Gradients of up to this size wait to be copied into their buckets together. Meanwhile they are in memory twice."""
NEVER_FULL = 1 << 62
"""The count of missing gradients for parameters without a bucket."""
EXCLUSIVE_STORAGE_USES = 2
"""Uses of a storage that belongs to one tensor: that tensor, and the handle by which we ask."""


class ReductionPass:
    """The state of one backward pass on this rank."""

    trains = True
    """It adds the latest batches of each rank to the training; see `RepeatableOperation`."""

    def __init__(self, reducer: GradientReducer, buckets: BucketSet) -> None:
        self.buckets = buckets
        self.arrivals: list[int] = []
        """Parameters in the order in which their gradients arrived."""
        self.control: ControlNumbers | None = None
        self._reducer = reducer
        self._communicator = communicator = reducer.communicator
        self._step = communicator.stats.steps
        self._weight, self._active = reducer.weight, reducer.active
        self._set_scale()
        self.arrived = [False] * len(reducer.parameters)
        """For each parameter: autograd has reached it."""
        self._absent: set[int] = set()
        """Parameters that autograd has reached without a gradient: a Function's backward returned None for them."""
        self._waiting: list[int] = []
        """Gradients that have arrived and are not yet in their buckets."""
        self._waiting_bytes = 0
        self._bytes = buckets.bytes
        self._bucket_of = buckets.bucket_of
        self._missing = [*[len(bucket.items) for bucket in buckets.buckets], NEVER_FULL]
        self._launched: list[Any] = []
        """The reductions of the buckets that were sent."""
        self._codec_state = reducer.codec_state
        self._queue = None if self._codec_state is None else ReductionQueue(communicator)
        self._diagnosis = reducer.diagnosis()
        self._rows: dict[int, Tensor] = {}
        """Float32 copies of gradients of other dtypes, for codecs."""
        self._saved: dict[int, Tensor] = {}
        """Gradients of an earlier pass that this pass does not change."""
        self._sparse: dict[int, Tensor] = {}
        self._unexpected: dict[int, Tensor] = {}
        """Dense gradients of parameters without a bucket."""
        self._in_place: dict[int, Tensor] = {}
        """Gradients that are reduced in place."""
        self._suspects: list[tuple[Tensor | bool, str]] = []
        """Names of this rank's gradients with NaN or Inf. The flag may be on a device that was not asked yet."""
        self._nonfinite: Tensor | None = None
        # A gradient without a bucket may arrive last, and the control numbers must count it.
        self._hold = any(reducer.parameters[index].requires_grad for index in buckets.outside)

        self._elastic = reducer.elastic
        self._generation = self._team_generation()
        """The team to which the buckets are sent."""
        self._interruption: SynclineError | None = None
        """The error of a launch during backward, which is raised at its end."""
        self._kept: dict[int, Tensor] = {}
        """In an elastic world: the content of each bucket before it was scaled and sent."""
        self._kept_rows: dict[int, Tensor] = {}
        """The same for gradients that are reduced in place."""
        self._codec_before: Any = None
        if self._elastic is not None and self._codec_state is not None:
            self._codec_before = self._codec_state.snapshot()

    def _team_generation(self) -> int:
        return 0 if self._elastic is None else self._elastic.team.generation

    def _set_scale(self) -> None:
        """Set the factors that depend on the number of ranks."""
        scaling, size, weight = self._reducer.policy.scaling, self._communicator.size, self._weight
        self._scale = weight / size if scaling is None else weight * scaling.before
        self._after = 1.0 if scaling is None else scaling.after
        # A codec's result is a mean already.
        self._after_codec = 1.0 if scaling is None else scaling.before * scaling.after * size

    def missing_parameter(self) -> int | None:
        """The first parameter that the next bucket waits for. None: all buckets were sent."""
        launched, buckets = len(self._launched), self.buckets.buckets
        if launched == len(buckets):
            return None
        return next((index for index in buckets[launched].items if not self.arrived[index]), None)

    def arrive(self, index: int) -> None:
        """The gradient of a parameter has arrived. It is called between the operations of backward: keep it short."""
        self.arrived[index] = True
        self.arrivals.append(index)
        self._waiting.append(index)
        self._waiting_bytes += self._bytes[index]
        bucket = self._bucket_of[index]
        missing = self._missing[bucket] = self._missing[bucket] - 1
        if missing == 0:
            self._collect()
            self._launch()
        elif self._waiting_bytes > MAX_WAITING_BYTES:
            self._collect()

    def end(self) -> None:
        """Backward is over: fill in what has not arrived, and send the rest."""
        for index in self._reducer.take_accumulated() if self._reducer.active else ():
            if not self.arrived[index] and self._reducer.parameters[index].grad is not None:
                self.arrive(index)
        self._collect()
        for index in self.buckets.members:
            if not self.arrived[index]:
                self._fill(index)
        self._hold = False
        self._missing = [0] * len(self._missing)
        self._launch()
        if self._queue is not None:
            self._queue.close()

    def complete(self) -> ControlNumbers:
        """Wait for the sums and make them means. Returns the control numbers of the step.

        In an elastic world the pass is repeated with the survivors if a worker is lost meanwhile.
        """
        if self.control is not None:
            return self.control
        if self._elastic is None:
            return self.attempt()
        return self._elastic.run(self._communicator.world, self)

    def attempt(self) -> ControlNumbers:
        """Wait for the sums and make them means."""
        if self._generation != self._team_generation():  # the team has changed in another operation since the launch
            self.prepare_again()
        if self._interruption is not None:
            raise self._interruption
        communicator = self._communicator
        start = communicator.now()
        if self._queue is not None:
            self._wait_for_queue()
            self._take_control()
        else:
            for reduction in self._launched:
                reduction.wait()
        communicator.stats.waited(start, communicator.now())
        control = self._read_control()
        if self._diagnosis is not None and not control.not_finite:
            self._diagnosis.record()
        size = communicator.size
        rescale = size / control.weight if control.weight > 0 and control.weight != size else 1.0
        for bucket in self.buckets.buckets:
            if bucket.codec is not None:
                self._finish_encoded(bucket, rescale * self._after_codec, nonfinite=control.not_finite > 0)
            elif rescale * self._after != 1.0:
                self._data(bucket).mul_(rescale * self._after)
        if self.buckets.outside or any(control.sparse):
            self._sum_outside(control, self._scale * self._after * rescale)
        if self._elastic is not None:
            self._elastic.note_newcomers(control.newcomers)
            self._elastic.idle_after_loss |= self._elastic.data_changed and control.active < size
        return self._conclude(control)

    def _conclude(self, control: ControlNumbers) -> ControlNumbers:
        """The means are in place: restore what the pass does not change."""
        self.control = control
        self._reducer.completed += 1
        for index, gradient in self._saved.items():
            if not control.dense[index]:  # otherwise this rank had nothing to add, and the others' mean counts
                self.buckets.views[index].copy_(gradient)
        if self._reducer.find_unused_parameters and self._active and self._lacks_gradients():
            for index in self.buckets.members:
                if control.dense[index] and not self._has(index):
                    self._reducer.parameters[index].grad = self._gradient(index)
        return control

    # With a team that has changed; see `RepeatableOperation`.

    def prepare_again(self) -> None:
        """Restore this rank's gradients and the codec's state from before the pass, and send everything again."""
        self._settle()
        self._generation = self._team_generation()
        self._set_scale()
        for number, data in self._kept.items():
            self._data(self.buckets.buckets[number]).copy_(data)
        for index, row in self._kept_rows.items():
            torch.mul(row, self._scale_of(index), out=self._in_place[index])
        if self._codec_state is not None:
            self._codec_state.restore(self._codec_before)
            self._queue = ReductionQueue(self._communicator)
        self._rows.clear()
        self._launched, self._interruption = [], None
        self._launch()
        if self._queue is not None:
            self._queue.close()

    def result(self, control: ControlNumbers) -> dict[str, Any]:
        """A copy of the means, for ranks that could not complete the pass."""
        state, parameters = self._codec_state, self._reducer.parameters
        return {
            "control": self.buckets.control.clone(),
            "buckets": {
                number: self._data(bucket).clone()
                for number, bucket in enumerate(self.buckets.buckets)
                if bucket.data is not None
            },
            "rows": {index: row.clone() for index, row in self._in_place.items()},
            "outside": {
                index: _as_plain(parameters[index].grad)
                for index in range(len(parameters))
                if control.sparse[index] or (control.dense[index] and self._bucket_of[index] < 0)
            },
            "codec": None if state is None else state.snapshot()[0],
        }

    def adopt(self, result: dict[str, Any]) -> ControlNumbers:
        """Take the means of another rank, which has completed this pass with this rank's contribution."""
        self._settle()
        self.buckets.control.copy_(result["control"])
        for number, data in result["buckets"].items():
            self._data(self.buckets.buckets[number]).copy_(data)
        for index, row in result["rows"].items():
            self._in_place[index].copy_(row)
        for index, plain in result["outside"].items():
            place = self._unexpected if isinstance(plain, Tensor) else self._sparse
            self._reducer.parameters[index].grad = place[index] = _from_plain(plain, self._reducer.parameters[index])
        if self._codec_state is not None:
            self._codec_state.adopt_shared(result["codec"])
        return self._conclude(ControlNumbers.read(self.buckets.control))

    def _settle(self) -> None:
        """Wait until the engine no longer writes into the buckets."""
        if self._queue is not None:
            self._queue.settle()
            return
        for reduction in self._launched:
            ignore_errors(reduction.wait)

    def wait_for_sums(self) -> None:
        """Wait until compressed reductions are done: the residuals depend on their results."""
        if self._queue is not None and self.control is None:
            self._queue.wait()

    def install(self) -> None:
        """Make these the gradients of the parameters: None for those that no rank had one of."""
        control = self.complete()
        for index, parameter in enumerate(self._reducer.parameters):
            if control.sparse[index]:
                parameter.grad = self._sparse[index]
            elif control.dense[index]:
                parameter.grad = self._gradient(index)
            else:
                parameter.grad = None

    # Sending.

    def _launch(self) -> None:
        """Send full buckets in index order: the same on every rank."""
        if self._elastic is None:
            self._launch_full()
        elif self._interruption is None:
            try:
                self._launch_full()
            except (PeerLostError, ProtocolError) as error:  # backward goes on, and its end repeats the pass
                self._interruption = error

    def _launch_full(self) -> None:
        buckets, launched = self.buckets.buckets, self._launched
        while len(launched) < len(buckets) and self._missing[len(launched)] == 0:
            number = len(launched)
            last = number == len(buckets) - 1
            if last and self._hold:
                return
            bucket = buckets[number]
            if bucket.codec is not None:
                self._encode(number, bucket, last)
                continue
            if bucket.data is not None:
                if self._elastic is not None and number not in self._kept:
                    self._kept[number] = bucket.data.clone()
                if self._scale != 1.0:
                    bucket.data.mul_(self._scale)
            if self._reducer.check_finite and bucket.items:
                self._check_finite(self._data(bucket), bucket.items)
            flat = self._data(bucket) if bucket.flat is None else bucket.flat
            if self._queue is None:
                if last:
                    self._write_control()
                launched.append(self._communicator.launch_sum(flat, self._reducer.labels[number]))
            else:
                # The comm task may still check earlier buckets, and the control numbers contain what it finds.
                prepare = self._write_control if last else None
                plain = PlainReduction(self._communicator, flat, self._reducer.labels[number], prepare)
                launched.append(plain)
                self._queue.add(plain)

    def _encode(self, number: int, bucket: Bucket, last: bool) -> None:
        """Send a bucket by its codec. Codecs cannot encode NaN and Inf: these stay here, and all ranks are informed."""
        state, queue, codec, communicator = self._codec_state, self._queue, bucket.codec, self._communicator
        assert state is not None, "there is a codec"
        assert queue is not None, "so there is a queue"
        assert codec is not None, "of this bucket"
        parts = []
        for index in bucket.items:
            row = _flattened(self._in_place[index])
            if row.dtype != torch.float32:
                row = self._rows[index] = row.float()
            parts.append(state.slice_of(index, row, self._has(index) and index not in self._sparse))
        if self._diagnosis is not None:
            self._diagnosis.copy_before(codec, parts)
        work = compressed_allreduce(
            codec,
            parts,
            state.rng,
            communicator.compressed.resolve(codec, bucket.sizes),
            communicator.size,
            self.buckets.control if last else None,
            NonfiniteGuard(self._note_slice, self._write_control if last else _do_nothing),
            state.owner_residuals,
        )
        logical_bytes = sum([self._in_place[index].nbytes for index in bucket.items])
        reduction = CompressedReduction(communicator, work, self._reducer.labels[number], logical_bytes)
        self._launched.append(reduction)
        queue.add(reduction)

    def _collect(self) -> None:
        """Copy arrived gradients into the buckets: many small ones in one call, because each call has its cost."""
        views, gradients, buckets = [], [], self.buckets
        for index in self._waiting:
            parameter = self._reducer.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                self._note_absent(index)
            elif gradient.layout != torch.strided:
                self._sparse[index] = gradient
                self._check_outside(index, gradient._values())
                if index in buckets.views:
                    buckets.views[index].zero_()
                elif index in buckets.in_place:
                    row = self._in_place[index] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                    if self._elastic is not None:
                        self._kept_rows[index] = row.clone()
            elif index in buckets.in_place:
                self._take_in_place(index, gradient)
            elif index in buckets.views:
                view = buckets.views[index]
                if gradient.data_ptr() != view.data_ptr():
                    views.append(view)
                    gradients.append(gradient.detach())
                    try:
                        parameter.grad = view
                    except RuntimeError as error:
                        raise self._reducer.converted(index, gradient) from error
            else:
                self._unexpected[index] = gradient
                self._check_outside(index, gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _take_in_place(self, index: int, gradient: Tensor) -> None:
        """Reduce a gradient in its own memory, unless autograd may still read that memory for another one."""
        if self._codec_state is not None and self._codec_state.applies_momentum:
            self._codec_state.check_whole_step(index, gradient, self._communicator.stats.steps)
        if not (gradient.is_contiguous() and _owns_memory(gradient)):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            self._reducer.parameters[index].grad = gradient
        if self._elastic is not None:
            self._kept_rows[index] = gradient.clone()
        scale = self._scale_of(index)
        if scale != 1.0:
            gradient.mul_(scale)
        self._in_place[index] = gradient

    def _fill(self, index: int) -> None:
        """A parameter without a new gradient adds nothing. Its gradient from an earlier pass is kept.

        With `find_unused_parameters` the earlier gradient is added: it is part of the other ranks' new ones.
        """
        added = self._earlier_gradient(index, torch.strided)
        parameter = self._reducer.parameters[index]
        if index in self.buckets.in_place:
            row = self._in_place[index] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if self._elastic is not None:
                self._kept_rows[index] = row.clone() if added is None else added.clone()
            if added is not None:
                torch.mul(added, self._scale_of(index), out=row)
            return
        view, gradient = self.buckets.views[index], parameter.grad
        if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() == view.data_ptr():
            self._saved[index] = view.clone()
        if added is None:
            view.zero_()
        elif added.data_ptr() != view.data_ptr():
            view.copy_(added)

    def _earlier_gradient(self, index: int, layout: torch.layout) -> Tensor | None:
        """The gradient from before this pass if it counts in the mean, else None."""
        gradient = self._reducer.parameters[index].grad
        if not (self._reducer.find_unused_parameters and self._reducer.active) or gradient is None:
            return None
        return gradient.detach() if gradient.layout == layout else None

    def _scale_of(self, index: int) -> float:
        """The factor of a gradient that is reduced in place. An encoded sum is divided after decoding."""
        encoded = self._codec_state is not None and self._codec_state.codecs[index] is not None
        return self._weight if encoded else self._scale

    # Completing.

    def _wait_for_queue(self) -> None:
        assert self._queue is not None, "there is a codec"
        try:
            self._queue.wait()
        except DivergedError as error:  # a codec does not know the step
            raise error.at_step(self._step) from None

    def _take_control(self) -> None:
        """Sum the control numbers of all ranks if they followed a payload, in the same order everywhere."""
        rows = self._launched[-1].result
        if rows is not None:
            self.buckets.control.copy_(rows.clone().view(self.buckets.control.dtype).sum(dim=0))

    def _read_control(self) -> ControlNumbers:
        """The control numbers of all ranks.

        On a GPU, reading waits for the device. If nothing depends on them, they are read before the next pass, and an
        error is raised then. With a codec they are read now: some NaN may have been left out.
        """
        reducer, numbers = self._reducer, self.buckets.control
        if not numbers.is_cuda:
            if torch.equal(numbers, reducer.expected.summed):
                return reducer.expected.control
        else:
            needed = reducer.uneven or self._codec_state is not None or not reducer.observed
            needed = needed or self._elastic is not None
            if not (needed or self.buckets.outside):
                reducer.read_later(numbers, self._suspects, self._present(), self._step)
                return ControlNumbers.read(numbers) if self._lacks_gradients() else reducer.expected.control
        control = ControlNumbers.read(numbers)
        reducer.check(control, self._suspects, self._present(), self._step)
        return control

    def _finish_encoded(self, bucket: Bucket, rescale: float, nonfinite: bool) -> None:
        """Store the means of a bucket with a codec."""
        assert self._codec_state is not None, "there is a codec"
        for index in bucket.items:
            gradient = _flattened(self._in_place[index])
            if index in self._rows:
                gradient.copy_(self._rows[index])
            if nonfinite:  # some rank had NaN: a GradScaler must see it everywhere
                gradient.fill_(float("nan"))
            elif rescale != 1.0:
                gradient.mul_(rescale)
            if self._codec_state.applies_momentum:
                self._codec_state.note_reduced(index, self._in_place[index], self._communicator.stats.steps)

    def _sum_outside(self, control: ControlNumbers, scale: float) -> None:
        """Sum gradients outside the buckets: sparse ones, and dense ones that were not expected."""
        members, sparse, dense = set(self.buckets.members), {}, {}
        for index, parameter in enumerate(self._reducer.parameters):
            if control.sparse[index]:
                if control.dense[index]:
                    name = self._reducer.names[index]
                    raise IncompatibleError(f"{name} has a sparse gradient on some ranks and a dense one on others")
                own = self._sparse.get(index, self._earlier_gradient(index, torch.sparse_coo))
                sparse[index] = sum_sparse(self._communicator, own, parameter, scale)
            elif control.dense[index] and index not in members:
                own = self._unexpected.get(index, self._earlier_gradient(index, torch.strided))
                summed = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                if own is not None:
                    torch.mul(own.detach(), scale, out=summed)
                self._communicator.sum_now(_flattened(summed), self._reducer.names[index])
                dense[index] = summed
        for index, summed in (sparse | dense).items():  # last: until then the pass may have to be repeated
            self._reducer.parameters[index].grad = summed
        self._sparse |= sparse
        self._unexpected |= dense

    # What has arrived.

    def _has(self, index: int) -> bool:
        """True if this rank has a new gradient of a parameter."""
        return self.arrived[index] and index not in self._absent

    def _lacks_gradients(self) -> bool:
        """True if a gradient that other ranks may have is missing here."""
        return len(self.arrivals) < len(self.arrived) and not all(map(self._has, self.buckets.members))

    def _present(self) -> list[bool]:
        """For each parameter: this rank has a new gradient."""
        return [self._has(index) for index in range(len(self.arrived))] if self._absent else self.arrived

    def _note_absent(self, index: int) -> None:
        """Autograd has reached a parameter that has no gradient."""
        self._reducer.check_hooks(index)
        self._absent.add(index)
        self.arrivals.remove(index)
        if self._bucket_of[index] >= 0:
            self._fill(index)

    def _gradient(self, index: int) -> Tensor:
        for place in (self.buckets.views, self._in_place, self._unexpected):
            if index in place:
                return place[index]
        raise AssertionError(f"{self._reducer.names[index]} has no gradient in this pass")

    def _data(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket, without control numbers."""
        return _flattened(self._in_place[bucket.items[0]]) if bucket.data is None else bucket.data

    def _write_control(self) -> None:
        """Write this rank's control numbers."""
        reducer = self._reducer
        newcomers = 0 if self._elastic is None else self._elastic.report_newcomers()
        if (
            len(self.arrivals) == len(self.arrived)
            and not newcomers
            and self._active
            and self._weight == 1.0
            and self._nonfinite is None
            and not self._sparse
        ):
            self.buckets.control.copy_(reducer.expected.own)
            return
        sparse = [index in self._sparse for index in range(len(self.arrived))]
        dense = [present and not other for present, other in zip(self._present(), sparse, strict=True)]
        nonfinite = self._nonfinite if self._nonfinite is not None else False
        write_control(self.buckets.control, self._active, self._weight, nonfinite, dense, sparse, newcomers)

    # NaN and Inf.

    def _check_finite(self, data: Tensor, items: tuple[int, ...]) -> None:
        """Note NaN and Inf: the sum of all elements has one if any has, and is fast to compute."""
        if data.is_cuda:  # do not wait for the device: it is asked when a rank has reported NaN or Inf
            bad = torch.logical_not(torch.isfinite(data.sum(dtype=torch.float32)))
            names = [self._reducer.names[index] for index in items]
            self._suspects.append((bad, names[0] if len(names) == 1 else f"one of {names[0]} … {names[-1]}"))
            self._nonfinite = bad if self._nonfinite is None else torch.logical_or(self._nonfinite, bad)
        elif data.numel() and not torch.isfinite(data.sum(dtype=torch.promote_types(data.dtype, torch.float32))):
            for index in items:
                gradient = self._gradient(index)
                if not bool(torch.isfinite(gradient).all()):
                    self._note_nonfinite(index, gradient.device)

    def _check_outside(self, index: int, values: Tensor) -> None:
        if self._reducer.check_finite and not bool(torch.isfinite(values).all()):
            self._note_nonfinite(index, values.device)

    def _note_nonfinite(self, index: int, device: torch.device) -> None:
        """A gradient holds NaN or Inf."""
        self._suspects.append((True, self._reducer.names[index]))
        self._nonfinite = torch.tensor(True, device=device)

    def _note_slice(self, part: TensorSlice) -> None:
        self._note_nonfinite(self._reducer.names.index(part.name), part.flat.device)


def sum_sparse(communicator: Communicator, gradient: Tensor | None, parameter: Tensor, scale: float) -> Tensor:
    """The sum over the ranks of `scale` times each sparse gradient: the rows of all ranks, in rank order.

    A rank without a gradient adds no row.
    """
    if gradient is None:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values() * scale
    if communicator.size > 1:
        algorithm, team = communicator.gather_algorithm, communicator.group
        rows = allgather(indices.t().contiguous(), algorithm=algorithm, group=team)
        values = allgather(values.contiguous(), algorithm=algorithm, group=team)
        indices = rows.t()
        nbytes = values.numel() * values.element_size() + indices.numel() * indices.element_size()
        communicator.stats.sent(nbytes, nbytes)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def _as_plain(gradient: Tensor | None) -> Any:
    """A copy of a gradient as dense tensors: a sparse one as its indices and values."""
    assert gradient is not None, "the pass has one"
    if gradient.layout == torch.strided:
        return gradient.detach().clone()
    gradient = gradient.coalesce()
    return [gradient.indices().clone(), gradient.values().clone()]


def _from_plain(plain: Any, parameter: Tensor) -> Tensor:
    """The gradient of `_as_plain`."""
    if isinstance(plain, Tensor):
        return plain.to(parameter.device)
    indices, values = (each.to(parameter.device) for each in plain)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def _do_nothing() -> None:
    """In place of writing the control numbers: they belong to another bucket."""


def _flattened(gradient: Tensor) -> Tensor:
    """The memory of a contiguous gradient as one row of real numbers."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.view(-1)


def _owns_memory(gradient: Tensor) -> bool:
    """True if no other tensor uses the memory of a gradient: autograd may have returned a view."""
    storage = gradient.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return storage.nbytes() == gradient.nbytes and uses <= EXCLUSIVE_STORAGE_USES
