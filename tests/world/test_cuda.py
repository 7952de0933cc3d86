"""Tensors on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.launching import finish, start, torch_variables

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_on_a_gpu(size: int) -> None:
    for one in finish([start(["-m", "tests.world.cuda_script"], each) for each in torch_variables(size)]):
        assert one.code == 0, one
        assert "fine on" in one.out
