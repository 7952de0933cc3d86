"""Rule 2: accuracy on data that nothing was trained or chosen on; the test split is looked at once, at the end."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.bench.lint.accuracy import points
from syncline.bench.lint.base import Case, Note
from syncline.bench.lint.disjoint import check_splits
from syncline.bench.lint.evidence import events, number, step_of
from syncline.bench.race.reading import RanRun
from syncline.bench.race.splits import SPLITS, read_splits

__all__ = ["check", "check_run", "looked"]

AGAIN = "evaluate on the validation split, test once after the last step, and run again"


def looked(case: Case) -> str:
    """What is there."""
    evaluations = sum(len(run.evaluations) for run in case.counted)
    digests = sum(len(found) for found in read_splits(case.race.path).values())
    return f"{evaluations} evaluations, digests of {digests} samples" if evaluations or digests else ""


def check(case: Case) -> Iterator[Note]:
    """Each run's evaluations, and the splits themselves."""
    scaling = {run.folder for run in points(case)}
    for run in case.counted:
        # A point of a scaling curve without its test metric is rule 1's.
        yield from _run(run, needed=run.folder not in scaling)
    yield from check_splits(case)


def check_run(run: RanRun) -> Iterator[Note]:
    """One run's evaluations."""
    yield from _run(run, needed=True)


def _run(run: RanRun, needed: bool) -> Iterator[Note]:
    config, metric = run.config, run.config.get("metric")
    sizes = config.get("samples") or {}
    told = {(step_of(event), number(event.get("value"))) for event in events(run, f"eval_{metric}")}
    for one in run.evaluations:
        if one.split != "validation" or one.count != sizes.get("validation"):
            yield Note(
                f"{run.folder}: step {one.step} was evaluated on {one.count} samples of {one.split!r}, and validation "
                f"has {sizes.get('validation')}",
                AGAIN,
            )
            return
        if told and number(one.metric) is not None and (one.step, one.metric) not in told:
            yield Note(
                f"{run.folder}: step {one.step} has {metric} {one.metric:.6g}, and no eval_{metric} line says so", AGAIN
            )
            return
    yield from _grain(run, sizes)
    yield from _test(run, f"sl_test_{metric}", needed)


def _grain(run: RanRun, sizes: dict[str, int]) -> Iterator[Note]:
    """An accuracy on n samples is a whole number of n-ths: what is not was measured on something else."""
    values = [one.metric for one in run.evaluations if number(one.metric) is not None]
    if run.config.get("metric") != "accuracy" or len(values) < 2 or not all(sizes.get(name) for name in SPLITS):
        return
    fits = {name: sum(_whole(value, sizes[name]) for value in values) for name in SPLITS}
    own = fits["validation"]
    other = max(("train", "test"), key=lambda name: fits[name])
    if own < len(values) and (2 * own > len(values) or fits[other] == len(values)):
        strange = next(value for value in values if not _whole(value, sizes["validation"]))
        also = f"; all are whole parts of {sizes[other]}, the {other} split" if fits[other] == len(values) else ""
        yield Note(
            f"{run.folder}: accuracy {strange:.8g} is no whole number of {sizes['validation']} validation samples "
            f"({strange * sizes['validation']:.3f}){also}",
            AGAIN,
        )


def _whole(value: float, count: int) -> bool:
    return abs(value * count - round(value * count)) < 1e-3 + 2e-7 * count


def _test(run: RanRun, key: str, needed: bool) -> Iterator[Note]:
    found = [position for position, event in enumerate(run.events) if event.get("key") == key]
    if not found:
        if needed and run.evaluations:
            yield Note(f"{run.folder} has no test metric ({key})", AGAIN)
        return
    last = max((place for place, event in enumerate(run.events) if event.get("key") == "sl_evaluation"), default=-1)
    step = run.evaluations[-1].step if run.evaluations else None
    if len(found) > 1 or found[0] < last or step_of(run.events[found[0]]) not in (None, step):
        steps = ", ".join(str(step_of(run.events[place])) for place in found)
        yield Note(
            f"{run.folder}: the test split was looked at {len(found)} times (step {steps}), and the last evaluation is "
            f"at step {step}",
            AGAIN,
        )
