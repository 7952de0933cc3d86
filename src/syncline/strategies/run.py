"""`Run`: the object that a user holds, and the batches that its `shard` and `steps` give."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler

from syncline.data import Cursor, MicroBatches, Sharded, move
from syncline.reduction import Stats
from syncline.world import World

if TYPE_CHECKING:
    from syncline.strategies.base import StrategyRun

__all__ = ["Readers", "Run", "Shard", "Step", "Steps"]

logger = logging.getLogger("syncline")

R = TypeVar("R", Sharded, MicroBatches)


class Run(ABC):
    """A model in training on many workers. Made by `sl.distribute`; a context manager.

    >>> import torch, syncline as sl
    >>> with sl.init() as world:
    ...     model = torch.nn.Linear(2, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     with run.agreed():
    ...         run.stats.steps
    0
    """

    model: nn.Module
    optimizer: Optimizer
    """The first one, if there are several."""
    world: World
    stats: Stats
    """Bytes and seconds so far, on this rank."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The resolved specs, and the choices that were made by measurement."""

    @abstractmethod
    def shard(
        self,
        data: Any,
        *,
        seed: int = 0,
        split: bool = True,
        drop_last: bool | None = None,
        batch: int | None = None,
        name: str | None = None,
        pad: bool = True,
    ) -> Shard:
        """This worker's share of a DataLoader, a Dataset (with `batch`) or any iterable of batches, on its device.

        If the loader shuffles, each epoch is shuffled anew from `seed`. The global order does not depend on the number
        of workers. The loader's batch size is the batch size of each worker. A worker that runs out of data before the
        others takes part in their steps without a contribution, and the mean is over the workers that have data. With
        `split=False` the data is already this worker's own. `name` identifies the iterable in checkpoints.

        `pad=False` is for evaluation. Each worker reads its share, and every sample is read once in total. A worker may
        have one batch fewer than others, or none, and no worker waits for another.
        """

    @abstractmethod
    def steps(
        self, data: Any, *, global_batch: int, micro_batch: int | None = None, seed: int = 0, name: str | None = None
    ) -> Steps:
        """Steps of `global_batch` samples for any number of workers: strong scaling, by micro-batches.

        Each step is an iterable of micro-batches. `step.part(loss)` scales a loss to its share of the step, and only
        the backward pass of the last micro-batch reduces.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this worker only; the next backward pass outside reduces them."""

    @abstractmethod
    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the model holds the same weights and buffers on every worker: evaluate and save there.

        Every worker enters it. Afterwards each worker has its own weights and buffers again.
        """

    @abstractmethod
    def expect(self, steps: int) -> None:
        """Set the number of steps of the run.

        Some options need it (`cooldown`), and a strategy that would never communicate in so few steps warns now.
        """

    @abstractmethod
    def note_loss(self, loss: float | Tensor) -> None:
        """Give the strategy this worker's loss, before the optimizer steps. `adacomm` needs it."""

    @abstractmethod
    def close(self) -> None:
        """End the run: every worker then holds the final model. Every worker closes; a second call does nothing."""

    def __enter__(self) -> Run:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Readers:
    """The data readers of a run by name, and their positions, which a checkpoint keeps."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._readers: dict[str, tuple[Any, Sharded | MicroBatches]] = {}
        self._positions: dict[str, Mapping[str, Any]] = {}

    @property
    def sources(self) -> list[Any]:
        """The loaders, datasets and iterables that are read."""
        return [data for data, _ in self._readers.values()]

    def get(self, kind: type[R], data: Any, name: str | None, options: dict[str, Any]) -> R:
        """The reader of `data`. A new loader with the same name continues the count of epochs."""
        key = self._key(data, name)
        known = self._readers.get(key)
        if known is not None and known[0] is data and isinstance(known[1], kind):
            return known[1]
        cursor = Cursor() if known is None else known[1].cursor
        reader = kind(data, rank=self._rank, size=self._size, cursor=cursor, **options)
        if known is None:
            if key in self._positions:
                cursor.load_state_dict(self._positions[key])
            self._warn_of_second_loader(data)
        self._readers[key] = (data, reader)
        return reader

    def state_dict(self) -> dict[str, Any]:
        return self._positions | {key: reader.cursor.state_dict() for key, (_, reader) in self._readers.items()}

    def load_state_dict(self, positions: Mapping[str, Any]) -> None:
        self._positions = dict(positions)
        for key, (_, reader) in self._readers.items():
            if key in self._positions:
                reader.cursor.load_state_dict(self._positions[key])

    def _key(self, data: Any, name: str | None) -> str:
        """A name that the same script gives to the same data next time: loaders are numbered in their order."""
        if name is not None:
            return name
        if not isinstance(data, (DataLoader, Dataset, Sequence)):
            return "iterable"
        known = next((key for key, (each, _) in self._readers.items() if each is data), None)
        return known if known is not None else f"data{len([k for k in self._readers if k.startswith('data')])}"

    def _warn_of_second_loader(self, data: Any) -> None:
        """Warn of a second loader that shuffles the same dataset: usually a loop makes one for each epoch."""
        if self._rank != 0 or not _shuffles(data):
            return
        if len([each for each in self.sources if _shuffles(each) and each.dataset is data.dataset]) == 1:
            logger.warning(
                "run.shard was given a second DataLoader that shuffles the same dataset: it begins with epoch 0 "
                'and so with the same order. Make the loader once, or pass name="train" with each'
            )


def _shuffles(data: Any) -> bool:
    return isinstance(data, DataLoader) and type(data.sampler) is RandomSampler


class _Epochs(Generic[R]):
    """Reads one epoch after another, and sets the weight of each piece of data in the mean."""

    def __init__(self, run: StrategyRun, reader: R, pad: bool = True) -> None:
        self._run = run
        self._reader: R = reader
        self._pad = pad

    @property
    def epoch(self) -> int:
        """The epoch that is being read; between two loops, the one that the next loop reads."""
        return int(self._reader.cursor.next_epoch)

    def __len__(self) -> int:
        """The number of steps of an epoch, the same on every worker, as schedulers need it.

        If the workers do not divide the data, a worker may have one batch fewer. With `pad=False` and `split=False` it
        is the number of this worker's own batches.
        """
        steps = self._reader.steps
        return len(self._reader) if steps is None or not self._pad else steps

    def __repr__(self) -> str:
        steps = self._reader.steps
        length = "length unknown" if steps is None else f"{len(self)} steps an epoch"
        return f"{type(self).__name__}(epoch {self.epoch}, {length})"

    def _pieces(self) -> Iterator[Any]:
        run, reader, uneven_data = self._run, self._reader, self._run.uneven
        run.world.finish_left()
        before, weight_before, steps_before = run.progress, uneven_data.weight, run.stats.steps
        place = reader.begin(before)
        counts, pieces, ended = reader.counts(place), 0, False
        uneven = self._pad and reader.uneven and run.communicator.size > 1
        if uneven:
            run.check_uneven()
        try:
            for piece in reader.read(place):
                pieces += 1
                self._set_weight(piece.weight, uneven or piece.total != run.communicator.size)
                yield piece
            ended = True
        finally:  # no communication here: an error may have ended the loop
            trained = run.progress != before
            self._set_weight(*((1.0, False) if ended or trained else weight_before))
            reader.cursor.leave(place, run.progress)
            if uneven and trained and not ended:
                uneven_data.leave(somebody_ran_out=counts is None or pieces > counts.fewest)
        if uneven and (trained or not pieces):
            run.settle_uneven()
            if run.asynchronous and counts is not None and run.stats.steps - steps_before == pieces:
                uneven_data.schedulers.step_missed(pieces, counts.most - counts.own)

    def _set_weight(self, weight: float, uneven: bool) -> None:
        if self._pad:
            self._run.uneven.weight = (weight, uneven)
            self._run.set_weight(weight, uneven)


class Shard(_Epochs[Sharded]):
    """This worker's batches of one epoch after another; each iteration is an epoch, as with the DataLoader.

    It has the loader's attributes: `dataset`, `batch_size`, `sampler`, `num_workers` and all others.

    >>> import torch, syncline as sl
    >>> def seen(world):
    ...     model = torch.nn.Linear(1, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="ring")
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
    """Steps of a fixed number of samples for any number of workers; each iteration is an epoch.

    >>> import torch, syncline as sl
    >>> def count(world):
    ...     model = torch.nn.Linear(1, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="ring")
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
    ...     run = sl.distribute(model, optimizer, algorithm="ring")
    ...     for step in run.steps(torch.utils.data.DataLoader(torch.arange(8.0)), global_batch=8, micro_batch=1):
    ...         optimizer.zero_grad()
    ...         for x in step:                      # only the last one's backward reduces
    ...             step.part(model(x.view(-1, 1)).mean()).backward()
    ...     return model.weight.grad.item()         # the mean of 0 … 7
    >>> sl.simulate(train, ranks=2).results
    (3.5, 3.5)
    """

    def __init__(self, run: Run, micro_batches: Any) -> None:
        self._run = run
        self._micro_batches = micro_batches
        self._fraction = 1.0

    def part(self, loss: Tensor) -> Tensor:
        """The loss of the current micro-batch, scaled to its share of this worker's samples."""
        return loss * self._fraction

    def __iter__(self) -> Iterator[Any]:
        for batch, fraction, last in self._micro_batches:
            self._fraction = fraction
            batch = move(batch, self._run.world.device)
            if last:
                yield batch
            else:
                with self._run.no_sync():
                    yield batch
