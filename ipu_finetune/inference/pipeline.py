# SPDX-License-Identifier: Apache-2.0
"""`pipeline()`: answers from a fine-tuned model, on any target."""

import dataclasses
import functools
import importlib
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from ipu_finetune import ipu_config, targets, tasks
from ipu_finetune._ipu_fields import Ipu
from ipu_finetune.errors import DataError, UsageError, did_you_mean
from ipu_finetune.inference.predictor import Predictor, TorchPredictor
from ipu_finetune.models import families, pretrained
from ipu_finetune.packing.isolation import PackedModel
from ipu_finetune.packing.rows import PACKED_INPUTS, PackedRows
from ipu_finetune.recipe import TASKS
from ipu_finetune.tasks.question_answering import Question

__all__ = ["SETTINGS_FILE", "QuestionAnsweringPipeline", "pipeline", "task_settings"]

# Lies with a fine-tuned model and says how it was asked: lengths, strides, null answers.
SETTINGS_FILE = "ipu_finetune.json"


def pipeline(
    task: str,
    model: str,
    *,
    target: str = "auto",
    batch_size: int = 4,
    max_length: Optional[int] = None,
    precision: str = "fp32",
    allow_pickle: bool = False,
    max_sequences: int = 1,
) -> "QuestionAnsweringPipeline":
    """Load a fine-tuned model for inference.

    Args:
        task: ``question-answering``.
        model: a checkpoint folder, such as a run's ``model``, or a hub name.
        target: as for `finetune`.
        batch_size: rows that the model is compiled for; any number of questions may be asked.
        max_length: tokens of a window; None takes what the model was trained with. Longer texts become several windows.
        precision: ``fp32``, or ``fp16`` on IPUs and their emulator.
        allow_pickle: also take pickled weights.
        max_sequences: windows that may share a row, each blind to the others: with several questions, fewer rows.

    Raises:
        UsageError: unknown task or precision.
        RecipeError: `max_sequences` is more than 1 and the model's family cannot be packed.
        DataError: the model cannot be loaded.
        TargetUnavailableError: the target is not here.
    """
    if task not in TASKS:
        raise UsageError(f"unknown task '{task}'{did_you_mean(task, TASKS)}")
    if precision not in ("fp32", "fp16"):
        raise UsageError(f"precision={precision}: fp32 or fp16")
    chosen = targets.choose(target)
    source = pretrained.find_checkpoint(model, allow_pickle=allow_pickle)
    config = pretrained.load_config(source)
    settings = task_settings(source.folder, getattr(config, "max_position_embeddings", None), max_length)
    job = tasks.create(settings, pretrained.load_tokenizer(source))
    loaded, new = pretrained.build_model(source, config, job.auto_class, allow_pickle=allow_pickle)
    if new:
        raise DataError(f"{model} was not fine-tuned for {task}: it lacks {', '.join(new)}")
    if max_sequences < 1:
        raise UsageError(f"max_sequences={max_sequences}: at least 1 window is in a row")
    names = _inputs(job)
    wrap: Optional[Callable[[Any], Any]] = None
    if max_sequences > 1:
        families.family_of(config)  # refuses what cannot be packed
        names = [*PACKED_INPUTS, *(["token_type_ids"] if "token_type_ids" in names else [])]
        wrap = functools.partial(PackedModel, kind=settings.kind, slots=max_sequences)
    notes: List[str] = []
    if chosen.name in ("cpu", "cuda"):
        if precision == "fp16":
            raise UsageError("precision=fp16 is for IPUs and their emulator; the cpu and cuda targets take fp32")
        loaded = loaded.to(chosen.name)
        predictor: Predictor = TorchPredictor(
            wrap(loaded) if wrap else loaded, names, job.output_names, batch_size, settings.max_length
        )
    else:
        section, note = ipu_config.settle(Ipu("auto"), str(source.folder), _facts(config))
        notes = [note] if note else []
        predictor = _ipu_predictor(chosen, section, config, loaded, names, job, batch_size, settings, precision, wrap)
    return QuestionAnsweringPipeline(job, predictor, chosen, notes, max_sequences)


def _inputs(job: Any) -> List[str]:
    known = ("input_ids", "attention_mask", "token_type_ids")
    return [name for name in known if name in job.tokenizer.model_input_names]


def _facts(config: Any) -> ipu_config.Facts:
    return ipu_config.Facts(config.model_type, config.num_hidden_layers, getattr(config, "vocab_size", None))


def _ipu_predictor(
    chosen: targets.Target,
    section: Ipu,
    config: Any,
    model: Any,
    names: Sequence[str],
    job: Any,
    batch_size: int,
    settings: Any,
    precision: str,
    wrap: Optional[Callable[[Any], Any]],
) -> Predictor:
    known = _facts(config)
    layout = ipu_config.resolve(section, model_layers=known.layers, vocab_size=known.vocab_size)
    # One question should not wait for a whole loop of the device.
    layout.update(replication_factor=1, inference_replication_factor=1, inference_device_iterations=1)
    layout.pop("gradient_accumulation_steps", None)
    if chosen.emulated:
        from ipu_finetune import emulator

        emulator.install()
    # Only now is it certain which poptorch this module will find.
    ipu_model = importlib.import_module("ipu_finetune.inference.ipu_model")
    return ipu_model.IpuPredictor(
        model,
        ipu_model.build_ipu_config(layout),
        names,
        job.output_names,
        batch_size,
        settings.max_length,
        half=precision == "fp16",
        wrap=wrap,
    )


def task_settings(folder: Path, positions: Optional[int], max_length: Optional[int]) -> Any:
    """Return the task settings that lie with a model, else the task's own; `max_length` goes before both.

    Raises:
        DataError: the settings file is damaged.
        UsageError: `max_length` is more than the model has positions.
    """
    cls = TASKS["question-answering"]
    path = folder / SETTINGS_FILE
    settings = cls(dataset="inference")
    if path.is_file():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))["task"]
            fields = {field.name for field in dataclasses.fields(cls)} - {"dataset", "data", "validation_data"}
            settings = dataclasses.replace(settings, **{key: stored[key] for key in fields if key in stored})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}); remove it to use the task's own settings") from error
    elif positions is not None and positions < settings.max_length:
        settings = dataclasses.replace(settings, max_length=positions, doc_stride=positions // 4)
    if max_length is not None:
        if positions is not None and max_length > positions:
            raise UsageError(f"max_length={max_length}: the model has {positions} positions")
        settings = dataclasses.replace(
            settings, max_length=max_length, doc_stride=min(settings.doc_stride, max_length // 4)
        )
    return settings


class QuestionAnsweringPipeline:
    """Answers questions about texts of any length.

    Attributes:
        target: where it runs, and whether that is emulated.
        notes: what was chosen on the way, e.g. the IPU config.
    """

    def __init__(
        self,
        task: Any,
        predictor: Predictor,
        target: targets.Target,
        notes: Sequence[str] = (),
        max_sequences: int = 1,
    ) -> None:
        self.target = target
        self._max_sequences = max_sequences
        self.notes = list(notes)
        self._task = task
        self._predictor = predictor

    def __call__(
        self,
        questions: Union[Mapping[str, str], Sequence[Mapping[str, str]], None] = None,
        *,
        question: Optional[str] = None,
        context: Optional[str] = None,
    ) -> Union[Dict[str, Any], List[Dict[str, Any]]]:
        """Answer one question or several.

        Args:
            questions: one mapping with ``question`` and ``context``, or a list of them.
            question: with `context`, instead of `questions`.
            context: the text that holds the answer.

        Returns:
            For each question ``{"answer", "start", "end", "score"}``: the text, its characters in the context (equal
            where there is no answer), and its share among the best candidates, 0 to 1. A list for a list.
        """
        if questions is None:
            if question is None or context is None:
                raise UsageError("give question= and context=, or a list of mappings with both")
            return self._answer([{"question": question, "context": context}])[0]
        if isinstance(questions, Mapping):
            return self._answer([questions])[0]
        return self._answer(list(questions))

    def close(self) -> None:
        """Give the device back."""
        self._predictor.close()

    def _answer(self, items: Sequence[Mapping[str, str]]) -> List[Dict[str, Any]]:
        if not items:
            return []
        for number, item in enumerate(items):
            missing = [key for key in ("question", "context") if not str(item.get(key) or "").strip()]
            if missing:
                raise DataError(f"question {number + 1} has no {' and no '.join(missing)}")
        questions = [Question(str(i), item["question"], item["context"]) for i, item in enumerate(items)]
        features = self._task.features(questions, training=False)
        answers = self._task.answers(questions, features, *self._logits(features))
        return [
            {"answer": found.text, "start": found.start, "end": found.end, "score": round(found.probability, 6)}
            for found in answers
        ]

    def _logits(self, features: Any) -> List[np.ndarray]:
        if self._max_sequences == 1:
            return self._predictor(features.columns)
        length = self._task.settings.max_length
        rows = PackedRows.of(self._task, features.columns, length, self._max_sequences)
        return rows.restore(self._predictor(rows.columns))
