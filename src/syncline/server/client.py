"""A client's door to a space: push, pull, futures, and a small board."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Runtime
from syncline.server import protocol
from syncline.server.factors import pack_range
from syncline.server.filters import Filter
from syncline.server.network import ServerNetwork
from syncline.server.protocol import WINDOW, Post, ReplyHeader, RequestHeader, json_body
from syncline.server.push_encoder import KeySelection, PushEncoder, as_values, length_of, room_for
from syncline.server.request_sender import PendingRequest, RequestSender, ServerConnection, nothing
from syncline.server.space import Keys, RequestPart, SpaceDescription, read_keys, spans

__all__ = ["Client", "ClusterStatus", "Future"]


class Client:
    """One member's door to a space of float32 keys, sharded over servers. Made by `sl.store`.

    Keys are a range, (first, after), a slice, or a sorted int64 tensor; None is all of them. What is pushed stays
    untouched until its future was waited for. A server takes a client's pushes in their order, and a client reads its
    own writes.

    >>> import torch, syncline as sl
    >>> def count(world):
    ...     with sl.store(4) as store:
    ...         store.push(range(2), torch.ones(2)).wait()
    ...         world.barrier()
    ...         return store.pull().wait()
    >>> sl.simulate(count, ranks=3).results[0]
    tensor([3., 3., 0., 0.])
    """

    def __init__(
        self,
        network: ServerNetwork,
        description: SpaceDescription,
        *,
        filters: Filter | None = None,
        retry: float | None = None,
        seed: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.description = description
        self.network = network
        self.clock = 0
        """Steps that this worker has pushed."""
        self.told = ClusterStatus()
        self.bytes_logical = 0
        self._bytes_read = 0
        self._layout = description.layout
        self._runtime = network.transport.runtime
        self._courier = RequestSender(network.transport, description.space_id, description.servers, retry, self._settle)
        self._going = self._runtime.lock()
        self._outgoing = PushEncoder(description.numel, description.build_codec(), filters, seed, network.me)
        self._simple = not (description.codec or description.synchronous or self._outgoing.filters)
        """Whether a short request needs nothing but its header and its values."""
        self._on_close = on_close
        self._stamp = 0
        self._stamps: dict[int, Sequence[PendingRequest]] = {}
        """Of requests that are not answered yet, as far as was noticed."""
        self._callbacks = CallbackRunner(self._runtime, network.transport.timeout)
        self._handlers: dict[str, list[int]] = {}
        self._closed = False

    @property
    def numel(self) -> int:
        """Keys of the space."""
        return self.description.numel

    @property
    def residual(self) -> Tensor | None:
        """What the codec has left unsent of this client's pushes, one element a key; None: it keeps nothing."""
        return self._outgoing.residual

    @property
    def bytes_wire(self) -> int:
        """Bytes of bodies, both ways."""
        return self._courier.bytes_sent + self._bytes_read

    # Values.

    def push(
        self,
        keys: Keys,
        values: Tensor,
        *,
        rate: float | None = None,
        scale: float = 1.0,
        handler: str | None = None,
        after: Iterable[int] = (),
        tick: bool = False,
        callback: Callable[[Future], None] | None = None,
    ) -> Future:
        """Send values to the servers' rule, or to a handler by its name.

        With `tick` the worker's clock advances: that was all of its step.
        """
        span = read_keys(keys, self.numel)
        values = as_values(values, length_of(span))
        request, load = pushing(protocol.PUSH, rate, scale), RequestPayload(keys=span, values=values)
        if handler is None and self._outgoing.filters:  # what is held back goes with pushes of any scale
            values = values if scale == 1.0 else values * scale
            load = replace(load, values=values, pick=partial(self._outgoing.choose, span, values))
            request = request._replace(scale=1.0)
        return self._go(request, load, after, callback, handler, tick)

    def pull(
        self,
        keys: Keys = None,
        out: Tensor | None = None,
        *,
        wanted: int = -1,
        after: Iterable[int] = (),
        coded: bool = False,
        callback: Callable[[Future], None] | None = None,
    ) -> Future:
        """Read values. With `wanted` it waits until every worker's clock is there; `coded`: by the space's codec."""
        span = read_keys(keys, self.numel)
        load = RequestPayload(keys=span, out=room_for(span, out), coded=coded)
        return self._go(RequestHeader(protocol.PULL, wanted=wanted), load, after, callback)

    def push_pull(
        self,
        keys: Keys,
        values: Tensor,
        out: Tensor | None = None,
        *,
        rate: float | None = None,
        scale: float = 1.0,
        handler: str | None = None,
        wanted: int = -1,
        after: Iterable[int] = (),
        tick: bool = False,
        coded: bool = False,
        callback: Callable[[Future], None] | None = None,
    ) -> Future:
        """Push, then read the same keys, in one message each way. Filters do not apply: all keys are read."""
        span = read_keys(keys, self.numel)
        values = as_values(values, length_of(span))
        load = RequestPayload(keys=span, values=values, out=room_for(span, out), coded=coded)
        request = pushing(protocol.PUSH_PULL, rate, scale)._replace(wanted=wanted)
        if not tick or max((len(cuts) for _, cuts in spans(self._cut(span))), default=0) <= protocol.WINDOW:
            return self._go(request, load, after, callback, handler, tick)
        # Reads that wait for this very step would fill the window before its last part is sent.
        brought = RequestPayload(keys=span, values=values)
        pushed = self._go(request._replace(kind=protocol.PUSH, wanted=-1), brought, after, None, handler, tick)
        reading = RequestPayload(keys=span, out=load.out, coded=coded)
        both = pushed.joined(self._go(RequestHeader(protocol.PULL, wanted=wanted), reading, (), None))
        with self._going:
            self._stamps[both.timestamp] = both.flights
        return self._called_back(both, callback)

    def push_factors(
        self,
        first: int,
        delta: Tensor,
        o: Tensor,
        *,
        rate: float | None = None,
        scale: float = 1.0,
        tick: bool = False,
    ) -> Future:
        """Push δᵀ · o, a matrix that lies in a row from key `first` on: the servers multiply. No codec, no filter."""
        span = read_keys((first, first + delta.shape[1] * o.shape[1]), self.numel)
        load = RequestPayload(keys=span, factors=(delta, o))
        return self._go(pushing(protocol.PUSH, rate, scale), load, (), None, tick=tick)

    def get(self, keys: Keys = None) -> Tensor:
        """The values, now."""
        found = self.pull(keys).wait()
        assert found is not None
        return found

    def put(self, keys: Keys, values: Tensor) -> None:
        """Replace the values, now."""
        self._plain(keys, values, "assign")

    def add(self, keys: Keys, values: Tensor) -> None:
        """Add to the values, now, whatever the rule is."""
        self._plain(keys, values, "add")

    def _plain(self, keys: Keys, values: Tensor, handler: str, plane: int = 0) -> None:
        span = read_keys(keys, self.numel)
        load = RequestPayload(keys=span, values=as_values(values, length_of(span)), plain=True)
        self._go(RequestHeader(protocol.PUSH, plane=plane), load, (), None, handler).wait()

    def flush(self) -> None:
        """Send what filters have held back; it is applied at once, and belongs to no step."""
        if self._outgoing.filters:
            load = RequestPayload(keys=(0, 0), pick=lambda _: self._outgoing.rest())
            self._go(RequestHeader(protocol.PUSH), load, (), None, stepless=True).wait()

    # The others.

    def steps(self) -> list[int]:
        """Steps that each worker has taken, as server 0 knows."""
        found = self.control({"do": "steps"})
        if found["below"]:  # sub-masters have clocks here, and tell of their workers
            return [int(found["below"].get(str(worker), [0])[0]) for worker in self.network.workers]
        return [int(each) for each in found["steps"]]

    def stop(self) -> None:
        """Tell all workers to end: their next answers say so, and reads no longer wait."""
        self.control({"do": "stop"}, everywhere=True)

    def applied(self) -> bool:
        """Whether all pushes are in the weights. Asked once every worker has finished training."""
        return True

    def finish_training(self) -> None:
        """This worker takes no more steps: its clock holds nobody back."""
        self.control({"do": "finish"}, everywhere=True)

    def post(self, kind: str, values: Sequence[float]) -> None:
        """Put numbers on the board."""
        self.control({"do": "post", "kind": kind, "values": [float(value) for value in values]})

    def read_posts(self, since: int = 0) -> list[Post]:
        """What was posted after the post of that number: as many as go in one message. The board keeps the latest few
        thousand: a gap in the numbers is what was dropped.
        """
        found = self.control({"do": "posts", "since": since})
        return [Post(int(number), str(kind), tuple(map(float, values))) for number, kind, values in found]

    def control(self, asked: dict[str, Any], everywhere: bool = False) -> Any:
        """Ask server 0, or all servers, for something that is not about values."""
        body = json_body(asked)
        if body.numel() > protocol.INLINE:
            raise ProtocolError(f"a control of {body.numel()} B, and {protocol.INLINE} B are the most")
        lines = self._courier.lines if everywhere else self._courier.lines[:1]
        flights = [self._courier.launch(line, RequestHeader(protocol.CONTROL), body) for line in lines]
        Future(self._courier, 0, flights).wait()
        told = [json.loads(flight.told) for flight in flights]
        return told if everywhere else told[0]

    def hello(self) -> None:
        """Tell the servers what the space is."""
        body = torch.from_numpy(np.frombuffer(self.description.to_json(), np.uint8).copy())
        flights = [self._courier.launch(line, RequestHeader(protocol.HELLO), body) for line in self._courier.lines]
        Future(self._courier, 0, flights).wait()

    def observe(self) -> Client:
        """Learn from a server what the space is, once the workers have told it; a client that watches it."""
        line = self._courier.lines[0]
        flight = self._courier.launch(line, RequestHeader(protocol.HELLO), nothing())
        Future(self._courier, 0, [flight]).wait()
        found = Client(self.network, SpaceDescription.from_json(flight.told), retry=self._courier.retry)
        line.index = found.description.servers.index(line.member)
        found._courier.lines[line.index] = line
        others = [each for each in found._courier.lines if each is not line]
        flights = [found._courier.launch(each, RequestHeader(protocol.HELLO), nothing()) for each in others]
        Future(found._courier, 0, flights).wait()
        return found

    def planes(self, names: Sequence[str] | None = None) -> list[str]:
        """The names of what the rule remembers, on all servers together; or tell them the names of a checkpoint."""
        if names is None:
            found = self.control({"do": "planes"}, everywhere=True)
            names = sorted({str(name) for each in found for name in each["names"]})
        self.control({"do": "planes", "names": list(names)}, everywhere=True)
        return list(names)

    def read_plane(self, number: int) -> Tensor:
        """One of them, as long as the space; counted from 1."""
        out = torch.empty(self.numel, dtype=torch.float32)
        self._go(
            RequestHeader(protocol.PULL, plane=number), RequestPayload(keys=(0, self.numel), out=out), (), None
        ).wait()
        return out

    def write_plane(self, number: int, values: Tensor) -> None:
        """Set one of them."""
        self._plain(None, values, "assign", plane=number)

    def close(self) -> None:
        """Leave, after what is under way; where this process holds a shard, when the others need it no more."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        flights = self._courier.under_way()
        for line in self._courier.lines:
            with suppress(SynclineError):  # who is lost needs no farewell
                flights.append(self._courier.launch(line, RequestHeader(protocol.BYE), nothing()))
        for flight in flights:
            self._courier.finish(flight)
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()

    # Within.

    def _cut(self, span: KeySelection) -> list[RequestPart]:
        return self._layout.cut_keys(span) if isinstance(span, Tensor) else self._layout.cut_range(*span)

    def _go(
        self,
        base: RequestHeader,
        load: RequestPayload,
        after: Iterable[int],
        callback: Callable[[Future], None] | None,
        handler: str | None = None,
        tick: bool = False,
        stepless: bool = False,
    ) -> Future:
        """Cut a request, send its parts, and count it."""
        if self._closed:
            raise WorldError(f"space {self.description.name!r} is closed here")
        simple = self._simple and handler is None and not (after or tick or stepless or load.factors or load.pick)
        if simple and not isinstance(load.keys, Tensor) and 4 * length_of(load.keys) <= protocol.INLINE:
            owner = self._layout.owner_of(*load.keys)
            if owner >= 0:
                return self._called_back(self._go_simply(base, load, *load.keys, owner), callback)
        if load.values is not None and not load.plain and handler is None:
            self._outgoing.check(load.values)
        numbers, everywhere = self._number_of(handler), tick or load.pick is not None
        parts = dict(spans(self._cut(load.keys)))
        earlier = self._finish_earlier(after, set(range(len(self._courier.lines)) if everywhere else parts))
        with self._going:
            if load.pick is not None:
                self._courier.check()
                keys, values = load.pick(self._stamp)
                load = replace(load, keys=keys, values=values)
                parts = dict(spans(self._cut(keys)))
            self._stamp += 1
            clock = self.clock if (tick or self.description.synchronous) and not stepless else -1
            base = base._replace(seed=self._stamp & 0xFFFFFFFF, clock=clock)
            flights: list[PendingRequest] = []
            for index in range(len(self._courier.lines)) if tick else parts:
                first = max((each.request.number for each in earlier if each.line.index == index), default=0)
                request = base._replace(handler=numbers[index]) if handler else base
                flights += self._send_parts(index, request, load, parts.get(index, []), first, tick)
            self._remember(flights)
            if tick:
                self.clock += 1
            future = Future(self._courier, self._stamp, flights, load.out)
        return self._called_back(future, callback)

    def _go_simply(self, base: RequestHeader, load: RequestPayload, first: int, after: int, owner: int) -> Future:
        """A short request about keys of one piece, as `_go` would send it."""
        line, count = self._courier.lines[owner], after - first
        body = nothing() if load.values is None else load.values.view(torch.uint8)
        with self._going:
            self._stamp += 1
            request = base._replace(seed=self._stamp & 0xFFFFFFFF, after=line.pushed, first=first, count=count)
            flight = self._courier.launch(line, request, body, load.out)
            self.bytes_logical += 4 * count * ((load.values is not None) + (load.out is not None))
            if base.kind != protocol.PULL:
                line.pushed = flight.request.number
            self._remember((flight,))
            return Future(self._courier, self._stamp, (flight,), load.out)

    def _remember(self, flights: Sequence[PendingRequest]) -> None:
        """Keep what a later request may name, as long as it is not answered: a window of each server at most."""
        if len(self._stamps) > 2 * protocol.WINDOW * len(self._courier.lines):
            under_way = {at: found for at, found in self._stamps.items() if not all(each.settled for each in found)}
            self._stamps = under_way
        self._stamps[self._stamp] = flights

    def _finish_earlier(self, after: Iterable[int], servers: set[int]) -> list[PendingRequest]:
        """See to it that requests come first. A server keeps the order of its own pushes; for what others have, and for
        reads, which may wait there, the answers are waited for. What is left for the server to order.
        """
        earlier: list[PendingRequest] = []
        for stamp in after:
            if not 1 <= stamp <= self._stamp:
                raise ProtocolError(
                    f"after={stamp}: this client of space {self.description.name!r} has given timestamps 1 to "
                    f"{self._stamp}; name those of its own futures"
                )
            earlier += self._stamps.get(stamp, ())
        for flight in earlier:
            if flight.reads or servers != {flight.line.index}:
                self._courier.finish(flight)
        return [flight for flight in earlier if not flight.settled]

    def _send_parts(
        self, index: int, base: RequestHeader, load: RequestPayload, cuts: Sequence[RequestPart], first: int, tick: bool
    ) -> list[PendingRequest]:
        """All that goes to one server, after the pushes before it; the last part of a step after all of it."""
        line, flights = self._courier.lines[index], []
        base = base._replace(after=max(first, line.pushed))
        for cut in cuts[:-1] if tick else cuts:
            flights.append(self._send_part(line, base, cut, load))
        if tick:
            last = base._replace(after=line.number, flags=protocol.TICK)
            if cuts:
                flights.append(self._send_part(line, last, cuts[-1], load))
            else:
                alone = last._replace(kind=protocol.PUSH, first=self._layout.shard(index)[0], handler=0)
                flights.append(self._courier.launch(line, alone, nothing()))
        if base.kind != protocol.PULL and flights:
            line.pushed = flights[-1].request.number
            line.ticked = line.pushed if tick else line.ticked
        return flights

    def _send_part(
        self, line: ServerConnection, request: RequestHeader, cut: RequestPart, load: RequestPayload
    ) -> PendingRequest:
        request = request._replace(first=cut.first, count=cut.count)
        own = load.keys[cut.start : cut.stop] if isinstance(load.keys, Tensor) else None
        body: list[Tensor] = []
        if load.values is not None:
            part = load.values[cut.start : cut.stop]
            if self._outgoing.codec is not None and not load.plain and not request.handler:
                body.append(self._outgoing.encode(part, cut, own, request.seed))
                request = request._replace(flags=request.flags | protocol.ENCODED)
            else:
                body.append(part.view(torch.uint8))
        if load.factors is not None:
            body.append(pack_range(*load.factors, cut.start, cut.stop))
            request = request._replace(flags=request.flags | protocol.FACTORS)
        if own is not None:
            request, listed = self._outgoing.name_keys(request, own, line.index)
            body = [*listed, *body]
        self.bytes_logical += 4 * cut.count * (bool(body) + (load.out is not None))
        whole = body[0] if len(body) == 1 else torch.cat(body) if body else nothing()
        into, view = None if load.out is None else load.out[cut.start : cut.stop], None
        if load.coded and into is not None and own is None and self._outgoing.codec is not None:
            request = request._replace(flags=request.flags | protocol.ANSWER_ENCODED)
            view = self._outgoing.view(cut.first, cut.count)
        return self._courier.launch(line, request, whole, into, keys=own, view=view)

    def _settle(self, flight: PendingRequest, reply: ReplyHeader) -> None:
        """Take in what an answer says."""
        if reply.status == protocol.REFUSED:
            self._learn_clock(flight, reply)
            text = flight.told.decode(errors="replace")
            raise ProtocolError(f"server {flight.line.index} refuses: {text}", peer=flight.line.member)
        if reply.status == protocol.ORPHANED:
            text = flight.told.decode(errors="replace")
            raise PeerLostError(f"sub-master {flight.line.member} has lost its parent: {text}", peer=flight.line.member)
        if flight.out is not None:
            self._bytes_read += reply.length
        if reply.flags & protocol.CODED:
            assert self._outgoing.codec is not None
            assert flight.view is not None
            assert flight.out is not None
            payload = torch.frombuffer(bytearray(flight.told), dtype=torch.uint8)
            self._outgoing.codec.decode(payload, flight.view, accumulate=True, step=flight.request.seed)
            flight.out.copy_(flight.view)
        elif flight.view is not None and flight.out is not None:
            flight.view.copy_(flight.out)
        if reply.status == protocol.LATE and flight.request.flags & protocol.TICK:
            self.clock = max(self.clock, reply.min_clock)
        told, stop = self.told, bool(reply.flags & protocol.STOP)
        steps, least = max(told.steps, reply.steps), max(told.min_clock, reply.min_clock)
        if steps != told.steps or least != told.min_clock or reply.live != told.live or stop > told.stop:
            self.told = ClusterStatus(told.stop or stop, steps, reply.live, least)

    def _learn_clock(self, flight: PendingRequest, reply: ReplyHeader) -> None:
        """A refused step is over, as the clock that comes with the refusal says. Where it says something else, the
        worker goes on from there; later steps under way know better.
        """
        request = flight.request
        latest = request.flags & protocol.TICK and request.number == flight.line.ticked
        if latest and reply.min_clock not in (-1, request.clock + 1):
            self.clock = reply.min_clock

    def _number_of(self, handler: str | None) -> list[int]:
        """What each server knows a handler by."""
        if handler is None:
            return [0] * len(self._courier.lines)
        if handler not in self._handlers:
            found = self.control({"do": "handler", "name": handler}, everywhere=True)
            self._handlers[handler] = [int(each["number"]) for each in found]
        return self._handlers[handler]

    def _called_back(self, future: Future, callback: Callable[[Future], None] | None) -> Future:
        if callback is not None:
            self._callbacks.add(future, callback)
        return future


@dataclass(frozen=True)
class ClusterStatus:
    """What the latest answer said of the others, without a message of its own."""

    stop: bool = False
    steps: int = 0
    live: int = 0
    min_clock: int = 0


class Future:
    """Requests under way; `wait()` gives what was pulled.

    `timestamp` may be named in a later request's `after`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.store(2) as store:
    ...     first = store.push(None, torch.ones(2))
    ...     store.pull(after=[first.timestamp]).wait()
    tensor([1., 1.])
    """

    def __init__(
        self, courier: RequestSender, timestamp: int, flights: Sequence[PendingRequest], out: Tensor | None = None
    ) -> None:
        self.timestamp = timestamp
        self._courier = courier
        self._flights = flights
        self._out = out

    def done(self) -> bool:
        """Whether every server has answered, as far as that can be told without a wait.

        Then `wait()` returns at once, or when what an answer announces is in. Only `wait()` deals with a server that
        asks for a list of keys again and with answers that the network doubles. On MPI it is True once `wait()` was
        through.
        """
        return all(flight.arrived for flight in self._flights)

    def wait(self) -> Tensor | None:
        """Return when every server has answered; what one refuses is a `ProtocolError`."""
        for flight in self._flights:
            self._courier.finish(flight)
        for flight in self._flights:
            if flight.error is not None:
                raise flight.error
        return self._out

    @property
    def flights(self) -> Sequence[PendingRequest]:
        """Its parts, one for each piece."""
        return self._flights

    def joined(self, other: Future) -> Future:
        """Both in one: what the other pulled, and its timestamp."""
        return Future(self._courier, other.timestamp, [*self._flights, *other._flights], other._out)

    @property
    def late(self) -> bool:
        """Whether a quorum had closed the step without this push, on any server."""
        return any(flight.reply is not None and flight.reply.status == protocol.LATE for flight in self._flights)

    @property
    def staleness(self) -> int:
        """Of what was read, or of what the push was computed from: the most over the servers; −1: not known."""
        return max((flight.reply.staleness for flight in self._flights if flight.reply is not None), default=-1)


@dataclass(frozen=True, kw_only=True)
class RequestPayload:
    """What one request carries, and how; the same for all its parts."""

    keys: KeySelection
    values: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    out: Tensor | None = None
    coded: bool = False
    """Whether the answer may come in the space's codec."""
    plain: bool = False
    """Whether the values go as they are, whatever the codec."""
    pick: Callable[[int], tuple[KeySelection, Tensor]] | None = None
    """Where a filter says what goes: by the number of the push, when nothing can refuse it any more."""


def pushing(kind: int, rate: float | None, scale: float) -> RequestHeader:
    """A push, with numbers that a server takes."""
    if not isfinite(scale) or (rate is not None and not isfinite(rate)):
        raise ProtocolError(f"rate={rate} and scale={scale}: both are finite numbers, or rate=None for the rule's own")
    return RequestHeader(kind, rate=nan if rate is None else rate, scale=scale)


Callback = Callable[[Future], None]


class _Task:
    """What one task has to do yet."""

    def __init__(self, of: CallbackRunner) -> None:
        self.of = of
        self.rest: deque[tuple[Future, Callback]] = deque()


_current: ContextVar[_Task | None] = ContextVar("syncline_callback", default=None)
"""The task that is calling back: it must not wait for a task to be free, as it may be the one."""


class CallbackRunner:
    """The callbacks of one client, at most `WINDOW` at once."""

    def __init__(self, runtime: Runtime, patience: float) -> None:
        self._runtime = runtime
        self._patience = patience
        self._lock = runtime.lock()
        self._busy = 0
        self._freed = runtime.event()

    def add(self, future: Future, callback: Callback) -> None:
        """Have the future waited for, and the callback called with it."""
        until = self._runtime.now() + self._patience
        own = _current.get()
        while True:
            with self._lock:
                if self._busy < WINDOW:
                    self._busy += 1
                    break
                self._freed.clear()
            if own is not None and own.of is self:
                own.rest.append((future, callback))
                return
            left = until - self._runtime.now()
            if left <= 0 or not self._freed.wait(left, f"one of {WINDOW} callbacks to return", hang=True):
                raise WorldError(
                    f"{WINDOW} callbacks have not returned within {self._patience:.0f} s, and no more are called at "
                    "once: let them return, or wait for futures instead"
                )
        self._runtime.spawn(self._run, future, callback, name="callback")

    def _run(self, future: Future, callback: Callback) -> None:
        task = _Task(self)
        _current.set(task)
        task.rest.append((future, callback))
        try:
            while task.rest:
                _call_back(*task.rest.popleft())
        finally:
            with self._lock:
                self._busy -= 1
                self._freed.set()


def _call_back(future: Future, callback: Callback) -> None:
    try:
        future.wait()
    finally:
        callback(future)
