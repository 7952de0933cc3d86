"""Run on each rank by test_cuda, and by hand on a machine with a GPU: pipelines and divided layers on it.

The ranks may share one GPU. By hand, on two ranks: `syncline run -n 2 -m tests.parallel.cuda_script`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

import syncline as sl
from tests.parallel.models import MODELS, loss_of
from tests.parallel.training import SCHEDULES, batch_on, compare, has_stages, train_alone, train_in_pipeline
from tests.training.mesh_models import assert_trained, train_divided


def with_all_schedules(world: sl.World) -> None:
    """Every model with every schedule equals the model in one process on the same GPU."""
    for schedule in SCHEDULES:
        for name in MODELS:
            expected = train_alone(name, has_stages(schedule, world.size), world.device)
            compare(train_in_pipeline(world, name, schedule), expected)
            if schedule == "1f1b":
                compare(train_in_pipeline(world, name, schedule, recompute="always"), expected)
        print("fine:", schedule)


def with_half_precision(world: sl.World) -> None:
    """Autocast and a GradScaler on the GPU, and `pipedream`: the loss falls, and all ranks have the same weights."""
    case = MODELS["mlp"]
    for schedule in ("1f1b", "pipedream"):
        model = case.model().float().to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda") if schedule == "1f1b" else None
        cuts = case.cuts_into(world.size)
        with sl.pipeline(
            model, optimizer, loss_of, stages=cuts, schedule=schedule, microbatches=4, scaler=scaler
        ) as run:
            x, y = batch_on(world.device, case, 16, 0)
            losses = []
            for _ in range(40):
                with torch.autocast("cuda", torch.float16):
                    losses.append(run.step(x.float(), y).item())
        assert losses[-1] < losses[1], losses
        assert math.isfinite(losses[-1])
        weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        assert torch.equal(sl.broadcast(weights), weights)
        print("fine in half precision:", schedule)


def with_divided_layers(world: sl.World) -> None:
    """Divided models equal those of one process on the CPU."""
    if world.size == 2:
        # NCCL needs a GPU for each rank.
        assert_trained(train_divided(world, "auto" if torch.cuda.device_count() > 1 else "ring"))
        print("fine with divided layers")


def main() -> None:
    with sl.init(transport="torch_dist", timeout=60) as world:
        assert world.device.type == "cuda", world.device
        with_all_schedules(world)
        with_half_precision(world)
        with_divided_layers(world)
        print("fine on", torch.cuda.get_device_name(), "rank", world.rank, "of", world.size)


if __name__ == "__main__":
    main()
