"""How the dense layers of a head are divided over workers that read different examples: cuts, turns and exchanges.

Between two layers each worker has one of these parts of the activities of a turn:

```text
           worker 0        worker 1
own        all units of    all units of       the start and the end: each worker's own examples
           its examples    its examples
full       everything      everything         before a layer that is cut by columns
units      some units of   the other units    after a layer that is cut by columns, before one that is cut by rows
           all examples    of all examples
partial    a summand of    a summand of       after a layer that is cut by rows: their sum is the activity
           everything      everything
```

An exchange leads from one part to another. Elements that a worker sends for b examples of its own among K workers, and
activities of U units:

| exchange       | sends to worker k   | joins what arrives by | elements    | backward       |
|----------------|---------------------|-----------------------|-------------|----------------|
| own → full     | its examples        | rows                  | (K−1)bU     | partial → own  |
| own → units    | columns of k        | rows                  | (K−1)bU/K   | units → own    |
| units → full   | its units           | columns               | (K−1)bU     | partial → units|
| units → own    | rows of k           | columns               | (K−1)bU/K   | own → units    |
| partial → units| columns of k        | sum                   | (K−1)bU     | units → full   |
| partial → own  | rows of k           | sum                   | (K−1)bU     | own → full     |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Literal

from syncline.collectives.executor import chunk_edges
from syncline.errors import SpecError

__all__ = [
    "CUTS",
    "SCHEMES",
    "Cut",
    "HeadExchange",
    "HeadLayout",
    "LayerCut",
    "Scheme",
    "choose_layout",
    "part_of_turn",
    "rows_of_turns",
    "unit_edges",
]

Scheme = Literal["a", "b", "c"]
SCHEMES: tuple[Scheme, ...] = ("a", "b", "c")
Cut = Literal["columns", "rows"]
CUTS: tuple[Cut, ...] = ("columns", "rows")


@dataclass(frozen=True)
class HeadExchange:
    """The blocks that every worker sends to every other, and how it joins received blocks; see the table of this file.

    >>> HeadExchange("all", "rows").adjoint
    HeadExchange(sends='rows', joins='sum')
    """

    sends: Literal["all", "rows", "columns"]
    joins: Literal["rows", "columns", "sum"]

    @property
    def adjoint(self) -> HeadExchange:
        """The exchange of the gradients, from the result of this one to its input."""
        sends: dict[str, Literal["all", "rows", "columns"]] = {"sum": "all", "rows": "rows", "columns": "columns"}
        joins: dict[str, Literal["rows", "columns", "sum"]] = {"all": "sum", "rows": "rows", "columns": "columns"}
        return HeadExchange(sends[self.joins], joins[self.sends])

    def block(self, source: int, to: int, rows: Sequence[int], units: Sequence[int]) -> tuple[int, int]:
        """The rows and columns of the block from one worker to another.

        `rows`: the number of examples of each worker in this turn. `units`: the number of units of each.
        """
        high = rows[to] if self.sends == "rows" else rows[source] if self.joins == "rows" else sum(rows)
        wide = units[to] if self.sends == "columns" else units[source] if self.joins == "columns" else sum(units)
        return high, wide

    def sent_elements(self, source: int, rows: Sequence[int], units: Sequence[int]) -> int:
        """The elements that a worker sends to all others."""
        blocks = [self.block(source, to, rows, units) for to in range(len(rows)) if to != source]
        return sum(high * wide for high, wide in blocks)


OWN_TO_FULL = HeadExchange("all", "rows")
OWN_TO_UNITS = HeadExchange("columns", "rows")
UNITS_TO_FULL = HeadExchange("all", "columns")
UNITS_TO_OWN = HeadExchange("rows", "columns")
PARTIAL_TO_UNITS = HeadExchange("columns", "sum")
PARTIAL_TO_OWN = HeadExchange("rows", "sum")


@dataclass(frozen=True)
class LayerCut:
    """How a dense layer is divided: its weight by output units ("columns") or by inputs ("rows")."""

    inputs: int
    outputs: int
    cut: Cut
    takes_own: bool
    """Whether its inputs are of each worker's own examples; else each worker has some units of them."""
    gives_own: bool
    """Whether its outputs are."""

    @property
    def before(self) -> HeadExchange | None:
        """The exchange of its inputs."""
        if self.cut == "columns":
            return OWN_TO_FULL if self.takes_own else UNITS_TO_FULL
        return OWN_TO_UNITS if self.takes_own else None

    @property
    def after(self) -> HeadExchange | None:
        """The exchange of its outputs."""
        if self.cut == "columns":
            return UNITS_TO_OWN if self.gives_own else None
        return PARTIAL_TO_OWN if self.gives_own else PARTIAL_TO_UNITS

    @property
    def divides_bias(self) -> bool:
        """Whether each worker has a part of the bias: it is added where each worker has some units."""
        return self.cut == "columns" or not self.gives_own

    def possible(self, workers: int) -> bool:
        """Whether every worker gets at least one input, or one output."""
        cut = self.outputs if self.cut == "columns" else self.inputs
        return cut >= workers and (self.gives_own or self.outputs >= workers)

    def cost(self, workers: int) -> int:
        """The elements that a worker sends for each of its own examples, forward, in units of (workers − 1)/workers."""
        cost = 0
        for exchange, units in ((self.before, self.inputs), (self.after, self.outputs)):
            if exchange is not None:
                slim = exchange in (OWN_TO_UNITS, UNITS_TO_OWN)
                cost += units if slim else units * workers
        return cost


@dataclass(frozen=True)
class HeadLayout:
    """The cuts of all layers of a head, one after another.

    >>> choose_layout([9216, 4096, 4096, 1000], 4).cuts
    ('rows', 'columns', 'rows')
    """

    layers: tuple[LayerCut, ...]
    workers: int

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The cut of each layer."""
        return tuple(layer.cut for layer in self.layers)

    @cached_property
    def exchanges(self) -> tuple[tuple[HeadExchange, int], ...]:
        """The exchanges of forward in their order, each with the number of units of what is exchanged."""
        found: list[tuple[HeadExchange, int]] = []
        for layer in self.layers:
            found += [(layer.before, layer.inputs)] if layer.before else []
            found += [(layer.after, layer.outputs)] if layer.after else []
        return tuple(found)

    @property
    def entries(self) -> int:
        """How often layers take each worker's own examples as input: the workers exchange their numbers before."""
        return sum(layer.takes_own for layer in self.layers)

    @property
    def cost(self) -> tuple[int, int, int]:
        """The key by which a layout is chosen: sent elements, then points where all turns wait, then exchanges."""
        return sum(layer.cost(self.workers) for layer in self.layers), self.entries, len(self.exchanges)


def choose_layout(
    widths: Sequence[int],
    workers: int,
    own_after: Sequence[bool] | None = None,
    cuts: Sequence[Cut] | None = None,
    name: str = "the head",
) -> HeadLayout:
    """The layout that sends the fewest elements.

    `widths`: the inputs of the first layer, then the outputs of each. `own_after`: after which layers modules follow
    that must see whole examples, each on its owner. `cuts`: these and no others.

    >>> choose_layout([900, 300, 10], 4).cuts, choose_layout([100, 400, 10], 4).cuts
    (('rows', 'rows'), ('columns', 'rows'))
    """
    count = len(widths) - 1
    needed = [place == count - 1 or (own_after is not None and own_after[place]) for place in range(count)]
    if cuts is not None and (len(cuts) != count or any(cut not in CUTS for cut in cuts)):
        raise SpecError(f"{name} has {count} dense layers, and cuts={list(cuts)!r} must have {count} of {list(CUTS)}")
    best: dict[bool, HeadLayout] = {True: HeadLayout((), workers)}  # by whether the value so far is of own examples
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        longer: dict[bool, HeadLayout] = {}
        allowed = CUTS if cuts is None else (cuts[place],)
        for (takes_own, before), cut, gives_own in product(best.items(), allowed, (True, False)):
            layer = LayerCut(inputs, outputs, cut, takes_own, gives_own)
            if layer.possible(workers) and (gives_own or not needed[place]):
                found = HeadLayout((*before.layers, layer), workers)
                if gives_own not in longer or found.cost < longer[gives_own].cost:
                    longer[gives_own] = found
        if not longer:
            how = "" if cuts is None else f" by {cuts[place]}"
            raise SpecError(
                f"layer {place} of {name} has {inputs} inputs and {outputs} outputs: it cannot be divided{how} over "
                f"{workers} workers; use fewer workers, or leave it out of the head"
            )
        best = longer
    return best[True]


def unit_edges(units: int, workers: int) -> list[int]:
    """Where the units of each worker begin, and the end: parts differ by one unit at most."""
    return chunk_edges(units, workers)


def rows_of_turns(scheme: Scheme, counts: Sequence[int]) -> list[list[int]]:
    """The number of examples of each worker in each turn, from their numbers in the batch.

    >>> rows_of_turns("a", [4, 4]), rows_of_turns("b", [4, 4]), rows_of_turns("c", [5, 5])
    ([[4, 4]], [[4, 0], [0, 4]], [[2, 3], [3, 2]])
    """
    workers = len(counts)
    if scheme == "a":
        return [list(counts)]
    if scheme == "b":
        return [[count if worker == turn else 0 for worker, count in enumerate(counts)] for turn in range(workers)]
    parts = [[stop - start for start, stop in pairwise(chunk_edges(count, workers))] for count in counts]
    return [
        [parts[worker][part_of_turn(scheme, turn, worker, workers)] for worker in range(workers)]
        for turn in range(workers)
    ]


def part_of_turn(scheme: Scheme, turn: int, worker: int, workers: int) -> int:
    """Which part of a worker's batch a turn computes.

    In scheme c the workers begin with different parts: the larger ones then spread over the turns.
    """
    return (turn + worker) % workers if scheme == "c" else turn
