"""One question for formulas and player alike: how long will it take?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.collectives import NATIVE, Channel, Operation, build
from syncline.costs.closed_forms import closed_form
from syncline.costs.player import play
from syncline.transports import Network

__all__ = ["Prediction", "predict", "predict_on"]

NATIVE_IS_LIKE = "ring"
"""What the engines' own all-reduce is taken for: gloo's is a ring in segments, MPI's and NCCL's often are."""


@dataclass(frozen=True)
class Prediction:
    """Seconds, and whether a formula gave them or the schedule's rounds, played."""

    seconds: float
    by: Literal["formula", "rounds"]


def predict(
    algorithm: str,
    size: int,
    nbytes: int,
    network: Network,
    *,
    operation: Operation = "allreduce",
    itemsize: int = 1,
    hosts: tuple[int, ...] = (),
    lanes: int = 1,
) -> Prediction:
    """How long one call takes on a network: by the formula where one is exact, else by playing the rounds.

    `lanes` is how many parts of the data take turns, as `Channel.lanes_for` says.

    >>> predict("ring", 8, 8_000_000, Network(latency=0.0, bandwidth=1e9))
    Prediction(seconds=0.014, by='formula')
    """
    if algorithm == NATIVE and operation == "allreduce":
        algorithm = NATIVE_IS_LIKE
    if operation == "allreduce" and lanes == 1:
        seconds = closed_form(algorithm, size, nbytes, network)
        if seconds is not None:
            return Prediction(seconds, "formula")
    cost = play(build(operation, algorithm), size, nbytes, network, itemsize=itemsize, hosts=hosts, lanes=lanes)
    return Prediction(cost.time, "rounds")


def predict_on(channel: Channel, algorithm: str, nbytes: int, network: Network) -> Prediction:
    """How long an all-reduce takes on a channel, its hosts and lanes taken into account.

    The engine's own has no lanes of ours.
    """
    lanes = 1 if algorithm == NATIVE else channel.lanes_for(build("allreduce", algorithm), nbytes)
    return predict(algorithm, channel.size, nbytes, network, hosts=channel.hosts, lanes=lanes)
