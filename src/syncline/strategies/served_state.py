"""The optimizer's state, here and at the servers: rows of keys there, tensors for each parameter here.

A checkpoint has the optimizer's state in the form that every strategy reads. So a run on servers fills the optimizer
from them before it is saved, and the servers from the optimizer after another strategy's checkpoint was loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.server.rules import Rule, TorchRule
from syncline.strategies.served_keys import KeyMap

__all__ = ["read_optimizer", "settings_of", "write_optimizer"]

SENT_ALONG = ("params", "lr", "initial_lr")
"""Keys of a parameter group that are no settings of a rule. Learning rates go with each push."""


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, such as momentum and weight decay."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in SENT_ALONG
        }
        for group in optimizer.param_groups
    ]


def read_optimizer(
    optimizer: Optimizer, keys: KeyMap, parameters: Sequence[nn.Parameter], rules: Sequence[Rule]
) -> dict[str, Tensor]:
    """The state of the optimizer as rows of keys, by name; NaN where a parameter has none yet."""
    rows: dict[str, Tensor] = {}
    for group, rule in zip(keys.groups, rules, strict=True):
        if not isinstance(rule, TorchRule):
            continue
        for field, parameter in zip(keys.parameters, parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for name in rule.slots if group.first <= field.first < group.after else ():
                row = rows.setdefault(name, torch.full((keys.numel,), math.nan, dtype=torch.float32))
                value = state.get(name)
                if value is not None:
                    flat = torch.as_tensor(value).detach().reshape(-1).to("cpu", torch.float32)
                    row[field.first : field.after] = flat  # a single number goes to every key
    return rows


def write_optimizer(
    optimizer: Optimizer,
    keys: KeyMap,
    parameters: Sequence[nn.Parameter],
    rules: Sequence[Rule],
    rows: Mapping[str, Tensor],
) -> None:
    """Fill the optimizer's state from rows of keys."""
    for group, rule in zip(keys.groups, rules, strict=True):
        if not isinstance(rule, TorchRule):
            continue
        for field, parameter in zip(keys.parameters, parameters, strict=True):
            if not group.first <= field.first < group.after:
                continue
            found = {name: rows[name][field.first : field.after] for name in rule.slots if name in rows}
            if not found or all(bool(row.isnan().all()) for row in found.values()):
                continue
            state = optimizer.state[parameter]
            for name, row in found.items():
                if rule.slots[name]:
                    state[name] = row.view(field.shape).to(parameter.device, parameter.dtype, copy=True)
                else:
                    device = parameter.device if optimizer.param_groups[group.number].get("fused") else "cpu"
                    state[name] = row[0].to(device, copy=True)
