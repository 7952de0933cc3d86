"""Plans: which layers are divided, and how.

    {"blocks.*.mlp.up": "columns", "blocks.*.mlp.down": "rows", "blocks.*.attn": "heads", "embed": "vocabulary"}

A pattern is compared with the names of modules, part by part: "*" stands for one part of a name, "ln?" for ln1 or ln2.
A role may say what happens before and after the layer, joined by "+":

```text
columns+gather        a linear layer divided by outputs; then every worker gets all outputs
slice+rows            each worker takes its part of the input features; then a layer divided by inputs
sequence+columns      the input is a part of the sequence: gather the sequence, then as columns
rows+sequence         the output is a part of the sequence of the sum
```
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from syncline.errors import IncompatibleError, SpecError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share
from syncline.parallel.team import LayerTeam
from syncline.parallel.tensor_layers.convolution import (
    ChannelNormDivision,
    GroupsDivision,
    InputChannelsDivision,
    OutputChannelsDivision,
)
from syncline.parallel.tensor_layers.heads import (
    AttentionHeadsDivision,
    Heads,
    HeadsDivision,
    attention_divisions,
    join_names,
    recognise_heads,
)
from syncline.parallel.tensor_layers.linear import ColumnsDivision, RowsDivision, SharedInputDivision
from syncline.parallel.tensor_layers.sequence import PartDivision
from syncline.parallel.tensor_layers.vocabulary import VocabularyDivision

__all__ = ["TensorPlan", "TransformerDivision", "default_plan", "plan_divisions"]

Role = str | Heads
TRANSFORMER = {
    "self_attn": "heads",
    "multihead_attn": "heads",
    "linear1": "columns",
    "dropout": "split",
    "linear2": "rows",
}
"""The roles of the layers of torch's TransformerEncoderLayer and TransformerDecoderLayer."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNEL_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class TensorPlan:
    """The roles of modules, by patterns of their names, and the dimension of the sequence in activations.

    >>> TensorPlan({"blocks.*.up": "columns", "blocks.*.down": "rows"}).sequence_dim
    1
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    sequence_dim: int = 1
    """1 for activations of (batch, sequence, features), 0 for those of (sequence, batch, features)."""


@dataclass(frozen=True)
class _RoleKind:
    """The modules that a role applies to, and the words that may stand before and after it."""

    types: tuple[type[nn.Module], ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


KINDS = {
    "columns": _RoleKind((nn.Linear,), ("sequence",), ("gather",)),
    "rows": _RoleKind((nn.Linear,), ("slice",), ("sequence",)),
    "heads": _RoleKind((nn.Module,), ("sequence",), ("sequence",)),
    "vocabulary": _RoleKind((nn.Embedding, nn.Linear), ("sequence",), ("sequence", "gather")),
    "channels_out": _RoleKind(CONVOLUTIONS, (), ("gather",)),
    "channels_in": _RoleKind(CONVOLUTIONS, ("slice",), ()),
    "groups": _RoleKind(CONVOLUTIONS, ("slice",), ("gather",)),
    "channels": _RoleKind(CHANNEL_NORMS),
    "sequence": _RoleKind((nn.Module,), ("slice",), ("gather",)),
    "split": _RoleKind((nn.Module,)),
    "whole": _RoleKind((nn.Module,)),
    "transformer": _RoleKind((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
}
"""The roles."""


def default_plan(model: nn.Module) -> TensorPlan:
    """The plan of a model if the user gives none: its attribute `tensor_plan`, or that of torch's transformer layers.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
    >>> default_plan(model).roles
    {'layers.0': 'transformer'}
    """
    own = getattr(model, "tensor_plan", None)
    if own is not None:
        return _as_plan(own)
    roles: dict[str, Role] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in roles)
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            roles[name] = "transformer"
        elif isinstance(module, nn.MultiheadAttention) and not inside:
            roles[name] = "heads"
    if not roles:
        raise SpecError(
            f"no plan was given, and {type(model).__name__} has neither an attribute tensor_plan nor one of torch's "
            'transformer layers: write tensor({"blocks.*.up": "columns", "blocks.*.down": "rows"}, size=2) with the '
            "names of its layers"
        )
    return TensorPlan(roles)


def plan_divisions(model: nn.Module, plan: TensorPlan | Mapping[str, Role], size: int) -> list[LayerDivision]:
    """The divisions that a plan describes. Refuses what cannot be divided over teams of `size`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> [each.name for each in plan_divisions(model, {"0": "columns", "2": "rows"}, 2)]
    ['0', '2']
    """
    plan = _as_plan(plan)
    roles = _match(model, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    divisions: dict[str, LayerDivision] = {}
    for name, (_, role) in roles.items():
        for each in _divide(name, modules[name], role, plan.sequence_dim):
            if each.name in divisions:
                raise SpecError(
                    f"two roles divide {each.name}: that of a module around it, and its own; remove one of them"
                )
            divisions[each.name] = each
    for each in divisions.values():
        each.check(size)
    _check_nested(divisions)
    _check_rest_of_attention(divisions, roles)
    for parent in _shared_inputs(modules, divisions):
        divisions[parent.name] = parent
    for name, module in modules.items():
        is_layer = isinstance(module, nn.TransformerEncoderLayer)
        if (is_layer or isinstance(module, nn.TransformerEncoder)) and any(
            not name or each.startswith(f"{name}.") for each in divisions
        ):
            divisions[name] = TransformerDivision(name, module)
    _check_shared_weights(model, divisions, size)
    return list(divisions.values())


def _as_plan(plan: TensorPlan | Mapping[str, Role]) -> TensorPlan:
    if isinstance(plan, TensorPlan):
        return plan
    if not isinstance(plan, Mapping):
        raise SpecError(f"a plan is a dict of patterns and roles, not a {type(plan).__name__}: {plan!r}")
    return TensorPlan(plan)


def _match(model: nn.Module, plan: TensorPlan) -> dict[str, tuple[str, Role]]:
    """The pattern and the role of each module that a pattern matches, in the order of the model's modules."""
    if not plan.roles:
        raise SpecError('the plan is empty: write patterns and roles, such as {"blocks.*.up": "columns"}')
    names = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    found: dict[int, tuple[str, str, Role]] = {}
    for pattern, role in plan.roles.items():
        matching = [name for name in names if _matches(pattern, name)]
        if not matching:
            raise SpecError(f"the pattern {pattern!r} of the plan matches no module; {_nearest(pattern, list(names))}")
        for name in matching:
            first, other, other_role = found.setdefault(names[name], (name, pattern, role))
            if other_role != role:
                raise SpecError(
                    f"{name} has two roles: {other!r} says {other_role!r}{_also(first, name)}, and {pattern!r} says "
                    f"{role!r}"
                )
    by_name = {name: (pattern, role) for name, pattern, role in found.values()}
    return {name: by_name[name] for name in names if name in by_name}


def _also(first: str, name: str) -> str:
    return "" if first == name else f" (of {first}, the same module)"


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name, part by part."""
    parts, names = pattern.split("."), name.split(".")
    if not name:
        return not pattern  # the model itself
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def _nearest(pattern: str, names: list[str]) -> str:
    """The names that are most like a pattern."""
    close = difflib.get_close_matches(pattern, [name for name in names if name], n=MAX_NAMES_SHOWN, cutoff=0.3)
    shown = close or [name for name in names if name][:MAX_NAMES_SHOWN]
    return f"the nearest of the {len(names) - 1} names: {', '.join(map(repr, shown)) or 'none'}"


def _divide(name: str, module: nn.Module, role: Role, sequence_dim: int) -> list[LayerDivision]:
    """The divisions of one module."""
    if isinstance(role, Heads):
        dim = sequence_dim if role.sequence else None
        return attention_divisions(name, module, role, sequence_in=dim, sequence_out=dim)
    kind, before, after = _read(name, role)
    if not isinstance(module, KINDS[kind].types):
        types = " or a ".join(each.__name__ for each in KINDS[kind].types)
        raise IncompatibleError(f"{name} is a {type(module).__name__}, and the role {role!r} divides a {types}")
    if KINDS[kind].types != (nn.Module,):
        _check_own_forward(name, module, KINDS[kind].types, role)
    sequence_in = sequence_dim if before == "sequence" else None
    sequence_out = sequence_dim if after == "sequence" else None
    if kind == "heads":
        if isinstance(module, nn.MultiheadAttention):
            _check_own_forward(name, module, (nn.MultiheadAttention,), role)
            return [AttentionHeadsDivision(name, module, sequence_in=sequence_in, sequence_out=sequence_out)]
        heads = recognise_heads(name, module)
        return attention_divisions(name, module, heads, sequence_in=sequence_in, sequence_out=sequence_out)
    if kind == "vocabulary":
        return [_vocabulary(name, module, role, sequence_in, sequence_out, after == "gather")]
    if kind == "transformer":
        return [
            division
            for child, each in TRANSFORMER.items()
            if hasattr(module, child)
            for division in _divide(join_names(name, child), getattr(module, child), each, sequence_dim)
        ]
    make: dict[str, Callable[[], LayerDivision]] = {
        "columns": lambda: ColumnsDivision(name, module, gathers=after == "gather", sequence_dim=sequence_in),
        "rows": lambda: RowsDivision(name, module, slices_input=before == "slice", sequence_dim=sequence_out),
        "channels_out": lambda: OutputChannelsDivision(name, module, gathers=after == "gather"),
        "channels_in": lambda: InputChannelsDivision(name, module, slices_input=before == "slice"),
        "groups": lambda: GroupsDivision(name, module, gathers=after == "gather", slices_input=before == "slice"),
        "channels": lambda: ChannelNormDivision(name, module),
        "sequence": lambda: PartDivision(
            name, module, dim=sequence_dim, slices=before == "slice", gathers=after == "gather"
        ),
        "split": lambda: PartDivision(name, module),
    }
    return [make[kind]()] if kind in make else []


def _vocabulary(
    name: str, module: nn.Module, role: str, sequence_in: int | None, sequence_out: int | None, gathers: bool
) -> LayerDivision:
    if isinstance(module, nn.Embedding):
        if sequence_in is not None or gathers:
            raise SpecError(f"{name} is an embedding: its role is 'vocabulary' or 'vocabulary+sequence', not {role!r}")
        return VocabularyDivision(name, module, sequence_dim=sequence_out)
    if sequence_out is not None:
        raise SpecError(f"{name} is a linear layer, whose output is divided by words: {role!r} cannot divide it again")
    return ColumnsDivision(name, module, gathers=gathers, sequence_dim=sequence_in)


def _read(name: str, role: object) -> tuple[str, str, str]:
    """A role, and the words before and after it."""
    forms = ", ".join(map(repr, KINDS))
    if not isinstance(role, str):
        raise SpecError(f"the role of {name} is {role!r}: it must be sl.parallel.Heads(…) or one of {forms}")
    parts = role.split("+")
    for kind, allowed in KINDS.items():
        for before in ("", *allowed.before):
            for after in ("", *allowed.after):
                if parts == [each for each in (before, kind, after) if each]:
                    return kind, before, after
    kind = next((each for each in parts if each in KINDS and each != "sequence"), "")
    if kind:
        allowed = KINDS[kind]
        forms = ", ".join(
            [
                repr(kind),
                *(f"'{each}+{kind}'" for each in allowed.before),
                *(f"'{kind}+{each}'" for each in allowed.after),
            ]
        )
    raise SpecError(f"the role of {name} is {role!r}: it must be one of {forms}")


def _check_own_forward(name: str, module: nn.Module, types: tuple[type[nn.Module], ...], role: str) -> None:
    """Refuse a subclass that computes something else, and one that has a shape of its own later."""
    base = next(each for each in types if isinstance(module, each))
    kind: Any = type(module)
    if kind.forward is not base.forward:
        raise IncompatibleError(
            f"{name} is a {kind.__name__} with a forward of its own: the role {role!r} divides {base.__name__} itself"
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise IncompatibleError(
            f"{name} is a {kind.__name__}, whose weights have no shape yet: call the model once before it is divided"
        )


def _check_nested(divisions: Mapping[str, LayerDivision]) -> None:
    """Refuse the division of a module inside another that is divided as one."""
    for outer, division in divisions.items():
        if isinstance(division, HeadsDivision):
            continue
        for inner in divisions:
            if inner.startswith(f"{outer}.") or (inner and not outer):
                raise SpecError(
                    f"two roles divide {inner}: its own, and that of {outer or 'the model'} around it; "
                    "remove one of them"
                )


def _check_rest_of_attention(divisions: Mapping[str, LayerDivision], roles: Mapping[str, tuple[str, Role]]) -> None:
    """Refuse parameters inside an attention module if no role says whether they compute on divided heads."""
    for division in [each for each in divisions.values() if isinstance(each, HeadsDivision)]:
        known = [each for each in (*divisions, *roles) if each != division.name]
        for path, _ in division.module.named_parameters(remove_duplicate=False):
            name = join_names(division.name, path)
            if not any(name.startswith(f"{each}.") for each in known):
                owner = name.rpartition(".")[0]
                advice = (
                    f'Write "{owner}": "split" if it computes on heads, so that its gradients are summed, or "whole" '
                    "if it computes on the whole width"
                    if owner != division.name
                    else "Put it into a module of its own, and give that a role"
                )
                raise IncompatibleError(f"{division.name} has the parameter {path} beside q, k, v and output. {advice}")


def _shared_inputs(
    modules: Mapping[str, nn.Module], divisions: Mapping[str, LayerDivision]
) -> list[SharedInputDivision]:
    """The parents of several layers that are divided by outputs, which may read the same tensor."""
    children: dict[str, list[ColumnsDivision]] = {}
    for name, division in divisions.items():
        if isinstance(division, ColumnsDivision):
            children.setdefault(name.rpartition(".")[0], []).append(division)
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return [
        SharedInputDivision(parent, modules[parent], layers)
        for parent, layers in children.items()
        if parent and parent not in divisions and len(layers) > 1 and not isinstance(modules[parent], containers)
    ]


def _check_shared_weights(model: nn.Module, divisions: Mapping[str, LayerDivision], size: int) -> None:
    """Refuse a parameter of several layers that are not divided alike."""
    cuts: dict[str, DimensionSlice] = {
        join_names(name, tensor): cut
        for name, division in divisions.items()
        for tensor, cut in division.share(0, size).slices.items()
    }
    owners: dict[str, int] = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    divided_modules = {id(division.module): name for name, division in divisions.items()}
    found: dict[int, tuple[str, DimensionSlice | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, tensor = name.rpartition(".")
        alias = divided_modules.get(owners[owner])  # a module with two names is divided by its first one
        cut = cuts.get(name, None if alias is None else cuts.get(join_names(alias, tensor)))
        other, other_cut = found.setdefault(id(parameter), (name, cut))
        if cut != other_cut:
            raise IncompatibleError(
                f"{name} and {other} are the same parameter, and the plan divides them differently: "
                f"{_describe(other, other_cut)}, {_describe(name, cut)}. Give both layers roles that divide it alike, "
                "such as 'vocabulary'"
            )


def _describe(name: str, cut: DimensionSlice | None) -> str:
    if cut is None:
        return f"{name} is whole"
    ranges = ", ".join(f"{start} to {stop}" for start, stop in cut.ranges)
    return f"worker 0 has {ranges} of {cut.size} in dimension {cut.dimension} of {name}"


class TransformerDivision(LayerDivision):
    """torch's transformer encoder, or one of its layers, without the fast path, which would use divided weights as
    whole ones."""

    def check(self, size: int) -> None:
        """Nothing of it is divided."""

    def share(self, rank: int, size: int) -> Share:
        return Share()

    @property
    def _switch(self) -> str:
        is_layer = isinstance(self.module, nn.TransformerEncoderLayer)
        return "activation_relu_or_gelu" if is_layer else "use_nested_tensor"

    def attach(self, team: LayerTeam) -> None:
        module: Any = self.module
        module.tensor_fast_path = getattr(module, self._switch)
        setattr(module, self._switch, 0)

    def detach(self) -> None:
        module: Any = self.module
        setattr(module, self._switch, module.tensor_fast_path)
        del module.tensor_fast_path
