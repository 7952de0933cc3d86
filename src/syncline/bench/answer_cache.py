"""Caches results that need torch, so that the next process does not import it.

The results are in one file of the user's cache folder. They are valid for one version of Syncline's code, of Python and
of the packages in `PACKAGES`. With any other version the file is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from syncline.environment.base import cache_folder
from syncline.training.system import code_digest

__all__ = ["cache_answers"]

logger = logging.getLogger("syncline")

P = ParamSpec("P")
T = TypeVar("T")

FILE = "answers.json"
PACKAGES = ("torch", "numpy", "scikit-learn")
MAX_ANSWERS = 4096
"""If the file has this many answers, the next one replaces all of them."""


def cache_answers(question: Callable[P, T]) -> Callable[P, T]:
    """Decorator: cache the results of a function that depends only on its arguments, which are strings.

    A result must be a JSON value. None and exceptions are not cached: what is missing now may be installed later.
    """

    @functools.wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        key = json.dumps([question.__module__, question.__qualname__, args, kwargs], sort_keys=True)
        path = cache_folder() / FILE
        answers = _read(path)
        if key in answers:
            return answers[key]  # type: ignore[no-any-return]
        answer: T = json.loads(json.dumps(question(*args, **kwargs)))  # the same types as if it was read
        if answer is not None:
            _write(path, {**(answers if len(answers) < MAX_ANSWERS else {}), key: answer})
        return answer

    return ask


@functools.cache
def _versions() -> list[str]:
    """The versions that the answers depend on."""
    versions = [code_digest(), sys.version, sys.prefix]
    for package in PACKAGES:
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            versions.append("")
    return versions


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        answers = document["answers"] if document["versions"] == _versions() else {}
        return answers if isinstance(answers, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        logger.info("%s cannot be read and will be replaced: %s", path, error)
        return {}


def _write(path: Path, answers: dict[str, Any]) -> None:
    """Replace the file atomically. If it cannot be written, the next process computes the answers again."""
    part = path.with_name(f".{FILE}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"versions": _versions(), "answers": answers}))
        os.replace(part, path)
    except OSError as error:
        logger.info("%s cannot be written: %s", path, error)
        with contextlib.suppress(OSError):
            part.unlink()
