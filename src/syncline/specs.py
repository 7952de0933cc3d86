"""Spec strings: ``"topk(0.01)|quantize(4)"`` <-> objects.

One grammar for the command line, configuration and logs::

    chain = spec ("|" spec)*
    spec  = name | name "(" [argument ("," argument)*] ")"
    argument = literal | key "=" literal

A name may contain hyphens, as in local-sgd, so that the error for an unknown name can suggest a known one. " x " joins
kinds of parallelism, as in ``"pipeline(2) x allreduce"``: see `factors`.

Literals are numbers, strings, None, True, False, and lists, tuples and dicts of them. The text is parsed with
`ast` and never evaluated: a call, an attribute or an operator inside an argument is a `SpecError`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Generic, TypeVar

from syncline.errors import SpecError

__all__ = ["Registry", "Spec", "factors", "nearest", "parse", "spec_of"]

T = TypeVar("T")

MAX_SPEC_CHARS = 4096
"""A longer text is refused before `ast` parses it."""
TIMES = re.compile(r"""\s+x\s+(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
"""The sign between two factors. It is no sign within quotes."""
FORM = "write name, name(argument, key=value), or several of these joined by '|'"


@dataclass(frozen=True)
class Spec:
    """One link of a chain: a name and its literal arguments. `str()` returns the text.

    >>> str(Spec("topk", (0.01,), {"bucket": 512}))
    'topk(0.01, bucket=512)'
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = [_written(a) for a in self.args] + [f"{k}={_written(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name


def spec_of(name: str, settings: Any) -> Spec:
    """The spec of a dataclass: its required fields, then the fields that differ from their defaults."""
    required, changed = [], {}
    for each in (each for each in fields(settings) if each.init):
        value = getattr(settings, each.name)
        if each.default is MISSING:
            required.append(value)
        elif value != each.default:
            changed[each.name] = value
    return Spec(name, tuple(required), changed)


def parse(text: str) -> tuple[Spec, ...]:
    """Parse a spec string into its links.

    >>> parse("topk(0.01)|quantize(4)")
    (Spec(name='topk', args=(0.01,), kwargs={}), Spec(name='quantize', args=(4,), kwargs={}))
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec is a string such as 'ring' or 'topk(0.01)', not {type(text).__name__}")
    if not text.strip():
        raise SpecError(f"the spec is empty; {FORM}")
    if len(text) > MAX_SPEC_CHARS:
        raise SpecError(f"a spec of {len(text)} characters is longer than any spec (at most {MAX_SPEC_CHARS})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual literals
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise SpecError(f"cannot read spec {text!r}: {reason}; {FORM}") from None
    return tuple(_link(node, text) for node in _links(tree))


def factors(text: str) -> list[str]:
    """The specs that " x " joins.

    >>> factors("pipeline(2, schedule='1f1b') x local(period=4)")
    ["pipeline(2, schedule='1f1b')", 'local(period=4)']
    """
    if not isinstance(text, str) or len(text) > MAX_SPEC_CHARS:
        return [text]  # `parse` refuses it
    return TIMES.split(text.strip())


def _written(value: Any) -> str:
    """The literal that is parsed as `value`. Python itself writes infinity as a name."""
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_written, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(k)}: {_written(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _links(node: ast.expr) -> Iterator[ast.expr]:
    pending = [node]
    while pending:  # no recursion: a long chain would exceed the recursion limit
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            pending += [node.right, node.left]
        else:
            yield node


def _link(node: ast.expr, text: str) -> Spec:
    words, whole = [node], node
    while isinstance(words[0], ast.BinOp) and isinstance(
        words[0].op, ast.Sub
    ):  # Python parses local-sgd(4) as a difference
        words[:1] = [words[0].left, words[0].right]
    *before, node = words
    names = [each.id for each in before if isinstance(each, ast.Name)]
    if isinstance(node, ast.Name) and len(names) == len(before):
        return Spec("-".join([*names, node.id]))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(names) == len(before)):
        raise SpecError(f"in spec {text!r}: {_shown(whole, text)!r} is not name or name(arguments); {FORM}")
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in kwargs:
            raise SpecError(f"in spec {text!r}: each argument is written key=value, once")
        kwargs[keyword.arg] = _literal(keyword.value, text)
    return Spec("-".join([*names, node.func.id]), tuple(_literal(a, text) for a in node.args), kwargs)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        value = ast.literal_eval(node)
        if not any(
            isinstance(part, (ast.Call, ast.Set))
            or (isinstance(part, ast.Constant) and isinstance(part.value, (bytes, type(...))))
            for part in ast.walk(node)
        ):
            repr(value)  # raises a ValueError if a number has more digits than Python prints
            return value
        raise ValueError
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise SpecError(
            f"in spec {text!r}: {_shown(node, text)!r} is not a literal; specs hold numbers, strings, None, "
            "True, False, lists, tuples and dicts, and are never evaluated"
        ) from None


def _shown(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or text


def nearest(name: str, known: Sequence[str], other_names: Mapping[str, str] | None = None) -> str:
    """A phrase that suggests names for an unknown one.

    Case, hyphens and underscores do not count. `other_names` maps names that users may know from elsewhere to
    our specs, separated by ';', or to a sentence, which ends with a period. Its keys are in small letters, without
    hyphens and underscores.

    >>> nearest("rign", ["ring", "tree"])
    "did you mean 'ring'? available: 'ring', 'tree'"
    >>> nearest("Baidu-Ring", ["ring", "tree"], {"baiduring": "ring"})
    "did you mean 'ring'? available: 'ring', 'tree'"
    """
    available = f"available: {', '.join(map(repr, sorted(known)))}"
    plain, by_plain = _plain(name), {_plain(each): each for each in known}
    found = (other_names or {}).get(plain, by_plain.get(plain))
    if found is not None and found.endswith("."):
        return f"{found[:-1]}; {available}"
    close = (
        (found.split(";") if found is not None else [])
        or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        or [by_plain[each] for each in difflib.get_close_matches(plain, by_plain, n=3, cutoff=0.5)]
    )
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}{available}"


def _plain(name: str) -> str:
    """A name in small letters, without hyphens, underscores and spaces.

    >>> _plain("Local-SGD") == _plain("local_sgd")
    True
    """
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _call(name: str, signature: inspect.Signature) -> str:
    """The form of a spec: the names and defaults of its arguments, without types.

    >>> _call("ssp", inspect.signature(lambda slack=1, *, rule=None: None))
    'ssp(slack=1, rule=None)'
    """
    shown = []
    for each in signature.parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            shown.append("…")
        elif each.kind is each.VAR_KEYWORD:
            shown.append("key=value, …")
        elif each.default is each.empty:
            shown.append(f"{each.name}=…" if each.kind is each.KEYWORD_ONLY else each.name)
        else:
            shown.append(f"{each.name}={_written(each.default)}")
    return f"{name}({', '.join(shown)})" if shown else f"{name}, without arguments"


class Registry(Generic[T]):
    """Names, each with the function that builds its object.

    `other_names` maps names that users may know from elsewhere to ours; see `nearest`.

    >>> shapes = Registry[str]("shape", other_names={"quadrat": "square"})
    >>> shapes.add("square", lambda side: f"a square of {side}")
    >>> shapes.build("square(side=3)")
    'a square of 3'
    >>> shapes.build("Quadrat(3)")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: unknown shape 'Quadrat'; did you mean 'square'? available: 'square'
    """

    def __init__(self, kind: str, other_names: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._other_names = other_names or {}
        self._builders: dict[str, Callable[..., T]] = {}

    def add(self, name: str, builder: Callable[..., T]) -> None:
        """Make `name(arguments)` mean `builder(arguments)`."""
        if name in self._builders:
            raise SpecError(f"{self.kind} {name!r} is registered twice")
        self._builders[name] = builder

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._builders)

    def read(self, text: str) -> tuple[Spec, ...]:
        """Parse a text. The error for an invalid one lists the available names."""
        if not isinstance(text, str) or not text.strip():
            if isinstance(text, type):
                raise SpecError(f"the {self.kind} is the class {text.__name__}; write {text.__name__}()")
            what = "is empty" if isinstance(text, str) else f"is written as text, not as {type(text).__name__}"
            raise SpecError(f"the {self.kind} {what}; available: {', '.join(map(repr, self.names()))}")
        try:
            return parse(text)
        except SpecError:
            name = text.partition("(")[0].strip()
            known = _plain(name) in {*self._other_names, *map(_plain, self.names())}
            if known and name not in self._builders:  # such as 1bit, which is no name in Python
                raise SpecError(self._unknown(name)) from None
            raise

    def build(self, text: str) -> T:
        """Build the one object that `text` describes."""
        links = self.read(text)
        if len(links) != 1:
            raise SpecError(f"a {self.kind} is one name, not a chain: {text!r}")
        return self.make(links[0])

    def make(self, spec: Spec) -> T:
        """Build the object that one parsed link describes."""
        builder = self._builders.get(spec.name)
        if builder is None:
            raise SpecError(self._unknown(spec.name))
        signature = inspect.signature(builder)
        form = f"write {_call(spec.name, signature)}"
        try:
            signature.bind(*spec.args, **spec.kwargs)
        except TypeError as error:
            reason = _unknown_argument(spec, signature) or error
            raise SpecError(f"{self.kind} {str(spec)!r}: {reason}; {form}") from None
        try:
            return builder(*spec.args, **spec.kwargs)
        except TypeError as error:  # a value of another type than the builder expects
            raise SpecError(f"{self.kind} {str(spec)!r}: {error}; {form}") from error

    def _unknown(self, name: str) -> str:
        return f"unknown {self.kind} {name!r}; {nearest(name, self.names(), self._other_names)}"


def _unknown_argument(spec: Spec, signature: inspect.Signature) -> str:
    """A phrase about the first argument that the signature does not have; empty if it has all."""
    takes = signature.parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return ""
    unknown = next((key for key in spec.kwargs if key not in takes), None)
    if unknown is None:
        return ""
    close = difflib.get_close_matches(unknown, takes, n=1, cutoff=0.5)
    return f"it has no argument {unknown!r}" + (f" (did you mean {close[0]!r}?)" if close else "")
