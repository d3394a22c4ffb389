# SPDX-License-Identifier: Apache-2.0
"""Parameters, buffers and models whose true values lie on the device.

Between calls of a training model the user's own parameter objects carry a class that fetches the newest values from the
device the moment that somebody looks at them. During a call they are ordinary parameters again, so nothing is paid per
operation.
"""

import contextlib
import copy
import copyreg
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Type

import torch
from torch import nn

__all__ = [
    "PoptorchBuffer",
    "PoptorchParameter",
    "all_plain",
    "is_wrapped",
    "owner_of",
    "plain",
    "plain_class_of",
    "unwrap",
    "unwrap_model",
    "wrap",
    "wrap_model",
]

# id(tensor or model) -> the executor that owns the newest values. Entries go when the executor lets go of them.
_owners: Dict[int, "weakref.ReferenceType[Any]"] = {}

_QUIET = frozenset(("__class__", "__dict__", "__torch_function__", "__weakref__", "_is_param"))


def owner_of(thing: Any) -> Optional[Any]:
    """Return the executor whose device holds this tensor's or model's values, if there is one."""
    reference = _owners.get(id(thing))
    return reference() if reference is not None else None


def _refresh(thing: Any) -> None:
    owner = owner_of(thing)
    if owner is not None:
        owner.copyWeightsToHostIfNeeded()


def _refresh_all(values: Any) -> None:
    for value in values:
        if isinstance(value, _OnDevice):
            _refresh(value)
        elif isinstance(value, (list, tuple)):
            _refresh_all(value)


class _OnDevice:
    """What the two tensor classes have in common."""

    def __getattribute__(self, name: str) -> Any:
        if name not in _QUIET:
            _refresh(self)
        return super().__getattribute__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as the plain tensor that it is, so that it loads where there is no poptorch.
        _refresh(self)
        with all_plain([self]):  # type: ignore[list-item]
            return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refresh_all(args)
        if kwargs:
            _refresh_all(kwargs.values())
        with _no_subclass():
            return func(*args, **(kwargs or {}))


def _no_subclass() -> Any:
    disable = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction
    return disable()


class PoptorchParameter(_OnDevice, nn.Parameter):
    """A parameter whose newest value may still be on the device."""


class PoptorchBuffer(_OnDevice, torch.Tensor):
    """A buffer whose newest value may still be on the device."""


_lazy_classes: Dict[type, type] = {nn.Parameter: PoptorchParameter, torch.Tensor: PoptorchBuffer}
_plain_classes: Dict[type, type] = {PoptorchParameter: nn.Parameter, PoptorchBuffer: torch.Tensor}


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor has one of the classes of this module."""
    return type(tensor) in _plain_classes


def wrap(tensor: torch.Tensor, owner: Any) -> None:
    """Make the tensor ask `owner` for its newest value when it is looked at."""
    kind = type(tensor)
    if kind not in _plain_classes:
        if kind not in _lazy_classes:
            lazy = type("Poptorch" + kind.__name__, (_OnDevice, kind), {"__doc__": kind.__doc__})
            _lazy_classes[kind], _plain_classes[lazy] = lazy, kind
        tensor.__class__ = _lazy_classes[kind]
    _owners[id(tensor)] = weakref.ref(owner)


def plain(tensor: torch.Tensor) -> None:
    """Give the tensor its own class back; its value is whatever was fetched last."""
    kind = _plain_classes.get(type(tensor))
    if kind is not None:
        tensor.__class__ = kind


def unwrap(tensor: torch.Tensor, owner: Any) -> None:
    """Undo `wrap`, unless another executor has become the owner."""
    if owner_of(tensor) in (owner, None):
        _owners.pop(id(tensor), None)
        plain(tensor)


@contextlib.contextmanager
def all_plain(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block, the tensors have their own classes."""
    wrapped: List[Tuple[torch.Tensor, Type[torch.Tensor]]] = [
        (tensor, type(tensor)) for tensor in tensors if type(tensor) in _plain_classes
    ]
    for tensor, kind in wrapped:
        tensor.__class__ = _plain_classes[kind]
    try:
        yield
    finally:
        for tensor, kind in wrapped:
            tensor.__class__ = kind


# ---- models

_WATCHED = frozenset(("_parameters", "_buffers", "forward", "state_dict"))


def _make_model_class(kind: Any, owner: Any) -> type:
    """Return `Poptorch<Name>`, whose only base is the user's class: optimum-graphcore reads the name from there.

    The class keeps the executor alive: a model whose executor nobody holds must still be able to fetch its weights.
    """

    class OnDeviceModel(kind):
        _poptorch_plain_class = kind
        _poptorch_executor = owner

        def __getattribute__(self, name: str) -> Any:
            if name in _WATCHED:
                _refresh(self)
            return kind.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            # PopTorch gives a wrapped module this method; one of the user's own comes first.
            if name == "destroy":
                return owner.destroy
            return super().__getattr__(name)

        def __copy__(self) -> Any:
            clone = type(self).__new__(type(self))
            clone.__dict__.update(self.__dict__)
            return clone

        def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
            _refresh(self)
            clone = type(self).__new__(type(self))
            memo[id(self)] = clone
            clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return clone

        def __reduce_ex__(self, protocol: Any) -> Any:
            # A pickled model must load where there is no poptorch, so it is stored under the user's class.
            _refresh(self)
            reduced = kind.__reduce_ex__(self, protocol)
            return (copyreg._reconstructor, (kind, object, None), *reduced[2:])  # type: ignore[attr-defined]

    OnDeviceModel.__name__ = OnDeviceModel.__qualname__ = f"Poptorch{kind.__name__}"
    OnDeviceModel.__module__ = kind.__module__
    OnDeviceModel.__doc__ = kind.__doc__
    return OnDeviceModel


def plain_class_of(kind: type) -> type:
    """Return the user's class behind a wrapped model class, or the class itself."""
    return kind.__dict__.get("_poptorch_plain_class", kind)


def wrap_model(model: nn.Module, owner: Any) -> None:
    """Turn the model's class into `Poptorch<Name>` and let it fetch weights from `owner`."""
    kind = type(model)
    if plain_class_of(kind) is kind:
        model.__class__ = _make_model_class(kind, owner)
    _owners[id(model)] = weakref.ref(owner)


def unwrap_model(model: nn.Module, owner: Any) -> None:
    """Undo `wrap_model`."""
    if owner_of(model) in (owner, None):
        _owners.pop(id(model), None)
        model.__class__ = plain_class_of(type(model))
