# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: the published user cases, by hand."""

import pytest

from ipu_finetune.batching import BatchPlan, gradient_accumulation
from ipu_finetune.errors import DataError, RecipeError

pytestmark = pytest.mark.pure


def test_u01_unused_records_are_counted_in_the_plan():
    plan = BatchPlan(rows=1003, micro_batch_size=4, device_iterations=4, replicas=2)
    assert (plan.combined_batch, plan.host_batches, plan.updates_per_epoch, plan.unused_rows) == (32, 31, 124, 11)
    assert "31 host batches (124 optimizer updates) per epoch, 11 of 1,003 records unused per epoch" in plan.lines()[1]


def test_u01_filling_the_last_batch_is_refused_where_updates_would_hold_no_real_row():
    plan = BatchPlan(rows=1003, micro_batch_size=4, device_iterations=4, replicas=2, drop_last=False)
    assert (plan.host_batches, plan.filler_rows) == (32, 21)
    with pytest.raises(RecipeError, match="11 real and 21 filler rows, so 2 of its 4 updates would hold no real row"):
        plan.check()


def test_u01_filling_the_last_batch_is_allowed_where_each_update_holds_a_real_row():
    plan = BatchPlan(rows=1003, micro_batch_size=4, gradient_accumulation=4, replicas=2, drop_last=False)
    plan.check()
    assert (plan.host_batches, plan.filler_rows, plan.unused_rows) == (32, 21, 0)


def test_u34_a_data_set_smaller_than_one_combined_batch_stops_with_every_factor():
    plan = BatchPlan(rows=100, micro_batch_size=4, replicas=2, gradient_accumulation=16)
    with pytest.raises(DataError, match="4×2×16×1=128 > 100; use accumulation ≤ 12"):
        plan.check()


def test_u34_no_accumulation_helps_where_even_one_is_too_many():
    with pytest.raises(DataError, match="even accumulation 1 needs 8 rows"):
        BatchPlan(rows=5, micro_batch_size=4, replicas=2).check()


def test_u48_steps_are_weight_updates_everywhere():
    plan = BatchPlan(rows=256, micro_batch_size=2, replicas=2, gradient_accumulation=4, device_iterations=2)
    assert plan.combined_batch == 32
    assert plan.host_batches == 8
    assert plan.updates_per_epoch == plan.planned_updates == plan.total_updates == 16
    assert plan.host_batches * plan.combined_batch == 256


def test_max_steps_stops_early_and_leaves_the_schedule():
    plan = BatchPlan(rows=100, micro_batch_size=10, epochs=3, max_steps=7)
    assert (plan.planned_updates, plan.total_updates) == (30, 7)
    assert BatchPlan(rows=100, micro_batch_size=10, epochs=1.25).planned_updates == 13


@pytest.mark.parametrize(
    ("wanted", "micro", "replicas", "accumulation"), [(256, 1, 4, 64), (256, 1, 16, 16), (256, 2, 1, 128), (8, 4, 2, 1)]
)
def test_the_global_batch_gives_the_accumulation(wanted, micro, replicas, accumulation):
    assert gradient_accumulation(wanted, micro, replicas) == accumulation


def test_a_small_rounding_is_shown_and_a_large_one_refused():
    assert gradient_accumulation(250, 1, 16) == 16
    plan = BatchPlan(rows=1000, micro_batch_size=1, gradient_accumulation=16, replicas=16)
    assert "256 sequences per update (recipe: 250, rounded)" in plan.lines(250)[0]
    with pytest.raises(
        RecipeError, match="global_batch_size=8 cannot be made from micro-batch 4 × 16 replicas"
    ) as caught:
        gradient_accumulation(8, 4, 16)
    assert "ipu.replication_factor=2" in str(caught.value)
    assert "micro_batch_size=" not in str(caught.value).partition("nearest")[2]


def test_what_an_impossible_global_batch_suggests_is_possible():
    with pytest.raises(
        RecipeError, match=r"training.micro_batch_size=2, or fewer replicas \(ipu.replication_factor=2\)"
    ):
        gradient_accumulation(8, 4, 4)
    assert gradient_accumulation(8, 2, 4) == gradient_accumulation(8, 4, 2) == 1
