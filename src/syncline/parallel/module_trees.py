"""Parts of a model as modules that keep the model's names.

```text
model                          targets of a stage             the stage's module
├── embed                      blocks.2                       ├── blocks
├── blocks                     blocks.3                       │   ├── 2   the same object as model.blocks[2]
│   ├── 0 … 3                  norm.weight                    │   └── 3   the same object as model.blocks[3]
├── norm                                                      └── norm
└── head                                                          └── weight   the same parameter
```

Since modules and parameters are the model's own, `model.eval()`, optimizers and `load_state_dict` act on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from syncline.errors import SpecError
from syncline.parallel.stages import StageGraph

__all__ = ["ModuleTree", "StageModule", "own_forward", "partial_tree", "stage_container"]


class ModuleTree(nn.Module):
    """Some modules, parameters and buffers of a model, under the names that they have there. It cannot be called."""

    def __init__(self, order: Iterable[str] = ()) -> None:
        super().__init__()
        self._order = tuple(order)
        """The names of all entries of this level in the model, in the model's order."""


class StageModule(ModuleTree):
    """A stage: what it uses of the model, and the part of the traced forward that it runs."""

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any]) -> None:
        super().__init__(_entries(model))
        targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        _fill(self, model, "", targets - set(constants))
        for name in sorted(targets & set(constants)):
            _add_constant(self, name, constants[name])
        self.training = model.training
        self._run = _compiled(graph)

    def forward(self, *inputs: Any) -> Any:
        return self._run(self, *inputs)


def own_forward(stage: nn.Module) -> Callable[..., Any]:
    """The forward of a stage as a function with its own code object.

    `torch.compile` keeps at most eight versions of each code, for other sizes and modes. `forward` is one code for all
    stages.
    """
    return MethodType(stage._run, stage) if isinstance(stage, StageModule) else stage


def stage_container(graph: StageGraph, stages: Sequence[int]) -> ModuleTree:
    """The modules and parameters of some stages under their original names, for an optimizer or a state dict.

    >>> from syncline.parallel.splitting import split
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> graph = split(model, ["1", "2"])
    >>> list(stage_container(graph, [0, 2]).state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    for index in stages:
        if not 0 <= index < len(graph.stages):
            raise SpecError(f"there is no stage {index}: the model has stages 0 to {len(graph.stages) - 1}")
    return _merged([graph.stages[index].module for index in sorted(set(stages))])


def partial_tree(model: nn.Module, names: Collection[str]) -> ModuleTree:
    """Some parameters and buffers of a model under their names.

    >>> list(partial_tree(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), ["0.bias", "1.weight"]).state_dict())
    ['0.bias', '1.weight']
    """
    tree = ModuleTree(_entries(model))
    _fill(tree, model, "", set(names))
    tree.training = model.training
    return tree


def _entries(module: nn.Module) -> list[str]:
    """The names of a module's own parameters, buffers and children."""
    return [*module._parameters, *module._buffers, *module._modules]


def _add_buffer(tree: ModuleTree, module: nn.Module, name: str) -> None:
    tree.register_buffer(name, module._buffers[name], name not in module._non_persistent_buffers_set)


def _fill(tree: ModuleTree, module: nn.Module, prefix: str, targets: set[str]) -> None:
    """Give a tree the entries of a module that are targets, or that lead to targets."""
    for name in _entries(module):
        path = prefix + name
        if path in targets:
            if name in module._modules:
                tree.register_module(name, module._modules[name])
            elif name in module._parameters:
                tree.register_parameter(name, module._parameters[name])
            else:
                _add_buffer(tree, module, name)
        elif name in module._modules and any(each.startswith(f"{path}.") for each in targets):
            child = module.get_submodule(name)
            branch = ModuleTree(_entries(child))
            _fill(branch, child, f"{path}.", targets)
            tree.register_module(name, branch)
    for name, value in module.__dict__.items():
        if prefix + name in targets:
            setattr(tree, name, value)  # a tensor that is no buffer: it is none here either


def _add_constant(tree: ModuleTree, name: str, value: Any) -> None:
    """Add a tensor that tracing has found and that has no name in the model. It is not part of the state dict."""
    if isinstance(value, Tensor):
        tree.register_buffer(name, value.detach(), persistent=False)
    else:
        setattr(tree, name, value)


def _merged(parts: Sequence[nn.Module]) -> ModuleTree:
    orders = [part._order if isinstance(part, ModuleTree) else tuple(_entries(part)) for part in parts]
    tree = ModuleTree(orders[0] if orders else ())
    for name in tree._order:
        for part in parts:
            if part._parameters.get(name) is not None and name not in tree._parameters:
                tree.register_parameter(name, part._parameters[name])
            if part._buffers.get(name) is not None and name not in tree._buffers:
                _add_buffer(tree, part, name)
        children = [child for part in parts if (child := part._modules.get(name)) is not None]
        whole = [child for child in children if not isinstance(child, ModuleTree)]
        if children:
            tree.register_module(name, whole[0] if whole else _merged(children))
    return tree


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of a module and its inputs.

    A `GraphModule` compiles it, but does not hold the modules: a model may have a child that is called `graph` or
    `code`, and these names are taken there.
    """
    compiler = fx.GraphModule(torch.nn.Module(), fx.Graph())
    compiler.graph = graph
    run: Callable[..., Any] = type(compiler).forward
    return run
