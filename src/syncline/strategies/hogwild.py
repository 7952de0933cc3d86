"""Hogwild: workers of one host update one copy of the weights in shared memory, without locks.

w ← w − η · g_i(w), by each worker i whenever it has a gradient, at any time::

    memory    │ fc1.weight │ fc1.bias │ fc2.weight │ …        one block for each dtype
                   ▲ ▲           ▲
    worker 0 ──────┘ │           │                            each worker's parameters are views of it, and its
    worker 1 ────────┴───────────┘                            optimizer steps in place

If two workers write the same element at once, one update may be lost. With sparse gradients that is rare, and with
dense ones it does little harm in practice. Recht, Ré, Wright, Niu: Hogwild! (2011).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, check_same, plain_name
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import Preset, Strategy, StrategyRun, all_tensors, check_gradients
from syncline.world import barrier

__all__ = ["Hogwild"]

CACHE_LINE_BYTES = 64
"""A tensor begins on its own cache line."""


@dataclass(frozen=True, repr=False)
class Hogwild(Strategy):
    """Every worker steps at its own pace, on weights that all workers share.

    >>> Hogwild()
    hogwild
    """

    name: ClassVar[str] = "hogwild"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="hogwild", momentum=0.5, scaling="none", one_host=True),)
    asynchronous = True

    def run_type(self) -> type[StrategyRun]:
        return _HogwildRun


class _HogwildRun(AsynchronousRun):
    def setup(self) -> None:
        super().setup()
        self._check_memory_is_shared()
        model, optimizer, communicator = self.model, self.optimizer, self.communicator
        self.synchronised = {id(parameter) for parameter in model.parameters()}  # frozen parameters are shared too
        self._buffer_places = _buffer_places(model)
        own = all_tensors(model)
        self._shared = _share(communicator, own)
        self._counts = communicator.group.transport.memory.shared(communicator.size, torch.int64).numpy()
        """The steps of each worker, for the staleness. Each worker writes its own count."""
        if communicator.rank == 0:
            for name, tensor in own.items():
                self._shared[name].copy_(tensor)
        if communicator.size > 1:
            barrier(communicator.group)  # no worker steps before the weights are there
        for name, parameter in model.named_parameters():
            parameter.data = self._shared[plain_name(name)]
        self._first = next(iter(model.named_parameters()))
        self.open_channel(self._load_weights)
        self._total: int | None = 0
        """Steps of all workers at the end of this worker's latest step."""
        self.hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _check_memory_is_shared(self) -> None:
        """Refuse workers on several hosts, a codec, and a model on a GPU."""
        hosts = list(dict.fromkeys(self.world.hosts))
        if len(hosts) > 1:
            shown = ", ".join(hosts[:8]) + (", …" if len(hosts) > 8 else "")
            size = self.world.size
            raise IncompatibleError(
                f"hogwild shares memory, and the {size} workers are on {len(hosts)} hosts ({shown}): run them on one, "
                "or take a strategy that sends, such as downpour (a simulated network has one host with "
                f"ranks_per_host={size} and inside=Link(…))"
            )
        codec = self.communicator.codec
        if codec is not None:
            raise IncompatibleError(f"hogwild sends nothing that {codec!r} could make smaller: leave the codec out")
        devices = {plain_name(name): parameter.device.type for name, parameter in self.model.named_parameters()}
        check_same(self.communicator, "devices", devices)
        for name, device in devices.items():
            if device != "cpu":
                raise IncompatibleError(
                    f"hogwild shares the memory of the CPU, and {name} is on {device}: keep the model on the CPU, or "
                    "take another strategy"
                )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, the model holds a copy of the shared weights, and the buffers of the lowest rank that is not lost."""
        shared = [(parameter, parameter.data) for parameter in self.model.parameters()]
        try:
            with super().agreed():
                yield
        finally:
            for parameter, data in shared:
                parameter.data = data

    def show_agreed(self) -> None:
        self._publish_buffers()
        self.wait_for_all("enter agreed()")  # no worker steps from now on
        self._take_shared()
        self.wait_for_all("copy the weights")

    def shown_tensors(self) -> dict[str, Tensor]:
        """Only buffers: the weights are shared, and `agreed()` restores them itself."""
        return {name: buffer.detach() for name, buffer in self.buffers().items()}

    def finish(self) -> None:
        self._publish_buffers()
        super().finish()

    def read_final(self) -> None:
        self._take_shared()

    def leave_checkpoint(self) -> None:
        """The last worker that leaves saves: it has the weights of all."""
        elastic = self.world.elastic
        assert elastic is not None, "it leaves"
        if elastic.formation.leave_unless_last(elastic.team, elastic.leave_reason):
            elastic.save_for_later(elastic.formation.ending or "all workers leave", lambda: True)

    def _take_shared(self) -> None:
        """Copy the shared weights into this worker's own memory."""
        for name, buffer in self.buffers().items():
            buffer.detach().copy_(self._shared[name])
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()

    def resume_steps(self) -> None:
        """Each worker continues from its own step count."""
        self._count_steps()
        self._total = None

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.resume_steps()

    def detach(self) -> None:
        super().detach()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()  # after an error the other workers may still train

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """No value that is not finite, and no step of a worker that was declared lost, reaches the shared memory."""
        self.raise_if_declared_lost()
        if self.settings.check_finite:
            check_gradients(self)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_memory()
        self.stats.steps += 1
        total = self._count_steps()
        self.stats.read_at(0 if self._total is None else max(0, total - self._total - 1))
        self._total = total
        self._publish_buffers()

    def _count_steps(self) -> int:
        """Publish this worker's step count. Returns the steps of all workers together."""
        self._counts[self.communicator.rank] = self.stats.steps
        self._channel.report_steps(self.stats.steps)
        return int(self._counts.sum())

    def _publish_buffers(self) -> None:
        """The lowest rank that is not lost copies its buffers into the shared memory."""
        lost = self.world.lost
        if all(rank in lost for rank in range(self.communicator.rank)):
            for name, (holder, key) in self._buffer_places.items():
                buffer = holder[key]
                if buffer is not None:
                    self._shared[name].copy_(buffer.detach())

    def _check_memory(self) -> None:
        """Refuse weights that are no longer in shared memory."""
        name, parameter = self._first
        if parameter.data_ptr() != self._shared[plain_name(name)].data_ptr():
            raise IncompatibleError(
                f"{name} is no longer in the memory that the workers share: convert the model first (model.to(…), "
                "model.half()), then make the optimizer and call distribute"
            )

    def _load_weights(self, model: nn.Module) -> None:
        """Fill a model with the current weights, and the lowest rank's buffers of its latest step."""
        for name, tensor in all_tensors(model).items():
            tensor.copy_(self._shared[name])


def _share(communicator: Communicator, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Shared memory for tensors of these shapes, by name."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in own.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    shared: dict[str, Tensor] = {}
    for dtype, names in kinds.items():
        grain = CACHE_LINE_BYTES // dtype.itemsize
        sizes = [-(-own[name].numel() // grain) * grain for name in names]
        flat = communicator.group.transport.memory.shared(sum(sizes), dtype)
        offset = 0
        for name, size in zip(names, sizes, strict=True):
            shared[name] = flat[offset : offset + own[name].numel()].view(own[name].shape)
            offset += size
    return shared


def _buffer_places(model: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """The dict and key of each buffer, because a module may replace the tensor."""
    places_of: dict[str, tuple[dict[str, Tensor | None], str]] = {}
    for name, _ in model.named_buffers():
        path, _, key = name.rpartition(".")
        places_of[plain_name(name)] = (model.get_submodule(path)._buffers, key)
    return places_of
