"""`PipelineRun`: a model in training whose layers are split over the workers.

```text
            stage 0        stage 1
pipeline 0  worker 0  ──►  worker 2
pipeline 1  worker 1  ──►  worker 3
            └ team 0 ┘     └ team 1 ┘
```

Each worker holds one part of the model. The workers with the same part are a team. The run of a strategy synchronises
them, as it synchronises whole models in `distribute`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from syncline.data.partition import mix_seeds
from syncline.errors import IncompatibleError, PeerLostError, SpecError
from syncline.model_parts import ModelPart
from syncline.parallel.action_stream import ActionStream
from syncline.parallel.batch_norm import LAYERS as BATCH_NORMS
from syncline.parallel.batch_norm import DeferredBatchNorm
from syncline.parallel.boundary import Place
from syncline.parallel.divided_model import DividedModel
from syncline.parallel.executor import PipelineExecutor
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import Action, PipeDream
from syncline.parallel.stage_runner import MicroBatch, Recompute, StageRunner
from syncline.parallel.stages import StageGraph
from syncline.parallel.tied_parameters import TiedParameters
from syncline.parallel.weight_versions import WeightVersions
from syncline.parallel.whole_model import WholeModel
from syncline.reduction import Communicator
from syncline.strategies.run import Readers, Steps
from syncline.training.mesh import MeshGroups
from syncline.training.partial_model_run import PartialModelRun
from syncline.training.team_runs import TeamRuns
from syncline.world import Group, allreduce, broadcast_object
from syncline.world.mesh import Mesh

__all__ = ["PipelineGroups", "PipelineOptions", "PipelineRun"]

logger = logging.getLogger("syncline")

P = ParamSpec("P")
T = TypeVar("T")


def _naming_stages(
    method: Callable[Concatenate[PipelineRun, P], T],
) -> Callable[Concatenate[PipelineRun, P], T]:
    """Errors of a method about a lost rank say which stages that rank computes, and how far this rank is."""

    @wraps(method)
    def call(run: PipelineRun, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(run, *args, **options)
        except PeerLostError as error:
            found = run._with_stages(error)
            if found is error:
                raise
            raise found from error

    return call


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of `pipeline` that its run needs."""

    micro_batches: int
    recompute: Recompute = "never"
    clip_norm: float | None = None
    scaler: Any = None
    seed: int = 0
    compile: bool = False
    made_values: bool = False
    """Whether each worker makes the values of its own part, because the model is on the meta device."""
    initialize: Callable[[nn.Module], object] | None = None
    codec: str | None = None
    """The codec of the teams, for config.json: a team of one worker may have none."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """The stages, for config.json: made while this worker still has the whole model."""


@dataclass(frozen=True)
class PipelineGroups:
    """The groups of one worker of a pipeline."""

    stage: Group
    """The workers of its stages."""
    data: Mapping[str, Group]
    """The workers that reduce a kind of parameters. See `TeamRuns`."""
    pipeline: Group
    """The workers that compute one batch, one for each stage; all if stages have different numbers of workers."""
    model_parallel: Group
    """The model-parallel group: the workers that together have one copy of the model."""
    data_position: int
    """The number of the batch that it reads, among those of a step."""
    mesh: Mesh | None
    """None: stages have different numbers of workers."""
    layers: MeshGroups | None = None
    """The groups that divide layers, if any are divided."""


class PipelineRun(PartialModelRun):
    """A model in training whose layers are split over the workers. Made by `sl.pipeline`; a context manager.

    `step(x, y)` trains on one batch. `model` is the user's model: outside of `agreed()` this worker has only its own
    part of it.
    """

    elastic_refusal = "a pipeline needs the same workers from its start to its end: leave --elastic out"

    def __init__(
        self,
        whole: WholeModel,
        graph: StageGraph,
        placement: PipelinePlacement,
        teams: TeamRuns,
        everyone: Communicator,
        groups: PipelineGroups,
        container: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        options: PipelineOptions,
        divided: DividedModel | None = None,
    ) -> None:
        super().__init__(whole.model, teams, everyone, groups.mesh, divided)
        self.graph, self.placement = graph, placement
        self._whole, self._options, self._groups = whole, options, groups
        self._rank, self._replica = placement.position(everyone.rank)
        self._pipeline = groups.pipeline
        self._schedule = placement.schedule
        self._stages = placement.stages_of(self._rank)
        self._container = container
        modules = [graph.stages[stage].module for stage in self._stages]
        self._has_batch_norm = any(
            isinstance(each, BATCH_NORMS) for stage in graph.stages for each in stage.module.modules()
        )
        self._norms = [DeferredBatchNorm(module) for module in modules if self._schedule.flushes]
        self._versions = self._make_versions()
        self._runner = StageRunner(
            graph,
            loss_fn,
            self._micro_batch,
            seed=mix_seeds(options.seed, groups.data_position),
            recompute=options.recompute,
            compile=options.compile,
            recomputing=self._without_statistics,
            gradients_complete=self._stage_complete,
            update=self._update_after,
            weights_for=self._weights_for,
            share=self._share_of_loss,
        )
        transport = everyone.group.transport
        self.executor = PipelineExecutor(graph, placement, transport, self._runner, self.world.device)
        self._messages = self.executor.boundary
        self._messages.on_wait = lambda start, stop: self.stats.waited(start, stop, "waits for another stage")
        self._counted_bytes = 0
        self._loss_number = self.executor.next_number
        self._tied = TiedParameters(graph, placement, everyone.rank, self._messages, self._loss_number + 1)
        if options.made_values:
            self._tied.copy_weights(0)
        self._target_number = self._loss_number + 1 + 2 * len(graph.tied)
        self._loss_place = Place(
            self._loss_number, 0, f"the loss from stage {placement.stages - 1} for all micro-batches"
        )
        self._loss_workers = self._find_loss_workers()
        self._loss_messages = [(worker, self._loss_place) for worker in self._loss_workers if worker != everyone.rank]
        self._planned: dict[tuple[int, bool], Sequence[Action]] = {}
        """By number of micro-batches, and whether gradients are reduced: the actions of a step."""
        self._data: dict[int, MicroBatch] = {}
        self._step = 0
        self._complete: set[int] = set()
        """Stages of this worker whose gradients are complete in this step."""
        self._reduced = False
        self._stream = None if self._schedule.flushes else ActionStream(placement, everyone.rank)
        self._flushed = 0
        """The number of micro-batches that have left it."""
        self._late_loss = torch.tensor(math.nan)
        """In a pipeline that is never emptied: the loss of the step before."""
        self._loss_is_pending = False
        """Whether that loss was sent and not received yet."""
        self._own_loss = torch.tensor(0.0)
        """The part of the latest step's loss that this worker has computed."""
        self._loss_of_rank: PeerLostError | None = None
        """The latest error about a lost rank, complete with the stages."""
        if placement.unequal:  # every worker reads the share of a worker of the first stage
            self.team_run.readers = Readers(self._replica % placement.replicas[0], placement.replicas[0])

    # Training.

    @_naming_stages
    def step(self, x: Any, y: Any = None) -> Tensor:
        """Train on one batch: forward, backward, update. Returns the mean loss, the same on all workers of a pipeline.

        `x` is the input of the model, or a tuple of its inputs. `y` is the second argument of the loss function. With
        `pipedream` each micro-batch updates the weights, and the loss returned is that of the step before (NaN at
        first): later stages are still computing.
        """
        if self._stream is not None:
            return self._stream_step(x, y)
        loss = self._forward_backward(x, y, reduces=True)
        self.update()
        return loss

    @_naming_stages
    def backward(self, x: Any, y: Any = None) -> Tensor:
        """Add the gradients of one batch to those that there are, without an update. Returns the mean loss."""
        self._refuse_stream("gradients cannot be accumulated")
        return self._forward_backward(x, y, reduces=False)

    @_naming_stages
    def update(self) -> None:
        """Reduce the gradients, clip them if `clip_norm` was given, and let the optimizer step."""
        self._refuse_stream("there is no separate update")
        self._reduce()
        scaler, clip_norm = self._options.scaler, self._options.clip_norm
        if clip_norm is not None or scaler is not None:
            norms = self._gradient_norms()
            if scaler is not None:
                norms = self._unscale(norms)
            if clip_norm is not None:
                self._clip(norms, clip_norm)
        trained = any(each.grad is not None for each in self._own_parameters())
        self._optimizer_step()
        if scaler is not None:
            self._update_scale(trained)
        self._tied.copy_weights(self._step)
        self._complete.clear()
        self._reduced = False
        self._step += 1

    @_naming_stages
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Reduce the gradients and scale them so that their norm over the whole model is at most `max_norm`.

        Call it between `backward` and `update`. Returns the norm before.
        """
        self._refuse_stream("there is no moment at which all stages have gradients to clip")
        if self._options.scaler is not None:
            raise IncompatibleError(
                "the gradients are still multiplied by the scale of the GradScaler: use sl.pipeline(clip_norm=…)"
            )
        self._reduce()
        return self._clip(self._gradient_norms(), max_norm)

    @_naming_stages
    def predict(self, x: Any) -> Any:
        """The output of the model for `x`, on every worker of this pipeline. Call `model.eval()` before."""
        if self.placement.unequal:
            raise IncompatibleError("predict() needs the same number of workers for every stage: enter run.agreed()")
        self.flush()
        count = self._take_batch(x, None, 0)
        planned = self._schedule.actions(self._rank, self.placement.setting(count))
        actions = [action for action in planned if action.kind == "F"]
        self._runner.training, self._runner.results = False, {}
        try:
            with self._without_statistics():
                self.executor.run(actions, self._inputs_of, self._step, gradients=False)
                self.executor.finish_sends()
        finally:
            self._runner.training = True
            self._data.clear()
        results = [self._runner.results[number] for number in sorted(self._runner.results)]
        self._runner.results = {}
        output = _concatenate(results) if results else None
        root = self._pipeline.ranks.index(self._loss_workers[0])
        return output if len(self._pipeline.ranks) == 1 else broadcast_object(output, root, group=self._pipeline)

    @_naming_stages
    def flush(self) -> None:
        """Complete the micro-batches that are still in a pipeline that is never emptied. Every worker calls it."""
        if self._stream is not None and self._stream.entered > self._flushed:
            self._run_stream(self._stream.drain())
            self._flushed = self._stream.entered
            for versions in self._versions.values():
                versions.forget()
        self._collect_late_loss()  # its sender may wait until it is taken

    def _forward_backward(self, x: Any, y: Any, reduces: bool) -> Tensor:
        self._refuse_inside_agreed()
        self._data.clear()  # of a step that an error has interrupted
        self._runner.forget()
        self.executor.forget()
        self._complete.clear()
        self._reduced = False  # also if the script has dropped reduced gradients without an update
        count = self._take_batch(x, y, 0)
        actions = self._plan_actions(count, reduces)
        self._runner.begin_step(self._step, last=max(self._data, default=0))
        scaler = self._options.scaler
        self._runner.loss_scale = (
            1.0 if scaler is None else scaler.scale(torch.ones((), device=self.world.device)).item()
        )
        with self.teams.no_sync(), self._runner.random_streams():
            self.executor.run(actions, self._inputs_of, self._step, later=self._loss_messages)
        self._data.clear()
        for norms in self._norms:
            norms.commit()
        self._send_loss(self._step)
        loss = self._collect_loss(self._step)
        self._count_bytes()
        if reduces:
            self.teams.note_loss(loss)
        else:
            self._step += 1
        return loss

    def _plan_actions(self, count: int, reduces: bool) -> Sequence[Action]:
        """The actions of this worker in a step of `count` micro-batches."""
        found = self._planned.get((count, reduces))
        if found is None:
            every = self._schedule.actions(self._rank, self.placement.setting(count), self._setting_replica)
            found = self._planned[count, reduces] = [action for action in every if reduces or action.kind != "R"]
        return found

    def _stage_complete(self, stage: int) -> None:
        self._complete.add(stage)
        if len(self._complete) == len(self._stages):
            self._reduce()

    def _reduce(self) -> None:
        """The gradients of this worker's part are complete: reduce them over its replicas."""
        if not self._reduced:
            self._reduced = True
            self._tied.add_gradients(self._step)
            self.teams.reduce_gradients()

    def _optimizer_step(self) -> None:
        scaler = self._options.scaler
        if scaler is None:
            self.optimizer.step()
        elif any(each.grad is not None for each in self._own_parameters()):
            scaler.step(self.optimizer)
        torch.clear_autocast_cache()  # its copies are of the weights before
        self._container.zero_grad()

    # A pipeline that is never emptied.

    def _make_versions(self) -> dict[int, WeightVersions]:
        schedule = self._schedule
        if not isinstance(schedule, PipeDream):
            return {}
        setting = self.placement.setting(1)
        lag, first = schedule.warmup(self._rank, setting), schedule.warmup(0, setting)
        return {
            stage: WeightVersions(self.graph.stages[stage].module, lag, first, schedule.vertical_sync)
            for stage in self._stages
        }

    def _weights_for(self, stage: int, micro_batch: int) -> dict[str, Tensor] | None:
        return self._versions[stage].weights_for(micro_batch) if self._versions else None

    def _refuse_stream(self, why: str) -> None:
        if self._stream is not None:
            raise IncompatibleError(
                f"{self._schedule!r} updates the weights after every micro-batch, so {why}: call run.step(x, y) only, "
                "or take another schedule"
            )

    def _refuse_inside_agreed(self) -> None:
        if self._whole.is_whole:
            raise IncompatibleError("the model is whole inside run.agreed(): train outside of it")

    def _stream_step(self, x: Any, y: Any) -> Tensor:
        assert self._stream is not None
        self._refuse_inside_agreed()
        count = self._take_batch(x, y, self._stream.entered)
        self._collect_late_loss()
        loss = self._late_loss
        self._run_stream(self._stream.next_step(self.placement.setting(count).micro_batches))
        self._send_loss(0)
        self._loss_is_pending = True
        self._count_bytes()
        self._step += 1
        return loss

    def _collect_late_loss(self) -> None:
        """Receive the loss of the latest step, if that was not done."""
        if self._loss_is_pending:
            self._loss_is_pending = False
            self._late_loss = self._collect_loss(0)

    def _run_stream(self, actions: Sequence[Action]) -> None:
        self._runner.begin_step(0, last=-1)
        with self.teams.no_sync(), self._runner.random_streams():
            self.executor.run(actions, self._inputs_of, 0)
        for action in actions:
            if action.kind == "F":
                self._data.pop(action.micro_batch, None)

    def _update_after(self, stage: int, micro_batch: int) -> None:
        self.teams.reduce_gradients()
        self._versions[stage].before_update(micro_batch)
        self._optimizer_step()

    # The batch.

    @property
    def _setting_replica(self) -> int:
        return self._replica if self.placement.unequal else 0

    @property
    def _has_last_stage(self) -> bool:
        return self.placement.stages - 1 in self._stages

    def _take_batch(self, x: Any, y: Any, first: int) -> int:
        """Cut a batch into micro-batches, numbered from `first` on. Returns their number on one worker."""
        self.world.finish_left()
        if self._divided is not None:
            self._divided.scale_shared_gradients()
        inputs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
        if any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
            raise IncompatibleError(
                "x requires a gradient, and a pipeline computes none for its inputs: pass x.detach(), or make what has "
                "computed x a part of the model"
            )
        samples = _batch_size(inputs, y)
        count = self._count(samples)
        sizes = [samples // count + (1 if place < samples % count else 0) for place in range(count)]
        placement, averaged = self.placement, self._schedule.flushes
        stride = placement.replicas[0] if placement.unequal else 1
        factor = placement.replicas[-1] / stride if placement.unequal else 1.0
        cut = [(each,) for each in _cut(inputs[0], sizes)] if len(inputs) == 1 else _cut(inputs, sizes)
        parts = list(zip(cut, _cut(y, sizes), sizes, strict=True))
        total = count * stride
        for number in range(total):
            own_inputs, target, size = parts[number // stride]
            share = factor * size / samples if averaged else 1.0
            self._data[first + number] = MicroBatch(own_inputs, target, share, size / samples / stride)
        if placement.unequal and y is not None:
            self._send_targets(first, total)
        return count

    def _count(self, samples: int) -> int:
        """The number of micro-batches: as configured, or the most that the samples and the schedule allow.

        Batch norm refuses a single value for a channel, so its micro-batches have two samples if the batch has.
        """
        most = min(max(1, samples // 2) if self._has_batch_norm else samples, self._options.micro_batches)
        for count in range(most, 0, -1):
            try:
                self.placement.check(count)
            except SpecError:
                if count == 1:
                    raise
            else:
                return count
        raise IncompatibleError("a step needs at least one sample")

    def _inputs_of(self, micro_batch: int) -> tuple[Tensor, ...]:
        return self._data[micro_batch].inputs

    def _micro_batch(self, micro_batch: int) -> MicroBatch:
        """The data of a micro-batch for the loss. With unequal replicas its target comes from the first stage."""
        data = self._data[micro_batch]
        if not self.placement.unequal or data.target is None:
            return data
        source = self.placement.worker_of(0, micro_batch, self._replica)
        leaves, form = tree_flatten(data.target)
        found = [
            self._messages.receive(source, self._target_place(micro_batch, number), 0)
            if isinstance(leaf, Tensor)
            else leaf
            for number, leaf in enumerate(leaves)
        ]
        return data._replace(target=tree_unflatten(found, form))

    def _share_of_loss(self, stage: int, micro_batch: int) -> float:
        """The weight of a loss that a stage adds itself."""
        return self._data[micro_batch].share * self.placement.gradient_factor(self.placement.stages - 1, stage)

    def _send_targets(self, first: int, total: int) -> None:
        last = self.placement.stages - 1
        for number in range(first, first + total):
            if self.placement.worker_of(0, number, self._replica) == self._everyone.rank:
                worker = self.placement.worker_of(last, number, self._replica)
                for place, leaf in enumerate(tree_flatten(self._data[number].target)[0]):
                    if isinstance(leaf, Tensor):
                        self._messages.send(leaf, worker, self._target_place(number, place), 0)

    def _target_place(self, micro_batch: int, leaf: int) -> Place:
        return Place(self._target_number + leaf, micro_batch, f"the target of micro-batch {micro_batch} from stage 0")

    # The loss and the gradients over all stages.

    def _count_bytes(self) -> None:
        """Add to the statistics what was sent to other stages since the last call."""
        sent = self.executor.sent_bytes
        self.stats.forwarded(sent - self._counted_bytes)
        self._counted_bytes = sent

    def _send_loss(self, step: int) -> None:
        """Send what this worker has added to the loss to the other workers of the pipeline."""
        if self._has_last_stage:
            losses = self._runner.losses
            self._own_loss = sum((losses[number] for number in sorted(losses)), torch.tensor(0.0)).detach()
            for worker in self._pipeline.ranks:
                if worker != self._everyone.rank:
                    self._messages.send(self._own_loss, worker, self._loss_place, step)

    def _collect_loss(self, step: int) -> Tensor:
        """The mean loss of a step, from all workers of the last stage."""
        parts = []
        for worker in self._loss_workers:
            own = worker == self._everyone.rank
            part = self._own_loss if own else self._messages.receive(worker, self._loss_place, step)
            assert part is not None, "a loss is never empty"
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _find_loss_workers(self) -> list[int]:
        """The workers of this pipeline that compute the last stage."""
        placement = self.placement
        rank = placement.schedule.rank_of(placement.stages - 1, placement.ranks)
        return [worker for worker in placement.team(rank) if worker in self._pipeline.ranks]

    def _counts(self, parameter: nn.Parameter) -> bool:
        here = not self.placement.unequal or self._replica == 0
        whole = self._divided is None or self._divided.counts_here(parameter)
        return here and whole and id(parameter) in self._whole.trained_here

    @property
    def _model_parallel_group(self) -> Group:
        return self._groups.model_parallel

    def _unscale(self, norms: Tensor) -> Tensor:
        """Divide the gradients by the scale of the GradScaler. All stages skip the step if one has NaN or Inf."""
        scaler, own = self._options.scaler, [each for each in self._own_parameters() if each.grad is not None]
        scale = float(scaler.get_scale())
        if not own:
            return norms / scale
        if not bool(torch.isfinite(norms).all()):
            gradient = own[0].grad
            assert gradient is not None
            (gradient._values() if gradient.is_sparse else gradient).view(-1)[0] = math.inf
        scaler.unscale_(self.optimizer)
        return norms / scale

    def _update_scale(self, trained: bool) -> None:
        """Update the GradScaler. A worker without gradients takes the scale of the others."""
        scaler = self._options.scaler
        if trained:
            scaler.update()
        state = scaler.state_dict()  # empty if the scaler is disabled
        own = [state["scale"], state["_growth_tracker"]] if state and trained else [0.0, 0]
        if len(self._model_parallel_group.ranks) > 1:
            shared = allreduce(
                torch.tensor(own, dtype=torch.float64), op="max", group=self._model_parallel_group
            ).tolist()
            if state and not trained and shared[0]:
                scaler.load_state_dict({**state, "scale": shared[0], "_growth_tracker": int(shared[1])})

    @contextmanager
    def _without_statistics(self) -> Iterator[None]:
        """Inside, batch norms collect no statistics: activations are computed again, or the model is evaluated."""
        with ExitStack() as stack:
            for norms in self._norms:
                stack.enter_context(norms.pause())
            yield

    # Lost ranks.

    def _with_stages(self, error: PeerLostError) -> PeerLostError:
        """The error about a lost rank, extended by the stages of that rank and the action of this rank."""
        if error is self._loss_of_rank:  # of a method that this one has called
            return error
        found = [str(error)]
        if error.peer is not None and error.peer < self.placement.workers:
            found.append(f"rank {error.peer} computes {self._describe_stages(error.peer)}")
        done = self.executor.progress or "no action, between micro-batches"
        own = self._describe_stages(self._everyone.rank)
        found.append(f"this rank computes {own}, and is in step {self._step} at {done}")
        self._loss_of_rank = PeerLostError(
            "; ".join(found), peer=error.peer, pending=error.pending, seconds=error.seconds
        )
        return self._loss_of_rank

    def _refuse_after_loss(self) -> None:
        """Raise if a worker is known to be lost: to wait for the others may take as long as the timeout."""
        loss = self._loss_of_rank
        if loss is not None:
            text = f"{loss}; so the run cannot be completed: load a checkpoint into a new model"
            self._loss_of_rank = PeerLostError(text, peer=loss.peer, pending=loss.pending, seconds=loss.seconds)
            raise self._loss_of_rank

    def _describe_stages(self, worker: int) -> str:
        stages = self.placement.stages_of(self.placement.position(worker)[0])
        return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"

    # The user's view: see `Run`.

    @property
    def peak_activations(self) -> int:
        """The largest number of forward passes on this worker that waited for their backward pass."""
        return self._runner.peak_activations

    @property
    def loss_is_late(self) -> bool:
        """Whether `step` returns the loss of the step before."""
        return not self._schedule.flushes

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker has sent to other stages. `stats.bytes_wire` has them and the all-reduce's."""
        return self.executor.sent_bytes

    @property
    def config(self) -> dict[str, Any]:
        return {
            **self.team_run.config,
            **({} if self._divided is None else {"mesh": str(self.mesh)}),
            "codec": self._options.codec,
            "pipeline": {
                "schedule": repr(self._schedule),
                "micro_batches": self._options.micro_batches,
                "replicas": list(self.placement.replicas),
                **self._options.description,
            },
        }

    @property
    def _leaves_out_incomplete_batches(self) -> bool:
        """With different numbers of workers per stage, and with replicas in `pipedream`."""
        return self.placement.whole_batches

    def steps(
        self, data: Any, *, global_batch: int, micro_batch: int | None = None, seed: int = 0, name: str | None = None
    ) -> Steps:
        raise IncompatibleError(
            "run.steps() divides a batch into micro-batches for accumulation, and a pipeline divides it itself: take "
            "run.shard() and run.step()"
        )

    def no_sync(self) -> AbstractContextManager[None]:
        raise IncompatibleError(
            "with a pipeline, run.backward(x, y) accumulates gradients and run.update() applies them"
        )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, every worker has the whole model, in its own memory."""
        self.flush()
        with self.teams.agreed(), self._whole_layers(), self._whole.whole():
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint reads this worker's part of the model and of the optimizer's state."""
        self.flush()
        with self.teams.agreed(), self._whole.part(), self._part():
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, a checkpoint is loaded into this worker's part of the model and of the optimizer's state."""
        with self._whole.part(), self._part():
            yield

    def model_part(self) -> ModelPart:
        """The part of the model that this worker saves and loads."""
        with self._part():
            part = self._whole.model_part()
        if self._divided is None or self.mesh is None:
            return part
        with self._whole.part():
            return self._divided.model_part(part, self.mesh.part_number(self._everyone.rank))

    @_naming_stages
    def close(self) -> None:
        """End the run: every worker then has the whole model, unless it was made on the meta device.

        Every worker closes; a second call does nothing. After the loss of a worker nobody can have the whole model:
        then the error is raised again at once, and the model stays in parts.
        """
        if self._closed:
            return
        try:
            self._refuse_after_loss()
            self.flush()
            self.executor.finish_sends()
            self.teams.close()
            if self._divided is not None and not self._whole.never_whole:
                self._divided.close()
            self._whole.close()
        finally:
            self.release()

    def release(self) -> None:
        """Remove all hooks: the run is over on this worker."""
        super().release()
        self.executor.close()
        self._whole.end()
        for norms in self._norms:
            norms.close()

    def __enter__(self) -> PipelineRun:
        return self

    # Checkpoints.

    @property
    def _progress(self) -> dict[str, Any]:
        return {"format": "pipeline", "parts": self._layout, "next": self._step}

    def _take_progress(self, shared: Mapping[str, Any]) -> None:
        self._step = int(shared["next"] if "next" in shared else shared["steps"])

    @property
    def _codec(self) -> str | None:
        return self._options.codec

    def _team_of_older_version(self, shared: Mapping[str, Any]) -> Any:
        return shared["teams"][self._rank] if "teams" in shared else None

    @property
    def _layout(self) -> dict[str, Any]:
        return {
            "cuts": list(self.graph.cuts),
            "replicas": list(self.placement.replicas),
            "stages_per_rank": self._schedule.stages_per_rank,
            "strategy": self.team_run.strategy.state_format,
            **({} if self._divided is None else {"mesh": str(self.mesh)}),
        }

    def __repr__(self) -> str:
        place = f"pipeline rank {self._rank} of {self.placement.ranks}"
        return f"PipelineRun({self._schedule!r}, {place}, {self.team_run!r})"


def _batch_size(inputs: tuple[Any, ...], target: Any) -> int:
    """The number of samples, which all tensors must agree on."""
    found: dict[int, str] = {}
    for what, tree in (("x", inputs), ("y", target)):
        for leaf in tree_flatten(tree)[0]:
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                found.setdefault(leaf.shape[0], f"{what} has a tensor of shape {list(leaf.shape)}")
    if any(not isinstance(each, Tensor) for each in inputs):
        kinds = ", ".join(type(each).__name__ for each in inputs)
        raise IncompatibleError(f"x consists of {kinds}: the inputs of a pipeline are tensors, alone or in a tuple")
    if len(found) != 1:
        texts = "; ".join(found.values()) or "there is no tensor with samples"
        raise IncompatibleError(f"a batch is cut into micro-batches along dimension 0, which must be equal: {texts}")
    samples = next(iter(found))
    if samples == 0:
        raise IncompatibleError(f"the batch has no samples: {next(iter(found.values()))}")
    return int(samples)


def _cut(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """A tree of tensors, cut along dimension 0. Values that are no tensors go to all parts."""
    if isinstance(tree, Tensor) and tree.dim() > 0:  # the usual case
        return list(torch.split(tree, list(sizes)))
    leaves, form = tree_flatten(tree)
    cut = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten([parts[number] for parts in cut], form) for number in range(len(sizes))]


def _concatenate(results: Sequence[Any]) -> Any:
    """The outputs of all micro-batches as one."""
    leaves, form = zip(*(tree_flatten(each) for each in results), strict=True)
    joined = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() > 0 else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return tree_unflatten(joined, form[0])
