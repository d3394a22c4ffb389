# SPDX-License-Identifier: Apache-2.0
"""Each sequence of a pack is computed as transformers computes it alone, whatever shares its row."""

import copy

import pytest
import torch
import transformers
from packing_examples import CASES, FAMILIES, LENGTH, SLOTS, Example, build, inputs_of
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_finetune.errors import IpuFinetuneError, RecipeError
from ipu_finetune.models.families import FAMILIES as KNOWN
from ipu_finetune.packing.isolation import KINDS, PackedModel, output_names

# A kind for each family that gives logits per position, so that hidden states can be compared position by position.
TOKENS = [(family, "token-classification") for family in FAMILIES]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def packed(model, example):
    return PackedModel(model, example.kind, SLOTS, example.choices)


def test_every_kind_and_family_is_covered():
    assert {family for family, _ in CASES} == set(KNOWN)
    assert {kind for _, kind in CASES} == set(KINDS)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_packed_logits_equal_those_of_each_sequence_alone(family, kind):
    model, example = build(family, kind), Example(family, kind)
    with torch.no_grad():
        found = packed(model, example)(**example.inputs)
        assert list(found) == output_names(kind)
        for p, s, number in example.places():
            start, length = (example.columns[name][p, s] for name in ("slot_starts", "slot_lengths"))
            if kind == "multiple-choice":
                expected = model(**example.alone(number // 2)).logits
                close(found["logits"][p, s // 2], expected[0])
                continue
            expected = model(**example.alone(number))
            for name, values in found.items():
                part = (
                    values[p, s]
                    if values.dim() == 3 and values.shape[1] == SLOTS
                    else values[p, start : start + length]
                )
                close(part, expected[name][0])


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_model_is_left_as_it_was(family, kind):
    model, example = build(family, kind), Example(family, kind)
    twin = copy.deepcopy(model)
    inputs = example.alone(0)
    with torch.no_grad():
        expected = twin(**inputs)[0]
        with packed(model, example) as wrapped:
            wrapped(**example.inputs)
            assert torch.equal(model(**inputs)[0], expected)  # also while it is prepared for packs
            assert list(model.state_dict()) == list(twin.state_dict())
            assert [name for name, _ in wrapped.named_parameters()] == [
                f"model.{n}" for n, _ in twin.named_parameters()
            ]
        assert torch.equal(model(**inputs)[0], expected)
    for (name, module), (_, plain) in zip(model.named_modules(), twin.named_modules()):
        assert type(module) is type(plain), name
        assert "forward" not in vars(module), name
        assert len(module._forward_pre_hooks) == len(plain._forward_pre_hooks), name
    with pytest.raises(IpuFinetuneError, match="released"):
        wrapped(**example.inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_class_is_changed(family):
    other = build(family, "classification")
    with packed(build(family, "classification"), Example(family, "classification")):
        for name, module in other.named_modules():
            assert type(module).__module__.startswith(("torch.", "transformers.")), name
            assert not module._forward_pre_hooks, name


@pytest.mark.parametrize(("family", "kind"), [case for case in CASES if case[1] in ("classification", "causal-lm")])
def test_a_deep_copy_is_a_packed_model_of_its_own(family, kind):
    model, example = build(family, kind), Example(family, kind)
    first = packed(model, example)
    second = copy.deepcopy(first)
    with torch.no_grad():
        expected = first(**example.inputs)["logits"]
        for parameter in first.parameters():
            parameter.zero_()
        first.release()
        assert torch.equal(second(**example.inputs)["logits"], expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_probability_of_another_sequence_is_exactly_zero(family, dtype):
    model = build(family, "token-classification", output_attentions=True).to(dtype)
    example = Example(family, "token-classification")
    seen = []
    model.base_model.register_forward_hook(lambda module, inputs, answer: seen.extend(answer.attentions))
    with torch.no_grad():
        packed(model, example)(**example.inputs)
    sequence_ids = example.inputs["sequence_ids"]
    hidden = sequence_ids[:, :, None] != sequence_ids[:, None, :]
    if family == "gpt2":
        hidden |= torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    assert len(seen) == 2
    for probabilities in seen:
        assert torch.isfinite(probabilities).all()
        assert (probabilities.masked_select(hidden[:, None]) == 0).all()
        assert (probabilities.masked_select(~hidden[:, None]) > 0).any()
        torch.testing.assert_close(probabilities.float().sum(-1), torch.ones(3, 2, LENGTH), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("family", "kind"), TOKENS)
def test_under_autocast_to_bfloat16_sequences_are_isolated_too(family, kind):
    model, example = build(family, kind), Example(family, kind)
    wrapped = packed(model, example)
    changed = {name: tensor.clone() for name, tensor in example.inputs.items()}
    changed["input_ids"][0, :7] = 9  # all of the first sequence
    others = example.inputs["sequence_ids"] != 1
    others[1:] = True
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before, after = wrapped(**example.inputs)["logits"], wrapped(**changed)["logits"]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[~others], before[~others])
    with torch.no_grad():
        expected = wrapped(**example.inputs)["logits"]
    assert float((before.float() - expected).abs().mean() / expected.abs().mean()) < 0.05


@pytest.mark.filterwarnings("ignore:.*use_reentrant")  # transformers 4.29 leaves it to PyTorch's default
def test_a_block_that_is_run_again_for_its_gradients_is_isolated_too():
    example = Example("gpt2", "causal-lm")
    gradients = []
    for checkpointing in (False, True):
        model = build("gpt2", "causal-lm")
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.config.use_cache = False
        packed(model, example)(**example.inputs)["logits"].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients):
        assert torch.equal(plain, again)


# ---- user cases


class SoftmaxInputs(TorchDispatchMode):
    """Keeps what each softmax is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._softmax.default:
            self.seen.append(args[0].detach().clone())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "kind"), TOKENS)
def test_u03_packed_sequences_do_not_see_each_other(family, kind):
    model = build(family, kind)
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0]]),
        "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
        "slot_starts": torch.tensor([[0, 3]]),
        "slot_lengths": torch.tensor([[3, 2]]),
    }
    wrapped = PackedModel(model, kind, 2)
    with torch.no_grad():
        before = wrapped(**batch)["logits"][0]
        close(before[:3], model(torch.tensor([[5, 6, 7]])).logits[0])
        close(before[3:5], model(torch.tensor([[8, 9]])).logits[0])
        for place, token, untouched, touched in ((3, 3, slice(0, 3), slice(3, 5)), (2, 2, slice(3, 5), slice(0, 3))):
            changed = {name: tensor.clone() for name, tensor in batch.items()}
            changed["input_ids"][0, place] = token
            after = wrapped(**changed)["logits"][0]
            assert torch.equal(after[untouched], before[untouched])
            assert not torch.equal(after[touched], before[touched])


@pytest.mark.parametrize(
    ("family", "kind"), [case for case in CASES if case[1] in ("token-classification", "classification")]
)
@pytest.mark.parametrize("scale", [1.0, 6.0])  # with weights six times as large, many scores are far below 0
def test_u08_half_precision_masks_and_a_row_without_tokens_stay_finite(family, kind, scale):
    model = build(family, kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and any(part in name for part in ("query", "key", ".q.", ".k.", "q_lin", "k_lin")):
                parameter.mul_(scale)
    half = copy.deepcopy(model).half()
    batch = {
        "input_ids": torch.tensor([[5, 6, 0], [0, 0, 0]]),
        "sequence_ids": torch.tensor([[1, 1, 0], [0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 0], [0, 0, 0]]),
        "slot_starts": torch.tensor([[0], [0]]),
        "slot_lengths": torch.tensor([[2], [0]]),
    }
    wrapped = PackedModel(half, kind, 1)
    with SoftmaxInputs() as scores:
        found = wrapped(**batch)["logits"]
    assert len(scores.seen) == 2
    assert all(torch.isfinite(seen).all() for seen in scores.seen)
    assert found.dtype == torch.float16
    assert torch.isfinite(found).all()
    with torch.no_grad():
        expected = PackedModel(model, kind, 1)(**batch)["logits"]
    real = slice(0, 1 if kind == "classification" else 2)
    torch.testing.assert_close(found[0, real].float(), expected[0, real], rtol=1e-2 * scale, atol=1e-2 * scale)

    # the filler row contributes nothing: the gradient is that of the first row alone
    weights = torch.zeros_like(found)
    weights[0, real] = 1
    together = torch.autograd.grad((found * weights).sum(), list(half.parameters()), allow_unused=True)
    single = wrapped(**{name: tensor[:1] for name, tensor in batch.items()})["logits"]
    alone = torch.autograd.grad((single * weights[:1]).sum(), list(half.parameters()), allow_unused=True)
    for one, other in zip(together, alone):
        if one is not None:
            assert torch.isfinite(one).all()
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_u11_positions_restart_so_a_table_of_four_rows_is_enough(family):
    rows = 6 if family in ("roberta", "mpnet") else 4  # theirs begins with rows that no token uses
    model = build(family, "token-classification", max_position_embeddings=rows)
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 1, 1, 1]]),
        "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
        "slot_starts": torch.tensor([[0, 3]]),
        "slot_lengths": torch.tensor([[3, 2]]),
    }
    seen = []
    table = model.base_model.embeddings.position_embeddings
    wrapped = PackedModel(model, "token-classification", 2)
    handle = table.register_forward_hook(lambda module, inputs, answer: seen.append(inputs[0].clone()))
    with torch.no_grad():
        found = wrapped(**batch)["logits"][0]
        handle.remove()
        close(found[:3], model(torch.tensor([[5, 6, 7]])).logits[0])
        close(found[3:5], model(torch.tensor([[8, 9]])).logits[0])
    past = [2, 3, 4, 2, 3, 1, 1, 1]  # padding index 1; positions begin after it
    assert seen[0].tolist() == [past if rows == 6 else [0, 1, 2, 0, 1, 0, 0, 0]]


# ---- what cannot be packed says so


def test_another_family_is_refused_with_what_was_given_and_what_can_be_packed():
    config = transformers.ElectraConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    with pytest.raises(RecipeError) as caught:
        PackedModel(transformers.ElectraForQuestionAnswering(config), "question-answering", 2)
    message = str(caught.value)
    assert "electra" in message
    assert all(family in message for family in FAMILIES)


@pytest.mark.parametrize(
    ("family", "made_for", "arguments", "words"),
    [
        ("bert", "classification", ("question-answering", 2), "BertForSequenceClassification has no head for"),
        ("gpt2", "classification", ("causal-lm", 2), "GPT2ForSequenceClassification has no head for"),
        ("bert", "classification", ("summarisation", 2), "summarisation"),
        ("bert", "classification", ("classification", 0), "at least one"),
        ("bert", "classification", ("classification", 4, 2), "choices=2 has no meaning"),
        ("bert", "multiple-choice", ("multiple-choice", 5, 2), "multiple of choices=2"),
        ("bert", "multiple-choice", ("multiple-choice", 4), "multiple of choices=None"),
    ],
)
def test_what_does_not_go_together_is_refused(family, made_for, arguments, words):
    model = build(family, made_for)
    with pytest.raises(RecipeError, match=words):
        PackedModel(model, *arguments)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_sees_the_future_is_no_causal_language_model():
    with pytest.raises(RecipeError, match="is_decoder"):
        PackedModel(build("bert", "causal-lm", is_decoder=False), "causal-lm", 2)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt2", lambda b: {n: torch.cat([t, t], 1) if t.shape[1] == LENGTH else t for n, t in b.items()}, "takes 24"),
        ("bert", lambda b: {**b, "slot_starts": b["slot_starts"][:, :2]}, "2 slots"),
        ("distilbert", lambda b: {**b, "token_type_ids": torch.zeros_like(b["input_ids"])}, "token_type_ids"),
    ],
)
def test_packs_that_the_model_cannot_take_are_refused(family, change, words):
    example = Example(family, "token-classification")
    wrapped = packed(build(family, "token-classification"), example)
    with pytest.raises(RecipeError, match=words):
        wrapped(**change(inputs_of(example.batch)))
