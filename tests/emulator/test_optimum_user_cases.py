# SPDX-License-Identifier: Apache-2.0
"""User cases that go through optimum-graphcore's own layers: U25, U59 and U65."""

import importlib

import pytest
import torch
import transformers

pytest.importorskip("optimum.version")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # two-year-old libraries on a new PyTorch warn about each other
    pytest.mark.usefixtures("installed"),
]

LEARNING_RATE = 0.5


def layout_code():
    return importlib.import_module("ipu_finetune.inference.ipu_model")


# ---- U25: a split embedding stays frozen, or stays trainable


def question_model(trainable):
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForQuestionAnswering(config)
    model.bert.embeddings.word_embeddings.weight.requires_grad_(trainable)
    return model


def question_batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, 64, (2, 8), generator=generator)


class StartLoss(torch.nn.Module):
    """The sum of the start logits' first column: any loss that reaches every layer will do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        from ipu_finetune.emulator import poptorch

        return poptorch.identity_loss(self.model(ids).start_logits[:, 0].sum(), reduction="none")


def table_after_one_step(model):
    """Return what plain PyTorch makes of the embedding table in one SGD step of the same loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    model.train()(question_batch()).start_logits[:, 0].sum().backward()
    optimizer.step()
    return model.bert.embeddings.word_embeddings.weight.detach()


@pytest.mark.parametrize("trainable", [True, False])
def test_u25_a_split_embedding_is_trained_exactly_where_the_whole_one_is(trainable):
    from ipu_finetune.emulator import poptorch

    layout = layout_code()
    config = layout.build_ipu_config({"layers_per_ipu": [1], "embedding_serialization_factor": 2})
    plain = question_model(trainable)
    before = plain.bert.embeddings.word_embeddings.weight.detach().clone()
    placed = layout.lay_out(plain, config).train()
    parts = placed.bert.embeddings.word_embeddings.split_embeddings
    assert [part.weight.requires_grad for part in parts] == [trainable, trainable]

    chosen = [parameter for parameter in placed.parameters() if parameter.requires_grad]
    optimizer = poptorch.optim.SGD(chosen, lr=LEARNING_RATE, use_combined_accum=True)
    executor = poptorch.trainingModel(StartLoss(placed), options=poptorch.Options(), optimizer=optimizer)
    executor(question_batch())
    executor.copyWeightsToHost()
    after = layout.plain_state(placed)["bert.embeddings.word_embeddings.weight"]
    executor.destroy()

    assert torch.equal(after, before) is not trainable
    torch.testing.assert_close(after, table_after_one_step(question_model(trainable)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("trainable", [True, False])
def test_u25_joining_a_split_embedding_keeps_the_flag(trainable):
    from optimum.graphcore.modeling_utils import SerializedEmbedding

    whole = torch.nn.Embedding(8, 4)
    whole.weight.requires_grad_(trainable)
    split = SerializedEmbedding(whole, 2)
    assert [part.weight.requires_grad for part in split.split_embeddings] == [trainable, trainable]
    joined = split.to_model()
    assert joined.weight.requires_grad is trainable
    assert torch.equal(joined.weight, whole.weight)


@pytest.mark.parametrize("trainable", [True, False])
def test_u25_every_frozen_weight_stays_frozen_in_a_layout(trainable):
    layout = layout_code()
    config = layout.build_ipu_config({"layers_per_ipu": [1], "embedding_serialization_factor": 2})
    plain = question_model(trainable=True)
    for parameter in plain.bert.encoder.parameters():
        parameter.requires_grad_(trainable)
    placed = layout.lay_out(plain, config)
    assert {p.requires_grad for p in placed.bert.encoder.parameters()} == {trainable}
    assert {p.requires_grad for p in placed.qa_outputs.parameters()} == {True}


def test_u25_a_split_projection_stays_frozen_with_the_embedding_that_it_shares():
    layout = layout_code()
    torch.manual_seed(1)
    config = transformers.MT5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2
    )
    plain = transformers.MT5ForConditionalGeneration(config)
    plain.lm_head.weight.requires_grad_(False)
    placed = layout.lay_out(
        plain,
        layout.build_ipu_config(
            {
                "layers_per_ipu": [1, 1, 0, 0],
                "embedding_serialization_factor": 2,
                "serialized_projection_splits_per_ipu": [0, 0, 1, 1],
            }
        ),
    )
    parts = placed.lm_head.split_linear_layers
    assert [part.weight.requires_grad for part in parts] == [False, False]
    assert placed.shared.shared.split_embeddings[0].weight.requires_grad


# ---- U59: the same tokens with and without a cache of keys and values

PROMPTS = [[3, 9, 27, 18, 2], [4, 12, 36, 45, 7, 21, 2]]
PAD, NEW_TOKENS = 1, 5


def tiny_bart():
    torch.manual_seed(4)
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        init_std=0.2,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    model.final_logits_bias[:, 2] = -1e4  # never the end token, so all 5 tokens are drawn
    # Loud positions and a head of its own: each position has another token, so a wrong position shows.
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(5)
    return model


def padded(prompts, side, length):
    rows, masks = [], []
    for prompt in prompts:
        pads = [PAD] * (length - len(prompt))
        rows.append(pads + prompt if side == "left" else prompt + pads)
        masks.append([int(token != PAD) for token in rows[-1]])
    return torch.tensor(rows), torch.tensor(masks)


def generated(model, ids, mask):
    return model.generate(ids, attention_mask=mask, max_length=NEW_TOKENS + 1, do_sample=False, num_beams=1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [1, 2])
def test_u59_greedy_tokens_are_those_of_transformers_with_and_without_a_cache(batch, side):
    importlib.import_module("optimum.graphcore")
    from optimum.graphcore import IPUConfig
    from optimum.graphcore.modeling_utils import to_pipelined

    ids, mask = padded(PROMPTS[:batch], side, length=8)
    expected = generated(tiny_bart(), ids, mask)
    assert all(len(set(row[1:])) > 2 for row in expected.tolist()), "a token repeated would hide a wrong position"

    for use_cache in (True, False):
        ipu_config = IPUConfig(inference_layers_per_ipu=[2, 2], layers_per_ipu=[2, 2]).eval()
        model = to_pipelined(tiny_bart(), ipu_config)
        kwargs = {"batch_size": batch, "max_length": NEW_TOKENS + 1, "num_beams": 1} if use_cache else {}
        model.config.use_cache = use_cache
        model.parallelize(for_generation=True, use_cache=use_cache, **kwargs)
        try:
            assert generated(model.eval(), ids, mask).tolist() == expected.tolist(), f"use_cache={use_cache}"
        finally:
            model.destroy()


# ---- U65: clipping is done, or refused


@pytest.mark.parametrize("accumulation", [1, 2])
def test_u65_a_gradient_of_norm_10_moves_the_weights_by_the_learning_rate(accumulation):
    from ipu_finetune.emulator import poptorch

    class Dot(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.zeros(1))
            self.second = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return poptorch.identity_loss((x[:, 0] * self.first + x[:, 1] * self.second).sum(), reduction="none")

    model = Dot()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0, use_combined_accum=True)
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    executor = poptorch.trainingModel(model, options=options, optimizer=optimizer)
    # d loss / d (first, second) = (6, 8): norm 10.
    executor(torch.tensor([[6.0, 8.0]]).repeat(accumulation, 1))
    executor.copyWeightsToHost()
    moved = torch.cat([model.first, model.second]).detach()
    executor.destroy()
    torch.testing.assert_close(moved, torch.tensor([-0.06, -0.08]))
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1 * 1.0))


def test_u65_clipping_is_refused_where_poptorch_has_none():
    from ipu_finetune.batching import BatchPlan
    from ipu_finetune.errors import RecipeError
    from ipu_finetune.recipe import Training

    importlib.import_module("optimum.graphcore")
    from ipu_finetune.training.ipu import IpuEngine

    layout = layout_code()
    training = Training(global_batch_size=1, learning_rate=0.1, micro_batch_size=1, optimizer="lamb", max_grad_norm=1.0)
    with pytest.raises(RecipeError, match="training.max_grad_norm: poptorch's LAMB does not clip"):
        IpuEngine(
            question_model(True),
            layout.build_ipu_config({"layers_per_ipu": [1]}),
            BatchPlan(rows=1, micro_batch_size=1),
            lambda outputs, batch: outputs["start_logits"],
            [],
            ["start_logits"],
            training,
        )
