# SPDX-License-Identifier: Apache-2.0
"""The schedule is Transformers' own, value by value."""

import pytest
import torch
import transformers

from ipu_finetune.training.schedule import learning_rate_schedule


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("updates", "ratio"), [(20, 0.1), (37, 0.25), (5, 0.0)])
def test_the_rates_are_those_of_transformers(name, updates, ratio):
    import math

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = transformers.get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, math.ceil(updates * ratio), updates
    )
    ours = learning_rate_schedule(name, 3e-4, updates, ratio)
    for update in range(updates):
        assert ours(update) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
