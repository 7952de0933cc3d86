"""What all baselines share: torch's default process group, and the base class of their runs."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator, Sized
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from syncline.environment import detect
from syncline.errors import IncompatibleError, UnsupportedError
from syncline.reduction import Communicator
from syncline.strategies import RunSettings, Strategy, StrategyRun
from syncline.transports.torch_dist.process_groups import DefaultGroup
from syncline.world import World

__all__ = ["ForeignRun", "find_package", "process_group"]


def find_package(name: str, requirement: str) -> ModuleType:
    """Import a package, or raise an `UnsupportedError` that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the packages use deprecated functions of torch
            return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"{name} is not installed here ({error}): pip install {requirement}") from None


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """The default process group of torch, for DistributedDataParallel, among the ranks of this world."""
    with closing(DefaultGroup(world.environment, world.transport.timeout, backend="gloo")):
        yield


def _check_real(strategy: Strategy, world: World) -> None:
    """Refuse the simulator: baselines need real processes."""
    size = detect(world.environ).size
    if size != world.size:
        raise UnsupportedError(
            f"{strategy!r} needs a process per rank, and there are {size} for a world of {world.size}: it cannot run "
            "in sl.simulate; start it with syncline run -n"
        )


def _refuse_codec(strategy: Strategy, communicator: Communicator) -> None:
    """Refuse a codec or a collective: a baseline sends its bytes itself."""
    if communicator.codec is not None:
        raise IncompatibleError(
            f"codec {communicator.codec!r} with {strategy!r}: a baseline sends its gradients itself; leave the codec "
            "out, or take strategy 'allreduce'"
        )
    if communicator.collective not in ("auto", "native"):
        raise IncompatibleError(
            f"collective {communicator.collective!r} with {strategy!r}: a baseline takes the engine's own; leave it out"
        )


class ForeignRun(StrategyRun):
    """A run whose gradients or weights are exchanged by another library.

    All ranks have the same weight, even if their batches differ in length, as in DistributedDataParallel. Gradients are
    not checked for NaN. The state of the library (such as PowerSGD's errors) is not part of a checkpoint.
    """

    backend: ClassVar[str] = "torch"
    parts: ClassVar[bool] = False
    """True if the weights of the ranks differ between averages."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        communicator: Communicator,
        settings: RunSettings,
    ) -> None:
        _check_real(strategy, communicator.world)
        _refuse_codec(strategy, communicator)
        super().__init__(strategy, model, optimizer, communicator, settings)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.trained)
        self.hooks.append(optimizer.register_step_post_hook(self._after_step))
        self.now = communicator.world.runtime.now
        self._connect()
        self.communicator.mean(0.0)  # wait for all ranks, so that the first step does not include a slow import

    def _connect(self) -> None:
        """Start the other library. The constructor calls it once."""

    @property
    def config(self) -> dict[str, Any]:
        """The library, and the settings that it does not support."""
        return {
            **super().config,
            "collective": f"{self.backend}'s own",
            "torch": str(torch.__version__),
            "check_finite": False,
            "comm_seconds": "not known: only what was exposed",
        }

    def set_weight(self, weight: float, uneven: bool = False) -> None:
        """Ignored: all ranks have the same weight."""

    def join_idle(self) -> bool:
        """Return False: an epoch in which a rank may have no data is refused."""
        return False

    def shown_tensors(self) -> dict[str, Tensor]:
        """The buffers of batch norms, and the weights if they differ between the workers."""
        weights = {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}
        return {**super().shown_tensors(), **(weights if self.parts else {})}

    def show_agreed(self) -> None:
        super().show_agreed()
        if not self.parts:
            return
        own = [parameter.detach().clone() for parameter in self.trained]
        self.average([parameter.detach() for parameter in self.trained])
        pairs = zip(self.trained, own, strict=True)
        distance = sum(float((mean.detach() - before).double().square().sum()) for mean, before in pairs)
        self.stats.consensus = math.sqrt(self.communicator.mean(distance))

    def check_uneven(self) -> None:
        """Refuse an epoch in which a rank may run out of data, and suggest a batch."""
        hints = [_better_batch(data, self.communicator.size) for data in self.readers.sources]
        hint = next((hint for hint in hints if hint), "take data that the workers divide, or drop_last=True")
        raise IncompatibleError(
            f"{self.strategy!r} needs data for every rank in every step, and some would have none: {hint}"
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stats.steps += 1


def _better_batch(data: Any, size: int) -> str:
    """The nearest batch with which each of `size` ranks has data in the last step, as text."""
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return ""
    length, now = len(cast(Sized, data.dataset)), data.batch_size
    for batch in sorted(range(1, length // size + 1), key=lambda batch: abs(batch - now)):
        rest = length % (batch * size)
        if rest == 0 or rest >= size:
            return f"{length} samples in batches of {now} leave some without; take batch={batch}"
    return ""
