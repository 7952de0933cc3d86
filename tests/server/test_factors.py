"""Gradients of fully connected layers as two factors: their product, their bytes, and who listens for them."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncline.errors import IncompatibleError, ProtocolError
from syncline.server.factors import (
    HEADER_BYTES,
    FactorRecorder,
    factors_are_smaller,
    pack_factors,
    pack_range,
    unpack_and_multiply,
)


def whole(b: int, m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Factors of whole numbers: their products are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-3, 4, (b, size), generator=draw).float() for size in (m, n))  # type: ignore[return-value]


# Bytes.


@pytest.mark.parametrize(("b", "m", "n"), [(1, 1, 1), (4, 5, 7), (1, 30, 3), (9, 1, 4), (0, 3, 2), (33, 64, 48)])
def test_the_product_is_the_gradient(b: int, m: int, n: int) -> None:
    delta, o = whole(b, m, n)
    payload = pack_factors(delta, o)
    assert payload.dtype == torch.uint8
    assert payload.numel() == HEADER_BYTES + 4 * b * (m + n)
    assert torch.equal(unpack_and_multiply(payload, torch.full((m * n,), 7.0)), (delta.t() @ o).view(-1))


@pytest.mark.parametrize("rows", [(0, 0), (0, 1), (2, 5), (4, 5), (5, 5), (0, 5)])
def test_pack_factors_of_some_rows(rows: tuple[int, int]) -> None:
    delta, o = whole(6, 5, 3)
    first, after = rows
    out = torch.full(((after - first) * 3,), 7.0)
    unpack_and_multiply(pack_factors(delta, o, rows), out)
    assert torch.equal(out.view(-1, 3), (delta.t() @ o)[first:after])


def test_pack_range_of_every_range() -> None:
    """Shards and pieces end within rows as well."""
    delta, o = whole(3, 4, 5)
    gradient = (delta.t() @ o).view(-1)
    for start in range(21):
        for stop in range(start, 21):
            payload = pack_range(delta, o, start, stop)
            out = unpack_and_multiply(payload, torch.full((stop - start,), 7.0))
            assert torch.equal(out, gradient[start:stop])
            touched = 0 if start == stop else (stop - 1) // 5 - start // 5 + 1
            assert payload.numel() == HEADER_BYTES + 4 * 3 * (touched + 5)


def test_half_precision_travels_as_float32() -> None:
    delta, o = whole(2, 3, 4)
    out = unpack_and_multiply(pack_factors(delta.bfloat16(), o.half()), torch.empty(12))
    assert torch.equal(out, (delta.t() @ o).view(-1))


def test_unaligned_payloads_are_copied() -> None:
    delta, o = whole(2, 3, 4)
    payload = pack_factors(delta, o)
    for shift in range(5):
        room = torch.zeros(payload.numel() + shift, dtype=torch.uint8)
        room[shift:] = payload
        assert torch.equal(unpack_and_multiply(room[shift:], torch.empty(12)), (delta.t() @ o).view(-1))


@pytest.mark.parametrize(("b", "m", "n", "expected"), [(1, 2, 2, False), (1, 3, 2, True), (500, 1000, 1000, False)])
def test_factors_are_smaller_than_the_gradient(b: int, m: int, n: int, expected: bool) -> None:
    assert factors_are_smaller(b, m, n) is expected
    assert (b * (m + n) < m * n) is expected


def test_factors_that_do_not_fit_are_refused() -> None:
    delta, o = whole(2, 3, 4)
    with pytest.raises(IncompatibleError, match="of one batch"):
        pack_factors(delta, o[:1])
    with pytest.raises(IncompatibleError, match="of one batch"):
        pack_factors(delta.view(-1), o)
    for rows in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(IncompatibleError, match="do not lie in a gradient of 3 × 4"):
            pack_factors(delta, o, rows)
    for out in (torch.empty(12).double(), torch.empty(24)[::2]):
        with pytest.raises(IncompatibleError, match="contiguous float32"):
            unpack_and_multiply(pack_factors(delta, o), out)


# Bytes that nobody has packed.


def forged(b: int, rows: int, n: int, skip: int, count: int, body: int) -> Tensor:
    """A header whose checksum is right, whatever it says."""
    head = struct.pack("<HBBIQQQQ", 0x51FA, 1, 0, b, rows, n, skip, count)
    data = head + struct.pack("<II", zlib.crc32(head), 0) + bytes(body)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (torch.zeros(0, dtype=torch.uint8), "shorter than its header"),
        (torch.zeros(HEADER_BYTES - 1, dtype=torch.uint8), "shorter than its header"),
        (torch.zeros(HEADER_BYTES), "a row of bytes"),
        (torch.zeros(2, HEADER_BYTES, dtype=torch.uint8), "a row of bytes"),
        (torch.zeros(HEADER_BYTES, dtype=torch.uint8), "not a Syncline message"),
        (forged(2, 3, 4, 0, 11, 4 * 2 * 7), "for 11 elements of a gradient, where 12 are due"),
        (forged(2, 3, 4, 0, 1 << 63, 4 * 2 * 7), "where 12 are due"),
        (forged(2, 3, 4, 0, 12, 4 * 2 * 7 - 1), "take 104 B"),
        (forged(2, 3, 4, 0, 12, 4 * 2 * 7 + 4), "take 104 B"),
        (forged(0xFFFFFFFF, 3, 4, 0, 12, 0), "take"),
        (forged(2, 4, 4, 0, 12, 4 * 2 * 8), "cannot stand for"),
        (forged(2, 2, 4, 0, 12, 4 * 2 * 6), "cannot stand for"),
        (forged(2, 4, 4, 4, 12, 4 * 2 * 8), "cannot stand for"),
        (forged(2, 0, 0, 0, 12, 0), "cannot stand for"),
        (forged(0, 1, (1 << 64) - 1, 1 << 63, 12, 0), ""),
        (forged(1, 1, (1 << 64) - 1, 0, 12, 8), "take"),
        (forged(2, (1 << 64) - 1, 4, 0, 12, 8), "cannot stand for"),
    ],
)
def test_forged_headers(payload: Tensor, reason: str) -> None:
    """Refused with nothing written; the one that is harmless, an empty batch of endless rows, is a row of zeros."""
    out = torch.full((12,), 7.0)
    if not reason:
        assert not unpack_and_multiply(payload, out).any()
        return
    with pytest.raises(ProtocolError, match=reason):
        unpack_and_multiply(payload, out)
    assert out.tolist() == [7.0] * 12


def test_noise_is_refused() -> None:
    """Bits turned, bytes cut and added: a wrong header never passes, and a wrong length never does."""
    draw = random.Random(1)
    good = bytes(pack_factors(*whole(2, 3, 4)).tolist())
    for _ in range(2000):
        data = bytearray(good)
        match draw.randrange(3):
            case 0:
                at = draw.randrange(HEADER_BYTES)
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[draw.randrange(len(data)) :]
            case _:
                data += bytes(draw.randrange(1, 20))
        out = torch.full((12,), 7.0)
        payload = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        with pytest.raises(ProtocolError):
            unpack_and_multiply(payload, out)
        assert out.tolist() == [7.0] * 12


# Listening.


class Twice(nn.Module):
    """A layer used twice, and one used once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))
        return result


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)
    )


def check_products(model: nn.Module, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    """What was heard multiplies to the weights' gradients, over the wire and back."""
    parameters = dict(model.named_parameters())
    for name, (delta, o) in found.items():
        gradient = parameters[name].grad
        assert gradient is not None
        out = unpack_and_multiply(pack_factors(delta, o), torch.empty(gradient.numel()))
        torch.testing.assert_close(out.view_as(gradient), gradient)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("shape", [(8, 5), (2, 3, 5), (2, 2, 2, 5), (5,), (1, 5)])
def test_recorded_factors_give_the_gradient(shape: tuple[int, ...], check: bool) -> None:
    model = mlp()
    with FactorRecorder(model, check=check) as tap:
        model(torch.randn(shape)).square().mean().backward()
        found = tap.take()
    assert set(found) == {"0.weight", "2.weight", "4.weight"}
    rows = torch.Size(shape[:-1]).numel()
    assert all(delta.shape[0] == o.shape[0] == rows for delta, o in found.values())
    check_products(model, found)


def test_several_backwards_add_up() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        for batch in (4, 1, 3):
            model(torch.randn(batch, 5)).square().mean().backward()
        found = tap.take()
        assert {name: delta.shape[0] for name, (delta, _) in found.items()} == dict.fromkeys(found, 8)
        assert len(found) == 3
        check_products(model, found)
        assert tap.take() == {}
        model.zero_grad()
        model(torch.randn(2, 5)).sum().backward()
        assert {delta.shape[0] for delta, _ in tap.take().values()} == {2}


@pytest.mark.parametrize("check", [True, False])
def test_a_layer_used_twice_is_left_out(check: bool) -> None:
    model = Twice()
    with FactorRecorder(model, check=check) as tap:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        found = tap.take()
        assert set(found) == {"last.weight"}
        check_products(model, found)


@pytest.mark.parametrize("check", [True, False])
def test_weights_that_modules_share(check: bool) -> None:
    """By two layers: both used are two uses, one used is one. By an embedding: never."""
    torch.manual_seed(0)
    one, other, table, out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(6, 4), nn.Linear(4, 6)
    other.weight, out.weight = one.weight, table.weight
    model = nn.ModuleList([one, other, table, out])
    with FactorRecorder(model, check=check) as tap:
        out(other(one(table(torch.arange(3))))).square().sum().backward()
        assert tap.take() == {}
        model.zero_grad()
        out(other(table(torch.arange(3)))).sum().backward()
        found = tap.take()
        assert set(found) == {"0.weight"}
        check_products(model, found)


def test_frozen_and_computed_weights_are_left_out() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model[2])
    with FactorRecorder(model) as tap:
        model(torch.randn(3, 5)).sum().backward()
        assert set(tap.take()) == {"4.weight"}
        model[4].weight.requires_grad_(False)  # later, too
        model.zero_grad()
        model(torch.randn(3, 5)).sum().backward()
        assert tap.take() == {}


def double_gradient(model: nn.Sequential) -> None:
    model[0].weight.grad.mul_(1.01)  # type: ignore[operator, union-attr]


def clip(model: nn.Sequential) -> None:
    nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)


def forget(model: nn.Sequential) -> None:
    model[0].weight.grad = None


@pytest.mark.parametrize("deed", [double_gradient, clip, forget])
def test_a_changed_gradient_is_left_out(deed: Callable[[nn.Sequential], None]) -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        model(torch.randn(3, 5)).square().sum().backward()
        deed(model)
        assert set(tap.take()) == {"2.weight", "4.weight"}


def test_a_penalty_on_the_weights_is_noticed() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        penalty = model.get_parameter("2.weight").square().sum()
        (model(torch.randn(3, 5)).square().sum() + 1e-2 * penalty).backward()
        assert set(tap.take()) == {"0.weight", "4.weight"}


def test_gradients_left_from_before_are_noticed() -> None:
    model = mlp()
    model(torch.randn(3, 5)).sum().backward()
    with FactorRecorder(model) as tap:
        model(torch.randn(3, 5)).sum().backward()
        assert tap.take() == {}
        model.zero_grad()
        model(torch.randn(3, 5)).sum().backward()
        assert len(tap.take()) == 3


def test_inputs_that_were_overwritten_are_noticed() -> None:
    """A buffer that holds the next batch when the factors are asked for."""
    model, buffer = mlp(), torch.randn(3, 5)
    with FactorRecorder(model) as tap:
        model(buffer).sum().backward()
        buffer.copy_(torch.randn(3, 5))
        found = tap.take()
        assert set(found) == {"2.weight", "4.weight"}
        check_products(model, found)


def test_a_hook_that_changes_the_output_comes_later() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    with FactorRecorder(model) as tap:
        model(torch.randn(3, 5)).sum().backward()
        found = tap.take()
        assert len(found) == 3
        check_products(model, found)


def test_evaluating_leaves_nothing_behind() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        with torch.no_grad():
            model(torch.randn(3, 5))
        model(torch.randn(3, 5))  # never goes backward
        assert tap.take() == {}
        model(input=torch.randn(2, 5)).sum().backward()
        assert {delta.shape[0] for delta, _ in tap.take().values()} == {2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool) -> None:
    model, x = mlp(), torch.randn(3, 5, requires_grad=True)
    with FactorRecorder(model) as tap:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        found = tap.take()
        assert len(found) == 3
        check_products(model, found)


def test_a_graph_gone_through_twice_counts_twice() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        loss = model(torch.randn(3, 5)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found = tap.take()
        assert {delta.shape[0] for delta, _ in found.values()} == {6}
        check_products(model, found)


def test_half_precision() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(16, 5)).float().square().mean()
        loss.backward()
        found = tap.take()
    assert len(found) == 3
    for name, (delta, o) in found.items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        out = unpack_and_multiply(pack_factors(delta, o), torch.empty(gradient.numel())).view_as(gradient)
        assert (out - gradient).norm() <= 0.02 * gradient.norm()


def test_a_large_layer_passes_the_check() -> None:
    """Rounding of long sums is no sign of anything."""
    torch.manual_seed(0)
    model = nn.Linear(3000, 40)
    with FactorRecorder(model) as tap:
        model(torch.randn(300, 3000)).square().mean().backward()
        assert set(tap.take()) == {"weight"}


def test_a_gradient_with_nan_is_left_out() -> None:
    model = mlp()
    with FactorRecorder(model) as tap:
        (model(torch.randn(3, 5)).sum() * float("nan")).backward()
        assert tap.take() == {}


def test_a_closed_recorder_has_no_hooks() -> None:
    model = mlp()
    tap = FactorRecorder(model)
    tap.close()
    tap.close()
    model(torch.randn(3, 5)).sum().backward()
    assert tap.take() == {}
    assert not any(module._forward_hooks for module in model.modules())
