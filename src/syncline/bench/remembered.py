"""Answers that take torch to find, kept in the user's cache: the next process reads them and need not import it.

They hold for the same code and packages. With any other version the whole file is written anew.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from syncline.environment.cache import cache_folder
from syncline.training.system import code_digest

__all__ = ["remembered"]

logger = logging.getLogger("syncline")

P = ParamSpec("P")
T = TypeVar("T")

FILE = "answers.json"
PACKAGES = ("torch", "numpy", "scikit-learn")
MAX_ANSWERS = 4096


def remembered(question: Callable[P, T]) -> Callable[P, T]:
    """Keep the answers of a function of texts, which depends on nothing else.

    An answer is what JSON can hold. None and exceptions are not kept: what is missing now may be installed later.
    """

    @functools.wraps(question)
    def ask(*words: P.args, **named: P.kwargs) -> T:
        key = json.dumps([question.__module__, question.__qualname__, words, named], sort_keys=True)
        path = cache_folder() / FILE
        kept = _read(path)
        if key in kept:
            return kept[key]  # type: ignore[no-any-return]
        answer: T = json.loads(json.dumps(question(*words, **named)))  # the same types as when it is read
        if answer is not None:
            _write(path, {**(kept if len(kept) < MAX_ANSWERS else {}), key: answer})
        return answer

    return ask


@functools.cache
def _versions() -> list[str]:
    """What the answers depend on."""
    found = [code_digest(), sys.version, sys.prefix]
    for package in PACKAGES:
        try:
            found.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            found.append("")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        answers = document["answers"] if document["versions"] == _versions() else {}
        return answers if isinstance(answers, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        logger.info("%s cannot be read and is made anew: %s", path, error)
        return {}


def _write(path: Path, answers: dict[str, Any]) -> None:
    """Whole or not at all. Where it cannot be written, the next process asks again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{FILE}-", delete=False) as file:
            json.dump({"versions": _versions(), "answers": answers}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("%s cannot be written: %s", path, error)
