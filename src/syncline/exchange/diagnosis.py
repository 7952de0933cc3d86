"""What a codec does to each layer's gradient, for the run log; off by default, for it sums the gradients densely too.

sl_codec_error     ‖e − C(e)‖ / ‖e‖ on rank 0, e what it encodes: gradient and residual
sl_codec_xi        ‖C(mean e) − mean C(e)‖ / ‖mean g‖ of codecs that choose elements: the ξ of top-k SGD's
                   convergence assumption (Alistarh et al. 2018), which must stay bounded
sl_codec_density   the part of the elements that are not zero after the reduction
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from syncline.codecs import Codec, Draw, Part, PayloadCodec
from syncline.exchange.exchange import Exchange
from syncline.exchange.ways import is_sparse

__all__ = ["Diagnosis"]


class Diagnosis:
    """One step's: `look` before a bucket is encoded, `tell` when all have been reduced."""

    def __init__(self, exchange: Exchange, draw: Draw) -> None:
        self._exchange = exchange
        self._draw = draw
        self._seen: list[tuple[Codec, Part, Tensor, Tensor]] = []

    def look(self, codec: Codec, parts: Sequence[Part]) -> None:
        """Keep what is about to be encoded."""
        for part in parts:
            gradient = part.flat.clone()
            whole = gradient if part.residual is None else gradient + part.residual
            memory = {key: value.clone() for key, value in part.memory.items()}
            self._seen.append((codec, replace(part, residual=None, memory=memory), gradient, whole))

    def tell(self) -> None:
        """Work it out and record it. Every rank calls it at the same place: there are sums to be taken."""
        point, size = self._exchange.world.events.point, self._exchange.size
        for codec, part, gradient, whole in self._seen:
            left = self._left(codec, part, whole)
            where = {"layer": part.name, "step": self._draw.step}
            point("sl_codec_error", _ratio(left, whole), **where)
            point("sl_codec_density", float(torch.count_nonzero(part.flat)) / max(1, part.numel), **where)
            if is_sparse(codec):
                sent, mean = (whole - left) / size, whole / size
                for tensor in (sent, mean, gradient):
                    self._exchange.sum_now(tensor, f"the diagnosis of {part.name}")
                gap = mean - self._left(codec, part, mean) - sent
                point("sl_codec_xi", _ratio(gap, gradient / size), **where)

    def _left(self, codec: Codec, part: Part, whole: Tensor) -> Tensor:
        """x − C(x), by way of a residual that is empty before."""
        left = torch.zeros_like(whole)
        memory = {key: value.clone() for key, value in part.memory.items() if key != "velocity"}
        probe = replace(part, flat=whole.clone(), residual=left, memory=memory)
        draw = self._draw.of(part.name, part.start)
        if codec.sums:
            for _ in codec.rounds([probe], self._draw, 1):
                pass
        else:
            assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
            body = torch.zeros(codec.body_bytes(whole.numel(), draw.step), dtype=torch.uint8, device=whole.device)
            codec.write(probe, body, draw)
        return left


def _ratio(part: Tensor, whole: Tensor) -> float:
    norm = float(whole.norm())
    return float(part.norm()) / norm if norm else 0.0
