"""Broadcast of parameters, optimizer states and objects; allgather of objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.compat.horovod.context import ProcessSet, context, global_process_set
from syncline.compat.horovod.messages import as_tensor
from syncline.compat.horovod.ops import allgather_async, broadcast_async_, synchronize
from syncline.errors import IncompatibleError, ProtocolError
from syncline.state_trees import MESSAGE, decode, encode


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast the root's values to every rank, in place.

    `params` is a state dict, `model.named_parameters()`, or a list of tensors, in the same order on every rank.
    Other values of a state dict than tensors are ignored.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def same(world):
    ...     hvd.init()
    ...     weights = {"w": torch.tensor([float(hvd.rank())])}
    ...     hvd.broadcast_parameters(weights, root_rank=1)
    ...     return weights["w"].item()
    >>> sl.simulate(same, ranks=3).results
    (1.0, 1.0, 1.0)
    """
    context(operation=True)  # first, so that a missing init() is the error that is raised
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name, process_set)
        for name, tensor in _pairs(params)
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def _pairs(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return [(str(name), params[name]) for name in sorted(params)]
    if isinstance(params, (str, bytes, Tensor)) or not isinstance(params, Iterable):
        raise IncompatibleError(
            f"broadcast_parameters takes a state dict, named_parameters() or a list of tensors, not "
            f"{type(params).__name__}"
        )
    pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    strange = next((pair for pair in pairs if len(pair) != 2 or not isinstance(pair[0], (str, type(None)))), None)
    if strange is not None:
        raise IncompatibleError(f"broadcast_parameters: {strange!r:.80} is not a pair of a name and a tensor")
    return pairs


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the root's optimizer state: learning rates and other options, momenta, counts.

    The optimizers of the other ranks may have any state or none; L-BFGS works too. No step is taken, unlike in Horovod,
    which takes a step with zero gradients to create the state. `model` is ignored.
    """
    resume = getattr(optimizer, "_current", None)  # of a DistributedOptimizer, whose module imports this one
    if resume is not None:
        resume()  # after a new init(), all its ranks synchronise first, also the root, which loads nothing
    mine = context().world.rank == root_rank
    state = broadcast_object(optimizer.state_dict() if mine else None, root_rank, process_set=process_set)
    if not mine:
        with loading_in_place(optimizer):
            optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast the root's object to every rank.

    It may hold None, numbers, str, bytes, lists, tuples, sets, dicts, tensors and NumPy arrays. Other objects are
    refused on every rank, because nothing is unpickled. Tensors arrive on the CPU.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def resume(world):
    ...     hvd.init()
    ...     return hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
    >>> sl.simulate(resume, ranks=2).results
    ({'epoch': 3}, {'epoch': 3})
    """
    mine = context().world.rank == root_rank
    data = as_tensor(pack(obj)) if mine else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(length, root_rank, _named(name, "length"), process_set))
    if not mine:
        data = torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, _named(name, "object"), process_set))
    found = unpack(data.numpy().tobytes(), root_rank)
    return obj if mine else found  # unpacked on the root too, so that an unsupported object is refused there as well


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` for one root, as a function of the object."""

    def broadcast(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Allgather of objects, in the order of ranks. The objects are as for `broadcast_object`.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def gather(world):
    ...     hvd.init()
    ...     return hvd.allgather_object(("rank", hvd.rank()))
    >>> sl.simulate(gather, ranks=2).results[0]
    [('rank', 0), ('rank', 1)]
    """
    data = as_tensor(pack(obj))
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = synchronize(allgather_async(length, _named(name, "lengths"), process_set)).tolist()
    gathered = synchronize(allgather_async(data, _named(name, "objects"), process_set))
    parts = torch.split(gathered, lengths)
    return [unpack(part.numpy().tobytes(), rank) for rank, part in zip(process_set.ranks, parts, strict=True)]


def _named(name: str | None, what: str) -> str | None:
    """The name of one part of an operation; None for an operation without a name."""
    return None if name is None else f"{name}.{what}"


@contextmanager
def loading_in_place(optimizer: Optimizer) -> Iterator[None]:
    """Inside, `load_state_dict` changes the existing groups and state in place; torch would create new ones.

    Schedulers of the wrapped optimizer refer to these groups.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:
            group.clear()
            group.update(loaded)
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state


OBJECT_KINDS = replace(MESSAGE, numpy_numbers=True)
TREE_NAME = "tree"
"""The name of the tensor with the JSON: the tree and the names of the other tensors, which are numbered."""


def pack(obj: Any) -> bytes:
    """Write a plain object, or the refusal that `unpack` raises on every rank.

    >>> unpack(pack({"epoch": 3, 7: (1.5, None, {b"x"})}), rank=0)
    {'epoch': 3, 7: (1.5, None, {b'x'})}
    """
    from safetensors.torch import save

    try:
        tree, tensors = encode(obj, "the object", OBJECT_KINDS)
        text = json.dumps({"tree": tree, "names": list(tensors)}).encode()
    except (IncompatibleError, ValueError) as error:
        tensors, text = {}, json.dumps({"refused": str(error)}).encode()
    numbered = {str(number): tensor.cpu() for number, tensor in enumerate(tensors.values())}
    return save({TREE_NAME: as_tensor(text), **numbered})


def unpack(data: bytes, rank: int) -> Any:
    """Read the object that `rank` has packed."""
    from safetensors.torch import load

    source = f"the object of rank {rank}"
    try:
        tensors = load(data)
        document = json.loads(tensors[TREE_NAME].numpy().tobytes())
        if "refused" in document:
            raise IncompatibleError(f"rank {rank}: {document['refused']}")
        numbered = {name: tensors[str(number)] for number, name in enumerate(document["names"])}
        return decode(document["tree"], numbered, source)
    except (IncompatibleError, ProtocolError):
        raise
    except Exception as error:  # safetensors and json have exceptions of their own
        raise ProtocolError(f"{source} ({len(data)} bytes) cannot be read: {error}", peer=rank) from None
