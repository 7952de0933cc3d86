"""The arrangement of ranks in a mesh: pipeline stages, data, shared data and tensors.

`Mesh(pipeline=2, data=1, shared=2, tensor=2)` on eight ranks:

```text
                    stage 0                      stage 1
              tensor 0   tensor 1          tensor 0   tensor 1
shared 0       rank 0     rank 1            rank 4     rank 5
shared 1       rank 2     rank 3            rank 6     rank 7
```

Ranks of one tensor team are neighbours, because they communicate most; stages are farthest apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from syncline.errors import SpecError

__all__ = ["AXES", "Mesh"]

AXES = ("pipeline", "data", "shared", "tensor")
"""The axes of a mesh. The last one varies fastest."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis.

    `pipeline`: stages. `tensor`: ranks that divide layers and read the same data. `shared`: ranks that read different
    data and divide some layers, such as experts, whose inputs they exchange. `data`: copies of all that.

    >>> mesh = Mesh(pipeline=2, data=2, tensor=2)
    >>> print(mesh)
    mesh of 8 ranks: pipeline 2 x data 2 x tensor 2
    >>> mesh.position(5), mesh.team(5, "data"), mesh.team(5, "tensor"), mesh.team(5, "data", "tensor")
    ((1, 0, 0, 1), (5, 7), (4, 5), (4, 5, 6, 7))
    """

    pipeline: int = 1
    data: int = 1
    shared: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, count in zip(AXES, self.sizes, strict=True):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SpecError(f"{axis}={count!r}: a mesh has a whole number of ranks along each axis, at least 1")

    @classmethod
    def fit(cls, size: int, *, pipeline: int = 1, shared: int = 1, tensor: int = 1) -> Mesh:
        """A mesh of `size` ranks: the ranks that the other axes leave are along `data`.

        >>> Mesh.fit(8, tensor=2)
        Mesh(pipeline=1, data=4, shared=1, tensor=2)
        """
        block = cls(pipeline, 1, shared, tensor)
        if size % block.size:
            factors = " x ".join(f"{axis} {count}" for axis, count in block._named if count > 1)
            raise SpecError(
                f"{factors} needs a multiple of {block.size} workers, and there are {size}: start {block.size}, "
                f"{2 * block.size}, … workers, or use factors whose product divides {size}"
            )
        return cls(pipeline, size // block.size, shared, tensor)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The number of ranks along each axis, in the order of `AXES`."""
        return self.pipeline, self.data, self.shared, self.tensor

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.shared * self.tensor

    def position(self, rank: int) -> tuple[int, int, int, int]:
        """The place of a rank along each axis, in the order of `AXES`."""
        places = []
        for count in reversed(self.sizes):
            rank, place = divmod(rank, count)
            places.append(place)
        pipeline, data, shared, tensor = reversed(places)
        return pipeline, data, shared, tensor

    def rank(self, position: Sequence[int]) -> int:
        """The rank at a place."""
        rank = 0
        for place, count in zip(position, self.sizes, strict=True):
            rank = rank * count + place
        return rank

    def team(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these axes only, with itself, in order."""
        position = self.position(rank)
        choices = [
            range(count) if axis in axes else (place,)
            for axis, count, place in zip(AXES, self.sizes, position, strict=True)
        ]
        return tuple(self.rank(each) for each in product(*choices))

    def part_number(self, rank: int) -> int:
        """The number of the part of the model that a rank has. Ranks that differ along "data" only have the same."""
        pipeline, _, shared, tensor = self.position(rank)
        return (pipeline * self.shared + shared) * self.tensor + tensor

    def teams(self, *axes: str) -> list[tuple[int, ...]]:
        """All teams along these axes. Every rank is in one; the order is the same for all."""
        return sorted({self.team(rank, *axes) for rank in range(self.size)})

    @property
    def _named(self) -> list[tuple[str, int]]:
        return list(zip(AXES, self.sizes, strict=True))

    def __str__(self) -> str:
        factors = " x ".join(f"{axis} {count}" for axis, count in self._named if count > 1) or "data 1"
        return f"mesh of {self.size} {'rank' if self.size == 1 else 'ranks'}: {factors}"
