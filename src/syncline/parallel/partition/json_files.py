"""JSON files that a person may edit: each value is checked, and an error names the file, the key and the value."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from syncline.errors import SpecError
from syncline.specs import nearest

Choice = TypeVar("Choice", bound=str)

__all__ = ["JsonFields", "read_json_fields", "write_json_text"]

MAX_FILE_BYTES = 64 << 20
"""A profile of 100,000 layers takes about 20 MB."""
MAX_SHOWN_CHARACTERS = 80
"""Characters of a wrong value that an error message shows."""


def read_json_fields(path: str | Path, *, kind: str, version: int) -> JsonFields:
    """Read an object whose keys `format` and `version` say what it is.

    Raises:
        SpecError: if there is no such file, or it holds anything else.
    """
    try:
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise SpecError(f"{path} has {size} bytes, more than a {kind} can have ({MAX_FILE_BYTES})")
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror or error}): name a file with a {kind}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path} is not a {kind}: it cannot be read as JSON ({error})") from None
    fields = JsonFields(document, str(path))
    if fields.text("format") != kind:
        raise SpecError(f"{path}: 'format' is {_shown(document['format'])}; a {kind} has {kind!r} there")
    if fields.whole("version", least=1) != version:
        raise SpecError(f"{path}: 'version' is {document['version']}; this release reads version {version}")
    return fields


def write_json_text(path: str | Path, text: str) -> None:
    """Write a file by a rename, so that a reader sees the old or the new content."""
    aside = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise SpecError(f"{path} cannot be written ({error.strerror or error}): name another file") from None


class JsonFields:
    """The keys of one JSON object, taken one by one. `finish` refuses those that nobody has taken.

    >>> fields = JsonFields({"replicas": 0}, "plan.json")
    >>> fields.whole("replicas", least=1)
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: plan.json: 'replicas' is 0; it must be a whole number, at least 1
    """

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise SpecError(f"{where} is {_shown(document)}; it must be an object with keys: {{…}}")
        self._document: Mapping[str, Any] = document
        self._where = where
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._document

    def text(self, key: str, default: str | None = None) -> str:
        """A text. Without a default it must be there and must not be empty."""
        return self._text(self._take(key, default), f"{self._where}: {key!r}", empty=default is not None)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self._text(each, where, empty=False) for where, each in self._list(key))

    def whole(self, key: str, *, least: int) -> int:
        """A whole number."""
        return self._whole(self._take(key), f"{self._where}: {key!r}", least)

    def wholes(self, key: str, *, least: int) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(self._whole(each, where, least) for where, each in self._list(key))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, at least 0."""
        return self._number(self._take(key, default), f"{self._where}: {key!r}")

    def choice(self, key: str, values: tuple[Choice, ...]) -> Choice:
        """One of some texts."""
        value = self._take(key)
        if value not in values:
            raise SpecError(f"{self._where}: {key!r} is {_shown(value)}; it must be {' or '.join(map(repr, values))}")
        return values[values.index(value)]

    def inners(self, key: str) -> list[JsonFields]:
        """A list of objects."""
        return [JsonFields(each, where) for where, each in self._list(key)]

    def inner(self, key: str) -> JsonFields:
        """An object."""
        return JsonFields(self._take(key), f"{self._where}: {key!r}")

    def pair(self, key: str) -> tuple[float, float]:
        """A list of two finite numbers, at least 0."""
        numbers = [self._number(each, where) for where, each in self._list(key)]
        if len(numbers) != 2:
            raise SpecError(f"{self._where}: {key!r} has {len(numbers)} numbers; it must have two")
        return numbers[0], numbers[1]

    def lists(self, key: str) -> tuple[tuple[str, ...], ...]:
        """A list of lists of texts."""
        found = []
        for where, each in self._list(key):
            if not isinstance(each, list):
                raise SpecError(f"{where} is {_shown(each)}; it must be a list of texts")
            found.append(tuple(self._text(item, where, empty=False) for item in each))
        return tuple(found)

    def finish(self) -> None:
        """Raise for a key that nobody has taken."""
        unknown = next((key for key in self._document if key not in self._taken), None)
        if unknown is not None:
            raise SpecError(f"{self._where}: unknown key {_shown(unknown)}; {nearest(unknown, sorted(self._taken))}")

    def _take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        if key not in self._document and default is None:
            has = ", ".join(map(repr, list(self._document)[:10])) or "none"
            raise SpecError(f"{self._where}: the key {key!r} is missing; the keys there are: {has}")
        return self._document.get(key, default)

    def _list(self, key: str) -> Iterator[tuple[str, Any]]:
        value = self._take(key)
        if not isinstance(value, list):
            raise SpecError(f"{self._where}: {key!r} is {_shown(value)}; it must be a list")
        return ((f"{self._where}: {key!r}[{place}]", each) for place, each in enumerate(value))

    @staticmethod
    def _number(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise SpecError(f"{where} is {_shown(value)}; it must be a number, at least 0")
        return float(value)

    @staticmethod
    def _text(value: Any, where: str, *, empty: bool) -> str:
        if not isinstance(value, str) or not (value or empty):
            raise SpecError(f"{where} is {_shown(value)}; it must be a text{'' if empty else ', not empty'}")
        return value

    @staticmethod
    def _whole(value: Any, where: str, least: int) -> int:
        if type(value) is not int or value < least:
            raise SpecError(f"{where} is {_shown(value)}; it must be a whole number, at least {least}")
        return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {_shown(twice)} twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


def _shown(value: Any) -> str:
    """A value of a JSON document as an error message shows it."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if type(value) is int and value.bit_length() > MAX_SHOWN_CHARACTERS:
        return f"a whole number of {value.bit_length()} bits"
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
