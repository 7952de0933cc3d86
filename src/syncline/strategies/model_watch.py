"""Checks the user's model before every step: new parameters, loaded states, and wrappers of torch around it.

`model.load_state_dict()` after `sl.distribute`, or that of a part such as a backbone, changes only the model's weights.
Servers, centres and outer weights would keep the old ones. So before the next step every worker starts from the loaded
weights. Weights that were loaded and then restored, as for an evaluation, change nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist  # noqa: TID251 (only to ask whether there is a process group)
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import plain_name
from syncline.world.hooks import ModuleHook

if TYPE_CHECKING:
    from syncline.strategies.base import StrategyRun

__all__ = ["ModelWatch", "refuse_wrapped", "refuse_wrapper_around"]

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Names of torch's classes that synchronise a module themselves. By name, so that they need not be imported."""


class ModelWatch:
    """Watches the model and the optimizers of a run.

    `on_load` is called on every worker before the first step after a load. It is None if the strategy keeps no copy of
    the weights elsewhere.
    """

    def __init__(self, run: StrategyRun, on_load: Callable[[], None] | None) -> None:
        self._run, self._model, self._optimizers = run, run.model, run.optimizers
        self._open_runs = run.world.runs
        self._on_load = on_load
        self._named = dict(self._model.named_parameters())
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        self._count = sum(len(group["params"]) for each in self._optimizers for group in each.param_groups)
        self._checked_wrapper = False
        self._loads = 0
        """Loads into the model since the latest step."""
        self._before: list[Tensor] = []
        """The weights before the first of these loads."""
        self._loading_into: nn.Module | None = None
        """The module whose `load_state_dict()` is in progress; it loads its own parts."""
        # The hooks run before the strategy's own, which then see checked parameters.
        self._hooks: list[Any] = [each.register_step_pre_hook(self._before_step) for each in self._optimizers]
        for module in self._model.modules() if on_load is not None else ():
            self._hooks += [
                module.register_load_state_dict_pre_hook(ModuleHook(self._loading)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(ModuleHook(self._loaded)),  # type: ignore[no-untyped-call]
            ]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._run not in self._open_runs:  # its construction failed with an error
            return
        if not self._checked_wrapper:
            self._checked_wrapper = True
            if self._run.replica is self._model:
                refuse_wrapper_around(self._model)
        count = 0
        for each in self._optimizers:
            for group in each.param_groups:
                count += len(group["params"])
        changed = count != self._count
        for parameter in self._frozen:
            changed = changed or parameter.requires_grad
        if changed:
            self._check_parameters()
            self._count = count
        if self._loads:
            self.apply_load()

    def _check_parameters(self) -> None:
        """Refuse parameters that an optimizer trains and the strategy does not synchronise."""
        names = {id(each): plain_name(name) for name, each in self._model.named_parameters()}
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for each in group["params"]:
                    if each.requires_grad and not self._run.synchronises(each):
                        _refuse(names.get(id(each)), each, number)
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]

    def check_replaced(self) -> None:
        """Refuse a model whose parameters were replaced after `distribute`."""
        now, known = dict(self._model.named_parameters()), {id(each) for each in self._named.values()}
        gone = [plain_name(name) for name, each in self._named.items() if now.get(name) is not each]
        if gone and any(id(each) not in known for each in now.values()):
            raise IncompatibleError(
                f"{gone[0]} was replaced in the model after sl.distribute (by a new nn.Parameter, "
                "load_state_dict(assign=True) or a parametrization), and what is there now is not synchronised: change "
                "the model first, then make the optimizer and call sl.distribute"
            )

    def apply_load(self) -> None:
        """Start from a state that was loaded since the latest step, if one was."""
        if not self._loads:
            return
        restored = self._loads > 1 and self._is_as_before()
        self.forget_loads()
        if not restored and self._on_load is not None:
            self._on_load()

    def forget_loads(self) -> None:
        """The run has taken over the loaded state."""
        self._loads, self._before = 0, []

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _is_as_before(self) -> bool:
        now = [parameter.detach() for parameter in self._model.parameters()]
        return all(torch.equal(one, other) for one, other in zip(now, self._before, strict=True))

    def _loading(self, module: nn.Module, *args: Any) -> None:
        if self._loading_into is None:
            self._loading_into = module
        if not self._loads and not self._before:
            self._before = [parameter.detach().clone() for parameter in self._model.parameters()]

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        if self._loading_into in (module, None):
            self._loads, self._loading_into = self._loads + 1, None


def _refuse(name: str | None, parameter: nn.Parameter, group: int) -> None:
    shape = list(parameter.shape)
    if name is None:
        raise IncompatibleError(
            f"parameter group {group} of the optimizer has got a parameter of shape {shape} that the model did not "
            "have when sl.distribute was called, so each worker would train it alone: add it to the model "
            "before, or close the run and call sl.distribute again"
        )
    raise IncompatibleError(
        f"{name} (shape {shape}, parameter group {group}) is trained now and was not when sl.distribute was "
        "called, so this strategy does not synchronise it: set requires_grad and add it to the optimizer before "
        "sl.distribute, or close the run and call sl.distribute again"
    )


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is, or contains, a wrapper of torch that synchronises it, or has sharded parameters."""
    for name, module in model.named_modules():
        wrapper = _wrapper_name(module)
        if wrapper is not None:
            where = "the model" if not name else f"the model's part {name!r}"
            raise IncompatibleError(
                f"{where} is a {wrapper}, which synchronises its gradients itself: give sl.distribute the plain "
                f"module, and leave {wrapper} out"
            )
    sharded = next((name for name, each in model.named_parameters() if type(each).__name__ == "DTensor"), None)
    if sharded is not None:
        raise IncompatibleError(
            f"{sharded} is a DTensor, which torch has sharded over the workers: give sl.distribute a model whose "
            "parameters are whole on every worker"
        )


def refuse_wrapper_around(model: nn.Module) -> None:
    """Refuse a model that is inside a wrapper of torch, such as of a framework that reads RANK and WORLD_SIZE.

    A wrapper needs torch's process group. Without one, nothing is searched.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or each is model:
            continue
        wrapper = _wrapper_name(each)
        if wrapper is not None and any(module is model for module in each.modules()):
            raise IncompatibleError(
                f"the model that sl.distribute synchronises is wrapped in a {wrapper}, which averages its gradients "
                f"too: leave {wrapper} out; a framework that adds it by itself finds no other workers after "
                "sl.init(hide=True)"
            )


def _wrapper_name(module: nn.Module) -> str | None:
    torch_classes = (each for each in type(module).__mro__ if each.__module__.split(".")[0] == "torch")
    return next((each.__name__ for each in torch_classes if each.__name__ in WRAPPERS), None)
