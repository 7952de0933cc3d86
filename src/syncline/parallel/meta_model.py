"""A model on the meta device: it has shapes and no values. Each worker makes the values of its own part.

```python
with torch.device("meta"):
    model = Net()  # takes no memory
```

Each module draws its values from a random stream of its own, so that they do not depend on the number of workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from syncline.data.partition import mix_seeds
from syncline.errors import IncompatibleError, SpecError

__all__ = ["check_initializers", "has_meta_tensors", "make_values"]

MAX_SHOWN_MODULES = 3


def has_meta_tensors(model: nn.Module) -> bool:
    """Whether some parameters or buffers have no values yet."""
    return any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def check_initializers(model: nn.Module, initialize: Callable[[nn.Module], object] | None) -> None:
    """Refuse a module that neither its class nor `initialize` gives values."""
    if initialize is not None:
        if not callable(initialize):
            raise SpecError(f"initialize={initialize!r} is not a function of a module")
        return
    lacking = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module, tensors in _with_tensors(model)
        if any(each.is_meta for each in tensors) and not callable(getattr(module, "reset_parameters", None))
    ]
    if lacking:
        more = f" and {len(lacking) - MAX_SHOWN_MODULES} more" if len(lacking) > MAX_SHOWN_MODULES else ""
        raise SpecError(
            f"the model is on the meta device, and {', '.join(lacking[:MAX_SHOWN_MODULES])}{more} has no "
            "reset_parameters(): give initialize=, a function that sets the parameters and buffers of one module"
        )


def make_values(
    model: nn.Module,
    used: Collection[int],
    initialize: Callable[[nn.Module], object] | None,
    seed: int,
    device: torch.device,
) -> None:
    """Give values to the parameters and buffers in `used`, by their `id`. They remain the same objects.

    A module's `reset_parameters()` or `initialize(module)` sets the values of the module's own tensors. If two modules
    share a parameter, the first one sets it.
    """
    found = [
        (name, module, [each for each in tensors if each.is_meta and id(each) in used])
        for name, module, tensors in _with_tensors(model)
    ]
    wanted = [(name, module) for name, module, tensors in found if tensors]
    for tensor in {id(each): each for _, _, tensors in found for each in tensors}.values():
        _allocate(tensor, device)
    for name, module in reversed(wanted):  # the first user of a shared parameter comes last
        if any(each.is_meta for each in _own_tensors(module)):
            continue  # another worker runs this module, and shares a parameter with one that runs here
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(mix_seeds(seed, zlib.crc32(name.encode())))
            (initialize or _reset)(module)
    _check_complete(wanted)


def _with_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    for name, module in model.named_modules():
        tensors = _own_tensors(module)
        if tensors:
            yield name, module, tensors


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _allocate(tensor: Tensor, device: torch.device) -> None:
    """Give a meta tensor memory. Floating-point numbers are NaN until the module sets them."""
    values = torch.empty_like(tensor, device=device)
    if values.is_floating_point() or values.is_complex():
        values.fill_(torch.nan)
    else:
        values.zero_()
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, values)  # type: ignore[no-untyped-call]


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _check_complete(modules: list[tuple[str, nn.Module]]) -> None:
    for name, module in modules:
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not tensor.is_meta and bool(torch.isnan(tensor).any()):
                raise IncompatibleError(
                    f"{name}.{key} has no values: reset_parameters() or initialize= of {type(module).__name__} does "
                    "not set it, or its module is divided between stages; give initialize=, a function that sets the "
                    "parameters and buffers of one module, and cut the model between modules"
                )
