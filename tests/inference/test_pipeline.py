# SPDX-License-Identifier: Apache-2.0
"""`pipeline()` answers as Transformers' own pipeline does, on both targets."""

import json
import shutil

import pytest
import transformers

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.inference.pipeline import SETTINGS_FILE, pipeline

QUESTIONS = [
    {"question": "What colour is the house?", "context": "The house by the old bridge is green and its gate is white."},
    {"question": "When was it built?", "context": "It was built in 1912, long after the mill, by two brothers."},
    {"question": "Who lives there?", "context": "Nobody has lived there since Ada Fenwick moved to the coast."},
]


@pytest.fixture(scope="module")
def fine_tuned(tiny_model, tmp_path_factory):
    """A checkpoint with a question-answering head (random, so that every answer is a surprise)."""
    folder = tmp_path_factory.mktemp("fine-tuned") / "model"
    transformers.BertForQuestionAnswering.from_pretrained(str(tiny_model)).save_pretrained(
        str(folder), safe_serialization=True
    )
    transformers.AutoTokenizer.from_pretrained(str(tiny_model)).save_pretrained(str(folder))
    (folder / "ipu_config.json").write_text(json.dumps({"layers_per_ipu": [2]}))
    (folder / SETTINGS_FILE).write_text(
        json.dumps({"task": {"max_length": 64, "doc_stride": 16, "max_answer_length": 15}})
    )
    return folder


@pytest.mark.parametrize("target", ["cpu", "emulator"])
def test_answers_are_those_of_transformers_own_pipeline(fine_tuned, target):
    theirs = transformers.pipeline("question-answering", model=str(fine_tuned), tokenizer=str(fine_tuned))
    ours = pipeline("question-answering", str(fine_tuned), target=target)
    found = ours(QUESTIONS)
    assert [answer["answer"] for answer in found] == [theirs(**question)["answer"] for question in QUESTIONS]
    assert ours(**QUESTIONS[1]) == found[1]
    assert ours(QUESTIONS[2]) == found[2]
    for answer, question in zip(found, QUESTIONS):
        assert question["context"][answer["start"] : answer["end"]] == answer["answer"]
        assert 0 <= answer["score"] <= 1
    assert ours.target.emulated is (target == "emulator")
    ours.close()


@pytest.mark.parametrize("target", ["cpu", "emulator"])
def test_u13_questions_that_share_a_row_are_answered_as_if_alone_and_in_order(fine_tuned, target):
    alone = pipeline("question-answering", str(fine_tuned), target=target)
    packed = pipeline("question-answering", str(fine_tuned), target=target, max_sequences=3)
    questions = [*QUESTIONS, QUESTIONS[0], *reversed(QUESTIONS)]
    for asked in (questions, questions[:1]):
        for ours, theirs in zip(packed(asked), alone(asked)):
            assert ours == {**theirs, "score": pytest.approx(theirs["score"], abs=2e-6)}
    alone.close()
    packed.close()


def test_packing_needs_a_number_of_sequences(fine_tuned):
    with pytest.raises(UsageError, match="max_sequences=0: at least 1"):
        pipeline("question-answering", str(fine_tuned), target="cpu", max_sequences=0)


def test_a_context_of_many_windows_is_read_to_its_end(fine_tuned):
    ours = pipeline("question-answering", str(fine_tuned), target="cpu")
    filler = "The road goes on past fields and hedges without a house in sight. " * 40
    answer = ours(question="What is at the end?", context=filler + "At the end stands a tower.")
    assert answer["answer"]


def test_what_is_wrong_with_a_question_or_a_model_is_said(fine_tuned, tiny_model, tmp_path):
    ours = pipeline("question-answering", str(fine_tuned), target="cpu")
    with pytest.raises(DataError, match="question 2 has no context"):
        ours([QUESTIONS[0], {"question": "Why?", "context": " "}])
    with pytest.raises(UsageError, match="give question= and context="):
        ours(question="Why?")
    assert ours([]) == []
    with pytest.raises(UsageError, match="did you mean 'question-answering'"):
        pipeline("question-answer", str(fine_tuned))
    with pytest.raises(DataError, match="was not fine-tuned for question-answering: it lacks qa_outputs"):
        pipeline("question-answering", str(tiny_model), target="cpu")
    with pytest.raises(UsageError, match="precision=fp16 is for IPUs"):
        pipeline("question-answering", str(fine_tuned), target="cpu", precision="fp16")
    damaged = tmp_path / "damaged"
    shutil.copytree(str(fine_tuned), str(damaged))
    (damaged / SETTINGS_FILE).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        pipeline("question-answering", str(damaged), target="cpu")
