# SPDX-License-Identifier: Apache-2.0
"""The embedded data set: its size, its lengths, and that the first entity of the right kind does not solve it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ipu_finetune.tasks import qa_data, qa_metrics
from ipu_finetune.tasks.samples import SQUAD_SAMPLE
from ipu_finetune.tasks.samples import generate_squad_sample as generator


@pytest.fixture(scope="module")
def articles():
    return generator.generate()


@pytest.fixture(scope="module")
def validation(articles):
    """The paragraphs of articles 0, 5, 10, …"""
    return [paragraph for article in articles[::5] for paragraph in article.paragraphs]


def f1(questions, predictions):
    return qa_metrics.score([[question.answer.text] for question in questions], predictions, False)["f1"]


def test_the_generator_writes_the_committed_file_byte_for_byte(tmp_path):
    generator.main(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == SQUAD_SAMPLE.read_bytes()
    assert SQUAD_SAMPLE.stat().st_size < 500_000


def test_there_are_as_many_paragraphs_and_questions_as_promised():
    content = json.loads(SQUAD_SAMPLE.read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    questions = [qa for paragraph in paragraphs for qa in paragraph["qas"]]
    assert content["version"] == "1.1"
    assert len(content["data"]) >= 25
    assert len(paragraphs) >= 120
    assert len(questions) >= 600
    assert len({qa["id"] for qa in questions}) == len(questions)
    for paragraph in paragraphs:
        for qa in paragraph["qas"]:
            for answer in qa["answers"]:
                start = answer["answer_start"]
                assert paragraph["context"][start : start + len(answer["text"])] == answer["text"]


def test_lengths_are_those_of_squad():
    from ipu_finetune.models.pretrained import find_checkpoint, load_tokenizer

    tokenizer = load_tokenizer(find_checkpoint("sentence-transformers/all-MiniLM-L6-v2"))
    splits = qa_data.load(
        SimpleNamespace(dataset="squad-sample", data=None, validation_data=None, validate_every=5, version_2=False)
    )
    questions = [*splits.train, *splits.validation]
    pairs = tokenizer([q.question for q in questions], [q.context for q in questions], truncation=False)
    lengths = np.array([len(ids) for ids in pairs["input_ids"]])
    assert 160 <= lengths.mean() <= 180
    assert 0.01 <= (lengths > 384).mean() <= 0.05


def test_training_and_validation_share_no_person_place_or_paragraph(articles):
    validating, training = articles[::5], [article for i, article in enumerate(articles) if i % 5]

    def names(some):
        return {
            mention.text
            for article in some
            for paragraph in article.paragraphs
            for mention in paragraph.mentions
            if mention.kind in ("person", "place")
        }

    assert names(validating)
    assert not names(validating) & names(training)
    assert not {a.title for a in validating} & {a.title for a in training}


def test_every_question_has_another_mention_of_its_kind_to_be_told_from(articles):
    for article in articles:
        for paragraph in article.paragraphs:
            kinds = [mention.kind for mention in paragraph.mentions]
            for question in paragraph.questions:
                assert kinds.count(question.answer.kind) > 1


def test_kinds_of_answers_are_mixed_and_some_stand_late_in_a_long_paragraph(articles):
    questions = [(p, q) for article in articles for p in article.paragraphs for q in p.questions]
    kinds = [question.answer.kind for _, question in questions]
    for kind in ("person", "place", "year", "number", "phrase", "clause"):
        assert kinds.count(kind) >= 0.03 * len(kinds), kind
    assert sum(len(p.context) > 1500 and q.answer.start > 1400 for p, q in questions) >= 4


def test_the_first_mention_of_the_right_kind_does_not_solve_it(validation):
    questions, first = [], []
    for paragraph in validation:
        for question in paragraph.questions:
            questions.append(question)
            first.append(next(m.text for m in paragraph.mentions if m.kind == question.answer.kind))
    assert 5 < f1(questions, first) < 40
