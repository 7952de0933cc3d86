"""Gossip: workers mix weights with their neighbours on a graph, without a server.

The mixing matrix is that of `graphs.py`. All workers take rounds together (`synchronous.py`), or two workers average at
a time (`pairwise.py`).

D-PSGD: Lian et al., Can decentralized algorithms outperform centralized algorithms? (2017); pairwise: Lian et al.,
Asynchronous decentralized parallel stochastic gradient descent (2018); with codecs: Koloskova et al. (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from syncline.errors import SpecError
from syncline.strategies.base import Preset, Strategy, StrategyRun, check_counts, check_flags, check_number
from syncline.strategies.gossip.graphs import GRAPHS, Graph, Matrix, build_graph, check_graph, metropolis
from syncline.strategies.gossip.pairwise import PairwiseRun
from syncline.strategies.gossip.synchronous import GossipRun

__all__ = ["GRAPHS", "Gossip", "GossipRun", "Graph", "PairwiseRun", "build_graph", "metropolis"]

FORMS = ("after", "beside")


@dataclass(frozen=True, repr=False)
class Gossip(Strategy):
    """Gossip on a graph: "ring", "torus", "exponential", "complete", edges such as "0-1, 1-2", a matrix or its file.

    Every `period` steps a worker mixes. With `form="after"` neighbours mix their weights after the step, with "beside"
    those before the step, while it is computed (D-PSGD). With `pairwise` every worker trains at its own pace and
    averages with one random neighbour at a time, drawn from `seed`. With a codec the workers send compressed
    differences, and `gamma` is the step size of a round; None: a value that suits the codec.

    >>> Gossip("exponential", period=4)
    gossip(graph='exponential', period=4)
    """

    graph: str | Matrix = "ring"
    form: Literal["after", "beside"] = "after"
    period: int = 1
    pairwise: bool = False
    gamma: float | None = None
    seed: int = 0

    name: ClassVar[str] = "gossip"
    presets: ClassVar[tuple[Preset, ...]] = (
        Preset(spec="gossip"),
        Preset(spec="gossip(pairwise=True)"),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", check_graph(self.graph))
        check_counts(self, period=1, seed=0)
        check_flags(self, "pairwise")
        if self.form not in FORMS:
            raise SpecError(f"gossip(form={self.form!r}): one of {', '.join(FORMS)}")
        if self.gamma is not None:
            wanted = "above 0 and at most 1, or None for what suits the codec"
            check_number(self, "gamma", wanted, lambda gamma: 0 < gamma <= 1)
        if self.pairwise and (self.form != "after" or self.gamma is not None):
            odd = f"form={self.form!r}" if self.form != "after" else f"gamma={self.gamma!r}"
            raise SpecError(f"gossip(pairwise=True, {odd}): an average of two has one form and no gamma; leave it out")

    @property
    def asynchronous(self) -> bool:
        return self.pairwise

    @property
    def state_format(self) -> str:
        return "gossip(pairwise=True)" if self.pairwise else "gossip"

    def run_type(self) -> type[StrategyRun]:
        return PairwiseRun if self.pairwise else GossipRun
