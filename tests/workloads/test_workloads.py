"""The contract tests of all workloads, and tests of each one."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from syncline.errors import SpecError, UnsupportedError
from syncline.parallel.splitting import cut_candidates
from syncline.parallel.splitting import split as split_model
from syncline.testing.workloads import WorkloadContract
from syncline.workloads import (
    VGG,
    Digits,
    LogisticRegression,
    Regression,
    Stdlib,
    TransformerLM,
    build,
    names,
    stdlib,
    vgg,
)
from syncline.workloads.base import Pairs, Workload, batches
from syncline.workloads.convex import Convex
from syncline.workloads.stdlib import Corpus, read_corpus


class TestDigits(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return Digits()


class TestDigitsCNN(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return Digits(model="cnn")


class TestTransformer(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return Stdlib(bytes=200_000, length=32)


class TestRNN(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return Stdlib(model="rnn", bytes=200_000, length=32)


class TestDeepTransformer(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return TransformerLM(width=32, bytes=200_000, length=32)


class TestVGG(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return VGG(side=8, width=4, dense=64)


class TestRegression(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return Regression(features=8, samples=512)


class TestLogistic(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return LogisticRegression(features=8, samples=512)


def train(workload: Workload, epochs: int) -> torch.nn.Module:
    """Train on one worker without Syncline."""
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    loader = DataLoader(
        workload.splits().train, workload.defaults.batch, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            workload.loss(model, (inputs, targets)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


@pytest.mark.parametrize("spec", ["digits", "digits(model='cnn')", "vgg", "regression", "logistic"])
def test_the_defaults_reach_their_target(spec: str) -> None:
    workload = build(spec)
    target = workload.defaults.target
    assert target is not None
    found = workload.evaluate(train(workload, workload.defaults.epochs), workload.splits().validation)
    assert workload.reached(found[workload.metric], target), found


def test_digits_reach_nine_of_ten_on_the_test_split() -> None:
    workload = build("digits")
    assert workload.evaluate(train(workload, 10), workload.splits().test)["accuracy"] > 0.9


@pytest.mark.parametrize(
    "spec",
    [
        "digits",
        "digits(model='cnn')",
        "fashion(folder='/data', download=True)",
        "stdlib(model='rnn', bytes=500000, length=64)",
        "vgg(data='fashion', side=32, dense=4096)",
        "transformer(layers=12, width=128, tied=False)",
        "regression(features=8, noise=0.0, seed=3)",
        "logistic(condition=100.0, l2=0.01)",
    ],
)
def test_a_spec_reads_back(spec: str) -> None:
    assert repr(build(spec)) == spec
    assert build(spec).spec == spec


def test_a_spec_omits_default_arguments() -> None:
    assert build("stdlib(length=128, model='rnn')").spec == "stdlib(model='rnn')"


def test_every_name_builds() -> None:
    for name in names():
        assert build(name).name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "did you mean 'digits'"),
        ("digits(model='resnet')", "unknown model 'resnet'; available: 'cnn', 'mlp'"),
        ("digits(size=3)", r"write digits\(model"),
        ("fashion(folder=3)", "folder: 3"),
        ("fashion(download='yes')", "download: 'yes'"),
        ("fashion(url='http://example.org/')", "not https"),
        ("fashion(url='file:///etc/')", "not https"),
        ("stdlib(bytes=10)", "from 100,000 to"),
        ("stdlib(length=True)", "length: True"),
        ("transformer(heads=5)", "heads: 5, width: 64"),
        ("transformer(tied=1)", "tied: 1"),
        ("vgg(data='mnist')", "unknown data 'mnist'"),
        ("vgg(side=7)", "from 8 to 256"),
        ("regression(features=0)", "features: 0"),
        ("regression(noise='much')", "noise: 'much'"),
        ("logistic(l2=0)", "l2: 0"),
        ("logistic(condition=1e999)", "condition: inf"),
    ],
)
def test_invalid_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(spec)


@pytest.mark.parametrize(
    ("spec", "target", "message"),
    [
        ("digits", 1.5, "accuracy .higher is better., so write a number above 0 and at most 1; did you mean 0.015"),
        ("digits", 97, "did you mean 0.97"),
        ("digits", -0.5, "above 0 and at most 1"),
        ("digits", "much", "not a finite number"),
        ("stdlib", 8, "bits_per_byte .lower is better., so write a number above 0 and below 8"),
        ("regression", 0, "gap .lower is better., so write a number above 0$"),
    ],
)
def test_impossible_targets_are_refused(spec: str, target: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(spec).check_target(target)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[workloads\]'"):
        Digits().splits()


def test_digits_splits_are_disjoint_complete_and_stratified() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    splits = [cast(Pairs, split) for split in vars(Digits().splits()).values()]
    samples: Counter[tuple[bytes, int]] = Counter()
    for split in splits:
        for image, label in zip(split.inputs.flatten(1), split.targets.tolist(), strict=True):
            samples[(16 * image).to(torch.uint8).numpy().tobytes(), label] += 1
    original = zip(images.astype("uint8"), labels.tolist(), strict=True)
    assert samples == Counter((image.tobytes(), label) for image, label in original)
    total = Counter(labels.tolist())
    for split, share in zip(splits, (0.6, 0.2, 0.2), strict=True):
        for label, count in Counter(split.targets.tolist()).items():
            assert abs(count - share * total[label]) <= 1


@pytest.mark.parametrize(
    ("spec", "cuts", "tied"),
    [
        ("vgg(side=8, width=4, dense=16)", ("features.10", "classifier.0"), 0),
        ("transformer(width=8, length=8, bytes=100000)", ("blocks.1", "blocks.3"), 1),
        ("transformer(width=8, length=8, bytes=100000, tied=False)", ("blocks.2", "head"), 0),
        ("stdlib(length=8, bytes=100000)", ("blocks.1", "norm"), 0),
        ("digits(model='cnn')", ("3", "7"), 0),
    ],
)
def test_a_model_can_be_split_and_its_loss_computed_from_its_output(
    spec: str, cuts: tuple[str, ...], tied: int
) -> None:
    workload = build(spec)
    model = workload.model(0)
    assert set(cuts) <= set(cut_candidates(model))
    graph = split_model(model, cuts)
    assert len(graph.tied) == tied
    inputs, targets = next(batches(workload.splits().train, 4))
    values = {0: inputs}
    for stage in graph.stages:
        results: Any = stage.module(*(values[number] for number in stage.inputs))
        values.update(zip(stage.outputs, results, strict=True) if stage.outputs else [(-1, results)])
    assert torch.equal(workload.output_loss(values[-1], targets), workload.loss(model, (inputs, targets)))


def test_images_are_scaled_and_bytes_stay_bytes() -> None:
    big = cast(Pairs, build("vgg(side=32)").splits().train)
    assert big.inputs.shape[1:] == (1, 32, 32)
    assert torch.equal(big.targets, cast(Pairs, Digits().splits().train).targets)
    clothes = Pairs(torch.full((5, 1, 28, 28), 7, dtype=torch.uint8), torch.zeros(5), scale=255)
    small = vgg.resized(clothes, 14)
    assert small.inputs.shape == (5, 1, 14, 14)
    assert small.inputs.dtype == torch.uint8
    assert int(small.inputs.min()) == int(small.inputs.max()) == 7


def test_each_library_file_is_in_one_split(tmp_path: Path) -> None:
    texts = {f"m{number}.py": f"# {number}\n".encode() * 50 for number in range(60)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "tool.py").write_bytes(b"tool\n" * 10)
    (tmp_path / "notes.txt").write_bytes(b"not Python")
    everything = sum(map(len, texts.values())) + 50
    corpus = read_corpus(everything, tmp_path)
    assert corpus.files == 61
    found = [corpus.train, corpus.validation, corpus.test]
    assert sum(map(len, found)) == everything
    for text in texts.values():
        assert sum(text in part for part in found) == 1
    assert all(found)
    assert read_corpus(everything, tmp_path) == corpus
    assert read_corpus(everything - 1, tmp_path).sha256 != corpus.sha256
    with pytest.raises(UnsupportedError, match=f"{everything + 1:,} were asked for"):
        read_corpus(everything + 1, tmp_path)


def test_a_library_too_small_for_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib, "read_corpus", lambda limit: Corpus(bytes(9000), bytes(4097), bytes(4096), 3, "0"))
    with pytest.raises(SpecError, match="no window of 4096 bytes"):
        Stdlib(bytes=100_000, length=4096).splits()


@pytest.mark.parametrize(
    "spec", ["regression", "logistic", "regression(condition=1000)", "logistic(condition=1000, l2=1e-6)"]
)
def test_the_optimum_is_a_minimum(spec: str) -> None:
    """The gradient by autograd is zero there, and the objective is larger nearby."""
    workload = cast(Convex, build(spec))
    with torch.no_grad():  # an evaluation asks for it in such a place
        weights, value = workload.optimum
    train = cast(Pairs, workload.splits().train)
    inputs, targets = train.inputs.double(), train.targets.double()
    leaf = weights.clone().requires_grad_()
    workload.objective(leaf, inputs, targets).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.norm().item() < 1e-8
    for seed in range(5):
        aside = weights + 1e-3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))
        assert workload.objective(aside, inputs, targets).item() > value


@pytest.mark.parametrize("spec", ["regression", "logistic"])
def test_the_gap_at_the_optimum_is_zero(spec: str) -> None:
    workload = cast(Convex, build(spec))
    model = workload.model(0)
    assert workload.evaluate(model, workload.splits().test)["gap"] > 0.01
    with torch.no_grad():
        next(model.parameters()).copy_(workload.optimum[0])
    assert 0 <= workload.evaluate(model, workload.splits().test)["gap"] < 1e-12


def test_the_condition_number_is_about_the_argument() -> None:
    inputs = cast(Pairs, Regression(condition=100.0).splits().train).inputs.double()
    eigenvalues = torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
    assert 50 < (eigenvalues[-1] / eigenvalues[0]).item() < 200


def test_nothing_to_evaluate_on() -> None:
    workload = Digits()
    nothing: torch.utils.data.Subset[Any] = torch.utils.data.Subset(workload.splits().test, [])
    with pytest.raises(SpecError, match="no samples to evaluate on"):
        workload.evaluate(workload.model(0), nothing)
    with pytest.raises(SpecError, match="batch: 0"):
        workload.evaluate(workload.model(0), workload.splits().test, batch=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [("syncline.bench.workloads", "syncline.workloads"), ("syncline.training.workload", "syncline.workloads.base")],
)
def test_old_import_paths_work_and_warn(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old}.Workload is now {new}.Workload"):
        assert importlib.import_module(old).Workload is Workload
