"""DiLoCo: the outer step, the inner steps that go on beside it, and what a checkpoint keeps of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import SpecError
from syncline.strategies.diloco import DiLoCo, nesterov
from syncline.testing import Pool
from tests.strategies.averaging_cases import Scale, check_resumes, everywhere, net, push, take, train
from tests.strategies.cases import backward, flat, on_gloo

PLAIN = DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0)


def test_a_period_of_one_with_a_plain_outer_step_is_synchronous() -> None:
    ours, theirs = everywhere(PLAIN), everywhere("allreduce", algorithm="ring")
    for one, other in zip(ours, theirs, strict=True):
        for mine, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_with_the_usual_outer_step_it_is_not() -> None:
    ours, theirs = everywhere(DiLoCo(period=1))[0], everywhere("allreduce", algorithm="ring")[0]
    assert float((ours[-1] - theirs[-1]).norm()) > 0.01


def test_a_plain_outer_step_is_local_sgd() -> None:
    ours = everywhere(DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0))
    theirs = everywhere("local(period=3)")
    for one, other in zip(ours, theirs, strict=True):
        for mine, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_the_outer_step_is_torchs_nesterov() -> None:
    row = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD([row], lr=0.7, momentum=0.9, nesterov=True)
    weight, velocity = row.detach().clone(), torch.zeros(5)
    for number in range(4):
        moved = torch.randn(5, generator=torch.Generator().manual_seed(number))
        row.grad = moved.clone()
        optimizer.step()
        weight, velocity = nesterov(weight, velocity, moved, 0.7, 0.9)
        torch.testing.assert_close(weight, row.detach())


class Followed:
    """What the workers should have, followed in float64: worker i moves by a·(i+1) − b·w_i in each step."""

    def __init__(self, ranks: int, rule: DiLoCo) -> None:
        self.rule, self.own = rule, [0.0] * ranks
        self.outer = self.velocity = self.mean = 0.0
        self.sent: list[float] = []
        self.since = 0

    def step(self) -> list[float]:
        rule, count = self.rule, len(self.own)
        self.own = [w + 0.1 * ((rank + 1) - w) for rank, w in enumerate(self.own)]
        self.since += 1
        delay = (rule.delay or rule.period) if rule.overlap else 0
        if self.sent and self.since >= delay:
            self.land()
        if self.since >= rule.period:
            self.sent, self.since = list(self.own), 0
            self.mean = sum(self.outer - w for w in self.own) / count
            if not rule.overlap:
                self.land()
        return list(self.own)

    def land(self) -> None:
        rule = self.rule
        self.velocity = rule.outer_momentum * self.velocity + self.mean
        self.outer -= rule.outer_lr * (self.mean + rule.outer_momentum * self.velocity)
        self.own = [self.outer + (w - sent) for w, sent in zip(self.own, self.sent, strict=True)]
        self.sent = []


@pytest.mark.parametrize(
    "rule",
    [
        DiLoCo(period=3),
        DiLoCo(period=3, overlap=True),
        DiLoCo(period=3, overlap=True, delay=1),
        DiLoCo(period=4, overlap=True, delay=2, outer_lr=0.5, outer_momentum=0.3),
        DiLoCo(period=1, overlap=True),
    ],
    ids=repr,
)
def test_every_step_is_as_followed_by_hand(rule: DiLoCo) -> None:
    def work(world: sl.World) -> list[float]:
        model = Scale(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, rule)
        seen = []
        for _ in range(14):
            optimizer.zero_grad()
            backward((model.row - (world.rank + 1)).square().sum() / 2)
            optimizer.step()
            seen.append(float(model.row.detach()))
        run.close()
        return seen

    found = sl.simulate(work, ranks=3).results
    followed = Followed(3, rule)
    for step in range(14):
        assert [seen[step] for seen in found] == pytest.approx(followed.step(), abs=1e-5), step


def test_the_inner_state_stays_with_its_worker() -> None:
    def memory(run: Any, step: int) -> list[Tensor]:
        return [run.optimizer.state[each]["momentum_buffer"].clone() for each in run.model.parameters()]

    found = everywhere(DiLoCo(period=2), steps=4, optimizer="momentum", look=memory)
    assert not torch.equal(found[0][3][0], found[1][3][0])


@pytest.mark.parametrize("codec", ["quantize(8)", "topk(0.1)|quantize(4)", "powersgd(2)"])
@pytest.mark.parametrize("overlap", [False, True])
def test_coded_deltas(codec: str, overlap: bool) -> None:
    def outer(run: Any, step: int) -> Tensor:
        return torch.cat([each.reshape(-1) for each in run.outer])

    found = everywhere(DiLoCo(period=2, overlap=overlap), steps=8, codec=codec, look=outer)
    for step in range(8):
        assert all(torch.equal(found[0][step], other[step]) for other in found)
    assert not torch.equal(found[0][0], found[0][7])


def test_looking_at_the_agreed_model_changes_nothing() -> None:
    def look(run: Any, step: int) -> Tensor:
        with run.agreed():
            return flat(run.model)

    rule = DiLoCo(period=3, overlap=True, delay=2)
    looked, plain = everywhere(rule, look=look, steps=11), everywhere(rule, steps=11)
    for one, other in zip(looked, plain, strict=True):
        assert torch.equal(one[-1], other[-1])
        assert torch.equal(one[-1], one[-2])  # and close() leaves what agreed() has shown
    assert all(torch.equal(looked[0][step], looked[2][step]) for step in range(11))


@pytest.mark.parametrize("rule", [DiLoCo(period=3), DiLoCo(period=3, overlap=True), DiLoCo(3, overlap=True, delay=2)])
@pytest.mark.parametrize("codec", [None, "topk(0.1)|quantize(4)"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, rule: DiLoCo, codec: str | None) -> None:
    check_resumes(tmp_path, rule, 8, ranks=2, optimizer="momentum", codec=codec)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resume_during_an_exchange_with_other_worker_count(tmp_path: Path, ranks: int) -> None:
    rule = DiLoCo(period=4, overlap=True, delay=3)
    saved = everywhere(rule, 3, steps=5, save=tmp_path)[0][-1]

    def look(run: Any, step: int) -> Tensor:
        with run.agreed():
            return flat(run.model)

    resumed = everywhere(rule, ranks, steps=5, first=5, load=tmp_path, look=look)
    for found in resumed:
        torch.testing.assert_close(found[-1], saved, rtol=1e-4, atol=1e-5)
    later = everywhere(rule, ranks, steps=13, first=5, load=tmp_path, look=look)
    assert all(torch.equal(later[0][-1], found[-1]) for found in later)


@pytest.mark.parametrize("lengths", [[1, 5, 3, 3], [4, 1, 2, 9]])
@pytest.mark.parametrize("delay", [1, 2, 0])
def test_workers_run_out_of_data_during_an_exchange(lengths: list[int], delay: int) -> None:
    """With a plain outer step every inner step counts once, whenever it was taken."""
    rule = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, overlap=True, delay=delay)

    def work(world: sl.World) -> list[float]:
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = sl.distribute(model, optimizer, rule)
        for _ in range(2):
            for _ in run.shard([torch.zeros(1)] * lengths[world.rank], split=False):
                push(model, optimizer, 2.0**world.rank)
        run.close()
        return model.row.detach().tolist()

    total = sum(2 * length * 2.0**rank for rank, length in enumerate(lengths))
    assert all(row == [total / 4] * 4 for row in sl.simulate(work, ranks=4).results)


def test_small_outer_steps_are_not_lost_in_half_precision() -> None:
    """Each round moves by less than bfloat16 can add to 1; eight of them move by more."""

    def work(world: sl.World) -> float:
        model = Scale(1).to(torch.bfloat16)
        with torch.no_grad():
            model.row.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        run = sl.distribute(model, optimizer, DiLoCo(period=1, outer_lr=0.25, outer_momentum=0.0))
        for _ in range(8):
            push(model, optimizer, 1.0)
        run.close()
        return float(model.row.detach())

    assert sl.simulate(work, ranks=2).results == (1.015625, 1.015625)


def test_what_it_tells() -> None:
    rule = DiLoCo(period=2, overlap=True)
    seen = everywhere(rule, steps=5, look=lambda run, step: (run.stats.staleness, run.stats.consensus))
    assert seen[0][1] == (0, None)
    assert seen[0][4][0] == 2
    assert seen[0][4][1] > 0.0


def test_the_reduction_overlaps_the_inner_steps() -> None:
    """On a slow network the workers wait for it without overlap, and do not with it."""

    def exposed(rule: DiLoCo) -> float:
        def work(world: sl.World) -> float:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = sl.distribute(model, optimizer, rule, algorithm="ring")
            for step in range(12):
                world.compute(0.1)
                take(model, optimizer, world.rank, step)
            waited = run.stats.exposed_seconds
            run.close()
            return waited

        slow = sl.Network(latency=0.02, bandwidth=1e6)
        return float(max(sl.simulate(work, ranks=2, network=slow).results))

    # The first round's layout asks for the order of all: that one is waited for by both.
    assert exposed(DiLoCo(period=4, overlap=True)) < 0.25 * exposed(DiLoCo(period=4))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"period": 0}, "period=0"),
        ({"outer_lr": 0.0}, "outer_lr=0.0"),
        ({"outer_lr": "fast"}, "outer_lr='fast'"),
        ({"outer_momentum": 1.0}, "below 1"),
        ({"overlap": 3}, "True or False"),
        ({"delay": 2}, "needs overlap=True"),
        ({"period": 4, "delay": 5, "overlap": True}, "at most 4"),
        ({"delay": -1, "overlap": True}, "delay=-1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        DiLoCo(**arguments)


@pytest.mark.xdist_group("gloo")
def test_real_processes_end_with_the_simulators_bits(gloo: Pool) -> None:
    real = gloo.run(on_gloo, 2, on_ring)
    simulated = sl.simulate(on_ring, ranks=2).results
    assert all(torch.equal(one, other) for one, other in zip(real, simulated, strict=True))


def on_ring(world: sl.World) -> Tensor:
    rule = DiLoCo(period=3, overlap=True, delay=2)
    found: Tensor = train(world, rule, optimizer="momentum", algorithm="ring")[-1]
    return found
