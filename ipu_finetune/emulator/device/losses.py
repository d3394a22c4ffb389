# SPDX-License-Identifier: Apache-2.0
"""Which tensor the backward pass starts from.

The loss is the result of `identity_loss` or of one of PyTorch's loss functions; one that feeds another is not final.
While a model is traced every candidate is recorded and the final one found by walking the autograd graph.
"""

from typing import Any, List, Sequence, Set

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .casting import cast_parameters
from .errors import Error
from .refusals import review_function
from .state import current

__all__ = ["FunctionWatch", "final_loss"]

_EXTRA = {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "nll_loss2d"}


def _is_loss_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if not (name.endswith("_loss") or name in _EXTRA):
        return False
    module = getattr(function, "__module__", None) or ""
    return module.startswith("torch") or type(function).__name__ == "builtin_function_or_method"


def _names_ipu(value: Any) -> bool:
    """Whether an argument is the device "ipu", on which a traced model's tensors already are."""
    return isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "ipu"


class FunctionWatch(TorchFunctionMode):
    """Follows the PyTorch functions that user code calls while it is traced.

    Results of loss functions are candidates for the final loss; the recorder is told which function is running, for its
    messages; functions that would take values out of the graph are answered with those of the first micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.candidates: List[torch.Tensor] = []
        self._marked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = current.recorder
        if recorder is not None:
            name = getattr(func, "__name__", str(func))
            recorder.function = name if "Tensor" not in getattr(func, "__qualname__", "") else f"Tensor.{name}"
            if name in ("numpy", "tolist", "__array__") and args and isinstance(args[0], torch.Tensor):
                value = recorder.take_out(args[0], recorder.function)
                with _disable_current_modes():
                    return getattr(value, name)(*args[1:], **(kwargs or {}))
            # torch.device("ipu") itself passes through here, too.
            if func is not torch.device and any(_names_ipu(each) for each in (*args, *(kwargs or {}).values())):
                args, kwargs = tree_map(lambda each: "cpu" if _names_ipu(each) else each, (args, kwargs or {}))
                if name == "to":
                    return recorder.bring(args[0])
            args = cast_parameters(name, args)
            if name == "ctc_loss":
                # The mean over lengths that are Python numbers is computed outside of PyTorch's dispatcher.
                args = tuple(torch.tensor(item) if isinstance(item, (list, tuple)) else item for item in args)
            review_function(recorder, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and _is_loss_function(func):
            self._take_marked()
            self.candidates.append(result)
        return result

    def _take_marked(self) -> None:
        marked = current.marked_losses
        self.candidates += marked[self._marked :]
        self._marked = len(marked)

    def finish(self) -> List[torch.Tensor]:
        """Return every candidate in the order in which they were made."""
        self._take_marked()
        return self.candidates


def _feeds(target: Any, sources: Sequence[Any]) -> Set[int]:
    """Return the indices of the autograd nodes among `sources` that lie below `target`."""
    wanted = {id(node): index for index, node in enumerate(sources)}
    found: Set[int] = set()
    seen: Set[int] = set()
    queue = [node for node, _ in target.next_functions if node is not None]
    keep = []  # nodes are kept alive so that their ids stay unique during the walk
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        if id(node) in wanted:
            found.add(wanted[id(node)])
        queue += [following for following, _ in node.next_functions if following is not None]
    return found


def final_loss(candidates: Sequence[torch.Tensor]) -> int:
    """Return the index of the one candidate that no other candidate depends on.

    Raises:
        Error: there is none, or there are several.
    """
    if not candidates:
        raise Error(
            "Couldn't find a loss in graph! A training model must compute its loss inside forward(), with a PyTorch "
            "loss or with poptorch.identity_loss."
        )
    live = [index for index, tensor in enumerate(candidates) if tensor.grad_fn is not None]
    if not live:
        return len(candidates) - 1
    nodes = [candidates[index].grad_fn for index in live]
    inner: Set[int] = set()
    for position, node in enumerate(nodes):
        inner |= {other for other in _feeds(node, nodes) if other != position}
    final: List[int] = []
    for position, index in enumerate(live):
        # The same node twice is one loss that was recorded under two names.
        if position not in inner and all(nodes[position] is not candidates[done].grad_fn for done in final):
            final.append(index)
    if len(final) > 1:
        raise Error(
            "Multiple independent losses found in graph. Graph must have one final loss. "
            "Wrap final graph loss in poptorch.identity_loss."
        )
    return final[0]
