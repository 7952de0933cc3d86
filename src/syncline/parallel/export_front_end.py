"""Traces a model with torch.export, down to operations of ATen.

torch.export follows control flow on sizes, which torch.fx cannot, but needs inputs to trace with. It names the module
of each operation, and a stage begins with the first operation of its cut module.

Dropout and normalisation with running statistics become calls of the model's own modules again, so that
`model.eval()` works, and hooks on these modules run. What else depends on the mode is refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from syncline.errors import IncompatibleError
from syncline.parallel.graph_cutting import SizeRange, TracedModel, check_entries, check_modes

__all__ = ["trace_export"]

MODULES = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
"""Modules that act differently in evaluation mode and are called as they are."""
OPERATIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "batch_norm", "instance_norm", "rrelu", "rrelu_"),
    )
)
"""What these modules compute. They have no other operations with a result that is used."""
SUBGRAPH = "exported_"
"""How names begin of constants and subgraphs that torch.export has added."""


def trace_export(
    model: nn.Module, cuts: Mapping[str, nn.Module], inputs: Sequence[str], example: tuple[Tensor, ...]
) -> TracedModel:
    """The exported graph of a model with the stage of each operation. The model is unchanged afterwards."""
    traced, entered = _export(model, cuts, inputs, example, training=True)
    check_modes(traced, _export(model, cuts, inputs, example, training=False)[0])
    check_entries(entered, list(cuts), model)
    return traced


def _export(
    model: nn.Module, cuts: Mapping[str, nn.Module], inputs: Sequence[str], example: tuple[Tensor, ...], training: bool
) -> tuple[TracedModel, list[str]]:
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = training
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, example, dynamic_shapes=_any_size(model, example))
            program = exported.module(check_guards=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise IncompatibleError(
            f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {reason}; if the reason is in "
            'a module without cuts, use tracer="fx", which calls such modules as they are'
        ) from error
    finally:
        for module, flag in before:
            module.training = flag
    graph = program.graph
    changed = sorted(set(exported.graph_signature.buffers_to_mutate.values()) - _written_buffers(graph))
    if changed:
        raise IncompatibleError(f"the forward assigns the buffer {changed[0]!r}: change it in place, as with copy_()")
    _call_modules(model, graph)
    constants = _name_attributes(model, program, graph)
    stages, entered = _stages(model, graph, cuts)
    _restore_structure(graph, exported.call_spec.out_spec)
    sizes = _accepted_sizes(graph, inputs, exported.range_constraints)
    return TracedModel(model, graph, tuple(inputs), tuple(cuts), stages, constants, sizes), entered


def _any_size(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Every dimension may change, unless the model depends on its size."""
    shapes = tuple(dict.fromkeys(range(each.dim()), torch.export.Dim.AUTO) for each in example)
    parameters = inspect.signature(model.forward).parameters.values()
    named = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    return (*shapes[:named], shapes[named:]) if len(shapes) > named else shapes


def _written_buffers(graph: fx.Graph) -> set[str]:
    """The buffers that some operation changes in place."""
    return {
        str(each.target)
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for each in node.all_input_nodes
        if each.op == "get_attr"
    }


def _module_path(node: fx.Node) -> str:
    """The module whose forward the operation is in."""
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return paths[-1] if paths else ""


def _call_modules(model: nn.Module, graph: fx.Graph) -> None:
    """Replace what dropout and normalisation modules compute by calls of these modules."""
    known = dict(model.named_modules(remove_duplicate=False))
    for node in reversed(list(graph.nodes)):  # users first
        path = _module_path(node)
        if node.op != "call_function" or not isinstance(known.get(path), MODULES):
            continue
        if node.target._schema.name in OPERATIONS:
            node.op, node.target, node.args, node.kwargs = "call_module", path, node.args[:1], {}
        elif not node.users:
            graph.erase_node(node)  # counts batches


def _name_attributes(model: nn.Module, program: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """Give each use of a tied tensor the name that it has in the module that uses it. Returns what is not the model's.

    torch.export uses one name for all.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    constants: dict[str, Any] = {}
    for node in [each for each in graph.nodes if each.op == "get_attr"]:
        value = _attribute(program, str(node.target))
        aliases = names.get(id(value))
        if aliases is None:
            node.target = SUBGRAPH + str(node.target).replace(".", "_")
            constants[node.target] = value
            continue
        for user in list(node.users):
            prefix = f"{_module_path(user)}.".lstrip(".")
            name = next((each for each in aliases if each.rpartition(".")[0] == prefix[:-1]), aliases[0])
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.create_node("get_attr", name))
        graph.erase_node(node)
    return constants


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _stages(model: nn.Module, graph: fx.Graph, cuts: Mapping[str, nn.Module]) -> tuple[dict[fx.Node, int], list[str]]:
    """The stage of each operation, and the cuts in the order in which their modules are called."""
    known = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in cuts.items()}
    calls: dict[str, str] = {}
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        if _module_path(node) not in known:
            node.meta.pop("nn_module_stack")  # of torch.export itself
        for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if known.get(path) in names:  # a second call of a module has another key
                calls.setdefault(call, names[known[path]])
        stages[node] = len(set(calls.values()))
    return stages, list(calls.values())


def _restore_structure(graph: fx.Graph, structure: pytree.TreeSpec) -> None:
    """Return dicts and tuples as the model does: the exported graph returns one flat tuple."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    result = pytree.tree_unflatten(list(output.args[0]), structure)
    _check_structure(result)
    output.args = (result,)


def _check_structure(value: Any) -> None:
    if isinstance(value, (tuple, list)):
        for each in value:
            _check_structure(each)
    elif isinstance(value, dict):
        _check_structure(list(value.values()))
    elif not isinstance(value, (fx.Node, int, float, str, type(None))):
        raise IncompatibleError(
            f'the model returns a {type(value).__name__}: return tensors in tuples, lists or dicts, or use tracer="fx"'
        )


def _accepted_sizes(
    graph: fx.Graph, inputs: Sequence[str], ranges: Mapping[Any, Any]
) -> dict[str, tuple[SizeRange, ...]]:
    """For each input, the sizes that torch.export has found the graph to hold for."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return {
        name: tuple(_accepted(size, ranges) for size in node.meta["val"].shape)
        for name, node in zip(inputs, placeholders, strict=True)
    }


def _accepted(size: Any, ranges: Mapping[Any, Any]) -> SizeRange:
    fixed = size if isinstance(size, int) else size.node.maybe_as_int()
    if fixed is not None:
        return fixed, fixed
    found = ranges.get(size.node.expr)
    if found is None:
        return 0, None
    least = 0 if found.lower <= 2 else int(found.lower)  # torch.export begins at 2 without looking at the model
    return least, None if found.upper > torch.iinfo(torch.int32).max else int(found.upper)
