# SPDX-License-Identifier: Apache-2.0
"""A recipe: a model and a task, how they lie on IPUs, how they are trained, and what quality to expect.

`problems` finds everything that is wrong with a recipe at once; `to_dict` and `from_dict` are its JSON twin.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Type

from ipu_finetune import ipu_config
from ipu_finetune._fields import convert, hints, render, rule_broken
from ipu_finetune._ipu_fields import DERIVED, Ipu
from ipu_finetune._ipu_files import Facts
from ipu_finetune._sections import Goal, Model, Packing, QuestionAnswering, Training
from ipu_finetune.batching import gradient_accumulation
from ipu_finetune.errors import DoesNotFitError, RecipeError, did_you_mean

__all__ = [
    "SECTIONS",
    "TASKS",
    "Goal",
    "Ipu",
    "Model",
    "Packing",
    "QuestionAnswering",
    "Recipe",
    "Training",
    "check",
    "fingerprint",
    "from_dict",
    "problems",
    "to_dict",
    "unknown_key",
]

# What [CLS], two [SEP] and a question of a few words take from a window before any context.
_WINDOW_OVERHEAD = 3
_QUESTION_ROOM = 16


@dataclass(frozen=True)
class Recipe:
    """All that defines a fine-tuning run, except the machine it runs on."""

    model: Model
    task: QuestionAnswering
    ipu: Ipu
    packing: Packing
    training: Training
    goal: Optional[Goal] = None

    @property
    def name(self) -> str:
        """Model and data set, as the run's folder is called."""
        return f"{self.model.name}-{self.task.dataset}".replace("/", "-")


TASKS: Dict[str, Type[QuestionAnswering]] = {QuestionAnswering.kind: QuestionAnswering}

SECTIONS: Dict[str, type] = {
    "model": Model,
    "task": QuestionAnswering,
    "ipu": Ipu,
    "packing": Packing,
    "training": Training,
    "goal": Goal,
}


def check(recipe: Recipe, known: Optional[Facts] = None) -> None:
    """Raise `RecipeError` with every problem of the recipe, if there is one; see `problems`."""
    found = problems(recipe, known)
    if found:
        # A recipe whose parts are not sections has no name to give.
        raise RecipeError(found, where=f"recipe {recipe.name}" if isinstance(recipe.model, Model) else "recipe")


def problems(recipe: Recipe, known: Optional[Facts] = None) -> List[str]:
    """Return every problem of a recipe: types, ranges, choices, and what does not go together.

    Args:
        recipe: the recipe.
        known: the model's layers and vocabulary, where they are known already, to be held against the layout.
    """
    found = [
        f"{name}={section!r}: must be {cls.__name__}(...)"
        for name, cls in SECTIONS.items()
        for section in [getattr(recipe, name)]
        if not (isinstance(section, cls) or (name == "goal" and section is None))
    ]
    if found:
        return found
    broken = set()
    for name, section in _sections(recipe).items():
        if name != "ipu":  # its fields are checked together with the config file
            fields = _field_problems(name, section)
            found += fields
            broken |= {name} if fields else set()
    layers, vocab_size = (known.layers, known.vocab_size) if known else (None, None)
    layout = ipu_config.problems(recipe.ipu, model_layers=layers, vocab_size=vocab_size)
    found += layout
    # Sums and comparisons are only safe where every field has its declared type and range.
    for name, rules in _SECTION_RULES.items():
        found += rules(getattr(recipe, name)) if name not in broken else []
    if "training" not in broken and not layout:
        found += _batch_problems(recipe)
    return found


def _sections(recipe: Recipe) -> Dict[str, Any]:
    every = {name: getattr(recipe, name) for name in SECTIONS}
    return {name: section for name, section in every.items() if section is not None}


def _field_problems(name: str, section: Any) -> List[str]:
    found = []
    declared = hints(type(section))
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        rule = rule_broken(value, declared[each.name], each.metadata)
        if rule:
            found.append(f"{name}.{each.name}={render(value)}: {rule}")
    return found


def _model_problems(model: Model) -> List[str]:
    found = []
    if model.revision is not None and Path(model.checkpoint).expanduser().is_dir():
        found.append(f"model.revision={model.revision}: {model.checkpoint} is a folder, which has no revisions")
    if model.allow_pickle and model.init == "config":
        found.append("model.allow_pickle has no effect with model.init=config, which loads no weights")
    return found


def _task_problems(task: QuestionAnswering) -> List[str]:
    found = []
    room = task.max_length - _WINDOW_OVERHEAD - task.doc_stride
    if room < _QUESTION_ROOM:
        most = max(0, task.max_length - _WINDOW_OVERHEAD - _QUESTION_ROOM)
        found.append(
            f"task.doc_stride={task.doc_stride} leaves {max(room, 0)} of task.max_length={task.max_length} tokens for "
            f"the question and new context (needs {_QUESTION_ROOM}); use a doc_stride of at most {most}"
        )
    if task.max_answer_length >= task.max_length:
        found.append(
            f"task.max_answer_length={task.max_answer_length}: must be less than task.max_length={task.max_length}"
        )
    if task.validation_data is not None and task.data is None:
        found.append("task.validation_data needs task.data; without it the data set's own validation split is used")
    splits_itself = task.data is not None and task.validation_data is None
    if task.validate_every != _default(task, "validate_every") and not splits_itself:
        found.append(
            f"task.validate_every={task.validate_every} has no effect: it divides task.data where there is no "
            "task.validation_data"
        )
    if task.null_threshold != _default(task, "null_threshold") and not task.version_2:
        found.append(f"task.null_threshold={task.null_threshold} has no effect without task.version_2=true")
    return found


def _default(section: Any, name: str) -> Any:
    return next(each.default for each in dataclasses.fields(section) if each.name == name)


def _packing_problems(packing: Packing) -> List[str]:
    if packing.verify and not packing.enabled:
        return ["packing.verify=true has no effect with packing.enabled=false: there are no packs to verify"]
    return []


_SECTION_RULES: Dict[str, Callable[[Any], List[str]]] = {
    "model": _model_problems,
    "task": _task_problems,
    "packing": _packing_problems,
}


def _batch_problems(recipe: Recipe) -> List[str]:
    """Ask the batch arithmetic whether the pod's replicas can make the global batch."""
    training = recipe.training
    replicas = 1
    if recipe.ipu.config != ipu_config.AUTO:
        try:
            replicas = ipu_config.resolve(recipe.ipu)["replication_factor"]
        except DoesNotFitError:
            return []  # not a fault of the recipe: whoever runs it gets that error, with its own exit code
    per_pack = None
    if recipe.packing.enabled:
        # How many sequences share a pack only the data tell; that there is at least one is certain.
        if training.micro_batch_size * replicas <= training.global_batch_size:
            return []
        per_pack = 1.0
    try:
        gradient_accumulation(training.global_batch_size, training.micro_batch_size, replicas, per_pack)
    except RecipeError as error:
        return error.problems
    return []


def unknown_key(section: str, key: str) -> str:
    """Say why a section's key cannot be set, and which one may be meant."""
    if section == "ipu" and key in DERIVED:
        return f"cannot be set; it {DERIVED[key]}"
    return f"unknown key{did_you_mean(key, hints(SECTIONS[section]))}"


def to_dict(recipe: Recipe) -> Dict[str, Any]:
    """Return the recipe as JSON-ready data; integers that stand for numbers become numbers.

    The `task` section has its `kind` beside its fields.
    """
    content: Dict[str, Any] = {}
    for name, section in _sections(recipe).items():
        declared = hints(type(section))
        content[name] = {key: convert(getattr(section, key), hint) for key, hint in declared.items()}
    content["task"] = {"kind": recipe.task.kind, **content["task"]}
    return content


def from_dict(content: Mapping[str, Any]) -> Recipe:
    """Build a recipe from what `to_dict` wrote.

    Raises:
        RecipeError: unknown, missing or mistyped keys; all of them at once. Ranges are left to `check`.
    """
    found = [f"{name}: unknown section{did_you_mean(name, SECTIONS)}" for name in content if name not in SECTIONS]
    parts: Dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        given = content.get(name)
        if given is None:
            if name != "goal":
                found.append(f"{name}: section is missing")
        elif not isinstance(given, Mapping):
            found.append(f"{name}={render(given)}: must be a JSON object")
        else:
            values = _section_values(name, cls, given, found)
            parts[name] = (cls, values)
    if found:
        raise RecipeError(found)
    return Recipe(**{name: cls(**values) for name, (cls, values) in parts.items()})


def _section_values(name: str, cls: type, given: Mapping[str, Any], found: List[str]) -> Dict[str, Any]:
    """Return the section's converted values; what is wrong goes to `found`."""
    given = dict(given)
    if name == "task":
        kind = given.pop("kind", QuestionAnswering.kind)
        if kind not in TASKS:
            found.append(f"task.kind={render(kind)}: unknown task{did_you_mean(str(kind), TASKS)}")
    values = {}
    declared = hints(cls)
    for key, value in given.items():
        if key not in declared:
            found.append(f"{name}.{key}: {unknown_key(name, key)}")
            continue
        try:
            values[key] = convert(value, declared[key])
        except ValueError as error:
            found.append(f"{name}.{key}={render(value)}: {error}")
    required = [each.name for each in dataclasses.fields(cls) if each.default is dataclasses.MISSING]
    found += [f"{name}.{key}: is missing" for key in required if key not in given]
    return values


def fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of the recipe's canonical JSON, the same for equal recipes on every machine."""
    text = json.dumps(to_dict(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
