"""Attention divided by heads equals whole attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel import Heads
from syncline.parallel.tensor_layers.plan import default_plan, plan_divisions
from syncline.world import World
from tests.parallel.divided import assert_close, backward, check_training, divide, numbers, seeded

WIDTH, HEADS = 12, 6


class Attend(nn.Module):
    """`nn.MultiheadAttention` with masks and other options."""

    def __init__(self, inputs: str = "self", **options: Any) -> None:
        super().__init__()
        self.options = {
            name: options.pop(name) for name in list(options) if name in ("need_weights", "average_attn_weights")
        }
        self.masks = options.pop("masks", "")
        self.inputs = inputs
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, options.pop("heads", HEADS), **options)
        self.keys, self.values = nn.Linear(WIDTH, self.attn.kdim), nn.Linear(WIDTH, self.attn.vdim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        key, value = (hidden, hidden) if self.inputs == "self" else (self.keys(hidden), self.values(hidden))
        length = x.shape[1 if self.attn.batch_first else 0] if x.dim() == 3 else x.shape[0]
        batch = x.shape[0 if self.attn.batch_first else 1] if x.dim() == 3 else 1
        options = dict(self.options)
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        if self.masks == "causal":
            options |= {"attn_mask": causal, "is_causal": True}
        if "bool" in self.masks:
            options["attn_mask"] = causal != 0
        if "heads" in self.masks:
            own = torch.arange(batch * HEADS, dtype=x.dtype).view(-1, 1, 1) * torch.arange(length, dtype=x.dtype) / 50
            options["attn_mask"] = own.expand(-1, length, -1)
        if "padding" in self.masks:
            padding = torch.zeros(batch, length, dtype=torch.bool)
            padding[0, -1] = True
            if "heads" in self.masks:
                padding = torch.zeros(batch, length, dtype=x.dtype).masked_fill(padding, float("-inf"))
            options["key_padding_mask"] = padding if x.dim() == 3 else padding[0]
        output: Tensor
        output, weights = self.attn(hidden, key, value, **options)
        return output if weights is None else output + weights.square().sum() / 10


CASES: dict[str, dict[str, Any]] = {
    "plain": {"batch_first": True, "need_weights": False},
    "sequence first": {"masks": "bool"},
    "causal": {"batch_first": True, "need_weights": False, "masks": "causal"},
    "causal with padding": {"batch_first": True, "masks": "causal padding bool"},
    "a mask for each head": {"need_weights": False, "masks": "heads padding"},
    "weights of each head": {"batch_first": True, "average_attn_weights": False},
    "no bias": {"bias": False, "masks": "padding"},
    "other keys": {"inputs": "cross", "kdim": 5, "vdim": 7, "masks": "bool"},
    "three tensors": {"inputs": "cross", "batch_first": True, "need_weights": False},
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.square().mean()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_divided_attention_trains_as_a_whole_one(case: str, workers: int) -> None:
    make = seeded(lambda: Attend(**CASES[case]))
    check_training(
        make, {"attn": "heads"}, squares, numbers(10, 2, 4, WIDTH), workers, "adam" if workers == 2 else "sgd"
    )


@pytest.mark.parametrize(("workers", "heads"), [(1, 3), (4, 4), (4, 12)])
def test_other_numbers_of_heads(workers: int, heads: int) -> None:
    make = seeded(lambda: Attend(heads=heads, need_weights=False))
    check_training(make, {"attn": "heads"}, squares, numbers(10, 3, 5, WIDTH), workers)


def test_attention_without_a_batch() -> None:
    make = seeded(lambda: Attend(masks="padding bool"))
    check_training(make, {"attn": "heads"}, squares, numbers(3, 5, WIDTH), 2)


def test_a_learned_mask_of_all_heads() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, HEADS)
            self.mask, self.padding = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.attn(x, x, x, self.padding, False, self.mask)[0]
            return output

    check_training(seeded(Masked), {"attn": "heads"}, squares, numbers(3, 4, 2, WIDTH), 2)


class Custom(nn.Module):
    """An attention module of a user, with fewer heads of keys than of queries."""

    def __init__(self, fused: bool = False, key_heads: int = HEADS, names: str = "q_proj k_proj v_proj o_proj") -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, key_heads, WIDTH // HEADS
        *inputs, self.output = names.split()
        self.inputs = inputs
        widths = [WIDTH + 2 * key_heads * self.head_dim] if fused else [WIDTH, *[key_heads * self.head_dim] * 2]
        for name, width in zip(inputs, widths, strict=True):
            self.add_module(name, nn.Linear(WIDTH, width, bias=fused))
        self.add_module(self.output, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cat([self.get_submodule(name)(x) for name in self.inputs], -1)
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (each.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for each in torch.split(found, sizes, -1))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.get_submodule(self.output)(found.transpose(1, 2).flatten(2))
        return x + output


class Interleaved(nn.Module):
    """One layer of (heads, 3, features) outputs, and no attribute with the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).view(*x.shape[:2], -1, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        found = functional.scaled_dot_product_attention(*parts)
        output: Tensor = self.dense(found.transpose(1, 2).flatten(2))
        return output


MODULES: dict[str, tuple[Any, Any]] = {
    "three layers": (Custom, "heads"),
    "one layer": (lambda: Custom(True, names="qkv proj"), "heads"),
    "fewer keys": (lambda: Custom(key_heads=2), "heads"),
    "fewer keys in one layer": (
        lambda: Custom(True, 2, "all_of_it out"),
        Heads(("all_of_it",), "out", "num_heads", "num_kv_heads"),
    ),
    "interleaved": (Interleaved, Heads(("query_key_value",), "dense", HEADS, interleaved=True)),
}


@pytest.mark.parametrize("module", MODULES)
def test_attention_modules_of_users(module: str) -> None:
    make, role = MODULES[module]
    whole = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make())  # noqa: E731
    check_training(seeded(whole), {"1": role}, squares, numbers(10, 2, 4, WIDTH), 2)


def test_attention_modules_have_their_counts_back() -> None:
    def work(world: World) -> list[tuple[int, int, int]]:
        divided = divide(world, nn.Sequential(Custom(key_heads=2)), {"0": "heads"})
        module: Any = divided.model[0]  # type: ignore[index]
        found = [(module.num_heads, module.num_kv_heads, module.head_dim)]
        divided.team.divided = False
        found.append((module.num_heads, module.num_kv_heads, module.head_dim))
        divided.detach()
        return [*found, (module.num_heads, module.num_kv_heads, module.head_dim)]

    whole = HEADS, 2, WIDTH // HEADS
    assert sl.simulate(work, 2).results[1] == [(HEADS // 2, 1, WIDTH // HEADS), whole, whole]


class Block(nn.Module):
    """A block of Megatron-LM: attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Custom()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return output


def test_a_block_needs_two_and_two_all_reduces() -> None:
    def work(world: World) -> tuple[dict[str, int], int, dict[str, int], int]:
        divided = divide(world, Block(), {"attn": "heads", "up": "columns", "down": "rows"})
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        output = divided.model(x)
        forward = dict(divided.team.calls), divided.team.sent_bytes
        backward(output.sum())
        return *forward, dict(divided.team.calls), divided.team.sent_bytes

    activations = 2 * 4 * WIDTH * 4
    for forward, forward_bytes, both, both_bytes in sl.simulate(work, 2).results:
        assert forward == {"allreduce": 2}
        assert both == {"allreduce": 4}
        assert (forward_bytes, both_bytes) == (2 * activations, 4 * activations)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 17, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("role", ["transformer", "heads"])
def test_transformer_layers_in_training_and_evaluation(role: str) -> None:
    """In evaluation, torch would give the weights of the layer to one kernel."""
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    plan = {"layers.*": "transformer"} if role == "transformer" else {"layers.*.self_attn": "heads"}
    make = seeded(encoder)

    def evaluate(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [model.eval()(x), model(x, src_key_padding_mask=padding)[:, :2], model.train()(x)]

    x = numbers(1, 2, 4, WIDTH)[0]
    expected = evaluate(make(), x)
    for found in sl.simulate(lambda world: evaluate(divide(world, make(), plan).model, x), 2).results:
        for each, value in zip(found, expected, strict=True):
            assert_close(each, value)
    check_training(make, plan, squares, numbers(3, 2, 4, WIDTH), 2)


def test_transformer_layers_have_their_fast_path_back() -> None:
    def work(world: World) -> list[Any]:
        model: Any = encoder()
        divided = divide(world, model, default_plan(model))
        found = [model.use_nested_tensor, model.layers[0].activation_relu_or_gelu]
        divided.detach()
        return [*found, model.use_nested_tensor, model.layers[0].activation_relu_or_gelu]

    assert sl.simulate(work, 2).results[0] == [0, 0, True, 1]


def test_the_decoder_is_divided_by_default() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 17, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x, 2 * x)
            return output

    plan = default_plan(Decoder())
    assert plan.roles == {"layer": "transformer"}
    check_training(seeded(Decoder), plan, squares, numbers(3, 2, 4, WIDTH), 2)


def test_dropout_of_heads_differs_and_that_of_whole_tensors_does_not() -> None:
    def work(world: World) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        divided = divide(world, nn.Sequential(attention), {"0": "heads"})
        torch.manual_seed(6)
        x = torch.ones(1, 8, 4)
        attention.train()
        _, weights = attention(x, x, x, average_attn_weights=False)
        output, _ = attention(x, x, x, need_weights=False)
        assert divided.team.active
        return weights.detach(), output.detach(), torch.rand(3)

    first, second = sl.simulate(work, 2).results
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0][0, 0], first[0][0, 1])  # heads of different workers
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_whole_tensors_stay_equal_with_dropout() -> None:
    """Also where the parts that are dropped have different lengths."""

    def work(world: World) -> list[Tensor]:
        model = seeded(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 17, 0.5))()
        divided = divide(world, nn.ModuleDict({"layer": model}), {"layer": "transformer"})
        torch.manual_seed(8)
        backward(model(model(numbers(1, 4, 2, WIDTH)[0])).square().sum())
        assert divided.team.active
        whole = [each.grad for name, each in model.named_parameters() if f"layer.{name}" not in divided.slices]
        return [*(each for each in whole if each is not None), torch.rand(2)]

    first, second = sl.simulate(work, 2).results
    assert len(first) == 2 + 4 + 1  # biases of rows, two norms, and the next random numbers
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


REFUSED: dict[str, tuple[nn.Module, Any, str]] = {
    "heads": (nn.MultiheadAttention(9, 3), "heads", r"0 has 3 heads.*over 2 workers: use 1 or 3"),
    "heads of keys": (Custom(key_heads=3), "heads", r"3 heads of keys and values.*over 2"),
    "extra keys": (nn.MultiheadAttention(4, 2, add_bias_kv=True), "heads", "add_bias_kv"),
    "no attention": (nn.Bilinear(2, 2, 2), "heads", r"Bilinear.*cannot be recognised"),
    "a wrong count": (Custom(), Heads(("q_proj", "k_proj", "v_proj"), "o_proj", "n"), "attribute 'n'"),
    "a wrong name": (Custom(), Heads(("q", "k", "v"), "o_proj", "num_heads"), "no layer 'q'.*'q_proj'"),
    "wrong widths": (Interleaved(), Heads(("query_key_value",), "dense", 5), "12 inputs.*5 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_attention_that_cannot_be_divided_is_refused(case: str) -> None:
    module, role, message = REFUSED[case]
    with pytest.raises((SpecError, IncompatibleError), match=message):
        plan_divisions(nn.Sequential(module), {"0": role}, 2)


def test_other_parameters_of_an_attention_module_need_a_role() -> None:
    class Normed(Custom):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.RMSNorm(WIDTH // HEADS)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                self.get_submodule(name)(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
                for name in self.inputs
            )
            found = functional.scaled_dot_product_attention(self.q_norm(q), k, v).transpose(1, 2).flatten(2)
            output: Tensor = self.get_submodule(self.output)(found)
            return output

    make = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Normed()))
    with pytest.raises(IncompatibleError, match=r'q_norm.weight.*"1.q_norm": "split"'):
        plan_divisions(make(), {"1": "heads"}, 2)
    check_training(make, {"1": "heads", "1.q_norm": "split"}, squares, numbers(5, 2, 4, WIDTH), 3)


def test_a_forward_with_the_whole_width_is_explained() -> None:
    class Fixed(Custom):
        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("q_proj")(x).view(*x.shape[:2], self.num_heads, WIDTH // self.num_heads)  # type: ignore[no-any-return]

    def work(world: World) -> None:
        divide(world, nn.Sequential(Fixed()), {"0": "heads"}).model(torch.ones(2, 4, WIDTH))

    with pytest.raises(IncompatibleError, match=r"0 computes with this worker's heads.*-1"):
        sl.simulate(work, 2)
