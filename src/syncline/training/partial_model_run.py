"""`PartialModelRun`: the base of pipelines and of divided layers. Each worker trains a part of the model."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.parallel.divided_model import DividedModel
from syncline.reduction import Communicator
from syncline.strategies import Run, Shard
from syncline.strategies.base import wide_dtype
from syncline.training.team_runs import TeamRuns
from syncline.world import Group, TeamChange, allreduce
from syncline.world.mesh import Mesh

__all__ = ["PartialModelRun"]

logger = logging.getLogger("syncline")


class PartialModelRun(Run):
    """A run in which each worker trains a part of the model. A strategy synchronises the workers that have one part."""

    elastic_refusal: ClassVar[str]
    """Why the run cannot continue with a different number of workers."""

    def __init__(
        self, model: nn.Module, teams: TeamRuns, everyone: Communicator, mesh: Mesh | None, divided: DividedModel | None
    ) -> None:
        self.teams = teams
        """The runs of the strategy among the workers with the same part of the model."""
        self.team_run = teams.first
        self.model, self.optimizer, self.world = model, self.team_run.optimizer, self.team_run.world
        self.stats = self.team_run.stats
        self.mesh = mesh
        """The arrangement of the workers; None for a pipeline whose stages have different numbers of workers."""
        self._everyone, self._divided = everyone, divided
        self._closed = False
        for team in {} if divided is None else divided.teams.values():
            team.stats = self.stats

    # What a kind of run defines.

    @property
    @abstractmethod
    def _layout(self) -> dict[str, Any]:
        """The arrangement of the model. The strategy's own state is loaded only if it is the same."""

    @property
    @abstractmethod
    def _model_parallel_group(self) -> Group:
        """The model-parallel group: the workers that together have one copy of the model."""

    @abstractmethod
    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this worker adds its gradient of a parameter to the norm of the whole model."""

    def flush(self) -> None:
        """Complete what is in flight. Every worker calls it."""

    # Gradients of the whole model.

    def _gradient_norms(self) -> Tensor:
        """The norm of each parameter's gradient over the whole model, in the order of its parameters.

        The order is the same for every arrangement, so that the total norm of a pipeline has the same bits for any
        number of stages.
        """
        parameters = list(self.model.parameters())
        squares = torch.zeros(len(parameters), dtype=torch.float64)
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None and self._counts(parameter):
                gradient = parameter.grad.coalesce()._values() if parameter.grad.is_sparse else parameter.grad
                norm = torch.linalg.vector_norm(gradient.to(wide_dtype(gradient.dtype)))
                squares[number] = norm.double().square()
        group = self._model_parallel_group
        found: Tensor = allreduce(squares, op="sum", group=group) if len(group.ranks) > 1 else squares
        return found.sqrt()

    def _own_parameters(self) -> list[nn.Parameter]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def _clip(self, norms: Tensor, max_norm: float) -> Tensor:
        total: Tensor = torch.linalg.vector_norm(norms)
        factor = max_norm / (total + 1e-6)
        if bool(factor < 1.0):
            for parameter in self._own_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.item())
        return total

    # The user's view: see `Run`.

    @property
    def asynchronous(self) -> bool:
        """Whether workers train without waiting for each other: never."""
        return False

    @property
    def members(self) -> int:
        """The number of models that the model's forward evaluates inside `agreed()`."""
        return self.team_run.members

    @property
    def communicator(self) -> Communicator:
        """The communicator of all workers."""
        return self._everyone

    @property
    def strategy(self) -> object:
        """The strategy of the teams."""
        return self.team_run.strategy

    @property
    def _leaves_out_incomplete_batches(self) -> bool:
        """Whether all workers must train on the same number of batches of one size."""
        return False

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
        """See `Run.shard`. All workers that compute one batch together read it.

        If workers must train on as many batches, incomplete ones are left out (`drop_last`): with several kinds of
        parameters (see `TeamRuns`), and in some pipelines.
        """
        drop_last = True if self._leaves_out_incomplete_batches else drop_last
        return self.teams.shard(data, seed=seed, split=split, drop_last=drop_last, batch=batch, name=name, pad=pad)

    def expect(self, steps: int) -> None:
        self.teams.expect(steps)

    def note_loss(self, loss: float | Tensor) -> None:
        self.teams.note_loss(loss)

    def release(self) -> None:
        """Remove all hooks: the run is over on this worker."""
        self._closed = True
        self.teams.release()
        if self in self.world.runs:
            self.world.runs.remove(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self.release()

    @contextmanager
    def _whole_layers(self) -> Iterator[None]:
        """Inside, every worker has the whole layers of its stage."""
        if self._divided is None:
            yield
            return
        with self._divided.whole():
            yield

    @contextmanager
    def _part(self) -> Iterator[None]:
        """Inside, a checkpoint reads or loads this worker's part."""
        if self._divided is None:
            yield
            return
        with self._divided.part():
            yield

    # Checkpoints.

    @property
    @abstractmethod
    def _progress(self) -> dict[str, Any]:
        """More entries of the shared state."""

    def _take_progress(self, shared: Mapping[str, Any]) -> None:
        """Restore `_progress`, also of a run of another kind."""

    def state_dict(self) -> dict[str, Any]:
        """`part` is the state of this worker's teams, `local` this worker's own."""
        self.flush()
        own = self.teams.state_dict()
        shared = {**own["shared"], **self._progress, "state": {}}
        return {"shared": shared, "local": own["local"], "part": own["shared"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved run, also of another arrangement of the workers, or of whole models."""
        shared: dict[str, Any] = dict(state["shared"])
        self._take_progress(shared)
        saved = shared.get("parts", shared.get("pipeline"))  # "pipeline": an older version
        team = state["part"] or self._team_of_older_version(shared)
        if saved == self._layout and team is not None:
            self.teams.load_state_dict({**state, "shared": team})
            return
        strategy, codec = self.team_run.strategy, self._codec
        if self._everyone.rank == 0 and (codec is not None or repr(strategy) != "allreduce"):
            logger.warning(
                "the checkpoint is of other stages or workers: the model and the optimizer's state are loaded, and the "
                "state of %r%s starts fresh",
                strategy,
                "" if codec is None else f" and of {codec}",
            )
        self.teams.restart(shared)

    @property
    def _codec(self) -> str | None:
        """The codec of the teams. A team of one worker may have none."""
        codec = self.team_run.communicator.codec
        return None if codec is None else repr(codec)

    def _team_of_older_version(self, shared: Mapping[str, Any]) -> Any:
        return None

    # What the world calls.

    def team_changed(self, change: TeamChange) -> None:
        raise IncompatibleError(self.elastic_refusal)

    def apply_change_of_data(self, change: TeamChange) -> None:
        raise IncompatibleError(self.elastic_refusal)

    def newcomer_state(self) -> Any:
        raise IncompatibleError(self.elastic_refusal)

    def load_newcomer_state(self, state: Any) -> None:
        raise IncompatibleError(self.elastic_refusal)

    def close_at_exit(self) -> None:
        """Called when the process ends without `close()`."""
        self.teams.close_at_exit()
