# SPDX-License-Identifier: Apache-2.0
"""Data sets: formats, splits, sources, and every error that a user's data can cause."""

import copy
import csv
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipu_finetune.errors import DataError, RecipeError
from ipu_finetune.tasks import qa_data

_XQUAD = Path(__file__).parents[2].parent / "shared" / "data" / "xquad.en.json"


def _settings(**changes):
    values = {
        "dataset": "squad",
        "data": None,
        "validation_data": None,
        "validate_every": 5,
        "version_2": False,
    }
    return SimpleNamespace(**{**values, **{key: str(v) if isinstance(v, Path) else v for key, v in changes.items()}})


def _record(number, **changes):
    context = f"😀 Café {number}: the key is red, the door is blue."
    return {
        "id": f"q{number}",
        "title": f"T{number}",
        "context": context,
        "question": "What colour is the key?",
        "answers": {"text": ["red"], "answer_start": [context.index("red")]},
        **changes,
    }


def _squad(articles, paragraphs=2, questions=2):
    """A SQuAD document in which each article, paragraph and question is numbered."""
    data = []
    for a in range(articles):
        article = {"title": f"T{a}", "paragraphs": []}
        for p in range(paragraphs):
            context = f"Ünïcode 😀 text {a}.{p} says that the key is red."
            start = context.index("red")
            qas = [
                {"id": f"{a}.{p}.{q}", "question": "Which?", "answers": [{"text": "red", "answer_start": start}]}
                for q in range(questions)
            ]
            article["paragraphs"].append({"context": context, "qas": qas})
        data.append(article)
    return {"version": "1.1", "data": data}


def _write(path, document):
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return path


def _fails(settings, *messages):
    with pytest.raises(DataError) as caught:
        qa_data.load(settings)
    text = str(caught.value)
    for message in messages:
        assert message in text
    return text


@pytest.mark.skipif(not _XQUAD.exists(), reason="the XQuAD file is not beside this checkout")
def test_xquad_gives_every_fifth_article_to_validation():
    splits = qa_data.load(_settings(data=_XQUAD))
    assert (len(splits.train), len(splits.validation)) == (899, 291)
    articles = json.loads(_XQUAD.read_text(encoding="utf-8"))["data"]
    expected = [q["id"] for a in articles[::5] for p in a["paragraphs"] for q in p["qas"]]
    assert [question.id for question in splits.validation] == expected


def test_the_embedded_sample_loads_and_keeps_paragraphs_apart():
    splits = qa_data.load(_settings(dataset="squad-sample"))
    assert splits.source.kind == "embedded"
    assert len(splits.train) + len(splits.validation) >= 600
    shared = {question.context for question in splits.train} & {question.context for question in splits.validation}
    assert not shared


def test_squad_json_splits_by_article_and_keeps_order(tmp_path):
    splits = qa_data.load(_settings(data=_write(tmp_path / "a.json", _squad(7))))
    assert [q.id for q in splits.validation] == [f"{a}.{p}.{q}" for a in (0, 5) for p in (0, 1) for q in (0, 1)]
    assert [q.id for q in splits.train][:3] == ["1.0.0", "1.0.1", "1.1.0"]
    assert splits.train[0].title == "T1"
    text, start = splits.train[0].answers[0]
    assert splits.train[0].context[start : start + len(text)] == "red", "offsets count Python characters"


def test_one_article_splits_by_distinct_context(tmp_path):
    splits = qa_data.load(_settings(data=_write(tmp_path / "a.json", _squad(1, paragraphs=7)), validate_every=3))
    assert [q.id for q in splits.validation] == [f"0.{p}.{q}" for p in (0, 3, 6) for q in (0, 1)]


def _as_csv(path, records):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows({**record, "answers": json.dumps(record["answers"])} for record in records)


def _as_flat_csv(path, records):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["answer_text", "answer_start", "id", "title", "context", "question"])
        for record in records:
            answers = record["answers"]
            writer.writerow(
                [
                    answers["text"][0],
                    answers["answer_start"][0],
                    *(record[k] for k in ("id", "title", "context", "question")),
                ]
            )


def _as_parquet(path, records):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


_WRITERS = {
    "a.json": lambda path, records: _write(path, records),
    "b.json": lambda path, records: _write(path, {"data": records}),
    "c.jsonl": lambda path, records: path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8"),
    "d.csv": _as_csv,
    "e.csv": _as_flat_csv,
    "f.parquet": _as_parquet,
}


def test_every_table_format_gives_the_same_questions_and_content_hash(tmp_path):
    records = [_record(number) for number in range(12)]
    loaded = {}
    for name, write in _WRITERS.items():
        write(tmp_path / name, records)
        loaded[name] = qa_data.load(_settings(data=tmp_path / name))
    first = loaded["a.json"]
    assert [q.id for q in first.validation] == ["q0", "q5", "q10"]
    assert [q.context for q in first.validation] == [records[i]["context"] for i in (0, 5, 10)]
    for name, splits in loaded.items():
        assert (splits.train, splits.validation) == (first.train, first.validation), name
        assert splits.source.sha256 == first.source.sha256, name


def test_the_content_hash_follows_the_content(tmp_path):
    records = [_record(number) for number in range(6)]
    before = qa_data.load(_settings(data=_write(tmp_path / "a.json", records))).source.sha256
    records[3]["question"] += "?"
    assert qa_data.load(_settings(data=_write(tmp_path / "a.json", records))).source.sha256 != before


def test_validation_data_stops_the_split(tmp_path):
    train = _write(tmp_path / "train.json", _squad(3))
    shown = _write(tmp_path / "dev.json", [_record(1), _record(2)])
    splits = qa_data.load(_settings(data=train, validation_data=shown))
    assert (len(splits.train), [q.id for q in splits.validation]) == (12, ["q1", "q2"])
    assert set(splits.source.files) == {str(train), str(shown)}
    _fails(_settings(data=train, validation_data=train), "trains and validates")


def test_the_source_becomes_json(tmp_path):
    path = _write(tmp_path / "a.json", _squad(6))
    source = json.loads(json.dumps(asdict(qa_data.load(_settings(data=path)).source)))
    assert source["counts"] == {"train": 16, "validation": 8, "train_contexts": 8, "validation_contexts": 4}
    assert source["name"] == str(path)
    assert len(source["sha256"]) == len(source["files"][str(path)]) == 64


def test_misplaced_answers_are_all_counted_and_the_first_ones_shown(tmp_path):
    document = _squad(6)
    for number, article in enumerate(document["data"]):
        article["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] -= number  # article 0 stays right
    document["data"][5]["paragraphs"][1]["qas"][1]["answers"][0]["text"] = "green"
    text = _fails(
        _settings(data=_write(tmp_path / "a.json", document)),
        "6 of 24 questions cannot be used",
        "answer text is not at its offset (characters from 0): 6",
        "'1.0.0' (article 2, paragraph 1, question 1): expected 'red' at 39, found ' re'",
        "it is at 40",
        "and 3 more",
    )
    assert "'0.0.0'" not in text


@pytest.mark.parametrize(("start", "found"), [(-1, "nothing"), (10_000, "nothing")])
def test_an_offset_outside_the_context_is_misplaced(tmp_path, start, found):
    records = [_record(0), _record(1, answers={"text": ["red"], "answer_start": [start]})]
    _fails(
        _settings(data=_write(tmp_path / "a.json", records)), f"expected 'red' at {start}, found {found}", "it is at"
    )


def test_the_nearest_occurrence_is_the_one_named(tmp_path):
    record = _record(0, context="red green red", answers={"text": ["red"], "answer_start": [9]})
    _fails(_settings(data=_write(tmp_path / "a.json", [record])), "it is at 10")
    record["answers"] = {"text": ["blue"], "answer_start": [0]}
    _fails(_settings(data=_write(tmp_path / "a.json", [record])), "found 'red '", "it is nowhere in the context")


def test_offsets_in_bytes_are_told_apart_from_characters(tmp_path):
    record = _record(0)
    record["answers"]["answer_start"] = [record["context"].encode().index(b"red")]
    _fails(_settings(data=_write(tmp_path / "a.json", [record])), f"it is at {record['context'].index('red')}")


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"context": None}, ["context is not a text: 1", "'q1' (record 2): None"]),
        ({"context": "  "}, ["context is empty: 1"]),
        ({"question": 4}, ["question is not a text: 1"]),
        ({"id": None}, ["id is not a text: 1", "record 2: None"]),
        ({"id": "q0"}, ["id used more than once", "'q0' (record 2), first used in record 1"]),
        ({"answers": "{'text': ['red']}"}, ["answers cannot be read", "not JSON"]),
        ({"answers": {"text": ["red"], "answer_start": []}}, ["two lists of the same length"]),
        ({"answers": {"text": ["red"]}}, ["is not {"]),
        ({"answers": {"text": [""], "answer_start": [3]}}, ["the answer text is ''"]),
        ({"answers": {"text": ["red"], "answer_start": ["x"]}}, ["answer_start is 'x', not a whole number"]),
        ({"answers": [{"text": "red"}]}, ["has no text and answer_start"]),
        ({"is_impossible": True}, ["is_impossible is true but there are answers"]),
        ({"is_impossible": "perhaps"}, ["is_impossible is 'perhaps', not true or false"]),
        ({"answers": {"text": [], "answer_start": []}}, ["set task.version_2=true or use the squad_v2 recipe: 1"]),
    ],
)
def test_a_faulty_row_is_named_with_its_fault(tmp_path, changes, messages):
    records = [_record(0), _record(1, **changes), _record(2)]
    _fails(_settings(data=_write(tmp_path / "a.json", records)), "1 of 3 questions cannot be used", *messages)


def test_different_faults_are_reported_together(tmp_path):
    records = [_record(0), _record(0), _record(2, context=None), _record(3, answers=[])]
    _fails(_settings(data=_write(tmp_path / "a.json", records)), "3 of 4", "more than once", "not a text", "version_2")


def test_missing_columns_name_the_nearest_and_the_present_ones(tmp_path):
    records = [{("contxt" if k == "context" else k): v for k, v in _record(0).items() if k != "answers"}]
    _fails(
        _settings(data=_write(tmp_path / "a.json", records)),
        "columns missing: 'context' (did you mean 'contxt'?); 'answers'",
        "It has: id, title, contxt, question",
    )
    (tmp_path / "a.csv").write_text("id,context,question,answer_text\n1,a,b,a\n", encoding="utf-8")
    _fails(_settings(data=tmp_path / "a.csv"), "column missing: 'answer_start'")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_an_empty_data_set_says_so(tmp_path, name):
    content = {"a.json": "[]", "a.jsonl": "\n", "a.csv": "id,context,question,answers\n"}[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    _fails(_settings(data=tmp_path / name), "the data set is empty")


def test_a_side_without_questions_is_an_error(tmp_path):
    _fails(
        _settings(data=_write(tmp_path / "a.json", _squad(1, paragraphs=1))), "no training questions", "validation_data"
    )
    document = _squad(3)
    document["data"][0]["paragraphs"] = []
    _fails(_settings(data=_write(tmp_path / "b.json", document)), "no validation questions")
    with pytest.raises(RecipeError, match="validate_every=1"):
        qa_data.load(_settings(data=_write(tmp_path / "c.json", _squad(3)), validate_every=1))


def test_impossible_questions_need_version_2(tmp_path):
    document = _squad(3)
    for article in document["data"]:
        article["paragraphs"][1]["qas"][0].update(is_impossible=True, answers=[], plausible_answers=[{"text": "x"}])
    path = _write(tmp_path / "a.json", document)
    _fails(_settings(data=path), "3 of 12", "set task.version_2=true or use the squad_v2 recipe: 3")
    splits = qa_data.load(_settings(data=path, version_2=True))
    assert [q.id for q in splits.train if q.is_impossible] == ["1.1.0", "2.1.0"]
    assert all(bool(q.answers) is not q.is_impossible for q in splits.train)


def test_a_csv_row_without_answer_text_is_impossible(tmp_path):
    (tmp_path / "a.csv").write_text(
        "id,context,question,answer_text,answer_start,is_impossible\n"
        "1,red,q,red,0,false\n2,blue,q,,,TRUE\n3,pink,q,pink,0,\n4,grey,q,,,0\n",
        encoding="utf-8",
    )
    _fails(
        _settings(data=tmp_path / "a.csv", version_2=True), "1 of 4", "is_impossible is false but there is no answer"
    )


def test_a_data_set_folder_keeps_its_own_splits(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, numbers in (("train", range(6)), ("validation", range(6, 9))):
        lines = [json.dumps(_record(number)) for number in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    splits = qa_data.load(_settings(dataset=folder))
    assert [q.id for q in splits.train] == [f"q{i}" for i in range(6)]
    assert [q.id for q in splits.validation] == ["q6", "q7", "q8"]
    assert splits.source.kind == "folder"

    bad = copy.deepcopy(_record(9))
    bad["answers"]["answer_start"][0] += 1
    (folder / "validation.jsonl").write_text(json.dumps(bad), encoding="utf-8")
    _fails(_settings(dataset=folder), "split validation: 1 of 1", "not at its offset")


def test_a_missing_hub_is_named_with_the_way_out(tmp_path):
    code = (
        "from types import SimpleNamespace as N\n"
        "from ipu_finetune.errors import DataError\n"
        "from ipu_finetune.tasks import qa_data\n"
        "for name in ('squad_v2', 'squad-sampel'):\n"
        "    try:\n"
        "        qa_data.load(N(dataset=name, data=None, validation_data=None, validate_every=5, version_2=True))\n"
        "    except DataError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    for part in (
        "'squad_v2'",
        "OfflineModeIsEnabled",
        "--data FILE",
        "HF_HUB_OFFLINE=1",
        "did you mean 'squad-sample'",
    ):
        assert part in done.stdout


def test_a_file_given_as_data_set_name_points_at_the_data_option(tmp_path):
    path = _write(tmp_path / "a.json", _squad(3))
    _fails(_settings(dataset=path), f"--data {path}")
