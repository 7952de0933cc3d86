"""What travels in place of a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline.compat.horovod.compression import Compression, Compressor, FP16Compressor, codec_of
from syncline.errors import IncompatibleError, SpecError, UnsupportedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_none_changes_nothing(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 3]).to(dtype)
    sent, kept = Compression.none.compress(tensor)
    assert sent is tensor
    assert Compression.none.decompress(sent, kept) is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fp16_halves_floats(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.5, -2.0, 1024.0]).to(dtype)
    sent, kept = Compression.fp16.compress(tensor)
    assert sent.dtype == torch.float16
    back = Compression.fp16.decompress(sent, kept)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_fp16_leaves_whole_numbers_alone(dtype: torch.dtype) -> None:
    tensor = torch.tensor([100, 200]).to(dtype)
    sent, kept = Compression.fp16.compress(tensor)
    assert sent is tensor
    assert Compression.fp16.decompress(sent, kept) is tensor


def test_codecs_by_spec_and_by_object() -> None:
    chain = sl.codecs.TopK(0.01) | sl.codecs.Quantize(4)
    for told in (
        chain,
        "topk(0.01)|quantize(4)",
        Compression.codec(chain),
        Compression.codec("topk(0.01)|quantize(4)"),
    ):
        assert repr(codec_of(told)) == "topk(0.01)|quantize(4)"
    assert codec_of(None) is None
    assert codec_of("none") is None
    assert codec_of(Compression.none) is None
    assert repr(codec_of(Compression.fp16())) == repr(codec_of(Compression.fp16)) == "cast('fp16')"


def test_a_wrong_codec_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="quantise"):
        Compression.codec("quantise(4)")


@pytest.mark.parametrize("strategy", [None, "allreduce"])
def test_momentum_twice_is_refused(strategy: str | None) -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hvd.DistributedOptimizer(optimizer, compression="topk(0.5, momentum=0.9)", strategy=strategy)

    with pytest.raises(IncompatibleError, match=r"the optimizer applies 0\.9 again"):
        sl.simulate(case, ranks=2)


class Signs(Compressor):
    pass


class Louder(FP16Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor * 2, tensor.dtype


@pytest.mark.parametrize("told", [Signs, Signs(), Louder, 7, object()])
def test_compressors_of_the_scripts_own_are_refused(told: Any) -> None:
    with pytest.raises(IncompatibleError, match=r"Compression\.fp16"):
        codec_of(told)


def test_a_codec_is_not_for_single_operations() -> None:
    with pytest.raises(UnsupportedError, match="DistributedOptimizer"):
        Compression.codec("quantize(4)").compress(torch.ones(2))
    with pytest.raises(UnsupportedError, match="DistributedOptimizer"):
        Compression.codec("quantize(4)").decompress(torch.ones(2), None)
