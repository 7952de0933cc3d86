"""The contract of a way of agreeing, and what the user holds of it: a `StrategyRun`."""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler

from syncline.codecs import Codec, check_no_gradient_options
from syncline.data import Cursor, MicroBatches, Sharded
from syncline.errors import DivergedError, IncompatibleError, PeerLostError, SpecError
from syncline.reduction import (
    BUCKET_BYTES,
    Communicator,
    Stats,
    as_table,
    broadcast_tensors,
    broadcast_tree,
    check_same,
    plain_name,
)
from syncline.specs import Spec
from syncline.strategies.control import ControlBarrier, ControlChannel
from syncline.strategies.reading import Shard, Steps
from syncline.strategies.schedulers import Schedulers
from syncline.strategies.watch import ModelWatch
from syncline.strategies.wrappers import refuse_wrapper_around
from syncline.world import Group, World, allgather, allreduce, barrier

__all__ = ["Preset", "RunSettings", "Strategy", "StrategyRun", "check_gradients", "mean_of_all", "wide_dtype"]

logger = logging.getLogger("syncline")

R = TypeVar("R", Sharded, MicroBatches)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What `distribute` is told beside the strategy."""

    bucket_bytes: int = BUCKET_BYTES
    check_finite: bool = False
    schedulers: tuple[Any, ...] = ()
    seed: int = 0
    """Of the codec's random bits."""
    diagnose: int = 0
    """Every so many steps, what the codec does to each layer goes into the run log; 0: never."""
    more_optimizers: tuple[Optimizer, ...] = ()
    """The optimizers after the first, if a model has several."""
    find_unused_parameters: bool = False
    """Whether a worker without a gradient that others have counts with zeros in the mean; False: that is refused."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A strategy with settings that suit it, in terms of what suits plain synchronous training."""

    spec: str
    rate: float = 1.0
    """What the learning rate is multiplied with."""
    momentum: float | None = None
    """The most that it bears; None: any."""
    scaling: str | None = None
    """How the rate grows with the workers; None: as for all others."""
    one_host: bool = False
    """Whether all workers must be on one host."""
    engine: str | None = None
    """What must carry its bytes, "mpi"; None: any engine does."""


class Strategy(ABC):
    """When workers talk, with whom, and what they exchange. A frozen dataclass whose fields are its arguments.

    >>> import syncline as sl
    >>> sl.AllReduce(delay=1)                        # its repr is its spec
    allreduce(delay=1)
    """

    name: ClassVar[str]
    presets: ClassVar[tuple[Preset, ...]] = ()
    """What takes part in a race by default."""
    several_optimizers: ClassVar[bool] = False
    """Whether several optimizers may train one model."""
    reduces_gradients: ClassVar[bool] = False
    """Whether codecs encode only gradients that the workers all-reduce."""

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec with options that this strategy cannot obey. Called before anything is sent."""
        if not self.reduces_gradients:
            check_no_gradient_options(codec, repr(self))

    @abstractmethod
    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        """Begin to keep the ranks' models together, by hooks on the model and the optimizer."""

    @property
    def state_format(self) -> str:
        """Names the layout of the state that its runs save.

        A run takes a state of its own format back as it was. From another it takes the model and the optimizer's state,
        and its own state starts fresh.
        """
        return self.name

    @property
    def asynchronous(self) -> bool:
        """Whether its workers go at their own pace, and a process beside them may look at the weights (`observe`)."""
        return False

    @property
    def survives(self) -> bool:
        """Whether the others go on when a worker is lost and nobody ends them (`--on-failure continue`)."""
        return self.asynchronous

    def observe(self, model: nn.Module, network: Any) -> ControlChannel | None:
        """A door for a process that takes no steps, such as an evaluator, on the network of the servers.

        None where only the workers themselves see the weights: an evaluator is a task of rank 0 then.
        """
        return None

    def __repr__(self) -> str:
        told = {
            field.name: getattr(self, field.name)
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        }
        return str(Spec(self.name, (), told))


class StrategyRun(ABC):
    """A model in training on many workers. Made by `sl.distribute`; a context manager.

    >>> import torch, syncline as sl
    >>> with sl.init() as world:
    ...     model = torch.nn.Linear(2, 1)
    ...     run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     with run.agreed():
    ...         run.stats.steps
    0
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.exchange = exchange
        self.settings = settings
        self.optimizers = (optimizer, *settings.more_optimizers)
        self.total_steps: int | None = None
        self._readers: dict[str, tuple[Any, Sharded | MicroBatches]] = {}
        self._cursors: dict[str, Mapping[str, Any]] = {}
        self._own: dict[str, torch.Tensor] | None = None
        """This worker's own tensors while the model holds the agreed ones; None outside `agreed()`."""
        self._control_barrier: ControlBarrier | None = None
        self._known = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        reloaded = self._reload if self.copies_weights and exchange.size > 1 else None
        self._watch = ModelWatch(model, self.optimizers, self.synchronises, reloaded)
        self._checked_wrapper = False
        # Before the strategy's own hook, so that it sees checked gradients.
        self._step_hooks = [each.register_step_pre_hook(self._begin_step) for each in self.optimizers]
        self.kept: dict[str, Any] = {}
        """Plain values that a loose run's loop has checkpoints keep for this worker alone."""
        self.saving_team: Group | None = None
        """While a checkpoint of an asynchronous run is written: the workers that write it; else None."""
        self._closed = False
        self._rates: list[list[float]] | None = None
        """At the reductions of an epoch in which workers may run out of data."""
        self._reductions = 0
        self.schedulers = Schedulers(optimizer, settings.schedulers)
        self.weighed = (1.0, False)
        """The latest arguments of `set_weight`."""

    @property
    def world(self) -> World:
        """The world it runs in."""
        return self.exchange.world

    @property
    def replica(self) -> nn.Module:
        """The module whose forward trains: the model itself, unless somebody else's way of agreeing wraps it."""
        return self.model

    @property
    def asynchronous(self) -> bool:
        """Whether every worker goes at its own pace.

        Between the first step and the last, neither the run nor the loop around it calls a collective of the world
        then: a worker that was killed would break it.
        """
        return self.strategy.asynchronous

    def control_channel(self) -> ControlChannel | None:
        """Where the workers of a loose run tell each other how far they are; None for others."""
        return None

    def board(self) -> ControlChannel | None:
        """The old name of `control_channel`."""
        warnings.warn("run.board() is now called run.control_channel()", DeprecationWarning, stacklevel=2)
        return self.control_channel()

    @property
    def stats(self) -> Stats:
        """Bytes and seconds so far, on this rank."""
        return self.exchange.stats

    @property
    def config(self) -> dict[str, Any]:
        """The resolved specs, and the choices that were made by measuring."""
        return {
            "strategy": repr(self.strategy),
            "codec": None if self.exchange.codec is None else repr(self.exchange.codec),
            "collective": self.exchange.collective,
            "collectives_chosen": self.exchange.choices,
            "bucket_bytes": self.settings.bucket_bytes,
            "check_finite": self.settings.check_finite,
            "find_unused_parameters": self.settings.find_unused_parameters,
        }

    @property
    def copies_weights(self) -> bool:
        """Whether the strategy holds weights beside the model's, at servers or as centres: a load must reach them."""
        return False

    @property
    def needs_same_parameters(self) -> bool:
        """Whether the strategy's own state counts only where the same parameters are trained as when it was saved."""
        return True

    @property
    def first_exchange(self) -> int | None:
        """The step after which workers communicate for the first time; None: by design they never do in training."""
        return 1

    def synchronises(self, parameter: nn.Parameter) -> bool:
        """Whether the strategy synchronises a parameter."""
        return id(parameter) in self._known

    def predict(self) -> dict[str, float] | None:
        """What `costs` expects of a step on this network: seconds of communication and of the codec.

        None where it knows of no model for this strategy. Every worker calls it; the network may be calibrated.
        """
        return None

    @property
    def work(self) -> int:
        """A count that grows with every reduction and step. Data read while it stays the same was not trained on."""
        return self.stats.steps + self._reductions

    # Data.

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

        Shuffled anew each time from `seed` where the loader shuffles; the same global order whatever the number of
        workers. The loader's batch size is each worker's. A worker that runs out of data before the others takes part
        in their steps with nothing to add, and the mean is over those who still have some. With `split=False` the
        data is this worker's own already. `name` keeps the place of several iterables apart in checkpoints.

        With `pad=False` nothing is trained on it: for evaluation. Each worker reads its share, every sample once in
        all, and may have a batch fewer than others, or none. No worker waits for another.
        """
        options = {"seed": seed, "split": split, "drop_last": drop_last, "batch": batch, "pad": pad}
        return Shard(self, self._reader(Sharded, data, name, options), pad)

    def steps(
        self, data: Any, *, global_batch: int, micro_batch: int | None = None, seed: int = 0, name: str | None = None
    ) -> Steps:
        """Steps of `global_batch` samples whatever the number of workers: strong scaling, by micro-batches.

        Each step is an iterable of micro-batches; `step.part(loss)` scales a loss to its share of the step, and only
        the last micro-batch's backward reduces.
        """
        options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
        return Steps(self, self._reader(MicroBatches, data, name, options))

    def expect(self, steps: int) -> None:
        """Set the number of steps of the run. Some options need it (`cooldown`), and a strategy that would never
        communicate in so few steps warns now.
        """
        if steps < 1:
            raise SpecError(f"a run of {steps} steps has none to count")
        self.total_steps = steps
        self._warn_if_never_synchronised(steps, "is going to take")

    @property
    def wants_loss(self) -> bool:
        """Whether the strategy asks for each step's loss, by `note_loss`."""
        return False

    def note_loss(self, loss: float | torch.Tensor) -> None:  # noqa: B027 (few want it)
        """Tell this worker's loss of the step at hand, before the optimizer steps, where `wants_loss` says so."""

    @property
    def members(self) -> int:
        """Models that the model's forward asks inside `agreed()`, one after the other."""
        return 1

    # Agreeing.

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up on this worker alone, for accumulation; the next backward outside reduces them."""
        return nullcontext()

    @abstractmethod
    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """What this worker's next gradients count in the mean; 1 as a rule. `uneven`: others' may differ."""

    @abstractmethod
    def join_idle(self) -> bool:
        """Take part in a step of the others with nothing to add; whether anybody had something."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, the model holds the same weights and buffers on every worker: evaluate and save there.

        Every worker enters it. Afterwards each has its own weights and buffers back.
        """
        self.world.finish_left()
        if self._own is not None or (self.exchange.size == 1 and not self.asynchronous):
            yield
            return
        self._watch.check_replaced()
        self._watch.take_loaded()
        held = self.shown_tensors()
        self._own = {name: tensor.clone() for name, tensor in held.items()}
        try:
            with torch.no_grad():
                self.show_agreed()
            yield
        finally:
            own, self._own = self._own, None
            for name, tensor in held.items():
                tensor.copy_(own[name])

    def shown_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that `show_agreed` changes, by name: the buffers, and the weights if the workers' differ."""
        weights = self.model.named_parameters() if self.asynchronous else ()
        return {plain_name(name): each.detach() for name, each in (*weights, *self.model.named_buffers())}

    def show_agreed(self) -> None:
        """Put into the model what all workers agree on. Every worker calls it."""
        channel = self.control_channel()
        if channel is None:
            self._agree_on_buffers()
            return
        self.wait_for_all("enter agreed()")  # no worker steps from now on
        channel.load_weights(self.model)
        self.wait_for_all("read the weights")

    def wait_for_all(self, what: str) -> None:
        """Wait for the other workers of an asynchronous run. `what`: what all of them do, for messages.

        While a checkpoint is written these are the workers that write it. If one is lost then, all others raise a
        `PeerLostError` and begin again without it.
        """
        if self.saving_team is None:
            self._barrier().wait(what)
        elif self.saving_team.size > 1:
            barrier(self.saving_team)

    def _barrier(self) -> ControlBarrier:
        if self._control_barrier is None:
            channel = self.control_channel()
            assert channel is not None, "every asynchronous run has one"
            self._control_barrier = ControlBarrier(self.world, channel)
        return self._control_barrier

    def check_uneven(self) -> None:
        """Before an epoch in which workers may run out at different times: what would part them is refused."""
        self.schedulers.begin_epoch()
        if self.asynchronous:
            return
        if len(self.world.runs) > 1:
            raise IncompatibleError(
                f"{len(self.world.runs)} runs train in this world, and this data may end earlier on some workers than "
                "on others, who would wait in the other runs: close a run that is no longer needed (run.close()), or "
                "give the loader drop_last=True or a length that the workers divide"
            )
        self._rates = [] if self._rates is None else self._rates

    def leave_uneven(self, somebody_ran_out: bool) -> None:
        """This worker's loop has left an uneven epoch before its end.

        Workers that have run out of data wait for it. They are told before the next collective call, not here.
        """
        if somebody_ran_out and not self.asynchronous:
            self.world.left.append(self.settle_uneven)
        else:  # all have left it after the same step
            self._rates = None

    def settle_uneven(self) -> None:
        """This worker has run out of data: go along with the others until all have, then catch up with them."""
        if self.asynchronous:
            return
        missed = 0
        while self.join_idle():
            missed += 1
        table = allgather(torch.tensor([missed]), group=self.exchange.team).tolist()
        if not any(table):
            self._check_rates(0)
            return
        root = table.index(min(table))
        self._check_rates(max(table) - missed)
        broadcast_tensors(self.exchange, [parameter.detach() for parameter in self.model.parameters()], root)
        for holder in (*self.optimizers, *self.schedulers.known):
            state = broadcast_tree(self.exchange, holder.state_dict(), root)
            if missed > table[root]:
                holder.load_state_dict(state)
        if missed > table[root]:
            self.stats.steps += missed

    def note_rates(self) -> None:
        """Count a reduction, and remember its learning rates while workers may miss some."""
        self._reductions += 1
        if self._rates is not None:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            self._rates.append([float(group["lr"]) for group in groups if "lr" in group])

    def _check_rates(self, later: int) -> None:
        """The last reduction with all workers, `later` before this one's last, met the same rates everywhere."""
        rates, self._rates = self._rates or [], None
        found = rates[len(rates) - 1 - later] if len(rates) > later else []
        what = (
            "learning rates (a schedule that is none of PyTorch's and is stepped after every batch must be named in "
            "distribute(schedulers=[…]), with state_dict() and load_state_dict(), as a GradScaler must: a worker that "
            "runs out of data misses its steps)"
        )
        check_same(self.exchange, what, {f"group {number}": repr(rate) for number, rate in enumerate(found)})

    # State.

    def state_dict(self) -> dict[str, Any]:
        """`shared` is the same on every worker, `local` this worker's own; tensors and plain values only."""
        self.world.finish_left()
        if self.exchange.size > 1:
            self._watch.check_replaced()
        if self._own is None:
            self._watch.take_loaded()
        own = self._own or {}
        buffers = {name: own.get(name, buffer.detach()).clone() for name, buffer in self._buffers().items()}
        cursors = self._cursors | {key: reader.cursor.state_dict() for key, (_, reader) in self._readers.items()}
        # At its own pace each worker stands somewhere else.
        place = {"cursors": cursors, "steps": self.stats.steps, "kept": dict(self.kept)}
        return {
            "shared": {
                "strategy": repr(self.strategy),
                "format": self.strategy.state_format,
                "trained": self._trained_names(),
                "collectives": self.exchange.choices,
                "cursors": cursors,
                "steps": self.stats.steps,
                "state": self.shared_state(),
                **({"optimizers": [each.state_dict() for each in more]} if (more := self.optimizers[1:]) else {}),
            },
            "local": {
                "buffers": buffers,
                "strategy": self.local_state(),
                **({"place": place} if self.asynchronous else {}),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run. `local` is None if the checkpoint has no part for this worker.

        The model and the optimizer hold their states already. Of another strategy's checkpoint, or where other
        parameters are trained now, these are all that is taken over: the strategy's own state starts fresh.
        """
        shared, local = state["shared"], state["local"]
        self._watch.forget_loads()
        self.exchange.adopt(dict(shared["collectives"]))
        # Workers of an asynchronous run are at different steps; all others are where rank 0 was.
        place = local["place"] if self.asynchronous and local is not None and "place" in local else shared
        self._cursors = dict(place["cursors"])
        for key, (_, reader) in self._readers.items():
            self._restore(key, reader.cursor)
        self.stats.steps = int(place["steps"])
        self.kept = dict(place.get("kept", {}))
        for optimizer, saved in zip(self.optimizers[1:], shared.get("optimizers", []), strict=False):
            optimizer.load_state_dict(saved)
        fresh = self._why_fresh(shared)
        if fresh is None:
            self.load_shared_state(shared["state"])
            self.load_local_states([] if local is None else [local["strategy"], *state.get("others", [])])
        else:
            if self.exchange.rank == 0:
                logger.warning(
                    "the checkpoint is %s: %r takes over its model and the optimizer's state, and starts its own state "
                    "fresh",
                    fresh,
                    self.strategy,
                )
            self.restart()
            self.resume_steps()
        if local is not None:
            buffers = self._buffers()
            for name, saved in local["buffers"].items():
                if name in buffers:
                    buffers[name].detach().copy_(saved)

    def restart(self) -> None:  # noqa: B027 (some have nothing)
        """Start the strategy's own state fresh, from what the model and the optimizer hold: the same on every worker.

        Every worker calls it, after another strategy's checkpoint or a state was loaded.
        """

    def resume_steps(self) -> None:  # noqa: B027 (some count nowhere else)
        """The number of steps was loaded from another strategy's checkpoint: set all other step counters to it."""

    def _why_fresh(self, shared: Mapping[str, Any]) -> str | None:
        """Why the strategy cannot load its state of a checkpoint; None: it can. Older ones have only the spec."""
        spec, own = str(shared["strategy"]), self.strategy
        if shared.get("format", spec.partition("(")[0]) != own.state_format and spec != repr(own):
            return f"of strategy {spec}"
        if not self.needs_same_parameters or "trained" not in shared:
            return None
        before, now = set(shared["trained"]), set(self._trained_names())
        other = min(before ^ now, default=None)
        if other is None:
            return None
        return f"of a run that {'trained' if other in before else 'had frozen'} {other}, unlike this one"

    def _trained_names(self) -> list[str]:
        return [plain_name(name) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def shared_state(self) -> dict[str, Any]:
        """What the strategy itself must remember."""
        return {}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (some have nothing)
        """Take it back."""

    def local_state(self) -> dict[str, Any]:
        """What the strategy keeps on this worker alone."""
        return {}

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (some have nothing)
        """Take it back: this worker's own, and those of workers that are no more and that this one takes over."""

    def close(self) -> None:
        """End the run: every worker holds the final model then. Every worker closes; a second call does nothing."""
        if self._closed:
            return
        self.world.finish_left()
        self._warn_if_never_synchronised(self.stats.steps, "has taken")
        if self.exchange.size > 1 or self.asynchronous:
            self._watch.take_loaded()
            with torch.no_grad():
                self.finish()
        self._release()
        self.exchange.close()

    def finish(self) -> None:
        """Leave the final model on this worker, the same on all of them. Every worker calls it."""
        channel = self.control_channel()
        if channel is None:
            self.show_agreed()
            return
        channel.finish()
        self._barrier().close()
        self.read_final()

    def read_final(self) -> None:
        """Put the final weights into the model. Asynchronous runs call it when no worker takes steps any more."""
        channel = self.control_channel()
        assert channel is not None, "every asynchronous run has one"
        channel.load_weights(self.model)

    def close_at_exit(self) -> None:
        """The process ends without `close()`: end the run where other workers still need this process."""
        if self.asynchronous:
            self.close()
        else:
            self._warn_if_never_synchronised(self.stats.steps, "has taken")

    def _release(self) -> None:
        """Take the hooks off; the run is over on this worker."""
        self._closed = True
        if self.settle_uneven in self.world.left:
            self.world.left.remove(self.settle_uneven)
        self.detach()
        self._watch.close()
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []
        if self in self.world.runs:
            self.world.runs.remove(self)

    @abstractmethod
    def detach(self) -> None:
        """Take the hooks off."""

    def _describe(self) -> dict[str, str]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        team = self.exchange.team
        return {
            "strategy": repr(self.strategy),
            "codec": f"codec {self.exchange.codec!r}",
            "collective": f"collective {self.exchange.collective}",
            "rank": f"rank {self.world.rank} of {team.size}",
            "model": f"{parameters} parameters",
        }

    def __repr__(self) -> str:
        told = [*self._describe().values(), self.stats.describe()["steps"], *(["closed"] if self._closed else [])]
        return f"Run({', '.join(told)})"

    def _repr_html_(self) -> str:
        return as_table(self._describe() | self.stats.describe())

    def __copy__(self) -> StrategyRun:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyRun:
        """The same run: a copy of a module that keeps its run, such as an average of weights, takes no steps itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: a module that holds its run can be saved, and has no run where it is loaded."""
        return _no_run, ()

    def __enter__(self) -> StrategyRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends = isinstance(error, SystemExit) and not error.code  # as at the plain end of a process
        if error is None or (ends and self.asynchronous):
            self.close()
        elif not self._closed:
            self._release()

    # Within.

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before every step of an optimizer, and before the strategy's own hook."""
        if self not in self.world.runs:  # its construction failed with an error
            return
        if not self._checked_wrapper:
            self._checked_wrapper = True
            if self.replica is self.model:
                refuse_wrapper_around(self.model)
        self._watch.check_parameters()
        self._watch.take_loaded()

    def _reload(self) -> None:
        """A state was loaded into the model or the optimizer: start from it, together with the other workers."""
        if self.asynchronous:
            self.wait_for_all("load a state into the model after sl.distribute")
        else:
            try:
                barrier(self.world.everyone)
            except PeerLostError as error:
                raise PeerLostError(
                    f"{error}; rank {self.world.rank} has loaded a state into the model after sl.distribute, and waits "
                    "for the other ranks to do the same",
                    peer=error.peer,
                    pending=error.pending,
                    seconds=error.seconds,
                ) from error
        self.restart()

    def _warn_if_never_synchronised(self, steps: int, what: str) -> None:
        """Warn if the workers never communicate in so many steps."""
        first = self.first_exchange
        if first is not None and 0 < steps < first and self.exchange.size > 1 and self.exchange.rank == 0:
            logger.warning(
                "%r communicates for the first time after step %d, and this run %s %d: until the end every worker "
                "trains on its own data alone; give a shorter period, or train longer",
                self.strategy,
                first,
                what,
                steps,
            )

    def _reader(self, kind: type[R], data: Any, name: str | None, options: dict[str, Any]) -> R:
        key = self._key(data, name)
        known = self._readers.get(key)
        if known is not None and known[0] is data and isinstance(known[1], kind):
            return known[1]
        # A new loader under the same name continues the count of epochs.
        cursor = Cursor() if known is None else known[1].cursor
        reader = kind(data, rank=self.exchange.rank, size=self.exchange.size, cursor=cursor, **options)
        if known is None:
            self._restore(key, cursor)
            self._warn_of_another(data)
        self._readers[key] = (data, reader)
        return reader

    def _key(self, data: Any, name: str | None) -> str:
        """A name that the same script gives the same data next time: loaders are counted as they come."""
        if name is not None:
            return name
        if not isinstance(data, (DataLoader, Dataset, Sequence)):
            return "iterable"
        found = next((key for key, (known, _) in self._readers.items() if known is data), None)
        return found if found is not None else f"data{len([k for k in self._readers if k.startswith('data')])}"

    def _warn_of_another(self, data: Any) -> None:
        """Warn of a second loader that shuffles the same dataset: usually a loop that makes one for each epoch."""
        shuffled = [each for each, _ in self._readers.values() if isinstance(each, DataLoader)]
        if self.world.rank == 0 and isinstance(data, DataLoader) and type(data.sampler) is RandomSampler:
            others = [each for each in shuffled if each.dataset is data.dataset and type(each.sampler) is RandomSampler]
            if len(others) == 1:
                logger.warning(
                    "run.shard was given a second DataLoader that shuffles the same dataset: it begins with epoch 0 "
                    'and so with the same order. Make the loader once, or pass name="train" with each'
                )

    def _restore(self, key: str, cursor: Cursor) -> None:
        if key in self._cursors:
            cursor.load_state_dict(self._cursors[key])

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {plain_name(name): buffer for name, buffer in self.model.named_buffers()}

    def _agree_on_buffers(self) -> None:
        """Give every worker the mean of all, or rank 0's where a mean is none. Every worker calls it."""
        buffers = list(self._buffers().values())
        self._average([buffer for buffer in buffers if buffer.is_floating_point()])
        broadcast_tensors(self.exchange, [buffer for buffer in buffers if not buffer.is_floating_point()])

    def _average(self, tensors: list[torch.Tensor]) -> None:
        for tensor, mean in zip(tensors, mean_of_all(self.exchange, tensors), strict=True):
            tensor.detach().copy_(mean)


def mean_of_all(exchange: Communicator, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of each tensor over the workers, without a codec. Every worker calls it.

    Half precision is summed in float32: the mean of equal tensors is that tensor.
    """
    found = [tensor.detach().clone() for tensor in tensors]
    if exchange.size == 1:
        return found
    kinds: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault(wide_dtype(tensor.dtype), []).append(number)
    for dtype, numbers in kinds.items():
        flat = torch.cat([found[number].reshape(-1).to("cpu", dtype) for number in numbers])
        mean = allreduce(flat, op="mean", group=exchange.team)
        for number, part in zip(numbers, mean.split([tensors[number].numel() for number in numbers]), strict=True):
            found[number].copy_(part.view(tensors[number].shape))
    return found


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 in place of half precision: sums and small steps are not lost to rounding."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _no_run() -> None:
    """The value of a pickled run when it is loaded: None."""
    return


def check_gradients(run: StrategyRun) -> None:
    """Raise where this worker's gradients are not finite, and say whose: nobody else looks at them before its step."""
    given = [(name, each.grad) for name, each in run.model.named_parameters() if each.grad is not None]
    named = [(name, each._values() if each.is_sparse else each) for name, each in given]
    sums = [torch.isfinite(each.sum()) for _, each in named]  # ten times faster than checking each element
    if not sums or bool(torch.stack([each.to(sums[0].device) for each in sums]).all()):  # a GPU is waited for once
        return
    name = next((plain_name(name) for name, each in named if not bool(torch.isfinite(each).all())), None)
    if name is None:  # only a sum was too large
        return
    rank = run.world.rank
    raise DivergedError(
        f"NaN or Inf in the gradient of {name} on rank {rank}", rank=rank, parameter=name, step=run.stats.steps
    )
