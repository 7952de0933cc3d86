"""A module of the parameters of an optimizer, for APIs whose scripts give the optimizer and not the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn import Parameter


class ParameterModule(nn.Module):
    """A module that holds the parameters of an optimizer, under the names of the script.

    >>> [name for name, _ in ParameterModule({"body.weight": Parameter()}).named_parameters()]
    ['body.weight']
    """

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        super().__init__()
        self._parameters.update(named)  # register_parameter refuses names with a dot
