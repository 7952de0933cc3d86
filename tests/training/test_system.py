"""The facts that are read from torch's files equal those that torch reports."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.training import system
from syncline.training.system import gpu_names, has_backend, nccl_version


@pytest.mark.parametrize("name", ["Gloo", "NCCL", "MPI", "UCC"])
def test_backends_are_those_that_torch_has(name: str) -> None:
    distributed: Any = torch._C._distributed_c10d
    assert has_backend(name) is hasattr(distributed, f"ProcessGroup{name}")


def test_gpus_are_those_that_torch_sees() -> None:
    assert gpu_names() == [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


@pytest.mark.parametrize(
    ("cuda", "driver", "asked"), [(None, True, False), ("12.8", False, False), ("12.8", True, True)]
)
def test_torch_is_asked_for_gpus_only_with_cuda_and_driver(
    cuda: str | None, driver: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "torch_version", lambda: SimpleNamespace(cuda=cuda, hip=None))
    monkeypatch.setattr(system, "has_cuda_driver", lambda: driver)
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name="GPU {}".format)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpus))
    assert gpu_names() == (["GPU 0", "GPU 1"] if asked else [])


def test_version_of_nccl_is_that_of_the_package_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-nccl-cu13": "2.29.3"}
    monkeypatch.setattr(system, "has_backend", lambda name: True)
    monkeypatch.setattr(metadata, "requires", lambda name: ["sympy", "nvidia-nccl-cu13==2.29.3; linux"])
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert nccl_version() == "2.29.3"
    monkeypatch.setattr(metadata, "requires", lambda name: [])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    assert nccl_version() == "2.21.5"
    monkeypatch.setattr(system, "has_backend", lambda name: False)
    assert nccl_version() is None
