"""The entries of a race: every family of strategies, a few codecs, and baselines from other libraries.

Strategies come from their presets (`Strategy.presets`), codecs from `CODECS`, baselines from the registry of
baselines. `--entries` names other entries in a TOML file::

    [[entry]]
    name = "top one percent"
    codec = "topk(0.01)|quantize(4)"
    learning_rate = 0.05

    [[entry]]
    strategy = "ddp(hook='fp16')"

    [[entry]]
    strategy = "allreduce"
    engine = "mpi"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from syncline.bench.baselines import (
    DEFAULT_BASELINES,
    RUN_ONLY_IF_NAMED,
    availability,
    baseline_names,
    build_baseline,
)
from syncline.bench.race.plan import RaceEntry
from syncline.codecs import build_codec, check_optimizer_momentum
from syncline.errors import IncompatibleError, SpecError, SynclineError, UnsupportedError
from syncline.launch.mpi import why_no_mpi
from syncline.reduction import check_collective
from syncline.specs import nearest, parse
from syncline.strategies import OTHER_NAMES, Preset, Strategy, build_strategy, default_presets, strategy_names
from syncline.training.distribute import momentum_of
from syncline.workloads.base import Workload

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["RaceEntries", "all_entries", "build_race_strategy", "default_entries", "is_baseline", "read_entries"]

CODECS = (
    "cast('fp16')",
    "quantize(4)",
    "topk(0.01, momentum=0.9, whole=4096)|quantize(4)",
    "powersgd(2)",
)
"""Codecs that run with all-reduce: half precision, few bits, few elements, low rank."""
DEFAULT_ENTRIES = (
    "allreduce",
    "local(period=8)",
    "topk(0.01, momentum=0.9, whole=4096)|quantize(4)",
    "ssp(slack=3)",
    "gossip(pairwise=True)",
    "quantize(4)",
    "adacomm(start=32)",
    "easgd(period=4, sync=False)",
    "powersgd(2)",
    "diloco(period=16, outer_momentum=0.5)",
    "gossip",
    "bsp",
)
"""The default entries: one of each family first, then those that differ most from them."""
MAX_DEFAULT_ENTRIES_ON_PROCESSES = 5
"""Real processes take seconds to start, so the default race has fewer entries there."""
SCALING = "sqrt"
"""The default scaling of the learning rate: the global batch grows with the workers."""

ENTRY_KEYS = frozenset(field.name for field in fields(RaceEntry)) - {"baseline", "rate_from"}
"""The keys of an entry in a TOML file."""
MPI = "mpi"
MAX_SHOWN_BITS = 1024
"""A message shows the digits of whole numbers up to this size."""
MAX_SHOWN_CHARS = 80
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class RaceEntries:
    """The entries of a race, and the reasons for those that cannot run here."""

    entries: tuple[RaceEntry, ...]
    skipped: Mapping[str, str]


def build_race_strategy(spec: str) -> Strategy:
    """Build one of Syncline's strategies, or a baseline.

    >>> build_race_strategy("allreduce(delay=1)")
    allreduce(delay=1)
    """
    if is_baseline(spec):
        return build_baseline(spec)
    name = parse(spec)[0].name
    if name not in strategy_names():
        raise SpecError(
            f"unknown strategy {name!r}; {nearest(name, [*strategy_names(), *baseline_names()], OTHER_NAMES)}"
        )
    return build_strategy(spec)


def is_baseline(spec: str) -> bool:
    """True if the spec names an implementation of another library."""
    return parse(spec)[0].name in baseline_names()


def default_entries(workload: Workload, simulated: bool = False, one_host: bool = True) -> RaceEntries:
    """The default entries, which differ most: twelve on the simulator, five on real processes."""
    candidates = all_entries(workload, simulated, one_host)
    entries = {entry.name: entry for entry in candidates.entries}
    unknown = [name for name in DEFAULT_ENTRIES if name not in entries and name not in candidates.skipped]
    assert not unknown, f"default entries that are neither a preset nor a codec of the race: {unknown}"
    chosen = [entries[name] for name in DEFAULT_ENTRIES if name in entries]
    return RaceEntries(tuple(chosen if simulated else chosen[:MAX_DEFAULT_ENTRIES_ON_PROCESSES]), {})


def all_entries(workload: Workload, simulated: bool = False, one_host: bool = True) -> RaceEntries:
    """Every family of strategies, a few codecs with all-reduce, and the baselines that can run here."""
    rate = workload.defaults.learning_rate
    default_momentum = _Momentum(workload)
    here = one_host and not simulated
    candidates = [
        _preset(preset, rate, default_momentum) for preset in default_presets() if here or not preset.one_host
    ]
    common: dict[str, Any] = {"learning_rate": rate, "scaling": SCALING, "rate_from": "preset"}
    candidates += [RaceEntry(name=spec, codec=spec, **common) for spec in CODECS]
    needs_one_host = [preset.spec for preset in default_presets() if preset.one_host and not here]
    skipped = dict.fromkeys(needs_one_host, "its workers need the shared memory of one host")
    lab = not one_host and not simulated
    no_mpi = why_no_mpi(lab) if any(entry.engine for entry in candidates) else None
    if no_mpi is not None and not simulated:
        skipped |= {entry.name: f"it runs on MPI, and {no_mpi}" for entry in candidates if entry.engine}
        candidates = [entry for entry in candidates if not entry.engine]
    for spec in DEFAULT_BASELINES:
        reason = "it runs only on real processes" if simulated else availability(spec) or RUN_ONLY_IF_NAMED.get(spec)
        if reason is None:
            candidates.append(RaceEntry(name=spec, strategy=spec, **common))
        else:
            skipped[spec] = reason
    entries = []
    for entry in candidates:
        try:
            entries.append(_checked(entry, default_momentum))
        except IncompatibleError as error:
            skipped[entry.name] = str(error)
    if simulated:  # its ranks need no engine
        entries = [replace(entry, engine=None) for entry in entries]
    return RaceEntries(tuple(entries), skipped)


class _Momentum:
    """The momentum of a workload's optimizer, and whether it can be changed."""

    def __init__(self, workload: Workload) -> None:
        optimizer = workload.optimizer(workload.model(0))
        self.value = momentum_of(optimizer)
        self.free = all("momentum" in group for group in optimizer.param_groups)


def _preset(preset: Preset, rate: float, default_momentum: _Momentum) -> RaceEntry:
    capped = preset.momentum is not None and default_momentum.free and default_momentum.value > preset.momentum
    # The higher rate of a preset replaces the momentum that it removes. If none is removed, the rate would be too high.
    factor = preset.rate if capped or preset.momentum is None else min(1.0, preset.rate)
    return RaceEntry(
        name=preset.spec,
        strategy=preset.spec,
        learning_rate=rate * factor,
        scaling=preset.scaling or SCALING,
        momentum=preset.momentum if capped else None,
        engine=_engine(preset.engine),
        rate_from="preset",
    )


def read_entries(path: Path, workload: Workload, simulated: bool = False, one_host: bool = True) -> RaceEntries:
    """The entries of a TOML file. Impossible entries are refused here, by name."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read entries from {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not TOML or UTF-8, too many digits, or too deep
        raise SpecError(f'{path} is not TOML: {error}; entries are written [[entry]], then strategy = "…"') from None
    tables = document.get("entry")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        other = f" (it has {', '.join(sorted(document))})" if document else ""
        raise SpecError(f'{path} has no entries{other}: write [[entry]], then strategy = "…" or codec = "…"')
    unknown = sorted(set(document) - {"entry"})
    if unknown:
        raise SpecError(f"{path}: unknown table {unknown[0]!r}; entries are written [[entry]]")
    entries = [_entry(table, f"{path}, entry {number}", workload) for number, table in enumerate(tables, 1)]
    if simulated:
        real = [entry.name for entry in entries if entry.baseline]
        if real:
            raise IncompatibleError(
                f"{path}: {real[0]} runs only on real processes; leave it out, or leave --simulate out"
            )
        return RaceEntries(tuple(replace(entry, engine=None) for entry in entries), {})
    on_mpi = [entry.name for entry in entries if entry.engine]
    no_mpi = why_no_mpi(lab=not one_host) if on_mpi else None
    if no_mpi is not None:
        raise UnsupportedError(f"{path}: {on_mpi[0]} runs on MPI, and {no_mpi}; or leave the entry out")
    return RaceEntries(tuple(entries), {})


def _entry(table: Mapping[str, Any], where: str, workload: Workload) -> RaceEntry:
    for key, value in table.items():
        if key not in ENTRY_KEYS:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(key, sorted(ENTRY_KEYS))}")
        wanted = float if key in ("learning_rate", "warmup", "momentum") else str
        if not (_is_rate(value) if wanted is float else isinstance(value, str)):
            what = "number that fits" if wanted is float else "text"
            raise SpecError(f"{where}: {key} = {_shown(value)} is not a {what}")
    strategy, codec = table.get("strategy", "allreduce"), table.get("codec")
    name = table.get("name") or " + ".join(
        part for part in (strategy if strategy != "allreduce" or not codec else "", codec) if part
    ) + (" on mpi" if "engine" in table else "")
    own_rate = "learning_rate" in table
    # A user who sets any of these has chosen them by runs that are not in this race, like a rate.
    chosen = own_rate or bool({"scaling", "warmup", "decay", "momentum"} & set(table))
    entry = RaceEntry(
        **{
            "learning_rate": workload.defaults.learning_rate,
            "scaling": "none" if own_rate else SCALING,
            **table,
            "name": name,
            "engine": _engine(table.get("engine"), where),
            "rate_from": "given" if chosen else "preset",
        }
    )
    try:
        return _checked(entry, _Momentum(workload))
    except SynclineError as error:
        raise type(error)(f"{where} ({name}): {error}") from None


def _is_rate(value: Any) -> bool:
    """True for a number from 0 to the largest float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _shown(value: Any) -> str:
    """A value for a message; long ones are cut."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _checked(entry: RaceEntry, default_momentum: _Momentum) -> RaceEntry:
    """Build the entry once to check it, and set the momentum that its codec needs.

    A strategy whose presets name an engine always runs on that engine.
    """
    strategy = build_race_strategy(entry.strategy)
    needed = next((preset.engine for preset in strategy.presets if preset.engine), None)
    codec = build_codec(entry.codec)
    baseline = is_baseline(entry.strategy)
    if baseline and codec is not None:
        raise IncompatibleError(f"{entry.strategy} takes no codec; leave {entry.codec!r} out")
    if baseline and entry.engine:
        raise IncompatibleError(f"{entry.strategy} runs only on torch.distributed; leave engine out")
    if not baseline:
        check_collective(entry.collective, codec)
        if codec is not None:
            strategy.check_codec(codec)
    momentum = entry.momentum
    if codec is not None:
        try:
            check_optimizer_momentum(codec, default_momentum.value if momentum is None else momentum)
        except IncompatibleError:
            if momentum is not None or not default_momentum.free:
                raise
            momentum = 0.0
    return replace(entry, momentum=momentum, baseline=baseline, engine=entry.engine or _engine(needed))


def _engine(name: str | None, where: str = "preset") -> Literal["mpi"] | None:
    if name not in (None, MPI):
        raise SpecError(f'{where}: engine = {name!r} is not available in a race; write "mpi", or leave it out')
    return None if name is None else "mpi"
