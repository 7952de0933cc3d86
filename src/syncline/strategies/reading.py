"""What a loop iterates over: this worker's batches, and steps of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from syncline.data import MicroBatches, Sharded, move

if TYPE_CHECKING:
    from syncline.strategies.base import StrategyRun

__all__ = ["Shard", "Step", "Steps"]

R = TypeVar("R", Sharded, MicroBatches)


class _Epochs(Generic[R]):
    """Reads an epoch at a time, and tells the run what each piece counts."""

    def __init__(self, run: StrategyRun, reader: R, pad: bool = True) -> None:
        self._run = run
        self._reader: R = reader
        self._pad = pad

    @property
    def epoch(self) -> int:
        """The epoch that is being read; between two loops, the one that the next of them reads."""
        return int(self._reader.cursor.next_epoch)

    def __len__(self) -> int:
        """How many steps an epoch has, the same on every worker: what schedulers count.

        Where the data does not divide, a worker may have a batch fewer. With `pad=False` and `split=False` it is the
        number of this worker's own batches.
        """
        steps = self._reader.steps
        return len(self._reader) if steps is None or not self._pad else steps

    def __repr__(self) -> str:
        steps = self._reader.steps
        length = "length unknown" if steps is None else f"{len(self)} steps an epoch"
        return f"{type(self).__name__}(epoch {self.epoch}, {length})"

    def _pieces(self) -> Iterator[Any]:
        run, reader = self._run, self._reader
        run.world.finish_left()
        begun, before, taken = run.work, run.weighed, run.stats.steps
        place = reader.begin(begun)
        counts, handed, ended = reader.counts(place), 0, False
        uneven = self._pad and reader.uneven and run.exchange.size > 1
        if uneven:
            run.check_uneven()
        try:
            for piece in reader.read(place):
                handed += 1
                self._weigh(piece.weight, uneven or piece.total != run.exchange.size)
                yield piece
            ended = True
        finally:  # no communication here: an error may have ended the loop
            trained = run.work != begun
            self._weigh(*((1.0, False) if ended or trained else before))
            reader.cursor.leave(place, run.work)
            if uneven and trained and not ended:
                run.leave_uneven(somebody_ran_out=counts is None or handed > counts.fewest)
        if uneven and (trained or not handed):
            run.settle_uneven()
            if run.asynchronous and counts is not None and run.stats.steps - taken == handed:
                run.schedulers.step_missed(handed, counts.most - counts.own)

    def _weigh(self, weight: float, uneven: bool) -> None:
        if self._pad:
            self._run.weighed = (weight, uneven)
            self._run.set_weight(weight, uneven)


class Shard(_Epochs[Sharded]):
    """This worker's batches of one epoch after another; each iteration is an epoch, as with the DataLoader.

    It has the loader's attributes: `dataset`, `batch_size`, `sampler`, `num_workers` and all others.

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._reader.data, name)


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

    def __init__(self, run: StrategyRun, micro: Any) -> None:
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
