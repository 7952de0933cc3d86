"""The contract of a strategy: `Strategy` describes it, a `StrategyRun` carries it out on one worker.

```text
Run                 the user's view (run.py)
└─ StrategyRun      what a strategy author subclasses; workers train in step
   ├─ LocalWeightsRun     each worker keeps its own weights between rounds (local_weights.py)
   └─ AsynchronousRun     each worker trains at its own pace (asynchronous.py)
```

A strategy author writes a frozen dataclass with `run_type`, and a subclass of one of these runs. The subclass registers
hooks on the model and the optimizer in `setup`, and overrides what it needs of the methods below "Contract".
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec, check_no_gradient_options
from syncline.control import ControlChannel
from syncline.data import MicroBatches, Sharded
from syncline.errors import DivergedError, IncompatibleError, JobEndedError, PeerLostError, SpecError, WorldError
from syncline.reduction import (
    BUCKET_BYTES,
    Communicator,
    GradientReducer,
    ReducerOptions,
    ReductionPolicy,
    as_table,
    broadcast_tensors,
    plain_name,
)
from syncline.specs import Spec
from syncline.strategies.model_watch import ModelWatch
from syncline.strategies.run import Readers, Run, Shard, Steps
from syncline.strategies.uneven import UnevenData
from syncline.world import DataPlace, TeamChange, allreduce, barrier

__all__ = [
    "FlatLayout",
    "Preset",
    "RunReducer",
    "RunSettings",
    "Strategy",
    "StrategyRun",
    "all_tensors",
    "check_counts",
    "check_flags",
    "check_gradients",
    "check_number",
    "mean_of_all",
    "strategy_run",
    "trained",
    "wide_dtype",
    "with_hint",
]

logger = logging.getLogger("syncline")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The options of `distribute`, apart from the strategy, the codec and the collective."""

    bucket_bytes: int = BUCKET_BYTES
    check_finite: bool = False
    schedulers: tuple[Any, ...] = ()
    seed: int = 0
    """Seed of the codec's random numbers."""
    diagnose: int = 0
    """Interval in steps at which the codec's error of each layer is written into the run log; 0: never."""
    more_optimizers: tuple[Optimizer, ...] = ()
    """The optimizers after the first, if a model has several."""
    on_resize: Callable[[int, int], None] | None = None
    """Called with the old and the new number of workers when the team of an elastic job changes."""
    auto: Mapping[str, Any] | None = None
    """What `auto` has chosen, and why. None: the user has named the strategy."""
    find_unused_parameters: bool = False
    """True: a worker without a gradient that others have counts as zeros in the mean. False: that is refused."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A strategy with settings for a race, relative to those of plain synchronous training."""

    spec: str
    rate: float = 1.0
    """Factor of the learning rate."""
    momentum: float | None = None
    """Largest momentum that the strategy tolerates; None: any."""
    scaling: str | None = None
    """How the learning rate grows with the number of workers; None: as for the other strategies."""
    one_host: bool = False
    """Whether all workers must be on one host."""
    engine: str | None = None
    """The backend that it needs, such as "mpi"; None: any."""


class Strategy:
    """When workers communicate, with which workers, and what they exchange.

    A frozen dataclass whose fields are its arguments.

    >>> import syncline as sl
    >>> sl.strategies.AllReduce(delay=1)                        # its repr is its spec
    allreduce(delay=1)
    """

    name: ClassVar[str]
    presets: ClassVar[tuple[Preset, ...]] = ()
    """The entries of a race by default."""
    several_optimizers: ClassVar[bool] = False
    """Whether several optimizers may train one model."""
    reduces_gradients: ClassVar[bool] = False
    """Whether codecs encode only gradients that the workers all-reduce."""

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec with options that this strategy cannot follow. Called before anything is sent."""
        if not self.reduces_gradients:
            check_no_gradient_options(codec, repr(self))

    def run_type(self) -> type[StrategyRun]:
        """The class of its runs. A strategy overrides this method, or `attach`."""
        raise NotImplementedError(f"{type(self).__name__} has neither run_type() nor attach()")

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        """Start to synchronise the workers' models, by hooks on the model and the optimizer."""
        return self.run_type()(self, model, optimizer, communicator, settings)

    @property
    def state_format(self) -> str:
        """The name of the layout of the state that its runs save.

        A run restores a state of its own format. From another format it takes only the model and the optimizer's state.
        """
        return self.name

    @property
    def asynchronous(self) -> bool:
        """Whether each worker trains at its own pace. Its runs are `AsynchronousRun`s."""
        return False

    @property
    def survives(self) -> bool:
        """Whether the other workers continue when a worker is lost (`--on-failure continue`)."""
        return self.asynchronous

    def observe(self, model: nn.Module, network: Any) -> ControlChannel | None:
        """The channel for a process that takes no steps, such as an evaluator, on the network of the servers.

        None if only the workers see the weights: the evaluator is then a task of rank 0.
        """
        return None

    def __repr__(self) -> str:
        options = {
            field.name: getattr(self, field.name)
            for field in fields(self)  # type: ignore[arg-type]
            if field.repr and getattr(self, field.name) != field.default
        }
        return str(Spec(self.name, (), options))


class StrategyRun(Run):
    """One worker's part of a strategy in training. A subclass overrides `setup` instead of the constructor."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        communicator: Communicator,
        settings: RunSettings,
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.optimizers = (optimizer, *settings.more_optimizers)
        self.communicator = communicator
        self.settings = settings
        self.world = communicator.world
        self.stats = communicator.stats
        self.total_steps: int | None = None
        self.reductions = 0
        """The number of reductions so far. `note_reduction` counts them."""
        self.hooks: list[Any] = []
        """Hooks of the strategy, which `detach` removes."""
        self.synchronised = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        """The `id` of every parameter that the strategy synchronises."""
        self.readers = Readers(communicator.rank, communicator.size)
        self.epoch_continues = False
        """Whether this worker had no more data, and has received data of a lost worker since."""
        self._counted_at_batch: int | None = None
        """`counted_steps` when the current batch was read, or awaited by a worker without data; None before."""
        self._untrained_batches = 0
        """The number of latest batches that are in no step that counts for all, the current one included."""
        self.on_resize = settings.on_resize
        self._team_size = communicator.size
        self.uneven = UnevenData(self)
        self.watch = ModelWatch(self, self._reload if self.copies_weights and communicator.size > 1 else None)
        self._closed = False
        self._warmed_up = True
        """False in a newcomer that takes a step alone before it asks to join."""
        self._own: dict[str, Tensor] | None = None
        """This worker's own tensors while the model holds the agreed ones; None outside `agreed()`."""
        try:
            self.setup()
        except BaseException:  # no hook of a run that does not exist stays behind
            StrategyRun.detach(self)
            self.watch.close()
            raise

    def setup(self) -> None:
        """Make the strategy's own attributes and hooks. The constructor calls it at its end."""

    # Contract: facts about the strategy.

    @property
    def asynchronous(self) -> bool:
        """Whether each worker trains at its own pace."""
        return self.strategy.asynchronous

    @property
    def copies_weights(self) -> bool:
        """Whether the strategy holds weights outside the model, such as at servers. A load must then reach them."""
        return False

    @property
    def needs_same_parameters(self) -> bool:
        """Whether the strategy's saved state is valid only if the same parameters are trained as when it was saved."""
        return True

    @property
    def first_exchange(self) -> int | None:
        """The step after which workers communicate for the first time; None: they never do in training."""
        return 1

    @property
    def wants_loss(self) -> bool:
        """Whether the strategy needs each step's loss, by `note_loss`."""
        return False

    @property
    def members(self) -> int:
        """The number of models that the model's forward evaluates inside `agreed()`."""
        return 1

    @property
    def replica(self) -> nn.Module:
        """The module whose forward trains: the model, unless another library's wrapper contains it."""
        return self.model

    def predict(self) -> dict[str, float] | None:
        """The seconds of communication and of the codec in a step, by the cost model; None if it has no estimate.

        Every worker calls it, because the network may be calibrated.
        """
        return None

    # Contract: steps.

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """Set the weight of this worker's next gradients in the mean, usually 1. `uneven`: others' may differ."""

    def reduce_gradients(self) -> None:
        """Do what the end of a backward pass does, with the gradients that there are. Pipelines call it once a step."""

    def join_idle(self) -> bool:
        """Take part in a step of the others without data. Returns whether any worker had data."""
        return False

    def check_uneven(self) -> None:
        """Before an epoch in which workers may run out of data at different times: refuse it if it is impossible."""
        self.uneven.begin()

    def settle_uneven(self) -> None:
        """This worker has run out of data: join the others' rounds until all have, then catch up with them."""
        self.uneven.settle_shared_weights()

    # Contract: the agreed model.

    def shown_tensors(self) -> dict[str, Tensor]:
        """The tensors that `show_agreed` changes, by name: buffers, and weights if they differ between workers."""
        return {name: buffer.detach() for name, buffer in self.buffers().items()}

    def show_agreed(self) -> None:
        """Write into the model what all workers agree on. Every worker calls it.

        By default the mean of all buffers; rank 0's for buffers that have no mean.
        """
        buffers = list(self.buffers().values())
        self.average([buffer for buffer in buffers if buffer.is_floating_point()])
        broadcast_tensors(self.communicator, [buffer for buffer in buffers if not buffer.is_floating_point()])

    def finish(self) -> None:
        """Leave the final model on this worker, the same on all workers. Every worker calls it."""
        self.show_agreed()

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    # Contract: state in checkpoints.

    def shared_state(self) -> dict[str, Any]:
        """The strategy's state that is the same on all workers."""
        return {}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Restore `shared_state`."""

    def local_state(self) -> dict[str, Any]:
        """The strategy's state of this worker alone."""
        return {}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore `local_state`: this worker's, then those of former workers that this worker takes over."""

    def restart(self) -> None:
        """Reset the strategy's own state, from the model and the optimizer, which are the same on every worker.

        Every worker calls it, after a checkpoint of another strategy or another state was loaded.
        """

    # Contract: a team that changes.

    @property
    def elastic_refusal(self) -> str:
        """Why the run cannot continue with another team of an elastic job; empty if it can."""
        if self.asynchronous:
            return f"{self.strategy!r} survives the loss of a worker, but no worker can join: leave --restart out"
        return f"{self.strategy!r} needs the same workers from its start to its end: leave --elastic out"

    @property
    def counted_steps(self) -> int:
        """A count that grows when the batches of all workers have become part of what survives the loss of one."""
        return self.progress

    @property
    def epoch_needs_round(self) -> bool:
        """Whether all workers take part in a round at the end of an epoch, also if they run out of data together."""
        return False

    @property
    def has_untrained_batches(self) -> bool:
        """Whether this worker has trained on batches that would be lost with it."""
        return self._counted_at_batch is not None and self.counted_steps == self._counted_at_batch

    def complete_in_flight(self) -> None:
        """Wait for reductions in flight: newcomers take no part in them. Every worker calls it before workers join."""

    def use_team(self) -> None:
        """Continue with the present team: the communicator has another rank and size. Every worker calls it."""

    def resume_steps(self) -> None:
        """Set the strategy's step counters to `stats.steps`, which was loaded from another strategy's checkpoint."""

    # Services for strategies.

    def synchronises(self, parameter: nn.Parameter) -> bool:
        """Whether the strategy synchronises a parameter."""
        return id(parameter) in self.synchronised

    def note_reduction(self) -> None:
        """Count a reduction, and record its learning rates while workers may miss some."""
        self.reductions += 1
        if self.uneven.rates is not None:
            self.uneven.note_rates()

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name."""
        return {plain_name(name): buffer for name, buffer in self.model.named_buffers()}

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the workers. Every worker calls it."""
        for tensor, mean in zip(tensors, mean_of_all(self.communicator, tensors), strict=True):
            tensor.detach().copy_(mean)

    @property
    def alone(self) -> bool:
        """Whether this worker is the only one, from the start to the end of the job."""
        return self.communicator.size == 1 and self.world.elastic is None

    @property
    def inside_agreed(self) -> bool:
        """Whether the model holds the agreed weights, and this worker's own are set aside."""
        return self._own is not None

    # The user's view: see `Run`.

    @property
    def config(self) -> dict[str, Any]:
        return {
            "strategy": repr(self.strategy),
            "codec": None if self.communicator.codec is None else repr(self.communicator.codec),
            "collective": self.communicator.collective,
            "collectives_chosen": self.communicator.choices,
            "bucket_bytes": self.settings.bucket_bytes,
            "check_finite": self.settings.check_finite,
            "find_unused_parameters": self.settings.find_unused_parameters,
            **({} if self.settings.auto is None else {"auto": dict(self.settings.auto)}),
        }

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
        options = {"seed": seed, "split": split, "drop_last": drop_last, "batch": batch, "pad": pad}
        return Shard(self, self.readers.get(Sharded, data, name, options), pad)

    def steps(
        self, data: Any, *, global_batch: int, micro_batch: int | None = None, seed: int = 0, name: str | None = None
    ) -> Steps:
        options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
        return Steps(self, self.readers.get(MicroBatches, data, name, options))

    def expect(self, steps: int) -> None:
        if steps < 1:
            raise SpecError(f"a run of {steps} steps has none to count")
        self.total_steps = steps
        self._warn_if_never_synchronised(steps, "is going to take")

    def note_loss(self, loss: float | Tensor) -> None:
        pass

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        self.world.finish_left()
        if self.inside_agreed or (self.alone and not self.asynchronous):
            yield
            return
        self.watch.check_replaced()
        self.watch.apply_load()
        shown = self.shown_tensors()
        self._own = {name: tensor.clone() for name, tensor in shown.items()}
        try:
            with torch.no_grad():
                self.show_agreed()
            yield
        finally:
            own, self._own = self._own, None
            for name, tensor in shown.items():
                tensor.copy_(own[name])

    def saving(self) -> AbstractContextManager[None]:
        """A context in which a checkpoint reads `model` and `optimizer`. Every worker enters it."""
        return self.agreed()

    def loading(self) -> AbstractContextManager[None]:
        """A context in which a checkpoint is loaded into `model` and `optimizer`."""
        return nullcontext()

    def close(self) -> None:
        if self._closed:
            return
        self.world.finish_left()
        if self.world.elastic is not None and self.world.elastic.joining:
            self.release()
            raise self._error_of_late_worker(self.world.elastic.limits.member)
        self._warn_if_never_synchronised(self.stats.steps, "has taken")
        if not self.alone or self.asynchronous:
            self.watch.apply_load()
            with torch.no_grad():
                self.finish()
        if self.world.elastic is not None and not self.asynchronous:
            barrier(self.communicator.group)  # no worker leaves while another may need the result of its last step
        self.release()
        self.communicator.close()

    def _error_of_late_worker(self, member: int) -> WorldError:
        """A newcomer has run its whole script, and was not admitted."""
        what = f"this worker (member {member}) has run its whole script and was not admitted to the team"
        if not self.readers.all():
            return WorldError(f"{what}: a worker joins where it reads its data by run.shard() or run.steps()")
        return JobEndedError(f"{what}: the others had passed each epoch before it, and its model is not trained")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends = isinstance(error, SystemExit) and not error.code  # like the normal end of a process
        if error is None or (ends and self.asynchronous):
            self.close()
        elif not self._closed:
            self.release()

    # The framework's part.

    @property
    def progress(self) -> int:
        """A count that grows with every reduction and step. Data read while it stays the same was not trained on."""
        return self.stats.steps + self.reductions

    def control_channel(self) -> ControlChannel | None:
        """The control channel of an asynchronous run; None for others."""
        return None

    def board(self) -> ControlChannel | None:
        """The old name of `control_channel`."""
        warnings.warn("run.board() is now called run.control_channel()", DeprecationWarning, stacklevel=2)
        return self.control_channel()

    def team_changed(self, change: TeamChange) -> None:
        """The world has another team: continue with it, and tell the script if the number of workers has changed."""
        self.use_team()
        self.uneven.forget_rates()
        old, self._team_size = self._team_size, change.size
        elastic = self.world.elastic
        newcomer = elastic is not None and elastic.joining
        if self.on_resize is not None and old != change.size and not newcomer:
            self.on_resize(old, change.size)

    def batch_read(self, reader: Sharded | MicroBatches) -> None:
        """A batch of a reader is about to be trained on."""
        self.global_batch_begins()
        if self.world.elastic is not None:
            self.world.elastic.batch_read(self.world, self.readers.place_of(reader), self.stats.steps)

    def global_batch_begins(self) -> None:
        """The workers train on the next global batch, in which this one may have no share."""
        trained = self.counted_steps != self._counted_at_batch
        self._counted_at_batch = self.counted_steps
        self._untrained_batches = 1 if trained else self._untrained_batches + 1

    def note_trained(self) -> None:
        """A loop over data continues with its next batch, or ends. For runs whose workers claim their batches."""

    def apply_change_of_data(self, change: TeamChange) -> None:
        """Read the data with the new number of workers from the next batch on.

        The batches of lost workers are distributed again, unless a complete step has counted them.
        """
        counted = self.counted_steps != self._counted_at_batch
        # In the rounds of a worker without data, the first one trains all that is left.
        lost = () if counted and (change.trained or self.uneven.waits) else change.lost
        untrained = 1 if counted else self._untrained_batches
        self.epoch_continues |= self.readers.regroup(change.rank, change.size, lost, untrained)

    def newcomer_state(self) -> dict[str, Any]:
        """The state of this worker that a newcomer starts from."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedulers": [each.state_dict() for each in self.uneven.schedulers.find()],
            "shared": {**self.state_dict()["shared"], "cursors": self.readers.next_state()},
        }

    def load_newcomer_state(self, state: Mapping[str, Any]) -> None:
        """In a newcomer: start from the state of a member."""
        self.model.load_state_dict(state["model"])
        self._load_optimizers(state)
        self.load_state_dict({"shared": state["shared"], "local": None})

    def _load_optimizers(self, state: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        schedulers = self.uneven.schedulers.find()
        if len(schedulers) != len(state["schedulers"]):
            raise IncompatibleError(
                f"this worker has {len(schedulers)} learning-rate schedulers, and the others have "
                f"{len(state['schedulers'])}: a worker joins with the same script"
            )
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    def between_steps(self, missed: int = 0) -> bool:
        """Called between two batches of an elastic job: share the state, and admit newcomers, where that is due.

        `missed` is the number of steps that this worker has missed because it had no data. Returns whether it has
        caught up with the others.
        """
        elastic = self.world.elastic
        if elastic is None:
            return False
        due = self.catch_up(missed)
        if not self.has_untrained_batches:  # a newcomer starts from weights that all have
            elastic.note_own_departure()
            if elastic.completes_in_flight:
                self.complete_in_flight()
            due |= elastic.between_steps(self.world, lambda: self._share_missed_steps(missed))
        return due

    def catch_up(self, missed: int) -> bool:
        """Bring workers that have missed steps up to date if they have data again. Returns whether they have."""
        elastic = self.world.elastic
        if elastic is None or not elastic.idle_after_loss:
            return False
        elastic.idle_after_loss = False
        self._share_missed_steps(missed)
        return True

    def _share_missed_steps(self, missed: int) -> None:
        self.share_steps(missed)
        self.uneven.forget_rates()

    def share_steps(self, missed: int) -> None:
        """Bring workers that have missed steps up to date. Every worker calls it."""
        self.uneven.share_weights(missed)

    def warn_of_no_checkpoint(self) -> None:
        """If the launcher ends the job: say that this strategy saves no last checkpoint. The worker leaves alone."""
        elastic = self.world.elastic
        if elastic is not None and elastic.formation.read_ending() and self.world.rank == 0:
            logger.warning(
                "%s, and %r saves no checkpoint then: its workers cannot wait for each other in the middle of an "
                "epoch; call sl.save between epochs",
                elastic.formation.ending,
                self.strategy,
            )

    def start_in_team(self) -> None:
        """Called when the run is complete: the team of an elastic job may have changed meanwhile."""
        elastic = self.world.elastic
        if elastic is None:
            return
        if elastic.manual:
            raise IncompatibleError("an elastic job trains by sl.distribute or by Horovod's API, not by both")
        if self.elastic_refusal and (elastic.joining or not self.asynchronous):
            raise IncompatibleError(self.elastic_refusal)
        if not elastic.joining:
            self._team_size = self.communicator.size
            self.use_team()
            self.readers.regroup(*elastic.place_in_reader_team, ())
            if elastic.data_changes_later:  # the others were told of the change when they had this run already
                self.uneven.forget_rates()
        else:  # a newcomer takes over the state of all its runs where its first loop over data begins
            self._warmed_up = False
            self.readers.enter_at = lambda place: not elastic.joining or elastic.enter(self.world, place)
            self.readers.place_of_team = elastic.place_of_team

    def warms_up(self, place: DataPlace) -> bool:
        """In a newcomer: whether it takes a step alone before it asks to join at a place in the data.

        First steps take several times as long as others, and the team would wait for it. Nothing of that step is kept.
        True only once.
        """
        elastic = self.world.elastic
        if self._warmed_up or elastic is None or not elastic.joining or elastic.will_pass(place):
            return False
        self._warmed_up = True
        return True

    def end_warm_up(self) -> None:
        """In a newcomer that has taken a step alone: forget it. The state of the others replaces the rest."""
        if self.world.elastic is not None and self.world.elastic.joining:  # not in the loop of another run
            for run in [each for each in self.world.runs if isinstance(each, StrategyRun)]:
                run.forget_steps()

    def forget_steps(self) -> None:
        """Forget the steps of a newcomer before it has joined."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.restart()
        self.stats.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """`shared` is the same on every worker, `local` this worker's own; tensors and plain values only."""
        self.world.finish_left()
        if self.communicator.size > 1:
            self.watch.check_replaced()
        if not self.inside_agreed:
            self.watch.apply_load()
        own = self._own or {}
        buffers = {name: own.get(name, buffer.detach()).clone() for name, buffer in self.buffers().items()}
        return {
            "shared": {
                "strategy": repr(self.strategy),
                "format": self.strategy.state_format,
                "trained": list(trained(self.model)),
                "collectives": self.communicator.choices,
                "cursors": self.readers.state_dict(),
                "steps": self.stats.steps,
                "state": self.shared_state(),
                **({"optimizers": [each.state_dict() for each in more]} if (more := self.optimizers[1:]) else {}),
            },
            "local": {"buffers": buffers, "strategy": self.local_state()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run. `local` is None if the checkpoint has no part for this worker.

        The model and the optimizer already hold their states. If the checkpoint is of another strategy, or other
        parameters are trained now, only these are used, and the strategy's own state is reset.
        """
        shared, local = state["shared"], state["local"]
        self.watch.forget_loads()
        self.communicator.adopt(dict(shared["collectives"]))
        position = self.saved_position(shared, local)
        self.readers.load_state_dict(position["cursors"])
        self.stats.steps = int(position["steps"])
        for optimizer, saved in zip(self.optimizers[1:], shared.get("optimizers", []), strict=False):
            optimizer.load_state_dict(saved)
        reason = self._why_restart(shared)
        if reason is None:
            self.load_shared_state(shared["state"])
            self.load_local_states([] if local is None else [local["strategy"], *state.get("others", [])])
        else:
            if self.communicator.rank == 0:
                logger.warning(
                    "the checkpoint is %s: %r takes over its model and the optimizer's state, and starts its own state "
                    "fresh",
                    reason,
                    self.strategy,
                )
            self.restart()
            self.resume_steps()
        if local is not None:
            buffers = self.buffers()
            for name, saved in local["buffers"].items():
                if name in buffers:
                    buffers[name].detach().copy_(saved)

    def saved_position(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The step count and the data positions of a checkpoint: rank 0's, because all workers are at the same step."""
        return shared

    def _why_restart(self, shared: Mapping[str, Any]) -> str | None:
        """Why the strategy cannot load its state of a checkpoint; None: it can. Older ones have only the spec."""
        spec, own = str(shared["strategy"]), self.strategy
        if shared.get("format", spec.partition("(")[0]) != own.state_format and spec != repr(own):
            return f"of strategy {spec}"
        if not self.needs_same_parameters or "trained" not in shared:
            return None
        before, now = set(shared["trained"]), set(trained(self.model))
        other = min(before ^ now, default=None)
        if other is None:
            return None
        return f"of a run that {'trained' if other in before else 'had frozen'} {other}, unlike this one"

    def close_at_exit(self) -> None:
        """Called when the process ends without `close()`."""
        self._warn_if_never_synchronised(self.stats.steps, "has taken")

    def release(self) -> None:
        """Remove all hooks: the run is over on this worker."""
        self._closed = True
        if self.settle_uneven in self.world.left:
            self.world.left.remove(self.settle_uneven)
        self.detach()
        self.watch.close()
        if self in self.world.runs:
            self.world.runs.remove(self)

    def wait_for_reload(self) -> None:
        """Wait until every worker has loaded a state into its model."""
        try:
            barrier(self.world.everyone)
        except PeerLostError as error:
            raise with_hint(
                error,
                f"rank {self.world.rank} has loaded a state into the model after sl.distribute, and waits for the "
                "other ranks to do the same",
            ) from error

    def _reload(self) -> None:
        """A state was loaded into the model or the optimizer: start from it, together with the other workers."""
        self.wait_for_reload()
        self.restart()

    def _warn_if_never_synchronised(self, steps: int, what: str) -> None:
        """Warn if the workers never communicate in so many steps."""
        first = self.first_exchange
        if first is not None and 0 < steps < first and self.communicator.size > 1 and self.communicator.rank == 0:
            logger.warning(
                "%r communicates for the first time after step %d, and this run %s %d: until the end every worker "
                "trains on its own data alone; give a shorter period, or train longer",
                self.strategy,
                first,
                what,
                steps,
            )

    def _describe(self) -> dict[str, str]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {
            "strategy": repr(self.strategy),
            "codec": f"codec {self.communicator.codec!r}",
            "collective": f"collective {self.communicator.collective}",
            "rank": f"rank {self.world.rank} of {self.communicator.group.size}",
            "model": f"{parameters} parameters",
        }

    def __repr__(self) -> str:
        parts = [*self._describe().values(), self.stats.describe()["steps"], *(["closed"] if self._closed else [])]
        return f"Run({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return as_table(self._describe() | self.stats.describe())

    def __copy__(self) -> StrategyRun:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyRun:
        """The same run: a copy of a module that holds its run, such as an average of weights, takes no steps itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: a module that holds its run can be saved, and has no run after it is loaded."""
        return _no_run, ()


def _no_run() -> None:
    """The value of a pickled run when it is loaded: None."""
    return


def with_hint(error: PeerLostError, hint: str) -> PeerLostError:
    """The same error with a hint for the user."""
    return PeerLostError(f"{error}; {hint}", peer=error.peer, pending=error.pending, seconds=error.seconds)


def check_counts(strategy: Strategy, **least: int) -> None:
    """Refuse an argument that is not a whole number, or is below its least value."""
    for key, lowest in least.items():
        value = getattr(strategy, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise SpecError(f"{strategy.name}({key}={value!r}): it must be a whole number, at least {lowest}")


def check_flags(strategy: Strategy, *keys: str) -> None:
    """Refuse an argument that is neither True nor False."""
    for key in keys:
        value = getattr(strategy, key)
        if not isinstance(value, bool):
            raise SpecError(f"{strategy.name}({key}={value!r}): it must be True or False")


def check_number(strategy: Strategy, key: str, wanted: str, is_allowed: Callable[[float], bool]) -> None:
    """Refuse an argument that is not a number, or not an allowed one. `wanted` describes the allowed numbers."""
    value = getattr(strategy, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_allowed(value):
        raise SpecError(f"{strategy.name}({key}={value!r}): {wanted}")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {plain_name(name): each for name, each in model.named_parameters() if each.requires_grad}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name, detached."""
    return {plain_name(name): each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def mean_of_all(communicator: Communicator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor over the workers, without a codec. Every worker calls it.

    Half precision is summed in float32, so the mean of equal tensors is that tensor.
    """
    means = [tensor.detach().clone() for tensor in tensors]
    if communicator.size == 1:
        return means
    layout = FlatLayout(tensors, wide_dtype)
    rows = [allreduce(row, op="mean", group=communicator.group) for row in layout.flatten(tensors)]
    for mean, view in zip(means, layout.views(rows), strict=True):
        mean.copy_(view)
    return means


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 instead of half precision, so that sums and small steps are not rounded away."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class FlatLayout:
    """One flat CPU tensor for each dtype of some tensors, and each tensor's view in it.

    `dtype_of` may give the flat tensors another dtype.
    """

    def __init__(
        self, tensors: Sequence[Tensor], dtype_of: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._by_dtype: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self._by_dtype.setdefault(dtype_of(tensor.dtype), []).append(number)

    def flatten(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New flat tensors that hold the tensors' values."""
        return [
            torch.cat([tensors[number].detach().reshape(-1).to("cpu", dtype) for number in numbers])
            for dtype, numbers in self._by_dtype.items()
        ]

    def views(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's view in the flat tensors, in the order of the tensors."""
        views: dict[int, Tensor] = {}
        for row, numbers in zip(rows, self._by_dtype.values(), strict=True):
            parts = torch.split_with_sizes(row, [self._shapes[number].numel() for number in numbers])
            views |= {number: part.view(self._shapes[number]) for number, part in zip(numbers, parts, strict=True)}
        return [views[number] for number in range(len(self._shapes))]


def check_gradients(run: StrategyRun) -> None:
    """Raise `DivergedError` with the parameter's name if one of this worker's gradients is not finite."""
    gradients = [(name, each.grad) for name, each in run.model.named_parameters() if each.grad is not None]
    values = [(name, each._values() if each.is_sparse else each) for name, each in gradients]
    finite = [torch.isfinite(each.sum()) for _, each in values]  # ten times faster than a check of each element
    if not finite or bool(torch.stack([each.to(finite[0].device) for each in finite]).all()):  # one wait for the GPU
        return
    name = next((plain_name(name) for name, each in values if not bool(torch.isfinite(each).all())), None)
    if name is None:  # only a sum was too large
        return
    rank = run.world.rank
    raise DivergedError(
        f"NaN or Inf in the gradient of {name} on rank {rank}", rank=rank, parameter=name, step=run.stats.steps
    )


class RunReducer(GradientReducer):
    """A reducer with the settings of a run, and with state for checkpoints."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        communicator: Communicator,
        settings: RunSettings,
        policy: ReductionPolicy,
        *,
        codec: Codec | None,
        attach_hooks: bool = True,
        find_unused_parameters: bool = False,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        options = ReducerOptions(
            codec=codec,
            bucket_bytes=settings.bucket_bytes,
            check_finite=settings.check_finite,
            find_unused_parameters=find_unused_parameters,
            sparse=sparse,
            attach_hooks=attach_hooks,
            seed=settings.seed,
            diagnose_every=settings.diagnose,
        )
        super().__init__(parameters, communicator, policy, options)

    def shared_state(self) -> dict[str, Any]:
        """The codec's state that is the same on all workers, and the layout of the buckets."""
        coding = {} if self.codec_state is None else {"coding": self.codec_state.shared_state()}
        return {"layout": self.layout(), **coding}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        if "layout" in state:
            self.load_layout(state["layout"])
        if self.codec_state is not None:
            self.codec_state.load_shared_state(state.get("coding", {}))

    def local_state(self) -> dict[str, Any]:
        """The codec's residuals on this worker."""
        return {} if self.codec_state is None else self.codec_state.state()

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore `local_state`, also that of former workers."""
        if self.codec_state is not None:
            self.codec_state.load(states)


def strategy_run(run: Run) -> StrategyRun:
    """The strategy's side of a run, for the training loop, checkpoints and tests."""
    assert isinstance(run, StrategyRun), type(run)
    return run
