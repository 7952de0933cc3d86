"""Computes the stages of one worker with autograd: forward, backward, and backward in two halves.

```text
F   leaves = inputs, outputs = module(leaves)     both are kept until the backward pass
B   autograd from the outputs: gradients of the weights are added to .grad, those of the leaves are returned
I   autograd from the outputs to the leaves only; W continues from there to the weights
```

The last stage multiplies the loss of a micro-batch by its share of the samples, so that the gradients of all
micro-batches add up to those of the mean loss. Gradients themselves are never rescaled.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from syncline.errors import IncompatibleError
from syncline.parallel.expert_layers import find_experts
from syncline.parallel.module_trees import own_forward
from syncline.parallel.schedules import Action
from syncline.parallel.stages import StageGraph

__all__ = ["MAX_CLONED_ELEMENTS", "MicroBatch", "Recompute", "StageRunner", "check_split_backward", "stream_seed"]

SPLIT_BACKWARD = "torch.distributed.pipelining._backward"
"""A private module of torch: see `check_split_backward`."""
SPLIT_BACKWARD_PARAMETERS = {
    "stage_backward_input": ("stage_outputs_or_loss", "output_grads", "input_values", "weights"),
    "stage_backward_weight": ("weights", "param_groups", "retain_graph"),
}
"""Its functions and their parameters, as in torch 2.13."""

MAX_CLONED_ELEMENTS = 1 << 14
"""Up to this size a stage gets a copy of an input: that is faster than a function of autograd in Python."""

Recompute = Literal["always", "except_last", "never"]
"""Which micro-batches compute their activations again in the backward pass instead of keeping them."""


class MicroBatch(NamedTuple):
    """The data of one micro-batch on this worker."""

    inputs: tuple[Tensor, ...]
    target: Any
    share: float
    """The factor of its loss in the backward pass."""
    weight: float
    """Its weight in the mean loss of the step, which is reported."""


@dataclass
class _Activations:
    leaves: list[Tensor]
    outputs: list[Tensor]
    weights: dict[str, Tensor] | None
    """The version of the weights that the forward has used; None: the present ones."""
    weight_groups: Any = None
    """Between I and W: what W continues from."""


class StageRunner:
    """The compute of one worker's stages. See `StageCompute` for its methods."""

    def __init__(
        self,
        graph: StageGraph,
        loss_fn: Callable[[Any, Any], Tensor],
        data: Callable[[int], MicroBatch],
        *,
        seed: int = 0,
        recompute: Recompute = "never",
        recomputing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        gradients_complete: Callable[[int], None] = lambda stage: None,
        update: Callable[[int, int], None] = lambda stage, micro_batch: None,
        compile: bool = False,
        weights_for: Callable[[int, int], dict[str, Tensor] | None] = lambda stage, micro_batch: None,
        share: Callable[[int, int], float] = lambda stage, micro_batch: 1.0,
    ) -> None:
        """`data` gives a micro-batch for its loss. `recomputing` is entered while activations are computed again.

        `weights_for(stage, micro_batch)` gives copies of the weights that a forward must use; None: the present ones.
        `share(stage, micro_batch)` is the weight of a loss that a stage adds itself: the balance loss of experts.
        """
        self._graph, self._loss_fn, self._data, self._seed = graph, loss_fn, data, seed
        self._last_stage = len(graph.stages) - 1
        self._recompute = recompute
        self._recomputing = recomputing
        self.gradients_complete = gradients_complete
        self.update = update
        self._weights_for = weights_for
        self._share = share
        self._experts = [[each for _, each in find_experts(stage.module)] for stage in graph.stages]
        self._calls: list[Callable[..., Any]] = [
            torch.compile(own_forward(stage.module)) if compile else stage.module for stage in graph.stages
        ]
        """What computes each stage."""
        self._kept: dict[tuple[int, int], _Activations] = {}
        self._step_seed, self._last = stream_seed(seed, 0, 0), -1
        self.loss_scale = 1.0
        """The factor of a GradScaler."""
        self._generators: list[torch.Generator] = []
        """Those that `random_streams` restores."""
        self.training = True
        """Whether a backward pass follows."""
        self.losses: dict[int, Tensor] = {}
        """By micro-batch: its loss times its weight, on the worker of the last stage."""
        self.results: dict[int, Any] = {}
        """By micro-batch: the output of the model, if no backward pass follows."""
        self.peak_activations = 0
        """The largest number of forward passes whose backward pass had not ended."""

    def begin_step(self, step: int, last: int) -> None:
        """A step begins; `last` is its last micro-batch."""
        self._step_seed, self._last = stream_seed(self._seed, 0, step), last
        self.losses = {}

    def forget(self) -> None:
        """Drop what an interrupted step has left."""
        self._kept.clear()

    # The contract of the executor.

    def forward(self, stage: int, micro_batch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `StageCompute`. Called inside `random_streams`."""
        if not self.training:
            with torch.no_grad():
                return self._finish_forward(stage, micro_batch, self._calls[stage](*inputs))
        weights = self._weights_for(stage, micro_batch)
        self._begin_random_stream(stage, micro_batch)
        found = self._call(stage, micro_batch, inputs, weights)
        last = stage == self._last_stage
        outputs = [self._loss(micro_batch, found)] if last else list(found)
        self._kept[stage, micro_batch] = _Activations(list(inputs), outputs, weights)
        self.peak_activations = max(self.peak_activations, len(self._kept))
        return [] if last else outputs

    def backward(self, action: Action, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        kept = self._kept[action.stage, action.micro_batch]
        roots, seeds = self._roots(action.stage, kept, gradients)
        if action.kind == "I":
            return self._backward_inputs(action, kept, roots, seeds)
        del self._kept[action.stage, action.micro_batch]
        if roots:
            torch.autograd.backward(roots, seeds)
        self._add_to_gradients(action.stage, kept.weights)
        return [leaf.grad if leaf.is_leaf and leaf.requires_grad else None for leaf in kept.leaves]

    def backward_weights(self, stage: int, micro_batch: int) -> None:
        kept = self._kept.pop((stage, micro_batch))
        if isinstance(kept.weight_groups, _WholeBackward):
            kept.weight_groups.run()
        elif kept.weight_groups is not None:
            try:
                _split_backward().stage_backward_weight(self._weights(stage), kept.weight_groups)
            except RuntimeError as error:
                if "second time" not in str(error):
                    raise
                raise IncompatibleError(
                    f"the backward pass of stage {stage} cannot be divided in two: a weight is also used where no "
                    "input of the stage takes part, as in layer(x) + layer(self.constant): use 1f1b or gpipe"
                ) from error

    # Forward.

    def _call(self, stage: int, micro_batch: int, inputs: Sequence[Tensor], weights: dict[str, Tensor] | None) -> Any:
        again = self._recompute == "always" or (self._recompute == "except_last" and micro_batch != self._last)
        if weights is None and not again and not self._experts[stage]:  # the usual case
            return self._calls[stage](*map(_writable, inputs))
        module = self._graph.stages[stage].module
        share = self._share(stage, micro_batch) * self.loss_scale if self._experts[stage] else 1.0

        def compute(*values: Tensor) -> Any:
            with self._balanced(stage, share):
                return self._calls[stage](*values) if weights is None else functional_call(module, weights, values)

        def compute_again(*values: Tensor) -> Any:
            return compute(*(value.clone() for value in values))

        if not again:
            return compute(*map(_writable, inputs))
        contexts = (nullcontext(), self._recomputing())
        return checkpoint(compute_again, *inputs, use_reentrant=False, context_fn=lambda: contexts)

    @contextmanager
    def _balanced(self, stage: int, weight: float) -> Iterator[None]:
        """Inside, the outputs of experts include their weighted balance loss in the backward pass."""
        for layer in self._experts[stage]:
            layer.loss_weight = weight
        try:
            yield
        finally:
            for layer in self._experts[stage]:
                layer.loss_weight = None

    def _finish_forward(self, stage: int, micro_batch: int, found: Any) -> Sequence[Tensor]:
        if stage < self._last_stage:
            return list(found)
        self.results[micro_batch] = found
        return []

    def _loss(self, micro_batch: int, output: Any) -> Tensor:
        data = self._data(micro_batch)
        loss = self._loss_fn(output, data.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise IncompatibleError(
                f"the loss function returned {what} for micro-batch {micro_batch}: it must return the mean loss of the "
                "micro-batch, a tensor with one element"
            )
        if not loss.requires_grad:
            raise IncompatibleError(
                f"the loss of micro-batch {micro_batch} needs no gradient, so that no stage would be trained: is it "
                "computed under torch.no_grad(), or are all parameters frozen?"
            )
        loss = loss.reshape(())
        self.losses[micro_batch] = loss.detach().float() * data.weight
        return loss * (data.share * self.loss_scale)

    @contextmanager
    def random_streams(self) -> Iterator[None]:
        """Inside, each forward draws random numbers that depend on the step, the stage and the micro-batch only.

        Afterwards the script's own random numbers continue. A step is inside once: to save them with each forward would
        take as long as a small layer.
        """
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        before = [each.get_state() for each in self._generators]
        try:
            yield
        finally:
            for each, state in zip(self._generators, before, strict=True):
                each.set_state(state)
            self._generators = []

    def _begin_random_stream(self, stage: int, micro_batch: int) -> None:
        seed = stream_seed(self._step_seed, stage, micro_batch)
        for each in self._generators:
            each.manual_seed(seed)

    # Backward.

    def _roots(
        self, stage: int, kept: _Activations, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that have a gradient, and these gradients."""
        if stage == self._last_stage:
            return kept.outputs, [torch.ones_like(kept.outputs[0])]
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _backward_inputs(
        self, action: Action, kept: _Activations, roots: list[Tensor], seeds: list[Tensor]
    ) -> Sequence[Tensor | None]:
        leaves = [leaf for leaf in kept.leaves if leaf.requires_grad]
        if not roots:
            return [None] * len(kept.leaves)
        if not leaves:  # nothing waits for gradients of inputs: W does the whole backward pass
            kept.weight_groups = _WholeBackward(roots, seeds)
            kept.outputs = []
            return [None] * len(kept.leaves)
        detachable = [_writable(each) if each._is_view() else each for each in roots]  # torch detaches them in place
        found, kept.weight_groups = _split_backward().stage_backward_input(
            detachable, seeds, kept.leaves, self._weights(action.stage)
        )
        kept.outputs = []
        return list(found)

    def _weights(self, stage: int) -> Iterator[nn.Parameter]:
        return (each for each in self._graph.stages[stage].module.parameters() if each.requires_grad)

    def _add_to_gradients(self, stage: int, weights: Mapping[str, Tensor] | None) -> None:
        """Move the gradients of a version of the weights to the parameters."""
        if weights is None:
            return
        for name, parameter in self._graph.stages[stage].module.named_parameters():
            version = weights.get(name)
            if version is not None and version.grad is not None:
                parameter.grad = version.grad if parameter.grad is None else parameter.grad + version.grad
                version.grad = None  # another micro-batch may use the same version


def stream_seed(step_seed: int, stage: int, micro_batch: int) -> int:
    """The seed of one forward, or of a step: SplitMix64 of its number. `mix_seeds` takes as long as a small layer.

    >>> len({stream_seed(7, stage, number) for stage in range(40) for number in range(50)})
    2000
    """
    mixed = (step_seed + (stage << 40) + micro_batch + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) >> 1


class _Writable(torch.autograd.Function):
    """The identity. Unlike a leaf or a view, its result may be changed in place, as nn.ReLU(inplace=True) does."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # no view of the leaf, which autograd would protect

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _writable(value: Tensor) -> Tensor:
    if not value.requires_grad:
        return value
    if value.numel() <= MAX_CLONED_ELEMENTS:
        return value.clone()
    found: Tensor = _Writable.apply(value)  # type: ignore[no-untyped-call]
    return found


@dataclass
class _WholeBackward:
    roots: list[Tensor]
    seeds: list[Tensor]

    def run(self) -> None:
        torch.autograd.backward(self.roots, self.seeds)


def check_split_backward() -> None:
    """Refuse a version of torch whose private functions for a backward pass in two halves are missing or different."""
    try:
        found = {
            name: tuple(inspect.signature(getattr(_split_backward(), name)).parameters)
            for name in SPLIT_BACKWARD_PARAMETERS
        }
    except (ImportError, AttributeError) as error:
        found = {"missing": (str(error),)}
    if found != SPLIT_BACKWARD_PARAMETERS:
        what = "; ".join(f"{name}({', '.join(names)})" for name, names in found.items())
        raise IncompatibleError(
            f"torch {torch.__version__} divides a backward pass in two by other functions of {SPLIT_BACKWARD} than "
            f"those of torch 2.13 (found: {what}): take 1f1b, gpipe or interleaved, or torch 2.13"
        )


def _split_backward() -> Any:
    """Torch's backward in two halves. The import takes seconds, so it waits until a schedule needs it."""
    return importlib.import_module(SPLIT_BACKWARD)
