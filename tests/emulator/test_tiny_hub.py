# SPDX-License-Identifier: Apache-2.0
"""The local hub: plain `from_pretrained(name)` and `load_dataset(name)` work on it, and layouts fit the models."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ipu_finetune.emulator.conformance.tiny_hub import web
from ipu_finetune.emulator.conformance.tiny_hub.__main__ import main
from ipu_finetune.emulator.conformance.tiny_hub.layout import HubFolder
from ipu_finetune.emulator.conformance.tiny_hub.models import MODELS, write_model

pytest.importorskip("optimum.version")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # two-year-old libraries on a new PyTorch warn about each other
    pytest.mark.usefixtures("installed"),
]

# Architecture, checkpoint, layout: the pairs that optimum-graphcore's tests put together.
PAIRS = [
    ("BartForConditionalGeneration", "facebook/bart-base", "bart-base-ipu"),
    ("BertForPreTraining", "bert-base-uncased", "bert-base-ipu"),
    ("ConvNextForImageClassification", "facebook/convnext-base-224", "convnext-base-ipu"),
    ("DebertaForMaskedLM", "microsoft/deberta-base", "deberta-base-ipu"),
    ("DistilBertForMaskedLM", "distilbert-base-uncased", "distilbert-base-ipu"),
    ("GPT2LMHeadModel", "gpt2", "gpt2-small-ipu"),
    ("GroupBertForMaskedLM", "Graphcore/groupbert-base-uncased", "groupbert-base-uncased"),
    ("HubertForSequenceClassification", "facebook/hubert-base-ls960", "hubert-base-ipu"),
    ("LxmertForQuestionAnswering", "unc-nlp/lxmert-base-uncased", "lxmert-base-ipu"),
    ("MPNetForMaskedLM", "sentence-transformers/all-mpnet-base-v2", "mpnet-base-ipu"),
    ("MT5ForConditionalGeneration", "google/mt5-small", "mt5-small-ipu"),
    ("RobertaForMaskedLM", "roberta-base", "roberta-base-ipu"),
    ("T5ForConditionalGeneration", "t5-small", "t5-small-ipu"),
    ("T5EncoderModel", "sentence-transformers/sentence-t5-base", "sentence-t5-base"),
    ("ViTForImageClassification", "google/vit-base-patch16-224-in21k", "vit-base-ipu"),
    ("Wav2Vec2ForCTC", "facebook/wav2vec2-base", "wav2vec2-ctc-base-ipu"),
    ("Wav2Vec2ForPreTraining", "facebook/wav2vec2-base", "wav2vec2-base-ipu"),
    ("WhisperForConditionalGeneration", "openai/whisper-tiny", "whisper-tiny-ipu"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    from ipu_finetune import emulator

    folder = tmp_path_factory.mktemp("hub")
    emulator.install()
    assert main([str(folder)]) == 0
    emulator.uninstall()
    return folder


def test_a_python_without_network_finds_models_data_and_layouts_by_name(hub):
    script = """
import json, transformers, datasets
from ipu_finetune import emulator
emulator.install()
from optimum.graphcore import IPUConfig
auto = transformers.AutoTokenizer.from_pretrained
tone = datasets.load_dataset("hf-internal-testing/librispeech_asr_dummy", "clean", split="validation").sort("id")[40]
print(json.dumps({
    "lengths": [
        len(auto("hf-internal-testing/tiny-random-bart")("Justin Timberlake and Jessica Biel, welcome to parenthood.").input_ids),
        len(auto("hf-internal-testing/tiny-random-gpt2")("Justin Timberlake.").input_ids),
    ],
    "layers": IPUConfig.from_pretrained("Graphcore/convnext-base-ipu").layers_per_ipu,
    "class": type(transformers.AutoModel.from_pretrained("roberta-base")).__name__,
    "extractor": type(transformers.AutoFeatureExtractor.from_pretrained("facebook/wav2vec2-base")).__name__,
    "no_timestamps": transformers.GenerationConfig.from_pretrained("Graphcore/whisper-tiny-ipu").no_timestamps_token_id,
    "notimestamps": auto("openai/whisper-tiny").convert_tokens_to_ids("<|notimestamps|>"),
    "id": tone["id"], "samples": len(tone["audio"]["array"]), "loudest": max(tone["audio"]["array"]),
    "modes": [__import__("PIL.Image").Image.open(path).mode for path in
              datasets.load_dataset("hf-internal-testing/fixtures_image_utils", "image", split="test")["file"]],
}))
"""
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, cwd=str(root), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The lengths that optimum-graphcore's generation tests count on.
    assert found["lengths"] == [29, 9]
    assert found["layers"] == [1, 1, 1, 1]
    assert found["class"] == "RobertaModel"
    assert found["extractor"] == "Wav2Vec2FeatureExtractor"
    assert found["no_timestamps"] == found["notimestamps"] > 0
    assert (found["id"], found["samples"]) == ("0000-0040", 16_000)
    assert 0.45 < found["loudest"] <= 0.5
    assert found["modes"] == ["RGBA", "LA", "L"]


@pytest.mark.parametrize(("architecture", "checkpoint", "layout"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_each_layout_fits_its_checkpoint(hub, architecture, checkpoint, layout):
    graphcore = importlib.import_module("optimum.graphcore")
    modeling = importlib.import_module("optimum.graphcore.modeling_utils")
    folder = HubFolder(hub).repository
    config = graphcore.IPUConfig.from_pretrained(str(folder(f"Graphcore/{layout}")))
    classes = {cls.__name__: pipelined for cls, pipelined in modeling._PRETRAINED_TO_PIPELINED_REGISTRY.items()}
    model = classes[architecture].from_pretrained_transformers(str(folder(checkpoint)), config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.parallelize(**config.parallelize_kwargs)
    model.deparallelize()
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".txt")}


@pytest.mark.parametrize("name", ["bert-base-uncased", "hf-internal-testing/tiny-random-gpt2", "t5-small"])
def test_a_rebuild_gives_the_same_files_and_weights_and_leaves_the_random_state(hub, tmp_path, name):
    state = torch.random.get_rng_state()
    write_model(name, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = HubFolder(hub).repository(name)
    assert files_of(tmp_path) == files_of(first)
    first_weights, second_weights = (
        torch.load(folder / "pytorch_model.bin", weights_only=True) for folder in (first, tmp_path)
    )
    assert all(torch.equal(first_weights[key], second_weights[key]) for key in first_weights)


def test_models_of_different_names_have_different_weights(hub):
    models = [
        transformers.AutoModel.from_pretrained(str(HubFolder(hub).repository(name)))
        for name in ("hf-internal-testing/tiny-random-bart", "sshleifer/bart-tiny-random")
    ]
    assert not torch.equal(models[0].shared.weight, models[1].shared.weight)


def test_a_model_without_tokenizer_has_none(hub):
    assert MODELS["patrickvonplaten/tiny-wav2vec2-no-tokenizer"].tokenizer is None
    with pytest.raises(OSError, match="tokenizer"):
        transformers.AutoTokenizer.from_pretrained(
            str(HubFolder(hub).repository("patrickvonplaten/tiny-wav2vec2-no-tokenizer"))
        )


def test_a_plain_http_picture_is_answered_by_this_process_while_the_proxy_runs():
    import requests
    from PIL import Image

    with web.picture_proxy() as proxy:
        answer = requests.get("http://pictures.invalid/one.jpg", proxies={"http": proxy}, timeout=10)
        assert Image.open(io.BytesIO(answer.content)).size == (64, 48)
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get("http://pictures.invalid/one.jpg", proxies={"http": proxy}, timeout=10)


def test_the_plugin_names_the_proxy_only_while_it_is_configured(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://before.invalid")
    web.pytest_configure(None)
    try:
        assert os.environ["http_proxy"].startswith("http://127.0.0.1:")
    finally:
        web.pytest_unconfigure(None)
    assert os.environ["http_proxy"] == "http://before.invalid"
