"""How values look when they leave a client: what a filter lets through, in a codec, with a list of keys or its name."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from syncline.codecs import Codec, RngKey
from syncline.codecs.base import all_finite
from syncline.errors import DivergedError, ProtocolError
from syncline.server import protocol
from syncline.server.filters import Filter, digest_of
from syncline.server.protocol import RequestHeader
from syncline.server.space import RequestPart

__all__ = ["KeySelection", "PushEncoder", "as_values", "length_of", "room_for"]

KeySelection = tuple[int, int] | Tensor
"""Keys as they were read: the first and the one after the last, or a checked list."""


class PushEncoder:
    """What one client remembers of what it has sent, and of what it has not."""

    def __init__(self, numel: int, codec: Codec | None, filters: Filter | None, seed: int, member: int) -> None:
        self.codec = codec
        self._numel = numel
        self._filter = filters
        self._seed = seed
        self._member = member
        self._kept: Tensor | None = None
        """What the filter has not let through yet."""
        self._residual: Tensor | None = None
        self._view: Tensor | None = None
        self._lists: dict[int, OrderedDict[int, None]] = {}
        """Digests that each server should know, the latest last."""

    @property
    def filters(self) -> bool:
        """Whether something may be held back."""
        return self._filter is not None and self._filter.chooses

    @property
    def residual(self) -> Tensor | None:
        """What the codec has left unsent, one element a key; None: it keeps nothing."""
        if self._residual is None and self.codec is not None and self.codec.keeps_residual:
            self._residual = torch.zeros(self._numel, dtype=torch.float32)
        return self._residual

    def choose(self, keys: KeySelection, values: Tensor, number: int) -> tuple[KeySelection, Tensor]:
        """What is pushed now: all, or what the filter lets through of this and of what it held back before."""
        if self._filter is None or not self.filters:
            return keys, values
        if self._kept is None:
            self._kept = torch.zeros(self._numel, dtype=torch.float32)
        where = keys if isinstance(keys, Tensor) else slice(*keys)
        summed = self._kept[where] + values
        self.check(summed)  # two finite values may add up to one that is not
        self._kept[where] = summed
        places = self._filter.choose(self._kept, number)
        if places is not None and places.numel() < self._numel:
            return self._release(self._kept, places)
        chosen = self._kept.clone()  # all of it: no list of keys needs to go
        self._kept.zero_()
        return (0, self._numel), chosen

    def rest(self) -> tuple[KeySelection, Tensor]:
        """What the filter has held back, all of it."""
        if self._kept is None:
            return (0, 0), torch.empty(0, dtype=torch.float32)
        return self._release(self._kept, self._kept.nonzero().reshape(-1))

    @staticmethod
    def _release(kept: Tensor, places: Tensor) -> tuple[KeySelection, Tensor]:
        chosen = kept[places]
        kept[places] = 0.0
        return places, chosen

    def check(self, values: Tensor) -> None:
        """Refuse what the codec will refuse, before a part of it is on the way."""
        if self.codec is not None and not all_finite(values):
            raise DivergedError(
                f"values that rank {self._member} pushes are not finite, and {self.codec!r} cannot carry them",
                rank=self._member,
            )

    def encode(self, part: Tensor, cut: RequestPart, keys: Tensor | None, step: int) -> Tensor:
        """By the codec, with what it lost before."""
        assert self.codec is not None
        rng = RngKey(self._seed, step, self._member, start=cut.first)
        residual = self.residual
        if residual is None:
            return self.codec.encode(part, rng)
        if keys is None:
            return self.codec.encode(part, rng, residual[cut.first : cut.first + cut.count])
        rows = residual[keys]
        payload = self.codec.encode(part, rng, rows)
        residual[keys] = rows
        return payload

    def view(self, first: int, count: int) -> Tensor:
        """What the servers believe we have of these keys, where answers are encoded."""
        if self._view is None:
            self._view = torch.zeros(self._numel, dtype=torch.float32)
        return self._view[first : first + count]

    def name_keys(self, request: RequestHeader, keys: Tensor, server: int) -> tuple[RequestHeader, list[Tensor]]:
        """The keys, or the digest of those that the server has had before."""
        rows = keys.contiguous().view(torch.uint8)
        if self._filter is None or not self._filter.caches:
            return request._replace(flags=request.flags | protocol.KEYS), [rows]
        digest, known = digest_of(keys), self._lists.setdefault(server, OrderedDict())
        request = request._replace(digest=digest, flags=request.flags | protocol.CACHED)
        if digest in known:
            known.move_to_end(digest)
            return request, []
        known[digest] = None
        if len(known) > protocol.MAX_CACHED_KEY_LISTS:
            known.popitem(last=False)
        return request._replace(flags=request.flags | protocol.KEYS), [rows]


def as_values(values: Tensor, count: int) -> Tensor:
    """A row of float32 in CPU memory, one for each key."""
    if not isinstance(values, Tensor) or values.dtype != torch.float32:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ProtocolError(f"a space holds float32, not {kind}: convert the values")
    if values.numel() != count:
        raise ProtocolError(f"{values.numel()} values for {count} keys")
    if values.dim() == 1 and values.is_contiguous() and not values.requires_grad and not values.is_cuda:
        return values
    return values.detach().reshape(-1).cpu().contiguous()


def room_for(keys: KeySelection, out: Tensor | None) -> Tensor:
    """Where what is read goes."""
    count = length_of(keys)
    if out is None:
        return torch.empty(count, dtype=torch.float32)
    if out.dtype != torch.float32 or out.numel() != count or not out.is_contiguous() or out.is_cuda:
        raise ProtocolError(f"{count} float32 in one row of CPU memory are read, not {out.dtype}{list(out.shape)}")
    return out if out.dim() == 1 and not out.requires_grad else out.detach().view(-1)


def length_of(keys: KeySelection) -> int:
    """How many there are.

    >>> length_of((2, 5))
    3
    """
    return keys.numel() if isinstance(keys, Tensor) else keys[1] - keys[0]
