"""Watches the user's model and optimizers for new parameters and for states that the script loads.

`model.load_state_dict()` after `sl.distribute`, or that of a part such as a backbone, changes the model's weights only:
servers, centres and outer weights would keep the old ones. So the next step, or the next use of the weights, starts
from the loaded ones on every worker. Weights that were loaded and put back, as for an evaluation, change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import plain_name
from syncline.world.hooks import ModuleHook

__all__ = ["ModelWatch"]


class ModelWatch:
    """`synchronises` says whether the strategy knows a parameter. `reloaded` is called before the first step after a
    load, on every worker; None where a strategy keeps no copy of the weights elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        synchronises: Callable[[nn.Parameter], bool],
        reloaded: Callable[[], None] | None,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._synchronises = synchronises
        self._reloaded = reloaded
        self._named = dict(model.named_parameters())
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._count = self._count_parameters()
        self._loads = 0
        """Loads into the model since the latest step."""
        self._before: list[Tensor] = []
        """The weights before the first of these loads."""
        self._loading_into: nn.Module | None = None
        """The module whose `load_state_dict()` is under way; it loads its own parts."""
        self._hooks: list[Any] = []
        for module in model.modules() if reloaded is not None else ():
            self._hooks += [
                module.register_load_state_dict_pre_hook(ModuleHook(self._loading)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(ModuleHook(self._loaded)),  # type: ignore[no-untyped-call]
            ]

    def check_parameters(self) -> None:
        """Refuse parameters that an optimizer trains and the strategy does not synchronise."""
        count = self._count_parameters()
        if count == self._count and not any(parameter.requires_grad for parameter in self._frozen):
            return
        names = {id(each): plain_name(name) for name, each in self._model.named_parameters()}
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for each in group["params"]:
                    if each.requires_grad and not self._synchronises(each):
                        self._refuse(names.get(id(each)), each, number)
        self._count = count
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]

    def check_replaced(self) -> None:
        """Refuse a model that has other parameters in place of those that `distribute` has found."""
        now, known = dict(self._model.named_parameters()), {id(each) for each in self._named.values()}
        gone = [plain_name(name) for name, each in self._named.items() if now.get(name) is not each]
        if gone and any(id(each) not in known for each in now.values()):
            raise IncompatibleError(
                f"{gone[0]} was replaced in the model after sl.distribute (by a new nn.Parameter, "
                "load_state_dict(assign=True) or a parametrization), and what is there now is not synchronised: change "
                "the model first, then make the optimizer and call sl.distribute"
            )

    def take_loaded(self) -> None:
        """Start from a state that was loaded since the latest step, if one was."""
        if not self._loads:
            return
        put_back = self._loads > 1 and self._is_as_before()
        self.forget_loads()
        if not put_back and self._reloaded is not None:
            self._reloaded()

    def forget_loads(self) -> None:
        """The run has taken over what was loaded."""
        self._loads, self._before = 0, []

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _count_parameters(self) -> int:
        return sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)

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

    def _refuse(self, name: str | None, parameter: nn.Parameter, group: int) -> None:
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
