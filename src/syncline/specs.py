"""Spec strings: ``"topk(0.01)|quantize(4)"`` <-> objects.

One grammar for the command line, configuration and logs::

    chain = spec ("|" spec)*
    spec  = name | name "(" [argument ("," argument)*] ")"
    argument = literal | key "=" literal

Literals are numbers, strings, None, True, False, and lists, tuples and dicts of them. The text is parsed with
`ast` and never evaluated: a call, an attribute or an operator inside an argument is a `SpecError`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from syncline.errors import SpecError

__all__ = ["Registry", "Spec", "nearest", "parse"]

T = TypeVar("T")

LONGEST = 4096
"""Characters: a longer text is not a spec, and is refused before `ast` sees it."""


@dataclass(frozen=True)
class Spec:
    """One link of a chain: a name and its literal arguments. `str()` gives the text back.

    >>> str(Spec("topk", (0.01,), {"bucket": 512}))
    'topk(0.01, bucket=512)'
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = [_written(a) for a in self.args] + [f"{k}={_written(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name


def parse(text: str) -> tuple[Spec, ...]:
    """Read a spec string into its links.

    >>> parse("topk(0.01)|quantize(4)")
    (Spec(name='topk', args=(0.01,), kwargs={}), Spec(name='quantize', args=(4,), kwargs={}))
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec is a string such as 'ring' or 'topk(0.01)', not {type(text).__name__}")
    if len(text) > LONGEST:
        raise SpecError(f"a spec of {len(text)} characters is longer than any spec (at most {LONGEST})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's opinion of odd literals
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"cannot read spec {text!r}: {error}; write name(argument, key=value)|name") from None
    return tuple(_link(node, text) for node in _links(tree))


def _written(value: Any) -> str:
    """The literal that reads back as `value`; Python itself writes infinity as a name."""
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_written, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(k)}: {_written(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _links(node: ast.expr) -> Iterator[ast.expr]:
    waiting = [node]
    while waiting:  # no recursion: a chain may be longer than the stack is deep
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            waiting += [node.right, node.left]
        else:
            yield node


def _link(node: ast.expr, text: str) -> Spec:
    if isinstance(node, ast.Name):
        return Spec(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise SpecError(f"in spec {text!r}: {_shown(node, text)!r} is not name or name(arguments)")
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in kwargs:
            raise SpecError(f"in spec {text!r}: each argument is written key=value, once")
        kwargs[keyword.arg] = _literal(keyword.value, text)
    return Spec(node.func.id, tuple(_literal(a, text) for a in node.args), kwargs)


def _literal(node: ast.expr, text: str) -> Any:
    try:
        value = ast.literal_eval(node)
        if not any(
            isinstance(part, (ast.Call, ast.Set))
            or (isinstance(part, ast.Constant) and isinstance(part.value, (bytes, type(...))))
            for part in ast.walk(node)
        ):
            repr(value)  # a ValueError where a number has more digits than Python prints
            return value
        raise ValueError
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise SpecError(
            f"in spec {text!r}: {_shown(node, text)!r} is not a literal; specs hold numbers, strings, None, "
            "True, False, lists, tuples and dicts, and are never evaluated"
        ) from None


def _shown(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text.strip(), node) or text


def nearest(name: str, known: list[str]) -> str:
    """A phrase that names what `name` may have been meant to be.

    >>> nearest("rign", ["ring", "tree"])
    "did you mean 'ring'? available: 'ring', 'tree'"
    """
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}available: {', '.join(map(repr, sorted(known)))}"


class Registry(Generic[T]):
    """Names and the callables that build what they stand for.

    >>> shapes = Registry[str]("shape")
    >>> shapes.add("square", lambda side: f"a square of {side}")
    >>> shapes.build("square(side=3)")
    'a square of 3'
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._builders: dict[str, Callable[..., T]] = {}

    def add(self, name: str, builder: Callable[..., T]) -> None:
        """Make `name(arguments)` mean `builder(arguments)`."""
        if name in self._builders:
            raise SpecError(f"{self.kind} {name!r} is registered twice")
        self._builders[name] = builder

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._builders)

    def build(self, text: str) -> T:
        """Build the one object that `text` describes."""
        links = parse(text)
        if len(links) != 1:
            raise SpecError(f"a {self.kind} is one name, not a chain: {text!r}")
        return self.make(links[0])

    def make(self, spec: Spec) -> T:
        """Build the object that one parsed link describes."""
        builder = self._builders.get(spec.name)
        if builder is None:
            raise SpecError(f"unknown {self.kind} {spec.name!r}; {nearest(spec.name, self.names())}")
        signature = inspect.signature(builder)
        try:
            signature.bind(*spec.args, **spec.kwargs)
        except TypeError as error:
            raise SpecError(f"{self.kind} {str(spec)!r}: {error}; write {spec.name}{signature}") from None
        return builder(*spec.args, **spec.kwargs)
