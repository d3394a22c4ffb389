# SPDX-License-Identifier: Apache-2.0
"""The order of the data and the weight of its elements, by hand."""

import numpy as np
import torch

from ipu_finetune.batching import BatchPlan
from ipu_finetune.training.order import FILLER, epoch_order, host_batches, loss_weights, read_batch


def test_every_epoch_reads_every_row_once_in_an_order_of_its_own():
    first, second = epoch_order(50, 7, 0), epoch_order(50, 7, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert list(first) != list(second)
    assert list(first) == list(epoch_order(50, 7, 0))
    assert list(first) != list(epoch_order(50, 8, 0))


def test_an_epoch_entered_in_the_middle_reads_what_the_whole_one_does():
    plan = BatchPlan(rows=23, micro_batch_size=2, gradient_accumulation=2)
    whole = list(host_batches(plan, 3, 1))
    rest = list(host_batches(plan, 3, 1, first=2))
    assert len(whole) == 5
    assert all((a == b).all() for a, b in zip(whole[2:], rest))
    assert len(rest) == 3


def test_a_short_last_batch_is_filled_with_rows_that_have_no_weight():
    plan = BatchPlan(rows=11, micro_batch_size=4, drop_last=False)
    batches = list(host_batches(plan, 0, 0))
    assert [int((rows == FILLER).sum()) for rows in batches] == [0, 0, 1]
    assert sorted(row for rows in batches for row in rows if row != FILLER) == list(range(11))
    batch, weights = read_batch({"x": np.arange(11) * 10}, batches[-1], plan)
    assert batch["x"].tolist()[:3] == [row * 10 for row in batches[-1][:3]]
    assert torch.allclose(weights, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))


def test_u07_a_window_is_averaged_over_its_tokens_not_over_its_micro_batches():
    # 1 token with loss 2.0 and 9 tokens with loss 1.0: their mean is 1.1; the mean of the micro-batches' means is 1.5.
    losses = torch.tensor([[2.0] + [9.0] * 8, [1.0] * 9])
    valid = torch.tensor([[True] + [False] * 8, [True] * 9])
    plan = BatchPlan(rows=2, micro_batch_size=1, gradient_accumulation=2)
    weights = loss_weights(valid, plan)
    micro_losses = (losses * weights).sum(dim=1)
    assert torch.isclose(micro_losses.mean(), torch.tensor(1.1))


def test_each_update_of_a_host_call_is_averaged_by_itself():
    plan = BatchPlan(rows=8, micro_batch_size=2, gradient_accumulation=2, device_iterations=2)
    valid = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    weights = loss_weights(valid, plan)
    assert torch.allclose(weights, torch.tensor([2 / 3, 2 / 3, 2 / 3, 0, 2.0, 0, 0, 0]))


def test_an_update_without_any_valid_element_has_no_weight_and_no_nan():
    plan = BatchPlan(rows=4, micro_batch_size=2, device_iterations=2)
    weights = loss_weights(torch.tensor([True, True, False, False]), plan)
    assert weights.tolist() == [0.5, 0.5, 0.0, 0.0]
