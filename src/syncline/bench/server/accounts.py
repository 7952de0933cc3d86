"""A worker's own account of a space: what it has pushed, and what a read may therefore say.

All pushes are whole numbers above zero, so a key only grows. The first keys belong to everybody, and of the rest each
worker has a lane that it alone writes::

    keys    0 ─────────── shared ───────────┬─ lane 0 ─┬─ lane 1 ─┬─ … ─ n
    a read  own, last seen ≤ value          │ own ≤ value ≤ own    │     between its sending and its answer
    quiet   Σ of all workers' accounts      │ the same
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import ProtocolError

__all__ = ["Account", "Claim"]

LANES = 4
"""One key of so many lies in a lane."""


@dataclass
class Claim:
    """What was known when a read was sent: its answer is held against it."""

    keys: Tensor
    least: Tensor
    what: str


@dataclass
class Account:
    """Of one worker, for one space.

    >>> account = Account("demo", numel=8, rank=0, workers=2)
    >>> account.pushed(torch.tensor([0, 6]), torch.tensor([2.0, 1.0]))
    >>> claim = account.reading(torch.tensor([0, 6]), "pull")
    >>> account.check(claim, torch.tensor([5.0, 1.0]))
    >>> account.check(claim, torch.tensor([1.0, 1.0]))
    Traceback (most recent call last):
    ...
    syncline.errors.ProtocolError: demo: pull of worker 0 says 1 for key 0, where at least 2 was due
    """

    name: str
    numel: int
    rank: int
    workers: int
    prompt: bool = True
    """Whether what was pushed can be read at once: a filter may hold it back."""
    ledger: Tensor = field(init=False)
    seen: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = torch.zeros(self.numel, dtype=torch.float64)
        self.seen = torch.zeros(self.numel, dtype=torch.float64)

    @property
    def shared(self) -> int:
        """Keys that everybody writes."""
        return self.numel - self.numel // LANES

    @property
    def lane(self) -> tuple[int, int]:
        """The keys that this worker alone writes."""
        each = (self.numel - self.shared) // self.workers
        first = self.shared + self.rank * each
        return first, first + each

    def pushed(self, keys: Tensor, values: Tensor) -> None:
        """Values that are on their way."""
        self.ledger[keys] += values.double()

    def reading(self, keys: Tensor, what: str) -> Claim:
        """A read that is sent now, after all pushes so far."""
        least = self.ledger[keys] if self.prompt else torch.zeros(len(keys), dtype=torch.float64)
        return Claim(keys, torch.maximum(least, self.seen[keys]), what)

    def check(self, claim: Claim, found: Tensor) -> None:
        """Hold an answer against what was known; `ProtocolError` where it cannot be."""
        values = found.double()
        self._hold(claim, values, values < claim.least, claim.least, "at least")
        first, after = self.lane
        most = torch.where((claim.keys >= first) & (claim.keys < after), self.ledger[claim.keys], torch.inf)
        self._hold(claim, values, values > most, most, "at most")
        self._hold(claim, values, values != values.round(), values.round(), "a whole number such as")
        self.seen[claim.keys] = torch.maximum(self.seen[claim.keys], values)

    def settle(self, total: Tensor, found: Tensor, what: str) -> None:
        """All workers have flushed: every key is what the accounts say together."""
        claim = Claim(torch.arange(self.numel), total, what)
        self._hold(claim, found.double(), found.double() != total, total, "exactly")
        self._hold(claim, total, self.seen > total, self.seen, "what was read before, ")

    def reset(self) -> None:
        """Every key is 0 again."""
        self.ledger.zero_()
        self.seen.zero_()

    def _hold(self, claim: Claim, values: Tensor, wrong: Tensor, due: Tensor, how: str) -> None:
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            others = f" ({int(wrong.sum())} keys are wrong)" if int(wrong.sum()) > 1 else ""
            raise ProtocolError(
                f"{self.name}: {claim.what} of worker {self.rank} says {float(values[at]):g} for key "
                f"{int(claim.keys[at])}, where {how} {float(due[at]):g} was due{others}"
            )
