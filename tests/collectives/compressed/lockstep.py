"""All ranks of a reduction in one process: each request is answered when every rank has made its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from syncline.collectives.compressed.requests import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    Reduction,
    Request,
    SendRecvRequest,
)
from syncline.errors import SynclineError

R = TypeVar("R")


@dataclass
class Run(Generic[R]):
    """What came of it: each rank's result, the kinds of requests in order, and the bytes that each rank sent."""

    results: list[R]
    rounds: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


def lockstep(reductions: Sequence[Reduction[R]], meddle: Callable[[int, Any], Any] | None = None) -> Run[R]:
    """Drive them to their ends; all must take the same kinds of rounds. `meddle(rank, answer)` may change an answer."""
    run = failing(reductions, meddle)
    for result in run.results:
        if isinstance(result, SynclineError):
            raise result
    return run  # type: ignore[return-value]


def failing(
    reductions: Sequence[Reduction[R]], meddle: Callable[[int, Any], Any] | None = None
) -> Run[R | SynclineError]:
    """The same; a rank that raises has its error for a result, and the others must end in that round too."""
    size = len(reductions)
    run: Run[R | SynclineError] = Run([], sent=[0] * size)
    answers: list[Any] = [None] * size
    while True:
        requests, results = _advance(reductions, answers)
        if results:
            assert len(results) == size, f"only {sorted(results)} of {size} ranks have ended; others want {requests}"
            run.results = [results[rank] for rank in range(size)]
            return run
        kinds = {type(request) for request in requests}
        assert len(kinds) == 1, f"the ranks ask for different things: {requests}"
        run.rounds.append(kinds.pop().__name__)
        answers = _answer(requests)
        for rank, request in enumerate(requests):
            run.sent[rank] += _sent(request, size)
        if meddle is not None:
            answers = [meddle(rank, answer) for rank, answer in enumerate(answers)]


def _advance(
    reductions: Sequence[Reduction[R]], answers: list[Any]
) -> tuple[list[Request], dict[int, R | SynclineError]]:
    requests: list[Request] = []
    results: dict[int, R | SynclineError] = {}
    for rank, (reduction, answer) in enumerate(zip(reductions, answers, strict=True)):
        try:
            request = reduction.send(answer)
            assert not isinstance(request, tuple), "one request at a time"
            requests.append(request)
        except StopIteration as end:
            results[rank] = end.value
        except SynclineError as error:
            results[rank] = error
    return requests, results


def _answer(requests: list[Request]) -> list[Any]:
    gathers = [request.data for request in requests if isinstance(request, AllGatherRequest)]
    if gathers:
        assert all(data.dtype == torch.uint8 for data in gathers)
        return [torch.stack(gathers) for _ in requests]  # refuses lengths that differ
    scatters = [request.data for request in requests if isinstance(request, AllToAllRequest)]
    if scatters:
        assert all(data.dtype == torch.uint8 and len(data) == len(requests) for data in scatters)
        cube = torch.stack(scatters)
        return [cube[:, rank].clone() for rank in range(len(requests))]
    sums = [request.tensor for request in requests if isinstance(request, AllReduceRequest)]
    if sums:
        total = torch.stack(sums).sum(0)
        for tensor in sums:
            tensor.copy_(total)
        return [None] * len(requests)
    return [_send_recv(rank, requests) for rank in range(len(requests))]


def _send_recv(rank: int, requests: list[Request]) -> Tensor:
    mine = requests[rank]
    assert isinstance(mine, SendRecvRequest)
    if mine.peer is None:
        assert mine.data is None, "an idle rank sends nothing"
        assert mine.max_bytes == 0, "an idle rank receives nothing"
        return torch.zeros(0, dtype=torch.uint8)
    other = requests[mine.peer]
    assert isinstance(other, SendRecvRequest)
    assert other.peer == rank, f"rank {rank} swaps with {mine.peer}, which does not"
    came = torch.zeros(0, dtype=torch.uint8) if other.data is None else other.data.clone()
    assert (other.data is None) == (mine.max_bytes == 0), f"rank {rank} expects {mine.max_bytes} B"
    assert came.numel() <= mine.max_bytes, f"{came.numel()} B for rank {rank}, which expects at most {mine.max_bytes}"
    return came


def _sent(request: Request, size: int) -> int:
    if isinstance(request, AllReduceRequest):
        return request.tensor.numel() * request.tensor.element_size()
    if isinstance(request, AllGatherRequest):
        return request.data.numel() * (size - 1)
    if isinstance(request, AllToAllRequest):
        return request.data.shape[1] * (size - 1)
    return 0 if request.data is None else request.data.numel()
