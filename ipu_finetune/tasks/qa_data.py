# SPDX-License-Identifier: Apache-2.0
"""Question-answering data sets: which one the settings name, and its training and validation questions.

| settings | training and validation |
|---|---|
| `data=FILE` | the file's questions, split as below |
| `data=FILE, validation_data=FILE2` | all of FILE; all of FILE2 |
| `dataset="squad-sample"` | the set that travels with this package, split as below |
| any other `dataset` | that data set of the hub, with its own `train` and `validation` splits |

The split of one file or one hub split: SQuAD JSON with several articles gives every `validate_every`-th article
(0, 5, 10, …) to validation; anything else gives every `validate_every`-th distinct context, so that no context is on
both sides.
"""

import difflib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ipu_finetune.errors import DataError, RecipeError, did_you_mean
from ipu_finetune.tasks.qa_files import RawFile, read_file, table_rows
from ipu_finetune.tasks.qa_questions import Question, build_questions

__all__ = ["SAMPLE", "Question", "Source", "Splits", "load"]

SAMPLE = "squad-sample"
_SAMPLE_FILE = Path(__file__).parent / "samples" / "squad_sample.json"


@dataclass(frozen=True)
class Source:
    """Where questions came from; `dataclasses.asdict` gives what a run folder's data.json holds.

    Attributes:
        kind: "file", "embedded", "hub", or "folder" for a data set's local folder.
        name: the path as it was given, or the data set's name.
        revision: the hub's commit, where it is known.
        split: the rule that separated training from validation.
        sha256: hash of the questions themselves, the same for the same questions in any file format.
        files: path as it was given -> SHA-256 of its bytes.
        counts: number of training and validation questions and of the distinct contexts of both.
    """

    kind: str
    name: str
    revision: Optional[str]
    split: str
    sha256: str
    files: Dict[str, str]
    counts: Dict[str, int]


class Splits(NamedTuple):
    """The questions to train on, the questions to validate on, and where they came from."""

    train: List[Question]
    validation: List[Question]
    source: Source


class _Loaded(NamedTuple):
    kind: str
    name: str
    train: List[Question]
    validation: List[Question]
    split: str
    files: Dict[str, str]
    revision: Optional[str] = None


def load(settings: Any) -> Splits:
    """Load the data set that the settings name.

    Args:
        settings: a recipe's `QuestionAnswering`: `dataset`, `data`, `validation_data`, `validate_every`, `version_2`.

    Raises:
        DataError: the data set is absent, broken, empty, or holds questions that cannot be used.
        RecipeError: `validate_every` is below 2.
    """
    if settings.validate_every < 2:
        raise RecipeError(
            [f"task.validate_every={settings.validate_every}: must be 2 or more, or nothing is left to train on"]
        )
    if settings.data:
        loaded = _from_file(settings.data, "file", settings.data, settings)
    elif settings.dataset == SAMPLE:
        loaded = _from_file(str(_SAMPLE_FILE), "embedded", SAMPLE, settings)
    else:
        loaded = _from_hub(settings.dataset, settings)
    for questions, side in ((loaded.train, "training"), (loaded.validation, "validation")):
        if not questions:
            other = len(loaded.validation) if side == "training" else len(loaded.train)
            raise DataError(
                f"{loaded.name}: no {side} questions: all {other:,} fall on the other side ({loaded.split}). "
                "Give more articles or contexts, another task.validate_every, or a file to validate on in "
                "task.validation_data"
            )
    counts = {
        "train": len(loaded.train),
        "validation": len(loaded.validation),
        "train_contexts": len({question.context for question in loaded.train}),
        "validation_contexts": len({question.context for question in loaded.validation}),
    }
    sha256 = _content_hash(loaded.train, loaded.validation)
    source = Source(loaded.kind, loaded.name, loaded.revision, loaded.split, sha256, loaded.files, counts)
    return Splits(loaded.train, loaded.validation, source)


def _from_file(path: str, kind: str, name: str, settings: Any) -> _Loaded:
    shown = settings.validation_data
    if shown and Path(shown).resolve() == Path(path).resolve():
        raise DataError(f"{shown}: trains and validates; leave task.validation_data out to have the file split")
    raw, questions = _questions_of(path, name, settings)
    if shown:
        other, validation = _questions_of(shown, shown, settings)
        return _Loaded(kind, name, questions, validation, "a file each", {name: raw.sha256, shown: other.sha256})
    articles = [row.article for row in raw.rows] if raw.articles > 1 else None
    train, validation, rule = _split(questions, articles, settings.validate_every)
    return _Loaded(kind, name, train, validation, rule, {name: raw.sha256})


def _questions_of(path: str, name: str, settings: Any) -> Tuple[RawFile, List[Question]]:
    raw = read_file(path)
    return raw, build_questions(name, raw.rows, settings.version_2)


def _split(
    questions: List[Question], articles: Optional[List[int]], every: int
) -> Tuple[List[Question], List[Question], str]:
    if articles is None:
        positions: Dict[str, int] = {}
        groups = [positions.setdefault(question.context, len(positions)) for question in questions]
    else:
        groups = articles
    sides: Tuple[List[Question], List[Question]] = ([], [])
    for question, group in zip(questions, groups):
        sides[group % every == 0].append(question)
    unit = "context" if articles is None else "article"
    return sides[0], sides[1], f"one {unit} in {every} validates: 0, {every}, {2 * every}, …"


def _content_hash(*splits: List[Question]) -> str:
    digest = hashlib.sha256()
    for questions in splits:
        for q in questions:
            row = [q.id, q.title, q.context, q.question, q.answers, q.is_impossible]
            digest.update(json.dumps(row, ensure_ascii=True).encode("ascii") + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _from_hub(name: str, settings: Any) -> _Loaded:
    data = _load_hub(name)
    if "train" not in data:
        raise DataError(f"data set '{name}' has no 'train' split; it has {', '.join(data)}")
    kind = "folder" if Path(name).is_dir() else "hub"
    train = _hub_questions(name, data, "train", settings)
    revision = _hub_revision(data)
    if settings.validation_data:
        path = settings.validation_data
        raw, validation = _questions_of(path, path, settings)
        return _Loaded(kind, name, train, validation, "its train split; a file", {path: raw.sha256}, revision)
    if "validation" in data:
        validation = _hub_questions(name, data, "validation", settings)
        return _Loaded(kind, name, train, validation, "its own train and validation", {}, revision)
    train, validation, rule = _split(train, None, settings.validate_every)
    return _Loaded(kind, name, train, validation, f"its train split; {rule}", {}, revision)


def _hub_questions(name: str, data: Any, split: str, settings: Any) -> List[Question]:
    columns = data[split][:]
    records = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return build_questions(f"data set '{name}', split {split}", table_rows(records, "row"), settings.version_2)


def _hub_revision(data: Any) -> Optional[str]:
    # Files of a hub data set are named hf://datasets/NAME@COMMIT/FILE.
    for source in data["train"].info.download_checksums or {}:
        match = re.search(r"@([0-9a-f]{40})/", source)
        if match:
            return match.group(1)
    return None


def _load_hub(name: str) -> Any:
    # Imported here: datasets takes over a second to load, and a local file needs none of it.
    import datasets

    if Path(name).is_file():
        raise DataError(f"data set '{name}' is a file; give it as task.data (--data {name})")
    if not Path(name).is_dir():
        reason = _unreachable(name)
        if reason and not _cached(name, Path(datasets.config.HF_DATASETS_CACHE)):
            raise _hub_error(name, reason)
    try:
        # A data set that is a Python script is refused: its code would run here.
        return datasets.load_dataset(name, trust_remote_code=False)
    except Exception as error:
        raise _hub_error(name, f"{type(error).__name__}: {_first_line(error)}") from error


def _unreachable(name: str) -> str:
    """Say why the hub does not give `name`, or "". One quick question: `load_dataset` itself retries for 20 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=10)
    except (OSError, ValueError) as error:  # what requests and huggingface_hub raise
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _cached(name: str, cache: Path) -> bool:
    # datasets names the folder NAMESPACE___NAME, with its own idea of where underscores and capitals go
    wanted = name.replace("/", "").replace("_", "").lower()
    return cache.is_dir() and any(folder.name.replace("_", "").lower() == wanted for folder in cache.iterdir())


def _hub_error(name: str, reason: str) -> DataError:
    embedded = did_you_mean(name, [SAMPLE]) if difflib.get_close_matches(name, [SAMPLE], cutoff=0.75) else ""
    return DataError(
        f"data set '{name}'{embedded} cannot be loaded from the Hugging Face hub, and the local cache has no usable "
        f"copy. {reason}\nGive a local file instead (--data FILE: SQuAD JSON, CSV, JSON Lines or Parquet), or load the "
        "data set once on a machine that reaches the hub, copy its cache here and set HF_HUB_OFFLINE=1"
    )


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    # requests nests the whole call into its message; the reason stands at the end of it.
    caused = re.search(r"Caused by (\w+)\(", text)
    if caused:
        host = re.search(r"host=\\?'([^'\\]+)", text)
        return f"{host.group(1) if host else 'the hub'} cannot be reached ({caused.group(1)})"
    return text if len(text) <= 200 else text[:199] + "…"
