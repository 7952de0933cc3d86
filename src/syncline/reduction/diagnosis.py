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

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.reduction.communicator import Communicator
from syncline.reduction.ways import is_sparse

__all__ = ["Diagnosis"]


class Diagnosis:
    """One step's: `look` before a bucket is encoded, `tell` when all have been reduced."""

    def __init__(self, exchange: Communicator, rng: RngKey) -> None:
        self._exchange = exchange
        self._rng = rng
        self._seen: list[tuple[Codec, TensorSlice, TensorSlice]] = []
        """Each part, which will hold the mean, and a copy of it as it is now."""

    def look(self, codec: Codec, parts: Sequence[TensorSlice]) -> None:
        """Keep what is about to be encoded. It may hold NaN, of which others are to tell."""
        for part in parts:
            residual = torch.zeros_like(part.flat) if part.residual is None else part.residual.clone()
            memory = {key: value.clone() for key, value in part.memory.items()}
            self._seen.append((codec, part, replace(part, flat=part.flat.clone(), residual=residual, memory=memory)))

    def tell(self) -> None:
        """Work it out and record it. Every rank calls it at the same place: there are sums to be taken."""
        point, size = self._exchange.world.events.point, self._exchange.size
        for codec, part, then in self._seen:
            still = {key: value.clone() for key, value in then.memory.items() if key != "velocity"}
            gradient = then.flat.clone()
            sent = self._sent(codec, then)
            left = then.residual
            assert left is not None, "it was given one"
            whole = sent + left
            where = {"layer": part.name, "step": self._rng.step}
            point("sl_codec_error", _ratio(left, whole), **where)
            point("sl_codec_density", float(torch.count_nonzero(part.flat)) / max(1, part.numel), **where)
            if is_sparse(codec):
                mean_sent, mean = sent / size, whole / size
                for tensor in (mean_sent, mean, gradient):
                    self._exchange.sum_now(tensor, f"the diagnosis of {part.name}")
                of_mean = self._sent(codec, replace(then, flat=mean, residual=torch.zeros_like(mean), memory=still))
                point("sl_codec_xi", _ratio(of_mean - mean_sent, gradient / size), **where)

    def _sent(self, codec: Codec, probe: TensorSlice) -> Tensor:
        """What the codec says of a part of its own; what it does not say is then in its residual."""
        if codec.traits.allreducible:
            for _ in codec.reduce_rounds([probe], self._rng, 1):
                pass
            return probe.flat
        assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
        out, rng = torch.empty_like(probe.flat), self._rng.for_slice(probe.name, probe.start)
        body = torch.zeros(codec.body_bytes(probe.numel, rng.step), dtype=torch.uint8, device=out.device)
        codec.read(body[: codec.write(probe, body, rng)], out, False)
        return out


def _ratio(part: Tensor, whole: Tensor) -> float:
    norm = float(whole.norm())
    return float(part.norm()) / norm if norm else 0.0
