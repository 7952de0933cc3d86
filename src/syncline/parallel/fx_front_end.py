"""Traces the forward of a model with torch.fx, only as deep as the cuts need.

A module that contains a cut is traced: its Python runs once, on proxies that record each operation. Every other module
is one node of the graph: it is called as it is, whatever its Python does.

```text
cut "features.3"      model.forward          traced: contains "features.3"
                      ├── features           traced: contains "features.3"
                      │   ├── features.0     a node
                      │   └── features.3     a node, the first of stage 1
                      └── head               a node
```
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import linecache
import operator
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from syncline.errors import IncompatibleError
from syncline.parallel.graph_cutting import TracedModel, check_entries, check_modes, computing_nodes

__all__ = ["trace_calls", "trace_fx"]

FACTORIES = (
    *("arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
"""Functions of torch that make a tensor of no other one. Outside of the graph their results would be constants."""
ACTIVE_TRACER: ContextVar[fx.Tracer | None] = ContextVar("active_tracer", default=None)
"""The tracer that runs in this thread."""
CONSTANT = "_tensor_constant"
"""How torch.fx calls the attributes in which it puts tensors that it finds in the traced code."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace_fx(model: nn.Module, cuts: Mapping[str, nn.Module], inputs: Sequence[str]) -> TracedModel:
    """The graph of a model that is traced down to the cuts. The model is unchanged afterwards."""
    inside = _ancestors(model, cuts.values())
    training, evaluation = (_trace(model, cuts, inside, inputs, mode) for mode in (True, False))
    check_modes(training[0], evaluation[0])
    check_entries(training[1], list(cuts), model)
    return training[0]


def trace_calls(model: nn.Module, traced: Collection[nn.Module], inputs: Sequence[str]) -> list[tuple[str, bool]]:
    """The modules that a model calls, in order, if it and the modules in `traced` are traced.

    Each has True if something is computed before it.
    """
    training, evaluation = (_trace(model, {}, {model, *traced}, inputs, mode)[0] for mode in (True, False))
    check_modes(training, evaluation)
    nodes = computing_nodes(training.graph)
    return [(str(node.target), place > 0) for place, node in enumerate(nodes) if node.op == "call_module"]


def _ancestors(model: nn.Module, modules: Collection[nn.Module]) -> set[nn.Module]:
    """The model, and the modules that contain one of these modules."""
    wanted = set(modules)
    return {
        module
        for module in model.modules()
        if module is model or any(each in wanted for each in module.modules() if each is not module)
    }


def _trace(
    model: nn.Module,
    cuts: Mapping[str, nn.Module],
    inside: Collection[nn.Module],
    inputs: Sequence[str],
    training: bool,
) -> tuple[TracedModel, list[str]]:
    """The graph, and the cuts in the order in which their modules are called."""
    tracer = _StageTracer(model, cuts, inside, inputs)
    with _mode(inside, training), _unchanged(inside) as changes, _recorded_factories(tracer):
        tracer.check_hooks(model, "")
        try:
            graph = tracer.trace(model)
        except IncompatibleError:
            raise
        except Exception as error:
            raise IncompatibleError(tracer.explain(error)) from error
        constants = {name: model.__dict__[name] for name in list(model.__dict__) if name.startswith(CONSTANT)}
        changed = [each for each in changes() if not each.startswith(CONSTANT)]
    if changed:
        raise IncompatibleError(
            f"the traced part of the model's forward assigns {changed[0]!r}, which the stages would not repeat; "
            f"{tracer.remedy()}"
        )
    return TracedModel(model, graph, tuple(inputs), tuple(cuts), tracer.stages, constants), tracer.entered


class _Snapshot:
    """The attributes of a module, and what its lists, dicts and sets contain."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.contents = {
            name: copy.copy(value) for name, value in self.attributes.items() if isinstance(value, (dict, list, set))
        }

    def changes(self) -> list[str]:
        """Names of the attributes that are other ones now, or contain other objects."""
        now = self.module.__dict__
        return [
            name
            for name in dict.fromkeys([*self.attributes, *now])
            if name not in now
            or name not in self.attributes
            or now[name] is not self.attributes[name]
            or (name in self.contents and _identities(now[name]) != _identities(self.contents[name]))
        ]

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for name, saved in self.contents.items():
            container = self.attributes[name]
            if _identities(container) != _identities(saved):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(saved)


def _identities(container: Any) -> list[int]:
    values = [*container, *container.values()] if isinstance(container, dict) else container
    return [id(each) for each in values]


@contextlib.contextmanager
def _unchanged(modules: Collection[nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """Restores the attributes of modules afterwards. Gives a function that names those that have changed."""
    snapshots = [_Snapshot(module) for module in modules]
    try:
        yield lambda: [name for each in snapshots for name in each.changes()]
    finally:
        for each in snapshots:
            each.restore()


@contextlib.contextmanager
def _mode(modules: Collection[nn.Module], training: bool) -> Iterator[None]:
    """Sets only the flags of these modules: the others are not run."""
    before = [(module, module.training) for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextlib.contextmanager
def _recorded_factories(tracer: fx.Tracer) -> Iterator[None]:
    """Records torch.zeros and the like in the graph, with sizes that are known only when the graph runs."""
    functions = {name: getattr(torch, name) for name in FACTORIES}

    def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if ACTIVE_TRACER.get() is not tracer:  # another thread, such as a transport's
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return call

    for name, function in functions.items():
        setattr(torch, name, recorder(function))
    token = ACTIVE_TRACER.set(tracer)
    try:
        yield
    finally:
        ACTIVE_TRACER.reset(token)
        for name, function in functions.items():
            setattr(torch, name, function)


class _StageProxy(fx.Proxy):
    """A recorded value. In-place operators stay in place: other names of the tensor see the change."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _record_in_place(name: str) -> None:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    setattr(_StageProxy, f"__{name}__", method)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    _record_in_place(_name)


class _AttributeProxy(_StageProxy):
    """A parameter or buffer of the traced model. Its shape is known: code may depend on it."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.tensor.size() if dim is None else self.tensor.size(dim)

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)


class _StageTracer(fx.Tracer):
    """Traces some modules, calls the others, and notes with which node each stage begins."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, nn.Module],
        inside: Collection[nn.Module],
        inputs: Sequence[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.cuts = {module: name for name, module in cuts.items()}
        self.inside = inside
        self.inputs = inputs
        self.stages: dict[fx.Node, int] = {}
        self.entered: list[str] = []
        self.calls = [""]
        """The names of the traced modules whose forward runs now. Not popped after an error, to name the place."""
        self.tensors = {tensor: name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.contexts = _contexts()

    # What torch.fx asks

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.inside

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        def forward(model: nn.Module, *inputs: Any) -> Any:
            return model.forward(*inputs)  # of the instance, which may have one of its own

        return forward, [self.model, *(self.create_proxy("placeholder", name, (), {}) for name in self.inputs)]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _StageProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.tensors.get(attr_val) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            parameter_proxy_cache[name] = _AttributeProxy(node, self, attr_val)
        return parameter_proxy_cache[name]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if m in self.cuts:
            self.entered.append(self.cuts[m])
        if m not in self.inside:
            return super().call_module(m, forward, args, kwargs)
        self.calls.append(self.path_of_module(m))
        self.check_hooks(m, self.calls[-1])
        result = super().call_module(m, forward, args, kwargs)
        self.calls.pop()
        return result

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind not in ("placeholder", "get_attr", "output"):
            self.stages[node] = len(set(self.entered))
            if _contexts() != self.contexts:
                raise IncompatibleError(
                    f"the forward of {self.place()} runs {target} in a context such as torch.no_grad() or "
                    f"torch.autocast(), which the stages would not enter; {self.remedy()}"
                )
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = _user_frame()
        if frame is not None and (text := _plain_assertion(frame)):
            self.create_proxy("call_function", torch._assert, (obj, text), {})
            return True
        return super().to_bool(obj)

    # Refusals

    def check_hooks(self, module: nn.Module, name: str) -> None:
        if any(getattr(module, each) for each in HOOKS):
            raise IncompatibleError(
                f"{name or 'the model'} has hooks, which would run only once, while it is split; register them on a "
                f"module that is not traced, or {self.remedy()}"
            )

    def place(self) -> str:
        name = self.calls[-1]
        kind = type(self.model.get_submodule(name)).__name__
        return f"{name!r} ({kind})" if name else f"the model ({kind})"

    def remedy(self) -> str:
        inner = [cut for cut in self.cuts.values() if not self.calls[-1] or cut.startswith(f"{self.calls[-1]}.")]
        reason = f"it is traced because the cut {inner[0]!r} is inside; " if inner else ""
        return (
            f"{reason}cut elsewhere, move this code into a module without cuts, which is called as it is, or use "
            'tracer="export"'
        )

    def explain(self, error: Exception) -> str:
        ours = (str(torch.__path__[0]), __file__)
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"cannot trace the forward of {self.place()}{where}: {reason}; {self.remedy()}"


def _contexts() -> tuple[bool, ...]:
    """What a `with` statement may have changed, and a graph does not record."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _user_frame() -> FrameType | None:
    """The frame of the traced code."""
    folder = str(torch.__path__[0])
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((folder, __file__)):
        frame = frame.f_back
    return frame


def _plain_assertion(frame: FrameType) -> str:
    """The assert statement that a frame executes, if it holds exactly when each condition in it holds."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    with contextlib.suppress(SyntaxError):
        statements = ast.parse(text).body
        if len(statements) == 1 and isinstance(statements[0], ast.Assert):
            choices = (ast.Or, ast.Not, ast.IfExp)
            return "" if any(isinstance(node, choices) for node in ast.walk(statements[0].test)) else text
    return ""
