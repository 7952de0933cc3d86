"""Spec strings: what they say, what they refuse, and that nothing in them ever runs."""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncline.bench.baselines import baseline_names, build_baseline
from syncline.codecs import OTHER_NAMES as CODECS_OTHER_NAMES
from syncline.codecs import build_codec, codec_names
from syncline.collectives.schedules import OTHER_NAMES as COLLECTIVES_OTHER_NAMES
from syncline.collectives.schedules import build
from syncline.errors import SpecError, SynclineError
from syncline.server.rules import RULES, build_rule
from syncline.specs import MAX_SPEC_CHARS, Registry, Spec, nearest, parse
from syncline.strategies import OTHER_NAMES as STRATEGIES_OTHER_NAMES
from syncline.strategies import build_strategy, strategy_names
from syncline.training.parallel_spec import read_parallel
from syncline.workloads import OTHER_NAMES as WORKLOADS_OTHER_NAMES
from syncline.workloads import build as build_workload

repeatable = settings(derandomize=True, deadline=None)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
literals: st.SearchStrategy[Any] = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(atoms, inner, max_size=3),
    max_leaves=6,
)
specs = st.builds(
    Spec, names, st.lists(literals, max_size=3).map(tuple), st.dictionaries(names, literals, max_size=3)
).filter(lambda spec: len(str(spec)) < MAX_SPEC_CHARS // 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ring", Spec("ring")),
        ("ring()", Spec("ring")),
        ("  topk( 0.01 ,bucket = 512 )\n", Spec("topk", (0.01,), {"bucket": 512})),
        ("x(-1, +2.5, 1e-3, 0x10)", Spec("x", (-1, 2.5, 0.001, 16))),
        ("x('a', \"b|c\")", Spec("x", ("a", "b|c"))),
        ("x(None, True, False)", Spec("x", (None, True, False))),
        ("x([1, (2,), ()], {'k': [3]})", Spec("x", ([1, (2,), ()], {"k": [3]}))),
    ],
)
def test_grammar(text: str, expected: Spec) -> None:
    """A name, brackets or none, literals by place and by key."""
    assert parse(text) == (expected,)


def test_chains() -> None:
    """Links are read from left to right, however they are grouped."""
    three = (Spec("a"), Spec("b", (1,)), Spec("c", (), {"k": "|"}))
    assert parse("a|b(1)|c(k='|')") == three
    assert parse("a | (b(1) | c(k='|'))") == three
    assert parse("(a)") == (Spec("a"),)


@repeatable
@given(specs)
def test_a_spec_comes_back_from_its_text(spec: Spec) -> None:
    """Spec -> str -> parse -> the same spec."""
    assert parse(str(spec)) == (spec,)


@repeatable
@given(st.lists(specs, min_size=1, max_size=4))
def test_a_chain_comes_back_from_its_text(chain: list[Spec]) -> None:
    """Links joined by bars are read as the same links."""
    assert parse("|".join(map(str, chain))) == tuple(chain)


def test_infinity_comes_back_from_its_text() -> None:
    """What can be read can be written and read again, infinity included."""
    read = parse("ssp(slack=1e999)")
    assert read == (Spec("ssp", (), {"slack": float("inf")}),)
    assert parse(str(read[0])) == read


def test_repr_shows_the_fields() -> None:
    """The repr of a spec can be read by Python itself."""
    assert repr(Spec("x", (1,), {"k": 2})) == "Spec(name='x', args=(1,), kwargs={'k': 2})"


CODE = [
    "x(open('{path}', 'w'))",
    "x(k=open('{path}', 'w'))",
    "x([open('{path}', 'w')])",
    "x({{'k': open('{path}', 'w')}})",
    "x(__import__('pathlib').Path('{path}').touch())",
    "x(().__class__.__base__.__subclasses__())",
    "x(lambda: open('{path}', 'w'))",
    "x([open('{path}', 'w') for _ in (1,)])",
    "x({{open('{path}', 'w') for _ in (1,)}})",
    "x({{1: open('{path}', 'w') for _ in (1,)}})",
    "x(open('{path}', 'w') for _ in (1,))",
    'x(f\'{{open("{path}", "w")}}\')',
    "x((y := open('{path}', 'w')))",
    "x(1 if open('{path}', 'w') else 2)",
    "x(open('{path}', 'w') and 1)",
    "x(*[open('{path}', 'w')])",
    "x(**{{'k': open('{path}', 'w')}})",
    "x({{**open('{path}', 'w')}})",
    "x(1)(open('{path}', 'w'))",
    "x.y(1)",
    "x[1]",
    "x[open('{path}', 'w')]",
    "open('{path}', 'w').close()",
    "(lambda: open('{path}', 'w'))()",
    "[open('{path}', 'w')]",
    "a|open('{path}', 'w').close()",
    "a and b",
    "a + b",
    "a, b",
    "a; b",
    "a = 1",
    "import os",
    "not a",
    "await a",
    "yield",
    "'ring'",
    "1",
    "None",
    "x(y)",
    "x(y=z)",
    "x(9**9**9)",
    "x('a' * 10**9)",
    "x(1 << 99)",
    "x(1 == 1)",
    "x(1 is 1)",
    "x([1][0])",
    "x(f'a')",
    "x({{[]: 1}})",
    "x(k=1, k=2)",
    "x(k=1, 2)",
    "a-b()-c",
    "a-1",
    "a(1)-b",
    "-a",
]


@pytest.mark.parametrize("template", CODE)
def test_code_is_refused_and_not_run(template: str, tmp_path: Path) -> None:
    """Anything but literals is a SpecError that shows the text, and leaves no trace."""
    path = tmp_path / "ran"
    text = template.format(path=path)
    with pytest.raises(SpecError, match="spec") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert not path.exists()


@pytest.mark.parametrize("text", ["x(set())", "x({1, 2})", "x(b'a')", "x(...)"])
def test_literals_beyond_the_grammar_are_refused(text: str) -> None:
    """Calls, sets, bytes and Ellipsis are not in the grammar, though `ast.literal_eval` reads them."""
    with pytest.raises(SpecError, match="not a literal"):
        parse(text)


def test_a_builtin_is_only_a_name(tmp_path: Path) -> None:
    """`open(...)` at the top is a spec of that name: read, not run, and unknown to every registry."""
    path = tmp_path / "ran"
    text = f"open({str(path)!r}, 'w')"
    assert parse(text) == (Spec("open", (str(path), "w")),)
    with pytest.raises(SpecError, match="unknown shape 'open'"):
        shapes().build(text)
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", " \n", "|", "a|", "|a", "a||b", "a(", "a)", "a b", "a\n b", "1a", "a(,)", "lambda"]
)
def test_text_that_is_no_spec(text: str) -> None:
    """Broken text is refused with the form to write."""
    with pytest.raises(SpecError, match=r"write name, name\(argument, key=value\)"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("(" * 5000, id="brackets, too many characters"),
        pytest.param("(" * 4000, id="brackets"),
        pytest.param("x(" + "[" * 2000 + "]" * 2000 + ")", id="lists"),
        pytest.param("x(" + "-" * 4000 + "1)", id="minuses, very many"),
        pytest.param("x(" + "-" * 900 + "1)", id="minuses"),
        pytest.param("x(" + "not " * 900 + "1)", id="nots"),
        pytest.param("a" + ".b" * 900, id="attributes"),
        pytest.param("a" + "()" * 900, id="calls"),
        pytest.param("x(a" + "+a" * 900 + ")", id="sums"),
        pytest.param("x(a+0x" + "f" * 4000 + ")", id="a number too long to print, in a sum"),
        pytest.param("a" * (MAX_SPEC_CHARS + 1), id="too many characters"),
        pytest.param("a\0", id="NUL"),
        pytest.param("x('\0')", id="NUL in a string"),
        pytest.param("\ud800", id="half a character"),
        pytest.param("x('\ud800')", id="half a character in a string"),
    ],
)
def test_hostile_text(text: str) -> None:
    """Deep, long and malformed text is a SpecError like any other."""
    with pytest.raises(SpecError):
        parse(text)


def test_a_long_chain() -> None:
    """The longest chain that fits is read, or refused as a SpecError; the interpreter's stack is no limit."""
    text = "|".join("a" * (MAX_SPEC_CHARS // 2))
    assert len(text) <= MAX_SPEC_CHARS
    try:
        links = parse(text)
    except SpecError:
        return
    assert links == (Spec("a"),) * (MAX_SPEC_CHARS // 2)


def test_the_longest_text() -> None:
    """A text as long as allowed is read; one character more is not, and the message says both numbers."""
    assert parse("a" * MAX_SPEC_CHARS) == (Spec("a" * MAX_SPEC_CHARS),)
    with pytest.raises(SpecError, match=rf"{MAX_SPEC_CHARS + 1} characters.*at most {MAX_SPEC_CHARS}"):
        parse("a" * (MAX_SPEC_CHARS + 1))


def test_a_number_too_long_to_print() -> None:
    """A number of more digits than Python prints is refused, or can be printed like any other spec."""
    try:
        links = parse("x(0x" + "f" * 4000 + ")")
    except SpecError:
        return
    assert parse(str(links[0])) == links


@pytest.mark.parametrize("thing", [None, 3, b"ring", ["ring"], Spec("ring"), object])
def test_not_a_string(thing: Any) -> None:
    """Only text is parsed; the message names the type that came instead."""
    with pytest.raises(SpecError, match=rf"not {type(thing).__name__}$"):
        parse(thing)


@settings(repeatable, max_examples=400)
@given(
    st.text(max_size=40)
    | st.text(alphabet="ab_()[]{}|,=.'\"\\+-*:0123e#\n \0fjNoneTrue", max_size=40)
    | st.lists(st.sampled_from(["x", "(", ")", "|", ",", "=", "'", "1", "[", "]", "{", "}", ":", "-", "."])).map(
        "".join
    )
)
@example("x(1e999j)")
@example("'\\d'")
@example("a-b(1)|c")
@example("x(0x1for y in z)")
def test_any_text_is_specs_or_a_spec_error(text: str) -> None:
    """Whatever the text, `parse` gives links or a SpecError, and nothing else."""
    try:
        links = parse(text)
    except SpecError:
        return
    assert links
    for link in links:
        assert isinstance(link, Spec)
        assert all(part.isidentifier() for part in link.name.split("-"))


def shapes() -> Registry[str]:
    registry = Registry[str]("shape")
    registry.add("square", lambda side: f"a square of {side}")
    registry.add("circle", lambda radius, *, filled=False: f"a circle of {radius}, {filled}")
    return registry


def test_registry_builds() -> None:
    """A name with arguments becomes what its builder gives."""
    assert shapes().names() == ["circle", "square"]
    assert shapes().build("square(3)") == "a square of 3"
    assert shapes().build("circle(radius=2, filled=True)") == "a circle of 2, True"
    assert shapes().make(Spec("circle", (1,))) == "a circle of 1, False"


def test_unknown_names_show_the_nearest() -> None:
    """An unknown name is answered with the closest one and all that there are."""
    with pytest.raises(SpecError) as caught:
        shapes().build("sqare(3)")
    assert str(caught.value) == "unknown shape 'sqare'; did you mean 'square'? available: 'circle', 'square'"
    with pytest.raises(SpecError) as caught:
        shapes().build("zzz")
    assert str(caught.value) == "unknown shape 'zzz'; available: 'circle', 'square'"


def test_nearest_names_several() -> None:
    """Up to three close names are offered, the closest first."""
    assert nearest("ringg", ["tree", "rin", "ring"]) == "did you mean 'ring' or 'rin'? available: 'rin', 'ring', 'tree'"
    assert nearest("tre", ["ring", "tree"]) == "did you mean 'tree'? available: 'ring', 'tree'"


@pytest.mark.parametrize("text", ["circle", "circle(1, 2)", "circle(1, radius=1)", "circle(1, colour='red')"])
def test_wrong_arguments_show_the_signature(text: str) -> None:
    """Missing, extra, double and unknown arguments: the message has the spec, the reason and what to write."""
    with pytest.raises(SpecError) as caught:
        shapes().build(text)
    assert str(caught.value).startswith(f"shape {text!r}: ")
    assert str(caught.value).endswith("write circle(radius, filled=False)")


def test_signature_shows_defaults_without_types() -> None:
    with pytest.raises(SpecError) as caught:
        build_strategy("ssp(slak=2)")
    told = str(caught.value)
    assert told.endswith("(did you mean 'slack'?); write ssp(slack=1, rule=None, filters=None, factors=False)")
    assert "'int'" not in told
    assert "->" not in told


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("SSP", "'ssp'"),
        ("ddp", "'allreduce'"),
        ("all-reduce", "'allreduce'"),
        ("local-sgd", "'local'"),
        ("local-sgd(4)", "'local'"),
        ("local sgd", "'local'"),
        ("Post-Local-SGD", "'local(after=100)'"),
        ("AD-PSGD", "'gossip(pairwise=True)'"),
        ("parameter_server", "'bsp' or 'ssp' or 'downpour'"),
    ],
)
def test_names_of_the_field_lead_to_ours(spec: str, meant: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"did you mean {meant}?")):
        build_strategy(spec)


def test_sharded_models_are_refused_in_words() -> None:
    with pytest.raises(SpecError, match="unknown strategy 'fsdp'; no strategy splits a model"):
        build_strategy("fsdp")


@pytest.mark.parametrize("name", ["tensor(2)", "Tensor-Parallel", "experts(2)", "weird_trick", "spatial('0', 2)"])
def test_divided_layers_are_no_strategy(name: str) -> None:
    with pytest.raises(SpecError, match="not divided by a strategy: write parallel="):
        build_strategy(name)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("Tensor(2)", "tensor"), ("Pipeline(2)", "pipeline"), ("Experts(2)", "experts"), ("Weird-Trick", "weird_trick")],
)
def test_names_of_divisions_lead_to_ours(text: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{meant}'"):
        read_parallel(text)


@pytest.mark.parametrize(
    ("spec", "meant"), [("fp16", "cast('fp16')"), ("1bit", "onebit"), ("DGC", "topk(0.001, momentum=0.9)")]
)
def test_codecs_of_the_field_lead_to_ours(spec: str, meant: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"did you mean {meant!r}?")):
        build_codec(spec)


@pytest.mark.parametrize(
    ("meant", "make"),
    [
        (STRATEGIES_OTHER_NAMES, build_strategy),
        (CODECS_OTHER_NAMES, build_codec),
        (COLLECTIVES_OTHER_NAMES, lambda spec: build("allreduce", spec)),
        (WORKLOADS_OTHER_NAMES, build_workload),
    ],
)
def test_every_suggestion_can_be_built(meant: Mapping[str, str], make: Callable[[str], object]) -> None:
    for name, suggestion in meant.items():
        assert name == name.lower().replace("_", "").replace("-", "")
        for spec in () if suggestion.endswith(".") else suggestion.split(";"):
            make(spec)


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("make", [build_strategy, build_codec, build_rule, lambda spec: build("allreduce", spec)])
def test_empty_spec_lists_the_names(make: Callable[[str], object], empty: str) -> None:
    with pytest.raises(SpecError, match="is empty; available: '"):
        make(empty)


def test_spec_of_another_type_is_refused_in_words() -> None:
    with pytest.raises(SpecError, match="the strategy is written as text, not as NoneType; available: 'adacomm'"):
        build_strategy(None)  # type: ignore[arg-type]


WRONG_VALUES: list[Any] = ["x", "", None, [], {}, (1, 2), -1, 0, math.inf, True, 10**30, 2.5, 1j]


@pytest.mark.parametrize(
    ("names", "make"),
    [
        (strategy_names(), build_strategy),
        (codec_names(), build_codec),
        (RULES.names(), build_rule),
        (baseline_names(), build_baseline),
    ],
)
def test_no_wrong_value_gives_a_bare_error(names: list[str], make: Callable[[str], object]) -> None:
    """Each argument of each spec with values of every type: built, or refused by an error of ours."""
    for name in names:
        with pytest.raises(SpecError) as caught:
            make(f"{name}(1, 2, 3, 4, 5, 6, 7, 8, 9)")
        takes = re.findall(r"(\w+)(?=[=,)])", str(caught.value).split(f"write {name}")[1])
        for key, value in itertools.product(takes, WRONG_VALUES):
            with suppress(SynclineError):
                make(str(Spec(name, (), {key: value})))


def test_a_chain_is_not_one_object() -> None:
    """`build` wants one link."""
    with pytest.raises(SpecError, match=r"a shape is one name, not a chain: 'square\(1\)\|square\(2\)'"):
        shapes().build("square(1)|square(2)")


def test_a_name_is_registered_once() -> None:
    """A second builder under a name is refused, and the first stays."""
    registry = shapes()
    with pytest.raises(SpecError, match="shape 'square' is registered twice"):
        registry.add("square", lambda: "another")
    assert registry.build("square(1)") == "a square of 1"
