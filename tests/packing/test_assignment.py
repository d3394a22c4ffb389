# SPDX-License-Identifier: Apache-2.0
"""Which rows share a pack: each exactly once, as planned, and in an order that training can use."""

from collections import Counter

import numpy as np
import pytest

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing.plan import Plan, assign, from_lengths


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_each_row_is_in_one_pack_as_planned(seed):
    lengths = np.random.default_rng(9).integers(1, 129, 5000)
    plan = from_lengths(lengths, 128, 4)
    packs = assign(plan, lengths, seed)
    assert sorted(row for pack in packs for row in pack) == list(range(5000))
    assert len(packs) == plan.packs
    assert Counter(tuple(lengths[pack]) for pack in packs) == dict(zip(plan.strategies, plan.repeats))
    again = assign(plan, lengths.tolist(), seed)
    assert (again.indices == packs.indices).all()
    assert (again.offsets == packs.offsets).all()
    assert (packs[-1] == packs[len(packs) - 1]).all()
    with pytest.raises(IndexError):
        packs[len(packs)]
    with pytest.raises(ValueError, match="read-only"):
        packs[0][0] = 1


def test_without_a_seed_rows_and_packs_keep_their_order():
    lengths = [2, 3, 2, 3, 2, 5]
    plan = Plan(5, 2, "best", ((5,), (3, 2), (2,)), (1, 2, 1), lower_bound=3)
    assert [pack.tolist() for pack in assign(plan, lengths)] == [[5], [1, 0], [3, 2], [4]]


def test_a_seed_shuffles_rows_among_equal_lengths_and_packs_among_each_other():
    lengths = np.repeat([60, 40, 100], 1000)
    plan = from_lengths(lengths, 100, 2)
    assert dict(zip(plan.strategies, plan.repeats)) == {(100,): 1000, (60, 40): 1000}
    one, other = assign(plan, lengths, seed=1), assign(plan, lengths, seed=2)
    assert (one.indices != other.indices).any()
    # Of 1,999 neighbours, half are expected to be of different strategies; in the plan's order it is 1.
    sizes = np.diff(one.offsets)
    assert 800 < np.count_nonzero(np.diff(sizes)) < 1200
    # Which 60 meets which 40 is drawn: one pair in a thousand is expected to be as without a seed.
    pairs = np.array([pack for pack in one if len(pack) == 2])
    assert np.count_nonzero(pairs[:, 1] - pairs[:, 0] == 1000) < 20
    assert abs(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]) < 0.2


def test_a_plan_for_other_sequences_is_refused():
    plan = from_lengths([5, 5, 3], 10, 3)
    with pytest.raises(DataError, match="the plan is for other sequences: it has 1 of 3 tokens, and there are 2"):
        assign(plan, [5, 5, 3, 3])
    with pytest.raises(DataError, match="longer than max_length=10"):
        assign(plan, [5, 5, 11])
    with pytest.raises(UsageError, match="seed"):
        assign(plan, [5, 5, 3], seed=-1)
