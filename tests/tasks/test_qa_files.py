# SPDX-License-Identifier: Apache-2.0
"""Reading data files: what a broken one is told, and where in the file."""

import json

import pytest

from ipu_finetune.errors import DataError
from ipu_finetune.tasks.qa_files import read_file


def _write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"data": [\n  {"paragraphs": [}\n]}', r"line 2, column 19: Expecting value"),
        ("a.json", "", r"line 1, column 1"),
        ("a.json", '{"version": "1.1", "data": []}', r"empty"),
        ("a.json", '{"rows": []}', r"object with the keys rows; expected SQuAD JSON"),
        ("a.json", "3", r"holds 3; expected"),
        ("a.json", "[1]", r"record 1 is 1, not an object"),
        ("a.json", '{"data": [{"paragraphs": [{"context": "x", "qas": 3}]}]}', r"article 1, paragraph 1 'qas' is 3"),
        ("a.json", '{"data": [{"paragraphs": [{"context": "x", "qa": []}]}]}', r"no 'qas' \(did you mean 'qa'\?\)"),
        ("a.json", '{"data": [{"paragraphs": []}, 4]}', r"article 2 is 4, not an object"),
        ("a.json", "[" * 100_000, r"nested too deeply"),
        ("a.jsonl", '{"id": 1}\n\n{"id": 2\n', r"broken JSON at line 3, column"),
        ("a.jsonl", '{"id": 1}\n[2]\n', r"line 2 is \[2\], not an object"),
        ("a.csv", "id,context\n1,two,three\n", r"line 2 has 3 fields where the header has 2 \(id, context\)"),
        ("a.csv", 'id,context\n1,"a\nb"\n2\n', r"line 4 has 1 fields"),
        ("a.csv", 'id,context\n1,"open\n', r"line \d: unexpected end of data"),
        ("a.csv", "id,id\n1,2\n", r"header names 'id' more than once"),
        ("a.csv", b"id,context\n1,\xff\xfe\n", r"line 2, byte 13: not UTF-8"),
        ("a.parquet", "PAR1 not really", r"not a Parquet file"),
        ("a.xlsx", "x", r"ends in '.xlsx'; a data file ends in one of \.json, \.jsonl"),
        ("data", "x", r"no suffix"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path, name, content, message):
    path = _write(tmp_path, name, content)
    with pytest.raises(DataError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith(path)


def test_a_missing_file_names_the_nearest_ones(tmp_path):
    _write(tmp_path, "train.json", "[]")
    with pytest.raises(DataError, match=r"no such file \(did you mean 'train.json'\?\)"):
        read_file(str(tmp_path / "trian.json"))
    with pytest.raises(DataError, match="no such file"):
        read_file(str(tmp_path / "absent" / "x.json"))
    with pytest.raises(DataError, match="is a folder"):
        read_file(str(tmp_path))


def test_json_lines_named_json_are_read(tmp_path):
    raw = read_file(_write(tmp_path, "a.json", '{"id": "1"}\n{"id": "2"}\n'))
    assert [(row.where, row.values["id"]) for row in raw.rows] == [("line 1", "1"), ("line 2", "2")]


def test_json_lines_keep_unicode_line_separators_within_a_text(tmp_path):
    raw = read_file(_write(tmp_path, "a.jsonl", json.dumps({"id": "1", "context": "a\u2028b"}, ensure_ascii=False)))
    assert raw.rows[0].values["context"] == "a\u2028b"


def test_csv_keeps_quotes_line_breaks_long_fields_and_its_line_numbers(tmp_path):
    long = "x" * 200_000
    raw = read_file(_write(tmp_path, "a.csv", f'\ufeffid,context\r\n1,"say ""hi"",\nthen"\r\n2,{long}\r\n'))
    assert [row.where for row in raw.rows] == ["line 2", "line 4"]
    assert raw.rows[0].values == {"id": "1", "context": 'say "hi",\nthen'}
    assert raw.rows[1].values["context"] == long
