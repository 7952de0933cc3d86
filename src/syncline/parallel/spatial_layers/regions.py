"""Parts of a model that work on strips of the images.

```text
                     worker 0            worker 1            worker 2
images               whole               whole               whole
the region begins    rows 0, 1           rows 2, 3           rows 4, 5, 6
  convolution        ⇄ halo ⇄            ⇄ halo ⇄
  batch norm         Σ                   Σ                   Σ
the region ends      whole               whole               whole         rows of all are gathered
```

The parameters are whole on every worker. A worker computes the part of their gradients that its rows give, and the
parts are summed where a layer uses the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.spatial_layers import norms, shapes, windows
from syncline.parallel.spatial_layers.strips import Rule, SplitAxis, Strip, gather_rows, rows_of
from syncline.parallel.team import LayerTeam
from syncline.specs import nearest

__all__ = ["SpatialDivision", "spatial_divisions"]

AXES = {"height": -2, "width": -1}
"""The dimensions in which images can be split, counted from the last."""
RULES: Mapping[str, Rule] = {**shapes.RULES, **norms.RULES, **windows.RULES}
MIN_IMAGE_DIMENSIONS = 3
"""Samples, channels and one spatial dimension."""
REFUSED: tuple[tuple[type, str], ...] = (
    (nn.SyncBatchNorm, "batch norm in a region already has the statistics of all workers: use nn.BatchNorm2d"),
    (nn.RNNBase, "it works along a sequence, which would be split"),
    (nn.MultiheadAttention, "every position needs all others: end the region before it"),
    (nn.modules.transformer.Transformer, "every position needs all others: end the region before it"),
    (nn.modules.lazy.LazyModuleMixin, "its parameters have no shape yet: call the model once before"),
    (torch.jit.ScriptModule, "TorchScript computes with strips as if they were whole images: use the module itself"),
)
"""Kinds of modules that cannot work on strips, and why."""


class SpatialDivision(LayerDivision):
    """A module that works on strips of the images: each worker has some of the rows or of the columns."""

    def __init__(self, name: str, module: nn.Module, axis: str = "height") -> None:
        super().__init__(name, module)
        if axis not in AXES:
            raise SpecError(f"images are not split along {axis!r}: {nearest(axis, list(AXES))}")
        self.split = axis

    def check(self, size: int) -> None:
        """Refuse a region with modules that cannot work on strips."""
        shown = self.name or "the model"
        if isinstance(self.module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            raise SpecError(
                f"{shown} is a {type(self.module).__name__}, which is never called: name the module around it"
            )
        if size < 2:
            return
        for name, module in self.module.named_modules():
            path = ".".join(each for each in (self.name, name) if each) or "the model"
            for kind, reason in REFUSED:
                if isinstance(module, kind):
                    raise IncompatibleError(f"{path} ({type(module).__name__}) cannot work on strips: {reason}")
            if type(module).__name__ == "OptimizedModule":
                raise IncompatibleError(f"{path} is compiled: compile the whole model, after it is divided")

    def share(self, rank: int, size: int) -> Share:
        """Every worker has the whole parameters."""
        return Share()

    def attach(self, team: LayerTeam) -> None:
        """Make the module work on strips. Without a team of several workers it computes as before."""
        divide_class(self.module, SpatialRegion, spatial=_Settings(team, AXES[self.split], self.name))

    def detach(self) -> None:
        restore_class(self.module, "spatial")


def spatial_divisions(
    model: nn.Module, regions: Sequence[str], axis: str = "height", size: int = 1
) -> list[LayerDivision]:
    """The regions of a model, by the names of their modules, that work on strips. "" is the whole model.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10))
    >>> [division.name for division in spatial_divisions(model, ["0"], size=2)]
    ['0']
    """
    modules = dict(model.named_modules())
    if isinstance(regions, str) or not regions:
        raise SpecError(f"regions={regions!r}: give a list of names of modules, such as ['features']")
    for number, name in enumerate(regions):
        if name not in modules:
            raise SpecError(f"the model has no module {name!r}: {nearest(name, [each for each in modules if each])}")
        for other in regions[:number]:
            outer, inner = sorted((name, other), key=len)
            if not outer or inner == outer or inner.startswith(f"{outer}."):
                raise SpecError(f"the regions {other!r} and {name!r} overlap: name only the larger one")
    divisions: list[LayerDivision] = [SpatialDivision(name, modules[name], axis) for name in regions]
    for division in divisions:
        division.check(size)
    return divisions


@dataclass(frozen=True)
class _Settings:
    team: LayerTeam
    dim: int
    name: str


class SpatialRegion:
    """The methods of a module that works on strips."""

    spatial: _Settings | None = None
    """None for a part of an `nn.Sequential`, which torch makes an instance of the same class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.spatial is None or not self.spatial.team.active:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return _run_uncompiled(self, super().forward, args, kwargs)  # type: ignore[misc]
        return _run(self, super().forward, args, kwargs)  # type: ignore[misc]


def _run(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Cut the images, compute, and gather what is still split."""
    settings: _Settings = module.spatial
    try:
        with _as_no_grad():
            args, kwargs = _cut(settings, (args, kwargs))
            return tree_map(_whole, forward(*args, **kwargs))
    except IncompatibleError as error:
        raise IncompatibleError(f"{_place(module, settings.name, error.__traceback__)}: {error}") from error


def _whole(value: Any) -> Any:
    return gather_rows(rows_of(value), value.axis) if isinstance(value, Strip) else value


@contextmanager
def _as_no_grad() -> Iterator[None]:
    """Leave inference mode: messages are received outside of it, and could not be written into its tensors."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _run_uncompiled(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Regions exchange rows with other workers, which torch.compile cannot see into."""
    run: Callable[..., Any] = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    return run(module, forward, args, kwargs)


def _cut(settings: _Settings, inputs: Any) -> Any:
    """This worker's strips of the first image, and of all tensors with as many dimensions and as many rows."""
    images = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dim() >= MIN_IMAGE_DIMENSIONS]
    if not images:
        raise IncompatibleError("gets no image: a tensor with samples, channels and at least one more dimension")
    dim, dimensions, length = settings.dim, images[0].dim(), images[0].shape[settings.dim]
    axis = SplitAxis(settings.team, dim, length, RULES)
    axis.check_length(length, f"an image {tuple(images[0].shape)}")

    def cut(value: Any) -> Any:
        same = isinstance(value, Tensor) and value.dim() == dimensions and value.shape[dim] == length
        return axis.cut(value) if same else value

    return tree_map(cut, inputs)


def _place(module: nn.Module, region: str, traceback: TracebackType | None) -> str:
    """The name of the innermost module whose forward has raised an error."""
    names = {id(each): name for name, each in module.named_modules()}
    found = module
    while traceback is not None:
        candidate = traceback.tb_frame.f_locals.get("self")
        if isinstance(candidate, nn.Module) and id(candidate) in names:
            found = candidate
        traceback = traceback.tb_next
    kind = vars(type(found)).get("_before", type(found)).__name__
    return f"{'.'.join(each for each in (region, names[id(found)]) if each) or 'the model'} ({kind})"
