# SPDX-License-Identifier: Apache-2.0
"""Every error of ipu-finetune, as one tree.

```
IpuFinetuneError           exit 1   a failure that the message explains
├── DataError              exit 1   a file, a column, an answer or a data set that cannot be used
├── CheckpointError        exit 1   a checkpoint or an output folder that cannot be used
├── NonFiniteLossError     exit 1   the loss stopped being a number
├── UsageError             exit 2   wrong usage
│   └── RecipeError        exit 2   a recipe or an IPU config that is not valid; holds every problem found
├── DoesNotFitError        exit 3   the job does not fit the IPUs it asks for
├── TargetUnavailableError exit 4   the requested target is not on this machine
└── Interrupted            exit 130 stopped by the user, with a checkpoint left behind
```

Each message gives the value, the rule that it breaks and the fix.
"""

import difflib
from typing import Iterable, List, Sequence

__all__ = [
    "CheckpointError",
    "DataError",
    "DoesNotFitError",
    "Interrupted",
    "IpuFinetuneError",
    "NonFiniteLossError",
    "RecipeError",
    "TargetUnavailableError",
    "UsageError",
    "did_you_mean",
]


class IpuFinetuneError(Exception):
    """A failure whose message is all that the user needs; the root of the tree."""

    exit_code = 1


class DataError(IpuFinetuneError):
    """A data file, column, answer or data set that cannot be used as it is."""


class CheckpointError(IpuFinetuneError):
    """A checkpoint or an output folder that cannot be read, written or trusted."""


class NonFiniteLossError(IpuFinetuneError):
    """The training loss became NaN or infinite and stayed so."""


class UsageError(IpuFinetuneError):
    """The command or call was wrong; nothing was started."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or IPU config that is not valid.

    Attributes:
        problems: one sentence per problem, all of those that were found.
    """

    def __init__(self, problems: Sequence[str], where: str = "recipe") -> None:
        self.problems: List[str] = list(problems)
        if len(self.problems) == 1:
            message = f"{where}: {self.problems[0]}"
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            message = f"{where}: {len(self.problems)} problems\n{lines}"
        super().__init__(message)


class DoesNotFitError(IpuFinetuneError):
    """The model, layout or pod do not go together in memory or number of IPUs."""

    exit_code = 3


class TargetUnavailableError(IpuFinetuneError):
    """The target that was named is not available here; nothing else was chosen instead."""

    exit_code = 4


class Interrupted(IpuFinetuneError):  # noqa: N818 - an outcome that the user asked for, not a fault
    """Stopped by the user; the message says where the checkpoint lies."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x' or 'y'?)`` for the known names nearest to `name`, else what is known."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return " (did you mean " + " or ".join(f"'{match}'" for match in near) + "?)"
    return f" (known: {', '.join(names)})" if names else ""
