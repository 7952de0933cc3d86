"""A client of a space: push, pull, futures, and control requests."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Runtime
from syncline.server import protocol
from syncline.server.factors import pack_range
from syncline.server.filters import Filter
from syncline.server.network import ServerNetwork
from syncline.server.protocol import ReplyHeader, RequestHeader, bytes_tensor, json_body
from syncline.server.push_encoder import PushEncoder
from syncline.server.request_sender import EMPTY_BODY, PendingRequest, RequestSender, ServerConnection, ShardServers
from syncline.server.space import (
    Keys,
    KeySelection,
    RequestPart,
    SpaceDescription,
    check_out,
    check_values,
    parse_keys,
)

__all__ = ["Client", "ClusterStatus", "Future"]


@dataclass(frozen=True)
class ClusterStatus:
    """What the latest reply told about the other workers."""

    stop: bool = False
    """Whether all workers are asked to end."""
    steps: int = 0
    """Steps of all workers together."""
    live: int = 0
    """Workers that still train."""
    min_clock: int = 0
    """The slowest worker's clock."""


class Future:
    """A request in flight; `wait()` returns the values of a pull.

    A later request can name the `timestamp` in its `after`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.server.store(2) as store:
    ...     first = store.push(None, torch.ones(2))
    ...     store.pull(after=[first.timestamp]).wait()
    tensor([1., 1.])
    """

    def __init__(
        self, sender: RequestSender, timestamp: int, requests: Sequence[PendingRequest], out: Tensor | None = None
    ) -> None:
        self.timestamp = timestamp
        self.requests = requests
        """One for each part of the request."""
        self._sender = sender
        self._out = out

    def done(self) -> bool:
        """Whether every server has replied, as far as that is known without waiting.

        On MPI it becomes True only after `wait()`. If a server asks for a list of keys again, or the network duplicates
        a reply, `wait()` may still block after `done()` was True.
        """
        return all(request.arrived for request in self.requests)

    def wait(self) -> Tensor | None:
        """Return when every server has replied. A refused request raises a `ProtocolError`."""
        for request in self.requests:
            self._sender.finish(request)
        for request in self.requests:
            if request.error is not None:
                raise request.error
        return self._out

    def join(self, other: Future) -> Future:
        """A future of both requests, with the values and the timestamp of the other."""
        return Future(self._sender, other.timestamp, [*self.requests, *other.requests], other._out)

    @property
    def late(self) -> bool:
        """Whether any server closed the step by a quorum without this push."""
        return any(request.reply is not None and request.reply.status == protocol.LATE for request in self.requests)

    @property
    def staleness(self) -> int:
        """In steps, the largest over the servers: of the values read, or of those a push was computed from.

        −1: unknown.
        """
        return max((request.reply.staleness for request in self.requests if request.reply is not None), default=-1)


@dataclass(frozen=True, kw_only=True)
class _Payload:
    """What a request sends and reads, before it is split into parts."""

    keys: KeySelection
    values: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    out: Tensor | None = None
    encoded: bool = False
    """Whether the reply may be encoded by the space's codec."""
    plain: bool = False
    """Whether the values are sent without the codec."""
    select: Callable[[int], tuple[KeySelection, Tensor]] | None = None
    """For filters: selects keys and values by the push's number, once nothing can refuse the push."""


class Client:
    """One member's access to a space of float32 keys, sharded over servers. Made by `sl.server.store`.

    Keys are a range, (first, end), a slice, a sorted int64 tensor, or None for all. Do not change pushed values before
    their future was waited for. A server applies one client's pushes in order, and a client reads its own writes.

    >>> import torch, syncline as sl
    >>> def count(world):
    ...     with sl.server.store(4) as store:
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
        retry_s: float | None = None,
        seed: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.description = description
        self.network = network
        self.root: Client = self
        """The client for everything that is not about a step. In a tree of masters it is the client of the root."""
        self.clock = 0
        """The number of this worker's next step. `join` sets it to that of the others."""
        self.ticks = 0
        """Steps that this worker has pushed."""
        self.status = ClusterStatus()
        self.bytes_logical = 0
        chains = [ShardServers(network, server) for server in description.servers]
        self.sender = RequestSender(network.transport, description.space_id, chains, retry_s, self._handle_reply)
        self._bytes_read = 0
        self._layout = description.layout
        self._lock = network.transport.runtime.lock()
        self.encoder = PushEncoder(description.numel, description.built_codec, filters, seed, network.me)
        self._simple = not (description.codec or description.synchronous or self.encoder.holds_back)
        """Whether a short request consists of its header and its values only."""
        self._on_close = on_close
        self._timestamp = 0
        self._by_timestamp: dict[int, Sequence[PendingRequest]] = {}
        """Requests that `after` may name. Finished ones are removed from time to time."""
        self._callbacks = _CallbackRunner(network.transport.runtime, network.transport.timeout)
        self._handlers: dict[str, list[int]] = {}
        self._closed = False

    @property
    def numel(self) -> int:
        """Number of keys."""
        return self.description.numel

    @property
    def residual(self) -> Tensor | None:
        """The part of this client's pushes that the codec has not sent, one element for each key; None: no residual."""
        return self.encoder.residual

    @property
    def bytes_wire(self) -> int:
        """Bytes of bodies, sent and received."""
        return self.sender.bytes_sent + self._bytes_read

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

        `tick` ends the worker's step: its clock advances.
        """
        chosen = parse_keys(keys, self.numel)
        values = check_values(values, chosen)
        header = _push_header(protocol.PUSH, rate, scale)
        if not (handler or after or tick) and (future := self._submit_short(header, chosen, values, None)):
            return self._with_callback(future, callback)
        payload = _Payload(keys=chosen, values=values)
        if handler is None and self.encoder.holds_back:  # values held back are sent with pushes of any scale
            values = values if scale == 1.0 else values * scale
            payload = replace(payload, values=values, select=partial(self.encoder.select, chosen, values))
            header = header._replace(scale=1.0)
        return self._submit(header, payload, after, callback, handler, tick)

    def pull(
        self,
        keys: Keys = None,
        out: Tensor | None = None,
        *,
        min_clock: int = -1,
        after: Iterable[int] = (),
        encoded: bool = False,
        callback: Callable[[Future], None] | None = None,
    ) -> Future:
        """Read values, into `out` if it is given.

        The read waits until every worker's clock is at least `min_clock`. `encoded`: the space's codec encodes the
        reply.
        """
        chosen = parse_keys(keys, self.numel)
        out, header = check_out(out, chosen), RequestHeader(protocol.PULL, min_clock=min_clock)
        if not after and (future := self._submit_short(header, chosen, None, out)):
            return self._with_callback(future, callback)
        return self._submit(header, _Payload(keys=chosen, out=out, encoded=encoded), after, callback)

    def push_pull(
        self,
        keys: Keys,
        values: Tensor,
        out: Tensor | None = None,
        *,
        rate: float | None = None,
        scale: float = 1.0,
        handler: str | None = None,
        min_clock: int = -1,
        after: Iterable[int] = (),
        tick: bool = False,
        encoded: bool = False,
        callback: Callable[[Future], None] | None = None,
    ) -> Future:
        """Push, then read the same keys, with one message each way. Filters do not apply: all keys are sent."""
        chosen = parse_keys(keys, self.numel)
        values, out = check_values(values, chosen), check_out(out, chosen)
        header = _push_header(protocol.PUSH_PULL, rate, scale, min_clock)
        if not (handler or after or tick) and (future := self._submit_short(header, chosen, values, out)):
            return self._with_callback(future, callback)
        payload = _Payload(keys=chosen, values=values, out=out, encoded=encoded)
        if not tick or not self._exceeds_inflight_limit(chosen):
            return self._submit(header, payload, after, callback, handler, tick)
        # Reads that wait for this very step would reach the in-flight limit before its last part is sent.
        push = header._replace(kind=protocol.PUSH, min_clock=-1)
        pushed = self._submit(push, replace(payload, out=None), after, None, handler, tick)
        pull = RequestHeader(protocol.PULL, min_clock=min_clock)
        both = pushed.join(self._submit(pull, replace(payload, values=None)))
        with self._lock:
            self._by_timestamp[both.timestamp] = both.requests
        return self._with_callback(both, callback)

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
        """Push the matrix δᵀ · o, flattened, from key `first` on. The servers multiply; no codec or filter applies."""
        keys = parse_keys((first, first + delta.shape[1] * o.shape[1]), self.numel)
        header = _push_header(protocol.PUSH, rate, scale)
        return self._submit(header, _Payload(keys=keys, factors=(delta, o)), tick=tick)

    def get(self, keys: Keys = None) -> Tensor:
        """Read values and wait for them."""
        values = self.root.pull(keys).wait()
        assert values is not None
        return values

    def put(self, keys: Keys, values: Tensor) -> None:
        """Replace values, and wait until it is done. The rule does not apply."""
        self._push_plain(keys, values, "assign")

    def add(self, keys: Keys, values: Tensor) -> None:
        """Add to values, and wait until it is done. The rule does not apply."""
        self._push_plain(keys, values, "add")

    def _push_plain(self, keys: Keys, values: Tensor, handler: str, state_slot: int = 0) -> None:
        chosen = parse_keys(keys, self.numel)
        payload = _Payload(keys=chosen, values=check_values(values, chosen), plain=True)
        self.root._submit(RequestHeader(protocol.PUSH, state_slot=state_slot), payload, handler=handler).wait()

    def flush(self) -> None:
        """Send the values that filters have held back. They belong to no step and are applied at once."""
        if self.encoder.holds_back:
            payload = _Payload(keys=(0, 0), select=lambda _: self.encoder.take_unsent())
            self._submit(RequestHeader(protocol.PUSH), payload, stepless=True).wait()

    # The optimizer state at the servers.

    def optimizer_state(self, names: Sequence[str] | None = None) -> list[str]:
        """The names of the tensors that the rules keep, on all servers together. Their slots are numbered from 1.

        With `names`, as for a checkpoint, these names are numbered.
        """
        if names is None:
            replies = self.root.control({"do": "planes"}, everywhere=True)
            names = sorted({str(name) for reply in replies for name in reply["names"]})
        self.root.control({"do": "planes", "names": list(names)}, everywhere=True)
        return list(names)

    def read_state(self, slot: int) -> Tensor:
        """Read one tensor of the optimizer state, with one element for each key."""
        out = torch.empty(self.numel, dtype=torch.float32)
        payload = _Payload(keys=(0, self.numel), out=out)
        self.root._submit(RequestHeader(protocol.PULL, state_slot=slot), payload).wait()
        return out

    def write_state(self, slot: int, values: Tensor) -> None:
        """Replace one tensor of the optimizer state."""
        self._push_plain(None, values, "assign", state_slot=slot)

    # The other workers.

    def steps(self) -> list[int]:
        """The number of steps of each worker, as server 0 knows it."""
        reply = self.root.control({"do": "steps"})
        if reply["below"]:  # sub-masters have the clocks, and report the steps of their workers
            return [int(reply["below"].get(str(worker), [0])[0]) for worker in self.network.workers]
        return [int(steps) for steps in reply["steps"]]

    def stop(self) -> None:
        """Ask all workers to end: their next replies say so, and reads no longer wait."""
        self.control({"do": "stop"}, everywhere=True)

    def applied(self) -> bool:
        """Whether all pushes are in the weights. Called when every worker has finished training."""
        return True

    def finish_training(self) -> None:
        """This worker takes no more steps: no read waits for its clock."""
        self.control({"do": "finish"}, everywhere=True)

    def pause(self) -> None:
        """This worker takes no steps until it calls `join`: no read waits for its clock."""
        self.control({"do": "pause"}, everywhere=True)

    def join(self) -> None:
        """Take part with a clock: in a worker that joins the job, or continues after a pause.

        The clock is the latest of the slowest clocks of all servers. Each server first holds its slowest clock, so that
        none passes the chosen one meanwhile.
        """
        first = [int(reply["clock"]) for reply in self.control({"do": "join"}, everywhere=True)]
        clock = max(first)
        if clock > min(first):
            clock = max(int(reply["clock"]) for reply in self.control({"do": "join", "clock": clock}, everywhere=True))
        self.clock = clock
        # If all workers have paused, the latest replies say that none trains.
        self.status = replace(self.status, min_clock=min(self.status.min_clock, clock))

    def control(self, request: dict[str, Any], everywhere: bool = False) -> Any:
        """Send a JSON request to server 0, or to all servers, and return the reply or the list of replies."""
        body = json_body(request)
        if body.numel() > protocol.MAX_INLINE_BYTES:
            raise ProtocolError(
                f"a control request of {body.numel()} B; at most {protocol.MAX_INLINE_BYTES} B are allowed"
            )
        connections = self.sender.connections if everywhere else self.sender.connections[:1]
        replies = [json.loads(reply) for reply in self._ask(protocol.CONTROL, connections, body)]
        return replies if everywhere else replies[0]

    # Opening and closing.

    def hello(self) -> None:
        """Send the space's description to the servers."""
        self._ask(protocol.HELLO, self.sender.connections, bytes_tensor(self.description.to_json()))

    def hello_as_newcomer(self) -> None:
        """Open a space that the other workers have opened, without a clock. The space must be the same."""
        for reply in self._ask(protocol.HELLO, self.sender.connections):
            found, own = SpaceDescription.from_json(reply), self.description
            if found != own:
                changed = [each.name for each in fields(found) if getattr(found, each.name) != getattr(own, each.name)]
                values = ", ".join(
                    f"{name}: {getattr(found, name)!r:.80}, here {getattr(own, name)!r:.80}" for name in changed
                )
                raise IncompatibleError(
                    f"this worker cannot join space {own.name!r}: its model or its optimizer is not that of the others "
                    f"({values})"
                )

    def observe(self) -> Client:
        """Ask a server for the space's description, once the workers have sent it; return a client that observes."""
        first = self.sender.connections[0]
        description = SpaceDescription.from_json(self._ask(protocol.HELLO, [first])[0])
        observer = Client(self.network, description, retry_s=self.sender.retry_s)
        connections = observer.sender.connections
        first.index = description.servers.index(first.chain[0])
        connections[first.index] = first
        observer._ask(protocol.HELLO, [each for each in connections if each is not first])
        return observer

    def _ask(self, kind: int, connections: Iterable[ServerConnection], body: Tensor = EMPTY_BODY) -> list[bytes]:
        """Send the same request to several servers, and return the bodies of their replies."""
        requests = [self.sender.send(each, RequestHeader(kind), body) for each in connections]
        Future(self.sender, 0, requests).wait()
        return [each.reply_body for each in requests]

    def close(self) -> None:
        """Leave the space after the pending requests. A process that holds a shard waits until the others have left."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        requests = self.sender.pending_requests()
        for connection in self.sender.connections:
            with suppress(SynclineError):  # a lost server gets no goodbye
                requests.append(self.sender.send(connection, RequestHeader(protocol.BYE)))
        for request in requests:
            self.sender.finish(request)
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()

    # Sending.

    def _exceeds_inflight_limit(self, keys: KeySelection) -> bool:
        if len(self._layout.edges) <= protocol.MAX_INFLIGHT_REQUESTS:  # so few pieces has the whole space
            return False
        return max(map(len, self._layout.split(keys).values()), default=0) > protocol.MAX_INFLIGHT_REQUESTS

    def _submit(
        self,
        header: RequestHeader,
        payload: _Payload,
        after: Iterable[int] = (),
        callback: Callable[[Future], None] | None = None,
        handler: str | None = None,
        tick: bool = False,
        stepless: bool = False,
    ) -> Future:
        """Split a request into parts and send them."""
        if self._closed:
            raise WorldError(f"space {self.description.name!r} is closed here")
        if payload.values is not None and not payload.plain and handler is None and self.encoder.codec is not None:
            self.encoder.check_finite(payload.values)
        servers = range(len(self.sender.connections))
        handler_numbers = None if handler is None else self._handler_numbers(handler)
        parts = self._layout.split(payload.keys)
        everywhere = tick or payload.select is not None
        earlier = self._finish_earlier(after, set(servers if everywhere else parts)) if after else []
        with self._lock:
            if payload.select is not None:
                self.sender.check()
                keys, values = payload.select(self._timestamp)
                payload = replace(payload, keys=keys, values=values)
                parts = self._layout.split(keys)
            self._timestamp += 1
            clock = self.clock if (tick or self.description.synchronous) and not stepless else -1
            header = header._replace(seed=self._timestamp & 0xFFFFFFFF, clock=clock)
            requests: list[PendingRequest] = []
            for index in servers if tick else parts:
                first = max([each.header.number for each in earlier if each.connection.index == index], default=0)
                if handler_numbers is not None:
                    header = header._replace(handler=handler_numbers[index])
                requests += self._send_parts(index, header, payload, parts.get(index, []), first, tick)
            self._remember(requests)
            if tick:
                self.clock += 1
                self.ticks += 1
            future = Future(self.sender, self._timestamp, requests, payload.out)
        return self._with_callback(future, callback)

    def _submit_short(
        self, header: RequestHeader, keys: KeySelection, values: Tensor | None, out: Tensor | None
    ) -> Future | None:
        """Send a short request about a range in one piece, with the same result as `_submit`; None for any other."""
        if not self._simple or self._closed or isinstance(keys, Tensor):
            return None
        first, end = keys
        owner = self._layout.owner_of(first, end) if 4 * (end - first) <= protocol.MAX_INLINE_BYTES else -1
        if owner < 0:
            return None
        connection = self.sender.connections[owner]
        body = EMPTY_BODY if values is None else values
        with self._lock:
            self._timestamp = timestamp = self._timestamp + 1
            place = (connection.last_push, first, end - first, timestamp & 0xFFFFFFFF)
            request = self.sender.send(connection, header, body, out, place=place)
            self.bytes_logical += 4 * (end - first) * ((values is not None) + (out is not None))
            if values is not None:
                connection.last_push = request.header.number
            self._remember((request,))
            return Future(self.sender, timestamp, (request,), out)

    def _remember(self, requests: Sequence[PendingRequest]) -> None:
        """Keep requests that a later `after` may name, until they are finished."""
        if len(self._by_timestamp) > 2 * protocol.MAX_INFLIGHT_REQUESTS * len(self.sender.connections):
            self._by_timestamp = {
                timestamp: requests
                for timestamp, requests in self._by_timestamp.items()
                if not all(request.finished for request in requests)
            }
        self._by_timestamp[self._timestamp] = requests

    def _finish_earlier(self, after: Iterable[int], servers: set[int]) -> list[PendingRequest]:
        """Wait for requests that must come first, and return those whose order the server ensures.

        A server keeps the order of one client's pushes. Requests at other servers, and reads, must be waited for here.
        """
        earlier: list[PendingRequest] = []
        for timestamp in after:
            if not 1 <= timestamp <= self._timestamp:
                raise ProtocolError(
                    f"after={timestamp}: this client of space {self.description.name!r} has given timestamps 1 to "
                    f"{self._timestamp}; use those of its own futures"
                )
            earlier += self._by_timestamp.get(timestamp, ())
        for request in earlier:
            if request.reads or servers != {request.connection.index}:
                self.sender.finish(request)
        return [request for request in earlier if not request.finished]

    def _send_parts(
        self, index: int, header: RequestHeader, payload: _Payload, parts: Sequence[RequestPart], first: int, tick: bool
    ) -> list[PendingRequest]:
        """Send all parts for one server, after earlier pushes. The last part of a step comes after all others."""
        connection = self.sender.connections[index]
        header = header._replace(after=max(first, connection.last_push))
        requests = [self._send_part(connection, header, part, payload) for part in (parts[:-1] if tick else parts)]
        if tick:
            last = header._replace(after=connection.last_number, flags=protocol.TICK)
            if parts:
                requests.append(self._send_part(connection, last, parts[-1], payload))
            else:  # this server has none of the keys, and must still learn that the step ends
                last = last._replace(kind=protocol.PUSH, first=self._layout.shard(index)[0], handler=0)
                requests.append(self.sender.send(connection, last))
        if header.kind != protocol.PULL and requests:
            connection.last_push = requests[-1].header.number
            connection.last_tick = connection.last_push if tick else connection.last_tick
        return requests

    def _send_part(
        self, connection: ServerConnection, header: RequestHeader, part: RequestPart, payload: _Payload
    ) -> PendingRequest:
        encoder, flags, bodies = self.encoder, header.flags, list[Tensor]()
        keys = payload.keys[part.start : part.stop] if isinstance(payload.keys, Tensor) else None
        if payload.values is not None:
            values = payload.values[part.start : part.stop]
            if encoder.codec is not None and not payload.plain and not header.handler:
                bodies.append(encoder.encode(values, part, keys, header.seed))
                flags |= protocol.ENCODED
            else:
                bodies.append(values.view(torch.uint8))
        if payload.factors is not None:
            bodies.append(pack_range(*payload.factors, part.start, part.stop))
            flags |= protocol.FACTORS
        out, view = None if payload.out is None else payload.out[part.start : part.stop], None
        if payload.encoded and out is not None and keys is None and encoder.codec is not None:
            flags |= protocol.ENCODE_REPLY
            view = encoder.view(part.first, part.count)
        header = header._replace(first=part.first, count=part.count, flags=flags)
        if keys is not None:
            header, rows = encoder.attach_keys(header, keys, connection.index)
            bodies = [*rows, *bodies]
        self.bytes_logical += 4 * part.count * (bool(bodies) + (out is not None))
        body = bodies[0] if len(bodies) == 1 else torch.cat(bodies) if bodies else EMPTY_BODY
        return self.sender.send(connection, header, body, out, keys=keys, view=view)

    # Replies.

    def _handle_reply(self, request: PendingRequest, reply: ReplyHeader) -> None:
        if reply.status in (protocol.REFUSED, protocol.ORPHANED):
            self._raise_refusal(request, reply)
        if request.out is not None:
            self._bytes_read += reply.length
        if request.view is not None and request.out is not None:
            if reply.flags & protocol.REPLY_ENCODED:
                assert self.encoder.codec is not None, "only a client with a codec has views"
                payload = torch.frombuffer(bytearray(request.reply_body), dtype=torch.uint8)
                self.encoder.codec.decode(payload, request.view, accumulate=True, step=request.header.seed)
                request.out.copy_(request.view)
            else:
                request.view.copy_(request.out)
        if reply.status == protocol.LATE and request.header.flags & protocol.TICK:
            self.clock = max(self.clock, reply.min_clock)
        status, stop = self.status, bool(reply.flags & protocol.STOP)
        steps, least = max(status.steps, reply.steps), max(status.min_clock, reply.min_clock)
        if steps != status.steps or least != status.min_clock or reply.live != status.live or stop > status.stop:
            self.status = ClusterStatus(status.stop or stop, steps, reply.live, least)

    def _raise_refusal(self, request: PendingRequest, reply: ReplyHeader) -> None:
        connection, text = request.connection, request.reply_body.decode(errors="replace")
        if reply.status == protocol.ORPHANED:
            raise PeerLostError(f"sub-master {connection.member} has lost its parent: {text}", peer=connection.member)
        # A refused step has ended. If the server's clock is not the next one, the worker continues from the server's;
        # a later step in flight gets a more recent clock.
        header = request.header
        latest = header.flags & protocol.TICK and header.number == connection.last_tick
        if latest and reply.min_clock not in (-1, header.clock + 1):
            self.clock = reply.min_clock
        raise ProtocolError(f"server {connection.index} refuses: {text}", peer=connection.member)

    def _handler_numbers(self, handler: str) -> list[int]:
        """The number of a handler at each server."""
        if handler not in self._handlers:
            replies = self.control({"do": "handler", "name": handler}, everywhere=True)
            self._handlers[handler] = [int(reply["number"]) for reply in replies]
        return self._handlers[handler]

    def _with_callback(self, future: Future, callback: Callable[[Future], None] | None) -> Future:
        if callback is not None:
            self._callbacks.add(future, callback)
        return future


def _push_header(kind: int, rate: float | None, scale: float, min_clock: int = -1) -> RequestHeader:
    if not isfinite(scale) or (rate is not None and not isfinite(rate)):
        raise ProtocolError(f"rate={rate} and scale={scale}: both are finite numbers, or rate=None for the rule's own")
    return RequestHeader(kind, min_clock=min_clock, rate=nan if rate is None else rate, scale=scale)


class _CallbackRunner:
    """Calls the callbacks of one client, in at most `MAX_INFLIGHT_REQUESTS` tasks at once.

    If all tasks are busy, the caller waits. A callback that adds another callback does not wait: its own task calls it
    next.
    """

    def __init__(self, runtime: Runtime, timeout_s: float) -> None:
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._lock = runtime.lock()
        self._busy = 0
        self._freed = runtime.event()

    def add(self, future: Future, callback: Callable[[Future], None]) -> None:
        """Wait for the future in a task, then call the callback with it."""
        limit, deadline = protocol.MAX_INFLIGHT_REQUESTS, self._runtime.now() + self._timeout_s
        current = _current_task.get()
        while True:
            with self._lock:
                if self._busy < limit:
                    self._busy += 1
                    break
                self._freed.clear()
            if current is not None and current.runner is self:
                current.queue.append((future, callback))
                return
            left = deadline - self._runtime.now()
            if left <= 0 or not self._freed.wait(left, f"one of {limit} callbacks to return", hang=True):
                raise WorldError(
                    f"{limit} callbacks have not returned within {self._timeout_s:.0f} s, and no more run at once: let "
                    "them return, or wait for futures instead"
                )
        self._runtime.spawn(self._run, future, callback, name="callback")

    def _run(self, future: Future, callback: Callable[[Future], None]) -> None:
        task = _CallbackTask(self, deque([(future, callback)]))
        _current_task.set(task)
        try:
            while task.queue:
                future, callback = task.queue.popleft()
                try:
                    future.wait()
                finally:
                    callback(future)
        finally:
            with self._lock:
                self._busy -= 1
                self._freed.set()


@dataclass
class _CallbackTask:
    runner: _CallbackRunner
    queue: deque[tuple[Future, Callable[[Future], None]]]


_current_task: ContextVar[_CallbackTask | None] = ContextVar("syncline_callback", default=None)
"""The task that calls a callback. It must not wait for a free task, because it may be the only one."""
