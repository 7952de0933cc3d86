"""Elastic jobs on the simulator: workers are killed and join at random moments, and the others go on."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.control import MemoryStore
from syncline.errors import IncompatibleError, JobEndedError, UnsupportedError, WorldError
from syncline.testing import hunt_cases
from syncline.transports import Transport
from syncline.transports.faults import Fault, Join, Kill, Partition
from syncline.transports.simulated import SimulatedConnector, SimulatedNetwork, kill_rank
from syncline.world import Simulation, World
from syncline.world.elastic import check_elastic_engine, compare_with_job, describe_job
from tests.data.cases import Numbers
from tests.hunting import seeds, spread

WORKERS = 4
STRATEGIES = {
    "dense": ("allreduce", None),
    "quantized": ("allreduce", "quantize(8)"),
    "sparse": ("allreduce", "topk(0.3)|quantize(4)"),
    "low rank": ("allreduce", "powersgd(2)"),
    "local": ("local(period=2)", None),
    "local, quantized": ("local(period=2)", "quantize(8)"),
    "diloco": ("diloco(period=2)", None),
    "adacomm": ("adacomm", None),
}


@dataclass(frozen=True)
class Result:
    """What a worker has at its end."""

    weights: Tensor
    steps: int
    size: int
    rate: float
    trained: tuple[frozenset[int], ...]
    """The samples that have changed the model in each epoch."""


def member_of(world: World) -> int:
    assert world.elastic is not None
    return world.elastic.limits.member


def train(world: World, strategy: str, codec: str | None, samples: int, victims: Mapping[int, int]) -> Result:
    """Two epochs. Sample i changes row i of the model alone, so that the model shows which samples were trained."""
    member, steps = member_of(world), 0
    model = torch.nn.Embedding(samples, 3)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trained = []
    with sl.distribute(model, optimizer, strategy=strategy, codec=codec, algorithm="auto") as run:
        loader = DataLoader(Numbers(samples), batch_size=4, shuffle=True)
        shard, before = run.shard(loader), model.weight.detach().clone()
        for _ in range(shard.epoch, 2):
            for batch in shard:
                if victims.get(member) == steps:
                    kill_rank(world.transport)
                steps += 1
                world.compute(0.01)
                optimizer.zero_grad()
                loss = model(batch).sum()
                run.note_loss(loss)
                loss.backward()
                optimizer.step()
            with run.agreed():
                now = model.weight.detach().clone()
            changed = (now != before).any(1).nonzero().view(-1).tolist()
            trained.append(frozenset(map(int, changed)))
            before = now
            scheduler.step()
        taken = run.stats.steps
    rate = float(optimizer.param_groups[0]["lr"])
    return Result(model.weight.detach().clone(), taken, world.size, rate, tuple(trained))


def outcome(found: Simulation) -> list[Result]:
    """The results of the workers that ended well. A newcomer may come too late."""
    late = ("the job has ended", "not admitted")
    for result in found.results:
        if isinstance(result, BaseException) and not any(words in str(result) for words in late):
            raise result
    return [result for result in found.results if isinstance(result, Result)]


def survive(strategy: str, codec: str | None) -> Callable[[int], None]:
    """A case for each seed: up to three of four workers are killed, up to two join. The rest must agree."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        victims = {member: draw.randrange(8) for member in draw.sample(range(WORKERS), draw.randint(0, 3))}
        samples = draw.choice([48, 62, 96])
        joins: Sequence[Fault] = [Join(at=draw.uniform(0, 0.2)) for _ in range(draw.randint(0, 2))]
        found = sl.simulate(
            lambda world: train(world, strategy, codec, samples, victims),
            WORKERS,
            elastic=(1, WORKERS + 2),
            faults=joins,
            seed=seed,
            chaos=seed % 2 == 1,
            return_exceptions=True,
        )
        results = outcome(found)
        assert len([each for each in found.results[:WORKERS] if each is not None]) >= WORKERS - len(victims)
        for result in results:
            assert torch.equal(result.weights, results[0].weights)
            assert (result.steps, result.rate) == (results[0].steps, 0.25)
        if strategy == "allreduce" and codec is None:
            for result in (each for each in found.results[:WORKERS] if each is not None):
                assert all(len(epoch) == samples for epoch in result.trained), (victims, joins)

    return check


@pytest.mark.hunt
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # in epochs that a newcomer has missed
@pytest.mark.parametrize("name", STRATEGIES)
def test_survivors_go_on_and_agree(name: str) -> None:
    check = survive(*STRATEGIES[name])
    hunt_cases(check, seeds(6 if name == "dense" else 2, 1200), f"survive{STRATEGIES[name]}({{seed}})")


def survive_cut(strategy: str) -> Callable[[int], None]:
    """A case for each seed: some workers are cut off from the others, for a time or for good. One side continues."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        group = tuple(draw.sample(range(WORKERS), draw.randint(1, 2)))
        start = draw.uniform(0, 0.15)
        others = tuple(member for member in range(WORKERS) if member not in group)  # all reach the store
        cut = Partition(group, start, draw.choice([start + 0.02, start + 6.0, math.inf]), others)
        found = sl.simulate(
            lambda world: train(world, strategy, None, 48, {}),
            WORKERS,
            elastic=(1, WORKERS),
            faults=[cut],
            seed=seed,
            timeout=5.0,  # in place of the time after which a cut link is found
            return_exceptions=True,
        )
        results = [result for result in found.results if isinstance(result, Result)]
        for result in found.results:
            if isinstance(result, BaseException) and "was declared lost" not in str(result):
                raise result
        assert len(results) in (WORKERS, WORKERS - len(group)), (cut, found.results)
        for result in results:
            assert torch.equal(result.weights, results[0].weights)
            assert (result.steps, result.size) == (results[0].steps, len(results))
            assert all(len(epoch) == 48 for epoch in result.trained) or strategy != "allreduce", cut

    return check


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", ["allreduce", "diloco(period=2)"])
def test_a_side_that_is_cut_off_is_fenced_and_the_others_agree(strategy: str) -> None:
    hunt_cases(survive_cut(strategy), seeds(3, 600), f"survive_cut({strategy!r})({{seed}})")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("local, quantized", 3045),  # a newcomer whose team could not be connected is alone again
        ("dense", 3023),  # two losses while a worker has run out of data
        ("dense", 3551),  # the run is made while the others are an operation ahead: it reads as a member of their team
        ("adacomm", 3161),  # a loss before the round in which all have run out of data, some a batch earlier
    ],
)
def test_seeds_that_once_failed(name: str, seed: int) -> None:
    survive(*STRATEGIES[name])(seed)


@pytest.mark.parametrize(
    ("transport", "environ", "different"),
    [
        ("torch_dist", {"SYNCLINE_KEY": "a"}, "the transport is torch_dist here and zeromq at the others"),
        ("zeromq", {"SYNCLINE_KEY": "b"}, "is the one with SHA-256 3e23e816… here and the one with SHA-256 ca978112…"),
        ("zeromq", {}, "is none here and the one with SHA-256 ca978112… at the others"),
    ],
)
def test_a_worker_with_another_transport_or_key_is_refused(
    transport: str, environ: dict[str, str], different: str
) -> None:
    store = MemoryStore()
    for _ in range(2):
        compare_with_job(store, describe_job("zeromq", {"SYNCLINE_KEY": "a"}))
    with pytest.raises(IncompatibleError, match=re.escape(different)):
        compare_with_job(store, describe_job(transport, environ))


def test_a_worker_with_another_version_is_refused() -> None:
    store = MemoryStore()
    ours = describe_job("zeromq", {})
    compare_with_job(store, {**ours, "the version of Syncline": "0.0.1"})
    with pytest.raises(IncompatibleError, match=r"the version of Syncline is .* here and 0\.0\.1 at"):
        compare_with_job(store, ours)


def test_the_survivors_repeat_the_step_with_their_own_gradients() -> None:
    """After a loss a step applies the mean over the survivors, exactly as a job of these workers would."""

    def work(world: World) -> Tensor:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sl.distribute(model, optimizer, algorithm="ring")
        for step in range(2):
            if step == 1 and member_of(world) == 2:
                kill_rank(world.transport)
                world.compute(1.0)
            optimizer.zero_grad()
            model(torch.tensor([[float(2 ** member_of(world))]])).sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    found = sl.simulate(work, 3, elastic=(1, 3)).results
    expected = -torch.tensor([[(1 + 2 + 4) / 3 + (1 + 2) / 2]])
    assert torch.allclose(found[0], expected)
    assert torch.equal(found[0], found[1])
    assert found[2] is None


def add_ones(world: World) -> float:
    total = 0.0
    for _ in range(4):
        total = float(sl.allreduce(torch.ones(1), op="sum"))
        world.compute(0.001)
    sl.barrier()
    return total


@pytest.mark.parametrize("at", [0.005, 0.006, 0.0065])
def test_a_second_loss_while_a_team_forms_costs_no_timeout(at: float) -> None:
    found = sl.simulate(add_ones, 5, elastic=(1, 5), faults=[Kill(1, at=0.0045), Kill(2, at=at)])
    assert found.results[0] == found.results[3] == found.results[4] == 3.0
    assert found.time < 1.0


@pytest.mark.parametrize("at", [0.0005, 0.001, 0.002, 0.003])
def test_a_loss_while_the_first_team_meets_is_survived(at: float) -> None:
    assert sl.simulate(add_ones, 4, elastic=(1, 4), faults=[Kill(1, at=at)]).results == (3.0, None, 3.0, 3.0)


def test_a_result_that_its_caller_changes_is_handed_over_unchanged() -> None:
    """A worker that has completed a call gives its result to one that could not, when a third one is lost."""

    def work(world: World) -> list[float]:
        found = []
        for step in range(6):
            total = sl.allreduce(torch.full((1,), 1.0 + step), op="mean", algorithm="ring")
            found.append(float(total))
            total.zero_()
            world.compute(0.0002 * (1 + world.rank))
        sl.barrier()
        return found

    for number in range(10):
        results = sl.simulate(work, 3, elastic=(1, 3), faults=[Kill(1, at=0.0033 + 0.00002 * number)]).results
        assert results[0] == results[2] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.hunt
@pytest.mark.parametrize("victim", [0, 2])
def test_a_loss_in_the_step_that_reports_a_newcomer_is_survived(victim: int) -> None:
    """Some workers complete the step and know of the newcomer; the others take over both."""

    def work(world: World) -> Tensor:
        model = torch.nn.Embedding(384, 64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, algorithm="ring") as run:
            for batch in run.shard(DataLoader(Numbers(384), batch_size=4)):
                world.compute(0.0002 * (1 + member_of(world)))
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        return model.weight.detach().clone()

    for number in spread(range(16), 6):  # the later ones while the newcomer is connected and admitted
        faults: list[Fault] = [Join(at=0.0), Kill(victim, at=0.0063 + (0.00003 if number < 8 else 0.001) * number)]
        found = sl.simulate(work, 4, elastic=(1, 6), faults=faults)
        first, *others = [result for result in found.results if result is not None]
        assert len(others) == 3
        assert all(torch.equal(first, other) for other in others)
        assert first.any(1).all(), "every sample is trained"
        assert found.time < 1.0


@pytest.mark.hunt
@pytest.mark.parametrize("victim", range(4))
def test_a_loss_while_some_workers_have_run_out_of_data_is_survived(victim: int) -> None:
    """In the third step of an epoch only two workers have data; afterwards the others copy their weights."""

    def work(world: World) -> tuple[Tensor, Tensor, int]:
        model = torch.nn.Embedding(34, 8)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, algorithm="ring") as run:
            for _ in range(2):
                for batch in run.shard(DataLoader(Numbers(34), batch_size=4)):
                    world.compute(0.0002 * (1 + member_of(world) % 3))
                    optimizer.zero_grad()
                    model(batch).sum().backward()
                    optimizer.step()
        momentum = optimizer.state_dict()["state"][0]["exp_avg"]
        return model.weight.detach().clone(), momentum, run.stats.steps

    for number in spread(range(16), 6):
        found = sl.simulate(work, 4, elastic=(1, 4), faults=[Kill(victim, at=0.0068 + 0.00017 * number)])
        first, *others = [result for result in found.results if result is not None]
        assert len(others) == 2
        for weights, momentum, steps in others:
            assert torch.equal(weights, first[0])
            assert torch.equal(momentum, first[1])
            assert steps == first[2]
        assert first[0].any(1).all(), "every sample is trained"
        assert found.time < 1.0


@pytest.mark.hunt
@pytest.mark.parametrize("victim", [0, 2])
def test_a_checkpoint_is_saved_again_after_a_loss(victim: int, tmp_path: Path) -> None:
    def work(world: World, folder: Path) -> int:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, algorithm="ring") as run:
            for step, batch in enumerate(run.shard(DataLoader(Numbers(96), batch_size=4))):
                world.compute(0.0002)
                optimizer.zero_grad()
                model(batch.view(-1, 1).float()).sum().backward()
                optimizer.step()
                if step == 1:
                    sl.checkpoint.save(folder, step=step, model=model, run=run)
        return run.stats.steps

    for number in spread(range(16), 6):
        folder = tmp_path / str(number)
        faults = [Kill(victim, at=0.0056 + 0.00012 * number)]
        found = sl.simulate(lambda world: work(world, folder), 4, elastic=(1, 4), faults=faults)  # noqa: B023
        assert len({steps for steps in found.results if steps is not None}) == 1
        assert sl.checkpoint.latest(folder) is not None
        assert found.time < 1.0


def test_a_newcomer_joins_two_runs_at_once() -> None:
    def work(world: World) -> list[float]:
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        runs = [sl.distribute(*each, algorithm="ring") for each in zip(models, optimizers, strict=True)]
        loaders = [run.shard(DataLoader(Numbers(96), batch_size=2), drop_last=True) for run in runs]
        for batches in zip(*loaders, strict=True):
            world.compute(0.01)
            for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                model(batch.view(-1, 1).float()).sum().backward()
                optimizer.step()
        for run in runs:
            run.close()
        return [model.weight.item() for model in models]

    found = sl.simulate(work, 2, elastic=(1, 3), faults=[Join(at=0.0)]).results
    assert found[0] == found[1] == found[2]


def test_a_resize_callback_sees_old_and_new_numbers() -> None:
    def work(world: World) -> list[tuple[int, int]]:
        calls: list[tuple[int, int]] = []
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, algorithm="ring", on_resize=lambda old, new: calls.append((old, new)))
        for step, batch in enumerate(run.shard(DataLoader(Numbers(48), batch_size=2))):
            if step == 2 and member_of(world) == 0:
                kill_rank(world.transport)
            world.compute(0.1)
            model(batch.view(-1, 1).float()).sum().backward()
            optimizer.step()
        run.close()
        return calls

    found = sl.simulate(work, 3, elastic=(1, 4), faults=[Join(at=0.6)]).results
    assert found[0] is None
    assert found[1] == found[2] == [(3, 2), (2, 3)]
    assert found[3] == []


@pytest.mark.parametrize(
    "strategy",
    [
        "gossip(graph='0-1')",
        "easgd(centres=2)",
        "easgd(alpha=0.6)",
        "allreduce(delay=1)",
        "local(after=2)",
    ],
)
def test_strategies_that_need_all_workers_are_refused(strategy: str) -> None:
    def work(world: World) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(IncompatibleError, match=r"--elastic|leave `after` out|elastic job of up to 2"):
            sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")

    sl.simulate(work, 2, elastic=(1, 2))


@pytest.mark.parametrize(("name", "words"), [("mpi", "mpiexec ends all ranks"), ("other", '"torch_dist" or "zeromq"')])
def test_transports_whose_members_cannot_change_are_refused(name: str, words: str) -> None:
    for transport in ("torch_dist", "zeromq"):
        check_elastic_engine(transport)
    with pytest.raises(UnsupportedError, match=words):
        check_elastic_engine(name)


def test_groups_of_some_workers_are_refused() -> None:
    def work(world: World) -> None:
        with pytest.raises(UnsupportedError, match="--elastic"):
            world.group([0])

    sl.simulate(work, 2, elastic=(1, 2))


def test_a_call_that_depends_on_the_ranks_is_not_repeated() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            kill_rank(world.transport)
            world.compute(1.0)
        sl.alltoall(torch.arange(3))

    found = sl.simulate(work, 3, elastic=(1, 3), return_exceptions=True).results
    assert isinstance(found[1], WorldError)
    assert "cannot be repeated" in str(found[1])


@pytest.mark.parametrize("elastic", [(0, 4), (3, 4), (1, 1)])
def test_limits_that_do_not_fit_are_refused(elastic: tuple[int, int]) -> None:
    with pytest.raises(WorldError, match="neither below"):
        sl.simulate(lambda world: None, 2, elastic=elastic)


def test_a_join_needs_an_elastic_job() -> None:
    with pytest.raises(WorldError, match="elastic"):
        sl.simulate(lambda world: None, 2, faults=[Join(at=1.0)])


def end_together(seed: int) -> None:
    """A worker is killed in the last step. No other leaves before all have the result of that step, or none has."""
    draw = random.Random(seed)
    victim = draw.randrange(WORKERS)

    def work(world: World) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, algorithm="tree"):
            for step in range(3):
                if step == 2 and member_of(world) == victim:
                    kill_rank(world.transport)
                optimizer.zero_grad()
                model(torch.full((1, 4), float(member_of(world)))).sum().backward()
                optimizer.step()
        return model.weight.detach().clone()

    found = sl.simulate(work, WORKERS, elastic=(1, WORKERS), seed=seed, chaos=True)
    others = [weights for member, weights in enumerate(found.results) if member != victim]
    assert all(torch.equal(weights, others[0]) for weights in others)


@pytest.mark.hunt
def test_all_workers_end_with_the_same_model() -> None:
    hunt_cases(end_together, seeds(12, 2000), "tests.strategies.test_elastic.end_together({seed})")


def test_a_broadcast_whose_root_is_lost_is_refused() -> None:
    def work(world: World) -> None:
        if world.rank == 2:
            kill_rank(world.transport)
            world.compute(1.0)
        sl.broadcast(torch.zeros(1), root=2)

    found = sl.simulate(work, 3, elastic=(1, 3), return_exceptions=True).results
    assert isinstance(found[0], WorldError)
    assert "rank 2 (member 2) was lost" in str(found[0])


def test_different_collectives_end_with_a_sentence() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            sl.allreduce(torch.zeros(64), op="sum", algorithm="ring")
        else:
            sl.allreduce(torch.zeros(4), op="sum", algorithm="ring")

    found = sl.simulate(work, 2, elastic=(1, 2), return_exceptions=True, timeout=5.0).results
    assert all(isinstance(result, sl.errors.SynclineError) for result in found)


def test_the_last_operation_of_a_world_is_the_same_on_all() -> None:
    def end(seed: int) -> None:
        def work(world: World) -> float:
            with world:
                if member_of(world) == 3:
                    kill_rank(world.transport)
                return float(sl.allreduce(torch.ones(1), op="sum", algorithm="tree"))

        found = sl.simulate(work, WORKERS, elastic=(1, WORKERS), seed=seed, chaos=True).results
        assert len(set(found[:3])) == 1, found

    hunt_cases(end, seeds(8, 1000), "end({seed})")


def test_a_newcomer_is_connected_while_the_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection takes two steps here, and the newcomer's first step ten. The members wait for neither."""
    connect = SimulatedConnector.connect

    def connect_slowly(self: SimulatedConnector, members: tuple[int, ...], number: int) -> Transport:
        self.runtime.sleep(0.1)
        return connect(self, members, number)

    monkeypatch.setattr(SimulatedConnector, "connect", connect_slowly)
    steps: list[float] = []

    def work(world: World) -> int:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, algorithm="ring") as run:
            before, is_slow = world.runtime.now(), member_of(world) == 2
            for batch in run.shard(DataLoader(Numbers(60), batch_size=1)):
                world.compute(0.5 if is_slow else 0.05)
                is_slow = False
                optimizer.zero_grad()
                model(batch.view(-1, 1).float()).sum().backward()
                optimizer.step()
                if member_of(world) < 2:
                    steps.append(world.runtime.now() - before)
                before = world.runtime.now()
        return world.size

    assert sl.simulate(work, 2, elastic=(1, 3), faults=[Join(at=0.2)]).results == (3, 3, 3)
    assert max(steps[2:]) < 0.1, "a newcomer costs the others less than a step"


def test_nothing_of_a_newcomers_first_step_is_kept() -> None:
    """Each step moves the weight by 1, the mean of ones. One newcomer comes too late."""

    def work(world: World) -> tuple[float, int]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = sl.distribute(model, optimizer, algorithm="ring")
        shard = run.shard(DataLoader(torch.ones(96, 1), batch_size=2))  # type: ignore[arg-type]
        try:
            for x in shard:
                world.compute(0.05)
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.close()
        except JobEndedError:
            assert world.elastic is not None
            assert world.elastic.joining
        return float(model.weight.detach()), run.stats.steps

    faults = [Join(at=0.2), Join(at=0.4)]
    *found, late = sl.simulate(work, 2, elastic=(1, 3), faults=faults).results
    assert len({*found}) == 1, found
    weight, steps = found[0]
    assert weight == -steps
    assert 16 < steps < 24, "a worker has joined"
    assert late[1] == 0, "and the other one has taken no step"


def train_until(world: World, members: set[int], step_s: float) -> float:
    """Epochs of two steps until these members are the team. Returns the time at the end."""
    elastic = world.elastic
    assert elastic is not None
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.distribute(model, optimizer, algorithm="tree") as run:
        shard = run.shard(DataLoader(Numbers(4), batch_size=1))
        for _ in range(500):
            for batch in shard:
                world.compute(step_s)
                optimizer.zero_grad()
                model(batch.view(-1, 1).float()).sum().backward()
                optimizer.step()
            if {*elastic.team.members} == members:
                break
        return world.runtime.now()


@pytest.mark.parametrize("newcomers", [1, 2])
def test_newcomers_join_although_epochs_are_shorter_than_their_requests(
    newcomers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: a call of a newcomer to the store takes as long as half an epoch."""
    call_store = SimulatedNetwork.call_store

    def call_slowly(self: SimulatedNetwork, rank: int) -> None:
        self.runtimes[rank].sleep(0.005 if rank >= 2 else 0.0)
        call_store(self, rank)

    monkeypatch.setattr(SimulatedNetwork, "call_store", call_slowly)
    members = {*range(2 + newcomers)}
    found = sl.simulate(
        lambda world: train_until(world, members, 0.005), 2, elastic=(1, 4), faults=[Join(at=0.1)] * newcomers
    )
    assert max(found.results) < 2.5, "tries that take some tenths of a second"


def test_newcomer_that_waited_long_for_a_place_joins_soon_after_a_loss() -> None:
    """While the team is complete it is too late in each epoch. It does not ask for later and later ones."""
    faults: list[Fault] = [Join(at=1.0), Kill(1, at=60.0)]
    found = sl.simulate(lambda world: train_until(world, {0, 2}, 0.2), 2, elastic=(1, 2), faults=faults)
    assert found.results[1] is None
    assert 60.0 < max(found.results[0], found.results[2]) < 70.0


@pytest.mark.parametrize("late", [False, True])
def test_newcomer_with_another_model_is_refused_and_the_others_go_on(late: bool) -> None:
    """Also if the others make their run after the newcomer (`late`)."""

    def train_some(world: World) -> int:
        joins = world.elastic is not None and world.elastic.joining
        world.compute(2.0 if late and not joins else 0.0)
        model = torch.nn.Linear(2, 3 if joins else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer) as run:
            for _ in range(3):
                for x in run.shard(DataLoader(torch.ones(40, 2), batch_size=2)):  # type: ignore[arg-type]
                    world.compute(0.1)
                    model(x).sum().backward()
                    optimizer.step()
            return world.size

    found = sl.simulate(train_some, ranks=2, elastic=(1, 3), faults=[Join(at=1.0)], return_exceptions=True).results
    assert found[:2] == (2, 2)
    assert isinstance(found[2], IncompatibleError)
    assert "weight is float32[3, 2] here and float32[1, 2] at the others (1 more differ); a worker joins with" in str(
        found[2]
    )


def leave_politely(seed: int) -> None:
    """A worker leaves at a step that the seed draws, and sometimes another one is killed."""
    random_ = random.Random(seed)
    last, killed = random_.randrange(1, 9), random_.choice((None, 0, 2))

    def train_some(world: World) -> tuple[float, int] | None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        elastic, steps, samples = world.elastic, 0, 0
        assert elastic is not None
        try:
            with sl.distribute(model, optimizer) as run:
                for x in run.shard(DataLoader(torch.ones(48, 1), batch_size=2)):  # type: ignore[arg-type]
                    world.compute(0.1)
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                    steps, samples = steps + 1, samples + len(x)
                    if member_of(world) == 1 and steps == last:
                        elastic.leave_reason = "it received SIGTERM"
        except SystemExit:
            return 0.0, samples
        return float(model.weight.detach()), samples

    faults = [] if killed is None else [Kill(killed, at=random_.uniform(0.05, 1.0))]
    found = sl.simulate(train_some, ranks=3, elastic=(1, 3), faults=faults, seed=seed)
    ended = [one for one in (found.results[0], found.results[2]) if one is not None]
    assert len({weight for weight, _ in ended}) == 1
    if killed is None:
        assert sum(samples for _, samples in found.results) == 48, "every sample is trained once"
    assert found.time < 10.0, "no worker waits for a timeout"


@pytest.mark.hunt
def test_worker_leaves_politely_and_nothing_is_repeated() -> None:
    hunt_cases(leave_politely, seeds(6, 500), "tests.strategies.test_elastic.leave_politely({seed})")
