# SPDX-License-Identifier: Apache-2.0
"""Reading question-answering files: SQuAD JSON, JSON records, JSON Lines, CSV, TSV and Parquet.

Nothing is checked here beyond the form of the file; `qa_data` judges what the rows say. Every row carries the place
it came from, in the terms of its own file, because that is what a user needs to mend it.
"""

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from ipu_finetune.errors import DataError, did_you_mean

__all__ = ["RawFile", "RawQuestion", "read_file", "table_rows"]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
_FORMS = (
    'SQuAD JSON ({"version": "1.1", "data": [{"title": …, "paragraphs": [{"context": …, "qas": […]}]}]}) or a list of '
    'records ({"id", "title", "context", "question", "answers": {"text": […], "answer_start": […]}})'
)


class RawQuestion(NamedTuple):
    """One question as its file holds it.

    Attributes:
        where: the place in the file, such as "line 7".
        article: position of the SQuAD article, -1 in a table.
        values: column name to value; a column that this row lacks is absent.
    """

    where: str
    article: int
    values: Mapping[str, Any]


class RawFile(NamedTuple):
    """A file's questions, its number of articles (0 for a table) and the SHA-256 of its bytes."""

    name: str
    sha256: str
    articles: int
    rows: List[RawQuestion]


def read_file(path: str) -> RawFile:
    """Read one file of questions.

    Args:
        path: a .json, .jsonl, .csv, .tsv or .parquet file.

    Raises:
        DataError: the file is absent, unreadable, of an unknown kind, or broken; with the line where that is known.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if file.is_dir():
        raise DataError(f"{path}: is a folder; name one file in it ({', '.join(_SUFFIXES)})")
    if not file.exists():
        siblings = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        near = did_you_mean(file.name, [name for name in siblings if name.lower().endswith(_SUFFIXES)])
        raise DataError(f"{path}: no such file{near}")
    if suffix not in _SUFFIXES:
        kind = f"file name ends in '{file.suffix}'" if suffix else "file name has no suffix"
        raise DataError(f"{path}: {kind}; a data file ends in one of {', '.join(_SUFFIXES)}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if suffix == ".parquet":
        return RawFile(path, sha256, 0, table_rows(_read_parquet(path, content), "row"))
    text = _decode(path, content)
    if suffix == ".jsonl":
        return RawFile(path, sha256, 0, _json_lines(path, text))
    if suffix in _DELIMITERS:
        return RawFile(path, sha256, 0, _delimited(path, text, _DELIMITERS[suffix]))
    return _json(path, text, sha256)


def table_rows(records: Sequence[Mapping[str, Any]], unit: str) -> List[RawQuestion]:
    """Wrap the records of a table, numbered from 1 as "`unit` 1", "`unit` 2", …"""
    return [RawQuestion(f"{unit} {number}", -1, record) for number, record in enumerate(records, start=1)]


def _decode(path: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: line {line}, byte {error.start}: not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error


def _json(path: str, text: str, sha256: str) -> RawFile:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            # JSON Lines is often named .json, by datasets' own to_json among others.
            return RawFile(path, sha256, 0, _json_lines(path, text))
        raise DataError(f"{path}: broken JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path}: JSON nested too deeply; expected {_FORMS}") from error
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        data = document["data"]
        if not data:
            raise DataError(f"{path}: the data set is empty: 'data' holds no article")
        if any(isinstance(item, dict) and "paragraphs" in item for item in data):
            return RawFile(path, sha256, len(data), _squad_rows(path, data))
        document = data
    if not isinstance(document, list):
        found = (
            f"an object with the keys {', '.join(list(document)[:8]) or '(none)'}"
            if isinstance(document, dict)
            else _short(document)
        )
        raise DataError(f"{path}: holds {found}; expected {_FORMS}")
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{path}: record {number} is {_short(record)}, not an object; expected {_FORMS}")
    return RawFile(path, sha256, 0, table_rows(document, "record"))


def _squad_rows(path: str, articles: Sequence[Any]) -> List[RawQuestion]:
    rows: List[RawQuestion] = []
    for i, article in enumerate(articles, start=1):
        paragraphs = _member(path, f"article {i}", article, "paragraphs")
        for j, paragraph in enumerate(paragraphs, start=1):
            place = f"article {i}, paragraph {j}"
            for k, question in enumerate(_member(path, place, paragraph, "qas"), start=1):
                where = f"{place}, question {k}"
                if not isinstance(question, dict):
                    raise DataError(f"{path}: {where} is {_short(question)}, not an object; expected {_FORMS}")
                values: Dict[str, Any] = {"title": article.get("title"), **question}
                if "context" in paragraph:
                    values["context"] = paragraph["context"]
                rows.append(RawQuestion(where, i - 1, values))
    return rows


def _member(path: str, where: str, parent: Any, key: str) -> List[Any]:
    if not isinstance(parent, dict):
        raise DataError(f"{path}: {where} is {_short(parent)}, not an object; expected {_FORMS}")
    if not isinstance(parent.get(key), list):
        problem = f"'{key}' is {_short(parent[key])}, not a list" if key in parent else f"has no '{key}'"
        hint = "" if key in parent else did_you_mean(key, parent)
        raise DataError(f"{path}: {where} {problem}{hint}; expected {_FORMS}")
    return parent[key]


def _json_lines(path: str, text: str) -> List[RawQuestion]:
    rows: List[RawQuestion] = []
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: broken JSON at line {number}, column {error.colno}: {error.msg}") from error
        except RecursionError as error:
            raise DataError(f"{path}: line {number}: JSON nested too deeply") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number} is {_short(record)}, not an object with the columns of a question")
        rows.append(RawQuestion(f"line {number}", -1, record))
    return rows


def _delimited(path: str, text: str, delimiter: str) -> List[RawQuestion]:
    limit = csv.field_size_limit(2**31 - 1)  # a context may be longer than the module's 131,072 characters
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header: List[str] = []
        rows: List[RawQuestion] = []
        line = 1
        try:
            for cells in reader:
                where, line = f"line {line}", reader.line_num + 1
                if not cells:
                    continue
                if not header:
                    header = [name.strip() for name in cells]
                    repeated = sorted({name for name in header if header.count(name) > 1})
                    if repeated:
                        raise DataError(f"{path}: the header names {', '.join(map(repr, repeated))} more than once")
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}: {where} has {len(cells)} fields where the header has {len(header)} "
                        f"({', '.join(header)}); quote a field that holds the separator or a line break"
                    )
                rows.append(RawQuestion(where, -1, dict(zip(header, cells))))
        except csv.Error as error:
            raise DataError(
                f'{path}: line {reader.line_num}: {error}; quote fields with "…" and a quote as ""'
            ) from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _read_parquet(path: str, content: bytes) -> List[Dict[str, Any]]:
    # Imported here: pyarrow is only needed for this kind of file and takes a noticeable time to load.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from error
    return table.to_pylist()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
