# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family that can be packed, and sequences for them: packed here by hand, and one by one."""

import numpy as np
import torch
import transformers

SLOTS, LENGTH, CLASSES, VOCABULARY = 4, 24, 3, 100
CHOICES = 2
# Two packs and a filler that holds nothing. Choices of an item are of one length, so that transformers can take them
# without padding.
LENGTHS = [7, 3, 5, 8, 2]
ROWS = [[0, 1, 2], [3, 4], []]
CHOICE_LENGTHS = [7, 7, 3, 3, 8, 8]
CHOICE_ROWS = [[0, 1, 2, 3], [4, 5], []]

HEADS = {
    "question-answering": "ForQuestionAnswering",
    "classification": "ForSequenceClassification",
    "multi-label": "ForSequenceClassification",
    "regression": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "multiple-choice": "ForMultipleChoice",
    "masked-lm": "ForMaskedLM",
    "causal-lm": "LMHeadModel",
}
FAMILIES = ["bert", "roberta", "distilbert", "deberta", "mpnet", "gpt2"]
PREFIXES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "deberta": "Deberta",
    "mpnet": "MPNet",
    "gpt2": "GPT2",
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SIZES = {
    "bert": {**ENCODER, "max_position_embeddings": 16},
    "roberta": {**ENCODER, "max_position_embeddings": 16, "type_vocab_size": 2},
    "mpnet": {**ENCODER, "max_position_embeddings": 16},
    "deberta": {
        **ENCODER,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
    },
    "distilbert": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "qa_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "max_position_embeddings": 16,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        # GPT2ForTokenClassification drops out on its own account
        "classifier_dropout": 0.0,
    },
}
PROBLEMS = {"multi-label": "multi_label_classification", "regression": "regression"}


def model_class(family, kind):
    name = "RobertaForCausalLM" if (family, kind) == ("roberta", "causal-lm") else PREFIXES[family] + HEADS[kind]
    return getattr(transformers, name, None)


CASES = [(family, kind) for family in FAMILIES for kind in HEADS if model_class(family, kind) is not None]


def build(family, kind, **changes):
    """A model in evaluation mode whose every weight, bias and norm is random, and large enough to matter."""
    settings = {
        **SIZES[family],
        "vocab_size": VOCABULARY,
        "num_labels": 1 if kind == "regression" else 2 if kind == "question-answering" else CLASSES,
        "problem_type": PROBLEMS.get(kind, "single_label_classification"),
        "initializer_range": 0.2,
        "is_decoder": kind == "causal-lm",
        **changes,
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    model = model_class(family, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


class Example:
    """Sequences of one kind of task with labels, whole and packed.

    Attributes:
        sequences: one dict per sequence: `input_ids`, and where the family has them `token_type_ids`.
        columns: the packs, numpy.
    """

    def __init__(self, family, kind, seed=1):
        self.family, self.kind = family, kind
        draw = np.random.Generator(np.random.PCG64(seed))
        choice = kind == "multiple-choice"
        self.lengths = CHOICE_LENGTHS if choice else LENGTHS
        self.rows = CHOICE_ROWS if choice else ROWS
        self.choices = CHOICES if choice else None
        self.sequences = []
        for length in self.lengths:
            sequence = {"input_ids": draw.integers(5, VOCABULARY, length)}
            if family in ("bert", "roberta", "deberta"):
                sequence["token_type_ids"] = (np.arange(length) >= length // 2).astype(np.int64)
            self.sequences.append(sequence)
        self.labels = self._draw_labels(draw)
        self.columns = self._pack()

    def _draw_labels(self, draw):
        kind, labels = self.kind, []
        for number, length in enumerate(self.lengths):
            if kind == "question-answering":
                start = int(draw.integers(0, length))
                labels.append({"start_positions": start, "end_positions": int(draw.integers(start, length))})
            elif kind == "classification":
                labels.append({"labels": int(draw.integers(0, CLASSES))})
            elif kind == "multi-label":
                labels.append({"labels": draw.integers(0, 2, CLASSES).astype(np.float32)})
            elif kind == "regression":
                labels.append({"labels": np.float32(draw.normal())})
            elif kind == "multiple-choice":
                labels.append({"labels": int(draw.integers(0, CHOICES))})
            elif kind == "causal-lm":
                labels.append({"labels": self.sequences[number]["input_ids"]})
            else:
                tokens = draw.integers(0, CLASSES if kind == "token-classification" else VOCABULARY, length)
                tokens[1:] = np.where(draw.random(length - 1) < 0.5, -100, tokens[1:])
                labels.append({"labels": tokens})
        return labels[::CHOICES] if kind == "multiple-choice" else labels

    def _pack(self):
        packs = len(self.rows)
        names = ["input_ids", "sequence_ids", "position_ids"]
        if "token_type_ids" in self.sequences[0]:
            names.append("token_type_ids")
        columns = {name: np.zeros((packs, LENGTH), np.int64) for name in names}
        columns["input_ids"][:] = 1 if self.family in ("roberta", "mpnet") else 0
        columns["slot_starts"] = np.zeros((packs, SLOTS), np.int64)
        columns["slot_lengths"] = np.zeros((packs, SLOTS), np.int64)
        columns.update(self._empty_labels(packs))
        for p, row in enumerate(self.rows):
            at = 0
            for s, number in enumerate(row):
                length, where = self.lengths[number], slice(at, at + self.lengths[number])
                for name, values in self.sequences[number].items():
                    columns[name][p, where] = values
                columns["sequence_ids"][p, where] = s + 1
                columns["position_ids"][p, where] = np.arange(length)
                columns["slot_starts"][p, s], columns["slot_lengths"][p, s] = at, length
                self._put_labels(columns, p, s, number, where)
                at += length
        columns["slot_valid"] = columns["slot_lengths"] > 0
        return columns

    def _empty_labels(self, packs):
        kind = self.kind
        if kind == "question-answering":
            return {name: np.zeros((packs, SLOTS), np.int64) for name in ("start_positions", "end_positions")}
        if kind == "multi-label":
            return {"labels": np.zeros((packs, SLOTS, CLASSES), np.float32)}
        if kind == "regression":
            return {"labels": np.zeros((packs, SLOTS), np.float32)}
        width = {"classification": SLOTS, "multiple-choice": SLOTS // CHOICES}.get(kind, LENGTH)
        return {"labels": np.full((packs, width), -100, np.int64)}

    def _put_labels(self, columns, p, s, number, where):
        if self.kind == "multiple-choice":
            columns["labels"][p, s // CHOICES] = self.labels[number // CHOICES]["labels"]
            return
        for name, value in self.labels[number].items():
            if self.kind == "question-answering":
                columns[name][p, s] = where.start + value
            elif self.kind in ("classification", "multi-label", "regression"):
                columns[name][p, s] = value
            else:
                columns[name][p, where] = value
        if self.kind == "causal-lm":
            columns["labels"][p, where.start] = -100

    @property
    def batch(self):
        return {name: torch.from_numpy(column.copy()) for name, column in self.columns.items()}

    @property
    def inputs(self):
        return inputs_of(self.batch)

    def places(self):
        """(pack, slot, number of the sequence) of each sequence."""
        return [(p, s, number) for p, row in enumerate(self.rows) for s, number in enumerate(row)]

    def alone(self, number, labelled=False):
        """What transformers is given for one sequence (or item) in a batch of its own, with no padding."""
        if self.kind == "multiple-choice":
            part = self.sequences[number * CHOICES : (number + 1) * CHOICES]
            inputs = {name: torch.from_numpy(np.stack([one[name] for one in part]))[None] for name in part[0]}
        else:
            inputs = {name: torch.from_numpy(values)[None] for name, values in self.sequences[number].items()}
        if labelled:
            inputs.update({name: torch.as_tensor(value)[None] for name, value in self.labels[number].items()})
        return inputs


def inputs_of(batch):
    names = ["input_ids", "sequence_ids", "position_ids", "slot_starts", "slot_lengths", "token_type_ids"]
    return {name: batch[name] for name in names if name in batch}
