# SPDX-License-Identifier: Apache-2.0
"""The proof holds for every family and kind, and finds leaks that were put in on purpose."""

import copy

import pytest
import torch
from packing_examples import CASES, FAMILIES, LENGTH, SLOTS, Example, build

from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.packing.isolation import PackedModel
from ipu_finetune.packing.leak import LeakReport, verify


def packed(family, kind, kind_of_model=PackedModel):
    example = Example(family, kind)
    return kind_of_model(build(family, kind), kind, SLOTS, example.choices), example.columns


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_no_sequence_has_a_part_in_another(family, kind):
    """Every token of every sequence, and some of the padding."""
    wrapped, columns = packed(family, kind)
    report = verify(wrapped, columns, tokens=8)
    sequences = 6 if kind == "multiple-choice" else 5
    real = int((columns["sequence_ids"] > 0).sum())
    assert report.sequences == sequences
    assert report.tokens == real + 3 * 8 - (4 if kind == "multiple-choice" else 0)
    assert report.isolation == "on"
    assert str(report).startswith("isolation: on (")


def test_the_model_is_as_before_the_proof():
    wrapped, columns = packed("bert", "classification")
    before = copy.deepcopy(wrapped.model.state_dict())
    wrapped.train()
    wrapped.model.dropout.eval()
    verify(wrapped, columns)
    assert wrapped.training
    assert wrapped.model.bert.training
    assert not wrapped.model.dropout.training
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    assert not wrapped.model.get_input_embeddings()._forward_hooks
    for name, value in wrapped.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_same_seed_exchanges_the_same_tokens():
    wrapped, columns = packed("bert", "classification")
    seen = []
    wrapped.register_forward_pre_hook(lambda module, args, named: seen.append(named["input_ids"]), with_kwargs=True)
    verify(wrapped, columns, seed=3)
    first, second = list(seen), seen
    second.clear()
    verify(wrapped, columns, seed=3)
    assert len(first) == len(second) > 2
    assert all(torch.equal(one, other) for one, other in zip(first, second))


# ---- leaks that were put in on purpose


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["classification", "token-classification", "question-answering"])
def test_one_wrong_block_of_the_mask_is_found(family, kind):
    class Leaking(PackedModel):
        def visible(self, sequence_ids):
            mask = super().visible(sequence_ids).clone()
            mask[:, 7:10, :7] = True  # in the first pack, the second sequence sees the first
            return mask

    wrapped, columns = packed(family, kind, Leaking)
    with pytest.raises(IpuFinetuneError, match=r"packing leaks: .*sequence 1 of pack 0.*largest difference"):
        verify(wrapped, columns)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_wrong_entry_of_the_mask_is_found(family):
    class Leaking(PackedModel):
        def visible(self, sequence_ids):
            mask = super().visible(sequence_ids).clone()
            mask[1, 8, 7] = True  # the first token of the second sequence sees the last one of the first
            return mask

    wrapped, columns = packed(family, "token-classification", Leaking)
    with pytest.raises(IpuFinetuneError, match="sequence 1 of pack 1"):
        verify(wrapped, columns)


def test_a_missing_hook_is_found():
    wrapped, columns = packed("gpt2", "token-classification")
    # What the hook leaves undone: the blocks get a mask for nobody.
    for block in wrapped.model.base_model.h:
        block._forward_pre_hooks.clear()
        block.register_forward_pre_hook(
            lambda module, args, named: (args, {**named, "attention_mask": None}), with_kwargs=True
        )
    with pytest.raises(IpuFinetuneError, match="packing leaks"):
        verify(wrapped, columns)


def test_plain_attention_is_found():
    example = Example("distilbert", "token-classification")
    model = build("distilbert", "token-classification", max_position_embeddings=LENGTH)
    wrapped, columns = PackedModel(model, example.kind, SLOTS), example.columns
    wrapped.release()
    wrapped._undo = []  # as if it had not been released
    wrapped.visible = lambda sequence_ids: (sequence_ids > 0).long()
    with pytest.raises(IpuFinetuneError, match="packing leaks"):
        verify(wrapped, columns)


def test_a_summary_taken_from_the_neighbour_is_found():
    wrapped, columns = packed("bert", "classification")
    wrapped.family.summary = lambda starts, lengths: torch.roll(starts, 1, 1)
    with pytest.raises(IpuFinetuneError, match="packing leaks"):
        verify(wrapped, columns)


def test_a_gradient_that_no_output_shows_is_found():
    """A term that is 0 whatever the embeddings are, but has a gradient."""

    class Leaking(PackedModel):
        def forward(self, **batch):
            seen = []
            table = self.model.get_input_embeddings()
            handle = table.register_forward_hook(lambda module, inputs, answer: seen.append(answer))
            outputs = super().forward(**batch)
            handle.remove()
            neighbour = seen[0][:, 0].sum(dim=1)  # of the first token of each pack
            return {"logits": outputs["logits"] + (neighbour - neighbour.detach())[:, None, None]}

    wrapped, columns = packed("bert", "classification", Leaking)
    with pytest.raises(IpuFinetuneError, match="the losses of others have a gradient by the embeddings of sequence 1"):
        verify(wrapped, columns)


def test_a_gradient_that_another_sequence_scales_is_found():
    """No output changes and no gradient crosses over, but how much a sequence learns depends on its neighbour."""

    class Leaking(PackedModel):
        def forward(self, **batch):
            seen = []
            table = self.model.get_input_embeddings()
            handle = table.register_forward_hook(lambda module, inputs, answer: seen.append(answer))
            outputs = super().forward(**batch)
            handle.remove()
            first = seen[0][:, :1].sum(dim=2, keepdim=True).detach()  # the first token of each pack
            own = seen[0].sum(dim=2, keepdim=True)
            return {"logits": outputs["logits"] + (own - own.detach()) * first}

    wrapped, columns = packed("bert", "token-classification", Leaking)
    with pytest.raises(IpuFinetuneError, match="token 0 of sequence 1 of pack 0 moves the gradient that the loss of"):
        verify(wrapped, columns)


def test_a_leak_from_one_pack_to_another_is_found():
    class Leaking(PackedModel):
        def forward(self, **batch):
            logits = super().forward(**batch)["logits"]
            return {"logits": logits + 1e-6 * logits[:1]}

    wrapped, columns = packed("bert", "token-classification", Leaking)
    with pytest.raises(IpuFinetuneError, match="packing leaks"):
        verify(wrapped, columns)


def test_padding_that_is_seen_is_found():
    class Leaking(PackedModel):
        def visible(self, sequence_ids):
            return super().visible(sequence_ids) | (sequence_ids == 0).unsqueeze(1)

    wrapped, columns = packed("bert", "question-answering", Leaking)
    with pytest.raises(IpuFinetuneError, match="the padding of pack 0"):
        verify(wrapped, columns)


# ---- where nothing can be shown


def test_a_model_in_half_precision_is_refused():
    wrapped, columns = packed("bert", "classification")
    with pytest.raises(IpuFinetuneError, match="float16"):
        verify(wrapped.half(), columns)


def test_a_model_that_does_not_repeat_itself_is_refused():
    class Noisy(PackedModel):
        def forward(self, **batch):
            return {"logits": super().forward(**batch)["logits"] + torch.rand(())}

    wrapped, columns = packed("bert", "classification", Noisy)
    with pytest.raises(IpuFinetuneError, match="other numbers"):
        verify(wrapped, columns)


def test_packs_of_one_sequence_show_nothing_and_say_so():
    wrapped, _ = packed("bert", "classification")
    alone = Example("bert", "classification")
    alone.rows = [[0], [3]]
    report = verify(wrapped, alone._pack())
    assert report.isolation == "not shown"
    assert str(report) == "isolation: not shown (no two of these 2 sequences share a pack)"
    assert LeakReport(2, 4, 1).isolation == "on"
