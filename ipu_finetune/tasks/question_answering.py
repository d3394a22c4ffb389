# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering: the answer to a question is a span of its context (SQuAD 1.1 and 2.0)."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional

from ipu_finetune.errors import DataError, IpuFinetuneError
from ipu_finetune.tasks import qa_data, qa_metrics
from ipu_finetune.tasks.qa_answers import Answer, best_answers
from ipu_finetune.tasks.qa_data import Question, Source, Splits
from ipu_finetune.tasks.qa_features import Features, Progress, make_features

__all__ = ["Answer", "Features", "Question", "QuestionAnsweringTask", "Source", "Splits"]


_PADDING = -1e4  # logit of a position that cannot be chosen: its share of a softmax is 0 in float32


class QuestionAnsweringTask:
    """Data, features, loss, answers and metrics of a question-answering recipe.

    Args:
        settings: a recipe's `QuestionAnswering`.
        tokenizer: the model's fast tokenizer.
    """

    auto_class = "AutoModelForQuestionAnswering"
    label_names = ("start_positions", "end_positions")
    output_names = ("start_logits", "end_logits")

    def __init__(self, settings: Any, tokenizer: Any) -> None:
        self.settings = settings
        self.tokenizer = tokenizer

    def load(self) -> Splits:
        """Return the training and validation questions. Raises DataError; see `qa_data.load`."""
        return qa_data.load(self.settings)

    def features(self, questions: Sequence[Question], training: bool, progress: Optional[Progress] = None) -> Features:
        """Return the rows of `questions`: windows over each context, padded to `max_length` tokens.

        Labels come from each question's first answer. Questions to predict on may come without answers; the label
        columns are then absent.

        Args:
            questions: the questions.
            training: whether the rows are to train on, so that every question must have an answer or be marked as
                impossible.
            progress: called with (questions done, questions in all).

        Raises:
            DataError: no questions, a question to train on without label, or one that leaves no room for its context.
            RecipeError: `max_length` and `doc_stride` do not go together.
        """
        bare = [question.id for question in questions if not question.answers and not question.is_impossible]
        if training and bare:
            raise DataError(f"{len(bare):,} questions to train on have no answer: {', '.join(bare[:3])}, …")
        settings = self.settings
        return make_features(questions, self.tokenizer, settings.max_length, settings.doc_stride, not bare, progress)

    def row_loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        """Return the loss of each row, [rows] in float32: the mean of start and end cross entropy.

        Args:
            outputs: the model's output, or any mapping or (start, end) pair of logits of shape [rows, tokens].
            labels: mapping or (start, end) pair of positions of shape [rows]; those off the row are clamped to it.
                With an `attention_mask` [rows, tokens] in the mapping only real tokens take part in the softmax, so
                that the loss of a sequence does not depend on its padding, or on what it is packed with.
        """
        losses = []
        mask = labels.get("attention_mask") if isinstance(labels, Mapping) else None
        for logits, positions in zip(
            _pair(outputs, self.output_names, "outputs"), _pair(labels, self.label_names, "labels")
        ):
            positions = positions.clamp(0, logits.shape[-1] - 1)
            logits = logits.float()
            if mask is not None:
                logits = logits.masked_fill(mask == 0, _PADDING)
            losses.append(functional.cross_entropy(logits, positions, reduction="none"))
        return (losses[0] + losses[1]) / 2

    def answers(
        self, questions: Sequence[Question], features: Features, start_logits: np.ndarray, end_logits: np.ndarray
    ) -> List[Answer]:
        """Return one answer per question, in their order, from the logits of all rows (`qa_answers.best_answers`)."""
        settings = self.settings
        return best_answers(
            questions,
            features,
            start_logits,
            end_logits,
            max_answer_length=settings.max_answer_length,
            n_best=settings.n_best,
            version_2=settings.version_2,
            null_threshold=settings.null_threshold,
        )

    def metrics(self, questions: Sequence[Question], answers: Sequence[Answer]) -> Dict[str, float]:
        """Return `f1` and `exact_match` in percent and `examples`; with SQuAD 2.0 also by group (`qa_metrics.score`).

        Raises:
            IpuFinetuneError: the answers are not those of the questions, one each and in their order.
        """
        if len(questions) == len(answers):
            for index, (question, answer) in enumerate(zip(questions, answers)):
                if question.id != answer.id:
                    raise IpuFinetuneError(
                        f"answer {index + 1} is for question '{answer.id}', not '{question.id}'; answers must be in "
                        "the order of the questions"
                    )
        references = [[text for text, _ in question.answers] for question in questions]
        return qa_metrics.score(references, [answer.text for answer in answers], self.settings.version_2)


def _pair(values: Any, names: Tuple[str, str], what: str) -> Tuple[torch.Tensor, torch.Tensor]:
    if isinstance(values, Mapping):
        missing = [name for name in names if name not in values]
        if missing:
            raise IpuFinetuneError(f"{what} have no '{missing[0]}'; they have {', '.join(map(str, values))}")
        return values[names[0]], values[names[1]]
    if isinstance(values, (tuple, list)) and len(values) == 2:
        return values[0], values[1]
    if all(hasattr(values, name) for name in names):
        return getattr(values, names[0]), getattr(values, names[1])
    raise IpuFinetuneError(f"{what} must be a mapping with {names[0]} and {names[1]}, or a pair of them")
