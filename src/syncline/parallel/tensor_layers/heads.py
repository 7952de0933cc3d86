"""Attention divided by heads.

Two workers, four heads:

```text
            q, k, v: columns          attention        output: rows
X ─┬─ copy ── heads 0, 1 ── softmax(q·kᵀ)·v of 0, 1 ──┐
   └─ copy ── heads 2, 3 ── softmax(q·kᵀ)·v of 2, 3 ──┴─ sum ── + bias
```

The input is copied once for q, k and v: one all-reduce in forward, one in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.errors import IncompatibleError, SpecError, SynclineError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.team import LayerTeam, copy_to_team, gather, sum_over_team, take_own_part
from syncline.parallel.tensor_layers.linear import (
    ColumnsDivision,
    InputCopies,
    RowsDivision,
    check_plain,
    enter_layer,
    leave_layer,
    own_range,
)
from syncline.parallel.tensor_layers.random_streams import split_random

__all__ = [
    "AttentionHeads",
    "AttentionHeadsDivision",
    "Heads",
    "HeadsDivision",
    "MultiheadAttentionHeads",
    "attention_divisions",
    "join_names",
    "recognise_heads",
]

INPUTS = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v")),
    *(("wq", "wk", "wv"), ("q_lin", "k_lin", "v_lin"), ("qkv",), ("c_attn",), ("in_proj",), ("qkv_proj",)),
    *(("to_qkv",), ("Wqkv",)),
)
"""Names of the layers that compute q, k and v in one module or in three, in this order."""
OUTPUTS = ("o_proj", "out_proj", "proj", "c_proj", "out", "to_out", "wo", "out_lin")
COUNTS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
KEY_COUNTS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head")


@dataclass(frozen=True)
class Heads:
    """How an attention module names its parts, for a plan: `{"blocks.*.attn": Heads(("qkv",), "proj", "n_heads")}`.

    >>> Heads(inputs=("wq", "wk", "wv"), output="wo", count="n_heads", key_count="n_kv_heads").output
    'wo'
    """

    inputs: tuple[str, ...]
    """The linear layers that compute q, k and v: three, or one of (3, heads, features of a head) outputs."""
    output: str
    """The linear layer after the attention."""
    count: str | int
    """The attribute with the number of heads, which is this worker's number while the module is divided. Or the number
    itself, if the module finds it from the shapes."""
    key_count: str | int | None = None
    """The same for the heads of keys and values, if there are fewer of them."""
    interleaved: bool = False
    """Whether one layer for q, k and v has (heads, 3, features of a head) outputs."""
    sequence: bool = False
    """Whether input and output are parts of the sequence, as with "sequence+heads+sequence"."""


def recognise_heads(name: str, module: nn.Module) -> Heads:
    """The parts of an attention module with common names."""
    children = dict(module.named_children())
    inputs = next((names for names in INPUTS if all(each in children for each in names)), None)
    output = next((each for each in OUTPUTS if isinstance(children.get(each), nn.Linear)), None)
    count = next((each for each in COUNTS if isinstance(vars(module).get(each), int)), None)
    key_count = next((each for each in KEY_COUNTS if isinstance(vars(module).get(each), int)), None)
    found = {"inputs (q, k, v)": inputs, "output": output, "count": count}
    missing = [part for part, each in found.items() if each is None]
    if inputs is None or output is None or count is None:
        raise IncompatibleError(
            f"{name} is a {type(module).__name__} with the layers {sorted(children)}; its {' and its '.join(missing)} "
            'cannot be recognised: write sl.parallel.Heads(inputs=("q", "k", "v"), output="out", count="n_heads") with '
            "its names instead of 'heads'"
        )
    return Heads(inputs, output, count, key_count)


class AttentionHeads:
    """A user's attention module of which each worker computes some heads. Its counts of heads are this worker's."""

    tensor_team: LayerTeam
    tensor_division: HeadsDivision

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self.tensor_division.copies.shared():
            try:
                return super().forward(*inputs, **options)  # type: ignore[misc]
            except RuntimeError as error:
                text, foreign = str(error), not isinstance(error, SynclineError | torch.OutOfMemoryError)
                if foreign and self.tensor_team.active and ("shape" in text or "size" in text):
                    raise IncompatibleError(
                        f"{self.tensor_division.name} computes with this worker's heads, and a shape does not fit: "
                        f"{text}. Its forward must take the number of features from its layers' outputs, or write -1 "
                        "instead of the width of the model"
                    ) from error
                raise


@cache
def _with_counts(names: tuple[str, ...]) -> type:
    """The class of attention modules with these counts of heads."""
    return type("AttentionHeads", (AttentionHeads,), {name: _count_property(name) for name in names})


def _count_property(name: str) -> property:
    """A count of heads: the whole one divided by the size of the team."""

    def get(module: Any) -> int:
        whole: int = vars(module)[name]
        team: LayerTeam = module.tensor_team
        return whole // team.size if team.active else whole

    def set_whole(module: Any, value: int) -> None:
        vars(module)[name] = value

    return property(get, set_whole)


class HeadsDivision(LayerDivision):
    """A user's attention module, divided by heads. Its linear layers have divisions of their own."""

    def __init__(self, name: str, module: nn.Module, heads: Heads) -> None:
        super().__init__(name, module)
        self.heads = heads
        self.copies = InputCopies()
        self.count = self._number(heads.count)
        self.key_count = self.count if heads.key_count is None else self._number(heads.key_count)

    def _number(self, count: str | int) -> int:
        if isinstance(count, int):
            return count
        value = vars(self.module).get(count)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(
                f"{self.name} is a {type(self.module).__name__}; its attribute {count!r} should be the number of "
                f"heads and is {value!r}: name an attribute with a whole number, or write the number itself"
            )
        return value

    def check(self, size: int) -> None:
        for count, things in ((self.count, "heads"), (self.key_count, "heads of keys and values")):
            _check_heads(self.name, count, things, size)

    def share(self, rank: int, size: int) -> Share:
        return Share()

    def attach(self, team: LayerTeam) -> None:
        counts = tuple(each for each in (self.heads.count, self.heads.key_count) if isinstance(each, str))
        divide_class(self.module, _with_counts(counts), tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")


def attention_divisions(
    name: str, module: nn.Module, heads: Heads, *, sequence_in: int | None = None, sequence_out: int | None = None
) -> list[LayerDivision]:
    """The divisions of a user's attention module and of its linear layers."""
    whole = HeadsDivision(name, module, heads)
    layers = {each: _linear(name, module, each) for each in (*heads.inputs, heads.output)}
    output = layers[heads.output]
    if output.in_features % whole.count:
        raise IncompatibleError(
            f"{name}.{heads.output} has {output.in_features} inputs, which is no multiple of {whole.count} heads"
        )
    features = output.in_features // whole.count
    found: list[LayerDivision] = [whole]
    for each in heads.inputs:
        layer = layers[each]
        blocks, unit = _blocks(join_names(name, each), layer.out_features, whole, features)
        columns = ColumnsDivision(join_names(name, each), layer, sequence_dim=sequence_in, blocks=blocks, unit=unit)
        columns.copies = whole.copies
        found.append(columns)
    found.append(RowsDivision(join_names(name, heads.output), output, sequence_dim=sequence_out, unit=features))
    return found


def join_names(name: str, child: str) -> str:
    """The name of a child of a module. The model itself has the name ""."""
    return f"{name}.{child}" if name else child


def _linear(name: str, module: nn.Module, path: str) -> nn.Linear:
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        known = ", ".join(repr(each) for each, _ in module.named_children())
        raise SpecError(f"{name} has no layer {path!r}; its layers: {known}") from None
    if not isinstance(layer, nn.Linear):
        raise IncompatibleError(f"{join_names(name, path)} is a {type(layer).__name__}: heads need linear layers")
    return layer


def _blocks(name: str, outputs: int, whole: HeadsDivision, features: int) -> tuple[tuple[int, ...], int]:
    """The blocks of the outputs of a layer, and the outputs of the smallest part that stays on one worker."""
    query, key = whole.count * features, whole.key_count * features
    if len(whole.heads.inputs) > 1:
        if outputs in (query, key):
            return (outputs,), features
    elif whole.heads.interleaved and outputs == 3 * query:
        return (outputs,), 3 * features
    elif not whole.heads.interleaved and outputs == query + 2 * key:
        return (query, key, key), features
    raise IncompatibleError(
        f"{name} has {outputs} outputs; {whole.count} heads and {whole.key_count} heads of keys and values with "
        f"{features} features each have {query} and {key}: name the right layers and counts in sl.parallel.Heads"
    )


def _check_heads(name: str, count: int, things: str, size: int) -> None:
    if count % size:
        fitting = [str(each) for each in range(1, count + 1) if count % each == 0]
        raise IncompatibleError(
            f"{name} has {count} {things}, which cannot be divided over {size} workers: use {' or '.join(fitting)} "
            "workers"
        )


class MultiheadAttentionHeads:
    """`nn.MultiheadAttention` of which each worker computes some heads."""

    tensor_team: LayerTeam
    tensor_division: AttentionHeadsDivision

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(  # type: ignore[misc, no-any-return]
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        layer: Any = self
        if query.is_nested or key.is_nested or value.is_nested:
            raise IncompatibleError(f"{division.name} is divided by heads and got a nested tensor: pass padded ones")
        if is_causal and attn_mask is None:
            raise IncompatibleError(
                "is_causal=True is a hint about attn_mask: pass the mask too, as without a division"
            )
        batched = query.dim() == 3
        with division.copies.shared():
            whole = [
                division.copies.take(each, lambda x: enter_layer(x, team, division.sequence_in))
                for each in (query, key, value)
            ]
        if not batched:
            whole = [each.unsqueeze(0) for each in whole]
        elif not layer.batch_first:
            whole = [each.transpose(0, 1) for each in whole]
        heads = [_project(layer, place, each, team.size) for place, each in enumerate(whole)]
        length = heads[0].shape[2], heads[1].shape[2]
        mask, causal = _merge_masks(layer, attn_mask, key_padding_mask, is_causal and not need_weights, team, length)
        found, weights = _attend(layer, heads, mask, causal, need_weights, team)
        joined = found.transpose(1, 2).flatten(2)
        joined = joined.squeeze(0) if not batched else joined if layer.batch_first else joined.transpose(0, 1)
        partial = functional.linear(joined, layer.out_proj.weight)
        output = leave_layer(partial, layer.out_proj.bias, team, division.sequence_out)
        if weights is not None:
            if average_attn_weights:
                weights = sum_over_team(weights.sum(1) / layer.num_heads, team)
            else:
                weights = gather(weights, team, 1)
            weights = weights if batched else weights.squeeze(0)
        return output, weights


def _project(layer: Any, place: int, x: Tensor, size: int) -> Tensor:
    """q, k or v of this worker's heads: (batch, heads, positions, features)."""
    if layer.in_proj_weight is not None:
        weight = layer.in_proj_weight.chunk(3)[place]
    else:
        weight = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)[place]
    bias = None if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)[place]
    features = functional.linear(x, weight, bias)
    return features.view(*features.shape[:2], layer.num_heads // size, -1).transpose(1, 2)


def _merge_masks(
    layer: Any,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    team: LayerTeam,
    length: tuple[int, int],
) -> tuple[Tensor | None, bool]:
    """The mask to add to q·kᵀ of this worker's heads, and whether it is the causal one, which need not be added."""
    if causal and key_padding_mask is None:
        return None, True
    merged: Tensor | None = None
    dtype = layer.out_proj.weight.dtype
    if attn_mask is not None:
        merged = _additive(attn_mask, dtype)
        if merged.dim() == 3:
            merged = take_own_part(merged.view(-1, layer.num_heads, *length), team, 1)
        else:
            merged = copy_to_team(merged, team)  # its gradient is the sum over all heads
    if key_padding_mask is not None:
        padding = copy_to_team(_additive(key_padding_mask, dtype), team).view(-1, 1, 1, length[1])
        merged = padding if merged is None else merged + padding
    return merged, False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add: -∞ where a mask of truth values forbids."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    return mask


def _attend(
    layer: Any, heads: Sequence[Tensor], mask: Tensor | None, causal: bool, need_weights: bool, team: LayerTeam
) -> tuple[Tensor, Tensor | None]:
    """Attention of this worker's heads. Each worker draws its own dropout mask."""
    query, key, value = heads
    dropout = layer.dropout if layer.training else 0.0
    if mask is not None:
        mask = mask.to(query.dtype)
    if not need_weights:
        attend: Callable[[], Tensor] = lambda: functional.scaled_dot_product_attention(  # noqa: E731
            query, key, value, mask, dropout, causal
        )
        if dropout:
            with split_random(team, query.device):
                return attend(), None
        return attend(), None
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if dropout:
        with split_random(team, query.device):
            weights = functional.dropout(weights, dropout)
    return weights @ value, weights


class AttentionHeadsDivision(LayerDivision):
    """`nn.MultiheadAttention` divided by heads."""

    def __init__(
        self,
        name: str,
        module: nn.MultiheadAttention,
        *,
        sequence_in: int | None = None,
        sequence_out: int | None = None,
    ) -> None:
        super().__init__(name, module)
        self.attention = module
        self.sequence_in, self.sequence_out = sequence_in, sequence_out
        self.copies = InputCopies()

    def check(self, size: int) -> None:
        layer = self.attention
        if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
            raise IncompatibleError(
                f"{self.name} adds keys and values of its own (add_bias_kv or add_zero_attn), which are not divided "
                "by heads: make it without them, or leave it out of the plan"
            )
        if layer.in_proj_weight is not None:
            check_plain(self.name, layer, "in_proj_weight")
        else:
            check_plain(self.name, layer, "q_proj_weight", "k_proj_weight", "v_proj_weight")
        check_plain(f"{self.name}.out_proj", layer.out_proj, "weight")
        _check_heads(self.name, layer.num_heads, "heads", size)

    def share(self, rank: int, size: int) -> Share:
        width = self.attention.embed_dim
        first, stop = (edge * self.attention.head_dim for edge in own_range(self.attention.num_heads, rank, size))
        own = DimensionSlice(0, ((first, stop),), width)
        three = DimensionSlice(0, tuple((first + i * width, stop + i * width) for i in range(3)), 3 * width)
        slices = {"out_proj.weight": DimensionSlice(1, ((first, stop),), width)}
        if self.attention.in_proj_weight is not None:
            slices["in_proj_weight"] = three
        else:
            slices |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), own)
        if self.attention.in_proj_bias is not None:
            slices["in_proj_bias"] = three
        return Share(slices)

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, MultiheadAttentionHeads, tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")
