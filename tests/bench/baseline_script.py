"""What two processes do for test_baselines.py: every rank prints what it has found, as one line of JSON."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.bench.baselines import build_baseline, process_group
from syncline.bench.parallel import DTensorContender, ParallelBenchPlan, read_model
from syncline.bench.pipeline_contenders import loss_of, make_optimizer
from syncline.bench.step_contenders import ranks_agree
from syncline.environment import detect
from syncline.errors import IncompatibleError
from syncline.strategies import Run, Strategy, strategy_run
from syncline.training.distribute import distribute
from syncline.transports.key_value_store import find_rendezvous, open_store
from syncline.workloads.base import batches as cut
from syncline.workloads.digits import Digits
from syncline.world import World

SLOW = 0.2
STEPS = 12
HOOKS = ("ddp", "ddp(hook='allreduce')", "ddp(hook='fp16')", "ddp(hook='powersgd', rank=2, start=3)")
Batch = tuple[Tensor, Tensor]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def same(world: World, model: nn.Module) -> bool:
    return ranks_agree(world.everyone.channel, list(model.parameters()))


def batches(world: World, steps: int = STEPS) -> list[Batch]:
    """This rank's own share of the digits."""
    everyone = cut(Digits().splits().train, 32)
    return [batch for number, batch in zip(range(2 * steps), everyone, strict=False) if number % 2 == world.rank]


def step(run: Run, batch: Batch) -> None:
    run.optimizer.zero_grad()
    F.cross_entropy(strategy_run(run).replica(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    run.optimizer.step()


def prepared(spec: str | Strategy, model: nn.Module | None = None) -> tuple[nn.Module, Run]:
    model = Digits().model(0) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours = spec if isinstance(spec, Strategy) or spec == "allreduce" else build_baseline(spec)
    return model, distribute(model, optimizer, strategy=ours)


def by_hand(world: World) -> Tensor:
    model = Digits().model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with process_group(world):
        replica = DistributedDataParallel(model)
        for x, y in batches(world):
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        del replica
    return flat(model)


def hooks(world: World) -> dict[str, Any]:
    """Each that works, beside DDP written by hand and our all-reduce."""
    hand, found = by_hand(world), {}
    for spec in ("allreduce", *HOOKS):
        model, run = prepared(spec)
        with run:
            for batch in batches(world):
                step(run, batch)
            found[spec] = {
                "as_hand": torch.equal(flat(model), hand),
                "far": float((flat(model) - hand).norm() / hand.norm()),
                "same": same(world, model),
                "config": run.config,
                **run.stats.as_dict(),
            }
    return found


def large(world: World) -> dict[str, Any]:
    """A model that torch would cut into several buckets, with which its PowerSGD aborts the process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    _, run = prepared("ddp(hook='powersgd', start=2)", model)
    with run:
        for batch in batches(world, 6):
            step(run, batch)
        return {"same": same(world, model), **run.stats.as_dict()}


def slow(world: World) -> dict[str, float]:
    """Rank 1 begins backward only when rank 0 has been done with its own for a while."""
    environment = detect()
    store = open_store(environment, find_rendezvous(environment), 60.0)
    model, run = prepared("ddp")
    batch = batches(world, 1)[0]
    with run:
        for _ in range(3):  # in the second, forward too waits for the others: torch orders its buckets anew
            step(run, batch)
        before = run.stats.exposed_seconds
        if world.rank == 0:
            first = next(model.parameters())  # of the layers, that is the last to have its gradient
            first.register_post_accumulate_grad_hook(lambda _: store.set("ready", "1"))  # type: ignore[no-untyped-call]
        else:
            store.get("ready")
            world.runtime.sleep(SLOW)
        step(run, batch)
        return {"exposed": run.stats.exposed_seconds - before}


def accumulate(world: World) -> dict[str, Any]:
    """Two backwards, one reduction."""
    model, run = prepared("ddp")
    one, other = batches(world, 2)
    with run:
        with run.no_sync():
            F.cross_entropy(strategy_run(run).replica(one[0]), one[1]).backward()  # type: ignore[no-untyped-call]
        parted = run.stats.bytes_wire
        F.cross_entropy(strategy_run(run).replica(other[0]), other[1]).backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        return {"parted": parted, "wire": run.stats.bytes_wire, "same": same(world, model)}


def uneven(world: World) -> dict[str, Any]:
    """Nine samples in batches of two: rank 1 has nothing in the last step, twice."""
    samples = torch.arange(9.0).view(9, 1)
    loader = DataLoader(TensorDataset(samples, 2 * samples), batch_size=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with distribute(model, optimizer, strategy=build_baseline("ddp")) as run:
        for _ in range(2):
            for x, y in run.shard(loader, name="nine"):
                run.optimizer.zero_grad()
                F.mse_loss(strategy_run(run).replica(x), y).backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
        found = {"same": same(world, model), "steps": run.stats.steps, "weight": model.weight.item()}
    weight = 0.0
    for _ in range(2):
        for own in ([0, 2], [1, 3]), ([4, 6], [5, 7]), ([8], []):
            gradients = [sum(2 * (weight - 2) * x * x for x in share) / max(1, len(share)) for share in own]
            weight -= 0.001 * sum(gradients) / 2
    refused = ""
    _, run = prepared("ddp_post_local")
    with run:
        try:
            next(iter(run.shard(loader)))
        except IncompatibleError as error:
            refused = str(error)
    return {**found, "expected": weight, "refused": refused}


def post_local(world: World) -> dict[str, Any]:
    """After which steps the ranks are of one mind, and what they evaluate with."""
    model = Digits().model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    with distribute(model, optimizer, strategy=build_baseline("ddp_post_local(start=2, period=3)")) as run:
        together = []
        for batch in batches(world, 7):
            step(run, batch)
            scheduler.step()
            together.append(same(world, model))
        own = flat(model)
        mean = sl.allreduce(own, op="mean")
        with run.agreed():
            inside = same(world, model)
            close = torch.allclose(flat(model), mean)
        return {
            "together": together,
            "inside": inside and close,
            "restored": torch.equal(flat(model), own),
            "rate": run.optimizer.param_groups[0]["lr"],
            "momentum": len(run.optimizer.state_dict()["state"]),
            **run.stats.as_dict(),
        }


def divided(world: World) -> dict[str, Any]:
    """Transformer blocks divided by torch, beside one process."""
    plan = ParallelBenchPlan(out="", width=128, layers=1, batch=4)
    alone = plan.first_model()
    optimizer = make_optimizer(list(alone.parameters()))
    with process_group(world):
        contender = DTensorContender("DTensor", world, copy.deepcopy(alone))
        first, own = flat(alone), divided_numbers(contender.model)
        for number in range(3):
            x, y = read_model("blocks", 128, 1, 4).batch(torch.Generator().manual_seed(number))
            contender.step((x, y))
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(alone(x), y))
            optimizer.step()
        contender.close()
    far = (flat(contender.model) - flat(alone)).norm() / (flat(alone) - first).norm()
    return {"far": float(far), "own": own}


def divided_numbers(model: nn.Module) -> int:
    """How many numbers this rank has of the parameters that torch has divided."""
    parts = [(getattr(each, "_local_tensor", each), each) for each in model.parameters()]
    return sum(part.numel() for part, whole in parts if part.shape != whole.shape)


def others(world: World, spec: str) -> dict[str, Any]:
    """A baseline of another package: it trains, and after the last step the ranks agree."""
    model, run = prepared(spec)
    with run:
        for batch in batches(world, 8):
            step(run, batch)
        apart = float((flat(model) - sl.allreduce(flat(model), op="mean")).norm() / flat(model).norm())
        return {"same": same(world, model), "apart": apart, "config": run.config, **run.stats.as_dict()}


CHECKS: dict[str, Callable[[World], Any]] = {
    "hooks": hooks,
    "large": large,
    "slow": slow,
    "accumulate": accumulate,
    "uneven": uneven,
    "post_local": post_local,
    "divided": divided,
}

if __name__ == "__main__":
    with sl.init(transport="torch_dist") as world:
        if len(sys.argv) > 1:
            print(json.dumps({spec: others(world, spec) for spec in sys.argv[1:]}))
        else:
            print(json.dumps({name: check(world) for name, check in CHECKS.items()}))
