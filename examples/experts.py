"""Train a byte-level language model with experts on Syncline's own documentation.

python examples/experts.py
syncline run -n 2 examples/experts.py --steps 300
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

FEATURES, CONTEXT, BATCH = 32, 48, 16


class Block(nn.Module):
    """Attention to earlier bytes, and then a few of the experts for each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)])
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        mlp = nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES))
        self.experts = sl.parallel.Experts(mlp, count=8, top=2, capacity=1.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.experts(self.norms[1](x))
        return out


class LanguageModel(nn.Module):
    """The logits of each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, FEATURES), nn.Embedding(CONTEXT, FEATURES)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(FEATURES, 256)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]]))
        return logits


def windows() -> tuple[Tensor, Tensor]:
    """The documentation as rows of CONTEXT + 1 bytes, for training and for validation."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = b"\n".join(page.read_bytes() for page in pages)
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    held_out = torch.arange(len(rows)) % 20 == 0
    return rows[~held_out], rows[held_out][:200]


def main(steps: int) -> None:
    world = sl.init()
    torch.manual_seed(0)
    train, validation = windows()
    loader = DataLoader(TensorDataset(train), batch_size=BATCH, shuffle=True, drop_last=True)
    model = LanguageModel().to(world.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with sl.distribute(model, optimizer) as run:
        torch.manual_seed(world.rank)  # the gates of the workers draw different noise
        for (rows,) in islice(cycle(run.shard(loader)), steps):
            optimizer.zero_grad()
            loss = f.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss + sl.parallel.expert_loss(model)).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():  # after the run every worker has the whole model
        rows = validation.to(world.device)
        bits = f.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / torch.tensor(2.0).log()
    if world.rank == 0:
        for name, layer in model.named_modules():
            if isinstance(layer, sl.parallel.Experts):
                told = layer.statistics
                shares = " ".join(f"{count / sum(told.tokens):.0%}" for count in told.tokens)
                dropped = sum(told.dropped) / (sum(told.tokens) + sum(told.dropped))
                print(f"{name}: tokens of each expert {shares}; {dropped:.1%} dropped")
        print(f"{world.size} workers: {bits:.2f} bits a byte after {steps} steps")
    world.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a byte-level language model with experts.")
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
