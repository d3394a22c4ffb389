# SPDX-License-Identifier: Apache-2.0
"""Arguments with which a supported operator is refused.

Each rule returns what is wrong, in the words of PopTorch where it has some, or None. The limits are those noted in
`operators.json`; a rule exists where the arguments alone decide.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

__all__ = ["refuse"]

Args = Tuple[Any, ...]
Kwargs = Dict[str, Any]


def refuse(name: str, is_aten: bool, args: Args, kwargs: Kwargs) -> Optional[str]:
    """Return what is wrong with a call, or None.

    Args:
        name: the aten name without overload.
        is_aten: whether `args` are those of the aten operator; otherwise those of the public function.
        args: positional arguments.
        kwargs: arguments by name.
    """
    rule = (_ATEN if is_aten else _FUNCTIONS).get(name)
    return rule(args, kwargs) if rule is not None else None


def _get(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[position] if len(args) > position else default


# ---- recurrent layers: (input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _recurrent(kind: str, needs_biases: bool) -> Callable[[Args, Kwargs], Optional[str]]:
    def rule(args: Args, kwargs: Kwargs) -> Optional[str]:
        # A packed sequence comes as (data, batch_sizes, hx, params, ...): one more tensor in front.
        start = 3 if len(args) > 2 and not isinstance(args[2], torch.Tensor) else 4
        if needs_biases and not _get(args, kwargs, start, "has_biases", True):
            return f"{kind} without biases not supported"
        if _get(args, kwargs, start + 1, "num_layers", 1) != 1:
            return f"Only {kind} with 1 layer supported"
        if _get(args, kwargs, start + 2, "dropout", 0.0):
            return f"{kind} only supports dropout = 0.0"
        if _get(args, kwargs, start + 4, "bidirectional", False):
            return f"bidirectional {kind} not supported"
        return None

    return rule


# ---- losses


def _ctc_loss(args: Args, kwargs: Kwargs) -> Optional[str]:
    # 0 is "none" in the aten operator
    if _get(args, kwargs, 5, "reduction", "mean") in ("none", 0):
        return 'CTCLoss with reduction="none" is currently not supported'
    return None


def _class_weights(args: Args, kwargs: Kwargs) -> Optional[str]:
    if _get(args, kwargs, 2, "weight") is not None:
        return 'Parameter "weight" is unsupported for nll_loss and cross_entropy_loss'
    return None


# ---- norms


def _matrix_order(order: Any) -> Optional[str]:
    if order == "nuc":
        return "Matrix nuclear norm is not supported."
    if isinstance(order, (int, float)) and abs(order) == 2:
        return "Matrix 2-norm is not supported."
    return None


def _matrix_norm(args: Args, kwargs: Kwargs) -> Optional[str]:
    return _matrix_order(_get(args, kwargs, 1, "ord"))


def _linalg_norm(args: Args, kwargs: Kwargs) -> Optional[str]:
    value, order = _get(args, kwargs, 0, "input"), _get(args, kwargs, 1, "ord")
    dim = _get(args, kwargs, 2, "dim")
    is_matrix = value.dim() == 2 if dim is None else isinstance(dim, (tuple, list)) and len(dim) == 2
    return _matrix_order(order) if is_matrix else None


def _norm(args: Args, kwargs: Kwargs) -> Optional[str]:
    # torch.norm(x, 2) of a matrix is that of its elements, which is supported
    return _matrix_order("nuc") if _get(args, kwargs, 1, "p") == "nuc" else None


# ---- the rest


def _topk(args: Args, kwargs: Kwargs) -> Optional[str]:
    return None if _get(args, kwargs, 4, "sorted", True) else "topk with sorted=False is not supported"


def _one_hot(args: Args, kwargs: Kwargs) -> Optional[str]:
    if _get(args, kwargs, 1, "num_classes", -1) == -1:
        return "OneHot num classes must be specified and must be constant."
    return None


def _bincount(args: Args, kwargs: Kwargs) -> Optional[str]:
    if _get(args, kwargs, 2, "minlength", 0) <= 0:
        return "Bincount `minlength` must be specified and must be a constant; it is also the maximum length"
    return None


def _embedding(scale: int, sparse: int) -> Callable[[Args, Kwargs], Optional[str]]:
    def rule(args: Args, kwargs: Kwargs) -> Optional[str]:
        if _get(args, kwargs, scale, "scale_grad_by_freq", False) or _get(args, kwargs, sparse, "sparse", False):
            return "Unsupported aten::embedding operation: scale_grad_by_freq and sparse must be False"
        return None

    return rule


def _embedding_bag(args: Args, kwargs: Kwargs) -> Optional[str]:
    padding = _get(args, kwargs, 8, "padding_idx")
    if padding is not None and padding >= 0:
        return "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported."
    return _embedding(3, 5)(args, kwargs)


def _bicubic(args: Args, kwargs: Kwargs) -> Optional[str]:
    return "Only support align_corners=False." if _get(args, kwargs, 2, "align_corners", False) else None


def _bitwise(args: Args, kwargs: Kwargs) -> Optional[str]:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if tensors and all(tensor.dtype in (torch.uint8, torch.int8) for tensor in tensors):
        return "Poplar does not support binary operations on 8-bit integral types."
    return None


def _has_mask(indices: Any) -> bool:
    items: List[Any] = list(indices) if isinstance(indices, (list, tuple)) else [indices]
    return any(isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in items)


def _index(args: Args, kwargs: Kwargs) -> Optional[str]:
    if _has_mask(_get(args, kwargs, 1, "indices")):
        return (
            "Operations using aten::nonzero are unsupported because the output shape is determined by the tensor "
            "values: a boolean index selects as many elements as it has True values"
        )
    return None


def _where(args: Args, kwargs: Kwargs) -> Optional[str]:
    if len(args) + len(kwargs) == 1:
        return "Operations using aten::nonzero are unsupported because the output shape is determined by the values"
    return None


def _repeat_interleave(args: Args, kwargs: Kwargs) -> Optional[str]:
    repeats = _get(args, kwargs, 1, "repeats")
    if isinstance(repeats, torch.Tensor) or repeats is None:
        return "the number of repeats is the value of a tensor, so the shape depends on it"
    return None


_RECURRENT = {
    "lstm": _recurrent("LSTM", True),
    "gru": _recurrent("GRU", False),
    "rnn_tanh": _recurrent("RNN", True),
    "rnn_relu": _recurrent("RNN", True),
}

_BOTH = {
    **_RECURRENT,
    "linalg_matrix_norm": _matrix_norm,
    "linalg_norm": _linalg_norm,
    "norm": _norm,
    "topk": _topk,
    "one_hot": _one_hot,
    "bincount": _bincount,
    "embedding_bag": _embedding_bag,
    "bitwise_and": _bitwise,
    "bitwise_or": _bitwise,
    "bitwise_xor": _bitwise,
    "bitwise_not": _bitwise,
}

_ATEN: Dict[str, Callable[[Args, Kwargs], Optional[str]]] = {
    **_BOTH,
    "nll_loss_forward": _class_weights,
    "nll_loss2d_forward": _class_weights,
    "embedding": _embedding(3, 4),
    "_embedding_bag": _embedding_bag,
    "upsample_bicubic2d": _bicubic,
    "index": _index,
}

_FUNCTIONS: Dict[str, Callable[[Args, Kwargs], Optional[str]]] = {
    **_BOTH,
    "ctc_loss": _ctc_loss,
    "nll_loss": _class_weights,
    "cross_entropy": _class_weights,
    "embedding": _embedding(5, 6),
    "__getitem__": _index,
    "where": _where,
    "repeat_interleave": _repeat_interleave,
}
