# SPDX-License-Identifier: Apache-2.0
"""Packs through optimum-graphcore's own pipelined models: they compile, and answer and train as the plain model does."""

import copy

import pytest
import torch
from packing_examples import SLOTS, Example, build, inputs_of

from ipu_finetune import emulator
from ipu_finetune.packing.isolation import PackedModel, output_names
from ipu_finetune.packing.losses import LABELS, element_loss, valid

pytest.importorskip("optimum.version")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # two-year-old libraries on a new PyTorch warn about each other
    pytest.mark.usefixtures("installed"),
]

# The task models that optimum-graphcore 0.7.1 has pipelined forms of.
PIPELINED = [
    *[("bert", kind) for kind in ("question-answering", "classification", "token-classification", "multiple-choice")],
    *[("bert", kind) for kind in ("multi-label", "regression", "masked-lm")],
    *[("roberta", kind) for kind in ("question-answering", "classification", "multiple-choice", "masked-lm")],
    *[("distilbert", kind) for kind in ("question-answering", "classification", "multiple-choice", "masked-lm")],
    *[("deberta", kind) for kind in ("question-answering", "classification", "token-classification", "masked-lm")],
    *[("gpt2", kind) for kind in ("classification", "token-classification", "causal-lm")],
    ("mpnet", "masked-lm"),
]


@pytest.fixture
def installed():
    """`import poptorch` gives the look-alike within the test, and not after it."""
    emulator.install()
    yield
    emulator.uninstall()


def config(**fields):
    from ipu_finetune.inference.ipu_model import build_ipu_config

    return build_ipu_config(
        {"layers_per_ipu": [1, 1], "inference_layers_per_ipu": [1, 1], "ipus_per_replica": 2, **fields}
    )


def tensors(example, labelled=False):
    names = [*PACKED, *(LABELS[example.kind] if labelled else ())]
    batch = example.batch
    return {name: batch[name] for name in names if name in batch}


PACKED = ("input_ids", "sequence_ids", "position_ids", "slot_starts", "slot_lengths", "token_type_ids")


def real(example, name, values):
    """The logits of sequences: an empty slot's and the padding's mean nothing."""
    per_position = values.shape[1] == example.columns["input_ids"].shape[1]
    if example.kind == "multiple-choice":
        return values[torch.from_numpy(example.columns["labels"] >= 0)]
    return values[
        torch.from_numpy(example.columns["sequence_ids"] > 0 if per_position else example.columns["slot_valid"])
    ]


@pytest.mark.parametrize(("family", "kind"), PIPELINED)
def test_a_pipelined_model_gives_the_same_logits(family, kind):
    import poptorch

    from ipu_finetune.inference.ipu_model import TupleModel, lay_out

    example = Example(family, kind)
    plain = build(family, kind)
    ipu_config = config()
    placed = PackedModel(lay_out(copy.deepcopy(plain), ipu_config, inference=True), kind, SLOTS, example.choices)
    batch = tensors(example)
    wrapper = TupleModel(placed, list(batch), output_names(kind)).eval()
    found = poptorch.inferenceModel(wrapper, options=ipu_config.to_options(for_inference=True))(tuple(batch.values()))
    with torch.no_grad():
        expected = PackedModel(plain, kind, SLOTS, example.choices)(**batch)
    for (name, values), one in zip(expected.items(), found):
        torch.testing.assert_close(real(example, name, one), real(example, name, values), rtol=1e-4, atol=1e-5)
        assert torch.isfinite(one).all()


@pytest.mark.parametrize(("family", "kind"), PIPELINED)
def test_a_pipelined_model_trains_as_the_plain_one(family, kind):
    import poptorch

    from ipu_finetune.inference.ipu_model import TupleModel, lay_out, plain_state

    example = Example(family, kind)
    plain = build(family, kind).train()
    packs = 6  # the example twice: a pipeline wants more micro-batches than it has stages, of one pack each
    ipu_config = config(gradient_accumulation_steps=packs, output_mode="all")
    placed = lay_out(copy.deepcopy(plain), ipu_config).train()
    # optimum-graphcore 0.7.1 builds MPNet's body anew, after the language head was tied to the one before.
    placed.tie_weights()
    batch = {name: torch.cat([tensor, tensor]) for name, tensor in tensors(example, labelled=True).items()}
    counted = torch.from_numpy(valid(kind, example.columns)).repeat(2, 1)
    weights = counted.float() / counted.sum()
    loss_of = element_loss(kind)

    wrapper = TupleModel(
        PackedModel(placed, kind, SLOTS, example.choices), list(batch), output_names(kind), loss_of, LABELS[kind]
    )
    optimizer = poptorch.optim.SGD(placed.parameters(), lr=0.1, use_combined_accum=True)
    executor = poptorch.trainingModel(wrapper.train(), options=ipu_config.to_options(), optimizer=optimizer)
    found = executor(tuple(batch.values()), weights * packs)  # the device takes the mean of the micro-batches
    executor.copyWeightsToHost()

    twin = PackedModel(plain, kind, SLOTS, example.choices)
    expected = (loss_of(twin(**inputs_of(batch)), batch) * weights).sum()
    expected.backward()
    assert found.mean().item() == pytest.approx(expected.item(), abs=1e-4)
    trained = plain_state(placed)
    moved = 0
    for name, parameter in plain.named_parameters():
        step = torch.zeros_like(parameter) if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(trained[name], parameter.detach() - step, rtol=1e-4, atol=1e-5, msg=name)
        moved += bool(step.abs().max() > 1e-3)
    assert moved > 10


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "deberta", "gpt2"])
def test_a_pipelined_model_in_half_precision_is_finite_and_near_the_plain_one(family):
    import poptorch

    from ipu_finetune.inference.ipu_model import TupleModel, lay_out

    example = Example(family, "classification")
    plain = build(family, "classification")
    ipu_config = config()
    placed = lay_out(copy.deepcopy(plain), ipu_config, inference=True).half()
    batch = tensors(example)
    wrapper = TupleModel(PackedModel(placed, "classification", SLOTS), list(batch), ["logits"]).eval()
    (found,) = poptorch.inferenceModel(wrapper, options=ipu_config.to_options(for_inference=True))(
        tuple(batch.values())
    )
    with torch.no_grad():
        expected = PackedModel(plain, "classification", SLOTS)(**batch)["logits"]
    assert found.dtype == torch.float16
    assert torch.isfinite(found).all()  # the filler pack, which is all padding, too
    found, expected = real(example, "logits", found).float(), real(example, "logits", expected)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("family", "kind", "vocabulary"),  # of GPT-2's, optimum-graphcore splits 104 rows in four; BERT's it would refuse
    [("bert", "classification", 104), ("gpt2", "causal-lm", 102), ("gpt2", "classification", 102)],
)
def test_a_split_embedding_with_rows_added_gives_logits_for_the_real_vocabulary(family, kind, vocabulary):
    from ipu_finetune.inference.ipu_model import lay_out

    example = Example(family, kind)
    plain = build(family, kind, vocab_size=vocabulary)
    placed = lay_out(copy.deepcopy(plain), config(embedding_serialization_factor=4), inference=True)
    with torch.no_grad():
        found = PackedModel(placed, kind, SLOTS)(**tensors(example))["logits"]
        expected = PackedModel(plain, kind, SLOTS)(**tensors(example))["logits"]
    assert found.shape == expected.shape
    torch.testing.assert_close(real(example, "logits", found), real(example, "logits", expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "deberta", "gpt2"])
def test_a_released_layout_is_the_layout_that_it_was(family):
    from ipu_finetune.inference.ipu_model import lay_out

    example = Example(family, "classification")
    placed = lay_out(build(family, "classification"), config(), inference=True)
    before = [(type(module), len(module._forward_pre_hooks)) for module in placed.modules()]
    with PackedModel(placed, "classification", SLOTS) as wrapped:
        wrapped(**tensors(example))
    assert [(type(module), len(module._forward_pre_hooks)) for module in placed.modules()] == before
