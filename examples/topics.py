"""A topic model on the parameter server: latent Dirichlet allocation by collapsed Gibbs sampling.

syncline run -n 2 examples/topics.py
syncline run -n 4 --servers 1 examples/topics.py --topics 12 --sweeps 40

The counts of each word in each topic lie on the servers, `topics` keys a word, and the topics' totals after them. A
worker pulls the rows of the words in its documents, draws a topic for every word, and pushes what has changed: whole
numbers, so that the sum of all counts is the number of words to the last, whoever pushed when.
Documents are the docstrings of Python's own library, one for each module. (Smola, Narayanamurthy 2010.)
"""

import argparse
import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import syncline as sl

DULL = 0.25
"""Words in more than this part of the documents say nothing."""


def documents(words_each: int, files: int | None) -> tuple[list[np.ndarray], list[str]]:
    """Word numbers of each document, and the words."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in (sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")))[:files]:
        if path.parent.name in ("test", "idlelib", "site-packages"):
            continue
        tree = ast.walk(ast.parse(path.read_bytes()))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        text = " ".join(ast.get_docstring(node) or "" for node in tree if isinstance(node, kinds))
        words = re.findall(r"[a-z]{4,}", text.lower())
        if len(words) >= 50:
            texts.append(words)
    seen = Counter(word for words in texts for word in set(words))
    known = sorted(word for word, count in seen.items() if 5 <= count <= DULL * len(texts))
    number = {word: at for at, word in enumerate(known)}
    found = [np.array([number[word] for word in words if word in number][:words_each]) for words in texts]
    return [each for each in found if len(each)], known


class Sampler:
    """One worker's documents and the topics of their words."""

    def __init__(self, mine: list[np.ndarray], topics: int, seed: int) -> None:
        self.mine, self.topics = mine, topics
        self.random = np.random.default_rng(seed)
        self.of = [self.random.integers(topics, size=len(words)) for words in mine]
        self.vocabulary = np.unique(np.concatenate(mine))

    def keys(self, words: int) -> torch.Tensor:
        """Those of its words' rows, and of the topics' totals, which come last."""
        rows = (self.vocabulary[:, None] * self.topics + np.arange(self.topics)).ravel()
        return torch.from_numpy(np.concatenate([rows, words * self.topics + np.arange(self.topics)]))

    def counts(self) -> np.ndarray:
        """Of its own words: rows as in `keys`."""
        table = np.zeros((len(self.vocabulary) + 1, self.topics))
        for words, topics in zip(self.mine, self.of, strict=True):
            np.add.at(table, (np.searchsorted(self.vocabulary, words), topics), 1)
        table[-1] = table[:-1].sum(0)
        return table

    def sweep(self, table: np.ndarray, alpha: float, beta: float, words: int) -> tuple[np.ndarray, float]:
        """Draw a topic for every word, given all others; what has changed, and the mean log-probability of a word."""
        before, surprise, count = table.copy(), 0.0, 0
        for document, topics in zip(self.mine, self.of, strict=True):
            places = np.searchsorted(self.vocabulary, document)
            own = np.bincount(topics, minlength=self.topics).astype(float)
            for at, place in enumerate(places):
                topic = topics[at]
                for row in (own, table[place], table[-1]):
                    row[topic] -= 1
                likely = (table[place] + beta) / (table[-1] + words * beta)
                chances = np.cumsum((own + alpha) * np.maximum(likely, 1e-12))
                surprise += np.log(chances[-1] / (len(places) - 1 + alpha * self.topics))
                topic = topics[at] = int(np.searchsorted(chances, self.random.random() * chances[-1]))
                for row in (own, table[place], table[-1]):
                    row[topic] += 1
            count += len(places)
        return table - before, surprise / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=8)
    parser.add_argument("--sweeps", type=int, default=25)
    parser.add_argument("--words", type=int, default=120, help="of each document, at most")
    parser.add_argument("--files", type=int, help="maximum number of library files to read; default: all")
    options = parser.parse_args()
    texts, known = documents(options.words, options.files)
    topics, words = options.topics, len(known)
    with sl.init() as world, sl.server.store((words + 1) * topics) as counts:
        sampler = Sampler(texts[world.rank :: world.size], topics, seed=world.rank)
        keys = sampler.keys(words)
        counts.push(keys, torch.from_numpy(sampler.counts().ravel()).float()).wait()
        world.barrier()
        for sweep in range(options.sweeps):
            table = counts.get(keys).numpy().astype(float).reshape(-1, topics)
            changed, chance = sampler.sweep(table, alpha=0.1, beta=0.01, words=words)
            counts.push(keys, torch.from_numpy(changed.ravel()).float()).wait()
            if world.rank == 0 and (sweep % 5 == 0 or sweep == options.sweeps - 1):
                print(f"sweep {sweep}: perplexity {np.exp(-chance):.0f}", flush=True)
        world.barrier()
        if world.rank == 0:
            found = counts.get().numpy().reshape(-1, topics)
            total = sum(map(len, texts))
            assert found[:-1].sum() == found[-1].sum() == total, f"{found[-1].sum():.0f} counts of {total} words"
            for topic in range(topics):
                print(f"topic {topic}:", *(known[at] for at in np.argsort(-found[:-1, topic])[:8]))
            print(f"{total} words of {len(texts)} modules, and every one is counted once")


if __name__ == "__main__":
    main()
