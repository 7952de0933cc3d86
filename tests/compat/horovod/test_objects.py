"""Plain objects as bytes: all of them come back, and broken bytes never become one."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from syncline.compat.horovod.objects import pack, unpack
from syncline.errors import IncompatibleError, ProtocolError
from syncline.state_trees import MAX_DEPTH

PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    127,
    128,
    -129,
    2**64,
    -(10**40),
    0.1,
    -0.0,
    math.inf,
    "",
    "Zürich \U0001f600 \ud800",
    b"",
    bytes(range(256)),
    [],
    [1, [2, (3, ())]],
    {"a": 1, 2: "b", (1, "x"): None, 1.5: [b"c"], None: True},
    {1, "a", (2, 3)},
    frozenset({1, frozenset({2})}),
    {frozenset({1}): 2},
]


@pytest.mark.parametrize("obj", PLAIN, ids=[f"{type(obj).__name__}-{number}" for number, obj in enumerate(PLAIN)])
def test_plain_objects_come_back(obj: Any) -> None:
    found = unpack(pack(obj), 0)
    assert found == obj
    assert type(found) is type(obj)
    assert repr(found) == repr(obj)  # -0.0 and True too


def test_nan_and_the_kinds_of_dicts() -> None:
    assert math.isnan(unpack(pack(float("nan")), 0))
    for held in (OrderedDict(b=1, a=2), defaultdict(int, b=1, a=2)):
        found = unpack(pack(held), 0)
        assert type(found) is dict
        assert list(found.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, -2.0]]),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.ones(2, 3).t(),
        torch.tensor([True, False]),
        torch.arange(3, dtype=torch.uint8),
        torch.tensor([1e-3, 7.0], dtype=torch.bfloat16),
        torch.tensor([1e-3, 7.0], dtype=torch.float16),
        torch.tensor([1 + 2j]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_tensors(tensor: torch.Tensor) -> None:
    found = unpack(pack(tensor), 0)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor.detach())
    found.zero_()  # its own memory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(2.5),
        np.zeros((0, 2)),
        np.array([1, 2], dtype=">i4"),
        np.array([1 + 2j]),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.arange(6)[::-2],
    ],
    ids=repr,
)
def test_numpy(array: Any) -> None:
    found = unpack(pack(array), 0)
    assert type(found) is type(array)
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


class Mine:
    pass


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        (Mine(), "Mine"),
        ([1, {"a": Mine()}], "Mine"),
        (lambda: 0, "function"),
        (1 + 2j, "complex"),
        (torch.ones(2, device="meta"), "meta"),
        (np.array(["a"]), "<U1"),
        (np.array([Mine()]), "object"),
    ],
)
def test_others_are_refused_where_they_arrive(obj: Any, said: str) -> None:
    with pytest.raises(IncompatibleError, match=f"rank 2: .*{said}"):
        unpack(pack(obj), 2)


def test_what_holds_itself_is_refused() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(IncompatibleError, match=str(MAX_DEPTH)):
        unpack(pack(knot), 0)


WHOLE = pack({"a": [1, 2.5, None], "t": torch.ones(3), "n": np.ones(2), "s": {1, 2}, "b": b"xyz"})


def test_every_shorter_message_is_refused() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(ProtocolError, match="rank 3"):
            unpack(WHOLE[:length], 3)


def test_a_longer_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank 0"):
        unpack(WHOLE + b"N", 0)


def test_broken_messages_raise_protocol_errors() -> None:
    draw, refused = random.Random(0), 0
    for _ in range(3000):
        broken = bytearray(WHOLE)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            unpack(bytes(broken), 0)
        except (ProtocolError, IncompatibleError):
            refused += 1
    assert refused > 1000


def message(document: object, **tensors: torch.Tensor) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return save({"tree": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        (2**63).to_bytes(8, "little"),
        save({"0": torch.ones(2)}),
        message(b"\xff"),
        message([]),
        message({}),
        message({"tree": {"$tensor": "w"}, "names": []}),
        message({"tree": {"$tensor": "w"}, "names": ["w"]}),
        message({"tree": {"$set": [[]]}, "names": []}),
        message({"tree": {"$pickle": "w"}, "names": []}),
        message(b'{"names": [], "tree": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ],
)
def test_hostile_messages(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data, 0)
