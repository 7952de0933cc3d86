"""The runs of one strategy for a divided model: one run for each kind of parameters.

```text
mesh: data 2 x tensor 2       tensor 0          tensor 1
data 0                        worker 0          worker 1
data 1                        worker 2          worker 3
                              └ one run for its slices, one for the parameters that are whole ┘
```

Workers 0 and 2 reduce slices that workers 1 and 3 do not have. Parameters that all four have whole are reduced in
separate buckets, so that their sums have the same bits on workers 0 and 1. Workers 0 and 1 are *peers*: the group of
worker 1 uses what the group of worker 0 has chosen by a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.codecs import Codec
from syncline.errors import IncompatibleError
from syncline.parallel.divided_model import DividedModel
from syncline.parallel.module_trees import partial_tree
from syncline.reduction import Communicator, Stats
from syncline.reduction.stats import CodecPhase
from syncline.strategies import RunSettings, Shard, Strategy, StrategyRun
from syncline.world import Group, World
from syncline.world.mesh import Mesh

__all__ = ["TeamRuns", "attach_teams", "make_data_groups"]

KINDS = {"whole": ("data", "shared"), "tensor": ("data", "shared"), "shared": ("data",)}
"""The kinds of parameters, by the axis along which they are divided, and the axes along which each is reduced."""


class TeamRuns:
    """The runs of a strategy on this worker's part of a model. The first one counts steps and reads the data."""

    def __init__(self, runs: Mapping[str, StrategyRun]) -> None:
        self.runs = dict(runs)
        self.first = next(iter(self.runs.values()))

    @property
    def several(self) -> bool:
        """Whether workers must take the same steps: only the first run can continue without data."""
        return len(self.runs) > 1

    def reduce_gradients(self) -> None:
        for run in self.runs.values():
            run.reduce_gradients()

    def note_loss(self, loss: float | Tensor) -> None:
        for run in self.runs.values():
            run.note_loss(loss)

    def expect(self, steps: int) -> None:
        for run in self.runs.values():
            run.expect(steps)

    def shard(self, data: Any, *, drop_last: bool | None, **options: Any) -> Shard:
        """The batches of the first run. If there are several runs, all workers have equally many."""
        if not self.several:
            return self.first.shard(data, drop_last=drop_last, **options)
        pad = bool(options.get("pad", True))
        batches = self.first.shard(data, drop_last=drop_last or pad, **options)
        readers = [each for each in self.first.readers.all() if each.uneven]
        if pad and readers and self.first.communicator.size > 1:
            raise IncompatibleError(
                "the workers that divide layers take every step together, and this data may end earlier on some "
                "workers than on others: give a DataLoader over a dataset with a length"
            )
        return batches

    def no_sync(self) -> AbstractContextManager[None]:
        return self._inside(lambda run: run.no_sync())

    def agreed(self) -> AbstractContextManager[None]:
        return self._inside(lambda run: run.agreed())

    @contextmanager
    def _inside(self, enter: Callable[[StrategyRun], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for run in self.runs.values():
                stack.enter_context(enter(run))
            yield

    def close(self) -> None:
        for run in reversed(self.runs.values()):
            run.close()

    def release(self) -> None:
        for run in reversed(self.runs.values()):
            run.release()

    def close_at_exit(self) -> None:
        for run in self.runs.values():
            run.close_at_exit()

    # State in checkpoints. With one run it is that run's own.

    def state_dict(self) -> dict[str, Any]:
        """The state of each run. Like that of a run, with `shared` and `local` parts."""
        states = {kind: run.state_dict() for kind, run in self.runs.items()}
        first = next(iter(states.values()))
        if not self.several:
            return first
        return {
            "shared": {**first["shared"], "kinds": {kind: state["shared"] for kind, state in states.items()}},
            "local": {**first["local"], "kinds": {kind: state["local"] for kind, state in states.items()}},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict` of a run with the same kinds of parameters."""
        if not self.several:
            self.first.load_state_dict(state)
            return
        for kind, run in self.runs.items():
            local = state["local"]
            others = [each["kinds"][kind] for each in state.get("others", []) if "kinds" in each]
            run.load_state_dict(
                {
                    "shared": state["shared"]["kinds"][kind],
                    "local": None if local is None else local["kinds"][kind],
                    **({"others": others} if others else {}),
                }
            )

    def restart(self, shared: Mapping[str, Any]) -> None:
        """Continue at the position of a saved run with other parts. The strategy's own state starts fresh."""
        self.first.readers.load_state_dict(shared["cursors"])
        for run in self.runs.values():
            run.stats.steps = int(shared["steps"])
            run.restart()
            run.resume_steps()


class _ForwardedStats(Stats):
    """The statistics of a run after the first: bytes and seconds are counted in the statistics of the first run."""

    def __init__(self, first: Stats) -> None:
        super().__init__(first.events, first.lock, first.alone)
        self._first = first

    def sent(self, logical: int, wire: int) -> None:
        self._first.sent(logical, wire)

    def reduced(self, start: float, stop: float, what: str) -> None:
        self._first.reduced(start, stop, what)

    def coded(self, start: float, stop: float, what: str, phase: CodecPhase = "beside") -> None:
        self._first.coded(start, stop, what, phase)

    def waited(self, start: float, stop: float, what: str = "waits for gradients") -> None:
        self._first.waited(start, stop, what)


def make_data_groups(world: World, mesh: Mesh, kinds: Sequence[str]) -> dict[str, Group]:
    """This worker's group for each kind of parameters. Every worker calls it, with the same kinds."""
    groups: dict[str, Group] = {}
    for kind in kinds:
        for ranks in mesh.teams(*KINDS[kind]):
            group = world.group(ranks)
            if world.rank in ranks:
                groups[kind] = group
    return groups


def attach_teams(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    divided: DividedModel | None,
    groups: Mapping[str, Group],
    world: World,
    algorithm: str,
    codec: Codec | None,
    settings: RunSettings,
) -> TeamRuns:
    """Attach a strategy to this worker's part of a model: one run for each kind of parameters that it has."""
    tensor_team = None if divided is None else divided.teams.get("tensor")
    if len(groups) == 1:
        (kind, group) = next(iter(groups.items()))
        communicator = Communicator(world, algorithm, codec, group=group)
        return TeamRuns({kind: strategy.attach(model, optimizer, communicator, settings)})
    assert divided is not None, "parameters of several kinds are those of a divided model"
    names: dict[str, set[str]] = {kind: set() for kind in groups}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not divided.is_absent(parameter):
            names[_kind_of(divided, parameter, groups)].add(name)
    names["whole"] |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    runs: dict[str, StrategyRun] = {}
    try:
        for kind, group in groups.items():
            if not names[kind] and kind != "whole":
                continue
            stats = _ForwardedStats(runs["whole"].stats) if runs else None
            peers = None if kind == "tensor" or tensor_team is None else tensor_team.group
            communicator = Communicator(world, algorithm, codec, group=group, stats=stats, peers=peers)
            part = partial_tree(model, names[kind])
            runs[kind] = strategy.attach(part, optimizer, communicator, settings)
    except BaseException:
        for run in runs.values():
            run.release()
        raise
    trained = set().union(*(run.synchronised for run in runs.values()))
    for run in runs.values():
        run.synchronised = trained  # each refuses parameters that no run synchronises
    return TeamRuns(runs)


def _kind_of(divided: DividedModel, parameter: Tensor, groups: Mapping[str, Group]) -> str:
    kind = divided.axis_of(parameter) or "whole"
    return kind if kind in groups else "whole"
