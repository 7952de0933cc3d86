"""The contenders and the models of `syncline bench pipeline`. All train on the same batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from syncline.bench.pipeline_prediction import PipelinePrediction
from syncline.bench.step_contenders import BenchModel
from syncline.errors import SpecError
from syncline.parallel.executor import ActionSpan
from syncline.parallel.partition import LayerCost, ModelProfile, StagePartition
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import Action
from syncline.parallel.splitting import split
from syncline.specs import nearest
from syncline.strategies import Run
from syncline.training.distribute import distribute
from syncline.training.pipeline import pipeline
from syncline.workloads import build, names
from syncline.workloads.base import batches
from syncline.world import World, broadcast

__all__ = [
    "DATA_PARALLEL",
    "MODELS",
    "ONE_PROCESS",
    "TORCH",
    "DataParallel",
    "OneProcess",
    "PipelineContender",
    "ScheduleContender",
    "TorchContender",
    "bench_model",
    "loss_of",
    "make_optimizer",
]

ONE_PROCESS, DATA_PARALLEL, TORCH = "one process", "data parallel", "torch 1F1B"
CLASSES = 10


class MlpLayer(nn.Module):
    """A linear layer with a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


def _mlp(width: int, layers: int, batch: int) -> BenchModel:
    def model() -> nn.Module:
        hidden = [(f"layer{number}", MlpLayer(width)) for number in range(layers)]
        return nn.Sequential(OrderedDict([*hidden, ("head", nn.Linear(width, CLASSES))]))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(batch, width, generator=generator),
            torch.randint(CLASSES, (batch,), generator=generator),
        )

    return BenchModel(f"MLP, {layers} layers of width {width}, batch {batch}", model, draw)


MODELS = {"mlp": _mlp}
"""Each makes a model and its batches of a width, a number of layers and a number of samples."""


def bench_model(name: str, width: int, layers: int, batch: int) -> BenchModel:
    """A model of a family, with these sizes; or the model of a workload that predicts classes, such as vgg."""
    if name in MODELS:
        return MODELS[name](width, layers, batch)
    known = [*MODELS, *names()]
    if name.partition("(")[0].strip() not in known:
        raise SpecError(f"unknown model {name!r}; {nearest(name, known)}")
    workload = build(name)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return next(batches(workload.splits().train, batch))

    return BenchModel(f"{workload!r}, batch {batch}", workload.model, draw)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over samples, or over the positions of all samples."""
    return functional.cross_entropy(output.flatten(0, -2), labels.flatten())


def make_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class PipelineContender(ABC):
    """One way to train a model. Every rank has each contender, and calls its methods at the same time."""

    def __init__(self, name: str, world: World, model: nn.Module) -> None:
        self.name, self.world, self.model = name, world, model

    @abstractmethod
    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Train on the whole batch, of which this rank may use a part."""

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far, as counted by Syncline."""
        return 0

    def close(self) -> None:
        """End the training. Rank 0 then has the weights of the whole model."""
        return


class ScheduleContender(PipelineContender):
    """The model in a pipeline."""

    def __init__(
        self,
        name: str,
        world: World,
        model: nn.Module,
        placement: PipelinePlacement,
        partition: StagePartition,
        count: int,
    ) -> None:
        super().__init__(name, world, model)
        self.run = pipeline(
            model,
            make_optimizer(list(model.parameters())),
            loss_of,
            stages=partition,
            schedule=placement.schedule,
            microbatches=count,
        )
        self._shares = placement.replicas[0]
        self._share = placement.position(world.rank)[1] % self._shares
        self._update_s = 0.0

    def charge(self, prediction: PipelinePrediction) -> None:
        """In a simulation, let each action take its predicted time."""
        world, costs = self.world, prediction.stages

        def charge(action: Action) -> None:
            world.compute(costs[action.stage].seconds(action.kind))

        self.run.executor.charge = charge
        self._update_s = prediction.update_s[world.rank] if self.run.placement.schedule.flushes else 0.0

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.run.executor.spans = []
        x, y = (each.tensor_split(self._shares)[self._share] for each in batch)
        self.run.step(x, y)
        if self._update_s:
            self.world.compute(self._update_s)

    def take_spans(self) -> list[ActionSpan]:
        """The times of the actions of the latest step."""
        return self.run.executor.spans or []

    @property
    def sent_bytes(self) -> int:
        return self.run.stats.bytes_wire

    def close(self) -> None:
        self.run.close()


class _WholeModel(PipelineContender):
    """A rank trains the whole model on a part of the batch."""

    def __init__(self, name: str, world: World, model: nn.Module) -> None:
        super().__init__(name, world, model)
        self.optimizer = make_optimizer(list(model.parameters()))
        self._update_s = 0.0
        self._hooks = ExitStack()

    def charge(self, profile: ModelProfile, update_s: float) -> None:
        """In a simulation, let each layer take the time of its profile, after its forward and before its backward."""
        self._update_s = update_s
        for layer in profile.layers:
            module = self.model.get_submodule(layer.name)
            charge = _LayerCharge(self.world, layer)
            self._hooks.callback(module.register_forward_hook(charge.forward).remove)

    def _train(self, x: Tensor, y: Tensor) -> None:
        loss_of(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._update_s:
            self.world.compute(self._update_s)

    def close(self) -> None:
        self._hooks.close()


class _LayerCharge:
    """Hooks in which the virtual time of a layer passes."""

    def __init__(self, world: World, layer: LayerCost) -> None:
        self._world, self._layer = world, layer

    def forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """After the layer's forward. Its backward begins when the gradient of its output is there."""
        self._world.compute(self._layer.forward_s)
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self._world.compute(self._layer.backward_s)


class OneProcess(_WholeModel):
    """Rank 0 trains alone, and the others wait."""

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        if self.world.rank == 0:
            self._train(*batch)


class DataParallel(_WholeModel):
    """Every rank trains the whole model on its part of the batch, with `distribute` and all-reduce."""

    def __init__(self, name: str, world: World, model: nn.Module) -> None:
        super().__init__(name, world, model)
        self.run: Run = distribute(model, self.optimizer)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = (each.tensor_split(self.world.size)[self.world.rank] for each in batch)
        self._train(x, y)

    @property
    def sent_bytes(self) -> int:
        return self.run.stats.bytes_wire

    def close(self) -> None:
        super().close()
        self.run.close()


class TorchContender(PipelineContender):
    """The same stages with torch.distributed.pipelining."""

    def __init__(self, name: str, world: World, model: nn.Module, partition: StagePartition, count: int) -> None:
        from syncline.bench.baselines.pipelining import TorchPipeline

        super().__init__(name, world, model)
        self._graph = split(model, partition.cuts)
        self._pipeline = TorchPipeline(self._graph, world.rank, count, loss_of)
        self._optimizer = make_optimizer(list(self._pipeline.module.parameters()))

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._pipeline.forward_backward(*batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        for stage in self._graph.stages:
            for each in stage.module.parameters():
                with torch.no_grad():
                    each.copy_(broadcast(each.detach(), stage.index))
