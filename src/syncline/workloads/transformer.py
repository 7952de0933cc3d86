"""A decoder over bytes with as many layers as you like, on the corpus of `stdlib`.

```text
bytes   embedding + positions   block 0   block 1   …   norm   head
              └──────────── the same weights if tied ───────────┘
```
"""

from __future__ import annotations

from torch import nn

from syncline.errors import SpecError
from syncline.workloads.base import Defaults, check_whole, seeded
from syncline.workloads.stdlib import ByteModel, Transformer

__all__ = ["TransformerLM"]


class TransformerLM(ByteModel):
    """Causal attention with pre-norm and residual connections; see `Transformer`.

    >>> TransformerLM(layers=8, tied=False)
    transformer(layers=8, tied=False)
    """

    name = "transformer"

    def __init__(
        self,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        tied: bool = True,
        bytes: int = 1_000_000,
        length: int = 64,
    ) -> None:
        self.layers = check_whole(self.name, "layers", layers, 1, 1000)
        self.width = check_whole(self.name, "width", width, 1, 65_536)
        self.heads = check_whole(self.name, "heads", heads, 1, width)
        if width % heads:
            raise SpecError(f"transformer: heads must divide the width (heads: {heads}, width: {width})")
        if not isinstance(tied, bool):
            raise SpecError(f"transformer: tied is True or False (tied: {tied!r})")
        self.tied = tied
        super().__init__(layers=layers, width=width, heads=heads, tied=tied, bytes=bytes, length=length)

    @property
    def defaults(self) -> Defaults:
        """AdamW at a constant rate."""
        return Defaults(batch=16, epochs=2, learning_rate=2e-3, optimizer="adamw", weight_decay=0.01, target=2.7)

    def model(self, seed: int = 0) -> nn.Module:
        """It has no dropout, so that each division of a batch gives the same gradients."""
        with seeded(seed):
            return Transformer(self.length, self.width, self.heads, self.layers, self.tied)
