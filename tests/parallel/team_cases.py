"""Collectives of a team on tensors of whole numbers, and what they must give. Any device, any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from syncline.parallel.team import (
    LayerTeam,
    copy_to_team,
    exchange,
    gather,
    gather_and_reduce,
    reduce_own_part,
    sum_over_team,
    take_own_part,
)
from syncline.world import World

SHAPE = (5, 7)
"""Cannot be divided equally."""


def whole(rank: int = 0, shape: tuple[int, int] = SHAPE) -> Tensor:
    """A tensor of whole numbers, another for each rank."""
    return (torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape) * (rank + 1)) % 11


def own_sizes(length: int, size: int) -> list[int]:
    return [length * (rank + 1) // size - length * rank // size for rank in range(size)]


def parts(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    return torch.split(x, own_sizes(x.shape[dim], size), dim)


def with_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The output, and the gradient of the input for a gradient of the output."""
    x = x.clone().requires_grad_()
    output = function(x)
    (gradient,) = torch.autograd.grad(output, x, upstream(output))
    return [output.detach(), gradient]


def run_collectives(world: World, shape: tuple[int, int] = SHAPE) -> dict[str, list[Tensor]]:
    """Each function on tensors of this rank. The gradient of each output is `whole(rank + 1)` or its first part."""
    team = LayerTeam(world.group())
    rank, size = world.rank, world.size
    found: dict[str, list[Tensor]] = {}

    def upstream(output: Tensor) -> Tensor:
        return whole(rank + 1, shape).to(world.device)[: output.shape[0], : output.shape[1]]

    own = whole(rank, shape).to(world.device)
    found["copy"] = with_gradient(lambda x: copy_to_team(x, team), own, upstream)
    found["sum"] = with_gradient(lambda x: sum_over_team(x, team), own, upstream)
    for dim in (0, 1):
        part = parts(own, size, dim)[rank]
        lengths = team.lengths(own.shape[dim])
        found[f"gather {dim}"] = with_gradient(lambda x: gather(x, team, dim, lengths), part, upstream)  # noqa: B023
        found[f"part {dim}"] = with_gradient(lambda x: take_own_part(x, team, dim), own, upstream)  # noqa: B023
        length = own.shape[dim]
        found[f"gather and reduce {dim}"] = with_gradient(
            lambda x: gather_and_reduce(x, team, dim - 2, length),  # noqa: B023
            part,
            upstream,
        )
        found[f"reduce part {dim}"] = with_gradient(lambda x: reduce_own_part(x, team, dim), own, upstream)  # noqa: B023
    found["equal gather"] = with_gradient(lambda x: gather(x, team, -1), own[:, :2], lambda output: output)
    return found


def expected(size: int, rank: int, shape: tuple[int, int] = SHAPE) -> dict[str, tuple[Tensor, Tensor]]:
    """What one process computes from the tensors of all."""
    inputs, ups = [whole(i, shape) for i in range(size)], [whole(i + 1, shape) for i in range(size)]
    total = torch.stack(inputs).sum(0)
    found = {"copy": (inputs[rank], torch.stack(ups).sum(0)), "sum": (total, ups[rank])}
    for dim in (0, 1):
        joined = torch.cat([parts(x, size, dim)[i] for i, x in enumerate(inputs)], dim)
        widths = [part.shape for part in parts(inputs[0], size, dim)]
        back = torch.cat([up[: shape[0], : shape[1]] for up, shape in zip(ups, widths, strict=True)], dim)
        found[f"gather {dim}"] = joined, parts(ups[rank], size, dim)[rank]
        found[f"part {dim}"] = parts(inputs[rank], size, dim)[rank], back
        found[f"gather and reduce {dim}"] = joined, parts(torch.stack(ups).sum(0), size, dim)[rank]
        found[f"reduce part {dim}"] = parts(total, size, dim)[rank], back
    found["equal gather"] = torch.cat([x[:, :2] for x in inputs], 1), inputs[rank][:, :2]
    return found


def check_collectives(found: dict[str, list[Tensor]], rank: int, size: int, shape: tuple[int, int] = SHAPE) -> None:
    """The results of one rank."""
    for name, values in expected(size, rank, shape).items():
        for value, each in zip(values, found[name], strict=True):
            assert torch.equal(value, each.cpu()), f"{name} on rank {rank}: {each}, not {value}"


def exchange_rows(world: World) -> tuple[list[int], Tensor, Tensor]:
    """Rank i sends i + to rows to each rank; rank 0 sends none to itself."""
    team = LayerTeam(world.group())
    rank, size = world.rank, world.size
    send = [rank + to for to in range(size)]
    receive = team.exchange_counts(send)
    x = torch.full((sum(send), 2), float(rank), device=world.device, requires_grad=True)
    output = exchange(x * 1, team, send, receive)
    torch.autograd.backward(output, output.detach() * 10 + rank)
    assert x.grad is not None
    return receive, output.detach(), x.grad


def check_exchange(found: tuple[list[int], Tensor, Tensor], rank: int, size: int) -> None:
    """The results of one rank."""
    receive, output, gradient = found
    assert receive == [rank + source for source in range(size)]
    assert output[:, 0].tolist() == [float(source) for source in range(size) for _ in range(rank + source)]
    assert gradient[:, 1].tolist() == [float(10 * rank + to) for to in range(size) for _ in range(rank + to)]
