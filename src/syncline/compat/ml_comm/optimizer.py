"""`DistributedOptimizer` of `ml_comm_torch` and `dl_comm.torch`: steps with the means of all ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.optim import Optimizer

from syncline.compat.ml_comm.config import TeamConfig, agree_on
from syncline.compat.ml_comm.context import context
from syncline.compat.ml_comm.report import StepReport
from syncline.compat.ml_comm.schedule import plan_steps
from syncline.compat.parameter_module import ParameterModule
from syncline.errors import SpecError
from syncline.strategies import Run
from syncline.training.distribute import distribute
from syncline.world import World

__all__ = ["distribute_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def distribute_optimizer(optimizer: AnyOptimizer, config: TeamConfig) -> AnyOptimizer:
    """Attach the ranks to an optimizer, by `sl.distribute` with the strategy of the configuration. Returns it.

    All ranks start from rank 0's parameters. Every rank calls it; rank 0's configuration counts.
    """
    if not isinstance(optimizer, Optimizer):
        raise SpecError(f"DistributedOptimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    here = context()
    plan_steps(config.ksteps, config.max_steps)  # a value that is refused is refused before anything is sent
    name = f"optimizer {here.optimizers}"
    here.optimizers += 1
    agreed = agree_on(config, f"DistributedOptimizer, {name}", here.group)
    plan = plan_steps(agreed.ksteps, agreed.max_steps)
    parameters = {
        f"group{number}.{place}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    # A rank without a gradient of a parameter adds zeros.
    run = distribute(ParameterModule(parameters), optimizer, strategy=plan, find_unused_parameters=True)
    _OptimizerReport(here.world, name, agreed, run).attach(optimizer)
    return optimizer


class _OptimizerReport:
    """Reports the steps of an optimizer."""

    def __init__(self, world: World, name: str, config: TeamConfig, run: Run) -> None:
        self._report = StepReport(world, name, config, plan_steps(config.ksteps, config.max_steps))
        self._stats = run.stats
        self._before = self._read()

    def attach(self, optimizer: Optimizer) -> None:
        """Report every step of the optimizer from now on."""
        optimizer.register_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = self._read()
        (sent, waited), self._before = (now[0] - self._before[0], now[1] - self._before[1]), now
        self._report.note_step(sent, waited)

    def _read(self) -> tuple[float, float]:
        return float(self._stats.bytes_wire), self._stats.exposed_seconds
