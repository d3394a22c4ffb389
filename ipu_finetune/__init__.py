# SPDX-License-Identifier: Apache-2.0
"""Fine-tune Hugging Face Transformers for Graphcore IPUs, on an IPU-POD or on an emulated IPU.

Names are imported when they are first used, so that importing the package costs nothing and changes nothing.
"""

import importlib
from typing import Any, List

__version__ = "0.1.0.dev0"

_HOME = {
    "Goal": "ipu_finetune.recipe",
    "Ipu": "ipu_finetune.recipe",
    "Model": "ipu_finetune.recipe",
    "Packing": "ipu_finetune.recipe",
    "QuestionAnswering": "ipu_finetune.recipe",
    "Recipe": "ipu_finetune.recipe",
    "Training": "ipu_finetune.recipe",
    "load_recipe": "ipu_finetune._discovery",
    "finetune": "ipu_finetune.evaluation.run",
    "pipeline": "ipu_finetune.inference.pipeline",
    # optimum-graphcore's own; it can only be imported once a poptorch, real or emulated, is in force
    "IPUConfig": "optimum.graphcore",
}

__all__ = [
    "Goal",
    "IPUConfig",
    "Ipu",
    "Model",
    "Packing",
    "QuestionAnswering",
    "Recipe",
    "Training",
    "__version__",
    "emulator",
    "finetune",
    "load_recipe",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    if name == "emulator":
        return importlib.import_module("ipu_finetune.emulator")
    if name not in _HOME:
        raise AttributeError(f"module 'ipu_finetune' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> List[str]:
    return sorted(set(globals()) | set(__all__))
