# SPDX-License-Identifier: Apache-2.0
"""The packed loss is transformers' own loss of the same sequences, and so are its gradients."""

import numpy as np
import pytest
import torch
from packing_examples import CASES, CHOICES, SLOTS, Example, build, inputs_of
from torch.nn import functional

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import RecipeError
from ipu_finetune.packing.isolation import KINDS, PackedModel
from ipu_finetune.packing.losses import LABELS, element_loss, valid
from ipu_finetune.training.order import loss_weights

TOKEN_KINDS = ("token-classification", "masked-lm", "causal-lm")


def close(found, expected, what=""):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def gradients(model):
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def mean_loss(model, kind, batch, choices=None):
    """The mean over the valid elements of a batch of packs, as the training loop makes it."""
    counted = torch.from_numpy(valid(kind, {name: tensor.numpy() for name, tensor in batch.items()}))
    wrapped = PackedModel(model, kind, batch["slot_starts"].shape[1], choices)
    elements = element_loss(kind)(wrapped(**inputs_of(batch)), batch)
    wrapped.release()
    assert elements.dtype == torch.float32
    assert elements.shape == counted.shape
    assert torch.isfinite(elements).all()
    return (elements * counted.float() / counted.sum().clamp(min=1)).sum()


def terms(kind, labels):
    """How many terms transformers' mean has for one sequence."""
    if kind not in TOKEN_KINDS:
        return 1
    return len(labels["labels"]) - 1 if kind == "causal-lm" else int((labels["labels"] != -100).sum())


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_packed_loss_and_its_gradients_are_those_of_transformers(family, kind):
    model, example = build(family, kind), Example(family, kind)
    counts = [terms(kind, labels) for labels in example.labels]
    expected = torch.zeros(())
    for number, count in enumerate(counts):
        loss = model(**example.alone(number, labelled=True)).loss * count / sum(counts)
        loss.backward()
        expected += loss.detach()
    wanted = gradients(model)

    found = mean_loss(model, kind, example.batch, example.choices)
    found.backward()
    close(found.detach(), expected)
    assert float(expected) > 0.1
    for name, gradient in gradients(model).items():
        close(gradient, wanted[name], name)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "multiple-choice"])
def test_what_shares_a_pack_does_not_matter(kind):
    """Each sequence weighs the same: the loss of packs in another order of rows and with fillers is the same."""
    family = "bert"
    model, example = build(family, kind), Example(family, kind)
    first = mean_loss(model, kind, example.batch)
    example.rows = [[4, 1], [], [3, 0], [2]]
    example.columns = example._pack()
    close(mean_loss(model, kind, example.batch), first)


@pytest.mark.parametrize("kind", list(KINDS))
def test_elements_that_do_not_count_are_the_empty_and_the_ignored(kind):
    example = Example("bert", kind)
    found = valid(kind, example.columns)
    assert found.dtype == bool
    if kind in TOKEN_KINDS:
        expected = example.columns["labels"] != -100
    elif kind == "multiple-choice":
        expected = np.array([[True, True], [True, False], [False, False]])
    else:
        expected = np.array([[True] * 3 + [False], [True, True, False, False], [False] * 4])
    assert found.tolist() == expected.tolist()


def test_an_answer_outside_of_its_sequence_does_not_count_as_in_transformers():
    example = Example("bert", "question-answering")
    example.columns["start_positions"][0, 1] = 9999
    found = valid("question-answering", example.columns)
    assert found.tolist() == [[True, False, True, False], [True, True, False, False], [False] * 4]
    loss = mean_loss(build("bert", "question-answering"), "question-answering", example.batch)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_loss_is_float32_and_finite_for_half_precision_logits(kind):
    example = Example("bert", kind)
    batch = example.batch
    packs, length = batch["input_ids"].shape
    shape = {
        "question-answering": (packs, length),
        "multiple-choice": (packs, SLOTS // CHOICES, CHOICES),
        "regression": (packs, SLOTS, 1),
    }.get(kind, (packs, length, 100) if kind in TOKEN_KINDS else (packs, SLOTS, 3))
    logits = (torch.randn(shape) * 2e4).clamp(-6e4, 6e4).half()  # near the limits of float16
    names = ("start_logits", "end_logits") if kind == "question-answering" else ("logits",)
    found = element_loss(kind)({name: logits for name in names}, batch)
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("function", [element_loss, lambda kind: valid(kind, {})])
def test_an_unknown_kind_is_refused(function):
    with pytest.raises(RecipeError, match="summarisation"):
        function("summarisation")


def test_every_kind_has_label_columns():
    assert set(LABELS) == set(KINDS)


# ---- user cases


def answers():
    """A = positions 0-3, B = 4-7, padding 8-11; A's logits are negative, the rest would win if it took part."""
    batch = {
        "sequence_ids": torch.tensor([[1] * 4 + [2] * 4 + [0] * 4]),
        "slot_starts": torch.tensor([[0, 4]]),
        "slot_lengths": torch.tensor([[4, 4]]),
        "start_positions": torch.tensor([[1, 4]]),
        "end_positions": torch.tensor([[1, 4]]),
    }
    logits = torch.tensor([[-3.0, -1.0, -4.0, -5.0, 2.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    return {"start_logits": logits, "end_logits": logits.clone()}, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_u04_other_sequences_take_no_part_in_the_softmax_of_an_answer(dtype):
    outputs, batch = answers()
    outputs = {name: logits.to(dtype) for name, logits in outputs.items()}
    found = element_loss("question-answering")(outputs, batch)
    assert float(found[0, 0]) == pytest.approx(0.1852, abs=5e-5)
    first = functional.cross_entropy(outputs["start_logits"][:, 4:8].float(), torch.tensor([0]))
    assert float(found[0, 1]) == pytest.approx(float(first), abs=1e-6)
    # masked as the loss masks them, with the same finite number, the best start of A is its own
    from ipu_finetune.packing.losses import OUTSIDE

    own = outputs["start_logits"][0].masked_fill(batch["sequence_ids"][0] != 1, OUTSIDE)
    assert torch.isfinite(own).all()
    assert int(own.argmax()) == 1


def test_u04_a_zero_in_place_of_a_logit_would_have_competed():
    """What the case warns of: the numbers that a 0/1 mask gives, so that the test above is known to tell them apart."""
    outputs, batch = answers()
    zeroed = outputs["start_logits"] * (batch["sequence_ids"] == 1)
    assert float(functional.cross_entropy(zeroed, torch.tensor([1]))) == pytest.approx(3.1333, abs=5e-5)
    assert int(zeroed.argmax()) == 4


def test_u04_the_gradient_of_an_answer_stays_in_its_sequence():
    outputs, batch = answers()
    start = outputs["start_logits"].requires_grad_()
    element_loss("question-answering")(outputs, batch)[0, 0].backward()
    assert (start.grad[0, 4:] == 0).all()
    assert (start.grad[0, :4] != 0).all()


def token_batch(labels):
    labels = torch.tensor(labels)
    rows, length = labels.shape
    return {
        "input_ids": torch.arange(5, 5 + rows * length).reshape(rows, length),
        "sequence_ids": torch.ones(rows, length, dtype=torch.long),
        "position_ids": torch.arange(length).expand(rows, -1).clone(),
        "slot_starts": torch.zeros(rows, 1, dtype=torch.long),
        "slot_lengths": torch.full((rows, 1), length),
        "labels": labels,
    }


def test_u15_a_row_without_a_label_leaves_the_loss_to_the_other():
    model = build("bert", "token-classification")
    batch = token_batch([[-100, -100], [1, 0]])
    plain = model(batch["input_ids"][1:], labels=batch["labels"][1:]).loss
    plain.backward()
    expected = gradients(model)
    together = mean_loss(model, "token-classification", batch)
    together.backward()
    close(together, plain)
    for name, gradient in gradients(model).items():
        close(gradient, expected[name], name)

    # The same as two micro-batches of one row, weighed as the training loop weighs them.
    plan = BatchPlan(rows=2, micro_batch_size=1, gradient_accumulation=2, replicas=1, device_iterations=1)
    counted = torch.from_numpy(valid("token-classification", {name: t.numpy() for name, t in batch.items()}))
    weights = loss_weights(counted, plan)
    wrapped = PackedModel(model, "token-classification", 1)
    total = 0.0
    for row in range(2):
        part = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        elements = element_loss("token-classification")(wrapped(**inputs_of(part)), part)
        loss = (elements * weights[row : row + 1]).sum() / 2
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(plain.item(), abs=1e-5)
    for name, gradient in gradients(model).items():
        close(gradient, expected[name], name)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_u15_a_batch_without_any_label_has_loss_0_and_no_gradient(family, kind):
    example = Example(family, kind)
    example.rows = [[], []]
    example.columns = example._pack()
    model = build(family, kind)
    loss = mean_loss(model, kind, example.batch, example.choices)
    loss.backward()
    assert loss.item() == 0.0
    for name, gradient in gradients(model).items():
        assert (gradient == 0).all(), name


def test_u17_no_token_is_predicted_across_a_boundary():
    model = build("gpt2", "causal-lm")
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5]]),
        "sequence_ids": torch.tensor([[1, 1, 1, 2, 2]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "slot_starts": torch.tensor([[0, 3]]),
        "slot_lengths": torch.tensor([[3, 2]]),
        "labels": torch.tensor([[-100, 2, 3, -100, 5]]),
    }
    columns = {name: tensor.numpy() for name, tensor in batch.items()}
    assert valid("causal-lm", columns).tolist() == [[False, True, True, False, True]]
    losses = [model(ids, labels=ids).loss for ids in (torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]]))]
    expected = (losses[0] * 2 + losses[1] * 1) / 3
    close(mean_loss(model, "causal-lm", batch), expected)
    # A first token that kept its label does not come in by the back door either.
    batch["labels"] = batch["input_ids"].clone()
    close(mean_loss(model, "causal-lm", batch), expected)
