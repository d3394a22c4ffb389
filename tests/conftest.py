# SPDX-License-Identifier: Apache-2.0
"""What all tests share; nothing heavy is imported before a test asks for it."""

import atexit
import importlib.util
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# Tiny models gain nothing from more threads, and on a busy machine lose a lot. Set before torch is imported, and for the
# commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A virtual pod of their own: nobody else's emulator takes IPUs from these tests, nor they from it.
for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[name] = tempfile.mkdtemp(prefix="ipu-finetune-tests-")
    atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)

# A job in the background starts with interrupts ignored, and so would the scripts that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


def pytest_ignore_collect(collection_path):
    """Where torch is missing, only what tests the pure rooms is collected; a folder's conftest may need torch too."""
    if importlib.util.find_spec("torch") is not None:
        return None
    if collection_path.is_dir():
        files = list(collection_path.rglob("test_*.py"))
    else:
        files = [collection_path] if collection_path.name.startswith("test_") else []
    pure = any("pytest.mark.pure" in path.read_text(encoding="utf-8") for path in files)
    return True if files and not pure else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a BERT of 2 layers and hidden size 32, random weights, no dropout, and a real tokenizer."""
    import torch
    import transformers

    from ipu_finetune.models.pretrained import find_checkpoint, load_tokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    tokenizer = load_tokenizer(find_checkpoint("sentence-transformers/all-MiniLM-L6-v2"))
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A SQuAD v1.1 file: 10 articles of 3 paragraphs with 2 questions; articles 0 and 5 validate (12 questions)."""
    colours = ["red", "green", "blue", "white", "black", "brown", "grey", "pink", "gold", "teal"]
    articles = []
    for a, colour in enumerate(colours):
        paragraphs = []
        for p in range(3):
            context = f"The house number {a * 3 + p} is {colour} and its gate was built in {1900 + 7 * a + p}."
            qas = [
                {"question": f"What colour is house {a * 3 + p}?", "text": colour},
                {"question": f"When was the gate of house {a * 3 + p} built?", "text": str(1900 + 7 * a + p)},
            ]
            for q, qa in enumerate(qas):
                text = qa.pop("text")
                qa.update(id=f"{a}-{p}-{q}", answers=[{"text": text, "answer_start": context.index(text)}])
            paragraphs.append({"context": context, "qas": qas})
        articles.append({"title": colour, "paragraphs": paragraphs})
    path = tmp_path_factory.mktemp("data") / "houses.json"
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


@pytest.fixture
def tiny_recipe(tiny_model, tiny_data):
    """Return a function that builds a small, valid recipe; keyword arguments replace `section__field` values."""
    import dataclasses

    from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

    def build(**changes):
        recipe = Recipe(
            model=Model("tiny", str(tiny_model), dropout=0.0),
            task=QuestionAnswering("houses", data=str(tiny_data), max_length=64, doc_stride=16, max_answer_length=5),
            ipu=Ipu("minilm", layers_per_ipu=[2], inference_layers_per_ipu=[2]),
            packing=Packing(enabled=False),
            training=Training(
                global_batch_size=8,
                learning_rate=1e-3,
                micro_batch_size=4,
                eval_batch_size=4,
                epochs=2,
                logging_steps=1,
            ),
        )
        sections = {}
        for name, value in changes.items():
            section, _, key = name.partition("__")
            sections.setdefault(section, {})[key] = value
        return dataclasses.replace(
            recipe, **{name: dataclasses.replace(getattr(recipe, name), **values) for name, values in sections.items()}
        )

    return build
