"""Splits a model into stages at named modules.

```text
model    embed  blocks.0  blocks.1  blocks.2  blocks.3  norm  head        cuts ["blocks.1", "blocks.3"]
stage    └─── 0 ──────┘   └────── 1 ──────┘   └───────── 2 ────┘
```

Two front ends trace the model: `fx_front_end.py` only as deep as the cuts need, `export_front_end.py` down to
operations of ATen. `graph_cutting.py` makes stages and values of either graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.fx_front_end import trace_calls, trace_fx
from syncline.parallel.graph_cutting import cut_graph
from syncline.parallel.meta_model import has_meta_tensors
from syncline.parallel.module_trees import stage_container
from syncline.parallel.profile import restoring_state
from syncline.parallel.stages import MODEL_INPUT, Stage, StageGraph, Value
from syncline.specs import nearest

__all__ = ["cut_candidates", "layer_names", "split", "stage_container"]

TRACERS = ("fx", "export")


def split(
    model: nn.Module,
    cuts: Sequence[str],
    *,
    example: tuple[Tensor, ...] | None = None,
    tracer: Literal["fx", "export"] = "fx",
) -> StageGraph:
    """Split a model into stages. `cuts` names the modules with which stages 1, 2, … begin, in execution order.

    The stages hold the model's own modules and parameters, and compute what the model computes, for batches of any
    size and in both modes. The model itself is unchanged. Arguments of `forward` with a default keep it, unless
    `example`, a tuple of inputs, includes them. With an example the stages run once, so that a value that is no tensor
    is refused before a pipeline needs it.

    `tracer="fx"` runs the Python of the model and of each module that contains a cut once, without data: it must not
    depend on values or sizes of tensors. Modules without a cut inside are called as they are.

    `tracer="export"` needs `example` and traces everything with torch.export. Control flow on sizes is decided as for
    the example, and control flow on values is refused. Sizes that the model depends on are fixed to those of the
    example, and other inputs are refused; so is any size that is 1 in the example. Forward hooks inside the
    model do not run.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> graph = split(model, ["2"])
    >>> tuple((value.name, value.source, value.consumers) for value in graph.values)
    (('input', -1, (0,)), ('1', 0, (1,)))
    >>> first, last = (stage.module for stage in graph.stages)
    >>> list(last.state_dict()), last.get_parameter("2.weight") is model[2].weight
    (['2.weight', '2.bias'], True)
    >>> x = torch.ones(5, 2)
    >>> torch.equal(last(*first(x)), model(x))
    True
    """
    if tracer not in TRACERS:
        raise SpecError(f"unknown tracer {tracer!r}; {nearest(str(tracer), TRACERS)}")
    _check_model(model)
    modules = _cut_modules(model, cuts)
    inputs = _input_names(model, example)
    if tracer == "export" and example is None:
        raise SpecError('tracer="export" needs inputs to trace with: give example=(x, …), with a batch of 2 or more')
    if not modules:
        values = tuple(Value(name, MODEL_INPUT, (0,), place) for place, name in enumerate(inputs))
        return StageGraph((Stage(0, model, tuple(range(len(inputs))), ()),), values)
    if tracer == "export":
        from syncline.parallel.export_front_end import trace_export

        assert example is not None
        return cut_graph(trace_export(model, modules, inputs, example))
    graph = cut_graph(trace_fx(model, modules, inputs))
    if example is not None:
        _check_values(model, graph, example)
    return graph


def _check_values(model: nn.Module, graph: StageGraph, example: tuple[Tensor, ...]) -> None:
    """Run all stages but the last on an example, so that a value that is no tensor is refused now."""
    if has_meta_tensors(model):
        return
    computed: dict[int, Tensor] = {}
    with torch.no_grad(), restoring_state(model):
        model.eval()  # batch norm takes an example of one sample too
        for stage in graph.stages[:-1]:
            places = [graph.values[number].input_index for number in stage.inputs]
            taken = zip(stage.inputs, places, strict=True)
            inputs = [computed[number] if place < 0 else example[place].clone() for number, place in taken]
            try:
                outputs = stage.module(*inputs)
            except IncompatibleError:
                raise
            except Exception:  # an example that the model cannot compute says nothing about the cuts
                return
            computed.update(zip(stage.outputs, outputs, strict=True))


def cut_candidates(model: nn.Module, *, stages: int = 1, example: tuple[Tensor, ...] | None = None) -> tuple[str, ...]:
    """Names of the modules at which a stage may begin, in execution order. The model is traced with torch.fx, not run.

    These are the modules that the model's forward calls, one by one if it calls them from a `ModuleList`. An
    `nn.Sequential` is replaced by its children, and a module with more than half of all parameters by the modules that
    it calls, if its forward can be traced. Modules that are called several times are left out, and so is the first
    one, before which there is nothing to compute. `stages` is how many stages there should be: too few candidates for
    them are refused. `example` is as in `split`.

    >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    >>> cut_candidates(nn.Sequential(blocks, nn.Linear(2, 1)))
    ('0.1.0', '0.1.1', '1')
    """
    calls = _calls(model, example)
    names = [name for name, _ in calls]
    found = tuple(name for name, after_others in calls if after_others and names.count(name) == 1)
    if stages > len(found) + 1:
        raise IncompatibleError(
            f"{stages} stages are more than the model can be split into: it has {len(found)} modules at which a stage "
            f"can begin, so at most {len(found) + 1} stages"
        )
    return found


def layer_names(model: nn.Module, *, stages: int = 1, example: tuple[Tensor, ...] | None = None) -> tuple[str, ...]:
    """The module with which the model begins, and then the `cut_candidates`: layers of which stages can be made.

    >>> layer_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    ('0', '1', '2')
    """
    found = cut_candidates(model, stages=stages, example=example)
    first = next(name for name, _ in _calls(model, example))
    return found if first in found else (first, *found)


def _calls(model: nn.Module, example: tuple[Tensor, ...] | None) -> list[tuple[str, bool]]:
    """The modules that are called, by name, in order; and whether something is computed before each."""
    _check_model(model)
    inputs = _input_names(model, example)
    traced = {module for module in model.modules() if _is_sequential(module)}
    calls = trace_calls(model, traced, inputs)
    pending = [name for name, _ in calls]
    half = sum(each.numel() for each in model.parameters()) / 2
    while pending:
        module = model.get_submodule(pending.pop())
        if sum(each.numel() for each in module.parameters()) > half and any(True for _ in module.children()):
            try:
                deeper = trace_calls(model, {*traced, module}, inputs)
            except IncompatibleError:
                continue
            traced.add(module)
            pending += [name for name, _ in deeper if name not in dict(calls)]
            calls = deeper
    return calls


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def _check_model(model: nn.Module) -> None:
    """Refuse models whose forward cannot be traced, or whose parameters do not exist yet."""
    lazy = [name for name, each in [*model.named_parameters(), *model.named_buffers()] if is_lazy(each)]
    if lazy:
        raise IncompatibleError(
            f"{lazy[0]!r} of a lazy module has no shape yet: run the model once on an example before splitting it"
        )
    if hasattr(model, "_orig_mod"):
        raise IncompatibleError("a compiled model cannot be split: split the model first, then compile its stages")
    if isinstance(model, torch.jit.ScriptModule):
        raise IncompatibleError("a ScriptModule cannot be split: split the model before torch.jit.script")


def _cut_modules(model: nn.Module, cuts: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at which to cut, under their names."""
    if isinstance(cuts, str):
        raise SpecError(f"cuts is a sequence of names: write cuts=[{cuts!r}]")
    known = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for name in cuts:
        if name == "" or name not in known:
            names = [each for each in known if each]
            raise SpecError(f"the model has no module {name!r} to cut at; {nearest(str(name), names)}")
        for other, module in found.items():
            if module is known[name]:
                same = f" (also called {other!r})" if other != name else ""
                raise SpecError(f"the cut {name!r}{same} is given twice: each stage begins at another module")
        found[name] = known[name]
    return found


def _input_names(model: nn.Module, example: tuple[Any, ...] | None) -> list[str]:
    """The names of the inputs that the stages take, in the order of `forward`."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name for each in positional if each.default is each.empty]
    rest = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty:
            raise IncompatibleError(
                f"forward takes {each.name!r} only as a keyword, and inputs are given by position: give it a default, "
                "or wrap the model in a module whose forward passes it"
            )
    if example is None:
        if not required:
            names = ", ".join(each.name for each in positional) or f"*{rest[0] if rest else 'args'}"
            raise SpecError(f"no argument of forward({names}) is required: give example=(x, …) to name the inputs")
        return required
    if not isinstance(example, tuple) or not all(isinstance(each, Tensor) for each in example):
        raise SpecError("example is a tuple of tensors, the inputs of forward by position")
    most = len(positional) if not rest else len(example)
    if not len(required) <= len(example) <= most:
        raise SpecError(
            f"example has {len(example)} inputs, and forward takes {len(required)} to {most}: "
            f"{', '.join(each.name for each in positional)}"
        )
    return [each.name for each in positional[: len(example)]] + [
        f"{rest[0]}_{place}" for place in range(len(example) - len(positional))
    ]
