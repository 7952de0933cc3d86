"""`Run`: the object that a user holds, and the batches that its `shard` and `steps` give."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler

from syncline.data import Cursor, MicroBatches, Sharded, move
from syncline.data.cursor import DataPosition
from syncline.data.sources import PieceCounts
from syncline.model_parts import ModelPart
from syncline.reduction import Stats
from syncline.world import DataPlace, World

if TYPE_CHECKING:
    from syncline.strategies.base import StrategyRun

__all__ = ["EpochContinues", "Readers", "Run", "Shard", "Step", "Steps"]

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

    def model_part(self) -> ModelPart | None:
        """The part of the model that this worker saves and loads; None if every worker has the whole model."""
        return None

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
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`. Returns the norm before.

        Every worker calls it after `backward()`. With divided layers torch.nn.utils.clip_grad_norm_ sees only this
        worker's part.
        """

    @abstractmethod
    def close(self) -> None:
        """End the run: every worker then holds the final model. Every worker closes; a second call does nothing."""

    def __enter__(self) -> Run:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EpochContinues(Exception):  # noqa: N818 (ends a wait, and is not an error)
    """Raised by a run's `settle_uneven` after `Readers.regroup` has returned True: this worker's loop continues.

    Before that the run catches up with the steps that it missed: `settle_uneven` is called again at the new end.
    """


class Readers:
    """The data readers of a run by name, and their positions, which a checkpoint keeps.

    When the number of workers changes, every worker that stays calls `regroup`, in the same step. A worker that joins
    loads their `next_state` and calls `regroup` with its own rank:

    ```text
    worker 0   step 7: regroup(0, 3, ())   next_state ─┐       step 8   …
    worker 1   step 7: regroup(1, 3, ())               │       step 8   …
    newcomer   enter_at(): load_state_dict ◀───────────┘       step 8   …
                           regroup(2, 3, ())
    ```
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._readers: dict[str, tuple[Any, Sharded | MicroBatches]] = {}
        self._positions: dict[str, Mapping[str, Any]] = {}
        self.enter_at: Callable[[DataPlace], bool] | None = None
        """In a worker that joins: called before each loop that trains, until it returns True. It then has loaded the
        positions of the others, and regrouped. False: they have finished that loop, and it reads nothing here."""
        self.open_claims: Callable[[str, Sharded | MicroBatches], None] | None = None
        """Called with the name of a new reader whose batches the workers of an elastic job claim."""
        self.place_of_team: Callable[[], DataPlace | None] = lambda: None
        """In a worker that joins: where the others read."""

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
        if self.open_claims is not None and options.get("pad", True):
            self.open_claims(key, reader)
        return reader

    def state_dict(self) -> dict[str, Any]:
        return self._positions | {key: reader.state_dict() for key, (_, reader) in self._readers.items()}

    def next_state(self) -> dict[str, Any]:
        """The positions of the next global batch, for a worker that joins. Call it after `regroup`, in the same step.

        Unlike `state_dict`, an epoch that a loop has left early is over: the other workers begin the next one.
        """
        return self._positions | {key: reader.next_state for key, (_, reader) in self._readers.items()}

    def load_state_dict(self, positions: Mapping[str, Any]) -> None:
        self._positions = dict(positions)
        for key, (_, reader) in self._readers.items():
            if key in self._positions:
                reader.cursor.load_state_dict(self._positions[key])

    def regroup(self, rank: int, size: int, lost: tuple[int, ...] = (), steps: int = 1) -> bool:
        """Continue as worker `rank` of `size`, from the next global batch of each reader on.

        Every worker that stays calls it in the same step, in the body of its loop, between two epochs, or in
        `settle_uneven` if it has run out of data. `lost` are the ranks that have not trained their shares of the
        current global batch. They are numbered as in the team over which that batch was distributed, also if the team
        changes several times in one step. Nothing is lost if the step was complete: `lost` is then empty. `steps` is
        the number of latest global batches that are not trained yet, the current one included: more than one if
        gradients are accumulated.

        Returns True if this worker had run out of data, and another global batch follows now. The run then completes
        the current step, catches up with the weights of the workers that had data, and raises `EpochContinues` out of
        `settle_uneven`.
        """
        self._rank, self._size = rank, size
        continues = [reader.regroup(rank, size, lost, steps) for _, reader in self._readers.values()]
        return any(continues)

    def all(self) -> list[Sharded | MicroBatches]:
        """The readers."""
        return [reader for _, reader in self._readers.values()]

    def place_of(self, reader: Sharded | MicroBatches) -> DataPlace:
        """The name of a reader, and the epoch that it reads."""
        name = next(key for key, (_, each) in self._readers.items() if each is reader)
        return DataPlace(name, reader.cursor.epoch)

    def follow_team(self, reader: Sharded | MicroBatches) -> None:
        """In a worker that joins: move a reader to the epoch that the others read."""
        place = self.place_of_team() if self.enter_at is not None else None
        while place is not None and self.place_of(reader) < place and place.reader == self.place_of(reader).reader:
            reader.cursor.pass_epoch()

    def starts(self, reader: Sharded | MicroBatches) -> bool:
        """Whether the next training loop over a reader reads data; False if the others have finished it."""
        if self.enter_at is None:
            return True
        if not self.enter_at(self.place_of(reader)):
            reader.cursor.pass_epoch()
            return False
        self.enter_at = None
        return True

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


@dataclass
class _Pace:
    """What a team of workers reads in the rest of an epoch."""

    teams: int
    """How often the number of workers had changed."""
    uneven: bool
    """Whether some workers may run out of data before others."""
    counts: PieceCounts | None
    steps_before: int
    """The run's steps at the start."""
    pieces: int = 0
    """What this worker has read so far."""


class _Epochs(Generic[R]):
    """Reads one epoch after another, and sets the weight of each piece of data in the mean."""

    def __init__(self, run: StrategyRun, reader: R, pad: bool = True) -> None:
        self._run = run
        self._reader: R = reader
        self._pad = pad

    @property
    def epoch(self) -> int:
        """The epoch that is being read; between two loops, the one that the next loop reads.

        In a worker that joins an elastic job: the epoch that the others read.
        """
        self._run.readers.follow_team(self._reader)
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
        run, reader = self._run, self._reader
        entered = run.readers.enter_at is not None
        if self._pad and entered:
            yield from self._warm_up()
        if self._pad and not run.readers.starts(reader):
            return
        run.world.finish_left()
        before, weight_before = run.progress, run.uneven.weight
        place, teams = reader.begin(before), reader.teams
        try:
            pace, pieces, ended = self._pace(place), 0, False
            while not ended:
                try:
                    for piece in reader.read(place):
                        pieces += 1
                        pace.pieces += 1
                        self._set_weight(piece.weight, pace.uneven or piece.total != run.communicator.size)
                        if self._pad:
                            run.batch_read(reader)
                        yield piece
                        if self._pad:
                            run.between_steps()
                        if pace.teams != reader.teams:
                            pace = self._pace(place, pace)
                    ended = True
                finally:  # no communication here: an error may have ended the loop
                    trained = run.progress != before
                    run.note_trained()
                    self._set_weight(*((1.0, False) if ended or trained else weight_before))
                    if pace.uneven and trained and not ended:
                        run.uneven.leave(pace.counts is None or pace.pieces > pace.counts.fewest)
                # Where the team changes, some workers may wait already, and others find that the rest ends evenly.
                changed = self._pad and not run.asynchronous and (entered or reader.teams != teams)
                settles = (pace.uneven or changed) and (trained or not pieces)
                if settles or (self._pad and trained and run.epoch_needs_round):
                    ended = self._settle(pace)
                if not ended:
                    pace = self._pace(place, pace)
        finally:
            reader.leave(place, run.progress)

    def _warm_up(self) -> Iterator[Any]:
        """In a worker that joins: batches of a step that it takes alone, before it asks to join; see `warms_up`."""
        run, reader = self._run, self._reader
        place = run.readers.place_of(reader)
        if not run.warms_up(place):
            return
        before = run.progress
        try:
            with closing(reader.read_ahead(place.epoch)) as pieces:
                for piece in pieces:
                    yield piece
                    if run.progress != before:
                        break
        finally:  # the loop may be left
            run.end_warm_up()

    def _pace(self, place: DataPosition, before: _Pace | None = None) -> _Pace:
        """What the workers read in the rest of the epoch; `before`: what another number of workers would have read."""
        run, reader = self._run, self._reader
        uneven = self._pad and reader.uneven and run.communicator.size > 1
        if uneven:
            run.check_uneven()
        elif before is not None and before.uneven:
            run.uneven.leave(somebody_ran_out=False)
        return _Pace(reader.teams, uneven, reader.counts(place), run.stats.steps)

    def _settle(self, pace: _Pace) -> bool:
        """This worker has run out of data: wait for the others. Returns False if another global batch follows."""
        run, counts = self._run, pace.counts
        try:
            run.settle_uneven()
        except EpochContinues:
            return False
        if run.asynchronous and counts is not None and run.stats.steps - pace.steps_before == pace.pieces:
            run.uneven.schedulers.step_missed(pace.pieces, counts.most - counts.own)
        return True

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
