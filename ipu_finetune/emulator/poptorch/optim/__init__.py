# SPDX-License-Identifier: Apache-2.0
"""The optimizers that run on an IPU: PyTorch's settings plus loss scaling, clipping and accumulator types."""

from ._adam import LAMB, Adam, AdamW
from ._attributes import VariableAttributes
from ._base import Optimizer
from ._sgd import SGD, RMSprop

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]
