"""How a worker's gradients go to the servers: as they are, through filters, or as factors.

```text
keys       │ fc1.weight        │ fc1.bias │ fc2.weight │ fc2.bias │
segments   │ δ, o or as it is  │    as it is                      │     a segment is always cut in the same way
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
from syncline.server.filters import Cache, Filter
from syncline.server.rules import UpdateRule
from syncline.strategies.key_map import KeyMap

__all__ = ["GradientPusher", "borders", "check_filters", "client_filter"]


@dataclass(frozen=True)
class _Segment:
    """Keys that are pushed at once."""

    group: int
    """Its place among the groups of the keys."""
    first: int
    after: int
    weight: str | None = None
    """The weight of a fully connected layer whose factors may go in place of its gradient."""


class GradientPusher:
    """One worker's way to the servers. It keeps what a filter has held back."""

    def __init__(self, client: Client, keys: KeyMap, model: nn.Module, filters: Filter | None, factors: bool) -> None:
        self._client = client
        self._keys = keys
        self._filter = filters if filters is not None and filters.chooses else None
        self._kept = None if self._filter is None else torch.zeros(keys.trained, dtype=torch.float32)
        self._tap = FactorRecorder(model) if factors else None
        self._segments = _segments(keys, self._tap)
        self._number = 0
        self.bytes_held = 0
        """Of gradients that a filter kept back for a later push: they are to be counted as said all the same."""

    @property
    def plain(self) -> bool:
        """Whether everything goes as it is, a group at a time."""
        return self._filter is None and self._tap is None

    @property
    def kept(self) -> Tensor | None:
        """What a filter has held back, one element a trained key."""
        return self._kept

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
        """Send a row of gradients that are multiplied by `weight` already; with `tick` they are all of a step.

        The `absent` parameters, by index, have no gradient: the servers change neither them nor the rule's state of
        them.
        """
        self._number += 1
        if self._kept is not None:
            self._kept.add_(row)
        taken = {} if self._tap is None else {plain_name(name): pair for name, pair in self._tap.take().items()}
        segments = self._without(absent) if absent and self._kept is None else self._segments
        if not segments and tick:
            return [self._client.push((0, 0), torch.empty(0, dtype=torch.float32), scale=0.0, tick=True)]
        futures = []
        for number, segment in enumerate(segments):
            ends = tick and number == len(segments) - 1
            rate = rates[segment.group]
            pair = taken.get(segment.weight) if segment.weight is not None else None
            if pair is not None and self._pays(segment, *pair):
                delta = pair[0] if weight == 1.0 else pair[0] * weight
                futures.append(
                    self._client.push_factors(
                        segment.first, delta.float().cpu(), pair[1].float().cpu(), rate=rate, scale=scale, tick=ends
                    )
                )
                continue
            keys, values = self._chosen(segment, row)
            futures.append(self._client.push(keys, values, rate=rate, scale=scale, tick=ends))
        return futures

    def _without(self, absent: Sequence[int]) -> list[_Segment]:
        """The segments without some parameters."""
        holes = [
            (self._keys.parameters[number].first, self._keys.parameters[number].after) for number in sorted(absent)
        ]
        found: list[_Segment] = []
        holes.sort()
        for segment in self._segments:
            at = segment.first
            for first, after in holes:
                if segment.first <= first < segment.after:
                    if at < first:
                        found.append(replace(segment, first=at, after=first))
                    at = max(at, after)
            if at < segment.after:
                found.append(replace(segment, first=at))
        return found

    def flush(self, rates: Sequence[float | None], *, scale: float) -> list[Future]:
        """Send what a filter has held back."""
        if self._kept is None or not bool(self._kept.any()):
            return []
        synchronous, futures = self._client.description.synchronous, []
        for number, group in enumerate(self._keys.groups):
            places = self._kept[group.first : group.after].nonzero().view(-1) + group.first
            # A held push counts only in a step that has ended.
            ends = synchronous and number == len(self._keys.groups) - 1
            values = self._kept[places]
            futures.append(self._client.push(places, values, rate=rates[number], scale=scale, tick=ends))
        self._kept.zero_()
        return futures

    def close(self) -> None:
        """Take the hooks off."""
        if self._tap is not None:
            self._tap.close()

    def _pays(self, segment: _Segment, delta: Tensor, o: Tensor) -> bool:
        cuts = self._client.description.layout.cut_range(segment.first, segment.after)
        return factors_are_smaller(delta.shape[0], delta.shape[1], o.shape[1], [(cut.start, cut.stop) for cut in cuts])

    def _chosen(self, segment: _Segment, row: Tensor) -> tuple[tuple[int, int] | Tensor, Tensor]:
        """What goes now: all of it, or what the filter lets through of this and of what it held back before."""
        if self._filter is None or self._kept is None:
            return (segment.first, segment.after), row[segment.first : segment.after]
        waiting = self._kept[segment.first : segment.after]
        places = self._filter.choose(waiting, self._number)
        if places is None:
            places = torch.arange(segment.after - segment.first)
        values = waiting[places]
        waiting[places] = 0.0
        self.bytes_held += 4 * (waiting.numel() - places.numel())
        return places + segment.first, values


def borders(keys: KeyMap, model: nn.Module, rules: Sequence[UpdateRule], factors: bool) -> list[tuple[int, UpdateRule]]:
    """Where groups of keys begin at the servers, and their rules.

    A rule that takes whole pieces keeps its state by them: what is pushed by itself is then a group of its own, so that
    a checkpoint is cut at the same places.
    """
    if not factors:
        return [(group.first, rules[number]) for number, group in enumerate(keys.groups)]
    with FactorRecorder(model) as tap:
        segments = _segments(keys, tap)
    first = {group.first for group in keys.groups}
    return [
        (segment.first, rules[segment.group])
        for segment in segments
        if segment.first in first or not rules[segment.group].elementwise
    ]


def client_filter(filters: Filter | None) -> Filter | None:
    """What is left for the client to do: remember lists of keys. It would choose over all groups at once."""
    return Cache() if filters is not None and filters.caches else None


def check_filters(filters: Filter | None, factors: bool, rules: Sequence[UpdateRule]) -> None:
    """Refuse what cannot go together."""
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


def _segments(keys: KeyMap, tap: FactorRecorder | None) -> list[_Segment]:
    names = set() if tap is None else {plain_name(name) for name in tap.names}
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
