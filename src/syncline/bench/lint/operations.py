"""Rule 7: no operations a second, unless it is said of which kind and by which formula."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syncline.bench.lint.base import Case, Note
from syncline.bench.race.reading import RanRun

__all__ = ["check", "check_run", "looked"]

UNIT = re.compile(
    r"(?:^|[^a-z])[kmgtpe]?(?:fl)?ops?(?:/s|ps\b|[_ ](?:per|a)[_ ]s)|(?:^|[^a-z])[kmgtpe]?flops?(?![a-z])|"
    r"(?:^|[^a-z])mfu(?![a-z])",
    re.IGNORECASE,
)
"""flops, TFLOP/s, gop/s, ops_per_second, MFU: in a key or in a sentence."""
KIND = re.compile(r"(?:float|bfloat|fp|bf|int|uint)\d+|double|half", re.IGNORECASE)
SAY = "leave it out, or give the type of its operands and the formula that counted them beside it (dtype, formula)"


def looked(case: Case) -> str:
    """What is there."""
    reports = [path.name for path in _reports(case.race.path)]
    return f"keys of {len(case.race.runs)} logs and configurations{''.join(f', {name}' for name in reports)}"


def check(case: Case) -> Iterator[Note]:
    """Every key of logs and configurations, and all that the report says."""
    for run in case.race.runs:
        yield from check_run(run)
    for path in _reports(case.race.path):
        if path.suffix == ".json":
            yield from _figures(_read(path), path.name)
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            for sentence in re.split(r"[\n.;]\s", html.unescape(re.sub(r"<[^>]*>", " ", _visible(text)))):
                if re.search(r"\d", sentence) and _bare(sentence):
                    yield Note(f"{path.name} says {' '.join(sentence.split())[:120]!r}", SAY)
                    break


def check_run(run: RanRun) -> Iterator[Note]:
    """One run's log and configuration."""
    seen: set[str | Note] = set()
    for event in run.events:
        key = str(event.get("key"))
        metadata = event.get("metadata")
        beside = metadata if isinstance(metadata, dict) else {}
        if UNIT.search(key) and key not in seen and not _explained(beside):
            seen.add(key)
            yield Note(f"{run.folder}/log.jsonl tells {key} = {event.get('value')} and not of what", SAY)
        elif isinstance(event.get("value"), dict):
            for note in _figures(event["value"], f"{run.folder}/log.jsonl, {key}"):
                if note not in seen:
                    seen.add(note)
                    yield note
    yield from _figures(run.config, f"{run.folder}/config.json")


def _reports(folder: Path) -> list[Path]:
    return [folder / name for name in ("report.json", "report.html", "runs.csv") if (folder / name).exists()]


def _figures(found: Any, where: str) -> Iterator[Note]:
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "findings":
                continue  # the lint's own, of an earlier look
            if UNIT.search(str(key)) and not _explained(found) and not (isinstance(value, dict) and _explained(value)):
                yield Note(f"{where} tells {key} = {json.dumps(value)[:60]} and not of what", SAY)
            else:
                yield from _figures(value, where)
    elif isinstance(found, list):
        for value in found:
            yield from _figures(value, where)
    elif isinstance(found, str) and re.search(r"\d", found) and _bare(found):
        yield Note(f"{where} says {found[:120]!r}", SAY)


def _bare(sentence: str) -> bool:
    return bool(UNIT.search(sentence)) and not (KIND.search(sentence) and "=" in sentence)


def _explained(beside: dict[str, Any]) -> bool:
    return bool(KIND.search(str(beside.get("dtype", "")))) and bool(str(beside.get("formula") or "").strip())


def _visible(text: str) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL | re.IGNORECASE)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
