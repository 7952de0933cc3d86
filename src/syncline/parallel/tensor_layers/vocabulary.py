"""Embeddings, output layers and losses divided by the words of the vocabulary.

Two workers, six words:

```text
            embedding                          output layer             cross_entropy
worker 0    words 0–2, zeros for others ─┐     logits of words 0–2      m = max, then Σ of exp(z − m) and z[target] − m
worker 1    words 3–5, zeros for others ─┴ sum logits of words 3–5      over the workers: logits are never gathered
```
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.errors import IncompatibleError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.team import LayerTeam, sum_over_team
from syncline.parallel.tensor_layers.linear import ColumnLinear, check_length, check_plain, leave_layer, own_range

__all__ = ["VocabularyDivision", "VocabularyEmbedding", "cross_entropy"]


class VocabularyEmbedding:
    """An embedding of which each worker has the rows of some words."""

    tensor_team: LayerTeam
    tensor_division: VocabularyDivision
    weight: Tensor

    def forward(self, words: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(words)  # type: ignore[misc, no-any-return]
        first, stop = own_range(division.words, team.rank, team.size)
        _check_words(words, division.words, division.name)
        inside = (words >= first) & (words < stop)
        if division.looks_up_only_own:
            found = self._look_up(words[inside] - first, first, stop)
            partial = found.new_zeros(*words.shape, found.shape[-1]).index_put((inside,), found)
        else:
            found = self._look_up(torch.where(inside, words - first, 0), first, stop)
            partial = found.masked_fill(~inside.unsqueeze(-1), 0)
        return leave_layer(partial, None, team, division.sequence_dim)

    def _look_up(self, rows: Tensor, first: int, stop: int) -> Tensor:
        layer = cast(nn.Embedding, self)
        padding = layer.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < stop else None
        return functional.embedding(
            rows,
            self.weight,
            own_padding,
            layer.max_norm,
            layer.norm_type,
            layer.scale_grad_by_freq,
            layer.sparse,
        )


class VocabularyDivision(LayerDivision):
    """An embedding divided by its words."""

    def __init__(self, name: str, module: nn.Embedding, *, sequence_dim: int | None = None) -> None:
        super().__init__(name, module)
        self.words, self.sequence_dim = module.num_embeddings, sequence_dim
        self.looks_up_only_own = module.sparse or module.scale_grad_by_freq or module.max_norm is not None
        """Whether a look-up of a row has an effect even if its gradient is 0."""

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        check_length(self.name, self.words, size, "words")

    def share(self, rank: int, size: int) -> Share:
        return Share({"weight": DimensionSlice(0, (own_range(self.words, rank, size),), self.words)})

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, VocabularyEmbedding, tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    layer: nn.Module | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of logits that `layer` has computed, as `torch.nn.functional.cross_entropy` of whole logits.

    If the plan divides the layer by "vocabulary" or "columns", each worker passes its own logits, and gets the same
    loss. Two small all-reduces in forward, none in backward. Otherwise it is torch's function. Targets are class
    numbers; the classes of the logits are at dimension 1, or at 0 without a batch.

    >>> import torch, syncline as sl
    >>> head = torch.nn.Linear(4, 10)
    >>> loss = sl.parallel.cross_entropy(head(torch.zeros(2, 4)), torch.tensor([3, 7]), layer=head)
    """
    dim = min(1, logits.dim() - 1)
    if not isinstance(layer, ColumnLinear) or not layer.tensor_team.active:
        return functional.cross_entropy(
            logits, targets, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    team, division = layer.tensor_team, layer.tensor_division
    first, stop = own_range(division.outputs, team.rank, team.size)
    if division.gathers:
        return cross_entropy(
            logits,
            targets,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if logits.shape[dim] != stop - first:
        raise IncompatibleError(
            f"worker {team.rank} of {team.size} has {stop - first} of the {division.outputs} outputs of "
            f"{division.name}, and the logits have {logits.shape[dim]} classes at dimension {dim}: pass the logits of "
            "this layer, with its outputs at that dimension"
        )
    if targets.is_floating_point():
        raise IncompatibleError(
            f"the targets are {targets.dtype}: logits divided by the vocabulary need class numbers. Probabilities need "
            "whole logits: write 'columns+gather' in the plan"
        )
    if weight is not None or reduction not in ("mean", "sum", "none"):
        _check_options(weight, division.outputs, reduction)
    values = logits.movedim(dim, -1)
    losses, weights = _losses(values, targets, team, (first, division.outputs), ignore_index, weight, label_smoothing)
    if reduction == "mean":
        losses = losses.sum() / weights.sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


def _losses(
    values: Tensor,
    targets: Tensor,
    team: LayerTeam,
    classes: tuple[int, int],
    ignore_index: int,
    weight: Tensor | None,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """The loss of each target, and its weight in the mean. `classes`: this worker's first class, the number of all.

    loss = w_t·(log Σ exp(z − m) − (z_t − m))        m = max z over all workers
    with smoothing s over C classes: (1 − s)·loss + s/C · Σ_c w_c·(log Σ exp(z − m) − (z_c − m))
    """
    first, count = classes
    kept = targets != ignore_index
    _check_words(targets[kept], count, "the loss")
    wide = values if values.dtype == torch.float64 else values.float()
    shifted = wide - team.reduce(wide.detach().amax(-1), "max").unsqueeze(-1)
    own = shifted.shape[-1]
    inside = (targets >= first) & (targets < first + own) & kept
    rows = torch.where(inside, targets - first, 0).unsqueeze(-1)
    sums = [shifted.exp().sum(-1), shifted.gather(-1, rows).squeeze(-1).masked_fill(~inside, 0)]
    if label_smoothing:
        sums.append(shifted.sum(-1) if weight is None else shifted @ weight[first : first + own].to(shifted.dtype))
    total = sum_over_team(torch.stack(sums), team)
    log_sum = total[0].log()
    weights = kept.to(wide.dtype)
    if weight is not None:
        weights = weights * weight.to(wide.dtype)[torch.where(kept, targets, 0)]
    losses = (weights * (log_sum - total[1])).masked_fill(~kept, 0)
    if label_smoothing:
        all_weights = count if weight is None else weight.sum().to(wide.dtype)
        smooth = (all_weights * log_sum - total[2]).masked_fill(~kept, 0)
        losses = (1 - label_smoothing) * losses + label_smoothing / count * smooth
    return losses, weights


def _check_options(weight: Tensor | None, classes: int, reduction: str) -> None:
    """Refuse what torch's function refuses."""
    if reduction not in ("mean", "sum", "none"):
        raise IncompatibleError(f"reduction={reduction!r}: it must be 'mean', 'sum' or 'none'")
    if weight is not None and weight.shape != (classes,):
        raise IncompatibleError(
            f"the class weights have the shape {tuple(weight.shape)}: pass the weights of all {classes} classes on "
            "each worker"
        )


def _check_words(words: Tensor, count: int, name: str) -> None:
    """Refuse numbers outside the vocabulary, as torch does on the CPU."""
    if words.device.type == "cpu" and words.numel():
        low, high = int(words.min()), int(words.max())
        if low < 0 or high >= count:
            raise IndexError(f"{name}: index {low if low < 0 else high} is out of range for {count} words")
