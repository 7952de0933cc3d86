"""A layer of experts: each token goes to a few of them, and its output is the weighted sum of theirs.

    y = Σ over the chosen experts i:  G(x)_i · expert_i(x)

The gates are in `gate.py`. `dispatch.py` sends the tokens to their experts, also on other workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from syncline.codecs import Codec
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.expert_layers.dispatch import Dispatch, TeamExchange, build_row_codec, dispatch, expert_capacity
from syncline.parallel.expert_layers.gate import ExpertGate, NoisyTopK, Routing, SwitchGate
from syncline.parallel.team import LayerTeam

__all__ = ["ExpertStatistics", "Experts", "expert_loss", "expert_statistics"]

GateName = Literal["noisy", "switch"]
ExpertFactory = Callable[[], nn.Module]
DEFAULT_TOP = 2


@dataclass(frozen=True)
class ExpertStatistics:
    """Totals of a layer's training steps since it was made, over all workers that divide it.

    Take differences for an interval:

    >>> later = ExpertStatistics(2, (7, 5), (1, 0), (6.5, 6.5))
    >>> later - ExpertStatistics(1, (3, 3), (0, 0), (3.0, 3.0))
    ExpertStatistics(forwards=1, tokens=(4, 2), dropped=(1, 0), importance=(3.5, 3.5))
    """

    forwards: int
    tokens: tuple[int, ...]
    """The tokens that each expert has computed."""
    dropped: tuple[int, ...]
    """The tokens beyond the capacity of each expert. A token that two experts drop counts twice."""
    importance: tuple[float, ...]
    """The sum of the gate's weights of each expert."""

    def __sub__(self, other: ExpertStatistics) -> ExpertStatistics:
        return ExpertStatistics(
            self.forwards - other.forwards,
            tuple(a - b for a, b in zip(self.tokens, other.tokens, strict=True)),
            tuple(a - b for a, b in zip(self.dropped, other.dropped, strict=True)),
            tuple(a - b for a, b in zip(self.importance, other.importance, strict=True)),
        )


class Experts(nn.Module):
    """A sparsely-gated mixture of experts: a module for tensors of shape (…, features).

    `expert`: a module, of which `count` copies with new parameters are made, or a function that makes one. `top`:
    the experts of a token; by default 2, or 1 for the switch gate. `capacity`: an expert takes ⌈top·T·capacity/count⌉
    of the T tokens of each worker, and drops the others; None: all. The gate is "noisy", "switch" or an `ExpertGate`.
    `features`: the last size of the input, if it is not that of the expert's first linear layer. `codec` encodes the
    tokens that are sent to other workers, and their gradients.

    `loss` is the gate's balance loss in the latest forward in training mode. Add it to the loss of the model:

    >>> layer = Experts(nn.Linear(4, 4), count=8, top=2, capacity=1.25)
    >>> y = layer(torch.randn(3, 5, 4))
    >>> (y.square().mean() + layer.loss).backward()
    >>> y.shape, sum(layer.statistics.tokens) + sum(layer.statistics.dropped)
    (torch.Size([3, 5, 4]), 30)

    An expert sees rows of tokens, (n, features), and n may be 0. In a run that divides the layer, each worker has
    `count`/p of the experts.
    """

    def __init__(
        self,
        expert: nn.Module | ExpertFactory,
        count: int = 8,
        top: int | None = None,
        capacity: float | None = 1.25,
        gate: GateName | ExpertGate = "noisy",
        *,
        features: int | None = None,
        codec: Codec | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SpecError(f"count={count!r}: there is a whole number of experts, at least 1")
        if capacity is not None and (
            isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or not 0 < capacity < float("inf")
        ):
            raise SpecError(f"capacity={capacity!r}: write a positive factor, such as 1.25, or None for no limit")
        self.count, self.capacity = count, capacity
        self.codec = build_row_codec(codec)
        self.experts = nn.ModuleList(_make_experts(expert, count))
        self.gate = _make_gate(gate, count, top, features, self.experts[0])
        self.top = self.gate.top
        self.team: LayerTeam | None = None
        """The workers that divide the experts, if there are any."""
        self.loss = torch.zeros(())
        """The balance loss of the latest forward in training mode; zero before it, and in evaluation mode."""
        self.loss_weight: float | None = None
        """In a pipeline: the weight of the balance loss. The backward pass of the output then includes its gradient."""
        self._totals: Tensor | None = None
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the numbers of tokens and the exchanges cannot be part of a graph
            found: Tensor = torch.compiler.disable(self._forward)(x)  # type: ignore[no-untyped-call]
            return found
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise SpecError(f"experts take floating-point tokens, and these are {x.dtype}")
        if x.dim() < 1 or x.shape[-1] != self.gate.features:
            raise SpecError(f"the gate takes {self.gate.features} features, and the input has shape {list(x.shape)}")
        flat = x.reshape(-1, x.shape[-1])
        team = self.team if self.team is not None and self.team.active else None
        with torch.autocast(flat.device.type, enabled=False):
            routing = self.gate(flat.to(torch.promote_types(flat.dtype, torch.float32)))
        capacity = expert_capacity(len(flat), self.top, self.count, self.capacity)
        sent = dispatch(routing.experts, self.count, capacity)
        rows = flat[sent.tokens]
        exchange = None if team is None else self._begin_exchange(rows, sent, team)
        if self.training:
            self._balance(routing, sent, team)
        else:
            self.loss = torch.zeros((), device=flat.device)
        if exchange is None:
            outputs = _compute(self._own_experts(None), rows, sent.counts)
        else:
            received = exchange.to_experts(rows)
            counts = [sum(each) for each in zip(*exchange.counts, strict=True)]
            outputs = exchange.from_experts(_compute(self._own_experts(team), received, counts))
        combined = _combine(outputs, routing, sent).reshape(*x.shape[:-1], outputs.shape[1])
        if self.loss_weight is None or not self.loss.requires_grad:
            return combined
        return _WithLoss.of(combined, self.loss, self.loss_weight)

    @property
    def has_run(self) -> bool:
        """True after the first forward in training mode."""
        return self._forwards > 0

    @property
    def statistics(self) -> ExpertStatistics:
        """The totals of the training steps since the layer was made."""
        totals = torch.zeros(3, self.count) if self._totals is None else self._totals
        importance, tokens, dropped = totals.tolist()
        return ExpertStatistics(self._forwards, tuple(map(int, tokens)), tuple(map(int, dropped)), tuple(importance))

    def extra_repr(self) -> str:
        codec = "" if self.codec is None else f", codec={self.codec!r}"
        return f"count={self.count}, top={self.top}, capacity={self.capacity}{codec}"

    def _own_experts(self, team: LayerTeam | None) -> list[nn.Module]:
        """The experts that this worker has."""
        if team is None:
            return list(self.experts)
        local = self.count // team.size
        return list(self.experts)[team.rank * local : (team.rank + 1) * local]

    def _begin_exchange(self, rows: Tensor, sent: Dispatch, team: LayerTeam) -> TeamExchange:
        trained = any(each.requires_grad for expert in self._own_experts(team) for each in expert.parameters())
        return TeamExchange(
            team,
            sent.counts,
            needs_gradient=rows.requires_grad or trained,
            training=self.training,
            codec=self.codec,
        )

    def _balance(self, routing: Routing, sent: Dispatch, team: LayerTeam | None) -> None:
        """Set the balance loss, and count. Sums are those of all workers of the team, in one all-reduce.

        The gradient of a run is the mean over its workers. So that it is that of the loss over all tokens, each
        worker's part of the gradient is multiplied by their number.
        """
        sums = routing.sums
        counted = torch.tensor([sent.counts, sent.dropped], dtype=sums.dtype).to(sums.device)
        if team is not None:
            whole = team.reduce(torch.cat([sums.detach(), counted]))
            counted = whole[len(sums) :]
            sums = whole[: len(sums)] + team.size * (sums - sums.detach())
        loss = self.gate.balance_loss(sums)
        if torch._C._current_graph_task_id() != -1:
            return  # this forward recomputes activations inside backward
        self.loss = loss
        totals = torch.cat([sums[:1].detach(), counted]).double()
        self._totals = totals if self._totals is None else self._totals.to(totals.device) + totals
        self._forwards += 1

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no loss, because its graph cannot be copied."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "loss": torch.zeros(())}


class _WithLoss(Function):
    """The output of a layer; its backward pass computes the gradient of a weighted loss too."""

    @staticmethod
    def of(output: Tensor, loss: Tensor, weight: float) -> Tensor:
        found: Tensor = _WithLoss.apply(output, loss, weight)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.loss_gradient = torch.full_like(loss, weight)
        return output.clone()  # no view, so that the next layer may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.loss_gradient, None


def expert_loss(model: nn.Module) -> Tensor:
    """The sum of the balance losses of all experts of a model in its latest forward; zero if it has none.

    >>> model = nn.Sequential(Experts(nn.Linear(4, 4), count=2, top=1), Experts(nn.Linear(4, 4), gate="switch"))
    >>> y = model(torch.randn(8, 4))
    >>> loss = y.mean() + expert_loss(model)
    """
    total = torch.zeros(())
    for name, layer in find_experts(model):
        wanted = layer.training and any(each.requires_grad for each in layer.gate.parameters())
        if torch.is_grad_enabled() and wanted and layer.has_run and not layer.loss.requires_grad:
            raise IncompatibleError(
                f"the balance loss of {name or 'the layer'} has no gradient: the latest forward ran under "
                "torch.no_grad; with activation recomputation use checkpoint(..., use_reentrant=False)"
            )
        total = total.to(layer.loss.device) + layer.loss
    return total


def expert_statistics(model: nn.Module) -> dict[str, ExpertStatistics]:
    """The totals of each layer of experts of a model, by its name.

    >>> expert_statistics(nn.Sequential(Experts(nn.Linear(4, 4), count=2, top=1)))
    {'0': ExpertStatistics(forwards=0, tokens=(0, 0), dropped=(0, 0), importance=(0.0, 0.0))}
    """
    return {name: layer.statistics for name, layer in find_experts(model)}


def find_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The layers of experts of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield name, module


def _compute(experts: list[nn.Module], rows: Tensor, counts: list[int]) -> Tensor:
    """The outputs of all experts, one after another. An expert without tokens computes zero rows, so that all have
    gradients: those of some are zero."""
    outputs = []
    for expert, part in zip(experts, torch.split(rows, counts), strict=True):
        output = expert(part)
        if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(part):
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise SpecError(f"an expert got {list(part.shape)} and returned {shape}: it must return a row for each")
        outputs.append(output)
    return torch.cat(outputs)


def _combine(outputs: Tensor, routing: Routing, sent: Dispatch) -> Tensor:
    """The weighted sums of the outputs of each token. A dropped choice adds nothing."""
    tokens, top = routing.weights.shape
    padded = outputs.new_zeros(top * tokens, outputs.shape[1]).index_copy(0, sent.choices, outputs)
    weighted = padded.view(top, tokens, outputs.shape[1]) * routing.weights.t().unsqueeze(-1)
    return weighted.sum(0).to(outputs.dtype)


def _make_experts(expert: nn.Module | ExpertFactory, count: int) -> list[nn.Module]:
    if isinstance(expert, nn.Module):
        made = [_renewed(copy.deepcopy(expert)) for _ in range(count)]
    elif callable(expert):
        made = [expert() for _ in range(count)]
    else:
        raise SpecError(f"expert={expert!r}: give a module, or a function that makes one")
    seen: dict[int, int] = {}
    for number, each in enumerate(made):
        if not isinstance(each, nn.Module):
            raise SpecError(f"the function that makes experts returned {each!r}, which is no module")
        for name, module in each.named_modules():
            if isinstance(module, _BatchNorm):
                raise SpecError(
                    f"expert {number} has a batch norm ({name or type(module).__name__}): an expert may get 0 or 1 "
                    "tokens, of which it cannot take the variance; use nn.LayerNorm"
                )
            if isinstance(module, Experts):
                raise SpecError(f"expert {number} has experts of its own ({name or 'itself'}); this is not supported")
        for name, tensor in [*each.named_parameters(), *each.named_buffers()]:
            if seen.setdefault(id(tensor), number) != number:
                raise SpecError(
                    f"experts {seen[id(tensor)]} and {number} share {name!r}: make a new module in each call"
                )
    return made


def _renewed(expert: nn.Module) -> nn.Module:
    """Draw the parameters of a copy again."""
    for name, module in expert.named_modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise SpecError(
                f"{name or 'the expert'} ({type(module).__name__}) has parameters and no reset_parameters(), so that "
                "all experts would start equal: give a function that makes an expert"
            )
    return expert


def _make_gate(
    gate: GateName | ExpertGate, count: int, top: int | None, features: int | None, expert: nn.Module
) -> ExpertGate:
    if isinstance(gate, ExpertGate):
        for name, own, said in (
            ("count", gate.count, count),
            ("top", gate.top, gate.top if top is None else top),
            ("features", gate.features, gate.features if features is None else features),
        ):
            if own != said:
                raise SpecError(f"the gate has {name}={own}, and the layer {name}={said}")
        return gate
    if gate not in ("noisy", "switch"):
        raise SpecError(f"gate={gate!r}: a gate is 'noisy', 'switch' or an ExpertGate")
    size = _input_size(expert) if features is None else features
    if gate == "switch":
        return SwitchGate(size, count, 1 if top is None else top)
    return NoisyTopK(size, count, min(DEFAULT_TOP, count) if top is None else top)


def _input_size(expert: nn.Module) -> int:
    for module in expert.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm):
            return module.normalized_shape[-1]
    raise SpecError("the size of the gate is not known, because the expert has no nn.Linear: write features=…")
