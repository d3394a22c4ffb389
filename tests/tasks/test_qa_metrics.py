# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1: hand-computed cases, and torchmetrics' SQuAD as an independent oracle."""

import random

import pytest
from torchmetrics.functional.text import squad

from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.tasks import qa_metrics

_WORDS = [
    "the",
    "a",
    "An",
    "Denver",
    "denver,",
    "Broncos",
    "'s",
    "24–10",
    "24-10",
    "Straße",
    "東京",
    "É",
    "of",
    "...",
    "1,000",
    "\u00a0x",
]


def _random_text(rng):
    return rng.choice([" ", "  ", "\t"]).join(rng.choice(_WORDS) for _ in range(rng.randrange(0, 6)))


def test_scores_equal_torchmetrics_on_random_texts():
    rng = random.Random(7)
    references = [[_random_text(rng) for _ in range(rng.randrange(1, 4))] for _ in range(1500)]
    predictions = [rng.choice([*golden, _random_text(rng), _random_text(rng)]) for golden in references]
    ours = qa_metrics.score(references, predictions)
    theirs = squad(
        [{"id": str(i), "prediction_text": text} for i, text in enumerate(predictions)],
        [
            {"id": str(i), "answers": {"text": golden, "answer_start": [0] * len(golden)}}
            for i, golden in enumerate(references)
        ],
    )
    assert ours["exact_match"] == pytest.approx(float(theirs["exact_match"]), abs=1e-3)
    assert ours["f1"] == pytest.approx(float(theirs["f1"]), abs=1e-3)
    assert 20 < ours["exact_match"] < ours["f1"] < 95, "the random cases must not be all right or all wrong"
    assert ours["examples"] == 1500


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("Denver Broncos", "the denver broncos!", 1.0, 1.0),
        ("Denver", "Denver Broncos", 0.0, 2 / 3),  # precision 1, recall 1/2
        ("x x y", "x y y", 0.0, 2 / 3),  # two of three words are common as multisets
        ("red green", "blue", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),  # articles only: nothing is left on either side
        ("...", "red", 0.0, 0.0),  # punctuation only
        ("", "", 1.0, 1.0),
        ("", "red", 0.0, 0.0),
        ("theatre", "atre", 0.0, 0.0),  # an article within a word stays
        ("24–10", "2410", 0.0, 0.0),  # the en dash is not ASCII punctuation
        ("24-10", "2410", 1.0, 1.0),
        ("ÉCOLE Normale", "école\u00a0normale", 1.0, 1.0),  # lower-casing and white space beyond ASCII
        ("a.b", "ab", 1.0, 1.0),  # punctuation goes before articles
    ],
)
def test_hand_computed_pairs(prediction, reference, exact, f1):
    assert qa_metrics.exact_match(prediction, reference) == exact
    assert qa_metrics.f1(prediction, reference) == pytest.approx(f1)


def test_the_best_reference_counts_for_each_metric():
    result = qa_metrics.score([["red car", "car"], ["x"]], ["car", "y"])
    assert result == {"exact_match": 50.0, "f1": 50.0, "examples": 2}


def test_version_2_scores_no_answers_apart():
    references = [["red car"], ["blue"], [], [], []]
    predictions = ["car", "", "", "red", ""]
    result = qa_metrics.score(references, predictions, version_2=True)
    assert result["examples"] == 5
    assert result["exact_match"] == pytest.approx(100 * 2 / 5)
    assert result["f1"] == pytest.approx(100 * (2 / 3 + 2) / 5)
    assert (result["HasAns_total"], result["NoAns_total"]) == (2, 3)
    assert result["HasAns_exact"] == 0.0
    assert result["HasAns_f1"] == pytest.approx(100 / 3)
    assert result["NoAns_exact"] == result["NoAns_f1"] == pytest.approx(200 / 3)


def test_version_2_without_one_kind_of_question_leaves_its_scores_out():
    result = qa_metrics.score([["red"]], ["red"], version_2=True)
    assert result["NoAns_total"] == 0
    assert "NoAns_f1" not in result


def test_version_2_takes_an_answer_of_articles_alone_for_none():
    assert qa_metrics.score([["the"]], [""], version_2=True)["exact_match"] == 100.0
    assert qa_metrics.score([["the", "cat"]], [""], version_2=True)["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("references", "predictions", "message"),
    [([], [], "no question"), ([["a"]], [], "0 answers for 1"), ([[]], ["a"], "version_2=true")],
)
def test_what_cannot_be_scored_is_an_error(references, predictions, message):
    with pytest.raises(IpuFinetuneError, match=message):
        qa_metrics.score(references, predictions)
