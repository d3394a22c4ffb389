# SPDX-License-Identifier: Apache-2.0
"""The weights of one compiled model on the device.

While a model is traced the user's own `Parameter` objects take part, so that closures and tied weights are found by
identity; replays work on the device's tensors. Host memory is written only when weights are copied back. Device tensors
belong to names, as in a compiled graph: a layer that is rebuilt after compilation receives the values of the layer that
had its name.
"""

import logging
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn

from . import wrappers
from .errors import Error
from .replica_weights import ReplicaGrouping

__all__ = ["Weight", "WeightStore"]

_logger = logging.getLogger("ipu_finetune.emulator")


class Weight:
    """One parameter or buffer.

    Attributes:
        name: its first name in the module.
        tensor: the user's object at the time of compilation.
        shape, dtype, requires_grad: what it had then.
        device: the value on the IPU, or None while detached.
        per_replica: for a buffer that the model changes with more than one replica: the value on each; for a parameter
            with a grouping: what each replica sees of the device's tensor.
        grouping: how the parameter differs between replicas, or None.
    """

    __slots__ = (
        "device",
        "dtype",
        "grouping",
        "is_parameter",
        "name",
        "per_replica",
        "requires_grad",
        "shape",
        "tensor",
    )

    def __init__(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.is_parameter = is_parameter
        # Kept apart: looking at the user's tensor while a call is under way would fetch half-done values.
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.device: Optional[torch.Tensor] = None
        self.per_replica: Optional[List[torch.Tensor]] = None
        self.grouping: Optional[ReplicaGrouping] = None


def _find(root: nn.Module, name: str) -> Optional[torch.Tensor]:
    """Return the parameter or buffer that has this name today; looks at nothing that would fetch weights."""
    *path, leaf = name.split(".")
    module: Any = root
    for part in path:
        module = module.__dict__["_modules"].get(part)
        if module is None:
            return None
    found = module.__dict__["_parameters"].get(leaf)
    return found if found is not None else module.__dict__["_buffers"].get(leaf)


class WeightStore:
    """All parameters and buffers of a model; tied ones are held once."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.weights: List[Weight] = []
        seen = set()
        for is_parameter, found in ((True, root.named_parameters()), (False, root.named_buffers())):
            for name, tensor in found:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self.weights.append(Weight(name, tensor, is_parameter))
        self._by_name = {weight.name: weight for weight in self.weights}
        self._warned_lost = False
        self._replicas = 1

    # ---- looking things up

    def parameters(self) -> Iterable[Weight]:
        """The weights that a gradient may reach."""
        return (weight for weight in self.weights if weight.is_parameter)

    def buffers(self) -> Iterable[Weight]:
        """The tensors that are state but not trained."""
        return (weight for weight in self.weights if not weight.is_parameter)

    def get(self, name: str) -> Optional[Weight]:
        """Return the weight with this name."""
        return self._by_name.get(name)

    def today(self, weight: Weight) -> Optional[torch.Tensor]:
        """Return the tensor that has the weight's name in the module as it is now, if its shape is still the same."""
        tensor = _find(self._root, weight.name)
        return tensor if tensor is not None and tensor.shape == weight.tensor.shape else None

    def tensors(self) -> List[torch.Tensor]:
        """Every user tensor that belongs to the model: those compiled and those that took their names since."""
        found = {id(weight.tensor): weight.tensor for weight in self.weights}
        for weight in self.weights:
            tensor = self.today(weight)
            if tensor is not None:
                found[id(tensor)] = tensor
        return list(found.values())

    # ---- copies

    @property
    def on_device(self) -> bool:
        """Whether the device holds values."""
        return all(weight.device is not None for weight in self.weights)

    def upload(self, keep: Callable[[Weight], bool] = lambda _: True) -> None:
        """Copy host values to the device, for the weights that `keep` selects."""
        # What lives on the device is changed by later calls, which need not be in the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad(), self._plain():
            for weight in filter(keep, self.weights):
                source = self.today(weight)
                values = (weight.tensor if source is None else source).data
                if weight.device is None or weight.device.dtype != values.dtype:
                    weight.device = values.clone()
                else:
                    weight.device.copy_(values)
                if weight.grouping is not None:
                    weight.per_replica = weight.grouping.views(weight.device, self._replicas)
                    continue
                for replica in weight.per_replica or ():
                    replica.copy_(values)

    def download(self) -> None:
        """Copy device values into the host's tensors."""
        lost = []
        with torch.no_grad(), self._plain():
            for weight in self.weights:
                values = weight.per_replica[0] if weight.per_replica and weight.grouping is None else weight.device
                if values is None:
                    continue
                target = self.today(weight)
                if target is None:
                    lost.append(weight.name)
                for host in {id(tensor): tensor for tensor in (target, weight.tensor) if tensor is not None}.values():
                    # Only in that mode may a tensor be changed that was made in it.
                    with torch.inference_mode(host.is_inference()):
                        host.data.copy_(values)
        if lost and not self._warned_lost:
            self._warned_lost = True
            _logger.warning(
                "%d weights that were compiled have no place in the module as it is now and were not copied into it: "
                "%s. Put the model back into the layout in which it was compiled before reading its weights.",
                len(lost),
                ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else ""),
            )

    def upload_named(self, names: Iterable[str]) -> None:
        """Copy only the buffers with these names to the device."""
        wanted = set(names)
        self.upload(lambda weight: weight.name in wanted)

    def release(self) -> None:
        """Free the device's memory; the host must have been given the values before."""
        for weight in self.weights:
            weight.device = None
            if weight.grouping is not None:
                weight.per_replica = None
            elif weight.per_replica:
                with torch.inference_mode(False):
                    weight.per_replica = [torch.empty_like(values) for values in weight.per_replica]

    def group(self, groupings: Iterable[Tuple[str, ReplicaGrouping]], replicas: int) -> List[Weight]:
        """Let parameters differ between replicas; before the first upload. Return them."""
        self._replicas = replicas
        grouped = []
        for name, grouping in groupings:
            weight = self._by_name.get(name)
            if weight is None or not weight.is_parameter:
                raise Error(f"replicaGrouping: the model has no parameter '{name}'")
            grouping.check(name, weight.shape, replicas)
            weight.grouping = grouping
            grouped.append(weight)
        return grouped

    def replicate_buffers(self, names: Iterable[str], replicas: int) -> None:
        """Give each replica its own copy of these buffers."""
        for name in names:
            weight = self._by_name[name]
            assert weight.device is not None
            with torch.inference_mode(False):
                weight.per_replica = [weight.device.clone() for _ in range(replicas)]

    def _plain(self) -> Any:
        return wrappers.all_plain(self.tensors())

    # ---- what the traced pass did to the module

    def check_assignments(self) -> None:
        """Raise if the traced forward pass replaced or removed a buffer instead of writing into it."""
        exempt = self.batch_norm_names()
        for weight in self.buffers():
            if weight.name in exempt:
                continue
            now = _find(self._root, weight.name)
            if now is None:
                raise Error(f"Buffer {weight.name} is removed from the model when calling the forward method.")
            if now is not weight.tensor:
                raise Error(
                    f"Buffer {weight.name} is reassigned within the model when calling the forward method. This is "
                    f"not supported. Consider using self.{weight.name}.copy_(src) to copy data from a source tensor, "
                    "where src is the name of the source tensor."
                )
        for weight in self.parameters():
            now = _find(self._root, weight.name)
            if now is not weight.tensor:
                what = "removed from" if now is None else "reassigned within"
                raise Error(
                    f"Parameter {weight.name} is {what} the model when calling the forward method. This is not "
                    "supported: change its values in place, or keep the new value in another attribute."
                )

    def batch_norm_names(self) -> Dict[str, None]:
        """Names of the buffers that belong to batch norms."""
        names: Dict[str, None] = {}
        for prefix, module in self._root.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for name in module.__dict__["_buffers"]:
                    names[f"{prefix}.{name}" if prefix else name] = None
        return names
