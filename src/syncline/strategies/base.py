"""The contract of a way of agreeing, and what the user holds of it: a `Run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from syncline.data import Cursor, MicroBatches, Sharded
from syncline.errors import DivergedError, IncompatibleError, SpecError
from syncline.exchange import BUCKET_BYTES, Exchange, Stats, check_same, plain_name, share_tree, spread
from syncline.specs import Spec
from syncline.strategies.board import Board
from syncline.strategies.reading import Shard, Steps
from syncline.world import World, allgather, allreduce

__all__ = ["Preset", "Run", "Settings", "Strategy", "check_gradients"]

R = TypeVar("R", Sharded, MicroBatches)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `distribute` is told beside the strategy."""

    bucket_bytes: int = BUCKET_BYTES
    check_finite: bool = False
    schedulers: tuple[Any, ...] = ()
    seed: int = 0
    """Of the codec's random bits."""
    diagnose: int = 0
    """Every so many steps, what the codec does to each layer goes into the run log; 0: never."""


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

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer, exchange: Exchange, settings: Settings) -> Run:
        """Begin to keep the ranks' models together, by hooks on the model and the optimizer."""

    @property
    def loose(self) -> bool:
        """Whether its workers go at their own pace, and a process beside them may look at the weights (`observe`)."""
        return False

    @property
    def survives(self) -> bool:
        """Whether the others go on when a worker is lost and nobody ends them (`--on-failure continue`)."""
        return self.loose

    def observe(self, model: nn.Module, network: Any) -> Board | None:
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

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, exchange: Exchange, settings: Settings
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.exchange = exchange
        self.settings = settings
        exchange.world.trainings += 1
        self.total_steps: int | None = None
        self._readers: dict[str, tuple[Any, Sharded | MicroBatches]] = {}
        self._cursors: dict[str, Mapping[str, Any]] = {}
        self._own: dict[str, torch.Tensor] | None = None
        """This worker's buffers while the model holds the agreed ones."""
        self.kept: dict[str, Any] = {}
        """Plain values that a loose run's loop has checkpoints keep for this worker alone."""
        self._closed = False
        self._rates: list[list[float]] | None = None
        """At the reductions of an epoch in which workers may run out of data."""

    @property
    def world(self) -> World:
        """The world it runs in."""
        return self.exchange.world

    @property
    def replica(self) -> nn.Module:
        """The module whose forward trains: the model itself, unless somebody else's way of agreeing wraps it."""
        return self.model

    @property
    def loose(self) -> bool:
        """Whether every worker goes at its own pace.

        Between the first step and the last, neither the run nor the loop around it calls a collective of the world
        then: a worker that was killed would break it.
        """
        return self.strategy.loose

    def board(self) -> Board | None:
        """Where the workers of a loose run tell each other how far they are; None for others."""
        return None

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
        }

    def predict(self) -> dict[str, float] | None:
        """What `costs` expects of a step on this network: seconds of communication and of the codec.

        None where it knows of no model for this strategy. Every worker calls it; the network may be calibrated.
        """
        return None

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
    ) -> Shard:
        """This worker's share of a DataLoader, a Dataset (with `batch`) or any iterable of batches, on its device.

        Shuffled anew each time from `seed` where the loader shuffles; the same global order whatever the number of
        workers. The loader's batch size is each worker's. A worker that runs out of data before the others takes part
        in their steps with nothing to add, and the mean is over those who still have some. With `split=False` the
        data is this worker's own already. `name` keeps the place of several iterables apart in checkpoints.
        """
        options = {"seed": seed, "split": split, "drop_last": drop_last, "batch": batch}
        return Shard(self, self._reader(Sharded, data, name, options))

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
        """Tell how many steps there will be, where the strategy wants to know (`cooldown`)."""
        if steps < 1:
            raise SpecError(f"a run of {steps} steps has none to count")
        self.total_steps = steps

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
    def weigh(self, weight: float, uneven: bool = False) -> None:
        """What this worker's next gradients count in the mean; 1 as a rule. `uneven`: others' may differ."""

    @abstractmethod
    def empty_round(self) -> bool:
        """Take part in a step of the others with nothing to add; whether anybody had something."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, the model holds what all workers agree on: batch norm's running statistics are averaged.

        Every worker enters it, but in a loose run: there any worker may alone, and finds the board's weights. What each
        had itself is back afterwards.
        """
        if self._own is not None or (self.exchange.size == 1 and not self.loose):
            yield
            return
        if self.loose:
            with self._from_board():
                yield
            return
        named = self._buffers()
        own = {name: buffer.detach().clone() for name, buffer in named.items()}
        self._agree_on_buffers()
        self._own = own
        try:
            yield
        finally:
            self._own = None
            for name, buffer in named.items():
                buffer.detach().copy_(own[name])

    @contextmanager
    def _from_board(self) -> Iterator[None]:
        board = self.board()
        if board is None:
            yield
            return
        held = [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())]
        own = [tensor.clone() for tensor in held]
        self._own = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        try:
            board.weights_into(self.model)
            yield
        finally:
            self._own = None
            for tensor, before in zip(held, own, strict=True):
                tensor.copy_(before)

    def check_uneven(self) -> None:
        """Before an epoch in which workers may run out at different times: what would part them is refused."""
        if self.loose:
            return
        if self.world.trainings > 1:
            raise IncompatibleError(
                f"{self.world.trainings} runs train in this world, and this data may end earlier on some workers than "
                "on others, who would wait in the other runs: give the loader drop_last=True, or a length that the "
                "workers divide"
            )
        self._rates = []

    def settle_uneven(self) -> None:
        """This worker has run out of data: go along with the others until all have, then catch up with them."""
        if self.loose:
            return
        missed = 0
        while self.empty_round():
            missed += 1
        table = allgather(torch.tensor([missed]), group=self.exchange.team).tolist()
        if not any(table):
            self._check_rates(0)
            return
        root = table.index(min(table))
        self._check_rates(max(table) - missed)
        spread(self.exchange, [parameter.detach() for parameter in self.model.parameters()], root)
        for holder in (self.optimizer, *self.settings.schedulers):
            state = share_tree(self.exchange, holder.state_dict(), root)
            if missed > table[root]:
                holder.load_state_dict(state)
        if missed > table[root]:
            self.stats.steps += missed

    def note_rates(self) -> None:
        """Remember the learning rates at a reduction, while workers may miss some."""
        if self._rates is not None:
            self._rates.append([float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group])

    def _check_rates(self, later: int) -> None:
        """The last reduction with all workers, `later` before this one's last, met the same rates everywhere."""
        rates, self._rates = self._rates or [], None
        found = rates[len(rates) - 1 - later] if len(rates) > later else []
        what = (
            "learning rates (a scheduler or GradScaler that is stepped after every batch must be named in "
            "distribute(schedulers=[…]): a worker that runs out of data misses its steps)"
        )
        check_same(self.exchange, what, {f"group {number}": repr(rate) for number, rate in enumerate(found)})

    # State.

    def state_dict(self) -> dict[str, Any]:
        """`shared` is the same on every worker, `local` this worker's own; tensors and plain values only."""
        buffers = self._own or {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        cursors = self._cursors | {key: reader.cursor.state_dict() for key, (_, reader) in self._readers.items()}
        # At its own pace each worker stands somewhere else.
        place = {"cursors": cursors, "steps": self.stats.steps, "kept": dict(self.kept)}
        return {
            "shared": {
                "strategy": repr(self.strategy),
                "collectives": self.exchange.choices,
                "cursors": cursors,
                "steps": self.stats.steps,
                "state": self.shared_state(),
            },
            "local": {"buffers": buffers, "strategy": self.local_state(), **({"place": place} if self.loose else {})},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was; `local` is None where the checkpoint has none for this worker."""
        shared, local = state["shared"], state["local"]
        self.exchange.adopt(dict(shared["collectives"]))
        place = shared if local is None or "place" not in local else local["place"]
        self._cursors = dict(place["cursors"])
        for key, (_, reader) in self._readers.items():
            self._restore(key, reader.cursor)
        self.stats.steps = int(place["steps"])
        self.kept = dict(place.get("kept", {}))
        self.load_shared_state(shared["state"])
        self.load_local_states([] if local is None else [local["strategy"], *state.get("others", [])])
        if local is not None:
            buffers = self._buffers()
            for name, saved in local["buffers"].items():
                if name in buffers:
                    buffers[name].detach().copy_(saved)

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
        """Take the hooks off and let go of the team. Every worker closes."""
        if not self._closed:
            self._closed = True
            self.detach()
            self.world.trainings -= 1
            self.exchange.close()

    @abstractmethod
    def detach(self) -> None:
        """Take the hooks off."""

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self.detach()
            self.world.trainings -= 1

    # Within.

    def _reader(self, kind: type[R], data: Any, name: str | None, options: dict[str, Any]) -> R:
        key = self._key(data, name)
        known = self._readers.get(key)
        if known is not None and known[0] is data and isinstance(known[1], kind):
            return known[1]
        reader = kind(data, rank=self.exchange.rank, size=self.exchange.size, cursor=Cursor(), **options)
        if known is not None:  # fresh batches under the same name: the place goes on
            reader.cursor.load_state_dict(known[1].cursor.state_dict())
        else:
            self._restore(key, reader.cursor)
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

    def _restore(self, key: str, cursor: Cursor) -> None:
        if key in self._cursors:
            cursor.load_state_dict(self._cursors[key])

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {plain_name(name): buffer for name, buffer in self.model.named_buffers()}

    def _agree_on_buffers(self) -> None:
        """Give every worker the mean of all, or rank 0's where a mean is none. Every worker calls it."""
        buffers = list(self._buffers().values())
        self._average([buffer for buffer in buffers if buffer.is_floating_point()])
        spread(self.exchange, [buffer for buffer in buffers if not buffer.is_floating_point()])

    def _average(self, buffers: list[torch.Tensor]) -> None:
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            kinds.setdefault(buffer.dtype, []).append(buffer.detach())
        for group in kinds.values():
            flat = allreduce(torch.cat([buffer.reshape(-1) for buffer in group]).cpu(), group=self.exchange.team)
            offset = 0
            for buffer in group:
                buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))
                offset += buffer.numel()


def check_gradients(run: Run) -> None:
    """Raise where this worker's gradients are not finite, and say whose: nobody else looks at them before its step."""
    given = [(name, each.grad) for name, each in run.model.named_parameters() if each.grad is not None]
    named = [(name, each._values() if each.is_sparse else each) for name, each in given]
    sums = [torch.isfinite(each.sum()) for _, each in named]  # ten times faster than to look at each element
    if not sums or bool(torch.stack([each.to(sums[0].device) for each in sums]).all()):  # a GPU is waited for once
        return
    name = next((plain_name(name) for name, each in named if not bool(torch.isfinite(each).all())), None)
    if name is None:  # only a sum was too large
        return
    rank = run.world.rank
    raise DivergedError(
        f"NaN or Inf in the gradient of {name} on rank {rank}", rank=rank, parameter=name, step=run.stats.steps
    )
