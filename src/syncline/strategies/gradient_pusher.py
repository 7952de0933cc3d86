"""Pushes a worker's gradients to the servers: all values, the values that filters choose, or factors.

```text
keys       │ fc1.weight        │ fc1.bias │ fc2.weight │ fc2.bias │
segments   │ δ, o or dense     │    dense                         │     a segment is always split in the same way
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.reduction import plain_name
from syncline.server import Client, Future
from syncline.server.factors import FactorRecorder, factors_are_smaller
from syncline.server.filters import Filter
from syncline.server.rules import UpdateRule
from syncline.strategies.key_map import KeyMap

__all__ = ["GradientPusher", "check_filters", "group_bounds"]


@dataclass(frozen=True)
class _Segment:
    """Keys that are pushed in one request."""

    group: int
    """The number of its group of keys."""
    first: int
    after: int
    weight: str | None = None
    """The name of a fully connected layer's weight, whose factors may replace its gradient."""


class GradientPusher:
    """Pushes gradients, and keeps the values that a filter holds back."""

    def __init__(self, client: Client, keys: KeyMap, model: nn.Module, filters: Filter | None, factors: bool) -> None:
        self._client = client
        self._keys = keys
        self._filter = filters if filters is not None and filters.chooses else None
        self.held_back = None if self._filter is None else torch.zeros(keys.trained, dtype=torch.float32)
        """The values that a filter has held back, one for each trained key; None without such a filter."""
        self._recorder = FactorRecorder(model) if factors else None
        self._segments = _segments(keys, self._recorder)
        self._number = 0
        self.bytes_held = 0
        """Bytes of gradients that a filter held back for a later push. They count as logical bytes."""

    @property
    def plain(self) -> bool:
        """Whether all gradients are sent as they are, one request for each group."""
        return self._filter is None and self._recorder is None

    def push(
        self,
        row: Tensor,
        rates: Sequence[float | None],
        *,
        scale: float,
        weight: float = 1.0,
        tick: bool = True,
        absent: Sequence[int] = (),
    ) -> list[Future]:
        """Push gradients that are already multiplied by `weight`; `tick` ends the step.

        `absent` are the indices of parameters without a gradient: the servers change neither them nor their state.
        """
        self._number += 1
        if self.held_back is not None:
            self.held_back.add_(row)
        recorded = {} if self._recorder is None else self._recorder.take()
        factors = {plain_name(name): pair for name, pair in recorded.items()}
        segments = self._without(absent) if absent and self.held_back is None else self._segments
        if not segments and tick:
            return [self._client.push((0, 0), torch.empty(0, dtype=torch.float32), scale=0.0, tick=True)]
        futures = []
        for number, segment in enumerate(segments):
            ends = tick and number == len(segments) - 1
            rate = rates[segment.group]
            pair = factors.get(segment.weight) if segment.weight is not None else None
            if pair is not None and self._are_smaller(segment, *pair):
                delta = pair[0] if weight == 1.0 else pair[0] * weight
                futures.append(
                    self._client.push_factors(
                        segment.first, delta.float().cpu(), pair[1].float().cpu(), rate=rate, scale=scale, tick=ends
                    )
                )
                continue
            keys, values = self._choose(segment, row)
            futures.append(self._client.push(keys, values, rate=rate, scale=scale, tick=ends))
        return futures

    def _without(self, absent: Sequence[int]) -> list[_Segment]:
        """The segments, without the keys of some parameters."""
        left_out = sorted((each.first, each.after) for each in (self._keys.parameters[number] for number in absent))
        found: list[_Segment] = []
        for segment in self._segments:
            at = segment.first
            for first, after in left_out:
                if segment.first <= first < segment.after:
                    if at < first:
                        found.append(replace(segment, first=at, after=first))
                    at = max(at, after)
            if at < segment.after:
                found.append(replace(segment, first=at))
        return found

    def flush(self, rates: Sequence[float | None], *, scale: float) -> list[Future]:
        """Push the values that a filter has held back."""
        if self.held_back is None or not bool(self.held_back.any()):
            return []
        synchronous, futures = self._client.description.synchronous, []
        for number, group in enumerate(self._keys.groups):
            places = self.held_back[group.first : group.after].nonzero().view(-1) + group.first
            # A synchronous push counts only in a step that has ended.
            ends = synchronous and number == len(self._keys.groups) - 1
            values = self.held_back[places]
            futures.append(self._client.push(places, values, rate=rates[number], scale=scale, tick=ends))
        self.held_back.zero_()
        return futures

    def close(self) -> None:
        """Remove the hooks."""
        if self._recorder is not None:
            self._recorder.close()

    def _are_smaller(self, segment: _Segment, delta: Tensor, o: Tensor) -> bool:
        parts = self._client.description.layout.split_range(segment.first, segment.after)
        ranges = [(part.start, part.stop) for part in parts]
        return factors_are_smaller(delta.shape[0], delta.shape[1], o.shape[1], ranges)

    def _choose(self, segment: _Segment, row: Tensor) -> tuple[tuple[int, int] | Tensor, Tensor]:
        """The keys and values to send now: all of the segment, or those that the filter chooses."""
        if self._filter is None or self.held_back is None:
            return (segment.first, segment.after), row[segment.first : segment.after]
        unsent = self.held_back[segment.first : segment.after]
        places = self._filter.choose(unsent, self._number)
        if places is None:
            places = torch.arange(segment.after - segment.first)
        values = unsent[places]
        unsent[places] = 0.0
        self.bytes_held += 4 * (unsent.numel() - places.numel())
        return places + segment.first, values


def group_bounds(
    keys: KeyMap, model: nn.Module, rules: Sequence[UpdateRule], factors: bool
) -> list[tuple[int, UpdateRule]]:
    """The first key of each group at the servers, and its rule.

    A rule that is not elementwise keeps its state by pieces. Each segment is then a group of its own, so that a
    checkpoint is split at the same keys.
    """
    if not factors:
        return [(group.first, rules[number]) for number, group in enumerate(keys.groups)]
    with FactorRecorder(model) as recorder:
        segments = _segments(keys, recorder)
    first = {group.first for group in keys.groups}
    return [
        (segment.first, rules[segment.group])
        for segment in segments
        if segment.first in first or not rules[segment.group].elementwise
    ]


def check_filters(filters: Filter | None, factors: bool, rules: Sequence[UpdateRule]) -> None:
    """Raise an `IncompatibleError` for filters that do not work with the rules or with factors."""
    if filters is None:
        return
    whole = next((rule for rule in rules if not rule.elementwise), None)
    if whole is not None and filters.chooses:
        raise IncompatibleError(
            f"filters={filters!r} send some of the gradients, and {whole!r} at the servers takes all of them: give the "
            "strategy a rule for single weights, such as rule='momentum(mu=0.9)' or rule='adam'"
        )
    if factors and filters.chooses:
        raise IncompatibleError(
            f"filters={filters!r} choose among the gradient's elements, and its factors have none: leave one of the "
            "two out"
        )


def _segments(keys: KeyMap, recorder: FactorRecorder | None) -> list[_Segment]:
    names = set() if recorder is None else {plain_name(name) for name in recorder.names}
    found: list[_Segment] = []
    for number, group in enumerate(keys.groups):
        at = group.first
        for field in keys.parameters:
            if field.name in names and group.first <= field.first < group.after:
                if field.first > at:
                    found.append(_Segment(number, at, field.first))
                found.append(_Segment(number, field.first, field.after, field.name))
                at = field.after
        if at < group.after:
            found.append(_Segment(number, at, group.after))
    return found
