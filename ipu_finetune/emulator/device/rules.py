# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one weight update, per optimizer, on one parameter.

Each rule changes the parameter and its state in place. Where PyTorch has the optimizer the operations follow its order,
so that fp32 results agree to rounding with a plain PyTorch loop.
"""

import functools
import math
from typing import Any, Callable, Container, Dict, List, Set, Tuple

import torch

__all__ = ["BIASED", "RULES", "SLOTS", "State", "slots_of"]

Tensor = torch.Tensor
Hyper = Dict[str, Any]


class State(Dict[str, Tensor]):
    """The optimizer state of one parameter: tensors by slot name, and the number of updates it has had.

    Attributes:
        step: updates so far.
        blank: slots that hold what they were allocated with: no update has written them and nothing was loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.blank: Set[str] = set()

    def zeros(self, slot: str, like: Tensor) -> Tensor:
        """Return a slot's tensor, starting from zeros."""
        if slot not in self:
            self[slot] = torch.zeros_like(like)
        self.blank.discard(slot)
        return self[slot]


_LATE = 1e8


def sgd(p: Tensor, g: Tensor, state: State, h: Hyper) -> None:
    """Gradient descent with momentum, as torch.optim.SGD."""
    if h["weight_decay"]:
        g = g.add_(p, alpha=h["weight_decay"])
    momentum = h["momentum"]
    if momentum:
        if "Accl1" not in state or "Accl1" in state.blank:
            # As in PyTorch, the first gradient enters the velocity without dampening.
            state.zeros("Accl1", g).copy_(g)
        else:
            state["Accl1"].mul_(momentum).add_(g, alpha=1 - h["dampening"])
        g = g.add_(state["Accl1"], alpha=momentum) if h["nesterov"] else state["Accl1"]
    p.add_(g, alpha=-h["lr"])


def _moments(g: Tensor, state: State, h: Hyper) -> Tuple[Tensor, Tensor, float, float]:
    beta1, beta2 = h["betas"]
    first, second = state.zeros("Accl1", g), state.zeros("Accl2", g)
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if h.get("bias_correction", True):
        return first, second, 1 - beta1**state.step, 1 - beta2**state.step
    return first, second, 1.0, 1.0


@functools.lru_cache(maxsize=None)
def _fused_on_cpu() -> bool:
    """Whether PyTorch has its one-pass Adam for the CPU (2.4 and newer), found out by using it."""
    p, g, m, v = (torch.ones(1) for _ in range(4))
    try:
        _fused(p, g, m, v, 1.0, {"lr": 0.5, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}, decoupled=True)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return p.item() == 0.5


def _fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: float, h: Hyper, decoupled: bool) -> None:
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        [p],
        [g],
        [m],
        [v],
        [],
        [torch.tensor(step)],
        lr=h["lr"],
        beta1=h["betas"][0],
        beta2=h["betas"][1],
        weight_decay=h["weight_decay"],
        eps=h["eps"],
        amsgrad=False,
        maximize=False,
    )


def _adam(p: Tensor, g: Tensor, state: State, h: Hyper, decoupled: bool) -> None:
    if p.dtype == torch.float32 and p.is_contiguous() and g.is_contiguous() and _fused_on_cpu():
        # Without bias correction: the correction of a step so late that it is one.
        step = float(state.step) if h.get("bias_correction", True) else _LATE
        _fused(p, g, state.zeros("Accl1", p), state.zeros("Accl2", p), step, h, decoupled)
        return
    if h["weight_decay"]:
        if decoupled:
            p.mul_(1 - h["lr"] * h["weight_decay"])
        else:
            g = g.add_(p, alpha=h["weight_decay"])
    first, second, correct1, correct2 = _moments(g, state, h)
    denominator = second.sqrt().div_(_root(correct2)).add_(h["eps"])
    p.addcdiv_(first, denominator, value=-h["lr"] / correct1)


def _root(number: float) -> float:
    # As a device would: a decay outside [0, 1) gives NaN, not an exception.
    return math.sqrt(number) if number >= 0 else math.nan


def adam(p: Tensor, g: Tensor, state: State, h: Hyper) -> None:
    """Adam; weight decay is added to the gradient."""
    _adam(p, g, state, h, decoupled=False)


def adamw(p: Tensor, g: Tensor, state: State, h: Hyper) -> None:
    """AdamW; weight decay shrinks the weight itself. Bias correction can be off."""
    _adam(p, g, state, h, decoupled=True)


def rmsprop(p: Tensor, g: Tensor, state: State, h: Hyper) -> None:
    """RMSprop as in torch, or TensorFlow's variant: epsilon in the root, accumulator from one, lr in the momentum."""
    variant = h.get("use_tf_variant", False)
    if h["weight_decay"]:
        g = g.add_(p, alpha=h["weight_decay"])
    if variant and ("Accl1" not in state or "Accl1" in state.blank):
        state.zeros("Accl1", g).fill_(1.0)
    square = state.zeros("Accl1", g).mul_(h["alpha"]).addcmul_(g, g, value=1 - h["alpha"])
    if h["centered"]:
        mean = state.zeros("Accl2", g)
        mean.lerp_(g, 1 - h["alpha"])
        square = square.addcmul(mean, mean, value=-1)
    average = square.add(h["eps"]).sqrt_() if variant else square.sqrt().add_(h["eps"])
    if not h["momentum"]:
        p.addcdiv_(g, average, value=-h["lr"])
        return
    buffer = state.zeros("Accl3", g).mul_(h["momentum"])
    if variant:
        p.sub_(buffer.addcdiv_(g, average, value=h["lr"]))
    else:
        p.add_(buffer.addcdiv_(g, average), alpha=-h["lr"])


def lamb(p: Tensor, g: Tensor, state: State, h: Hyper) -> None:
    """LAMB (You et al., 2019): Adam's direction scaled by min(weight norm, limit) / direction norm."""
    first, second, correct1, correct2 = _moments(g, state, h)
    direction = second.div(correct2).sqrt_().add_(h["eps"])
    torch.div(first, direction, out=direction).div_(correct1)
    if h["weight_decay"]:
        direction.add_(p, alpha=h["weight_decay"])
    limit = h.get("max_weight_norm")
    weight_norm = min(float(p.norm()), 65500.0 if limit is None else float(limit))
    direction_norm = float(direction.norm())
    ratio = weight_norm / direction_norm if weight_norm > 0 and direction_norm > 0 else 1.0
    p.add_(direction, alpha=-h["lr"] * ratio)


RULES: Dict[str, Callable[[Tensor, Tensor, State, Hyper], None]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "lamb": lamb,
}

#: state slot -> whose accumulator type it is stored in, per rule. For RMSprop they are, in this order, the mean square,
#: the mean gradient and the velocity: PopART counts its accumulators, it does not name them.
SLOTS: Dict[str, Dict[str, str]] = {
    "sgd": {"Accl1": "first"},
    "adam": {"Accl1": "first", "Accl2": "second"},
    "adamw": {"Accl1": "first", "Accl2": "second"},
    "rmsprop": {"Accl1": "first", "Accl2": "second", "Accl3": "third"},
    "lamb": {"Accl1": "first", "Accl2": "second"},
}

#: rules that count their updates
BIASED = ("adam", "adamw", "lamb")


def slots_of(rule: str, groups: List[Hyper], constants: Container[str]) -> List[str]:
    """Return the slots that a compiled optimizer needs: momentum that is the constant 0 has no velocity.

    Args:
        rule: a key of `RULES`.
        groups: settings of every parameter group.
        constants: names of the settings that cannot change.
    """
    if rule in BIASED:
        return ["Accl1", "Accl2"]
    velocity = "momentum" not in constants or any(group["momentum"] for group in groups)
    if rule == "sgd":
        return ["Accl1"] if velocity else []
    centered = ["Accl2"] if any(group["centered"] for group in groups) else []
    return ["Accl1", *centered, *(["Accl3"] if velocity else [])]
