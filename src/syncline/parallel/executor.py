"""Runs the actions of a schedule on one worker: receives what an action needs, computes, sends the results.

```text
actions   0F0            0F1            0B0             0F2 …
receive     │ ┌─ posted early ──┐         ▲ gradients
compute   ──┴─┤    ──┴──        │       ──┴──
send          └─► outputs, to every stage that uses them; their gradients come back the same way
```

Sends are not waited for until their memory is needed again, and the receives of the next actions are posted while the
present one computes. Therefore no legal order of actions deadlocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from syncline.parallel.boundary import Boundary, Place
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import Action
from syncline.parallel.stages import MODEL_INPUT, StageGraph
from syncline.transports import Transport

__all__ = ["ActionSpan", "PipelineExecutor", "StageCompute"]

PREFETCHED_ACTIONS = 16
"""Actions after the present one whose receives are posted. Some transports delay a message until its receive is
posted: with 2 instead of 8, a step of gpipe with small layers took 1.4 times as long on gloo. With 16 the last
stage posts those of eight micro-batches before the first of them arrives."""
MAX_CACHED_PLACES = 4096
"""Descriptions of messages that are kept for the next step."""


class StageCompute(Protocol):
    """Computes the stages of one worker. Values and gradients are in the order of the stage's inputs and outputs."""

    def forward(self, stage: int, micro_batch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of a stage. The last stage keeps the loss and returns nothing."""
        ...

    def backward(self, action: Action, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """B or I: the gradients of the inputs, given those of the outputs."""
        ...

    def backward_weights(self, stage: int, micro_batch: int) -> None:
        """W: the gradients of the weights, after I."""
        ...

    def gradients_complete(self, stage: int) -> None:
        """R: all micro-batches have added to the gradients of a stage."""
        ...

    def update(self, stage: int, micro_batch: int) -> None:
        """U: apply the gradients of one micro-batch."""
        ...


class ActionSpan(NamedTuple):
    """When an action was computed, in seconds of the runtime's clock. The time of its receives is not part of it."""

    action: Action
    start: float
    end: float


class _Need(NamedTuple):
    """A value or a gradient that an action receives from another worker."""

    source: int
    place: Place


def find_pairs(graph: StageGraph, placement: PipelinePlacement) -> set[tuple[int, int]]:
    """The workers between which values and gradients travel: from the first of a pair to the second."""
    period = math.lcm(*placement.replicas)
    numbers = [(number, 0) for number in range(period)] if placement.unequal else [(0, each) for each in range(period)]
    pairs = {
        (placement.worker_of(max(value.source, 0), *number), placement.worker_of(consumer, *number))
        for value in graph.values
        if value.source != MODEL_INPUT or placement.unequal
        for consumer in value.consumers
        for number in numbers
    }
    pairs = {(source, worker) for source, worker in pairs if source != worker}
    return pairs | {(worker, source) for source, worker in pairs}


class PipelineExecutor:
    """Runs actions of one worker. All workers of a pipeline run their own actions of the same step."""

    def __init__(
        self,
        graph: StageGraph,
        placement: PipelinePlacement,
        transport: Transport,
        compute: StageCompute,
        device: torch.device,
    ) -> None:
        """`transport` connects all workers; its ranks are their numbers in the placement."""
        self._graph, self._placement, self._compute = graph, placement, compute
        self._worker = transport.rank
        self.rank, self.replica = placement.position(transport.rank)
        self._transport = transport
        channels = transport.tensor_channels(find_pairs(graph, placement), device)
        self.boundary = Boundary(transport, device, channels)
        """The messages to and from other stages."""
        self._now: Callable[[], float] = transport.runtime.now
        self._edges = {
            edge: number
            for number, edge in enumerate(
                (value, consumer) for value, each in enumerate(graph.values) for consumer in each.consumers
            )
        }
        """A number for each value and stage that uses it: their gradients are separate messages."""
        self._inputs: Callable[[int], Sequence[Tensor]] = lambda micro_batch: ()
        self._values: dict[tuple[int, int], tuple[Tensor, int]] = {}
        """By value and micro-batch: a value that stages of this worker use, and how many of them have not yet."""
        self._local_gradients: dict[tuple[int, int, int], Tensor | None] = {}
        """By value, consumer and micro-batch: gradients for another stage of this worker."""
        self._wanted: set[tuple[int, int]] = set()
        """Outputs of this worker, by value and micro-batch, whose gradients will come."""
        self._owed: set[tuple[int, int, int]] = set()
        """Inputs, by value, stage and micro-batch, whose gradients the source waits for."""
        self._places: dict[tuple[int, int, int], Place] = {}
        """By value, consumer (-1 for the value itself) and micro-batch."""
        self._step = 0
        self.current: Action | None = None
        """The present action, for messages to ranks that wait."""
        self.spans: list[ActionSpan] | None = None
        """The times of the actions, if they are recorded."""
        self.charge: Callable[[Action], None] | None = None
        """Called with each action inside its span. In a simulation it lets the time of the computation pass."""
        transport.monitor.set_undelivered(self._describe_current)

    @property
    def next_number(self) -> int:
        """The first number of a `Place` that this executor does not use."""
        return len(self._graph.values) + len(self._edges)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker has sent to other stages."""
        return self.boundary.sent_bytes

    def run(
        self,
        actions: Sequence[Action],
        inputs: Callable[[int], Sequence[Tensor]],
        step: int,
        gradients: bool = True,
        later: Sequence[tuple[int, Place]] = (),
    ) -> None:
        """Run actions in order. `inputs(micro_batch)` are the model's inputs. `gradients`: a backward pass follows.

        `later` are messages that the caller receives after the actions, each with its source. Their receives are posted
        after the first action, while this worker has to wait for others anyway.
        """
        self._inputs, self._step = inputs, step
        for coming in actions[:PREFETCHED_ACTIONS]:
            self._expect(coming)
        for number, action in enumerate(actions):
            self.current = action
            for coming in actions[number + PREFETCHED_ACTIONS : number + PREFETCHED_ACTIONS + 1]:
                self._expect(coming)
            self._carry_out(action, gradients)
            if number == 0:
                for source, place in later:
                    self.boundary.expect(source, place)
            if action.kind == "F":  # whether its gradients will come is known only now
                for coming in islice(actions, number + 1, number + 1 + PREFETCHED_ACTIONS):
                    if coming[1:] == action[1:]:  # its B or I
                        self._expect(coming)
                        break
        self.current = None
        if gradients:
            # Channels need a GPU whose kernels are loaded: to load one may have to wait for all that run, and the
            # channels' kernels run until the other worker comes. The first step has loaded those of every action.
            self.boundary.uses_channels = True

    def close(self) -> None:
        """Close the channels to other workers."""
        self.boundary.close()

    def forget(self) -> None:
        """Drop what an interrupted step has left."""
        self._values.clear()
        self._local_gradients.clear()
        self._wanted.clear()
        self._owed.clear()
        self.current = None

    def finish_sends(self) -> None:
        """Wait until all messages have left. The memory of sends is free then."""
        self.boundary.wait_all_sent()

    def _expect(self, action: Action) -> None:
        """Post the receives of an action that will come."""
        for need in self._needs(action):
            self.boundary.expect(*need)

    def _carry_out(self, action: Action, gradients: bool) -> None:
        kind, stage, micro_batch = action
        if kind == "F":
            self._forward(action, gradients)
        elif kind in ("B", "I"):
            self._backward(action)
        elif kind == "W":
            self._timed(action, lambda: self._compute.backward_weights(stage, micro_batch))
        elif kind == "R":
            self._timed(action, lambda: self._compute.gradients_complete(stage))
        else:
            self._timed(action, lambda: self._compute.update(stage, micro_batch))

    # Forward.

    def _forward(self, action: Action, gradients: bool) -> None:
        _, stage, micro_batch = action
        part = self._graph.stages[stage]
        inputs = [self._take(value, stage, micro_batch) for value in part.inputs]
        if stage == 0:
            self._forward_model_inputs(micro_batch)
        outputs = self._timed(action, lambda: self._compute.forward(stage, micro_batch, inputs))
        for value, output in zip(part.outputs, outputs, strict=True):
            consumers = self._graph.values[value].consumers
            if gradients and output.requires_grad:
                self._wanted.add((value, micro_batch))
            self._deliver(value, micro_batch, output if gradients else output.detach(), consumers)

    def _forward_model_inputs(self, micro_batch: int) -> None:
        """With unequal replicas only the first stage has the inputs of a micro-batch: it sends them to the others."""
        if self._placement.unequal:
            own = self._inputs(micro_batch)
            for number, value in enumerate(self._graph.values):
                later = tuple(stage for stage in value.consumers if stage > 0)
                if value.source == MODEL_INPUT and later:
                    self._deliver(number, micro_batch, own[value.input_index], later)

    def _deliver(self, value: int, micro_batch: int, output: Tensor, consumers: Sequence[int]) -> None:
        """Give a value to the stages that use it: once to every worker."""
        workers: dict[int, int] = {}
        for stage in consumers:
            worker = self._placement.worker_of(stage, micro_batch, self.replica)
            workers[worker] = workers.get(worker, 0) + 1
        for worker, uses in workers.items():
            if worker == self._worker:
                local = output.detach().clone().requires_grad_(output.requires_grad)  # it may be changed in place
                self._values[value, micro_batch] = (local, uses)
            else:
                self.boundary.send(output, worker, self._value_place(value, micro_batch), self._step)

    def _take(self, value: int, stage: int, micro_batch: int) -> Tensor:
        """A value for a stage. Each stage has a leaf of its own, so that their gradients are separate."""
        info = self._graph.values[value]
        if info.source == MODEL_INPUT and (stage == 0 or not self._placement.unequal):
            return self._inputs(micro_batch)[info.input_index]
        key = (value, micro_batch)
        if key not in self._values:
            source = self._source_of(value, micro_batch)
            received = self.boundary.receive(source, self._value_place(value, micro_batch), self._step)
            assert received is not None, "only gradients may be missing"
            self._values[key] = (received, self._uses_here(value, micro_batch))
        tensor, uses = self._values.pop(key)
        if tensor.requires_grad:
            self._owed.add((value, stage, micro_batch))
        if uses == 1:
            return tensor
        self._values[key] = (tensor, uses - 1)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def _uses_here(self, value: int, micro_batch: int) -> int:
        info = self._graph.values[value]
        users = [stage for stage in info.consumers if info.source != MODEL_INPUT or stage > 0]
        return sum(self._placement.worker_of(stage, micro_batch, self.replica) == self._worker for stage in users)

    def _source_of(self, value: int, micro_batch: int) -> int:
        source = max(self._graph.values[value].source, 0)
        return self._placement.worker_of(source, micro_batch, self.replica)

    # Backward.

    def _backward(self, action: Action) -> None:
        _, stage, micro_batch = action
        part = self._graph.stages[stage]
        gradients = [self._gradient_of(value, micro_batch) for value in part.outputs]
        found = self._timed(action, lambda: self._compute.backward(action, gradients))
        for value, gradient in zip(part.inputs, found, strict=True):
            if (value, stage, micro_batch) not in self._owed:
                continue
            self._owed.remove((value, stage, micro_batch))
            source = self._source_of(value, micro_batch)
            if gradient is not None and self._placement.unequal:
                gradient = gradient * self._placement.gradient_factor(stage, self._graph.values[value].source)
            if source == self._worker:
                self._local_gradients[value, stage, micro_batch] = gradient
            else:
                self.boundary.send(gradient, source, self._gradient_place(value, stage, micro_batch), self._step)

    def _gradient_of(self, value: int, micro_batch: int) -> Tensor | None:
        """The sum of the gradients from all stages that use an output, in their order."""
        if (value, micro_batch) not in self._wanted:
            return None
        self._wanted.remove((value, micro_batch))
        total: Tensor | None = None
        for stage in self._graph.values[value].consumers:
            worker = self._placement.worker_of(stage, micro_batch, self.replica)
            if worker == self._worker:
                gradient = self._local_gradients.pop((value, stage, micro_batch))
            else:
                place = self._gradient_place(value, stage, micro_batch)
                gradient = self.boundary.receive(worker, place, self._step)
                self.boundary.wait_sent(worker, self._value_place(value, micro_batch))  # it has arrived
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total

    # Messages.

    def _needs(self, action: Action) -> Iterator[_Need]:
        """What an action receives from other workers."""
        kind, stage, micro_batch = action
        part = self._graph.stages[stage] if kind in ("F", "B", "I") else None
        if part is not None and kind == "F":
            for value in part.inputs:
                info = self._graph.values[value]
                if info.source == MODEL_INPUT and (stage == 0 or not self._placement.unequal):
                    continue
                source = self._source_of(value, micro_batch)
                if source != self._worker and (value, micro_batch) not in self._values:
                    yield _Need(source, self._value_place(value, micro_batch))
        elif part is not None:
            for value in part.outputs:
                if (value, micro_batch) not in self._wanted:
                    continue  # it needs no gradient, or its forward is still to come
                for consumer in self._graph.values[value].consumers:
                    worker = self._placement.worker_of(consumer, micro_batch, self.replica)
                    if worker != self._worker:
                        yield _Need(worker, self._gradient_place(value, consumer, micro_batch))

    def _value_place(self, value: int, micro_batch: int) -> Place:
        key = (value, -1, micro_batch)
        place = self._places.get(key)
        if place is None:
            info = self._graph.values[value]
            text = f"the output {info.name} of stage {max(info.source, 0)} for micro-batch {micro_batch}"
            place = self._keep(key, Place(value, micro_batch, text))
        return place

    def _gradient_place(self, value: int, consumer: int, micro_batch: int) -> Place:
        key = (value, consumer, micro_batch)
        place = self._places.get(key)
        if place is None:
            number = len(self._graph.values) + self._edges[value, consumer]
            name = self._graph.values[value].name
            text = f"the gradient of {name} from stage {consumer} for micro-batch {micro_batch}"
            place = self._keep(key, Place(number, micro_batch, text))
        return place

    def _keep(self, key: tuple[int, int, int], place: Place) -> Place:
        if len(self._places) >= MAX_CACHED_PLACES:  # without a flush the numbers of micro-batches grow
            self._places.clear()
        self._places[key] = place
        return place

    @property
    def progress(self) -> str:
        """The present action in words, such as "the forward of stage 1 for micro-batch 3"; empty between steps."""
        return "" if self.current is None else _describe(self.current)

    def _describe_current(self) -> str:
        return f"the result of {self.progress}" if self.current is not None else ""

    def _timed(self, action: Action, work: Callable[[], Sequence[Tensor | None] | None]) -> Sequence[Tensor]:
        start = self._now()
        if self.charge is not None:
            self.charge(action)
        found = work()
        if self.spans is not None:
            self.spans.append(ActionSpan(action, start, self._now()))
        return found  # type: ignore[return-value]


def _describe(action: Action) -> str:
    """An action for messages.

    >>> _describe(Action("F", 1, 3))
    'the forward of stage 1 for micro-batch 3'
    """
    names = {
        "F": "the forward",
        "B": "the backward",
        "I": "the backward (inputs)",
        "W": "the backward (weights)",
        "R": "the reduction",
        "U": "the update",
    }
    when = " after its last micro-batch" if action.micro_batch < 0 else f" for micro-batch {action.micro_batch}"
    return f"{names[action.kind]} of stage {action.stage}{when}"
