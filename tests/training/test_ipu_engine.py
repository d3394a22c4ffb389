# SPDX-License-Identifier: Apache-2.0
"""What only an IPU's layout and float16 bring along, on the emulator."""

import warnings

import numpy as np
import pytest
import torch
import transformers

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import IpuFinetuneError, RecipeError
from ipu_finetune.recipe import Training
from ipu_finetune.training.order import read_batch


def engine_of(model, plan, element_loss, labels, outputs, config=None, **training):
    from optimum.graphcore import IPUConfig

    from ipu_finetune.training.ipu import IpuEngine

    settings = Training(
        **{
            "global_batch_size": plan.global_batch,
            "learning_rate": 0.1,
            "micro_batch_size": plan.micro_batch_size,
            "optimizer": "sgd",
            **training,
        }
    )
    fields = {"layers_per_ipu": [1], "gradient_accumulation_steps": plan.gradient_accumulation, "output_mode": "all"}
    return IpuEngine(model, IPUConfig(**{**fields, **(config or {})}), plan, element_loss, labels, outputs, settings)


# --- U05: a head that was split after the optimizer was built must still train


def own_loss(outputs, batch):
    # In training the pipelined GPT-2 hands out its loss and no logits.
    return outputs["loss"].float()


def tiny_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def test_u05_a_serialized_untied_head_trains_as_the_plain_one_does():
    from ipu_finetune.inference.ipu_model import build_ipu_config, lay_out
    from ipu_finetune.training.reference import ReferenceEngine

    plan = BatchPlan(rows=4, micro_batch_size=2, gradient_accumulation=2)
    ids = np.random.default_rng(0).integers(0, 20, size=(4, 8))
    batch, weights = read_batch({"input_ids": ids, "labels": ids}, np.arange(4), plan)
    config = {"embedding_serialization_factor": 4}
    placed = lay_out(tiny_gpt2(), build_ipu_config({"layers_per_ipu": [1], **config}))
    parameters = [id(parameter) for parameter in placed.parameters()]
    assert lay_out(placed, placed.ipu_config) is placed, "a second layout must not rebuild layers"
    assert [id(parameter) for parameter in placed.parameters()] == parameters

    plain = tiny_gpt2()
    before = plain.lm_head.weight.detach().clone()
    reference = ReferenceEngine(
        plain,
        plan,
        own_loss,
        [],
        ["loss"],
        Training(global_batch_size=4, learning_rate=0.1, micro_batch_size=2, optimizer="sgd"),
        "cpu",
    )
    engine = engine_of(tiny_gpt2(), plan, own_loss, [], ["loss"], config)
    engine.compile(batch, weights)
    for _ in range(3):
        expected = reference.step(batch, weights, 0.1)
        got = engine.step(batch, weights, 0.1)
        assert got.losses == pytest.approx(expected.losses, abs=1e-5)
    held = {id(parameter) for group in engine._optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in engine._placed.parameters() if parameter.requires_grad}
    ours, theirs = engine.plain_state(), reference.plain_state()
    assert (ours["lm_head.weight"] - before).abs().max() > 0
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-5), name
    engine.close()


# --- U46: loss scaling


@pytest.fixture
def tiny_gradient_model():
    """y = w·x in the model's own precision, w starting at 0."""
    from optimum.graphcore.modeling_utils import PipelineMixin

    class Slope(torch.nn.Module, PipelineMixin):
        config = None

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return {"y": (self.w * x).sum(dim=1)}

    return Slope


def scaled_loss(outputs, batch):
    return outputs["y"].float() * batch["slope"]


def slope_run(model, slopes, steps_rate=1e4, config=None, **training):
    plan = BatchPlan(rows=2, micro_batch_size=2)
    engine = engine_of(model, plan, scaled_loss, ["slope"], ["y"], config, **training)
    kind = torch.float16 if training.get("precision") == "fp16" else torch.float32
    results = []
    for number, slope in enumerate(slopes):
        batch = {"x": torch.ones(2, 4, dtype=kind), "slope": torch.full((2,), slope)}
        weights = torch.full((2,), 0.5)
        if number == 0:
            engine.compile(batch, weights)
        results.append(engine.step(batch, weights, steps_rate))
    state = engine.plain_state()
    engine.close()
    return state["w"].float().clone(), results


def test_u46_a_gradient_that_underflows_is_warned_of_at_scale_1(tiny_gradient_model):
    with pytest.warns(UserWarning, match="underflow 100 %"):
        weights, _ = slope_run(tiny_gradient_model(), [1e-8], precision="fp16", loss_scaling=1.0)
    assert weights.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "options",
    [{"loss_scaling": 65536.0}, {"loss_scaling": 65536.0, "config": {"auto_loss_scaling": True}}],
    ids=["static", "auto"],
)
def test_u46_with_a_scale_the_update_is_the_fp32_one(tiny_gradient_model, options):
    exact, _ = slope_run(tiny_gradient_model(), [1e-8])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        scaled, results = slope_run(tiny_gradient_model(), [1e-8], precision="fp16", **options)
    assert exact.tolist() == pytest.approx([-1e-4] * 4)
    assert scaled.tolist() == pytest.approx(exact.tolist(), rel=1e-3)
    assert results[0].skipped == [False]


def test_u46_an_overflow_is_skipped_and_halves_the_automatic_scale(tiny_gradient_model):
    weights, results = slope_run(
        tiny_gradient_model(),
        [1e3, 1e-8],
        precision="fp16",
        loss_scaling=65536.0,
        config={"auto_loss_scaling": True},
    )
    assert [result.skipped for result in results] == [[True], [False]]
    assert results[0].loss_scale == 32768.0
    assert weights.tolist() == pytest.approx([-1e-4] * 4, rel=1e-3)


def test_u46_evaluation_after_automatic_loss_scaling_runs(tiny_recipe, tmp_path):
    from ipu_finetune.evaluation.run import finetune

    recipe = tiny_recipe(
        ipu__auto_loss_scaling=True,
        training__precision="fp16",
        training__loss_scaling=1024.0,
        training__max_steps=2,
        training__eval_steps=1,
    )
    run = finetune(recipe, target="emulator", output=str(tmp_path / "run"))
    assert run.metrics["examples"] == 12


# --- what is refused


def test_bf16_is_refused_since_ipus_have_none(tiny_gradient_model):
    with pytest.raises(RecipeError, match="IPUs have no bfloat16; use fp16 or fp32"):
        slope_run(tiny_gradient_model(), [1.0], precision="bf16")


def test_a_pipeline_with_too_little_accumulation_is_poptorchs_error_in_our_words(tiny_recipe, tmp_path):
    from ipu_finetune.evaluation.run import finetune

    recipe = tiny_recipe(ipu__layers_per_ipu=[1, 1], ipu__inference_layers_per_ipu=[1, 1], training__micro_batch_size=4)
    with pytest.raises(IpuFinetuneError, match="greater than or equal to the number of pipeline stages"):
        finetune(recipe, target="emulator", output=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_without_a_pipelined_form_is_refused():
    from ipu_finetune.inference.ipu_model import build_ipu_config, lay_out

    config = transformers.AlbertConfig(
        vocab_size=20, embedding_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1
    )
    with pytest.raises(RecipeError, match="no pipelined form"):
        lay_out(transformers.AlbertForQuestionAnswering(config), build_ipu_config({"layers_per_ipu": [1]}))
