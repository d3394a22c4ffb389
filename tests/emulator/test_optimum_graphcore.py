# SPDX-License-Identifier: Apache-2.0
"""Unmodified optimum-graphcore 0.7.1 on the emulator, compared with plain transformers and hand-written PyTorch."""

import copy
import importlib
import pkgutil

import pytest
import torch

pytest.importorskip("optimum.version")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # two-year-old libraries on a new PyTorch warn about each other
    pytest.mark.usefixtures("installed"),
]

FAMILIES = [
    "bart",
    "bert",
    "convnext",
    "deberta",
    "distilbert",
    "gpt2",
    "groupbert",
    "hubert",
    "lxmert",
    "mpnet",
    "mt5",
    "roberta",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
]


def graphcore():
    return importlib.import_module("optimum.graphcore")


def test_every_model_family_imports():
    graphcore()
    models = importlib.import_module("optimum.graphcore.models")
    for info in pkgutil.walk_packages(models.__path__, models.__name__ + "."):
        importlib.import_module(info.name)
    found = {info.name for info in pkgutil.iter_modules(models.__path__)}
    assert set(FAMILIES) <= found


def test_nothing_is_compiled_for_custom_operators():
    graphcore()
    from optimum.graphcore.custom_ops.sdk_version_hash import sdk_version_hash

    assert "emulator" in sdk_version_hash()
    importlib.import_module("optimum.graphcore.quantization")


def test_group_quantisation_unpacks_as_on_the_host():
    graphcore()
    from optimum.graphcore.quantization import group_quantize_compress, group_quantize_decompress

    from ipu_finetune.emulator import poptorch

    weights = torch.randn(8, 32).half()
    packed = group_quantize_compress(weights, 8)
    expected = group_quantize_decompress(*packed)

    class Unpack(torch.nn.Module):
        def forward(self, data, scale, bias):
            return group_quantize_decompress(data, scale, bias)

    torch.testing.assert_close(poptorch.inferenceModel(Unpack())(*packed), expected)


# ---- a training job

SEQUENCE, ROWS = 16, 48
D, A, R, B = 2, 4, 2, 2
EPOCHS, LEARNING_RATE, DECAY, EPSILON = 2, 1e-3, 0.05, 1e-6


class Questions(torch.utils.data.Dataset):
    """Random token sequences of different length; remembers the order in which it is read."""

    def __init__(self, rows=ROWS):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, 64, (rows, SEQUENCE), generator=generator)
        self.lengths = torch.randint(8, SEQUENCE + 1, (rows,), generator=generator)
        self.starts = torch.randint(0, 8, (rows,), generator=generator)
        self.ends = torch.randint(0, 8, (rows,), generator=generator)
        self.order = []

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        self.order.append(int(index))
        return {
            "input_ids": self.ids[index],
            "attention_mask": (torch.arange(SEQUENCE) < self.lengths[index]).long(),
            "token_type_ids": (torch.arange(SEQUENCE) >= 4).long(),
            "start_positions": self.starts[index],
            "end_positions": self.ends[index],
        }

    def batch(self, indices):
        columns = [self[index] for index in indices]
        return {key: torch.stack([column[key] for column in columns]) for key in columns[0]}


def tiny_bert():
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    return BertForQuestionAnswering(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=SEQUENCE,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def ipu_trainer(folder, model, dataset, **arguments):
    og = graphcore()
    ipu_config = og.IPUConfig(
        layers_per_ipu=[1, 3],
        ipus_per_replica=2,
        embedding_serialization_factor=2,
        replication_factor=R,
        gradient_accumulation_steps=A,
        device_iterations=D,
        inference_device_iterations=4,
        inference_replication_factor=1,
        matmul_proportion=[0.2, 0.15],
        optimizer_state_offchip=True,
        replicated_tensor_sharding=True,
        recompute_checkpoint_every_layer=True,
        output_mode="all",
        executable_cache_dir="disabled",
        seed=42,
    )
    settings = {
        "per_device_train_batch_size": B,
        "per_device_eval_batch_size": 2,
        "fp32": True,
        "num_train_epochs": EPOCHS,
        "learning_rate": LEARNING_RATE,
        "weight_decay": DECAY,
        "adam_epsilon": EPSILON,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_drop_last": False,
    }
    args = og.IPUTrainingArguments(str(folder), **{**settings, **arguments})
    return og.IPUTrainer(model=model, ipu_config=ipu_config, args=args, train_dataset=dataset, eval_dataset=dataset)


def plain_training(model, dataset, order):
    """The same job as a loop over micro-batches, with AdamW without bias correction written out."""
    combined = D * A * R * B
    calls = [order[start : start + combined] for start in range(0, len(order), combined)]
    names = dict(model.named_parameters())
    state = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in names.items()}
    losses = []
    for call, indices in enumerate(calls):
        lr = LEARNING_RATE * (1 - call / len(calls))
        for d in range(D):
            model.zero_grad()
            for k in range(A * R):
                start = (d * A * R + k) * B
                loss = model(**dataset.batch(indices[start : start + B])).loss
                (loss / (A * R)).backward()
                losses.append(loss.item())
            with torch.no_grad():
                for name, p in names.items():
                    m, v = state[name]
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    v.mul_(0.999).add_(p.grad * p.grad, alpha=0.001)
                    decay = 0.0 if "bias" in name or "LayerNorm" in name else DECAY
                    p.sub_(lr * (m / (v.sqrt() + EPSILON) + decay * p))
    return losses


def same_weights(model, expected):
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name], weight, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_ipu_trainer_trains_and_evaluates_as_plain_pytorch_does(tmp_path):
    model, dataset = tiny_bert(), Questions(D * A * R * B * 2)
    twin = copy.deepcopy(model)
    trainer = ipu_trainer(tmp_path, model, dataset)
    result = trainer.train()
    trained = dataset.order
    order = trained[D * A * R * B :]  # the first combined batch is read once more, to compile with
    assert len(order) == EPOCHS * len(dataset)
    losses = plain_training(twin, dataset, order)
    assert result.training_loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    per_call = torch.tensor(losses).reshape(-1, D * A * R).mean(1)
    torch.testing.assert_close(torch.tensor(logged), per_call, rtol=0, atol=6e-5)  # logged with four digits
    assert trainer.training_model.emulation.updates == EPOCHS * 2 * D
    assert trainer.training_model.emulation.ipus == 4

    predictions = trainer.predict(dataset)
    with torch.no_grad():
        expected = twin.eval()(**dataset.batch(range(len(dataset))))
    torch.testing.assert_close(torch.tensor(predictions.predictions[0]), expected.start_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(predictions.predictions[1]), expected.end_logits, rtol=1e-4, atol=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), abs=1e-5)
    same_weights(trainer.model.deparallelize(), twin)


def test_evaluating_and_saving_in_between_changes_no_weight(tmp_path):
    found = []
    for extra in ({}, {"evaluation_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}):
        trainer = ipu_trainer(tmp_path / str(len(found)), tiny_bert(), Questions(64), num_train_epochs=1, **extra)
        trainer.train()
        found.append({name: value.clone() for name, value in trainer.model.deparallelize().state_dict().items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_a_checkpoint_holds_the_trained_weights_and_a_plain_optimizer_state(tmp_path):
    from transformers import BertForQuestionAnswering

    trainer = ipu_trainer(tmp_path, tiny_bert(), Questions(64), num_train_epochs=1, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    loaded = BertForQuestionAnswering.from_pretrained(folder)
    same_weights(trainer.model.deparallelize(), loaded)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["ipu_state"]["Step___bert.encoder.layer.3.output.dense.weight"] == 2 * D


def test_half_precision_training_brings_the_loss_down(tmp_path):
    dataset = Questions(D * A * R * B)
    trainer = ipu_trainer(
        tmp_path, tiny_bert(), dataset, fp32=False, loss_scaling=1024.0, num_train_epochs=8, learning_rate=3e-3
    )
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged[-1] < logged[0] - 0.3
    assert trainer.model.qa_outputs.weight.dtype == torch.float16


def test_a_tokenless_inference_model_answers_as_transformers_does():
    og = graphcore()
    from optimum.graphcore.modeling_utils import to_pipelined

    model = tiny_bert().eval()
    config = og.IPUConfig(layers_per_ipu=[2, 2], ipus_per_replica=2, inference_device_iterations=2)
    pipelined = to_pipelined(model, config)
    pipelined.parallelize()
    import poptorch

    inference = poptorch.inferenceModel(pipelined.eval(), config.to_options(for_inference=True))
    batch = Questions().batch(range(4))
    batch = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    found = inference(**batch)
    with torch.no_grad():
        expected = model(**batch)
    assert type(found) is type(expected) or isinstance(found, tuple)
    torch.testing.assert_close(found[0], expected.start_logits)
    names = [block for segment in inference.emulation.layout.segments for block in segment.blocks]
    assert names == ["Embedding", "Encoder0", "Encoder1", "Encoder2", "Encoder3", "QA Outputs"]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_equals_transformers(use_cache, beams):
    og = graphcore()
    from optimum.graphcore.modeling_utils import to_pipelined
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).eval()
    ids = torch.randint(2, 32, (1, 8))
    asked = {"max_length": 8, "num_beams": beams, "use_cache": use_cache}
    expected = model.generate(ids, **asked)
    config = og.IPUConfig(layers_per_ipu=[2, 2], ipus_per_replica=2)
    pipelined = to_pipelined(copy.deepcopy(model), config)
    pipelined.parallelize(for_generation=True, batch_size=1, **asked)
    found = pipelined.eval().generate(ids, **asked)
    assert found.tolist() == expected.tolist()
    pipelined.destroy()
