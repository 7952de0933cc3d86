"""The run log of a model with experts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.bench.live.feed import TrainingFeed
from syncline.events import read_log
from syncline.parallel import Experts, expert_loss
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.workloads.base import Batch
from tests.training.tiny import Tiny


class TinyExperts(Tiny):
    """With a layer of experts that drops tokens, because its capacity is small."""

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(Experts(nn.Linear(8, 8), count=4, top=2, capacity=0.5), nn.ReLU(), nn.Linear(8, 2))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) + expert_loss(model)


def test_the_log_has_the_load_of_each_expert(tmp_path: Path) -> None:
    sl.simulate(lambda world: train(TinyExperts(), Settings(epochs=3), world=world, folder=tmp_path), ranks=2)
    points = [line for line in read_log(tmp_path) if line["key"] == "sl_experts"]
    assert [point["metadata"]["epoch_num"] for point in points] == [1, 2, 3]
    for point in points:
        load = point["value"]["0"]
        assert len(load["tokens"]) == len(load["dropped"]) == 4
        assert sum(load["tokens"]) + sum(load["dropped"]) == 2 * 25  # rank 0 reads half of the 50 samples
        assert sum(load["dropped"]) > 0
    feed = TrainingFeed(tmp_path)
    feed.state()
    detail = feed.detail(0, "compute")
    assert detail is not None
    (shown,) = detail["experts"]
    wanted = [kept + lost for kept, lost in zip(load["tokens"], load["dropped"], strict=True)]
    assert (shown["layer"], shown["experts"], shown["busiest"]) == ("0", 4, wanted.index(max(wanted)))
    assert shown["share"] == max(wanted) / 50
    assert shown["dropped"] == sum(load["dropped"]) / 50
