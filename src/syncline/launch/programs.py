"""What is started where: one program for each rank, each server, and the evaluator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["EVALUATOR", "MPIEXEC", "Place", "Program", "lay_out", "lay_out_evaluator", "lay_out_servers"]

EVALUATOR = "evaluator"
MPIEXEC = "mpiexec"
"""The name of the one program that represents all ranks where mpiexec starts them."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process to start and to watch."""

    name: str
    target: tuple[str, ...]
    """What `launch/worker.py` is given: a script and its arguments, `-m` and a module, `--exec` and a command."""
    variables: Mapping[str, str]
    rank: int | None = None
    """None for a server and an evaluator: they end when all ranks have ended."""
    prefix: str | None = None
    """Before each line of its output; None: it writes to our own streams itself."""
    enter: tuple[str, ...] = ()
    """A command before the command: how to get into its network."""

    def to_json(self) -> dict[str, Any]:
        """As an agent reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Program:
        """What `to_json` gave."""
        rank, prefix = found["rank"], found["prefix"]
        return cls(
            name=str(found["name"]),
            target=tuple(map(str, found["target"])),
            variables={str(name): str(value) for name, value in found["variables"].items()},
            rank=None if rank is None else int(rank),
            prefix=None if prefix is None else str(prefix),
            enter=tuple(map(str, found["enter"])),
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host, and how many ranks it takes."""

    name: str
    slots: int
    enter: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    interface: str = ""
    door: str = ""
    """A program that is called as ssh is and runs a command at that address; for mpiexec in the lab."""


def lay_out(
    places: Sequence[Place], target: Iterable[str], common: Mapping[str, str], plain_rank: int | None = 0
) -> list[list[Program]]:
    """The ranks of each place, counted through place by place.

    >>> found = lay_out([Place(name="a", slots=2), Place(name="b", slots=1)], ["train.py"], {})
    >>> [[program.name for program in programs] for programs in found]
    [['rank 0', 'rank 1'], ['rank 2']]
    >>> found[1][0].variables["GROUP_RANK"], found[1][0].prefix
    ('1', '[2] ')
    """
    size = sum(place.slots for place in places)
    arguments = tuple(target)
    laid: list[list[Program]] = []
    rank = 0
    for number, place in enumerate(places):
        here = []
        for local in range(place.slots):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(place.slots),
                "GROUP_RANK": str(number),
                "SYNCLINE_PROGRAM": f"rank {rank}",
            }
            here.append(
                Program(
                    name=f"rank {rank}",
                    target=arguments,
                    variables={**place.variables, **common, **variables},
                    rank=rank,
                    prefix=None if rank == plain_rank else f"[{rank}] ",
                    enter=place.enter,
                )
            )
            rank += 1
        laid.append(here)
    return laid


def lay_out_servers(
    places: Sequence[Place], target: Iterable[str], common: Mapping[str, str], count: int
) -> list[list[Program]]:
    """Servers beside the ranks, dealt to the places in turn.

    >>> [len(programs) for programs in lay_out_servers([Place(name="a", slots=1)] * 2, ["-m", "server"], {}, 3)]
    [2, 1]
    """
    arguments = tuple(target)
    laid: list[list[Program]] = [[] for _ in places]
    for server in range(count):
        place = places[server % len(places)]
        role = {"SYNCLINE_ROLE": "server", "SYNCLINE_SERVER": str(server), "SYNCLINE_PROGRAM": f"server {server}"}
        laid[server % len(places)].append(
            Program(
                name=f"server {server}",
                target=arguments,
                variables={**place.variables, **common, **role},
                prefix=f"[server {server}] ",
                enter=place.enter,
            )
        )
    return laid


def lay_out_evaluator(places: Sequence[Place], target: Iterable[str], common: Mapping[str, str]) -> list[list[Program]]:
    """The one that measures what the ranks have learnt, at the last place. It is no rank, and has no variables of one.

    >>> [[program.name for program in programs] for programs in lay_out_evaluator([Place(name="a", slots=1)], [], {})]
    [['evaluator']]
    """
    last = places[-1]
    evaluator = Program(
        name=EVALUATOR,
        target=tuple(target),
        variables={**last.variables, **common, "SYNCLINE_ROLE": EVALUATOR, "SYNCLINE_PROGRAM": EVALUATOR},
        prefix=f"[{EVALUATOR}] ",
        enter=last.enter,
    )
    return [[] for _ in places[:-1]] + [[evaluator]]
