# SPDX-License-Identifier: Apache-2.0
"""Tasks: from a data set to features, from a model's outputs to answers and metrics.

A task is chosen by the class of a recipe's `task` settings. Its module is imported when it is asked for, so that
this package imports neither torch nor transformers.
"""

import importlib
from typing import Any, Dict, Tuple

from ipu_finetune.errors import UsageError, did_you_mean

__all__ = ["create"]

# settings class -> (module, task class)
_TASKS: Dict[str, Tuple[str, str]] = {
    "QuestionAnswering": ("ipu_finetune.tasks.question_answering", "QuestionAnsweringTask"),
}


def create(settings: Any, tokenizer: Any) -> Any:
    """Return the task that the recipe's task settings ask for.

    Args:
        settings: the `task` part of a recipe, such as `QuestionAnswering(dataset="squad")`.
        tokenizer: the fast tokenizer of the recipe's model.

    Raises:
        UsageError: no task goes with this class of settings.
    """
    name = type(settings).__name__
    if name not in _TASKS:
        raise UsageError(f"task settings of class '{name}' belong to no task{did_you_mean(name, _TASKS)}")
    module, task = _TASKS[name]
    return getattr(importlib.import_module(module), task)(settings, tokenizer)
