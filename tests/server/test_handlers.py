"""Functions that both ends register under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.errors import ProtocolError, SpecError
from syncline.runtime import RealRuntime
from syncline.server.rules.handlers import HandlerRegistry, find_handler, handler, handler_names


def double(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
    weights.add_(values, alpha=2.0)


def scaled(weights: Tensor, values: Tensor, state: dict[str, Tensor], rate: float | None = None) -> None:
    weights.add_(values, alpha=1.0 if rate is None else rate)


def test_a_handler_is_found_and_called() -> None:
    assert handler("test_handlers_double")(double) is double
    assert "test_handlers_double" in handler_names()
    weights = torch.ones(2)
    find_handler("test_handlers_double")(weights, torch.tensor([1.0, 2.0]), {})
    assert weights.tolist() == [3.0, 5.0]


def test_state_has_its_initial_values() -> None:
    made = HandlerRegistry().add("counted", double, {"seen": 0.0, "least": -1})
    state = made.initial_state(3)
    assert {name: each.tolist() for name, each in state.items()} == {"seen": [0.0] * 3, "least": [-1.0] * 3}
    assert made.initial_state(3)["seen"].data_ptr() != state["seen"].data_ptr()
    assert HandlerRegistry().add("plain", double).initial_state(3) == {}


def test_a_rate_is_passed_only_to_handlers_that_take_it() -> None:
    handlers, weights = HandlerRegistry(), torch.zeros(1)
    handlers.add("scaled", scaled)(weights, torch.ones(1), {}, 0.25)
    handlers.find("scaled")(weights, torch.ones(1), {})
    assert weights.item() == 1.25
    with pytest.raises(ProtocolError, match=r"'double' has the rate 0\.25, and its function takes none"):
        handlers.add("double", double)(weights, torch.ones(1), {}, 0.25)
    assert weights.item() == 1.25


def test_an_unknown_name_lists_the_known() -> None:
    handlers = HandlerRegistry()
    with pytest.raises(ProtocolError, match="no handler 'largest' in this process; none is registered"):
        handlers.find("largest")
    handlers.add("largest", double)
    with pytest.raises(ProtocolError, match=r"did you mean 'largest'.*--handlers MODULE"):
        handlers.find("lagrest")
    with pytest.raises(ProtocolError, match="test_handlers_nobody"):
        find_handler("test_handlers_nobody")


def test_another_function_under_a_name_is_refused() -> None:
    handlers = HandlerRegistry()
    handlers.add("one", double)
    with pytest.raises(SpecError, match=r"'one' is .*double already, and .*scaled would be another"):
        handlers.add("one", scaled)
    assert handlers.find("one").function is double


def test_the_same_function_may_register_again() -> None:
    handlers = HandlerRegistry()
    first = handlers.add("one", double)
    assert handlers.add("one", double) is first
    with pytest.raises(SpecError, match="would be another"):
        handlers.add("one", double, {"seen": 0.0})


def test_an_imported_script_may_register_twice() -> None:
    """Its functions are made twice out of one source; those of a factory hold values of their own, and are not one."""

    def source(number: int) -> Callable[..., None]:
        def function(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
            weights.add_(1.0)

        return function

    def factory(number: int) -> Callable[..., None]:
        def function(weights: Tensor, values: Tensor, state: dict[str, Tensor]) -> None:
            weights.add_(number)

        return function

    handlers = HandlerRegistry()
    first = handlers.add("plain", source(1))
    assert handlers.add("plain", source(2)) is first
    handlers.add("made", factory(1))
    with pytest.raises(SpecError, match="would be another"):
        handlers.add("made", factory(2))


@pytest.mark.parametrize("name", ["", "two words", "a-b", 3, None])
def test_a_handler_name_is_an_identifier(name: Any) -> None:
    with pytest.raises(SpecError, match="a Python name"):
        HandlerRegistry().add(name, double)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (3, "is a function"),
        (lambda weights: None, "too many positional"),
        (lambda weights, values, state, more: None, "missing a required argument: 'more'"),
    ],
)
def test_an_object_that_cannot_be_called_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        HandlerRegistry().add("bad", function)


@pytest.mark.parametrize("state", [{"seen": "0"}, {"seen": True}, {3: 0.0}])
def test_an_invalid_state_is_refused(state: Any) -> None:
    with pytest.raises(SpecError, match="first value"):
        HandlerRegistry().add("bad", double, state)


def test_concurrent_registrations_keep_one_function() -> None:
    """All at once under each name: exactly one wins, the others are told, and nothing is half done."""
    runtime, handlers, names, threads = RealRuntime(), HandlerRegistry(), [f"name{n}" for n in range(50)], 8
    go, won = runtime.event(), runtime.queue(1000)

    def register(number: int) -> None:
        go.wait(30.0)
        for name in names:
            try:
                handlers.add(name, lambda weights, values, state: weights.add_(number))
                won.put((name, number), 30.0)
            except SpecError:
                assert handlers.find(name).name == name
            assert name in handlers.names()

    tasks = [runtime.spawn(register, number) for number in range(threads)]
    go.set()
    assert all(task.join(60.0) for task in tasks)
    found = dict(won.get(1.0) for _ in range(len(won)))
    assert sorted(found) == sorted(names) == handlers.names()
    for name, number in found.items():
        weights = torch.zeros(1)
        handlers.find(name)(weights, torch.zeros(1), {})
        assert weights.item() == number
    assert len(won) == 0
