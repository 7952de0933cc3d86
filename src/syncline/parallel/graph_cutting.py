"""From the traced graph of a model to stages and the values between them.

```text
traced graph     x ─ embed ─ block0 │ block1 │ add(block1, embed) ─ head        │ = a cut
stage            ·     0       0    │   1    │          2             2
values           0: x → stage 0     1: embed → stage 2     2: block0 → stage 1     3: block1 → stage 2
```

A stage is the part of the model that runs between two cuts. A result that a later stage uses is a value, which is
sent directly to each stage that uses it. Sizes are sent as small tensors and become numbers again at the receiver.
Arithmetic with sizes is repeated in each stage that needs its result. So no size is fixed.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_arg

from syncline.errors import IncompatibleError
from syncline.parallel.module_trees import StageModule
from syncline.parallel.stages import MODEL_INPUT, Stage, StageGraph, TiedParameter, Value

__all__ = [
    "SizeRange",
    "TracedModel",
    "check_entries",
    "check_modes",
    "computing_nodes",
    "cut_graph",
    "expression",
    "module_of",
]

SIZE_ATTRIBUTES = frozenset({"shape", "ndim"})
SIZE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride"})
OBJECT_ATTRIBUTES = frozenset({"dtype", "device", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes"})
"""Attributes of a tensor that are neither tensors nor sizes."""
OBJECT_METHODS = frozenset({"item", "tolist", "get_device", "is_floating_point", "is_complex", "is_contiguous"})
INPLACE_OPERATORS = frozenset(
    [
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem),
    ]
)

VIEWS = frozenset(
    [
        *("view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "t"),
        *(
            "expand",
            "expand_as",
            "narrow",
            "select",
            "chunk",
            "split",
            "unbind",
            "tensor_split",
            "unflatten",
            "diagonal",
        ),
        *("swapaxes", "contiguous", "detach", "to", "type_as", "T", "mT", "data", "getitem", "getattr"),
    ]
)
"""Methods, functions and attributes whose result may have the memory of their first argument."""

SizeRange = tuple[int, int | None]
"""The smallest and the largest size that a traced graph accepts in a dimension; None if there is no largest."""


@dataclass(frozen=True)
class TracedModel:
    """The graph of a model's forward, with the stage of each node that computes something."""

    model: nn.Module
    graph: fx.Graph
    arguments: tuple[str, ...]
    """Names of the inputs, in the order of the graph's placeholders."""
    cuts: tuple[str, ...]
    stages: dict[fx.Node, int]
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Tensors that `get_attr` nodes name and that the model does not have, by name."""
    sizes: Mapping[str, tuple[SizeRange, ...]] = field(default_factory=dict)
    """For each input, the sizes that the graph accepts; empty if it accepts all."""


def cut_graph(traced: TracedModel) -> StageGraph:
    """The stages of a traced model. Changes the graph of `traced`."""
    return _GraphCutter(traced).cut()


def expression(node: fx.Node) -> str:
    """A node as Python code, for messages: `features.3(x)`, `x.shape`."""
    parts = [_written(each) for each in node.args]
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    if node.op == "call_module":
        return f"{node.target}({', '.join(parts)})"
    if node.op == "call_method":
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    if node.target is getattr:
        return f"{parts[0]}.{node.args[1]}"
    if node.target is operator.getitem:
        return f"{parts[0]}[{parts[1]}]"
    name = getattr(node.target, "__name__", str(node.target))
    named = [f"{key}={_written(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(parts + named)})"


def _written(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        named = argument.op in ("call_module", "placeholder", "get_attr")
        return str(argument.target if named else argument.name)
    if isinstance(argument, (tuple, list)):
        return f"({', '.join(map(_written, argument))})"
    return repr(argument)


def module_of(node: fx.Node) -> str:
    """The name of the module whose forward contains the node; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    if names and node.op == "call_module" and names[-1] == node.target:
        names.pop()
    return str(names[-1]) if names else ""


def check_entries(entered: Sequence[str], cuts: Sequence[str], model: nn.Module) -> None:
    """Refuse cuts that do not begin stages. `entered` names the cut modules in the order of their calls."""
    for name in cuts:
        module = model.get_submodule(name)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            children = ", ".join(repr(f"{name}.{each}") for each, _ in list(module.named_children())[:3])
            raise IncompatibleError(
                f"no stage can begin at {name!r}: a {type(module).__name__} is never called; cut at one of its "
                f"children, such as {children}"
            )
        if name not in entered:
            raise IncompatibleError(
                f"no stage can begin at {name!r}: the model's forward does not call this module, or it computes "
                "nothing; cut_candidates(model) names the modules that are called"
            )
        if entered.count(name) > 1:
            raise IncompatibleError(
                f"no stage can begin at {name!r}: the model's forward calls this module {entered.count(name)} times; "
                "cut at a module that is called once"
            )
    if list(entered) != list(cuts):
        raise IncompatibleError(f"the cuts {list(cuts)} are not in the order in which the modules run: {list(entered)}")


def check_modes(training: TracedModel, evaluation: TracedModel) -> None:
    """Refuse a model whose traced part differs between training and evaluation mode: the graph would keep one."""
    first, second = list(_canonical(training)), list(_canonical(evaluation))
    longer = first if len(first) >= len(second) else second
    for place in range(len(longer)):
        one, other = first[place : place + 1], second[place : place + 1]
        if [each[1] for each in one] == [each[1] for each in other]:
            continue
        node = (one or other)[0][0]
        name = module_of(node)
        kind = type(training.model.get_submodule(name)).__name__
        found = " and ".join(
            f"{expression(each[0][0])} in {mode} mode"
            for each, mode in ((one, "training"), (other, "evaluation"))
            if each
        )
        inside = f"the forward of {name!r} ({kind})" if name else f"the forward of the model ({kind})"
        raise IncompatibleError(
            f"{inside} depends on self.training: it has {found}; the stages would keep one of them. Use a module such "
            "as nn.Dropout, which follows the mode, move this code into a module without cuts, or cut elsewhere"
        )


def _canonical(traced: TracedModel) -> Iterator[tuple[fx.Node, str]]:
    """Each node that computes something, with a description that does not depend on names of nodes."""
    _remove_unused(traced)
    places: dict[fx.Node, str] = {}
    computed = 0
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            places[node] = f"attribute {node.target}"
            continue
        places[node] = f"node {computed}"
        computed += 1
        arguments = map_arg((node.args, node.kwargs), lambda each: places[each])
        yield node, f"{node.op} {node.target} {arguments}"


def _classify(node: fx.Node, kinds: Mapping[fx.Node, str]) -> str:
    """What a node returns: "tensor", "size" (read from a tensor), "arithmetic" (made of sizes) or "object"."""
    inputs = [kinds[each] for each in node.all_input_nodes]
    if node.op == "call_method":
        if inputs[:1] != ["tensor"]:
            return "object" if "object" in inputs else "arithmetic"
        return "size" if node.target in SIZE_METHODS else "object" if node.target in OBJECT_METHODS else "tensor"
    if node.op != "call_function":
        return "tensor"
    if inputs and "tensor" not in inputs:
        computed = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        if computed or getattr(node.target, "__name__", "").startswith("sym_"):
            return "object" if "object" in inputs else "arithmetic"
        return "tensor"
    if node.target is getattr:
        attribute = node.args[1]
        return "size" if attribute in SIZE_ATTRIBUTES else "object" if attribute in OBJECT_ATTRIBUTES else "tensor"
    return "size" if str(node.target).startswith("aten.sym_") else "tensor"


def _kinds(graph: fx.Graph) -> dict[fx.Node, str]:
    kinds: dict[fx.Node, str] = {}
    for node in graph.nodes:
        kinds[node] = _classify(node, kinds)
    return kinds


def computing_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something of inputs or parameters. Reading sizes and parts of outputs does not count."""
    kinds = _kinds(graph)
    computed: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        used = any(computed[each] for each in node.all_input_nodes if kinds[each] == "tensor")
        computed[node] = used or node.op in ("placeholder", "get_attr", "call_module")
    plain = ("placeholder", "get_attr", "output")
    return [
        node
        for node in graph.nodes
        if computed[node] and node.op not in plain and kinds[node] == "tensor" and not _reads_entry(node)
    ]


def _reads_entry(node: fx.Node) -> bool:
    """True for one entry of a tuple, a dict or an object, which could not be sent whole."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], (int, str))
    return node.target is getattr and not hasattr(Tensor, str(node.args[1]))


def _remove_unused(traced: TracedModel) -> None:
    """Remove what has no effect and no use, so that it needs no values. Modules and in-place operations stay."""
    kinds = _kinds(traced.graph)
    for node in reversed(list(traced.graph.nodes)):
        if node.users or node.op in ("placeholder", "output", "call_module"):
            continue
        reads = node.op == "get_attr" or kinds[node] != "tensor" or node.target in (getattr, operator.getitem)
        if reads or (isinstance(node.target, torch._ops.OpOverload) and not node.is_impure()):
            traced.graph.erase_node(node)
            traced.stages.pop(node, None)


def _begins_in_place(module: nn.Module) -> bool:
    """True if a module is known to change its input."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _begins_in_place(module[0])
    return bool(getattr(module, "inplace", False))


def _changed_in_place(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """The nodes whose tensors a node is known to change."""
    first = [each for each in node.args[:1] if isinstance(each, fx.Node)]
    if node.op == "call_module":
        return first if _begins_in_place(model.get_submodule(str(node.target))) else []
    if node.op == "call_method":
        return first if str(node.target).endswith("_") and not str(node.target).endswith("__") else []
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        schema = zip(node.target._schema.arguments, node.args, strict=False)
        written = [value for argument, value in schema if argument.alias_info and argument.alias_info.is_write]
        return [each for each in written if isinstance(each, fx.Node)]
    name = getattr(node.target, "__name__", "")
    if node.target in INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return first
    out = node.kwargs.get("out")
    return (first if _has_inplace(node) else []) + ([out] if isinstance(out, fx.Node) else [])


def _has_inplace(node: fx.Node) -> bool:
    """True for a function that is called with inplace=True, by name or by place."""
    if not callable(node.target) or "inplace" in node.kwargs or True not in node.args:
        return bool(node.kwargs.get("inplace"))
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a built-in function
        return False
    return bound.arguments.get("inplace") is True


def size_to_tensor(size: Any) -> Tensor:
    """A size as a tensor, to be sent to another stage."""
    return torch.tensor(list(size) if isinstance(size, tuple) else size, dtype=torch.int64)


def size_from_tensor(sent: Tensor) -> Any:
    """The size that `size_to_tensor` has sent.

    >>> size_from_tensor(size_to_tensor(torch.Size([2, 3]))), size_from_tensor(size_to_tensor(7))
    (torch.Size([2, 3]), 7)
    """
    return torch.Size(sent.tolist()) if sent.dim() else int(sent)


def require_tensor(value: Any, source: str, consumers: str) -> Tensor:
    """The value, if it can be sent to another stage."""
    if not isinstance(value, Tensor):
        raise IncompatibleError(
            f"{source} is a {type(value).__name__}, and only tensors are passed from stage to stage (here to "
            f"{consumers}): cut where a tensor is passed, or return a tensor"
        )
    return value


def require_sizes(value: Tensor, name: str, sizes: Sequence[SizeRange]) -> Tensor:
    """The value, if the exported graph accepts its shape."""
    for dimension, (least, most) in enumerate(sizes):
        size = value.shape[dimension]
        if size < least or (most is not None and size > most):
            accepted = str(least) if least == most else f"{least} to {'any' if most is None else most}"
            raise IncompatibleError(
                f"input {name!r} has size {size} in dimension {dimension}, and the exported graph accepts {accepted}: "
                "torch.export has fixed it because the model depends on it, or because the example has size 1 there; "
                'split with another example, or with tracer="fx"'
            )
    return value


class _GraphCutter:
    """Cuts one traced model."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.model = traced.model
        self.last = len(traced.cuts)
        _remove_unused(traced)
        self.kinds = _kinds(traced.graph)
        self.nodes = list(traced.graph.nodes)
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.output = self.nodes[-1]
        self.stage = dict(traced.stages)
        self.stage[self.output] = self.last
        self.parents = {node: self.parent(node) for node in self.nodes}

    def cut(self) -> StageGraph:
        self.place_reads()
        self.check_work()
        self.check_changes()
        incoming = [self.incoming(index) for index in range(self.last + 1)]
        consumers: dict[fx.Node, list[int]] = defaultdict(list)
        for index, needed in enumerate(incoming):
            for node in needed:
                consumers[node].append(index)
        order = sorted(consumers, key=lambda node: (self.stage.get(node, MODEL_INPUT), self.nodes.index(node)))
        numbers = {node: number for number, node in enumerate(order)}
        values = tuple(self.value(node, consumers[node]) for node in order)
        stages = tuple(self.build(index, incoming[index], numbers, consumers) for index in range(self.last + 1))
        check_memory(stages)
        self.check_shared_state(stages)
        unused = self.unused(stages)
        return StageGraph(stages, values, tied_parameters(stages), self.traced.cuts, unused)

    # Which stage computes what

    def place_reads(self) -> None:
        """Read sizes and parts of outputs where they are made, if this sends less than the tensor itself."""
        for node in self.nodes:
            source = node.args[0] if node.args and node in self.traced.stages else None
            if not isinstance(source, fx.Node):
                continue
            made = self.stage.get(source)
            if self.kinds[node] == "size":
                first = self.first_use(node)
                used = {self.stage[user] for user in source.users if self.kinds[user] == "tensor"}
                if first in used:
                    self.stage[node] = first
                elif made is not None:
                    self.stage[node] = made
                else:
                    self.stage[node] = min([first, *used])
            elif made is not None and self.kinds[node] == "tensor" and _reads_entry(node):
                self.stage[node] = made

    def first_use(self, node: fx.Node) -> int:
        return min(
            self.first_use(user) if self.kinds[user] == "arithmetic" else self.stage[user] for user in node.users
        )

    def owned(self, index: int) -> Iterator[fx.Node]:
        """The nodes of a stage. Arithmetic with sizes belongs to no stage: each repeats what it needs."""
        return (node for node in self.nodes if self.stage.get(node) == index and self.kinds[node] != "arithmetic")

    def incoming(self, index: int) -> list[fx.Node]:
        """What a stage needs and does not compute."""
        needed: dict[fx.Node, None] = {}
        for node in self.owned(index):
            for each in node.all_input_nodes:
                self.resolve(each, index, needed)
        return list(needed)

    def resolve(self, node: fx.Node, index: int, needed: dict[fx.Node, None]) -> None:
        if self.kinds[node] == "arithmetic":
            for each in node.all_input_nodes:
                self.resolve(each, index, needed)
        elif node.op != "get_attr" and self.stage.get(node) != index:
            if self.kinds[node] == "object":
                raise IncompatibleError(
                    f"stage {index} uses {expression(node)} of stage {self.stage[node]}, which is neither a tensor nor "
                    f"a size, so it cannot be sent: compute it from a tensor that stage {index} uses, or cut elsewhere"
                )
            needed[node] = None

    # Refusals

    def check_work(self) -> None:
        working = {self.stage[node] for node in computing_nodes(self.traced.graph)}
        for index in range(self.last):  # the last one has its cut module
            if index not in working:
                before = f"between the cuts {self.traced.cuts[index - 1]!r} and" if index else "before the cut"
                raise IncompatibleError(
                    f"stage {index} computes nothing: the model runs nothing {before} {self.traced.cuts[index]!r}; "
                    "remove this cut, or cut later"
                )

    def check_changes(self) -> None:
        """Refuse what is changed in place if a later use would not see it, because it was sent before."""
        places = {node: place for place, node in enumerate(self.nodes)}
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            groups[self.memory(node)].append(node)
        for node in self.nodes:
            stage = self.stage.get(node, MODEL_INPUT)
            for changed in _changed_in_place(node, self.model) if self.kinds[node] == "tensor" else ():
                if changed.op == "get_attr":
                    self.check_changed_attribute(str(changed.target), stage)
                for other in groups[self.memory(changed)]:
                    late = [user for user in other.users if places[user] > places[node]]
                    self.check_seen(node, changed, other, {self.stage[user] for user in late})

    def check_seen(self, node: fx.Node, changed: fx.Node, other: fx.Node, users: set[int]) -> None:
        """Check that later uses of `other`, which has the memory of `changed`, see what `node` does to it."""
        stage = self.stage[node]
        together = self.memory(other, stage) is self.memory(changed, stage)
        made = self.stage.get(other, MODEL_INPUT)
        unseen = {user for user in users if user >= stage and not (together and (user == stage or made == stage))}
        if unseen and other.op != "get_attr" and made <= stage:
            raise IncompatibleError(
                f"{expression(node)} in stage {stage} changes {_written(changed)} in place, and stage {min(unseen)} "
                f"uses {_written(other)}, which may have the same memory, afterwards: it would not see the change. Use "
                "the operation that is not in place (inplace=False), or cut elsewhere"
            )

    def memory(self, node: fx.Node, stage: int | None = None) -> fx.Node:
        """The first node with the same memory; with a stage, the first within it, or what it has received."""
        while (parent := self.parents[node]) is not None and (stage is None or self.stage.get(node) == stage):
            node = parent
        return node

    def parent(self, node: fx.Node) -> fx.Node | None:
        """The argument whose memory the result of a node may be."""
        if self.kinds[node] != "tensor" or node.op in ("placeholder", "get_attr", "output"):
            return None
        changed = _changed_in_place(node, self.model)
        if changed:
            return changed[0]
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(node.target, torch._ops.OpOverload):
            returned = node.target._schema.returns
            return first if returned and returned[0].alias_info else None
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "call_module":
            name = "view" if isinstance(self.model.get_submodule(str(name)), (nn.Identity, nn.Flatten)) else ""
        return first if name in VIEWS else None

    def check_changed_attribute(self, name: str, stage: int) -> None:
        users = {
            self.stage[user]
            for node in self.nodes
            if node.op == "get_attr" and node.target == name
            for user in node.users
        }
        if users != {stage}:
            raise IncompatibleError(
                f"stage {stage} changes {name!r} in place, and stages {sorted(users)} use it: each would have its own "
                "copy. Cut so that one stage uses it"
            )

    def check_shared_state(self, stages: Sequence[Stage]) -> None:
        """Refuse a module with running statistics that several stages call: each would have its own."""
        called: dict[str, set[int]] = defaultdict(set)
        for node in self.nodes:
            if node.op == "call_module":
                called[str(node.target)].add(self.stage[node])
        for name, users in called.items():
            module = self.model.get_submodule(name)
            kept = [
                buffer
                for buffer in module.state_dict()
                if (tensor := _buffer(module, buffer)) is not None and tensor.is_floating_point()
            ]
            if len(users) > 1 and kept:
                raise IncompatibleError(
                    f"stages {sorted(users)} call {name!r}, which has the buffer {kept[0]!r}: each stage would have "
                    "its own copy. Cut so that one stage calls it; if the buffer never changes, register it with "
                    "persistent=False"
                )

    # Stages and values

    def value(self, node: fx.Node, consumers: Sequence[int]) -> Value:
        if node.op == "placeholder":
            place = self.inputs.index(node)
            return Value(self.traced.arguments[place], MODEL_INPUT, tuple(consumers), place)
        name = str(node.target) if node.op == "call_module" else expression(node)
        return Value(name, self.stage[node], tuple(consumers))

    def build(
        self,
        index: int,
        incoming: Sequence[fx.Node],
        numbers: Mapping[fx.Node, int],
        consumers: Mapping[fx.Node, Sequence[int]],
    ) -> Stage:
        graph = fx.Graph()
        taken = sorted(incoming, key=numbers.__getitem__)
        changed = {
            self.memory(each, index) for node in self.owned(index) for each in _changed_in_place(node, self.model)
        }
        copies = {node: graph.placeholder(node.name) for node in taken}
        for node in taken:
            copies[node] = self.received(graph, copies[node], node, node in changed)

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node.op == "get_attr":
                    copies[node] = graph.create_node("get_attr", node.target)
                else:
                    copies[node] = graph.node_copy(node, copy_of)
                copies[node].meta = {}  # an exported graph keeps example tensors there
            return copies[node]

        for node in self.owned(index):
            if node is not self.output:
                copy_of(node)
        given = [node for node in numbers if self.stage.get(node) == index]
        if index == self.last:
            graph.output(map_arg(self.output.args[0], copy_of))
        else:
            graph.output(tuple(self.sent(graph, copies[node], node, consumers[node]) for node in given))
        module = StageModule(self.model, graph, self.traced.constants)
        return Stage(index, module, tuple(numbers[node] for node in taken), tuple(numbers[node] for node in given))

    def received(self, graph: fx.Graph, placeholder: fx.Node, node: fx.Node, changed: bool) -> fx.Node:
        if self.kinds[node] == "size":
            return graph.call_function(size_from_tensor, (placeholder,))
        if node.op == "placeholder":
            name = self.traced.arguments[self.inputs.index(node)]
            if name in self.traced.sizes:
                sizes: Argument = self.traced.sizes[name]
                placeholder = graph.call_function(require_sizes, (placeholder, name, sizes))
        # autograd refuses in-place operations on a leaf, which a received tensor is
        return graph.call_method("clone", (placeholder,)) if changed else placeholder

    def sent(self, graph: fx.Graph, copy: fx.Node, node: fx.Node, consumers: Sequence[int]) -> fx.Node:
        if self.kinds[node] == "size":
            return graph.call_function(size_to_tensor, (copy,))
        stages = f"stage{'s' * (len(consumers) > 1)} {', '.join(map(str, consumers))}"
        return graph.call_function(require_tensor, (copy, expression(node), stages))

    def unused(self, stages: Iterable[Stage]) -> tuple[str, ...]:
        """Names of parameters and buffers that no stage has."""
        held = {id(each) for stage in stages for each in [*stage.module.parameters(), *stage.module.buffers()]}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return tuple(name for name, tensor in named if id(tensor) not in held)


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    try:
        return module.get_buffer(name)
    except AttributeError:
        return None


def tied_parameters(stages: Sequence[Stage]) -> tuple[TiedParameter, ...]:
    """The parameters that several stages use."""
    uses: dict[nn.Parameter, list[tuple[int, str]]] = defaultdict(list)
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            uses[parameter].append((stage.index, name))
    return tuple(
        TiedParameter(tuple(index for index, _ in found), tuple(name for _, name in found))
        for found in uses.values()
        if len(found) > 1
    )


def check_memory(stages: Sequence[Stage]) -> None:
    """Refuse different parameters of different stages that share memory: apart, they would no longer be equal."""
    spans = []
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            start = 0 if parameter.is_meta else parameter.data_ptr()
            if start and parameter.is_contiguous():
                end = start + parameter.numel() * parameter.element_size()
                spans.append((start, end, stage.index, name, parameter))
    spans.sort(key=lambda span: span[:4])
    for (_, end, stage_index, name, one), (start, _, other_index, other_name, other) in itertools.pairwise(spans):
        if start < end and one is not other and stage_index != other_index:
            raise IncompatibleError(
                f"{name!r} of stage {stage_index} and {other_name!r} of stage {other_index} are different parameters "
                "with the same memory: assign the parameter itself (head.weight = embedding.weight), or cut so that "
                "one stage has both"
            )
