"""What a server does with requests, without a transport."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from syncline.server import handler, protocol
from syncline.server.protocol import MAX_CACHED_KEY_LISTS, RequestHeader, json_body
from syncline.server.request_handler import RequestHandler
from syncline.server.shard import MAX_STEPS_AHEAD
from syncline.server.space import SpaceDescription
from tests.server.handler_client import (
    NUMEL,
    WORKERS,
    HandlerClient,
    body_of,
    describe,
    handler_with,
    reason_of,
    values_of,
)

KEYS, CACHED, TICK = protocol.KEYS, protocol.CACHED, protocol.TICK
OK, LATE, NEED_KEYS = protocol.OK, protocol.LATE, protocol.NEED_KEYS


@handler("half_then_raise")
def half_then_raise(weights: torch.Tensor, values: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    weights[: weights.numel() // 2] += values[: weights.numel() // 2]
    raise RuntimeError("out of luck")


@handler("counts", state={"seen": 0.0})
def counts(weights: torch.Tensor, values: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    state["seen"] = state["seen"] + 1  # not in place, and kept all the same
    weights.copy_(state["seen"])


@handler("resizes")
def resizes(weights: torch.Tensor, values: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    weights.resize_(1)


def test_a_repeated_request_is_answered_again_and_applied_once() -> None:
    (client,) = handler_with(0)
    request, body = RequestHeader(protocol.PUSH_PULL, count=NUMEL), body_of(torch.ones(NUMEL))
    first = client.ask(request, body, number=2)
    again = client.ask(request, body, number=2)
    assert values_of(first) == values_of(again) == [1.0] * NUMEL
    assert first.header == again.header


def test_acknowledged_replies_are_dropped() -> None:
    (client,) = handler_with(0)
    request, body = RequestHeader(protocol.PUSH, count=NUMEL), body_of(torch.ones(NUMEL))
    client.ask(request, body, number=2)
    client.acked = 2
    client.ask(request, body, number=3)
    assert client.send(request._replace(acked=1), body, number=2) == []
    assert client.space.weights.tolist() == [2.0] * NUMEL
    assert set(client.handler.sessions[client.description.space_id, 0].replies) == {3}


def test_requests_wait_for_earlier_ones_in_any_order_of_arrival() -> None:
    (client,) = handler_with(0, rules=("assign",))
    late = RequestHeader(protocol.PUSH, count=NUMEL, after=2)
    assert client.send(late, body_of(torch.full((NUMEL,), 3.0)), number=3) == []
    found = client.send(RequestHeader(protocol.PUSH, count=NUMEL), body_of(torch.full((NUMEL,), 2.0)), number=2)
    assert [answer.header.number for answer in found] == [2, 3]
    assert client.space.weights.tolist() == [3.0] * NUMEL


def test_a_client_without_acknowledgements_is_bounded() -> None:
    (client,) = handler_with(0)
    session = client.handler.sessions[client.description.space_id, 0]
    for _ in range(5 * protocol.REPLY_SLOTS):
        answer = client.push(torch.ones(NUMEL))
    assert "at most 64 at once" in reason_of(answer)
    assert len(session.replies) == protocol.REPLY_SLOTS
    assert client.space.weights.tolist() == [float(protocol.REPLY_SLOTS - 1)] * NUMEL  # hello was the first
    assert not session.deferred
    assert not session.ahead
    client.acked, client.number = protocol.REPLY_SLOTS, protocol.REPLY_SLOTS  # it has read them: on it goes
    assert client.push(torch.ones(NUMEL)).header.status == OK
    assert len(session.replies) == 1


def test_deferred_requests_are_bounded() -> None:
    (client,) = handler_with(0)
    for number in range(3, 10 * protocol.REPLY_SLOTS):  # all of them wait for number 2, which never comes
        client.send(RequestHeader(protocol.PUSH, count=NUMEL, after=2), body_of(torch.ones(NUMEL)), number=number)
    assert len(client.handler.sessions[client.description.space_id, 0].deferred) <= protocol.REPLY_SLOTS


@pytest.mark.parametrize(
    ("fields", "values", "message"),
    [
        ({"first": 4, "count": 8}, 8, "keys 4 to 12 are not this server's: it has 0 to 8 of 8"),
        ({"count": 2**63}, 8, "9223372036854775808 keys in one request"),
        ({"count": 4}, 8, "32 B where 4 keys and values take 16 B"),
        ({"count": 8}, 7, "28 B where 8 keys and values take 32 B"),
        ({"count": 8, "dtype": 2}, 8, "values of type 2"),
        ({"count": 8, "handler": 9}, 8, "handler 9 was never looked up"),
        ({"count": 8, "scale": float("nan")}, 8, "scale=nan"),
        ({"count": 8, "rate": float("inf")}, 8, "rate=inf"),
        ({"count": 8, "flags": protocol.ENCODED}, 8, "without a codec"),
        ({"count": 8, "flags": TICK, "clock": 5}, 8, "worker 0 is at clock 0, and sends a step of clock 5"),
        ({"count": 8, "space": 77}, 8, "unknown in space 0x0000004d"),
        ({"count": 8, "after": 10**6}, 8, "claims to follow 1000000"),
        ({"count": 8, "acked": 10**6}, 8, "claims to follow 1000000"),
        ({"count": 8, "state_slot": 3}, 8, "state slot 3"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(fields: dict[str, Any], values: int, message: str) -> None:
    (client,) = handler_with(0)
    client.push(torch.arange(8.0))
    before = client.space.weights.clone()
    answer = client.ask(RequestHeader(protocol.PUSH, **fields), body_of(torch.ones(values)))
    assert message in reason_of(answer)
    assert torch.equal(client.space.weights, before)
    assert client.space.clocks.of == {0: 0, 1: 0}
    assert client.push(torch.ones(8)).header.status == OK


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([3, 1], "3 at place 0 comes before a smaller one"),
        ([1, 1], "1 at place 0 comes twice"),
        ([1, 8], "keys 1 to 8 do not lie between 0 and 8"),
        ([-1, 1], "keys -1 to 1 do not lie"),
        ([2**63 - 1, -(2**63)], "comes before a smaller one"),
    ],
)
def test_invalid_key_lists_are_refused(keys: list[int], message: str) -> None:
    (client,) = handler_with(0)
    body = body_of(torch.ones(2), torch.tensor(keys))
    for kind in (protocol.PUSH, protocol.PUSH_PULL):
        assert message in reason_of(client.ask(RequestHeader(kind, count=2, flags=KEYS), body))
    assert message in reason_of(client.ask(RequestHeader(protocol.PULL, count=2, flags=KEYS), body[:16]))
    assert not client.space.weights.any()


def test_a_list_of_another_piece_is_refused() -> None:
    (client,) = handler_with(0, piece=4, rules=("add", "sgd(1.0)"), bounds=(0, 4))
    body = body_of(torch.ones(2), torch.tensor([1, 5]))  # two groups, two rules
    assert "do not lie between 0 and 4" in reason_of(
        client.ask(RequestHeader(protocol.PUSH, count=2, flags=KEYS), body)
    )
    assert "lie in two groups" in reason_of(client.push(torch.ones(4), first=2))


@pytest.mark.parametrize("name", ["half_then_raise", "resizes"])
def test_a_handler_that_raises_halfway_changes_nothing(name: str) -> None:
    (client,) = handler_with(0)
    client.push(torch.arange(8.0))
    number = client.control(do="handler", name=name)["number"]
    answer = client.push(torch.ones(8), handler=number)
    assert reason_of(answer).startswith(("RuntimeError: out of luck", f"handler('{name}') left weights of [1]"))
    keyed = RequestHeader(protocol.PUSH, count=2, flags=KEYS, handler=number)
    client.ask(keyed, body_of(torch.ones(2), torch.tensor([0, 5])))
    assert client.space.weights.tolist() == list(range(8))
    assert client.push(torch.ones(8)).header.status == OK


def test_a_rule_that_raises_closes_the_step_without_a_change() -> None:
    one, two = handler_with(0, 1, synchronous=True, rules=("handler('half_then_raise')",))
    assert one.push(torch.ones(8), flags=TICK, clock=0).header.status == OK
    assert "out of luck" in reason_of(two.push(torch.ones(8), flags=TICK, clock=0))
    assert not one.space.weights.any()
    assert one.space.open_step == 1
    assert one.push(torch.ones(8), flags=TICK, clock=1).header.status == OK
    one.handler.lose(1)  # now worker 0 alone closes the step; nobody is there to be told
    assert one.space.open_step == 2


def test_a_handlers_state_is_kept_by_ranges_and_by_lists() -> None:
    (client,) = handler_with(0)
    number = client.control(do="handler", name="counts")["number"]
    for _ in range(2):
        client.push(torch.ones(4), handler=number)
    client.ask(
        RequestHeader(protocol.PUSH, count=1, flags=KEYS, handler=number), body_of(torch.ones(1), torch.tensor([0]))
    )
    assert client.space.weights.tolist() == [3.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]


def test_another_models_hello_is_refused() -> None:
    (client,) = handler_with(0)
    other = HandlerClient(client.handler, 1, describe(numel=9), greet=False)
    body = torch.frombuffer(bytearray(describe(numel=9).to_json()), dtype=torch.uint8)
    assert "is another model's: it has 8 keys" in reason_of(other.ask(RequestHeader(protocol.HELLO), body))
    lies = HandlerClient(client.handler, 1, describe("test 2"), greet=False)
    assert "describes 'test 1'" in reason_of(lies.ask(RequestHeader(protocol.HELLO), body))


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b"{}", b'{"name": 3}', b"[" * 5000, b"\xff\xfe"],
)
def test_a_malformed_description_is_refused(text: bytes) -> None:
    client = HandlerClient(RequestHandler(lambda found: 0), 0, describe(), greet=False)
    assert reason_of(client.ask(RequestHeader(protocol.HELLO), torch.frombuffer(bytearray(text), dtype=torch.uint8)))
    assert not client.handler.shards


@pytest.mark.parametrize(
    "changed",
    [{"piece": 1, "numel": 1 << 30}, {"servers": ()}, {"servers": (5, 5)}, {"rules": ("nonsense",)}, {"quorum": 0.0},
     {"bounds": (0, 3)}, {"codec": "nonsense"}],
)  # fmt: skip
def test_a_contradictory_description_is_refused(changed: dict[str, Any]) -> None:
    description = describe(**changed)
    client = HandlerClient(RequestHandler(lambda found: 0), 0, description, greet=False)
    body = torch.frombuffer(bytearray(description.to_json()), dtype=torch.uint8)
    assert reason_of(client.ask(RequestHeader(protocol.HELLO), body))
    assert not client.handler.shards


def test_the_server_asks_again_for_a_forgotten_list() -> None:
    (client,) = handler_with(0)
    keys = torch.tensor([1, 4])
    named = RequestHeader(protocol.PUSH, count=2, flags=CACHED, digest=99)
    assert client.ask(named, body_of(torch.ones(2)), number=2).header.status == NEED_KEYS
    assert client.ask(named, body_of(torch.ones(2)), number=2).header.status == NEED_KEYS  # doubled on the way
    told = named._replace(flags=CACHED | KEYS)
    assert client.ask(told, body_of(torch.ones(2), keys), number=2).header.status == OK
    assert client.ask(named, body_of(torch.ones(2)), number=3).header.status == OK
    assert client.space.weights.tolist() == [0.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    client.number = 3
    read = RequestHeader(protocol.PULL, count=2, flags=CACHED, digest=99)
    assert values_of(client.ask(read)) == [2.0, 2.0]
    for digest in range(100, 100 + MAX_CACHED_KEY_LISTS):
        client.acked = client.number
        client.ask(told._replace(digest=digest), body_of(torch.zeros(2), keys))
    assert client.ask(read).header.status == NEED_KEYS
    wrong = named._replace(digest=100 + MAX_CACHED_KEY_LISTS - 1, count=1)
    assert "1 values from key 0 on, for a list of 2 keys" in reason_of(client.ask(wrong, body_of(torch.ones(1))))


def test_a_list_may_be_forgotten_while_a_read_waits() -> None:
    one, two = handler_with(0, 1)
    both = RequestHeader(protocol.PUSH_PULL, count=2, flags=CACHED | KEYS, digest=7, min_clock=1)
    assert one.send(both, body_of(torch.ones(2), torch.tensor([0, 3]))) == []
    one.handler.sessions[one.description.space_id, 0].key_lists.clear()
    for client in (one, two):
        client.send(RequestHeader(protocol.PUSH, flags=TICK, clock=0))
    assert [values_of(answer) for answer in two.others if answer.body is not None] == [[1.0, 1.0]]


def test_no_read_waits_for_a_worker_lost_before_its_hello() -> None:
    (one,) = handler_with(0)  # worker 1 has not said hello
    assert one.send(RequestHeader(protocol.PUSH, flags=TICK, clock=0))
    assert one.pull(min_clock=1) == []
    (answer,) = one.handler.lose(1)
    assert values_of(answer) == [0.0] * NUMEL
    later = HandlerClient(one.handler, 0, describe("test 2"))  # nor in a space that is opened afterwards
    later.send(RequestHeader(protocol.PUSH, flags=TICK, clock=0))
    assert later.pull(min_clock=1)


def test_a_client_that_leaves_gets_its_pending_replies() -> None:
    one, two = handler_with(0, 1)
    assert one.pull(min_clock=5) == []
    assert two.pull(min_clock=5) == []
    assert len(one.send(RequestHeader(protocol.BYE))) == 1
    answers = two.send(RequestHeader(protocol.BYE))
    assert [answer.header.number for answer in answers] == [3, 2]
    assert [answer.header.number for answer in two.others] == [2]
    assert not one.handler.shards


def test_observers_wait_for_the_space_and_have_no_clock() -> None:
    request_handler = RequestHandler(lambda found: 0)
    watcher = HandlerClient(request_handler, 9, describe(), greet=False)
    other = HandlerClient(request_handler, 9, describe("test 2"), greet=False)
    assert watcher.send(RequestHeader(protocol.HELLO)) == []
    assert other.send(RequestHeader(protocol.HELLO)) == []
    worker = HandlerClient(request_handler, 0, describe())
    assert [answer.member for answer in worker.others] == [9]
    second = HandlerClient(request_handler, 0, describe("test 2"))
    assert [answer.member for answer in second.others] == [9]
    assert "has no clock to advance" in reason_of(watcher.push(torch.ones(8), flags=TICK, clock=0))
    assert values_of(watcher.pull()[0]) == [0.0] * NUMEL


@pytest.mark.parametrize(
    "asked",
    [b"", b"[1]", b'{"do": "dance"}', b'{"do": ["x"]}', b'{"do": "clocks", "clocks": [1]}',
     b'{"do": "clocks", "clocks": [-1, 0]}', b'{"do": "clocks", "clocks": [1e400, 0]}',
     b'{"do": "handler", "name": "unheard_of"}', b'{"do": "below", "below": 3}',
     b"[" * 20000],
)  # fmt: skip
def test_invalid_control_requests_are_refused(asked: bytes) -> None:
    (client,) = handler_with(0)
    body = torch.frombuffer(bytearray(asked or b" "), dtype=torch.uint8)
    assert reason_of(client.ask(RequestHeader(protocol.CONTROL), body))
    assert client.space.clocks.of == {0: 0, 1: 0}
    assert client.control(do="steps")["steps"] == [0, 0]


def test_an_unknown_handler_lists_the_known() -> None:
    (client,) = handler_with(0)
    answer = client.ask(RequestHeader(protocol.CONTROL), json_body({"do": "handler", "name": "half_then_rise"}))
    assert "half_then_raise" in reason_of(answer)


def test_a_sub_master_reports_steps_of_workers_only() -> None:
    (client,) = handler_with(0)
    client.control(do="below", below={"1": [4, 0]})
    for many in ({"7": [1, 0]}, {"-1": [1, 0]}, {str(each): [1, 0] for each in range(100)}):
        answer = client.ask(RequestHeader(protocol.CONTROL), json_body({"do": "below", "below": many}))
        assert "a sub-master reports steps of workers, which are [0, 1]" in reason_of(answer)
    assert client.space.group_steps == {"1": [4, 0]}
    request_handler = RequestHandler(lambda found: 0, workers=range(5))  # those of the network, where it is known
    HandlerClient(request_handler, 0, describe()).control(do="below", below={"4": [2, 0]})


def test_a_refusal_ends_the_step_and_has_the_workers_clock() -> None:
    for synchronous in (False, True):
        one, two = handler_with(0, 1, synchronous=synchronous)
        one.push(torch.ones(8), flags=TICK, clock=0)
        refused = two.push(torch.ones(8), flags=TICK, clock=0, scale=float("inf"))
        assert "scale=inf" in reason_of(refused)
        assert refused.header.min_clock == 1
        assert one.space.weights.tolist() == [1.0] * 8
        assert one.space.min_clock == 1
        astray = two.push(torch.ones(8), flags=TICK, clock=7)
        assert "worker 1 is at clock 1" in reason_of(astray)
        assert astray.header.min_clock == 1
    stranger = HandlerClient(one.handler, 9, one.description, greet=False)
    assert stranger.push(torch.ones(8)).header.min_clock == -1


def test_a_refused_step_far_ahead_does_not_end() -> None:
    one, _ = handler_with(0, 1, synchronous=True)
    one.space.set_clocks([0, 0])
    one.space.clocks.set(0, MAX_STEPS_AHEAD + 1)
    assert "and step 0 is open" in reason_of(one.push(torch.ones(8), flags=TICK, clock=MAX_STEPS_AHEAD + 1))
    assert one.space.clocks.of[0] == MAX_STEPS_AHEAD + 1


def test_missing_state_reads_as_nan_and_creates_nothing() -> None:
    (client,) = handler_with(0, rules=("torch('SGD', lr=0.1, momentum=0.9)",))
    client.control(do="planes", names=["momentum_buffer"])
    assert all(map(math.isnan, values_of(client.pull(first=2, count=3, state_slot=1)[0])))
    assert client.push(torch.ones(8)).header.status == OK  # the odd read has not made an odd piece


@pytest.mark.parametrize("how", ["finishes", "leaves", "is lost", "was stopped"])
def test_a_worker_that_leaves_early_is_warned_of_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is lost is told of elsewhere, and who was asked to stop ends where it is."""
    first, second = handler_with(*WORKERS)
    for clock in range(2):
        second.push(torch.ones(NUMEL), clock=clock, flags=TICK)
    if how == "was stopped":
        first.control(do="stop")
    if how in ("finishes", "was stopped"):
        second.control(do="finish")
    else:
        second.handler.lose(1, left=how == "leaves")
    for clock in range(8):
        first.push(torch.ones(NUMEL), clock=clock, flags=TICK)
        assert "has left at clock 2" not in caplog.text or clock >= 3
    assert caplog.text.count("worker 1 has left at clock 2") == (how in ("finishes", "leaves"))


def test_a_read_waits_for_no_step_that_its_worker_has_skipped() -> None:
    """A worker that was late at another server goes on at that server's step, and nobody else is left to push it."""
    (mine,) = handler_with(0, synchronous=True, quorum=0.5)
    mine.handler.lose(1)
    mine.push(torch.ones(NUMEL), clock=0, flags=protocol.TICK)
    (answer,) = mine.pull(clock=3, min_clock=3)
    assert values_of(answer) == [1.0] * NUMEL
    assert mine.space.open_step == 3


def test_nothing_is_kept_for_lost_clients() -> None:
    """In an elastic job thousands of workers may come and go."""
    space = SpaceDescription(name="s 1", numel=4, servers=(0,), workers=(1,), rules=("add",))
    requests = RequestHandler(lambda space: 0)
    hello = RequestHeader(protocol.HELLO, space=space.space_id, number=1)
    requests.handle(1, hello, protocol.bytes_tensor(space.to_json()))
    for member in range(2, 50):
        requests.handle(member, hello, torch.empty(0, dtype=torch.uint8))
        requests.lose(member, left=member % 2 == 0)
    assert list(requests.sessions) == [(space.space_id, 1)]
    assert requests.members_in(space.space_id) == [1]
