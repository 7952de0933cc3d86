"""What a client remembers between its pushes: values that filters hold back, codec residuals, and lists of keys."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from syncline.codecs import Codec, RngKey
from syncline.codecs.base import all_finite
from syncline.errors import DivergedError
from syncline.server import protocol
from syncline.server.filters import Filter, digest_of
from syncline.server.protocol import RequestHeader
from syncline.server.space import KeySelection, RequestPart

__all__ = ["PushEncoder"]


class PushEncoder:
    """Selects, encodes and addresses the values that one client pushes."""

    def __init__(self, numel: int, codec: Codec | None, filters: Filter | None, seed: int, member: int) -> None:
        self.codec = codec
        self.holds_back = filters is not None and filters.chooses
        """Whether a filter may hold values back."""
        self._numel = numel
        self._filter = filters
        self._seed = seed
        self._member = member
        self._unsent: Tensor | None = None
        """The values that the filter has held back."""
        self._residual: Tensor | None = None
        self._view: Tensor | None = None
        self._sent_lists: dict[int, OrderedDict[int, None]] = {}
        """For each server, the digests of the lists that it should remember; the latest last."""

    @property
    def residual(self) -> Tensor | None:
        """The part of earlier pushes that the codec has not sent, one element for each key; None: it keeps nothing."""
        if self._residual is None and self.codec is not None and self.codec.keeps_residual:
            self._residual = torch.zeros(self._numel, dtype=torch.float32)
        return self._residual

    def select(self, keys: KeySelection, values: Tensor, number: int) -> tuple[KeySelection, Tensor]:
        """Add values to those held back, and return what the filter sends now. `number` counts the pushes."""
        assert self._filter is not None, "there is a filter"
        if self._unsent is None:
            self._unsent = torch.zeros(self._numel, dtype=torch.float32)
        where = keys if isinstance(keys, Tensor) else slice(*keys)
        total = self._unsent[where] + values
        self.check_finite(total)  # the sum of two finite values may overflow
        self._unsent[where] = total
        places = self._filter.choose(self._unsent, number)
        if places is not None and places.numel() < self._numel:
            return self._take(self._unsent, places)
        everything = self._unsent.clone()  # as a range, without a list of keys
        self._unsent.zero_()
        return (0, self._numel), everything

    def take_unsent(self) -> tuple[KeySelection, Tensor]:
        """All values that the filter has held back."""
        if self._unsent is None:
            return (0, 0), torch.empty(0, dtype=torch.float32)
        return self._take(self._unsent, self._unsent.nonzero().reshape(-1))

    @staticmethod
    def _take(unsent: Tensor, places: Tensor) -> tuple[KeySelection, Tensor]:
        values = unsent[places]
        unsent[places] = 0.0
        return places, values

    def check_finite(self, values: Tensor) -> None:
        """Raise a `DivergedError` for values that the codec cannot encode, before a part of them is sent."""
        if self.codec is not None and not all_finite(values):
            raise DivergedError(
                f"values that rank {self._member} pushes are not finite, and {self.codec!r} cannot carry them",
                rank=self._member,
            )

    def encode(self, values: Tensor, part: RequestPart, keys: Tensor | None, step: int) -> Tensor:
        """Encode the values of a part, with error feedback."""
        assert self.codec is not None
        rng = RngKey(self._seed, step, self._member, start=part.first)
        residual = self.residual
        if residual is None:
            return self.codec.encode(values, rng)
        if keys is None:
            return self.codec.encode(values, rng, residual[part.first : part.first + part.count])
        rows = residual[keys]
        payload = self.codec.encode(values, rng, rows)
        residual[keys] = rows
        return payload

    def view(self, first: int, count: int) -> Tensor:
        """For encoded replies: the values of a range that the servers assume this client has."""
        if self._view is None:
            self._view = torch.zeros(self._numel, dtype=torch.float32)
        return self._view[first : first + count]

    def attach_keys(self, header: RequestHeader, keys: Tensor, server: int) -> tuple[RequestHeader, list[Tensor]]:
        """Add a list of keys to a request: the list itself, or its digest if the server should remember it."""
        rows = keys.contiguous().view(torch.uint8)
        if self._filter is None or not self._filter.caches:
            return header._replace(flags=header.flags | protocol.KEYS), [rows]
        digest, known = digest_of(keys), self._sent_lists.setdefault(server, OrderedDict())
        header = header._replace(digest=digest, flags=header.flags | protocol.CACHED)
        if digest in known:
            known.move_to_end(digest)
            return header, []
        known[digest] = None
        if len(known) > protocol.MAX_CACHED_KEY_LISTS:
            known.popitem(last=False)
        return header._replace(flags=header.flags | protocol.KEYS), [rows]
