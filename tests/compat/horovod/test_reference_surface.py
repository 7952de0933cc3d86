"""The names of `horovod.torch` and what they take, as scripts call them."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import syncline.compat.horovod.torch as hvd

REDUCE = "average name op prescale_factor postscale_factor process_set"
REDUCE_AND_WAIT = "average name compression op prescale_factor postscale_factor process_set"
SCATTER = "name op process_set prescale_factor postscale_factor"
SCATTER_AND_WAIT = "name compression op process_set prescale_factor postscale_factor"

FUNCTIONS = {
    "init": "comm process_sets",
    "shutdown": "",
    "is_initialized": "",
    "rank": "",
    "size": "",
    "local_rank": "",
    "local_size": "",
    "cross_rank": "",
    "cross_size": "",
    "is_homogeneous": "",
    "allreduce": f"tensor {REDUCE_AND_WAIT}",
    "allreduce_": f"tensor {REDUCE}",
    "allreduce_async": f"tensor {REDUCE}",
    "allreduce_async_": f"tensor {REDUCE}",
    "grouped_allreduce": f"tensors {REDUCE_AND_WAIT}",
    "grouped_allreduce_": f"tensors {REDUCE}",
    "grouped_allreduce_async": f"tensors {REDUCE}",
    "grouped_allreduce_async_": f"tensors {REDUCE}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": f"tensor {SCATTER_AND_WAIT}",
    "reducescatter_async": f"tensor {SCATTER}",
    "grouped_reducescatter": f"tensors {SCATTER_AND_WAIT}",
    "grouped_reducescatter_async": f"tensors {SCATTER}",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
        "groups sparse_as_dense process_set"
    ),
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name",
    "broadcast_object_fn": "root_rank name",
    "allgather_object": "obj name",
    "start_timeline": "file_path mark_cycles",
    "stop_timeline": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "get_process_set_ids_and_ranks": "",
}
"""What each takes, in order; ours may take more after that."""
OTHERS = {
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "elastic",
    "global_process_set",
}
ELASTIC = {"ElasticSampler", "TorchState", "run"}


def public(module: ModuleType) -> set[str]:
    """What a module offers; its own submodules only where they are meant to be used."""
    return {name for name in vars(module) if not name.startswith("_")}


def test_every_name_is_there_and_no_other() -> None:
    wanted = FUNCTIONS.keys() | OTHERS
    assert sorted(wanted - public(hvd)) == []
    assert sorted(public(hvd) - wanted) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_by_place_and_by_name(name: str) -> None:
    found = list(inspect.signature(getattr(hvd, name)).parameters)
    wanted = FUNCTIONS[name].split()
    assert found[: len(wanted)] == wanted


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_ours_alone_may_be_left_out(name: str) -> None:
    parameters = list(inspect.signature(getattr(hvd, name)).parameters.values())
    for extra in parameters[len(FUNCTIONS[name].split()) :]:
        assert extra.default is not inspect.Parameter.empty or extra.kind in (extra.VAR_KEYWORD, extra.VAR_POSITIONAL)


def test_the_numbers_of_the_ops() -> None:
    ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [int(op) for op in ops] == list(range(6))


def test_elastic() -> None:
    from syncline.compat.horovod import elastic

    assert sorted(ELASTIC - public(elastic)) == []
    assert getattr(hvd, "elastic", None) is elastic


def test_compression() -> None:
    assert hasattr(hvd.Compression, "none")
    assert hasattr(hvd.Compression, "fp16")
