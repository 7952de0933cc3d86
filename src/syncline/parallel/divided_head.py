"""One weird trick (Krizhevsky, 2014, arXiv 1404.5997): data-parallel convolutions, dense layers divided by units.

Every worker reads its own b examples. The schemes differ in the turns in which the dense layers compute them. On two
workers:

```text
scheme a   one turn           all examples of both
scheme b   a turn a worker    turn 0: those of worker 0        turn 1: those of worker 1
scheme c   a turn a worker    turn 0: half of each             turn 1: the other halves
```

A step of the head, with the exchanges of `head_layout`. Those of one turn run while other turns compute:

```text
turn 0    own→units ─ dense ─ partial→units ─ dense ─ partial→own
turn 1    own→units ········· dense ─ partial→units ········· dense ─ partial→own
```

Backward runs the same in reverse. Each exchange is one autograd function that starts it and another that waits for it,
and autograd runs the functions of a device in the reverse of the order in which forward has made them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from syncline.errors import IncompatibleError, SpecError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.head_layout import (
    SCHEMES,
    Cut,
    HeadExchange,
    HeadLayout,
    Scheme,
    choose_layout,
    part_of_turn,
    rows_of_turns,
    unit_edges,
)
from syncline.parallel.team import LayerTeam, PendingSwap
from syncline.world.functional import compare_calls

__all__ = ["HeadDivision", "weird_trick_divisions"]

log = logging.getLogger(__name__)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softplus,
    nn.Softshrink, nn.Softsign, nn.Threshold,
)  # fmt: skip
"""Modules that compute each unit alone, so that each worker can apply them to its units."""


# What is exchanged.


class HeadTransfer:
    """One exchange of one turn: started, then waited for, forward and back."""

    def __init__(
        self, team: LayerTeam, exchange: HeadExchange, rows: Sequence[int], units: Sequence[int], tag: int
    ) -> None:
        self.team, self.exchange = team, exchange
        self.rows, self.units = rows, units
        self.tag = tag
        self._blocks: list[Tensor] = []
        self._output: Tensor | None = None
        self._swap: PendingSwap | None = None

    def start(self, x: Tensor, exchange: HeadExchange) -> None:
        """Send this worker's blocks, and post the receives of those of the others."""
        with torch.inference_mode(False):  # a transport writes into buffers outside of the caller's inference mode
            self._start(x.detach(), exchange)

    def _start(self, x: Tensor, exchange: HeadExchange) -> None:
        team, rank = self.team, self.team.rank
        others = [(rank + distance) % team.size for distance in range(1, team.size)]
        sends = [(to, self._cut(x, exchange, to)) for to in others]
        blocks, self._output = self._receive_buffers(x, exchange)
        blocks[rank].copy_(self._cut(x, exchange, rank))
        receives = [(source, blocks[source]) for source in reversed(others)]
        self._blocks = blocks
        self._swap = team.start_swap(
            [(to, block) for to, block in sends if block.numel()],
            [(source, block) for source, block in receives if block.numel()],
            self.tag,
        )

    def finish(self, exchange: HeadExchange) -> Tensor:
        """Wait for the blocks of all workers, and join them."""
        assert self._swap is not None, "an exchange is waited for that was not started"
        self._swap.wait()
        blocks, output = self._blocks, self._output
        self._blocks, self._output, self._swap = [], None, None
        if output is not None:
            return output
        if exchange.joins == "columns":
            return torch.cat(blocks, 1)
        dtype = blocks[0].dtype
        total = blocks[0].to(torch.float32) if dtype.itemsize < torch.float32.itemsize else blocks[0]
        for block in blocks[1:]:  # in the order of the workers, so that the sum is the same in each run
            total += block
        return total.to(dtype)

    def _cut(self, x: Tensor, exchange: HeadExchange, to: int) -> Tensor:
        """The block for a worker."""
        if exchange.sends == "all":
            return x
        dim, parts = (0, self.rows) if exchange.sends == "rows" else (1, self.units)
        return x.narrow(dim, sum(parts[:to]), parts[to])

    def _receive_buffers(self, x: Tensor, exchange: HeadExchange) -> tuple[list[Tensor], Tensor | None]:
        """The memory for the blocks of all workers, and the output if they are parts of it."""
        rank, size = self.team.rank, self.team.size
        shapes = [exchange.block(source, rank, self.rows, self.units) for source in range(size)]
        if exchange.joins != "rows":
            return [x.new_empty(shape) for shape in shapes], None
        output = x.new_empty(sum(high for high, _ in shapes), shapes[0][1])
        return list(torch.split(output, [high for high, _ in shapes])), output


class _Start(Function):
    """Starts an exchange. Its result holds nothing: it leads autograd from `_Finish` to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: HeadTransfer) -> Tensor:
        ctx.transfer = transfer
        transfer.start(x, transfer.exchange)
        return x.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(ctx.transfer.exchange.adjoint), None


class _Finish(Function):
    """Waits for an exchange. Its backward starts the exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, transfer: HeadTransfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish(transfer.exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(gradients[0], ctx.transfer.exchange.adjoint)
        return gradients[0].new_zeros(1), None


@dataclass(frozen=True)
class _StartedExchange:
    """An exchange under way in forward."""

    start: Tensor
    transfer: HeadTransfer

    @staticmethod
    def of(x: Tensor, transfer: HeadTransfer) -> _StartedExchange:
        """Start it."""
        return _StartedExchange(_Start.apply(x, transfer), transfer)  # type: ignore[no-untyped-call]

    def result(self) -> Tensor:
        """Wait for it."""
        result: Tensor = _Finish.apply(self.start, self.transfer)  # type: ignore[no-untyped-call]
        return result


# What is computed.


class MaskStream:
    """The random numbers of dropout on divided units, different on each worker. Global generators do not change."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator: torch.Generator | None = None

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """`x` with some values set to zero, each with the given probability, and the rest scaled up."""
        if self._generator is None or self._generator.device != x.device:
            self._generator = torch.Generator(x.device).manual_seed(self.seed)
        keep = 1.0 - probability
        mask = torch.empty_like(x).bernoulli_(keep, generator=self._generator)
        return x * (mask.div_(keep) if keep else mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskStream:
        """A stream that continues with the same numbers."""
        copy = MaskStream(self.seed)
        if self._generator is not None:
            copy._generator = torch.Generator(self._generator.device)
            copy._generator.set_state(self._generator.get_state())
        return copy


@dataclass(frozen=True)
class DenseChain:
    """The modules of a head: those before its first dense layer, and each dense layer with those that follow it."""

    before: tuple[nn.Module, ...]
    layers: tuple[tuple[str, nn.Linear], ...]
    """The dense layers, with their names below the head. The name is empty if the head is one dense layer."""
    after: tuple[tuple[nn.Module, ...], ...]
    """The modules that follow each layer."""

    @property
    def widths(self) -> list[int]:
        """The inputs of the first layer, and the outputs of each."""
        return [self.layers[0][1].in_features, *(layer.out_features for _, layer in self.layers)]

    @property
    def own_after(self) -> list[bool]:
        """After which layers modules follow that are not computed unit by unit."""
        return [not all(isinstance(each, (*ELEMENTWISE, nn.Dropout)) for each in after) for after in self.after]


class HeadComputation:
    """Computes a head with the workers of a team."""

    def __init__(self, name: str, chain: DenseChain, layout: HeadLayout, scheme: Scheme, team: LayerTeam) -> None:
        self.name, self.chain, self.layout, self.scheme, self.team = name, chain, layout, scheme, team
        self.units = [
            [stop - start for start, stop in pairwise(unit_edges(width, team.size))] for width in chain.widths
        ]
        self.masks = MaskStream(zlib.crc32(f"{torch.initial_seed()} {name} {team.rank}".encode()))

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of this worker's examples. All workers of the team call it together."""
        self._check_recomputation()
        for module in self.chain.before:
            x = module(x)
        place = 0
        while place < len(self.layout.layers):
            stop = place + 1
            while not self.layout.layers[stop - 1].gives_own:
                stop += 1
            x = self._from_own_to_own(x, place, stop)
            layer = self.chain.layers[stop - 1][1]
            if layer.bias is not None and not self.layout.layers[stop - 1].divides_bias:
                x = x + layer.bias.to(x.dtype)
            for module in self.chain.after[stop - 1]:
                x = module(x)
            place = stop
        return x

    def _from_own_to_own(self, x: Tensor, first: int, stop: int) -> Tensor:
        """Some layers, from this worker's examples to its examples. Turns go from exchange to exchange together."""
        team, shape = self.team, x.shape[:-1]
        own = _as_autocast(x.reshape(-1, x.shape[-1]))
        turns = rows_of_turns(self.scheme, self._counts(own, first))
        order = sorted(range(len(turns)), key=lambda turn: part_of_turn(self.scheme, turn, team.rank, team.size))
        parts = torch.split(own, [turns[turn][team.rank] for turn in order])
        of_turn = dict(zip(order, parts, strict=True))
        values: list[Tensor | _StartedExchange] = [of_turn[turn] for turn in range(len(turns))]
        tag = first * 2 * len(turns)
        for compute, exchange, units in self._steps(first, stop):
            started = []
            for rows, value in zip(turns, values, strict=True):
                tag += 1
                transfer = HeadTransfer(team, exchange, rows, units, tag)
                started.append(_StartedExchange.of(compute(_result(value)), transfer))
            values = [*started]
        results = [_result(each) for each in values]
        return torch.cat([results[turn] for turn in order]).reshape(*shape, self.chain.widths[stop])

    def _steps(self, first: int, stop: int) -> Iterator[tuple[Callable[[Tensor], Tensor], HeadExchange, Sequence[int]]]:
        """For each exchange: the computation of a turn before it, the exchange, and the units of each worker in it."""
        pending: list[Callable[[Tensor], Tensor]] = []

        def compute(functions: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                for function in functions:
                    x = function(x)
                return x

            return run

        for place in range(first, stop):
            cut, layer = self.layout.layers[place], self.chain.layers[place][1]
            if cut.before is not None:
                yield compute(pending), cut.before, self.units[place]
                pending = []
            by_columns = cut.cut == "columns"
            pending.append(_linear(layer, with_bias=by_columns))
            if cut.after is not None:
                yield compute(pending), cut.after, self.units[place + 1]
                pending = []
            if cut.gives_own:
                return
            if not by_columns and layer.bias is not None:
                pending.append(_bias(layer))
            pending += [self._on_units(module) for module in self.chain.after[place]]

    def _on_units(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """A module that computes this worker's units."""
        if not isinstance(module, nn.Dropout):
            return module

        def dropout(x: Tensor) -> Tensor:
            return self.masks.dropout(x, module.p) if module.training and module.p else x

        return dropout

    def _counts(self, own: Tensor, first: int) -> list[int]:
        """The number of examples of each worker. Refuses workers that do not compute the same."""
        team, name = self.team, self.chain.layers[first][0]
        width = self.chain.widths[first]
        if own.shape[1] != width:
            raise IncompatibleError(
                f"dense layer {name!r} of the head {self.name!r} takes {width} units, and its input has {own.shape[1]}"
            )
        gradient = "with" if own.requires_grad and torch.is_grad_enabled() else "without"
        compare_calls(team.group, f"head {self.name}.{name}, scheme {self.scheme}: {own.dtype}, {gradient} gradients")
        others = [rank for rank in range(team.size) if rank != team.rank]
        with torch.inference_mode(False):
            counts = torch.zeros(team.size, dtype=torch.int64)
            counts[team.rank] = len(own)
            mine = counts[team.rank : team.rank + 1]
            team.swap([(rank, mine) for rank in others], [(rank, counts[rank : rank + 1]) for rank in others])
        return [int(count) for count in counts]

    def _check_recomputation(self) -> None:
        """Refuse a forward inside backward, because its dropout masks would be different."""
        if torch._C._current_graph_task_id() == -1:
            return
        for place, layer in enumerate(self.layout.layers[:-1]):
            for module in self.chain.after[place]:
                if not layer.gives_own and isinstance(module, nn.Dropout) and module.training and module.p:
                    raise IncompatibleError(
                        f"the head {self.name!r} is computed again in backward, and its dropout on divided units would "
                        "draw other masks: leave the head out of torch.utils.checkpoint"
                    )


def _result(value: Tensor | _StartedExchange) -> Tensor:
    return value.result() if isinstance(value, _StartedExchange) else value


def _linear(layer: nn.Linear, *, with_bias: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, layer.weight, layer.bias if with_bias else None)


def _bias(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: x + layer.bias.to(x.dtype)


def _as_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype to which autocast would convert it in the layer, so that fewer bytes are sent."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


class DividedHead:
    """The class of a head while its dense layers are divided."""

    head_computation: ClassVar[HeadComputation | None] = None

    @_disable_dynamo  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, x: Tensor) -> Tensor:
        """The output of the head, computed with the team while it is divided."""
        computation: HeadComputation | None = self.head_computation
        if computation is None:
            raise IncompatibleError(
                "a part of a divided head was taken, such as model.classifier[:-1], and it has no team: call the "
                "whole head, or take the part of a model that is not divided"
            )
        if not computation.team.active:
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        return computation(x)


# How it is divided.


class HeadDivision(LayerDivision):
    """A head whose dense layers are divided over workers that read different examples."""

    axis = "shared"

    def __init__(
        self, name: str, module: nn.Module, scheme: Scheme, size: int, cuts: Sequence[Cut] | None = None
    ) -> None:
        super().__init__(name, module)
        self.scheme = scheme
        self.chain = _chain(name, module)
        self.layout = self._layout(size, cuts)
        self._cuts = cuts

    def _layout(self, size: int, cuts: Sequence[Cut] | None) -> HeadLayout:
        return choose_layout(self.chain.widths, size, self.chain.own_after, cuts, f"the head {self.name!r}")

    def check(self, size: int) -> None:
        """Refuse layers with fewer units than workers, and what changes the weights of a layer before its forward."""
        if size != self.layout.workers:
            raise SpecError(
                f"the head {self.name!r} was divided for {self.layout.workers} workers, and the team has {size}: make "
                f"its divisions with size={size}"
            )
        for path, layer in self.chain.layers:
            _check_layer(".".join(filter(None, (self.name, path))), layer)

    def share(self, rank: int, size: int) -> Share:
        """The units of each weight and bias. The bias of a layer that is summed at the owners is whole."""
        slices = {}
        for (path, layer), cut in zip(self.chain.layers, self.layout.layers, strict=True):
            prefix = f"{path}." if path else ""
            by_columns = cut.cut == "columns"
            slices[f"{prefix}weight"] = _slice(
                0 if by_columns else 1, layer.out_features if by_columns else layer.in_features, rank, size
            )
            if layer.bias is not None and cut.divides_bias:
                slices[f"{prefix}bias"] = _slice(0, layer.out_features, rank, size)
        return Share(slices)

    def attach(self, team: LayerTeam) -> None:
        """Compute with the team."""
        computation = HeadComputation(self.name, self.chain, self.layout, self.scheme, team)
        divide_class(self.module, DividedHead, head_computation=computation)

    def detach(self) -> None:
        """Compute alone."""
        restore_class(self.module, "head_computation")

    def __repr__(self) -> str:
        widths = " → ".join(str(width) for width in self.chain.widths)
        return f"{self.name or 'the model'}: {widths} units, cut by {', '.join(self.layout.cuts)}"


def _slice(dimension: int, length: int, rank: int, size: int) -> DimensionSlice:
    edges = unit_edges(length, size)
    return DimensionSlice(dimension, ((edges[rank], edges[rank + 1]),), length)


def weird_trick_divisions(
    model: nn.Module,
    head: Sequence[str] | None = None,
    scheme: Scheme = "b",
    size: int = 2,
    *,
    cuts: Sequence[Cut] | None = None,
) -> list[LayerDivision]:
    """How the dense layers of a network are divided over `size` workers that read different examples.

    `head`: the names of modules, each an `nn.Sequential` with dense layers or one dense layer. None: the dense layers
    after the last convolution. `cuts`: "columns" or "rows" for each dense layer; None: those that send least.

    >>> model = nn.Sequential(
    ...     nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    ... )
    >>> weird_trick_divisions(model, scheme="b", size=2)
    [the model: 144 → 32 → 10 units, cut by rows, rows]
    """
    if scheme not in SCHEMES:
        raise SpecError(f"scheme={scheme!r}: one weird trick has the schemes {', '.join(SCHEMES)}")
    if isinstance(head, str):
        head = [head]
    names = list(find_head(model)) if head is None else list(head)
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown or not names:
        dense = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise SpecError(f"head={names}: the model has no module {unknown}; its dense layers are {dense}")
    divisions: list[HeadDivision] = []
    for name in names:
        given = cuts
        if cuts is not None and len(names) > 1:
            before = sum(len(each.chain.layers) for each in divisions)
            given = cuts[before : before + len(_chain(name, modules[name]).layers)]
        divisions.append(HeadDivision(name, modules[name], scheme, size, given))
    _check_separate(model, divisions)
    for division in divisions:
        division.check(size)
    log.info("one weird trick, scheme %s, %d workers: %s", scheme, size, "; ".join(map(repr, divisions)))
    return list(divisions)


def find_head(model: nn.Module) -> list[str]:
    """The names of the modules that hold the dense layers after the last convolution.

    A dense layer in nested `nn.Sequential` counts with the outermost of them that has no convolution, or with the
    innermost if all have. Any other dense layer counts alone.
    """
    modules = dict(model.named_modules())
    places = list(modules)
    convolutions = [place for place, module in enumerate(modules.values()) if isinstance(module, CONVOLUTIONS)]
    if not convolutions:
        raise SpecError(
            "one weird trick divides the dense layers after the last convolution, and the model has no convolution: "
            'name them, such as head=["classifier"]'
        )
    found: dict[str, None] = {}
    for name in places[convolutions[-1] + 1 :]:
        if not isinstance(modules[name], nn.Linear):
            continue
        above = [""] if "." not in name else ["", *accumulate(name.split(".")[:-1], lambda a, b: f"{a}.{b}")]
        nested: list[str] = []  # the Sequentials that follow one another up from the layer, outermost first
        for each in reversed(above):
            if not _is_sequential(modules[each]):
                break
            nested.insert(0, each)
        dense = [each for each in nested if not any(isinstance(m, CONVOLUTIONS) for m in modules[each].modules())]
        found[(dense or nested[-1:] or [name])[0]] = None
    if not found:
        raise SpecError(
            f"one weird trick divides the dense layers after the last convolution, {places[convolutions[-1]]!r}, and "
            "no nn.Linear follows it"
        )
    return list(found)


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _chain(name: str, module: nn.Module) -> DenseChain:
    """The modules of a head in their order."""
    if any(isinstance(each, nn.parameter.UninitializedParameter) for each in module.parameters()):
        raise IncompatibleError(
            f"a dense layer of the head {name!r} does not know its size yet: call the model with one batch first"
        )
    if isinstance(module, nn.Linear):
        return DenseChain((), (("", module),), ((),))
    if not _is_sequential(module):
        raise SpecError(
            f"the head {name!r} is a {type(module).__name__}, and only an nn.Sequential or an nn.Linear can be a "
            "head: name the dense layers inside it, each on its own"
        )
    flat = list(_flatten(module))
    last = max(
        (place for place, (_, each) in enumerate(flat) if any(isinstance(m, CONVOLUTIONS) for m in each.modules())),
        default=-1,
    )
    dense = [place for place in range(last + 1, len(flat)) if isinstance(flat[place][1], nn.Linear)]
    if not dense:
        kinds = ", ".join(type(each).__name__ for _, each in flat)
        raise SpecError(f"the head {name!r} has no nn.Linear after its last convolution ({kinds})")
    stops = [*dense[1:], len(flat)]
    return DenseChain(
        tuple(each for _, each in flat[: dense[0]]),
        tuple((flat[place][0], flat[place][1]) for place in dense),  # type: ignore[misc]
        tuple(tuple(each for _, each in flat[place + 1 : stop]) for place, stop in zip(dense, stops, strict=True)),
    )


def _flatten(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested Sequentials, with their names."""
    for name, child in module.named_children():
        if _is_sequential(child):
            yield from _flatten(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_layer(name: str, layer: nn.Linear) -> None:
    own = dict(layer.named_parameters(recurse=False))
    if type(layer).forward is not nn.Linear.forward:
        raise IncompatibleError(
            f"{name} is a {type(layer).__name__} with a forward of its own, and the head divides nn.Linear only: leave "
            "it out of the head"
        )
    if "weight" not in own or (layer.bias is not None and "bias" not in own):
        raise IncompatibleError(
            f"the weight of {name} is computed from other parameters (a parametrization), and only plain weights can "
            "be divided: remove it, or leave the layer out of the head"
        )
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        raise IncompatibleError(
            f"{name} has hooks, such as those of weight_norm, and a divided layer is not called as a module: remove "
            "them, or leave the layer out of the head"
        )


def _check_separate(model: nn.Module, divisions: Sequence[HeadDivision]) -> None:
    """Refuse a layer that is in two heads, and a weight that the model uses at two places."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    seen: dict[int, str] = {}
    for division in divisions:
        for path, layer in division.chain.layers:
            name = ".".join(filter(None, (division.name, path)))
            if id(layer) in seen:
                raise SpecError(f"dense layer {name} is also {seen[id(layer)]}: name it once, in one head")
            seen[id(layer)] = name
            for parameter in layer.parameters():
                if len(names[id(parameter)]) > 1:
                    raise IncompatibleError(
                        f"{' and '.join(names[id(parameter)])} are one parameter, and a divided layer has only a part "
                        "of it: leave the layer out of the head"
                    )
