# SPDX-License-Identifier: Apache-2.0
"""A proof, on the model and the packs at hand, that sequences which share a row do not see each other.

For each sequence (and the padding), some of its tokens are exchanged, one at a time. In float32 and evaluation mode, to
the bit:

1. the outputs of all other sequences stay what they were;
2. the gradients that the others' losses send to their own input embeddings stay what they were;
3. the gradient of the others' losses with respect to this sequence's input embeddings is 0.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import numpy as np
import torch
from torch import nn

from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.packing.isolation import PackedModel
from ipu_finetune.packing.losses import element_loss, valid

__all__ = ["LeakReport", "verify"]

PADDING = 0  # in `sequence_ids`
NOBODY = -1  # owns the outputs of an empty slot, which mean nothing
BACKWARD = "the losses of others have a gradient by the embeddings of {}"


@dataclass(frozen=True)
class LeakReport:
    """What was shown.

    Attributes:
        sequences: that were changed.
        tokens: that were exchanged, those of padding included.
        shared: packs that hold more than one sequence; without any, there was nothing to show.
    """

    sequences: int
    tokens: int
    shared: int

    @property
    def isolation(self) -> str:
        """``on``, or ``not shown`` where no two sequences share a pack."""
        return "on" if self.shared else "not shown"

    def __str__(self) -> str:
        if not self.shared:
            return f"isolation: {self.isolation} (no two of these {self.sequences} sequences share a pack)"
        return (
            f"isolation: {self.isolation} ({self.sequences} sequences, {self.tokens} tokens exchanged one at a time: "
            "outputs and gradients of all others are bit-identical)"
        )


def verify(packed: PackedModel, columns: Mapping[str, Any], *, tokens: int = 2, seed: int = 0) -> LeakReport:
    """Show for one batch of packs that no sequence has a part in another's outputs or gradients.

    It takes one forward and one backward pass per exchanged token, so a few packs are enough for a large model. The
    model's weights, gradients and mode are as before afterwards.

    Args:
        packed: in float32, on any device of PyTorch's.
        columns: of the packs, arrays or tensors, with their labels and `slot_valid`.
        tokens: to exchange in each sequence: the first, the last, then others drawn at random.
        seed: of what is drawn.

    Raises:
        IpuFinetuneError: a leak, with the sequences and the largest difference; or the model is not in float32, or does
            not repeat its own numbers, so that nothing can be shown.
    """
    device = next(packed.parameters()).device
    kinds = {str(p.dtype).replace("torch.", "") for p in packed.parameters() if p.is_floating_point()}
    if kinds != {"float32"}:
        raise IpuFinetuneError(
            f"packing.verify compares bits in float32, but the model's weights are {', '.join(sorted(kinds))}; verify "
            "it before it is converted"
        )
    batch = {name: torch.as_tensor(column).to(device) for name, column in columns.items()}
    generator = np.random.Generator(np.random.PCG64(seed))
    with _evaluating(packed):
        changed, exchanged = _Prover(packed, batch).check_all(tokens, generator)
    shared = int(((batch["slot_lengths"] > 0).sum(dim=1) > 1).sum())
    return LeakReport(changed, exchanged, shared)


@dataclass(frozen=True)
class _Run:
    """One forward pass.

    Attributes:
        outputs: by name, [B, L or S, …].
        elements: the loss of each element.
        embeddings: the input embeddings [B, L, H], a leaf of the graph.
    """

    outputs: Dict[str, torch.Tensor]
    elements: torch.Tensor
    embeddings: torch.Tensor


class _Prover:
    """Holds a batch, and who owns what in it: [B, …] of slot numbers from 1 on, like `sequence_ids`.

    For losses and gradients, the owner is an item where several choices share a loss, else a sequence.
    """

    def __init__(self, packed: PackedModel, batch: Dict[str, torch.Tensor]) -> None:
        self._packed, self._batch = packed, batch
        self._loss = element_loss(packed.kind)
        counted = torch.from_numpy(valid(packed.kind, {name: tensor.cpu().numpy() for name, tensor in batch.items()}))
        sequences = batch["sequence_ids"]
        self._weights = counted.to(sequences.device).float()
        choices = packed.choices or 1
        self._sequences = sequences
        self._items = torch.div(sequences + choices - 1, choices, rounding_mode="floor")
        slots = torch.arange(1, packed.slots + 1, device=sequences.device).expand(len(sequences), -1)
        per_slot = self._loss_is_per_slot()
        self._element_owners = slots[:, : counted.shape[1]] if per_slot else sequences
        answers_per_slot = per_slot and packed.kind != "question-answering"
        filled = torch.where(batch["slot_lengths"] > 0, slots, torch.full_like(slots, NOBODY))
        self._output_owners = filled if answers_per_slot else sequences

    def _loss_is_per_slot(self) -> bool:
        return self._packed.kind not in ("token-classification", "masked-lm", "causal-lm")

    def check_all(self, tokens: int, generator: np.random.Generator) -> Tuple[int, int]:
        """Check each sequence, and the padding of each pack; return how many sequences and tokens were changed."""
        before = self._run(self._batch["input_ids"])
        self._check_repeats(before)
        sequences = exchanged = 0
        for pack, row in enumerate(self._sequences):
            for sequence in row.unique().tolist():
                exchanged += self._check(before, pack, sequence, tokens, generator)
                sequences += sequence != PADDING
        return sequences, exchanged

    def _run(self, input_ids: torch.Tensor) -> _Run:
        found: List[torch.Tensor] = []

        def catch(module: nn.Module, inputs: Any, answer: torch.Tensor) -> Any:
            if found:  # GPT-2 looks its token types up in the same table
                return None
            found.append(answer.detach().requires_grad_())
            return found[0].clone()  # which may be changed in place, as DeBERTa does; a leaf may not

        batch = {**self._batch, "input_ids": input_ids}
        names = ("input_ids", "sequence_ids", "position_ids", "slot_starts", "slot_lengths", "token_type_ids")
        handle = self._packed.model.get_input_embeddings().register_forward_hook(catch)
        try:
            outputs = self._packed(**{name: batch[name] for name in names if name in batch})
        finally:
            handle.remove()
        places = self._output_owners.shape
        flat = {name: value.detach().reshape(*places, -1) for name, value in outputs.items()}
        return _Run(flat, self._loss(outputs, batch) * self._weights, found[0])

    def _gradient(self, run: _Run, left_out: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sum of all losses but those left out, by the input embeddings."""
        loss = run.elements.masked_fill(left_out, 0.0).sum()
        return torch.autograd.grad(loss, run.embeddings, retain_graph=True)[0]

    def _check_repeats(self, before: _Run) -> None:
        again = self._run(self._batch["input_ids"])
        nothing = torch.zeros_like(self._weights, dtype=torch.bool)
        pairs = [(before.outputs[name], again.outputs[name]) for name in before.outputs]
        pairs.append((self._gradient(before, nothing), self._gradient(again, nothing)))
        if not all(torch.equal(one, other) for one, other in pairs):
            raise IpuFinetuneError(
                "packing.verify: run again on the same packs, the model gives other numbers (or some that are not "
                "finite), so nothing can be shown; verify it on a CPU, or with deterministic kernels"
            )

    def _check(self, before: _Run, pack: int, sequence: int, tokens: int, generator: np.random.Generator) -> int:
        """Exchange some tokens of one sequence, compare everything else; return how many."""
        places = (self._sequences[pack] == sequence).nonzero().flatten().tolist()
        item = int(self._items[pack, places[0]])
        own_items, own_elements, own_outputs = (
            _cell(owners, pack, number)
            for owners, number in (
                (self._items, item),
                (self._element_owners, item),
                (self._output_owners, sequence),
            )
        )
        others = ~own_outputs & (self._output_owners != NOBODY)
        who = _name(pack, sequence)
        expected = self._gradient(before, own_elements)
        self._compare(expected, torch.zeros_like(expected), own_items, self._sequences, BACKWARD.format(who))
        chosen = _sample(places, tokens, generator)
        for place in chosen:
            step = int(generator.integers(1, self._packed.model.config.vocab_size))
            ids = self._batch["input_ids"].clone()
            ids[pack, place] = (ids[pack, place] + step) % self._packed.model.config.vocab_size
            after = self._run(ids)
            token = f"exchanging token {place - places[0]} of {who}"
            for name, value in after.outputs.items():
                what = f"{token} moves the {name} of {{}}"
                self._compare(value, before.outputs[name], others, self._output_owners, what)
            gradient = self._gradient(after, own_elements)
            what = f"{token} moves the gradient that the loss of {{}} sends to its own embeddings"
            self._compare(gradient, expected, ~own_items, self._sequences, what)
            self._compare(gradient, torch.zeros_like(gradient), own_items, self._sequences, BACKWARD.format(who))
        return len(chosen)

    def _compare(
        self, found: torch.Tensor, expected: torch.Tensor, where: torch.Tensor, owners: torch.Tensor, what: str
    ) -> None:
        """Raise unless `found` and `expected` [B, N, …] are equal `where` [B, N] says."""
        differs = ((found != expected).any(dim=-1)) & where
        if not bool(differs.any()):
            return
        difference = (found - expected).abs().amax(dim=-1).masked_fill(~differs, -1.0).nan_to_num(float("inf"))
        pack, place = divmod(int(difference.argmax()), difference.shape[1])
        whose = _name(pack, int(owners[pack, place]))
        raise IpuFinetuneError(
            f"packing leaks: {what.format(whose)} (largest difference {float(difference.max()):.3g}; it must be 0). "
            "Train without packing (packing.enabled=false) and report this model"
        )


def _cell(owners: torch.Tensor, pack: int, owner: int) -> torch.Tensor:
    """Return where in `owners` one owner of one pack is, bool of its shape."""
    mask = torch.zeros_like(owners, dtype=torch.bool)
    mask[pack] = owners[pack] == owner
    return mask


def _sample(places: List[int], count: int, generator: np.random.Generator) -> List[int]:
    """Choose the first, the last, then others at random: a leak is likeliest where two sequences meet."""
    ends = list(dict.fromkeys([places[0], places[-1]]))
    others = [place for place in places if place not in ends]
    generator.shuffle(others)
    return sorted((ends + others)[:count])


def _name(pack: int, sequence: int) -> str:
    return f"the padding of pack {pack}" if sequence == PADDING else f"sequence {sequence} of pack {pack}"


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, and leave each part in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
