# SPDX-License-Identifier: Apache-2.0
"""`import horovod.torch as hvd`: values exchanged between the instances of a run, over gloo.

Results have no gradient. One process alone needs no environment and no connection.
"""

import enum
import os
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch import Tensor, distributed

from .. import popdist
from ..device.errors import Error
from ..popdist import _peers

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

T = TypeVar("T")


class ReduceOp(enum.IntEnum):
    """How the values of all processes become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

# By name: a PyTorch that was built without torch.distributed has no such class.
_TORCH_OPS = {Average: "SUM", Sum: "SUM", Min: "MIN", Max: "MAX", Product: "PRODUCT"}

_places: Optional[Dict[str, int]] = None


# ---- who is there


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def init(comm: Optional[Sequence[int]] = None, process_sets: Any = None) -> None:
    """Connect to the other processes of the run, which `horovodrun`, PopRun or mpirun counted; waits for all of them.

    They meet where `popdist.init` meets. A second call does nothing.

    Raises:
        Error: a part of the processes is asked for, or they cannot be found.
    """
    global _places
    if _places is not None:
        return
    if _peers.connected():
        index, count = distributed.get_rank(), distributed.get_world_size()
    else:
        index = _number("HOROVOD_RANK", popdist.getInstanceIndex())
        count = _number("HOROVOD_SIZE", popdist.getNumInstances())
    if process_sets or (comm and list(comm) != list(range(count))):
        raise Error("hvd.init: communicators and process sets are not supported; all processes take part")
    _peers.join("horovod", index, count)
    local_count = _number("HOROVOD_LOCAL_SIZE", _number("OMPI_COMM_WORLD_LOCAL_SIZE", count))
    local_index = _number("HOROVOD_LOCAL_RANK", popdist.getLocalInstanceIndex())
    _places = {"rank": index, "size": count, "local_rank": local_index, "local_size": local_count}


def shutdown() -> None:
    """Leave the other processes."""
    global _places
    if _places is not None:
        _places = None
        _peers.leave("horovod")


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _places is not None


def _place(name: str) -> int:
    if _places is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _places[name]


def rank() -> int:
    """This process's index among all."""
    return _place("rank")


def size() -> int:
    """How many processes there are."""
    return _place("size")


def local_rank() -> int:
    """This process's index among those on its host."""
    return _place("local_rank")


def local_size() -> int:
    """How many processes run on this host."""
    return _place("local_size")


def _scope() -> _peers.Scope:
    size()  # raises before init
    return _peers.scope()


def barrier(process_set: Any = None) -> None:
    """Wait until every process is here."""
    scope = _scope()
    if len(scope.ranks) > 1:
        distributed.barrier(group=scope.group)


# ---- one value out of many


def _operation(average: Optional[bool], op: Optional[ReduceOp]) -> ReduceOp:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    if op is None:
        return Average
    if op not in _TORCH_OPS:
        raise ValueError(f"op must be one of hvd.Average, Sum, Min, Max and Product, got {op!r}")
    return op


def allreduce(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Tensor:
    """Return the tensor reduced over all processes, their mean unless said otherwise; the argument is left as it is.

    Half precision is summed up in float32. The mean of integers is cut to an integer.

    Args:
        tensor: of the same shape and dtype in every process.
        average: the older way to choose between the mean (True) and the sum.
        name: not used.
        compression: not used.
        op: `hvd.Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: not used.

    Raises:
        ValueError: both `average` and `op` are given, or another `op`.
    """
    operation, scope = _operation(average, op), _scope()
    low = tensor.dtype in (torch.float16, torch.bfloat16)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if low:
        result = result.float()
    if prescale_factor != 1.0:
        result = (result * prescale_factor).to(result.dtype)
    if len(scope.ranks) > 1:
        distributed.all_reduce(result, op=getattr(distributed.ReduceOp, _TORCH_OPS[operation]), group=scope.group)
        if operation == Average:
            exact = result.is_floating_point() or result.is_complex()
            result = torch.div(result, len(scope.ranks), rounding_mode=None if exact else "trunc")
    if postscale_factor != 1.0:
        result = result * postscale_factor
    return result.to(tensor.dtype)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `allreduce`, in place."""
    return _write(tensor, allreduce(tensor, *args, **kwargs))


def grouped_allreduce(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> List[Tensor]:
    """Reduce several tensors as `allreduce` does."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> List[Tensor]:
    """As `grouped_allreduce`, in place."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


# ---- every value to everybody


def allgather_object(obj: T, name: Optional[str] = None) -> List[T]:
    """Return every process's object, in the order of their ranks; objects are pickled."""
    scope = _scope()
    if len(scope.ranks) == 1:
        return [obj]
    found: List[Any] = [None] * len(scope.ranks)
    distributed.all_gather_object(found, obj, group=scope.group)
    return found


def allgather(tensor: Tensor, name: Optional[str] = None, process_set: Any = None) -> Tensor:
    """Return every process's tensor, put one after the other along dimension 0, which may differ in length.

    Raises:
        ValueError: the tensor has no dimension, or the other dimensions or the dtypes differ.
    """
    if tensor.dim() == 0:
        raise ValueError("Rank zero tried to allgather a rank-zero tensor: give it a dimension, as tensor.reshape(1)")
    parts = allgather_object(tensor.detach().cpu().clone())
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        found = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
        raise ValueError(f"allgather: tensors may differ in dimension 0 only, got {found}")
    return torch.cat(parts)


# ---- one value to everybody


def _check_root(root_rank: int, scope: _peers.Scope) -> None:
    if root_rank not in scope.ranks:
        raise ValueError(f"root_rank {root_rank} is not among the processes {list(scope.ranks)}")


def broadcast_object(obj: T, root_rank: int = 0, name: Optional[str] = None) -> T:
    """Return the object of process `root_rank`; it is pickled.

    Raises:
        ValueError: there is no such process.
    """
    scope = _scope()
    _check_root(root_rank, scope)
    if len(scope.ranks) == 1:
        return obj
    box = [obj]
    distributed.broadcast_object_list(box, src=root_rank, group=scope.group)
    return box[0]


def broadcast(tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None) -> Tensor:
    """Return the tensor of process `root_rank`; the argument is left as it is.

    Args:
        tensor: of the same shape and dtype in every process.
        root_rank: whose tensor all get.
        name: not used.
        process_set: not used.

    Raises:
        ValueError: there is no such process.
    """
    scope = _scope()
    _check_root(root_rank, scope)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if len(scope.ranks) > 1 and result.numel():
        # As bytes: gloo does not know every dtype.
        distributed.broadcast(result.reshape(-1).view(torch.uint8), src=root_rank, group=scope.group)
    return result


def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None) -> Tensor:
    """As `broadcast`, in place."""
    return _write(tensor, broadcast(tensor, root_rank))


def _write(tensor: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        tensor.copy_(value)
    return tensor


def broadcast_parameters(
    params: Union[Mapping[str, Any], Iterable[Union[Tensor, Tuple[str, Tensor]]]],
    root_rank: int,
    prefix: Optional[str] = None,
) -> None:
    """Overwrite parameters by those of process `root_rank`.

    Args:
        params: a `state_dict()`, `named_parameters()`, or a list of tensors.
        root_rank: whose values all get.
        prefix: not used.

    Raises:
        ValueError: something else, or there is no such process.
    """
    if isinstance(params, Mapping):
        tensors = [value for _, value in sorted(params.items())]
    elif isinstance(params, Iterable):
        tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; give a state_dict() or a list of parameters")
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Load the optimizer state of process `root_rank` into every other's optimizer.

    Raises:
        ValueError: there is no such process.
    """
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def DistributedOptimizer(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802 - Horovod's own name
    """Refuse.

    Raises:
        Error: always.
    """
    raise Error(
        "hvd.DistributedOptimizer has no use with PopTorch: the optimizer runs on the IPUs, which reduce the gradients "
        "over all replicas of all instances themselves. Give the optimizer as it is to poptorch.trainingModel."
    )
