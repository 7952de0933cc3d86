"""Elastic jobs with asynchronous strategies on the simulator, with every fault: workers are killed, frozen, cut off,
leave and join, and servers with replicas are lost and replaced. The others go on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.errors import PeerLostError, UnsupportedError
from syncline.server import network_of, serve, server_network
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import strategy_run
from syncline.strategies.parameter_server import ParameterServerRun
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Freeze, Join, Kill, Partition
from syncline.transports.simulated import cut_off_rank, freeze_rank, kill_rank
from syncline.world import Simulation, World
from tests.data.cases import Numbers
from tests.hunting import seeds
from tests.server.hunts.harness import ReplacementPlan, Servers
from tests.strategies.push_records import PushRecords, check_weights

# A newcomer steps the scheduler in epochs that it has missed.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

WORKERS, EPOCHS, BATCH = 3, 2, 2
STRATEGIES = {
    "ssp": "ssp(slack=1)",
    "bsp": "bsp",
    "downpour": "downpour(push=2, fetch=3, rule='sgd(1.0)')",
    "master": "master(sync=False)",
    "easgd": "easgd(sync=False, period=2)",
}
FIXED_TEAMS = {
    "master, tree": ("master(sync=False, masters=2)", 3),
    "master, synchronous tree": ("master(masters=2)", 3),
    "easgd, tree": ("easgd(sync=False, period=2, centres=2)", 2),
    "hogwild": ("hogwild", 0),
    "onesided": ("onesided", 0),
}
"""Strategies that no worker can join, each with its servers."""
NETWORK = sl.Network(ranks_per_host=WORKERS, inside=sl.Link(latency=1e-5, bandwidth=1e9))
"""For strategies without servers: hogwild needs workers on one host."""
LATE = ("the job has ended", "not admitted")
"""Words of the errors of a newcomer that came too late."""
DECLARED_LOST = ("was declared lost", "declared this rank lost")
"""Words of the errors of a worker that wakes up later."""
REFUSED = "survives the loss of a worker, but no worker can join"
MAX_SECONDS = 200.0
"""Virtual seconds. Timeouts are 300 s, and the launcher's limit 10 s."""


@dataclass(frozen=True)
class Trouble:
    """What happens to a worker: before one of its steps, or before `run.agreed()` of an epoch (−1 and −2).

    A worker exits ("exit"), or is asked to leave as by SIGTERM ("leave").
    """

    kind: str
    step: int
    seconds: float = 0.0

    def strike(self, world: World) -> None:
        if self.kind == "exit":
            raise SystemExit(0)
        if self.kind == "leave":
            assert world.elastic is not None
            world.elastic.leave_reason = "it received SIGTERM"
            return
        transport = world.transport.job_channel  # a newcomer's own world is not simulated
        if self.kind == "kill":
            kill_rank(transport)
        else:
            (freeze_rank if self.kind == "freeze" else cut_off_rank)(transport, self.seconds)

    def fault(self, member: int, at: float) -> Fault:
        """The same at a virtual time."""
        if self.kind == "kill":
            return Kill(member, at)
        if self.kind == "freeze":
            return Freeze(member, at, self.seconds)
        return Partition((member,), at, at + self.seconds)


@dataclass(frozen=True)
class ServerLosses:
    """Which servers are lost and replaced, counted by the steps of all workers together."""

    servers: int = 2
    replicas: int = 1
    plan: ReplacementPlan = field(default_factory=ReplacementPlan)
    begin: int = 0
    last: int | None = None
    """The number of a server that is lost at the end, and not replaced; None: no such server."""
    last_after: int = 0
    last_kind: str = "kill"
    last_seconds: float = 0.0
    """If the last one is frozen or cut off: for how long."""

    @staticmethod
    def draw(draw: random.Random) -> ServerLosses:
        replicas, servers = draw.choice((1, 2, 2, 2)), draw.choice((2, 2, 3))
        if replicas == 1:
            return ServerLosses(servers)
        way = draw.choice(("none", "lost", "back", "back", "back and lost", "back and lost"))
        begin = draw.randint(1, 8)
        if way == "none":
            return ServerLosses(servers, replicas)
        kind = draw.choice(("kill", "kill", "freeze", "cut"))
        seconds = draw.choice([draw.uniform(0.01, 9.0), draw.uniform(11.0, 20.0)])
        if way == "lost":
            last = draw.randrange(servers)
            return ServerLosses(servers, replicas, last=last, last_after=begin, last_kind=kind, last_seconds=seconds)
        plan = ReplacementPlan.draw(draw, servers, replicas)
        if way == "back" or plan.rounds[-1].killed_after is not None:
            return ServerLosses(servers, replicas, plan, begin)
        holders = {each: each for each in range(servers)}
        for number, one in enumerate(plan.rounds):
            holders[one.number] = servers + number
        last = holders[draw.choice(sorted(holders))]
        return ServerLosses(servers, replicas, plan, begin, last, begin + draw.randint(0, 12), kind, seconds)


@dataclass(frozen=True)
class Case:
    """One draw."""

    seed: int
    chaos: bool
    samples: int
    troubles: Mapping[int, Trouble]
    """By member."""
    faults: tuple[Fault, ...]
    losses: ServerLosses
    joins: int

    @staticmethod
    def draw(seed: int, servers: int | None = None) -> Case:
        """Up to two of three workers get into trouble, and some that join; up to two join.

        With `servers` there are as many, and all of them last.
        """
        draw, chaos = random.Random(seed), seed % 2 == 1
        losses = ServerLosses.draw(draw) if servers is None else ServerLosses(servers)
        joins = draw.randint(0, 2)
        faults: list[Fault] = [Join(at=draw.uniform(0, 0.3)) for _ in range(joins)]
        first_newcomer = WORKERS + losses.servers + len(losses.plan.rounds)
        struck = draw.sample(range(WORKERS), draw.randint(0, WORKERS - 1))
        struck += [first_newcomer + number for number in range(joins) if draw.random() < 0.3]
        troubles = {}
        for member in struck:
            # A silence may be shorter than the launcher's limit or longer.
            seconds = draw.choice([draw.uniform(0.01, 9.0), draw.uniform(11.0, 20.0)])
            trouble = Trouble(draw.choice(("kill", "freeze", "cut", "exit", "leave")), draw.randrange(-2, 8), seconds)
            if chaos or trouble.kind in ("exit", "leave") or member >= WORKERS or draw.random() < 0.5:
                troubles[member] = trouble
            else:
                troubles[member] = Trouble(trouble.kind, 1 << 30)
                faults.append(trouble.fault(member, draw.uniform(0.0, 0.4)))
        if not chaos and draw.random() < 0.2:  # one link of a worker, to a server if there is one, fails for some time
            start = draw.uniform(0, 0.3)
            other = WORKERS + draw.randrange(losses.servers) if losses.servers else draw.randrange(WORKERS)
            cut = Partition((draw.randrange(WORKERS),), start, start + draw.uniform(0.01, 8.0), (other,))
            faults.append(cut)
        return Case(seed, chaos, draw.choice([16, 25, 36]), troubles, tuple(faults), losses, joins)

    def with_short_cuts(self, seconds: float) -> Case:
        """Cuts that lose no worker take at most `seconds`."""
        faults: list[Fault] = [
            replace(each, stop=min(each.stop, each.start + seconds))
            if isinstance(each, Partition) and each.stop < each.start + 10.0
            else each
            for each in self.faults
        ]
        return replace(self, faults=tuple(faults))

    def without_cuts(self) -> Case:
        """Workers are frozen where they would be cut off."""
        troubles = {
            member: replace(each, kind="freeze") if each.kind == "cut" else each
            for member, each in self.troubles.items()
        }
        faults: list[Fault] = [
            Freeze(each.group[0], each.start, each.stop - each.start) if isinstance(each, Partition) else each
            for each in self.faults
        ]
        return replace(self, troubles=troubles, faults=tuple(faults))


@dataclass
class Journal:
    """What all workers of a simulation have done, in virtual order."""

    pushes: PushRecords = field(default_factory=PushRecords)
    steps: int = 0
    """Of all workers together."""
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the steps that have ended with it."""
    read: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the batches that were read with it."""
    clocks: dict[int, list[int]] = field(default_factory=dict)
    """By member: its clock after each of its steps."""
    steps_seen: dict[int, list[list[int]]] = field(default_factory=dict)
    """By member: the steps of all workers, as it sees them after each of its steps."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """By member: its weights after its latest step."""
    moved: dict[int, Tensor] = field(default_factory=dict)
    """By member: the sum of its steps."""
    begun: bool = False
    """Whether the first server was lost."""
    ended: bool = False
    """Whether the last server was lost."""


@dataclass(frozen=True)
class Result:
    """What a worker has at its end."""

    weights: Tensor
    rate: float
    agreed: tuple[Tensor, ...]


def member_of(world: World) -> int:
    assert world.elastic is not None
    return world.elastic.limits.member


class Worker:
    """One worker. Sample i changes row i of the model alone, by −1 times the rate and the scale of the push."""

    def __init__(self, world: World, strategy: str, case: Case, journal: Journal, servers: Servers) -> None:
        self.world, self.strategy, self.case = world, strategy, case
        self.journal, self.servers = journal, servers
        self.member, self.steps = member_of(world), 0
        self.own: Tensor | None = None
        """With easgd: the weights that this worker must have, from its gradients and its pushes; None at first."""
        self.counted = 0
        """The pushes of all workers that `own` contains."""

    def train(self) -> Result:
        if self.case.losses.servers:
            server_network(self.world, self.case.losses.replicas)
        model = torch.nn.Embedding(self.case.samples, 2)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        agreed = []
        with sl.distribute(model, optimizer, strategy=self.strategy, algorithm="auto") as run:
            shard = run.shard(DataLoader(Numbers(self.case.samples), batch_size=BATCH, shuffle=True))
            for epoch in range(shard.epoch, EPOCHS):
                for batch in shard:
                    self.journal.pushes.epochs[self.member] = epoch
                    self.step(model, optimizer, epoch, batch)
                    self.note_clocks(run)
                self.meet_trouble(-1 - epoch)
                with run.agreed():
                    if not self.joins:  # a newcomer is alone until the first epoch that it reads
                        agreed.append(model.weight.detach().clone())
                scheduler.step()
        return Result(model.weight.detach().clone(), float(optimizer.param_groups[0]["lr"]), tuple(agreed))

    def note_clocks(self, run: sl.Run) -> None:
        inner = strategy_run(run)
        assert isinstance(inner, AsynchronousRun)
        clock = inner.client.clock if isinstance(inner, ParameterServerRun) else inner.stats.steps
        self.journal.clocks.setdefault(self.member, []).append(clock)
        self.journal.steps_seen.setdefault(self.member, []).append(inner.control_channel().steps())

    @property
    def joins(self) -> bool:
        """Whether this worker is a newcomer that has not entered the job yet."""
        return self.world.elastic is not None and self.world.elastic.joining

    def step(self, model: torch.nn.Embedding, optimizer: torch.optim.Optimizer, epoch: int, batch: Tensor) -> None:
        samples = [(epoch, int(each)) for each in batch]
        self.journal.read.update(samples)
        self.lose_servers(epoch)
        self.meet_trouble(self.steps)
        self.steps += 1
        self.world.compute(0.01 * (1 + self.member % 2))
        # The gradient of model(batch).sum(): a backward pass would run on a thread of its own, and take longer.
        model.weight.grad = torch.zeros_like(model.weight).index_fill_(0, batch, 1.0)
        before = model.weight.detach().clone()
        if "easgd" in self.strategy:
            self.check_own(before)
        optimizer.step()
        if "easgd" in self.strategy:
            self.own = before - float(optimizer.param_groups[0]["lr"]) * model.weight.grad
            self.subtract_pushes()
        self.journal.steps += 1
        self.journal.trained.update(samples)
        self.journal.own[self.member] = model.weight.detach().clone()
        moved = float(optimizer.param_groups[0]["lr"]) * model.weight.grad
        self.journal.moved[self.member] = self.journal.moved.get(self.member, torch.zeros_like(moved)) - moved

    def subtract_pushes(self) -> None:
        assert self.own is not None
        pushes = self.journal.pushes
        self.own -= pushes.pushed_since(self.member, self.counted, self.own.numel()).view_as(self.own)
        self.counted = len(pushes.sent)

    def check_own(self, weights: Tensor) -> None:
        """With easgd: what this worker has pushed to the centre was subtracted from its own weights."""
        if self.own is not None:
            self.subtract_pushes()
            assert torch.allclose(weights, self.own, atol=1e-4), "the sum of the workers and the centre has changed"
        self.counted = len(self.journal.pushes.sent)

    def meet_trouble(self, step: int) -> None:
        trouble = self.case.troubles.get(self.member)
        if trouble is not None and trouble.step == step:
            trouble.strike(self.world)

    def lose_servers(self, epoch: int) -> None:
        """Begin to lose servers when it is due. In the last epoch wait until the new ones have taken their places."""
        losses, journal, rounds = self.case.losses, self.journal, len(self.case.losses.plan.rounds)
        if rounds and not journal.begun and journal.steps >= losses.begin:
            journal.begun = True
            self.servers.begin_round()
        for _ in range(2000 if epoch == EPOCHS - 1 and journal.begun else 0):
            if self.servers.rounds >= rounds:
                break
            self.world.compute(0.02)
        due = journal.steps >= losses.last_after and self.servers.rounds >= rounds
        if losses.last is not None and due and not journal.ended:
            journal.ended = True
            if losses.last_kind == "kill":
                self.servers.kill_soon(losses.last)
            else:
                how = freeze_rank if losses.last_kind == "freeze" else cut_off_rank
                self.servers.silence_soon(losses.last, how, losses.last_seconds)


def simulated(strategy: str, case: Case) -> tuple[Simulation, Journal]:
    losses, journal = case.losses, Journal()
    servers = Servers(WORKERS, losses.servers, losses.replicas, losses.plan, elastic=True)
    with journal.pushes.recording():
        found = sl.simulate(
            lambda world: Worker(world, strategy, case, journal, servers).train(),
            WORKERS,
            None if losses.servers else NETWORK,
            elastic=(1, WORKERS + 2),
            extra=servers.members,
            faults=case.faults,
            seed=case.seed,
            chaos=case.chaos,
            return_exceptions=True,
        )
    return found, journal


def check_ends(
    found: Simulation, case: Case, elastic_averaging: bool, refused: Sequence[str] = LATE
) -> tuple[list[Result], int]:
    """Workers end well, leave, are lost, or were declared lost and say so. Returns the results.

    It also returns how many may have read batches that others read again. `refused` has words of the errors of
    newcomers.
    """
    first_newcomer = WORKERS + case.losses.servers + len(case.losses.plan.rounds)
    results, lost = list[Result](), 0
    for number, result in enumerate(found.results):
        member = number if number < WORKERS else first_newcomer + number - WORKERS
        kind = case.troubles[member].kind if member in case.troubles else "none"
        if isinstance(result, Result):
            results.append(result)
        elif result is None:
            assert kind in ("kill", "exit"), f"member {member} has no result (its trouble: {kind})"
            lost += 1
        elif kind == "leave" and isinstance(result, SystemExit):
            lost += elastic_averaging  # its local steps since the last exchange are trained again
        elif kind in ("freeze", "cut") and any(words in str(result) for words in DECLARED_LOST):
            lost += 1
        elif number < WORKERS or not any(words in str(result) for words in refused):
            raise AssertionError(f"member {member} (its trouble: {kind}): {result!r}") from result
    return results, lost


def endure(strategy: str) -> Callable[[int], None]:
    """A case for each seed, which draws what happens to whom and when."""
    return lambda seed: check_case(strategy, Case.draw(seed))


def check_case(strategy: str, case: Case) -> None:
    """Run a case. All that have acknowledged updates, and all workers that end well, must agree."""
    elastic_averaging = "easgd" in strategy
    found, journal = simulated(strategy, case)
    results, lost = check_ends(found, case, elastic_averaging)
    assert results, "no worker has ended well"
    most = max((each.agreed for each in results), key=len)
    for result in results:
        assert torch.equal(result.weights, results[0].weights)
        assert result.rate == 0.5**EPOCHS
        for one, other in zip(reversed(result.agreed), reversed(most), strict=False):
            assert torch.equal(one, other), "the weights in run.agreed() differ"
    for clocks in journal.clocks.values():
        assert clocks == sorted(clocks)
    sign = 1.0 if elastic_averaging else -1.0
    check_weights(journal.pushes, results[0].weights, sign=sign, synchronous=strategy == "bsp")
    check_data(journal, case, lost, pushed=not elastic_averaging)
    assert found.time < MAX_SECONDS, "a wait has ended at its timeout"


def endure_without_joins(name: str) -> Callable[[int], int]:
    """The same for a strategy that no worker can join. The case returns how many newcomers were refused.

    With hogwild a worker that is cut off is frozen: the workers share the memory of one host.
    """
    strategy, servers = FIXED_TEAMS[name]

    def check(seed: int) -> int:
        case = Case.draw(seed, servers)
        if name == "hogwild":
            case = case.without_cuts()
        elif name == "onesided":  # the mean does not count a worker that cannot be read for 5 s
            case = case.with_short_cuts(4.0)
        found, journal = simulated(strategy, case)
        results, _ = check_ends(found, case, "easgd" in strategy, (*LATE, REFUSED))
        assert results, "no worker has ended well"
        for result in results:
            assert torch.equal(result.weights, results[0].weights)
            assert result.rate == 0.5**EPOCHS
            assert len(result.agreed) == EPOCHS
            for one, other in zip(result.agreed, results[0].agreed, strict=True):
                assert torch.equal(one, other), "the weights in run.agreed() differ"
        check_steps(journal)
        # A worker that is lost in sl.distribute leaves a smaller team, and may have read its part when it wakes up.
        assert max(journal.read.values()) <= 1 + len(case.troubles), "batches are read again without a loss"
        if len(results) == WORKERS:
            assert journal.trained == dict.fromkeys(product(range(EPOCHS), range(case.samples)), 1)
        if name == "hogwild":
            check_sum_of_steps(journal, results[0].weights)
        elif name == "onesided":
            check_mean(journal, results[0].weights)
        else:
            check_spaces(journal.pushes, results[0].weights, strategy)
        assert found.time < MAX_SECONDS, "a wait has ended at its timeout"
        return sum(REFUSED in str(result) for result in found.results[WORKERS:])

    return check


def check_steps(journal: Journal) -> None:
    """Clocks never go back."""
    for clocks in journal.clocks.values():
        assert clocks == sorted(clocks)
    for seen in journal.steps_seen.values():
        for before, after in pairwise(seen):
            assert all(one <= other for one, other in zip(before, after, strict=True)), (before, after)


def check_sum_of_steps(journal: Journal, weights: Tensor) -> None:
    """hogwild: the shared memory has each step of all workers once."""
    assert torch.equal(weights, torch.stack(list(journal.moved.values())).sum(dim=0))


def check_mean(journal: Journal, weights: Tensor) -> None:
    """onesided: the model is the mean of some workers' weights, and no step counts more than once in them."""
    total = torch.stack(list(journal.moved.values())).sum(dim=0)
    for own in journal.own.values():
        assert bool((own <= 0).all())
        assert bool((own >= total - 1e-5).all())
    choices = [some for count in range(len(journal.own)) for some in combinations(journal.own.values(), count + 1)]
    assert any(torch.allclose(weights, torch.stack(some).mean(dim=0), atol=1e-5) for some in choices)


def check_spaces(pushes: PushRecords, weights: Tensor, strategy: str) -> None:
    """A tree: the root has each acknowledged sum once, and relays and groups agree on what was acknowledged."""
    by_space: dict[str, PushRecords] = {}
    for push in pushes.sent:
        by_space.setdefault(push.client.description.name, PushRecords()).sent.append(push)
    (root,) = (name for name in by_space if "group" not in name)
    sign = 1.0 if "easgd" in strategy else -1.0
    check_weights(by_space[root], weights, sign=sign, synchronous=by_space[root].sent[0].client.description.synchronous)


def check_data(journal: Journal, case: Case, lost: int, pushed: bool) -> None:
    """Every sample of each epoch was trained, and read at most once more for each lost worker.

    `pushed`: it is in an acknowledged push of that epoch. Local steps of easgd may be lost with their worker.
    """
    acknowledged = {
        (part.epoch, (part.first + int(key)) // 2)
        for parts in journal.pushes.by_server().values()
        for part in parts
        if part.acknowledged
        for key in part.values.nonzero()
    }
    for epoch in range(EPOCHS):
        for sample in range(case.samples):
            assert journal.trained[epoch, sample] >= 1, (epoch, sample)
            assert not pushed or (epoch, sample) in acknowledged, f"sample {sample} of epoch {epoch} is in no push"
            reads = journal.read[epoch, sample]
            assert reads <= 1 + lost, f"sample {sample} of epoch {epoch} was read {reads} times ({lost} lost)"


@pytest.mark.hunt
@pytest.mark.parametrize("name", STRATEGIES)
def test_survivors_agree_whatever_happens(name: str) -> None:
    check = endure(STRATEGIES[name])
    hunt_cases(check, seeds(3 if name == "ssp" else 1), f"endure({STRATEGIES[name]!r})({{seed}})")


@pytest.mark.hunt
@pytest.mark.parametrize("name", FIXED_TEAMS)
def test_survivors_agree_if_nobody_can_join(name: str) -> None:
    refused, check = list[int](), endure_without_joins(name)
    hunt_cases(lambda seed: refused.append(check(seed)), seeds(6), f"endure_without_joins({name!r})({{seed}})")
    assert sum(refused), "no newcomer was refused"


def play(strategy: str, trouble: Trouble) -> tuple[Simulation, Journal, list[Result]]:
    """Three workers and two servers, without chaos, of which worker 1 gets into trouble."""
    case = Case(0, False, 36, {1: trouble}, (), ServerLosses(), 0)
    found, journal = simulated(strategy, case)
    results, _ = check_ends(found, case, elastic_averaging="easgd" in strategy)
    assert len(results) == WORKERS - 1
    return found, journal, results


@pytest.mark.parametrize("kind", ["exit", "leave"])
def test_a_worker_that_leaves_is_not_waited_for_and_loses_nothing(kind: str) -> None:
    """The batch that it has read and not trained is read again, if it exits in the middle of a step."""
    found, journal, _ = play(STRATEGIES["downpour"], Trouble(kind, 3))
    assert found.time < 1.0
    repeated = [sample for sample, reads in journal.read.items() if reads > 1]
    assert len(repeated) == (BATCH if kind == "exit" else 0)
    assert set(journal.trained.values()) == {1}


@pytest.mark.parametrize("kind", ["freeze", "cut"])
@pytest.mark.parametrize("name", ["ssp", "downpour"])
def test_a_worker_that_was_declared_lost_says_so(name: str, kind: str) -> None:
    """It does not wait for a server's reply until the timeout, and does not name another worker or a server."""
    found, _, _ = play(STRATEGIES[name], Trouble(kind, 3, 15.0))
    assert isinstance(found.results[1], PeerLostError)
    assert "worker 1" in str(found.results[1])
    assert "was declared lost (no heartbeat for 10 s" in str(found.results[1])
    assert 10.0 < found.time < 20.0


@pytest.mark.parametrize("seed", [99, 102])
def test_updates_in_flight_count_once_when_their_server_is_lost(seed: int) -> None:
    """In these cases requests are sent again to a server that has handled them."""
    endure(STRATEGIES["downpour"])(seed)


def test_easgd_subtracts_what_the_end_of_an_epoch_has_pushed() -> None:
    """Each worker ends the epoch before its first exchange is due, and pushes all the same."""
    check_case(STRATEGIES["easgd"], Case(0, False, 6, {}, (), ServerLosses(), 0))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("downpour", 3),  # a server that was declared lost declares the others lost when it wakes up
    ],
)
def test_seeds_that_once_failed(name: str, seed: int) -> None:
    endure(STRATEGIES[name])(seed)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("hogwild", 28),  # a worker that was declared lost takes steps in the shared memory when it wakes up
        ("onesided", 6),  # a worker that was declared lost ends with weights of its own
        ("master, tree", 54),  # the others raise an error when a worker has exited
    ],
)
def test_seeds_that_once_failed_if_nobody_can_join(name: str, seed: int) -> None:
    endure_without_joins(name)(seed)


@pytest.mark.parametrize("joins", [[], [Join(at=0.12)]])
def test_workers_wait_in_no_other_run_of_the_process(joins: Sequence[Fault]) -> None:
    """Workers claim different numbers of batches: none waits at the end of an epoch for a step in the second run."""

    def train_two(world: World) -> float:
        models = [torch.nn.Embedding(16, 2) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        with (
            sl.distribute(models[0], optimizers[0], strategy="ssp(slack=1)", algorithm="auto") as run,
            sl.distribute(models[1], optimizers[1], strategy="ssp(slack=1)", algorithm="auto"),
        ):
            for batch in run.shard(DataLoader(Numbers(16), batch_size=2)):
                world.compute(0.05 * (1 + 3 * member_of(world)))
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
        return world.runtime.now()

    servers = [lambda transport: serve(network_of(transport, 2, 1, elastic=True))]
    found = sl.simulate(train_two, 2, elastic=(1, 3), extra=servers, faults=joins, return_exceptions=True)
    assert all(ended < 10 for ended in found.results[:2]), "no wait has ended by its timeout"
    for newcomer in found.results[2:]:
        assert isinstance(newcomer, UnsupportedError)
        assert "2 runs train" in str(newcomer)
    assert len(found.results) == 2 + len(joins)
