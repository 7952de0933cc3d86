"""The experts of a layer on several workers.

Four experts over two workers, which read different tokens:

```text
              gate    experts.0    experts.1    experts.2    experts.3
worker 0      whole   whole        whole        –            –
worker 1      whole   –            –            whole        whole
```
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.division import LayerDivision, Share
from syncline.parallel.expert_layers.experts import Experts
from syncline.parallel.team import LayerTeam

__all__ = ["ExpertsDivision"]


class ExpertsDivision(LayerDivision):
    """Worker r of p has the experts from r·E/p on; the gate is on all.

    The gradient of an expert is the sum over the tokens of all workers. Every worker runs the layer in each forward,
    also without tokens.
    """

    axis: ClassVar[str] = "shared"

    def __init__(self, name: str, module: Experts, model: nn.Module | None = None) -> None:
        """`model`: the model of the layer. Parameters that it uses elsewhere too are refused."""
        super().__init__(name, module)
        self.experts, self._model = module, model

    def check(self, size: int) -> None:
        count, label = self.experts.count, self.name or "the layer of experts"
        if count % size:
            raise SpecError(
                f"{label} has {count} experts, which cannot be divided equally over {size} workers: use a multiple of "
                f"{size} experts, or a number of workers that divides {count}"
            )
        shapes = [_shapes(each) for each in self.experts.experts]
        for number, found in enumerate(shapes[1:], start=1):
            if found != shapes[0]:
                differ = sorted(name for name in {*found, *shapes[0]} if found.get(name) != shapes[0].get(name))
                raise IncompatibleError(
                    f"experts 0 and {number} of {label} have different shapes: {differ[0]!r} is "
                    f"{_text(shapes[0].get(differ[0]))} and {_text(found.get(differ[0]))}; divided experts are of one "
                    "shape"
                )
        self._check_shared(label)

    def share(self, rank: int, size: int) -> Share:
        local = self.experts.count // size
        own = range(rank * local, (rank + 1) * local)
        absent = [
            f"experts.{number}.{name}"
            for number, expert in enumerate(self.experts.experts)
            if number not in own
            for name, value in expert.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        ]
        return Share(absent=frozenset(absent))

    def attach(self, team: LayerTeam) -> None:
        self.experts.team = team

    def detach(self) -> None:
        self.experts.team = None

    def _check_shared(self, label: str) -> None:
        """Refuse parameters of one expert that something else uses."""
        names: dict[int, str] = {}
        for number, expert in enumerate(self.experts.experts):
            for name, tensor in expert.named_parameters():
                other = names.setdefault(id(tensor), f"experts.{number}.{name}")
                if other != f"experts.{number}.{name}":
                    raise IncompatibleError(
                        f"experts.{number}.{name} and {other} of {label} are one parameter: each expert needs its own, "
                        "because another worker has it"
                    )
        inside = {id(each) for each in self.experts.experts.modules()}
        for root in (self._model, self.experts):
            for path, module in () if root is None else root.named_modules():
                if id(module) in inside:
                    continue
                for name, tensor in module.named_parameters(recurse=False):
                    if id(tensor) in names:
                        raise IncompatibleError(
                            f"{names[id(tensor)]} of {label} is also {f'{path}.{name}'.lstrip('.')}: an expert that "
                            "only one worker has cannot share parameters; make them different"
                        )


def _shapes(expert: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    state = expert.state_dict(keep_vars=True)
    return {name: (each.dtype, tuple(each.shape)) for name, each in state.items() if isinstance(each, Tensor)}


def _text(entry: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "not there" if entry is None else f"{str(entry[0]).removeprefix('torch.')}{list(entry[1])}"
