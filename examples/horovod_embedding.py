"""Learn which words of a large vocabulary are good news: a sparse embedding, as a script for Horovod has it.

A step touches a few hundred of the table's rows, and only those travel; with --sparse-as-dense the whole table does.

python examples/horovod_embedding.py
syncline run -n 2 examples/horovod_embedding.py
syncline run -n 2 examples/horovod_embedding.py --sparse-as-dense
"""

import argparse

import torch
import torch.nn.functional as f
from torch import nn

import syncline.compat.horovod.torch as hvd


class Classifier(nn.Module):
    """Scores a text by the mean of its words' vectors."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.output = nn.Linear(width, 1)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """One number for each text; above zero: good news."""
        scores: torch.Tensor = self.output(self.embedding(texts).mean(dim=1)).squeeze(1)
        return scores


def make_texts(count: int, words: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as numbers of words, and whether they are good news: then three of four words have an odd number."""
    draw = torch.Generator().manual_seed(seed)
    good = torch.rand(count, 1, generator=draw) < 0.5
    fitting = torch.rand(count, length, generator=draw) < 0.75
    texts = 2 * torch.randint(words // 2, (count, length), generator=draw) + (good == fitting)
    return texts, good.squeeze(1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=10_000, help="in the vocabulary")
    parser.add_argument("--width", type=int, default=16, help="of a word's vector")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--sparse-as-dense", action="store_true", help="send the whole table's gradient")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # or Adagrad warns
    model = Classifier(args.words, args.width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), sparse_as_dense=args.sparse_as_dense
    )

    texts, good = make_texts(args.steps * args.batch_size, args.words, length=8, seed=1 + hvd.rank())
    losses = []
    for x, y in zip(torch.split(texts, args.batch_size), torch.split(good, args.batch_size), strict=True):
        optimizer.zero_grad()
        loss = f.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    gradient = model.embedding.weight.grad
    assert gradient is not None, "the last step has left one"
    rows = len(gradient.coalesce().values())  # sparse again, however it has travelled
    texts, good = make_texts(2000, args.words, length=8, seed=0)
    with torch.no_grad():
        right = ((model(texts) > 0) == (good > 0)).float().mean().item()
    total = sum(weights.detach().double().sum() for weights in model.parameters())
    same = len(set(hvd.allgather_object(float(total)))) == 1
    if hvd.rank() == 0:
        print(
            f"workers: {hvd.size()}; loss {losses[0]:.4f} to {sum(losses[-10:]) / 10:.4f}, accuracy {right:.3f}; "
            f"rows of the last gradient: {rows}; weights {'the same' if same else 'NOT the same'}"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
