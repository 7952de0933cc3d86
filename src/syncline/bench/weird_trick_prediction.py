"""What one weird trick sends and how long its step takes, beside pure data parallelism.

The step of a worker is played with the ports of the network: the dense layers as `parallel/divided_head.py` computes
them, then the backward of the convolutions with the all-reduce of their gradients::

    compute   │ convolutions │ dense, turn by turn, forward and backward │ convolutions, backward │ optimizer │
    network                  │ exchanges of the turns                    │ all-reduce, bucket by bucket │

The seconds of computing come from the costs of undivided layers, or from a measurement of the divided ones
(`HeadSeconds`), with the time that workers need to start messages and to wake up when they arrive.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from syncline.bench.pipeline_prediction import PipelineCosts, predict_reduced_backward
from syncline.bench.weird_trick_measurement import HeadSeconds
from syncline.errors import SpecError
from syncline.parallel.divided_head import HeadDivision
from syncline.parallel.head_layout import HeadExchange, HeadLayout, Scheme, rows_of_turns, unit_edges
from syncline.parallel.partition import LayerCost
from syncline.transports import Network

__all__ = [
    "CnnCosts",
    "WeirdTrickPrediction",
    "cnn_costs",
    "head_sent_bytes",
    "play_head",
    "predict_weird_trick",
]

COUNT_BYTES = 8
"""The number of examples of a worker, as it tells it to the others."""


@dataclass(frozen=True, kw_only=True)
class CnnCosts:
    """A network with convolutions and a dense head: its costs for the batch of one worker, undivided."""

    convolutions: tuple[LayerCost, ...]
    """All layers that every worker has, those after the head too."""
    dense: tuple[LayerCost, ...]
    """Each dense layer, with the modules that follow it."""
    layout: HeadLayout
    """How the dense layers are divided, such as by `choose_layout(widths, workers)`."""
    update_s: float = 0.0
    """Seconds of the optimizer's step for the whole model."""
    itemsize: int = 4
    """Bytes of a number in activities and weights."""

    def __post_init__(self) -> None:
        if len(self.dense) != len(self.layout.layers):
            raise SpecError(
                f"there are costs of {len(self.dense)} dense layers, and the head has {len(self.layout.layers)}"
            )

    @property
    def head_bytes(self) -> int:
        """The parameters of the dense layers that are divided."""
        return sum(
            self.itemsize * (cut.inputs * cut.outputs + (cut.outputs if cut.divides_bias else 0))
            for cut in self.layout.layers
        )


@dataclass(frozen=True, kw_only=True)
class WeirdTrickPrediction:
    """A step of one weird trick, and one of data parallelism with the same batch."""

    scheme: Scheme
    workers: int
    activity_bytes: tuple[int, ...]
    """What each worker sends of the dense layers' activities and their gradients, and the numbers of examples."""
    gradient_bytes: int
    """What each worker sends in the all-reduce of the gradients of the parameters that all have."""
    data_parallel_bytes: int
    """What each worker sends in the all-reduce of all gradients, in data parallelism."""
    head_s: float
    """Seconds of the dense layers, forward and backward, on the slowest worker."""
    step_s: float
    data_parallel_s: float

    @property
    def bytes(self) -> int:
        """What the worker sends that sends most."""
        return max(self.activity_bytes) + self.gradient_bytes

    @property
    def speedup(self) -> float:
        """The time of data parallelism, divided by the time of one weird trick."""
        return self.data_parallel_s / self.step_s

    def __str__(self) -> str:
        return (
            f"scheme {self.scheme}, {self.workers} workers: {self.bytes / 1e6:.3g} MB and {self.step_s:.3g} s a step; "
            f"data parallelism {self.data_parallel_bytes / 1e6:.3g} MB and {self.data_parallel_s:.3g} s"
        )


def cnn_costs(costs: PipelineCosts, divisions: Sequence[HeadDivision], share: int, itemsize: int = 4) -> CnnCosts:
    """The costs of a measured model. A layer of the profile that follows a dense layer in its head counts with it."""
    layers = costs.profile.at_batch(share).layers
    dense: dict[str, list[LayerCost]] = {}
    others: list[LayerCost] = []
    names = [
        {".".join(filter(None, (division.name, path))): None for path, _ in division.chain.layers}
        for division in divisions
    ]
    last = ""
    for layer in layers:
        division = next((found for found in names if layer.name in found), None)
        head = next((each for each in divisions if not each.name or layer.name.startswith(f"{each.name}.")), None)
        if division is not None:
            last = layer.name
            dense[last] = [layer]
        elif last and head is not None:
            dense[last].append(layer)
        else:
            others.append(layer)
    missing = [name for found in names for name in found if name not in dense]
    if missing:
        raise SpecError(f"the profile has no layers {missing}: profile the model with them as layers")
    cuts = [cut for division in divisions for cut in division.layout.layers]
    return CnnCosts(
        convolutions=tuple(others),
        dense=tuple(_joined(dense[name]) for found in names for name in found),
        layout=HeadLayout(tuple(cuts), divisions[0].layout.workers),
        update_s=costs.update_s,
        itemsize=itemsize,
    )


def _joined(layers: Sequence[LayerCost]) -> LayerCost:
    """Several layers as one."""
    return LayerCost(
        name=layers[0].name,
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        activation_bytes=layers[-1].activation_bytes,
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        forward_fixed_s=sum(layer.forward_fixed_s for layer in layers),
        backward_fixed_s=sum(layer.backward_fixed_s for layer in layers),
    )


def predict_weird_trick(
    cnn: CnnCosts, batch: int, scheme: Scheme, network: Network, measured: HeadSeconds | None = None
) -> WeirdTrickPrediction:
    """A step with `batch` examples a worker, in one scheme and in data parallelism.

    `measured`: of the divided model with this scheme and batch. None: computed from the costs of the undivided layers.

    >>> from syncline.parallel.head_layout import choose_layout
    >>> def layer(name, seconds, weights):
    ...     times = {"forward_s": seconds / 3, "backward_s": seconds * 2 / 3}
    ...     return LayerCost(name=name, **times, activation_bytes=0, parameter_bytes=4 * weights)
    >>> cnn = CnnCosts(
    ...     convolutions=(layer("features", 0.9, 2_300_000),),
    ...     dense=(layer("fc6", 0.06, 37_752_832), layer("fc7", 0.03, 16_781_312), layer("fc8", 0.01, 4_097_000)),
    ...     layout=choose_layout([9216, 4096, 4096, 1000], 4),
    ... )
    >>> print(predict_weird_trick(cnn, 128, "c", Network(latency=1e-4, bandwidth=125e6)))
    scheme c, 4 workers: 49.1 MB and 1.29 s a step; data parallelism 366 MB and 3.29 s
    """
    workers = cnn.layout.workers
    divided = cnn.head_bytes
    common = sum(layer.parameter_bytes for layer in cnn.convolutions)
    common += sum(cnn.itemsize * cut.outputs for cut in cnn.layout.layers if not cut.divides_bias)
    whole = sum(layer.parameter_bytes for layer in (*cnn.convolutions, *cnn.dense))
    if measured is None or workers == 1:
        forward_s = sum(layer.forward_s for layer in cnn.convolutions)
        head_s, convolutions = play_head(cnn, batch, scheme, network), cnn.convolutions
    else:
        forward_s = measured.forward_s[0]
        head_s = _play_measured(cnn, batch, scheme, network, measured) - forward_s
        convolutions = _with_backward(cnn.convolutions, measured.backward_s[-1])
    reduced_s = predict_reduced_backward(convolutions, forward_s + head_s, workers, network)
    both = (*cnn.convolutions, *cnn.dense)
    forward_both_s = sum(layer.forward_s for layer in both)
    return WeirdTrickPrediction(
        scheme=scheme,
        workers=workers,
        activity_bytes=tuple(head_sent_bytes(cnn.layout, batch, scheme, cnn.itemsize)),
        gradient_bytes=_allreduce_bytes(common, workers),
        data_parallel_bytes=_allreduce_bytes(whole, workers),
        head_s=head_s,
        step_s=reduced_s + cnn.update_s * (whole - divided * (1 - 1 / workers)) / max(whole, 1),
        data_parallel_s=predict_reduced_backward(both, forward_both_s, workers, network) + cnn.update_s,
    )


def _with_backward(layers: Sequence[LayerCost], seconds: float) -> tuple[LayerCost, ...]:
    """Layers whose backward takes so many seconds together."""
    factor = seconds / (sum(layer.backward_s for layer in layers) or 1.0)
    return tuple(
        replace(layer, backward_s=factor * layer.backward_s, backward_fixed_s=factor * layer.backward_fixed_s)
        for layer in layers
    )


def _allreduce_bytes(nbytes: float, workers: int) -> int:
    """What a worker sends in an all-reduce that sends as little as possible, such as a ring."""
    return int(2 * (workers - 1) * nbytes / workers)


def head_sent_bytes(
    layout: HeadLayout, batch: int | Sequence[int], scheme: Scheme, itemsize: int = 4, *, backward: bool = True
) -> list[int]:
    """The bytes that each worker sends in the dense layers in a step, exactly.

    `batch`: the examples of each worker.

    >>> from syncline.parallel.head_layout import choose_layout
    >>> head_sent_bytes(choose_layout([9216, 4096, 4096, 1000], 4), 128, "a")
    [35315736, 35315736, 35315736, 35315736]
    """
    workers = layout.workers
    if workers == 1:
        return [0]
    turns = rows_of_turns(scheme, [batch] * workers if isinstance(batch, int) else batch)
    sent = [layout.entries * COUNT_BYTES * (workers - 1)] * workers
    for exchange, width in layout.exchanges:
        units = _units(width, workers)
        for each in (exchange, exchange.adjoint) if backward else (exchange,):
            for rows in turns:
                for rank in range(workers):
                    sent[rank] += itemsize * each.sent_elements(rank, rows, units)
    return sent


def _units(width: int, workers: int) -> list[int]:
    return [stop - start for start, stop in pairwise(unit_edges(width, workers))]


# The dense layers on a clock.


class _Start(NamedTuple):
    """A worker starts its sends of an exchange."""

    exchange: int
    sends: tuple[tuple[int, int], ...]
    """To whom, and how many bytes."""


class _Wait(NamedTuple):
    """A worker waits until all of an exchange has arrived and left."""

    exchange: int


class _Compute(NamedTuple):
    """A worker computes a dense layer on the examples of a turn."""

    place: int
    examples: int


_Action = _Start | _Wait | _Compute
_MEASURED = _Compute(-1, 0)
"""What a worker computes between two exchanges."""
Pass = Literal["forward", "backward"]


def play_head(cnn: CnnCosts, batch: int, scheme: Scheme, network: Network) -> float:
    """Seconds of the dense layers, forward and backward, on the slowest worker. All begin at the same time.

    A turn of n examples takes n/b of the time of b examples on a worker that has a K-th of the units, a K-th.
    """
    if cnn.layout.workers == 1:
        return sum(layer.forward_s + layer.backward_s for layer in cnn.dense)
    workers = range(cnn.layout.workers)
    forward = [list(_forward_actions(cnn, batch, scheme, rank)) for rank in workers]
    start_s = [0.0] * len(workers)
    for direction, actions in (("forward", forward), ("backward", _backward_actions(cnn, batch, scheme, forward))):
        seconds = [
            [_compute_s(cnn, each, batch, direction) if isinstance(each, _Compute) else 0.0 for each in row]
            for row in actions
        ]
        start_s = _HeadPlayer(network, actions, seconds, start_s).run()
    return max(start_s)


def _play_measured(cnn: CnnCosts, batch: int, scheme: Scheme, network: Network, measured: HeadSeconds) -> float:
    """When the slowest worker begins the backward of the convolutions, if all begin a step at 0."""
    workers = cnn.layout.workers
    port_s = (workers - 1) * (network.per_message + COUNT_BYTES / network.bandwidth)
    network = replace(network, latency=max(network.latency, measured.delivery_s - port_s))
    forward = [list(_forward_actions(cnn, batch, scheme, rank)) for rank in range(workers)]
    backward = _backward_actions(cnn, batch, scheme, forward)
    start_s = [0.0] * workers
    for actions, seconds in ((forward, measured.forward_s), (backward, (*measured.backward_s[:-1], 0.0))):
        rows = [list(_measured_actions(row)) for row in actions]
        found = [_seconds_of(row, seconds) for row in rows]
        start_s = _HeadPlayer(network, rows, found, start_s).run()
    return max(start_s)


def _measured_actions(actions: Iterable[_Action]) -> Iterator[_Action]:
    """Some computing before each start and each wait, and after the last."""
    for action in actions:
        if not isinstance(action, _Compute):
            yield from (_MEASURED, action)
    yield _MEASURED


def _seconds_of(actions: Sequence[_Action], measured: Sequence[float]) -> list[float]:
    """The seconds of each action: what was measured for each computing, and nothing for the others."""
    if actions.count(_MEASURED) != len(measured):
        raise SpecError(
            f"{len(measured)} times were measured between the exchanges of a pass, and there are "
            f"{actions.count(_MEASURED)}: measure with the same head, scheme and number of workers"
        )
    times = iter(measured)
    return [next(times) if action is _MEASURED else 0.0 for action in actions]


def _compute_s(cnn: CnnCosts, action: _Compute, batch: int, direction: str) -> float:
    layer = cnn.dense[action.place]
    whole, fixed = (
        (layer.forward_s, layer.forward_fixed_s)
        if direction == "forward"
        else (layer.backward_s, layer.backward_fixed_s)
    )
    return (fixed + (whole - fixed) * action.examples / batch) / cnn.layout.workers


def _exchange_actions(
    number: int, rank: int, exchange: HeadExchange, rows: Sequence[int], width: int, itemsize: int
) -> _Start:
    workers, units = len(rows), _units(width, len(rows))
    others = [(rank + distance) % workers for distance in range(1, workers)]
    blocks = [(to, itemsize * math.prod(exchange.block(rank, to, rows, units))) for to in others]
    return _Start(number, tuple((to, nbytes) for to, nbytes in blocks if nbytes))


def _forward_actions(cnn: CnnCosts, batch: int, scheme: Scheme, rank: int) -> Iterator[_Action]:
    """What a worker does in forward. Exchanges have the numbers of `_numbered`."""
    workers = cnn.layout.workers
    turns = rows_of_turns(scheme, [batch] * workers)
    number, entries = 0, -1
    started: list[int | None] = [None] * len(turns)
    computes: list[int] = []
    for place, cut in enumerate(cnn.layout.layers):
        if cut.takes_own:
            others = tuple((rank + distance) % workers for distance in range(1, workers))
            yield _Start(entries, tuple((to, COUNT_BYTES) for to in others))
            yield _Wait(entries)
            entries -= 1
        for exchange, width in ((cut.before, cut.inputs), (cut.after, cut.outputs)):
            if exchange is cut.after:
                computes.append(place)
            if exchange is None:
                continue
            for turn, rows in enumerate(turns):
                before = started[turn]
                if before is not None:
                    yield _Wait(before)
                for each in computes:
                    yield _Compute(each, sum(rows))
                yield _exchange_actions(number, rank, exchange, rows, width, cnn.itemsize)
                started[turn] = number
                number += 1
            computes = []
        if cut.gives_own:
            yield from (_Wait(each) for each in started if each is not None)
            started = [None] * len(turns)


def _backward_actions(
    cnn: CnnCosts, batch: int, scheme: Scheme, forward: Sequence[Sequence[_Action]]
) -> list[list[_Action]]:
    """The reverse of forward: where it waits for an exchange, backward starts that of the gradients."""
    turns = rows_of_turns(scheme, [batch] * cnn.layout.workers)
    kinds = [(exchange, rows, width) for exchange, width in cnn.layout.exchanges for rows in turns]
    result: list[list[_Action]] = []
    for rank, actions in enumerate(forward):
        row: list[_Action] = []
        for action in reversed(actions):
            if isinstance(action, _Compute):
                row.append(action)
            elif action.exchange >= 0:
                exchange, rows, width = kinds[action.exchange]
                adjoint = _exchange_actions(action.exchange, rank, exchange.adjoint, rows, width, cnn.itemsize)
                row.append(adjoint if isinstance(action, _Wait) else _Wait(action.exchange))
        result.append(row)
    return result


class _HeadPlayer:
    """Plays the actions of all workers. Messages pass the ports as on the simulated network."""

    def __init__(
        self,
        network: Network,
        actions: Sequence[Sequence[_Action]],
        seconds: Sequence[Sequence[float]],
        start_s: Sequence[float],
    ) -> None:
        size = len(actions)
        self._network = network
        self._actions = [deque(zip(row, each, strict=True)) for row, each in zip(actions, seconds, strict=True)]
        self._now = list(start_s)
        self._out_free, self._in_free = [0.0] * size, [0.0] * size
        self._heads: list[tuple[float, int, int, int, int, float]] = []
        """When its first byte arrives, the number of the message, sender, receiver, exchange, seconds at a port."""
        self._messages = 0
        self._missing: dict[tuple[int, int], int] = {}
        self._latest: dict[tuple[int, int], float] = {}
        """By worker and exchange: the messages that it misses, and when the last one has arrived or left."""
        for row in actions:
            for to, exchange in _receivers(row):
                self._missing[to, exchange] = self._missing.get((to, exchange), 0) + 1

    def run(self) -> list[float]:
        """When each worker ends."""
        for rank in range(len(self._actions)):
            self._advance(rank)
        while self._heads:
            head, _, _, to, exchange, held = heapq.heappop(self._heads)
            arrival = self._in_free[to] = max(head, self._in_free[to]) + held
            self._missing[to, exchange] -= 1
            self._latest[to, exchange] = max(arrival, self._latest.get((to, exchange), 0.0))
            self._advance(to)
        assert not any(self._actions), "a worker waits for an exchange that does not arrive"
        return self._now

    def _advance(self, rank: int) -> None:
        """Carry out the actions of a worker until it has to wait."""
        slow = self._network.slow.get(rank, 1.0)
        actions = self._actions[rank]
        while actions:
            action, seconds = actions[0]
            if isinstance(action, _Wait):
                key = rank, action.exchange
                if self._missing.get(key):
                    return
                self._now[rank] = max(self._now[rank], self._latest.get(key, 0.0))
            elif isinstance(action, _Start):
                self._send(rank, action)
            self._now[rank] += seconds * slow
            actions.popleft()

    def _send(self, rank: int, action: _Start) -> None:
        for to, nbytes in action.sends:
            link = self._network.link(rank, to)
            held = self._network.per_message + nbytes / link.bandwidth
            start = max(self._now[rank], self._out_free[rank])
            self._out_free[rank] = start + held
            message = (start + link.latency, self._messages, rank, to, action.exchange, held)
            heapq.heappush(self._heads, message)
            self._messages += 1
            key = rank, action.exchange
            self._latest[key] = max(self._latest.get(key, 0.0), start + held)


def _receivers(actions: Iterable[_Action]) -> Iterator[tuple[int, int]]:
    """To whom a worker sends in each exchange."""
    for action in actions:
        if isinstance(action, _Start):
            yield from ((to, action.exchange) for to, _ in action.sends)
