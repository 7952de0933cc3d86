"""Gossip in rounds that all workers take together: D-PSGD, its other form, and CHOCO-SGD.

form="after"     x_i ← Σ_j W_ij (x_j − η g_j(x_j))         step, then mix the weights after the step
form="beside"    x_i ← Σ_j W_ij x_j − η g_i(x_i)           mix the weights before the step, during the step

after    │ forward backward step │ mix │ forward backward step │ mix │
beside   │ forward backward step │ forward backward step │ …
                                 └─ mix ─────────────────┘ the result is added to the weights after the step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from syncline.errors import DivergedError, IncompatibleError, PeerLostError, ProtocolError, SynclineError
from syncline.reduction import Communicator
from syncline.strategies.base import FlatLayout
from syncline.strategies.gossip.choco import Choco, Mixing, Neighbours, StepSizes, measure_step_sizes
from syncline.strategies.gossip.graphs import GRAPHS, build_graph
from syncline.strategies.local_weights import LocalWeightsRun
from syncline.world import allreduce

if TYPE_CHECKING:
    from syncline.strategies.gossip import Gossip

__all__ = ["ConsensusSketch", "ElasticRound", "GossipRun", "PlainMixing"]

CONSENSUS_EVERY_ROUNDS = 16
"""Interval in rounds at which the workers' distance from their mean is measured. It takes a small message."""
SKETCH_SIZE = 4096
"""Numbers in a consensus sketch."""


class PlainMixing:
    """Mixing without a codec: Σ_j W_ij (x_j − x_i).

    The result is a difference, so equal weights stay equal to the bit, and the sum over all workers is zero.
    """

    def __init__(self, neighbours: Neighbours, weights: Sequence[Tensor]) -> None:
        for weight in weights:
            if not weight.is_floating_point():
                raise IncompatibleError(
                    f"gossip mixes real numbers, and a parameter of shape {tuple(weight.shape)} is {weight.dtype}: "
                    "view it as real numbers, or take a strategy that averages gradients, such as allreduce"
                )
        self._neighbours = neighbours
        self._layout = FlatLayout(weights)
        self._own = self._layout.flatten(weights)
        self._theirs: dict[int, list[Tensor]] = {}
        self.use(neighbours)

    def use(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._theirs = {source: [torch.empty_like(row) for row in self._own] for source in neighbours.sources}

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        neighbours = self._neighbours
        neighbours.begin()
        torch._foreach_copy_(self._layout.views(self._own), [weight.detach() for weight in weights])
        for source, rows in self._theirs.items():
            for tag, row in enumerate(rows):
                neighbours.receive(row, source, tag, exact=True)
        for tag, row in enumerate(self._own):
            neighbours.send(row, tag, row.nbytes, exact=True)

    def finish(self) -> list[Tensor]:
        self._neighbours.wait()
        changes = [torch.zeros(row.numel(), dtype=torch.promote_types(row.dtype, torch.float32)) for row in self._own]
        for source, weight in self._neighbours.sources.items():
            for change, row, own in zip(changes, self._theirs[source], self._own, strict=True):
                self._neighbours.channel.timing.reduced(row.nbytes)
                difference = row.to(change.dtype).sub_(own) if row.dtype != change.dtype else row.sub_(own)
                change.add_(difference, alpha=weight)
        return self._layout.views(changes)


class ConsensusSketch:
    """Measures the workers' distance from their mean with a message of a few kilobytes.

    Each weight is added, with a random sign, to one of `SKETCH_SIZE` sums. Signs and places are the same on all
    workers. The squared distance of two sketches estimates that of the weights, with a standard deviation of
    √(2 / SKETCH_SIZE), which is 2 %. Models with no more weights than that are compared exactly.

    Charikar, Chen, Farach-Colton: Finding frequent items in data streams (2002).
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        numel = sum(weight.numel() for weight in weights)
        generator = torch.Generator().manual_seed(0)
        self._places: Tensor | None = None
        if numel > SKETCH_SIZE:  # the upper half of the places has the other sign
            self._places = torch.randint(0, 2 * SKETCH_SIZE, (numel,), generator=generator, dtype=torch.int32)

    def sums(self, weights: Sequence[Tensor]) -> Tensor:
        """The sketch of the weights."""
        row = torch.cat([weight.detach().reshape(-1).to("cpu", torch.float64) for weight in weights])
        if self._places is None:
            return row
        sums = torch.zeros(2 * SKETCH_SIZE, dtype=torch.float64).index_add_(0, self._places, row)
        return sums[:SKETCH_SIZE] - sums[SKETCH_SIZE:]

    def measure(self, communicator: Communicator, weights: Sequence[Tensor]) -> float:
        """√(Σ‖x_i − x̄‖² / p). Every worker calls it."""
        own = self.sums(weights)
        communicator.stats.sent(own.nbytes, own.nbytes)
        mean: Tensor = allreduce(own.clone(), op="mean", group=communicator.group)
        return math.sqrt(communicator.mean(float((own - mean).square().sum())))


class ElasticRound:
    """A round of mixing in an elastic job, which is repeated with the survivors if a worker is lost in it.

    Mixing keeps the mean only if all workers mix with the same matrix. So no worker completes the round before all have
    mixed: a small all-reduce follows. If it fails, some workers may have completed the round. Then the others, which
    have computed their changes too, keep these. Otherwise all mix again, in the graph of the survivors::

        mix ── all have mixed? ──► the weights change
                     │ a worker is lost
                     ├─ a survivor has completed the round: the others keep their changes
                     └─ none has: again, with the matrix of the survivors
    """

    trains = True

    def __init__(self, run: GossipRun, weights: Sequence[Tensor], active: bool) -> None:
        """`weights` must not change before the round is complete. `active`: whether this worker has data."""
        self.changes: list[Tensor] = []
        assert run.world.elastic is not None, "the job is elastic"
        self._run = run
        self._elastic = run.world.elastic
        self._weights = weights
        self._active = active
        self._generation = -1
        """The team to which the weights are sent; −1 before that."""
        self._interruption: SynclineError | None = None

    def launch(self) -> None:
        """Send the weights. If a worker is lost meanwhile, `attempt` raises the error."""
        mixing = self._run.mixing
        assert mixing is not None, "every worker of an elastic job has one"
        self._generation, self._interruption = self._elastic.team.generation, None
        try:
            mixing.begin(self._weights, self._run.rounds)
        except (PeerLostError, ProtocolError) as error:
            self._interruption = error

    def attempt(self) -> int:
        """Returns how many workers have data."""
        mixing, communicator, elastic = self._run.mixing, self._run.communicator, self._elastic
        assert mixing is not None
        if self._generation < 0:
            self.launch()
        elif self._generation != elastic.team.generation:  # the team has changed in another operation
            self.prepare_again()
        if self._interruption is not None:
            raise self._interruption
        self.changes = mixing.finish()
        flags = torch.tensor([int(self._active), elastic.report_newcomers()])
        active, newcomers = allreduce(flags, op="sum", group=communicator.group).tolist()
        elastic.note_newcomers(newcomers)
        elastic.idle_after_loss |= elastic.data_changed and 0 < active < communicator.size
        return int(active)

    def prepare_again(self) -> None:
        self.launch()

    def result(self, value: int) -> int:
        return value

    def adopt(self, result: int) -> int:
        """Another worker has completed the round, so this one has mixed: `changes` are those of this round."""
        return result


class GossipRun(LocalWeightsRun):
    """One worker among its neighbours."""

    strategy: Gossip

    def setup(self) -> None:
        super().setup()
        gamma = self.strategy.gamma
        if gamma is not None and self.communicator.codec is None:
            raise IncompatibleError(
                f"gossip(gamma={gamma!r}) without a codec: gamma is how far compressed differences go; give "
                "distribute a codec, or leave gamma out"
            )
        self.graph = build_graph(self.strategy.graph, self.communicator.size)
        self._beside = self.strategy.form == "beside"
        self._since = 0
        """Steps since the last round."""
        self._in_progress = False
        self._uneven = False
        self._resumes_round = False
        """Whether a round was in progress in the loaded checkpoint."""
        self._hat: Tensor | None = None
        self._step_sizes: StepSizes | None = None
        self.mixing: Mixing | None = None
        """None in a world of one."""
        self._neighbours: Neighbours | None = None
        self._team: Communicator | None = None
        """In an elastic job: the channel to the neighbours, which follows the team."""
        self._round: ElasticRound | None = None
        """In an elastic job: the round in progress."""
        if self.world.elastic is not None:
            self._team = Communicator(self.world, self.communicator.collective, stats=self.stats)
        if not self.alone:
            self._neighbours = self._find_neighbours()
            self.mixing = self._make_mixing(self._neighbours)
            self._sketch = ConsensusSketch(self.weights)

    def _find_neighbours(self) -> Neighbours:
        communicator, channel = self.communicator, None if self._team is None else self._team.group.transport
        if channel is None:
            channel = communicator.group.transport.split(range(communicator.size))
        assert channel is not None, "every rank is a member"
        return Neighbours(communicator, self.graph, channel)

    def _make_mixing(self, neighbours: Neighbours) -> Mixing:
        communicator, codec = self.communicator, self.communicator.codec
        if codec is None:
            return PlainMixing(neighbours, self.weights)
        self._step_sizes = measure_step_sizes(communicator, self._names, codec, self.strategy.gamma)
        return Choco(neighbours, self._names, codec, self._step_sizes, self.settings.seed)

    @property
    def config(self) -> dict[str, Any]:
        sizes = self._step_sizes
        coded = {} if sizes is None else {"gossip_scale": sizes.scale, "gossip_gamma": sizes.gamma}
        return {**super().config, "spectral_gap": self.graph.gap, **coded}

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.period

    @property
    def copies_weights(self) -> bool:
        return self.communicator.codec is not None

    @property
    def elastic_refusal(self) -> str:
        if self.strategy.graph in GRAPHS:
            return ""
        return (
            f"{self.strategy!r} has a graph of {self.graph.size} workers, and none for another team of an elastic job: "
            f"take one of {', '.join(GRAPHS)}, or leave --elastic out"
        )

    def use_team(self) -> None:
        """Make the graph of the present team."""
        if self._neighbours is None or self.mixing is None:
            return
        self._neighbours.settle()
        self.graph = build_graph(self.strategy.graph, self.communicator.size)
        self._neighbours = self._find_neighbours()
        self.mixing.use(self._neighbours)

    # Steps and rounds.

    def after_step(self) -> None:
        self._finish_round()
        self._since += 1
        if self._since >= self.strategy.period:
            self.sync()

    def sync(self, active: bool = True) -> int:
        if self._team is not None:
            self._since = 0
            if not self._in_progress:
                self._begin_round(active)
            return self._finish_round() if not (self._beside and active) else self.communicator.size
        self._finish_round()
        alive = self._count_active(active)
        if alive:
            self._since = 0
            self._begin_round()
            if not self._beside:
                self._finish_round()
        return alive

    def _begin_round(self, active: bool = True) -> None:
        assert self.mixing is not None, "a worker alone has no rounds"
        if self.rounds % CONSENSUS_EVERY_ROUNDS == 0:
            self.stats.consensus = self._sketch.measure(self.communicator, self.weights)
        if self.settings.check_finite:
            self._check_weights()
        self._in_progress = True
        if self._team is None:
            self.mixing.begin(self.weights, self.rounds)
            return
        self._round = ElasticRound(self, [each.clone() for each in self.weights], active)
        self._round.launch()

    def _check_weights(self) -> None:
        """Raise if an optimizer has made NaN or Inf of finite gradients."""
        rank, steps = self.world.rank, self.stats.steps
        for name, weight in self._names.items():
            if not bool(torch.isfinite(weight.detach()).all()):
                raise DivergedError(f"NaN or Inf in {name} on rank {rank}", rank=rank, parameter=name, step=steps)

    def _finish_round(self) -> int:
        """Add the result of a round to the weights, if one is in progress. Returns how many workers have data."""
        if not self._in_progress:
            return self.communicator.size
        changes, alive = self._wait_for_round()
        with torch.no_grad():
            for weight, change in zip(self.weights, changes, strict=True):
                if weight.dtype == change.dtype:
                    weight.add_(change.to(weight.device))
                else:
                    weight.copy_(weight.to(change.dtype).add_(change.to(weight.device)))
        self._in_progress = False
        self.rounds += 1
        self.stats.staleness = 0
        return alive

    def _wait_for_round(self) -> tuple[list[Tensor], int]:
        """The change of each weight, and how many workers have data. In an elastic job a worker may be lost in it."""
        assert self.mixing is not None, "a worker alone has no rounds"
        elastic = self.world.elastic
        if self._round is None or elastic is None:
            return self.mixing.finish(), self.communicator.size
        alive = elastic.run(self.world, self._round)
        found, self._round = self._round.changes, None
        return found, alive

    def _count_active(self, active: bool) -> int:
        """How many workers have data. Only an epoch that may end earlier on some workers needs a message for it."""
        if not self._uneven:
            return self.communicator.size
        flags = torch.tensor([int(active)], dtype=torch.int64)
        return int(allreduce(flags, op="sum", group=self.communicator.group))

    def check_uneven(self) -> None:
        super().check_uneven()
        self._uneven = True

    def settle_uneven(self) -> None:
        super().settle_uneven()
        self._uneven = False
        self._since = 0  # not all workers have taken the steps of this period: begin another together

    def finish(self) -> None:
        self.drop_round()
        super().finish()

    def drop_round(self) -> None:
        """End a round in progress and discard its result. The mean of the workers stays the same."""
        if self._in_progress:
            self._wait_for_round()
            self._in_progress = False

    def detach(self) -> None:
        super().detach()
        if self._team is not None:
            self._team.close()
        elif self._neighbours is not None:
            self._neighbours.channel.close()

    # State.

    def restart(self) -> None:
        self.drop_round()
        super().restart()
        self._since, self._resumes_round, self._hat = 0, False, None
        if isinstance(self.mixing, Choco):
            self._load_estimate(self.mixing, self.mixing.flat(self.weights))

    def _load_estimate(self, mixing: Choco, estimate: Tensor) -> None:
        """Begin with another estimate. In an elastic job a newcomer loads it alone, and the next round sends it."""
        if self._team is None:
            mixing.exchange_estimates(estimate)
        else:
            mixing.restart(estimate)

    def shared_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {"since": self._since, "under_way": self._in_progress}
        if self._step_sizes is not None:
            own["pace"] = [self._step_sizes.scale, self._step_sizes.gamma]
        return super().shared_state() | own

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self.drop_round()
        super().load_shared_state(state)
        self._since = int(state.get("since", 0))
        self._resumes_round = bool(state.get("under_way", False))
        if isinstance(self.mixing, Choco) and "pace" in state:
            self._step_sizes = self.mixing.step_sizes = StepSizes(*map(float, state["pace"]))

    def own_state(self) -> dict[str, Any]:
        return {"hat": self.mixing.estimate.clone()} if isinstance(self.mixing, Choco) else {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._hat = state.get("hat")

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._hat = None
        super().load_local_states(states)
        if self.mixing is None:
            return
        if isinstance(self.mixing, Choco):
            self._load_estimate(self.mixing, self.mixing.flat(self.weights) if self._hat is None else self._hat)
        if self._resumes_round and self._beside:
            self._in_progress = True
            if self._team is None:
                self.mixing.begin(self.weights, self.rounds)
            else:  # sent when it ends: the others may not wait for it yet
                self._round = ElasticRound(self, [each.clone() for each in self.weights], active=True)
