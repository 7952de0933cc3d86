"""`MeshRun`: a model in training whose layers are divided over workers.

```text
                tensor 0      tensor 1
data 0          worker 0      worker 1        read the same batches
data 1          worker 2      worker 3
```

The loop is that of `distribute`: forward, backward and step of every worker, each with its part of the layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten

from syncline.data.partition import mix_seeds
from syncline.errors import IncompatibleError
from syncline.model_parts import ModelPart
from syncline.parallel.divided_model import DividedModel
from syncline.parallel.team import LayerTeam
from syncline.reduction import Communicator
from syncline.strategies.local_weights import called_by_grad_scaler
from syncline.strategies.run import Steps
from syncline.training.mesh import DivisionPlan, MeshGroups
from syncline.training.partial_model_run import PartialModelRun
from syncline.training.team_runs import TeamRuns
from syncline.world import Group, allgather, allreduce

__all__ = ["MeshRun"]

COMPARED_BATCHES = 3
"""The number of first batches that the workers of a tensor team compare."""


class MeshRun(PartialModelRun):
    """A model in training whose layers are divided over workers. Made by `sl.distribute(…, parallel=…)`.

    `model` computes with the other workers. Inside `agreed()` this worker has the whole model.
    """

    elastic_refusal = "no other worker has the lost worker's part of a layer: leave --elastic out"

    def __init__(
        self,
        model: nn.Module,
        plan: DivisionPlan,
        groups: MeshGroups,
        teams: TeamRuns,
        everyone: Communicator,
        divided: DividedModel,
    ) -> None:
        super().__init__(model, teams, everyone, plan.mesh, divided)
        self._plan, self._groups, self._model_parts = plan, groups, divided
        settings = teams.first.settings
        self._scaler = next((each for each in settings.schedulers if hasattr(each, "get_scale")), None)
        self._hooks: list[Any] = [self.optimizer.register_step_pre_hook(self._check_step)]
        self._random: _TeamRandomStream | None = None
        tensor_team = groups.layer_teams.get("tensor")
        if tensor_team is not None:
            data = plan.mesh.position(everyone.rank)[1:3]
            self._random = _TeamRandomStream(mix_seeds(mix_seeds(settings.seed, data[0]), data[1]), self.world.device)
            comparison = _InputComparison(tensor_team, divided)
            self._hooks += [
                model.register_forward_pre_hook(comparison, with_kwargs=True),
                model.register_forward_pre_hook(self._random.enter),
                model.register_forward_hook(self._random.leave, always_call=True),
            ]
        if self._scaler is not None:
            self._nonfinite = _NonfiniteExchange(self._model_parallel_group, self._own_parameters)
            for team in divided.teams.values():
                team.in_backward = self._nonfinite.in_backward

    # Gradients.

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return self._clip(self._gradient_norms(), max_norm)

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self._model_parts.counts_here(parameter)

    @property
    def _model_parallel_group(self) -> Group:
        return self._groups.model_parallel

    def _check_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._model_parts.is_whole:
            raise IncompatibleError("the layers are whole inside run.agreed(): train outside of it")
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None and self.mesh is not None:
            raise IncompatibleError(
                "step(closure) with divided layers: the workers would have to agree how often the closure is called; "
                "call backward() and step()"
            )
        if self._scaler is None and (hasattr(optimizer, "found_inf") or called_by_grad_scaler()):
            raise IncompatibleError(
                "a GradScaler may skip a step on one of the workers that divide a layer: name it in "
                "sl.distribute(…, schedulers=[scaler]), so that all skip the same steps"
            )

    # The user's view: see `Run`.

    @property
    def config(self) -> dict[str, Any]:
        return {**self.team_run.config, "parallel": self._plan.describe()}

    def steps(
        self, data: Any, *, global_batch: int, micro_batch: int | None = None, seed: int = 0, name: str | None = None
    ) -> Steps:
        if self.teams.several:
            raise IncompatibleError(
                "run.steps() may give workers different numbers of micro-batches, and those that divide layers need "
                "equally many: accumulate under run.no_sync()"
            )
        return self.team_run.steps(data, global_batch=global_batch, micro_batch=micro_batch, seed=seed, name=name)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.teams.no_sync()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, every worker has the whole model, in its own memory."""
        with self.teams.agreed(), self._whole_layers():
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint reads this worker's part of the model and of the optimizer's state."""
        with self.teams.agreed(), self._part():
            yield

    def loading(self) -> AbstractContextManager[None]:
        """Inside, a checkpoint is loaded into this worker's part of the model and of the optimizer's state."""
        return self._part()

    def model_part(self) -> ModelPart:
        """The part of the model that this worker saves and loads."""
        mesh, rank = self._plan.mesh, self._everyone.rank
        with self._part():
            names = frozenset(self.model.state_dict(keep_vars=True))
        saves = names if mesh.position(rank)[1] == 0 else frozenset()
        return self._model_parts.model_part(ModelPart(0, saves, names), mesh.part_number(rank))

    def close(self) -> None:
        """End the run: every worker then has the whole model. Every worker closes; a second call does nothing."""
        if self._closed:
            return
        self.teams.close()
        self._model_parts.close()
        self.release()

    def release(self) -> None:
        """Remove all hooks: the run is over on this worker."""
        super().release()
        self._model_parts.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> MeshRun:
        return self

    # Checkpoints.

    @property
    def _layout(self) -> dict[str, Any]:
        return {**self._plan.describe(), "strategy": self.team_run.strategy.state_format}

    @property
    def _progress(self) -> dict[str, Any]:
        return {"format": "mesh", "parts": self._layout}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._random is not None:
            state["local"] = {**state["local"], "random": self._random.state}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        local = state["local"]
        if self._random is not None and local is not None and state["shared"].get("parts") == self._layout:
            self._random.state = local.get("random", self._random.state)

    def __repr__(self) -> str:
        return f"MeshRun({self.mesh}, {self.team_run!r})"


class _TeamRandomStream:
    """The random numbers in the model's forward, such as dropout: the same on all workers of a tensor team."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        with torch.random.fork_rng(devices=[] if self._cuda is None else [self._cuda]):
            torch.manual_seed(seed)
            self.state = self._read()
        self._caller_states: list[list[Tensor]] = []
        """The states of the caller, one for each call in progress."""

    @_disable_dynamo
    def enter(self, module: nn.Module, inputs: Any) -> None:
        """A hook before the model's forward."""
        self._caller_states.append(self._read())
        self._write(self.state)

    @_disable_dynamo
    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook after the model's forward, also after an error."""
        if self._caller_states:
            self.state = self._read()
            self._write(self._caller_states.pop())

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([] if self._cuda is None else [torch.cuda.get_rng_state(self._cuda)])]

    def _write(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self._cuda is not None and len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._cuda)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TeamRandomStream:
        """A copy of the model draws from the same stream, because its hooks run on all workers too."""
        return self


class _InputComparison:
    """A hook that compares the first inputs of the model between the workers of a tensor team."""

    def __init__(self, team: LayerTeam, divided: DividedModel) -> None:
        self._team, self._divided = team, divided
        self._remaining = COMPARED_BATCHES

    @_disable_dynamo
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._remaining == 0 or not module.training or self._divided.is_whole or self._team.size == 1:
            return
        self._remaining -= 1
        leaves = [leaf.detach().cpu() for leaf in tree_flatten((inputs, keywords))[0] if isinstance(leaf, Tensor)]
        digest = 0
        for leaf in leaves:
            digest = zlib.crc32(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest)
        digests = allgather(torch.tensor([digest]), group=self._team.group)
        if not bool((digests == digests[0]).all()):
            ranks = ", ".join(map(str, self._team.group.ranks))
            raise IncompatibleError(
                f"the workers of a tensor team (ranks {ranks}) have different inputs, and they compute one batch "
                "together: read the data by run.shard(loader), and let random augmentation draw the same on them"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _InputComparison:
        return self


class _NonfiniteExchange:
    """Exchanges after each backward pass whether a gradient has NaN or Inf.

    If one worker of the model-parallel group has one, all get one. A GradScaler then skips the step on all of them.
    """

    def __init__(self, group: Group, parameters: Any) -> None:
        self._group, self._parameters = group, parameters
        self._task = -1

    def in_backward(self) -> None:
        """Called in a backward pass, often."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            # Queued by a callback, it runs after those that reduce gradients.
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(self._share))

    def _share(self) -> None:
        gradients = [each.grad for each in self._parameters() if each.grad is not None]
        finite = all(bool(torch.isfinite(each.sum())) for each in gradients)
        nonfinite = allreduce(torch.tensor(0 if finite else 1), op="max", group=self._group)
        if int(nonfinite) and finite and gradients:
            first = gradients[0]
            (first._values() if first.is_sparse else first).view(-1)[0] = torch.inf
