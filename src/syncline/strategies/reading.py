"""What a loop iterates over: this worker's batches, and steps of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from syncline.data import MicroBatches, Sharded, move

if TYPE_CHECKING:
    from syncline.strategies.base import Run

__all__ = ["Shard", "Step", "Steps"]

R = TypeVar("R", Sharded, MicroBatches)


class _Epochs(Generic[R]):
    """Reads an epoch at a time, and tells the run what each piece counts."""

    def __init__(self, run: Run, reader: R) -> None:
        self._run = run
        self._reader: R = reader

    @property
    def epoch(self) -> int:
        """The epoch that an iteration reads now, or goes on with."""
        return int(self._reader.cursor.epoch)

    def __len__(self) -> int:
        return len(self._reader)

    def _pieces(self) -> Iterator[Any]:
        run = self._run
        uneven = self._reader.uneven and run.exchange.size > 1
        if uneven:
            run.check_uneven()
        try:
            for piece in self._reader:
                run.weigh(piece.weight, uneven or piece.total != run.exchange.size)
                yield piece
        finally:
            run.weigh(1.0)
        if uneven:
            run.settle_uneven()


class Shard(_Epochs[Sharded]):
    """This worker's batches of one epoch after another; each iteration is an epoch.

    >>> import torch, syncline as sl
    >>> def seen(world):
    ...     model = torch.nn.Linear(1, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), collective="ring")
    ...     loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    ...     return [batch.tolist() for batch in run.shard(loader)]
    >>> sl.simulate(seen, ranks=2).results
    ([[0.0, 2.0], [4.0]], [[1.0, 3.0], [5.0]])
    """

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces():
            yield move(piece.batch, self._run.world.device)


class Steps(_Epochs[MicroBatches]):
    """Steps of a fixed number of samples, whatever the number of workers; each iteration is an epoch.

    >>> import torch, syncline as sl
    >>> def count(world):
    ...     model = torch.nn.Linear(1, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), collective="ring")
    ...     loader = torch.utils.data.DataLoader(torch.arange(24.0))
    ...     return len(run.steps(loader, global_batch=8, micro_batch=2))
    >>> sl.simulate(count, ranks=2).results
    (3, 3)
    """

    def __iter__(self) -> Iterator[Step]:
        for piece in self._pieces():
            yield Step(self._run, piece)


class Step:
    """The micro-batches of one step on this worker: iterate over it, and scale each loss by `part`.

    >>> import torch, syncline as sl
    >>> def train(world):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ...     run = sl.distribute(model, optimizer, collective="ring")
    ...     for step in run.steps(torch.utils.data.DataLoader(torch.arange(8.0)), global_batch=8, micro_batch=1):
    ...         optimizer.zero_grad()
    ...         for x in step:                      # only the last one's backward reduces
    ...             step.part(model(x.view(-1, 1)).mean()).backward()
    ...     return model.weight.grad.item()         # the mean of 0 … 7
    >>> sl.simulate(train, ranks=2).results
    (3.5, 3.5)
    """

    def __init__(self, run: Run, micro: Any) -> None:
        self._run = run
        self._micro = micro
        self._fraction = 1.0

    def part(self, loss: Tensor) -> Tensor:
        """The loss of the micro-batch at hand, scaled to its share of this worker's samples."""
        return loss * self._fraction

    def __iter__(self) -> Iterator[Any]:
        for batch, fraction, last in self._micro:
            self._fraction = fraction
            batch = move(batch, self._run.world.device)
            if last:
                yield batch
            else:
                with self._run.no_sync():
                    yield batch
