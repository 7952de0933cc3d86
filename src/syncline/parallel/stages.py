"""A model that is cut into stages, and the values that travel between them.

```text
inputs of the model      stage 0        stage 1        stage 2
value 0  (x) ──────────►  F  ──value 1──►  F  ──value 3──►  F ──► the model's output
                          └────── value 2 (a skip) ────────►┘
```

A value goes from its source directly to every stage that uses it. The front ends in `splitting.py` make a
`StageGraph`; the executor runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["MODEL_INPUT", "Stage", "StageGraph", "TiedParameter", "Value"]

MODEL_INPUT = -1
"""The source of a value that is an input of the model."""


@dataclass(frozen=True)
class Value:
    """A tensor that a stage gives to later stages, or an input of the model. Its number is its place in the graph.

    Not every value is a batch of activations: a size is sent as a tensor of integers in the memory of the host.
    """

    name: str
    source: int
    """The stage that computes it, or `MODEL_INPUT`."""
    consumers: tuple[int, ...]
    """The stages that use it, in order. The last stage uses what is part of the model's output."""
    input_index: int = -1
    """For an input of the model: its place among the arguments of `forward`."""


@dataclass(frozen=True)
class Stage:
    """A part of a model: `module(*inputs)` returns the tuple of its outputs.

    The parameters and buffers of the module have the names of the whole model, and are the same objects.
    """

    index: int
    module: nn.Module
    inputs: tuple[int, ...]
    """Numbers of the values that it takes, in the order of the module's arguments."""
    outputs: tuple[int, ...]
    """Numbers of the values that it returns, in order. Empty for the last stage, which returns the model's output."""


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages use. Its gradient is the sum over all of them."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    """Its name in each of these stages."""


@dataclass(frozen=True)
class StageGraph:
    """A model in stages. The last stage's module returns the output of the model as the model itself does."""

    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    tied: tuple[TiedParameter, ...] = ()
    cuts: tuple[str, ...] = ()
    """The names of the modules with which stages 1, 2, … begin."""
    unused: tuple[str, ...] = ()
    """Names of the model's parameters and buffers that no stage uses: they get no gradient."""

    def describe(self) -> dict[str, Any]:
        """Stages, parameters and values, for messages and config.json."""
        return {
            "cuts": list(self.cuts),
            "parameters": [sum(each.numel() for each in stage.module.parameters()) for stage in self.stages],
            "values": [
                f"{value.name}: stage {value.source} to {', '.join(map(str, value.consumers))}"
                for value in self.values
                if value.source != MODEL_INPUT
            ],
        }
