"""A sparse logistic regression on the parameter server: which docstrings of Python's library are about networks?

syncline run -n 2 examples/sparse_logistic.py
syncline run -n 4 --servers 2 examples/sparse_logistic.py --steps 200

The model is no network: 2^18 weights, one for each hashed word. A worker pulls the weights of the words in its batch,
a sorted list of some hundred keys, and pushes their gradient; the servers apply Adagrad.
"""

import argparse
import ast
import hashlib
import re
import sysconfig
from pathlib import Path

import torch

import syncline as sl

FEATURES = 1 << 18
NETWORK = {"asyncio", "email", "ftplib", "http", "imaplib", "poplib", "smtplib", "socket", "ssl", "urllib"}
Document = tuple[torch.Tensor, float]
"""The keys of its words, sorted, and 1 if it is about networks."""


def documents(files: int | None) -> list[Document]:
    """Every docstring of the library's modules, in the order of their hashes: the same for all workers."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")) if path.parent.name != "test"]
    found: dict[str, Document] = {}
    for path in paths[:files]:
        if "site-packages" in path.parts or "idlelib" in path.parts:
            continue
        top = path.relative_to(folder).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                words = set(re.findall(r"[a-z]{3,}", text.lower()))
                if len(words) > 5:
                    keys = torch.tensor(sorted({_hash(word) for word in words}))
                    found[text] = keys, float(top in NETWORK)
    return [found[text] for text in sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())]


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % FEATURES


def gradient(batch: list[Document], keys: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Of the mean logistic loss over a batch, for these keys; and the loss."""
    total, loss = torch.zeros_like(weights), 0.0
    for words, label in batch:
        places = torch.searchsorted(keys, words)
        score = weights[places].sum()
        error = torch.sigmoid(score) - label
        total[places] += error / len(batch)
        loss += float(torch.nn.functional.softplus(score) - label * score) / len(batch)
    return total, loss


def accuracy(test: list[Document], weights: torch.Tensor) -> float:
    """Of balanced classes: the mean of both classes' shares, so that saying "no" to everything gives one half."""
    right = {0.0: [0, 0], 1.0: [0, 0]}
    for words, label in test:
        right[label][0] += bool(weights[words].sum() > 0) == bool(label)
        right[label][1] += 1
    return sum(hits / count for hits, count in right.values()) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--files", type=int, help="maximum number of library files to read; default: all")
    options = parser.parse_args()
    everything = documents(options.files)
    cut = len(everything) * 4 // 5
    train, test = everything[:cut], everything[cut:]
    with sl.init() as world, sl.server.store(FEATURES, rule="adagrad(0.1)") as weights:
        mine = train[world.rank :: world.size]
        chosen = torch.Generator().manual_seed(world.rank)
        for step in range(options.steps):
            batch = [mine[int(at)] for at in torch.randint(len(mine), (options.batch,), generator=chosen)]
            keys = torch.unique(torch.cat([words for words, _ in batch]))
            values = weights.get(keys)
            slope, loss = gradient(batch, keys, values)
            weights.push(keys, slope).wait()
            if world.rank == 0 and step % 50 == 0:
                print(f"step {step}: loss {loss:.3f}, {keys.numel()} of {FEATURES} keys", flush=True)
        world.barrier()
        if world.rank == 0:
            found = accuracy(test, weights.get())
            print(f"balanced test accuracy {found:.3f} on {len(test)} docstrings after {options.steps} steps")


if __name__ == "__main__":
    main()
