"""Epochs in which workers run out of data at different times, and the schedulers that then miss steps.

```text
worker 0   step  step  step  step │ settle: both have the same weights, learning rates, scheduler states and step count
worker 1   step  step  idle  idle │
```

`idle` is a round in which a worker without data takes part (`join_idle`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from syncline.errors import IncompatibleError
from syncline.reduction import broadcast_tensors, broadcast_tree, check_same
from syncline.strategies.run import EpochContinues
from syncline.world import RepeatedCall, allgather, barrier

if TYPE_CHECKING:
    from syncline.strategies.base import StrategyRun

__all__ = ["Schedulers", "UnevenData"]


class UnevenData:
    """One run's bookkeeping for epochs that may end earlier on some workers."""

    def __init__(self, run: StrategyRun) -> None:
        self._run = run
        self.schedulers = Schedulers(run.optimizer, run.settings.schedulers)
        self.weight = (1.0, False)
        """The latest arguments of `set_weight`."""
        self.waits = False
        """Whether this worker has run out of data, and takes part in the others' rounds."""
        self.rates: list[list[float]] | None = None
        """The learning rates at each reduction of an uneven epoch; None outside such an epoch."""
        self._compares_rates = True
        """Whether the team is the same since the latest comparison of rates."""

    def begin(self) -> None:
        """Before an uneven epoch: refuse a world in which workers would wait in another run."""
        self.schedulers.begin_epoch()
        runs = len(self._run.world.runs)
        if runs > 1:
            raise IncompatibleError(
                f"{runs} runs train in this world, and this data may end earlier on some workers than on others, who "
                "would wait in the other runs: close a run that is no longer needed (run.close()), or give the loader "
                "drop_last=True or a length that the workers divide"
            )
        self.rates = [] if self.rates is None else self.rates

    def leave(self, somebody_ran_out: bool) -> None:
        """The loop has left an uneven epoch before its end.

        Workers that have run out of data wait for this one. It joins them before the next collective call, not here.
        """
        run = self._run
        if somebody_ran_out and not run.asynchronous:
            run.world.left.append(run.settle_uneven)
        else:  # all workers have left it after the same step
            self.rates = None

    def note_rates(self) -> None:
        """Record the learning rates of a reduction."""
        if self.rates is not None:
            groups = [group for optimizer in self._run.optimizers for group in optimizer.param_groups]
            self.rates.append([float(group["lr"]) for group in groups if "lr" in group])

    def forget_rates(self) -> None:
        """The team has changed, not at the same reduction for all workers: these rates are not compared."""
        self.rates = None if self.rates is None else []
        self._compares_rates = False

    def settle_shared_weights(self) -> None:
        """Join the others' rounds until all have run out, then copy weights, optimizers and schedulers of one worker.

        For strategies in which all workers have the same weights. The source took part in every step with data.
        """
        missed, taken = self._join_others(), self._run.stats.steps

        def settle() -> None:
            table = self._missed_steps(missed)
            self._check_rates(max(table) - missed)
            self._copy_weights(missed, table, taken)

        self._run_whole(settle)

    def share_weights(self, missed: int) -> None:
        """Copy weights, optimizers and schedulers to workers that missed steps. Every worker calls it."""
        taken = self._run.stats.steps
        self._run_whole(lambda: self._copy_weights(missed, self._missed_steps(missed), taken))

    def _missed_steps(self, missed: int) -> list[int]:
        table: list[int] = allgather(torch.tensor([missed]), group=self._run.communicator.group).tolist()
        return table

    def _copy_weights(self, missed: int, table: list[int], taken: int) -> None:
        """`table` has the missed steps of all workers, and `taken` is the number of steps that this one has taken."""
        run, root = self._run, table.index(min(table))
        if not any(table):
            return
        broadcast_tensors(run.communicator, [parameter.detach() for parameter in run.model.parameters()], root)
        for holder in (*run.optimizers, *self.schedulers.known):
            state = broadcast_tree(run.communicator, holder.state_dict(), root)
            if missed > table[root]:
                holder.load_state_dict(state)
        run.stats.steps = taken + (missed if missed > table[root] else 0)

    def settle_local_weights(self) -> None:
        """Join the others' rounds until all have run out, then copy learning rates, schedulers and the step count.

        For strategies in which each worker keeps its own weights.
        """
        self._join_others()

        def settle() -> None:
            steps = self._steps_of_all()
            self._check_rates(self._run.stats.steps - min(steps))
            self._copy_rates(steps)

        self._run_whole(settle)

    def share_rates(self) -> None:
        """Copy learning rates, schedulers and the step count to workers that missed steps. Every worker calls it."""
        self._run_whole(lambda: self._copy_rates(self._steps_of_all()))

    def _steps_of_all(self) -> list[int]:
        run = self._run
        steps: list[int] = allgather(torch.tensor([run.stats.steps]), group=run.communicator.group).tolist()
        return steps

    def _copy_rates(self, steps: list[int]) -> None:
        run, root = self._run, steps.index(max(steps))
        if min(steps) == max(steps):
            return
        groups = [group for group in run.optimizer.param_groups if "lr" in group]
        state = {
            "rates": [[float(group["lr"])] for group in groups],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers.known],
        }
        state = broadcast_tree(run.communicator, state, root)
        if run.stats.steps < steps[root]:
            for group, (rate,) in zip(groups, state["rates"], strict=True):
                group["lr"] = rate
            for scheduler, saved in zip(self.schedulers.known, state["schedulers"], strict=True):
                scheduler.load_state_dict(saved)
            run.stats.steps = steps[root]

    def _run_whole(self, work: Callable[[], None]) -> None:
        """Call several collectives. If a worker of an elastic job is lost, all of them are repeated from the first.

        The source of a copy may be the lost worker: the others then choose another one.
        """
        elastic, group = self._run.world.elastic, self._run.communicator.group
        if elastic is None:
            work()
            return

        def attempt() -> None:
            work()
            barrier(group)  # no worker has completed it before all have

        elastic.run(self._run.world, RepeatedCall(attempt))

    def _join_others(self) -> int:
        """Join the others' rounds until all have run out. Returns their number.

        If this worker has received data of a lost worker meanwhile, it returns to its loop.
        """
        run, missed, self.waits = self._run, 0, True
        run.global_batch_begins()
        try:
            while self._join_round():
                missed += 1
                if run.between_steps(missed):
                    missed = 0
                if run.epoch_continues:
                    break
            else:
                missed = 0 if run.catch_up(missed) else missed
        finally:
            self.waits = False
        continues, run.epoch_continues = run.epoch_continues, False
        if continues:
            raise EpochContinues
        return missed

    def _join_round(self) -> bool:
        """Take part in a round of the others. Returns whether any worker had data."""
        if self._run.world.elastic is not None:
            self._run.world.elastic.note_idle_step()
        return self._run.join_idle()

    def _check_rates(self, later: int) -> None:
        """Compare the learning rates of the last reduction with all workers, `later` reductions before the last."""
        rates, self.rates = self.rates or [], None
        last = rates[len(rates) - 1 - later] if self._compares_rates and len(rates) > later else []
        what = (
            "learning rates (a schedule that is none of PyTorch's and is stepped after every batch must be named in "
            "distribute(schedulers=[…]), with state_dict() and load_state_dict(), as a GradScaler must: a worker that "
            "runs out of data misses its steps)"
        )
        check_same(self._run.communicator, what, {f"group {number}": repr(rate) for number, rate in enumerate(last)})
        self._compares_rates = True


class Schedulers:
    """The schedulers named in `distribute`, and PyTorch's own that are attached to the optimizer.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    >>> schedulers = Schedulers(optimizer, named=())
    >>> schedulers.begin_epoch()
    >>> schedulers.known == [scheduler]
    True
    """

    def __init__(self, optimizer: Optimizer, named: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._named = list(named)
        self._attached: list[weakref.ref[LRScheduler]] = []
        self._counts: list[tuple[LRScheduler, int]] = []
        """Schedulers that may be stepped after every batch, with their step count at the start of the epoch."""

    @property
    def known(self) -> list[Any]:
        """All of them, in the same order on every rank."""
        return [*self._named, *(each for each in (one() for one in self._attached) if each is not None)]

    def find(self) -> list[Any]:
        """All of them, also those that were attached to the optimizer since."""
        self._find_attached()
        return self.known

    def begin_epoch(self) -> None:
        """Before an epoch in which some ranks may miss steps: find schedulers that were not named."""
        self._find_attached()
        stepped = (each for each in self.known if isinstance(each, LRScheduler))
        self._counts = [(each, _steps(each)) for each in stepped if not isinstance(each, ReduceLROnPlateau)]

    def _find_attached(self) -> None:
        named = any(getattr(each, "optimizer", None) is self._optimizer for each in self._named)
        scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if scheduled and not named and not (self._attached and all(one() is not None for one in self._attached)):
            self._attached = [weakref.ref(each) for each in _find_schedulers(self._optimizer)]

    def step_missed(self, taken: int, missed: int) -> None:
        """Catch up with ranks that took `missed` more steps, for schedulers that are stepped after every batch."""
        for scheduler, before in self._counts:
            if taken and _steps(scheduler) - before == taken:
                for _ in range(missed):
                    scheduler.step()


def _steps(scheduler: Any) -> int:
    """How often it was stepped. A chain of schedulers counts as its first one."""
    inner = getattr(scheduler, "_schedulers", None)
    return int(scheduler.last_epoch) if hasattr(scheduler, "last_epoch") or not inner else _steps(inner[0])


def _find_schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers that refer to this optimizer. A part of another scheduler, such as SequentialLR, is left out."""
    found: list[LRScheduler] = []
    for holder in gc.get_referrers(optimizer):
        inside = type(holder) is dict and holder.get("optimizer") is optimizer
        owners = gc.get_referrers(holder) if inside else [holder]
        found += [each for each in owners if issubclass(type(each), LRScheduler) and each.optimizer is optimizer]
    inner = {id(each) for one in found for each in getattr(one, "_schedulers", ())}
    outer = {id(each): each for each in found if id(each) not in inner}
    kinds = sorted(outer.values(), key=lambda each: type(each).__qualname__)
    names = [type(each).__qualname__ for each in kinds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise IncompatibleError(
            f"{names.count(twice)} schedulers of the kind {twice} are attached to the optimizer, and this data may end "
            "earlier on some workers than on others, who then take over the schedulers' state: name all of them in "
            "distribute(schedulers=[…]), in the same order on every worker"
        )
    return kinds
