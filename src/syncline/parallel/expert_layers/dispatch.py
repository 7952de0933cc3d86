"""Rows of tokens go to the workers that have their experts, and the outputs come back.

Two workers, experts 0 and 1 on worker 0, experts 2 and 3 on worker 1; `e2` is a row for expert 2:

```text
            sorted by expert      counts, then rows         sorted by expert        the way back
worker 0    e0 e1 e2 e3 e3        e0 e1 | e0 e0 e1    ──►   e0 e0 e0 | e1 e1   ──►  outputs, in the order
worker 1    e0 e0 e1 e2           e2 e3 e3 | e2             e2 e2 | e3 e3           in which they were sent
```

Every worker of a team takes part in every exchange, also without tokens, in backward too. So the workers tell each
other with the counts their mode, and whether a gradient is needed. If one of them needs it, all record the exchanges
for backward, and a link from each exchange to the next makes sure that no backward leaves one out::

    anchor ──► exchange ──► rows ──► experts ──► exchange ──► outputs
                       └───────────  link  ───────────►
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from syncline.codecs import Codec, PayloadCodec, RngKey, SparseCodec, build_codec
from syncline.errors import DivergedError, IncompatibleError, SpecError
from syncline.parallel.team import LayerTeam

__all__ = ["Dispatch", "TeamExchange", "build_row_codec", "dispatch", "expert_capacity"]

NO_GRADIENTS, NOT_NEEDED, NEEDED = range(3)
"""The state of gradients on a worker: it runs under torch.no_grad; no tensor needs a gradient; some tensor does."""
SEED_BITS = 31


def expert_capacity(tokens: int, top: int, count: int, factor: float | None) -> int:
    """The most tokens of a worker that an expert takes: ⌈k·T·factor/E⌉. The factor counts as the decimal it is.

    >>> expert_capacity(40, top=2, count=8, factor=1.1)
    11
    """
    return tokens * top if factor is None else ceil(top * tokens * Fraction(str(factor)) / count)


@dataclass(frozen=True)
class Dispatch:
    """The rows of a worker's tokens, sorted by expert.

    A choice is a token with one of its experts; the first choices of all tokens come first.
    """

    tokens: Tensor
    """The token of each row."""
    choices: Tensor
    """The choice of each row."""
    counts: list[int]
    """The number of rows for each expert."""
    dropped: list[int]
    """The number of choices of each expert that exceed its capacity."""


def dispatch(experts: Tensor, count: int, capacity: int) -> Dispatch:
    """Sort the choices of T tokens, (T, k), by expert. An expert takes the first `capacity`; first choices go first.

    >>> dispatch(torch.tensor([[1, 0], [1, 2], [1, 0]]), count=3, capacity=2)
    Dispatch(tokens=tensor([0, 2, 0, 1, 1]), choices=tensor([3, 5, 0, 1, 4]), counts=[2, 2, 1], dropped=[0, 1, 0])
    """
    chosen = experts.t().reshape(-1)
    order = chosen.argsort(stable=True)
    wanted = torch.bincount(chosen, minlength=count)
    starts = wanted.cumsum(0) - wanted
    kept = order[torch.arange(len(order), device=order.device) - starts[chosen[order]] < capacity]
    numbers: list[int] = wanted.tolist()
    counts = [min(each, capacity) for each in numbers]
    dropped = [each - taken for each, taken in zip(numbers, counts, strict=True)]
    return Dispatch(kept % max(1, len(experts)), kept, counts, dropped)


def build_row_codec(codec: Codec | str | None) -> PayloadCodec | None:
    """The codec of rows on the wire. A codec that keeps state between steps is refused: later rows are other tokens."""
    built = build_codec(codec)
    if built is None:
        return None
    advice = "use 'quantize(8)' or \"cast('bf16')\""
    if not isinstance(built, PayloadCodec) or isinstance(built, SparseCodec) or not built.traits.fixed_length:
        raise SpecError(f"codec {built!r} cannot encode rows of tokens, whose encoded lengths must be known: {advice}")
    traits = built.traits
    if built.keeps_residual or traits.momentum or traits.steady_from_step or traits.gradient_options:
        raise SpecError(
            f"codec {built!r} keeps state from one step to the next, and rows are other tokens then: {advice}, or "
            "feedback=False"
        )
    return built


class TeamExchange:
    """The exchanges of one forward pass, and of its backward pass. Every worker of the team makes one."""

    def __init__(
        self,
        team: LayerTeam,
        counts: Sequence[int],
        *,
        needs_gradient: bool = False,
        training: bool = False,
        codec: PayloadCodec | None = None,
    ) -> None:
        """`counts`: the rows for each expert of all workers. `training`: the mode, which must be the same on all."""
        self._team, self._codec = team, codec
        local = len(counts) // team.size
        wish = (NEEDED if needs_gradient else NOT_NEEDED) if torch.is_grad_enabled() else NO_GRADIENTS
        table = torch.tensor(
            [[*counts[start : start + local], wish, training] for start in range(0, len(counts), local)]
        )
        received = team.alltoall(table, [1] * team.size, [1] * team.size)
        self.counts: list[list[int]] = received[:, :local].tolist()
        """The rows for each of this worker's experts, from each worker."""
        self.send = table[:, :local].sum(1).tolist()
        self.receive = received[:, :local].sum(1).tolist()
        self._check_modes(received[:, local + 1].tolist())
        self.recorded = self._agree(received[:, local].tolist())
        """True if a backward pass follows on all workers."""
        self._seed = int(torch.randint(1 << SEED_BITS, ())) if codec is not None else 0
        self._link = torch.zeros((), requires_grad=self.recorded)

    def _check_modes(self, training: Sequence[int]) -> None:
        if len(set(training)) > 1:
            raise IncompatibleError(
                f"workers {training.index(1)} and {training.index(0)} of a team of {self._team.size} differ: the first "
                "runs a layer of experts in training mode, the second in evaluation mode; call train() or eval() on all"
            )

    def _agree(self, gradient_states: Sequence[int]) -> bool:
        without = [rank for rank, wish in enumerate(gradient_states) if wish == NO_GRADIENTS]
        if NEEDED in gradient_states and without:
            raise IncompatibleError(
                f"workers {gradient_states.index(NEEDED)} and {without[0]} of a team of {self._team.size} differ: the "
                "first needs gradients of its tokens, and the second runs under torch.no_grad and would miss the "
                "exchanges of backward; run the same passes on all workers"
            )
        return NEEDED in gradient_states

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows to the workers of their experts. Returns the rows for this worker's experts, sorted by expert."""
        received = self._exchange(rows, self.send, self.receive, step=0)
        return received[self._by_expert(rows.device)]

    def from_experts(self, outputs: Tensor) -> Tensor:
        """Send the outputs back. Returns those of this worker's rows, in the order in which they were sent."""
        if outputs.requires_grad and not self.recorded:
            raise IncompatibleError(
                "the experts' outputs need gradients, and neither their inputs nor their parameters do: an expert uses "
                "a tensor that is not one of its parameters; make it a parameter of the expert"
            )
        by_source = self._by_expert(outputs.device).argsort()
        found = self._exchange(outputs[by_source], self.receive, self.send, step=2)
        self._link = torch.zeros(())  # the graph holds this object, and must not be held by it
        return found

    def _by_expert(self, device: torch.device) -> Tensor:
        """The received rows, in the order of experts and, for each expert, of workers."""
        counts = torch.tensor(self.counts, device=device)
        numbers = torch.arange(counts.shape[1], device=device).repeat(len(counts))
        return numbers.repeat_interleave(counts.reshape(-1)).argsort(stable=True)

    def _exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], step: int) -> Tensor:
        if not self.recorded:
            return self.move(rows, send, receive, step)
        found: tuple[Tensor, Tensor] = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
            rows, self._link, self, send, receive, step
        )
        self._link = found[1]
        return found[0]

    def move(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], step: int) -> Tensor:
        """Send `send[i]` rows to worker i, and return those of all workers. `step` numbers the exchanges of a pass."""
        team, codec = self._team, self._codec
        if codec is None:
            return team.alltoall(rows, send, receive)
        key = RngKey(self._seed, step, team.rank)
        width = rows.shape[1]
        outgoing = list(torch.split(rows, list(send)))
        own = outgoing[team.rank]
        outgoing[team.rank] = own[:0]  # is not sent, so it is not encoded
        payloads = [_encode(codec, part, key.for_slice(f"worker {to}")) for to, part in enumerate(outgoing)]
        lengths = [0 if source == team.rank else _length(codec, count * width) for source, count in enumerate(receive)]
        received = team.alltoall(
            torch.cat(payloads),
            [len(each) for each in payloads],
            lengths,
            (len(rows) - len(own)) * width * rows.element_size(),
        )
        output = rows.new_empty(sum(receive), width)
        places = [0, *accumulate(receive)]
        for source, payload in enumerate(torch.split(received, lengths)):
            part = output[places[source] : places[source + 1]]
            if source == team.rank:
                part.copy_(own)
            else:
                _decode(codec, payload, part)
        return output


def _length(codec: PayloadCodec, numel: int) -> int:
    """The bytes of an encoded part: the payload, and a byte that is 1 if the values are not finite."""
    return codec.max_bytes(numel) + 1 if numel else 0


def _encode(codec: PayloadCodec, part: Tensor, key: RngKey) -> Tensor:
    """NaN and Inf arrive as NaN, so that a gradient scaler sees them; no codec can encode them."""
    encoded = torch.zeros(_length(codec, part.numel()), dtype=torch.uint8, device=part.device)
    if part.numel():
        try:
            encoded[:-1] = codec.encode(part.contiguous(), key)
        except DivergedError:
            encoded[-1] = 1
    return encoded


def _decode(codec: PayloadCodec, encoded: Tensor, part: Tensor) -> None:
    if not part.numel():
        return
    if encoded[-1]:
        part.fill_(float("nan"))
    else:
        codec.decode(encoded[:-1], part)


class _ExchangeRows(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        link: Tensor,
        exchange: TeamExchange,
        send: Sequence[int],
        receive: Sequence[int],
        step: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.send, ctx.receive, ctx.step = exchange, send, receive, step
        return exchange.move(rows, send, receive, step), link.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        moved = ctx.exchange.move(gradients[0], ctx.receive, ctx.send, ctx.step + 1)
        return moved, gradients[1], None, None, None, None
