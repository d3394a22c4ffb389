# SPDX-License-Identifier: Apache-2.0
"""Plans of packs: published figures, optima by brute force and by construction, and what no plan may do."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing.plan import ALGORITHMS, Plan, assign, from_histogram, from_lengths

_HISTOGRAMS = Path(__file__).parents[2].parent / "shared" / "data" / "length_histograms.json"
_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 512)

# Efficiency in percent at the limits above, recomputed from arXiv 2107.02027's histograms by other code than ours.
_PUBLISHED = {
    ("wikipedia_512", "spfhp"): (49.9668, 80.5249, 89.4408, 93.9412, 97.7167, 98.9020, 99.6040, 99.6040, 99.6040),
    ("wikipedia_512", "lpfhp"): (49.9668, 80.5456, 89.4855, 93.9616, 97.7764, 99.1081, 99.8129, 99.9307, 99.9494),
    ("squad11_384", "spfhp"): (44.8011, 87.5972, *[97.5466] * 7),
    ("squad11_384", "lpfhp"): (44.8011, 87.5972, *[97.7386] * 7),
}


def _published_histogram(name):
    if not _HISTOGRAMS.is_file():
        pytest.skip("the published histograms are not here")
    return np.array(json.loads(_HISTOGRAMS.read_text())[name])


def _check(plan, lengths):
    """Every sequence in exactly one pack, and no pack above a limit, counted from the strategies alone."""
    planned = Counter()
    assert len(plan.strategies) == len(plan.repeats) == len(set(plan.strategies))
    for pack, repeats in zip(plan.strategies, plan.repeats):
        assert repeats >= 1
        assert 1 <= len(pack) <= plan.max_sequences
        assert sum(pack) <= plan.max_length
        assert list(pack) == sorted(pack, reverse=True)
        for length in pack:
            planned[length] += repeats
    assert planned == Counter(int(length) for length in lengths)
    assert (plan.sequences, plan.tokens) == (len(lengths), sum(int(length) for length in lengths))
    assert plan.wasted_positions == plan.packs * plan.max_length - plan.tokens >= 0
    assert plan.lower_bound <= plan.packs <= len(lengths)


def _fewest_by_brute_force(lengths, max_length, max_sequences):
    """The fewest packs, over all ways to part the sequences."""
    total, number = [0], [0]
    for subset in range(1, 1 << len(lengths)):
        lowest = (subset & -subset).bit_length() - 1
        total.append(total[subset & (subset - 1)] + lengths[lowest])
        number.append(number[subset & (subset - 1)] + 1)
    fewest = [0]
    for subset in range(1, len(total)):
        first = subset & -subset
        rest = others = subset ^ first
        best = len(lengths)
        while True:
            if total[others | first] <= max_length and number[others | first] <= max_sequences:
                best = min(best, 1 + fewest[rest ^ others])
            if not others:
                break
            others = (others - 1) & rest
        fewest.append(best)
    return fewest[-1]


def _best_fit_decreasing(lengths, max_length):
    """The number of packs when each sequence, the longest first, joins the fullest pack that has room; one at a time."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting) if fitting else max_length
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return len(rooms)


def _random_lengths(rng, max_length, sequences):
    """Lengths of very different kinds: even, short, a peak at the limit, few different ones, around a third."""
    kind = rng.integers(5)
    if kind == 0:
        lengths = rng.integers(1, max_length + 1, sequences)
    elif kind == 1:
        lengths = rng.geometric(min(1.0, 6 / max_length), sequences)
    elif kind == 2:
        lengths = np.where(rng.random(sequences) < 0.3, max_length, rng.integers(1, max_length + 1, sequences))
    elif kind == 3:
        lengths = rng.choice(rng.integers(1, max_length + 1, 4), sequences)
    else:
        lengths = rng.normal(max_length / 3, max_length / 12, sequences)
    return np.clip(lengths, 1, max_length).astype(np.int64)


@pytest.mark.parametrize(("name", "algorithm"), _PUBLISHED)
def test_lpfhp_and_spfhp_reach_the_published_figures_to_four_decimals(name, algorithm):
    counts = _published_histogram(name)
    plans = [from_histogram(counts, len(counts), limit, algorithm) for limit in _LIMITS]
    assert tuple(round(100 * plan.efficiency, 4) for plan in plans) == _PUBLISHED[name, algorithm]


def test_the_published_speed_up_is_sequences_per_pack():
    counts = _published_histogram("squad11_384")
    plan = from_histogram(counts, 384, 3, "lpfhp")
    assert plan.sequences == counts.sum() == 88641
    assert round(plan.speed_up, 5) == round(plan.sequences_per_pack, 5) == 2.18161


@pytest.mark.parametrize(
    ("name", "max_sequences", "percent", "seconds"),
    [("wikipedia_512", 3, 99.88, 2), ("wikipedia_512", 12, 99.8, 0.1), ("squad11_384", 3, 98.79, 2)],
)
def test_best_is_above_its_marks_in_time(name, max_sequences, percent, seconds):
    counts = _published_histogram(name)
    started = time.process_time()
    plan = from_histogram(counts, len(counts), max_sequences)
    took = time.process_time() - started
    assert 100 * plan.efficiency >= percent
    assert took < 4 * seconds  # the machine may be slower than the one that the marks are for
    planned = np.zeros_like(counts)
    for pack, repeats in zip(plan.strategies, plan.repeats):
        np.add.at(planned, np.array(pack) - 1, repeats)
    assert (planned == counts).all()


def test_the_published_algorithms_by_hand():
    # 6 and 5 are open with room 4 and 5 when 4 comes: the fullest that fits is (6), the emptiest (5).
    assert from_lengths([6, 5, 4], 10, 3, "lpfhp").strategies == ((6, 4), (5,))
    assert from_lengths([6, 5, 4], 10, 3, "spfhp").strategies == ((6,), (5, 4))
    # LPFHP fills a pack with equal sequences; SPFHP opens a pack for each sequence that no open pack has room for.
    lpfhp, spfhp = (from_lengths([3] * 5, 10, 3, algorithm) for algorithm in ("lpfhp", "spfhp"))
    assert dict(zip(lpfhp.strategies, lpfhp.repeats)) == {(3, 3, 3): 1, (3, 3): 1}
    assert dict(zip(spfhp.strategies, spfhp.repeats)) == {(3,): 5}


def test_lpfhp_is_best_fit_where_no_limit_on_sequences_binds():
    rng = np.random.default_rng(1)
    for _ in range(40):
        max_length = int(rng.choice([7, 30, 128]))
        lengths = _random_lengths(rng, max_length, int(rng.integers(1, 120)))
        plan = from_lengths(lengths, max_length, max_length, "lpfhp")
        assert plan.packs == _best_fit_decreasing(lengths.tolist(), max_length)


def test_small_plans_against_brute_force():
    rng = np.random.default_rng(2)
    excess = 0
    for _ in range(150):
        max_length, max_sequences = int(rng.choice([5, 10, 16, 30, 100])), int(rng.integers(1, 6))
        lengths = _random_lengths(rng, max_length, int(rng.integers(1, 10)))
        fewest = _fewest_by_brute_force(lengths.tolist(), max_length, max_sequences)
        for algorithm in ALGORITHMS:
            plan = from_lengths(lengths, max_length, max_sequences, algorithm)
            _check(plan, lengths)
            assert plan.lower_bound <= fewest <= plan.packs
        excess += from_lengths(lengths, max_length, max_sequences).packs - fewest
    assert excess <= 1  # rounding a linear programme is not exact by rule, but nearly always in fact


def test_every_plan_parts_the_sequences_and_best_is_never_worse():
    rng = np.random.default_rng(3)
    for _ in range(60):
        max_length = int(rng.choice([1, 2, 3, 17, 64, 128, 384]))
        max_sequences = int(rng.integers(1, 9))
        lengths = _random_lengths(rng, max_length, int(rng.integers(1, 800)))
        plans = {name: from_lengths(lengths, max_length, max_sequences, name) for name in ALGORITHMS}
        for plan in plans.values():
            _check(plan, lengths)
        assert plans["best"].packs <= min(plans["lpfhp"].packs, plans["spfhp"].packs)
        assert plans["best"].lower_bound <= min(plan.packs for plan in plans.values())


@pytest.mark.parametrize("sequences", [2, 3, 4, 6])
def test_sequences_that_were_cut_from_full_packs_are_put_together_again(sequences):
    rng = np.random.default_rng(sequences)
    cuts = np.sort(rng.choice(np.arange(1, 128), (3000, sequences - 1)), axis=1)
    lengths = np.diff(cuts, axis=1, prepend=0, append=128)
    lengths = lengths[(lengths > 0).all(axis=1)]
    plan = from_lengths(lengths.ravel(), 128, sequences)
    _check(plan, lengths.ravel())
    # As many full packs as there were; where each holds exactly `sequences`, best fit is far from that.
    assert plan.packs <= 1.002 * len(lengths)
    if sequences > 2:
        assert from_lengths(lengths.ravel(), 128, sequences, "lpfhp").packs > 1.05 * len(lengths)


def test_the_classic_trap_of_best_fit_is_avoided():
    # Johnson et al. 1974: 100 = 51 + 26 + 23 = 27 + 27 + 23 + 23, but best fit joins 51 + 27 and 26 + 26 + 26.
    lengths = [51] * 600 + [27] * 600 + [26] * 600 + [23] * 1200
    assert from_lengths(lengths, 100, 4, "lpfhp").packs == 1100
    plan = from_lengths(lengths, 100, 4)
    _check(plan, lengths)
    assert (plan.packs, plan.efficiency) == (900, 1.0)


@pytest.mark.parametrize(
    ("lengths", "max_length", "max_sequences", "packs"),
    [
        ([257] * 1000, 512, 8, 1000),  # no two fit
        ([256] * 1001, 512, 8, 501),
        ([512] * 1000, 512, 8, 1000),
        ([1] * 1000, 512, 512, 2),
        ([1] * 1000, 512, 3, 334),
        ([100] * 1000, 512, 1, 1000),
        ([171] * 1000, 512, 3, 500),  # three are one token too many
        ([171] * 500 + [170] * 1000, 512, 3, 500),
        ([300] * 777 + [1] * 100_000, 512, 100, 1008),  # as many as the limit on sequences makes necessary
        # value 200 at 1/2 and 156 at 1/4: no pack is worth more than 1, all are worth 750
        ([200] * 1000 + [156] * 1000, 512, 3, 750),
        ([1], 1, 1, 1),
        ([1] * 9, 1, 5, 9),
    ],
)
def test_unlucky_lengths_take_no_more_packs_than_they_must(lengths, max_length, max_sequences, packs):
    plan = from_lengths(lengths, max_length, max_sequences)
    _check(plan, lengths)
    assert plan.packs == packs


def test_long_packs_and_many_lengths_stay_within_reach():
    # Too many lengths for the linear programme, then too long for exact filling: less good, never refused or slow.
    rng = np.random.default_rng(5)
    for max_length, sequences in ((3000, 20_000), (60_000, 3000)):
        lengths = rng.integers(max_length // 50, max_length // 2, sequences)
        started = time.process_time()
        plan = from_lengths(lengths, max_length, 4)
        assert time.process_time() - started < 30
        _check(plan, lengths)
        assert plan.packs <= from_lengths(lengths, max_length, 4, "lpfhp").packs


def test_one_sequence_and_none():
    one = from_lengths([7], 512, 3)
    assert (one.strategies, one.repeats, one.packs, one.efficiency) == (((7,),), (1,), 1, 7 / 512)
    for none in (from_lengths([], 512, 3), from_histogram([], 512, 3), from_histogram(np.zeros(512, int), 512, 3)):
        assert (none.packs, none.sequences, none.tokens, none.lower_bound, none.strategies) == (0, 0, 0, 0, ())
        assert (none.efficiency, none.sequences_per_pack, none.speed_up, none.wasted_positions) == (1.0, 1.0, 1.0, 0)
        assert len(assign(none, [])) == 0
        assert len(assign(none, [], seed=1)) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_form_of_the_lengths_changes_nothing(algorithm):
    lengths = np.random.default_rng(6).integers(1, 101, 5000)
    plan = from_lengths(lengths, 100, 3, algorithm)
    forms = [
        lengths.astype(np.int16),
        lengths.astype(np.uint64),
        lengths[::-1],
        lengths.tolist(),
        (int(length) for length in lengths),
        iter(np.array_split(lengths, 7)),
        [[], lengths[:10].tolist(), lengths[10:]],
    ]
    assert all(from_lengths(form, 100, 3, algorithm) == plan for form in forms)
    # The first entry of a histogram is the number of sequences of one token.
    assert from_histogram(np.bincount(lengths)[1:], 100, 3, algorithm) == plan
    assert from_histogram([2, 0, 1], 3, 2, algorithm).tokens == 2 * 1 + 1 * 3


def test_a_plan_is_the_same_for_the_same_seed_in_another_process():
    lengths = np.random.default_rng(7).integers(20, 70, 4000)
    plan = from_lengths(lengths, 128, 4, seed=3)
    assert plan == from_lengths(lengths[::-1], 128, 4, seed=3)
    program = (
        "import sys, numpy as np\n"
        "from ipu_finetune.packing.plan import from_lengths\n"
        "lengths = np.random.default_rng(7).integers(20, 70, 4000)\n"
        "print(from_lengths(lengths, 128, 4, seed=3).fingerprint)\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "11", "PYTHONPATH": str(Path(__file__).parents[2])}
    answer = subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert answer.stdout.strip() == plan.fingerprint
    assert from_lengths(lengths[1:], 128, 4, seed=3).fingerprint != plan.fingerprint


def test_ten_million_lengths_are_planned_in_the_memory_of_their_histogram():
    chunk = np.random.default_rng(8).integers(1, 513, 1_000_000).astype(np.int32)
    tracemalloc.start()
    started = time.process_time()
    plan = from_lengths((chunk for _ in range(10)), 512, 3, "lpfhp")
    took, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.sequences == 10_000_000
    assert len(plan.strategies) < 1000
    assert took < 20
    assert peak < 20e6  # the lengths themselves are 40 MB, one object per pack would be hundreds


def test_a_sequence_that_is_too_long_is_refused_with_its_numbers():
    message = (
        "2 of 5 sequences are longer than max_length=384 .the longest: 512.; a plan never cuts one: use max_length=512"
    )
    for lengths in ([3, 512, 384, 400, 1], np.array([3, 512, 384, 400, 1]), iter([np.array([3, 512]), [384, 400, 1]])):
        with pytest.raises(DataError, match=message):
            from_lengths(lengths, 384, 3)
    with pytest.raises(DataError, match=r"3 of 13 sequences are longer than max_length=2 .the longest: 3.*bincount"):
        from_histogram([4, 6, 3], 2, 3)
    assert from_histogram([4, 6, 0, 0], 2, 3).sequences == 10


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0, -2], "2 of 3 sequences have a length below 1 .the lowest: -2."),
        ([3.0, 4.0], "whole numbers; these are of the type float64"),
        ([3, None], "whole numbers; these are of the type object"),
        ([2**70], "whole numbers; these are of the type object"),
        ([True], "whole numbers; these are of the type bool"),
        ([[[1, 2]]], r"one row; these have the shape \(1, 2\)"),
        ([3, [1, 2]], "one row; these are numbers and arrays mixed"),
        ([[[1], [2, 3]]], "one row; these are numbers and arrays mixed"),
        ([[1, 2], 3], r"one row; these have the shape \(\)"),
        ("abc", "whole numbers; these are of the type <U1 .first: 'a'."),
        (np.ones((2, 3), int), r"one row; these have the shape \(2, 3\)"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths, message):
    with pytest.raises(DataError, match=message):
        from_lengths(lengths, 10, 3)


def test_broken_histograms_and_limits_are_refused():
    with pytest.raises(DataError, match="a count cannot be negative; there are -4 sequences of 2 tokens"):
        from_histogram([1, -4], 10, 3)
    with pytest.raises(DataError, match="the counts of a histogram must be whole numbers"):
        from_histogram([0.5], 10, 3)
    with pytest.raises(
        DataError, match="counts of a histogram must be numbers in one row; these are numbers and arrays"
    ):
        from_histogram([[1], [2, 3]], 10, 3)
    with pytest.raises(UsageError, match=r"unknown packing algorithm 'lpfh' \(did you mean 'lpfhp'"):
        from_lengths([1], 10, 3, "lpfh")
    for name, value in (("max_length", 0), ("max_sequences", 0), ("max_sequences", 2.5), ("seed", -1)):
        with pytest.raises(UsageError, match=f"{name} must be a whole number of at least [01]; got {value}"):
            from_lengths([1], **{"max_length": 10, "max_sequences": 3, name: value})


def test_a_plan_says_what_it_is():
    plan = Plan(10, 3, "best", ((6, 4), (5,)), (2, 1), lower_bound=3)
    assert (plan.packs, plan.sequences, plan.tokens, plan.wasted_positions) == (3, 5, 25, 5)
    line = "5 sequences in 3 packs of 10 (1.67 in a pack, at most 3): 83.33 % of the positions hold a token (best)"
    assert str(plan) == plan.describe() == line
    assert from_lengths([], 10, 3).describe().startswith("0 sequences in 0 packs of 10 (1.00 in a pack")
