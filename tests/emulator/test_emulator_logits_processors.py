# SPDX-License-Identifier: Apache-2.0
"""User case U30: a no-repeat rule rewritten for static shapes bans what the host's rule does not.

The device sees histories filled up to a constant length, so 'no token here' needs a mark that is no token. A rule is
right if, for every history, it bans what the rule of transformers bans.
"""

import random

import pytest
import torch

from ipu_finetune.emulator import poptorch

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # two-year-old libraries on a new PyTorch warn about each other
    pytest.mark.usefixtures("installed"),
]

LENGTH, VOCABULARY = 12, 5


class NoRepeat(torch.nn.Module):
    """The n-gram rule with a start that is a tensor; tokens that do not count go to a slot after the vocabulary."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, history, scores, step):
        n, length = self.n, history.shape[-1]
        known = torch.arange(length).unsqueeze(0) < step
        history = torch.where(known, history, VOCABULARY)
        last = poptorch.dynamic_slice(history, 1, (step + 1 - n).clamp(min=0), n - 1, 1)
        grams = history.unfold(-1, n, 1)
        repeats = (grams[..., : n - 1] == last.unsqueeze(1)).all(-1) & (step + 1 >= n)
        slots = torch.where(repeats & (grams[..., -1] < VOCABULARY), grams[..., -1], VOCABULARY)
        hits = torch.zeros(history.shape[0], VOCABULARY + 1).scatter_add(1, slots, torch.ones_like(slots).float())
        return torch.where(hits[:, :VOCABULARY] > 0, -1e18, scores)


class OfOptimum(torch.nn.Module):
    """The processor of optimum-graphcore 0.7.1."""

    def __init__(self, n):
        super().__init__()
        from optimum.graphcore.generation.logits_process import IPUNoRepeatNGramLogitsProcessor

        self.rule = IPUNoRepeatNGramLogitsProcessor(n)

    def forward(self, history, scores, step):
        return self.rule(history, scores, absolute_step=step)


def banned_on_host(n, history):
    from transformers import NoRepeatNGramLogitsProcessor

    scores = NoRepeatNGramLogitsProcessor(n)(torch.tensor([history]), torch.zeros(1, VOCABULARY))
    return {token for token in range(VOCABULARY) if scores[0, token] != 0}


def banned_on_device(model, history):
    padded = torch.tensor([history + [0] * (LENGTH - len(history))])
    scores = model(padded, torch.zeros(1, VOCABULARY), torch.tensor([len(history)]))
    return {token for token in range(VOCABULARY) if scores[0, token] != 0}


def differences(rule, n, histories):
    """{history: (banned on the device only, banned on the host only)} where the two are not the same."""
    model = poptorch.inferenceModel(rule(n))
    found = {}
    for history in histories:
        device, host = banned_on_device(model, history), banned_on_host(n, history)
        if device != host:
            found[tuple(history)] = (device - host, host - device)
    return found


def random_histories(count):
    draw = random.Random(30)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, LENGTH))] for _ in range(count)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_u30_a_rule_with_a_mark_outside_of_the_vocabulary_is_that_of_the_host(n):
    histories = [[0], [3], [0, 0], [0, 3, 0], [3, 0, 3], [0] * LENGTH, *random_histories(60)]
    assert differences(NoRepeat, n, histories) == {}


def test_u30_the_case_of_the_report():
    assert banned_on_host(2, [0, 3, 0]) == {3}
    assert banned_on_host(2, [3]) == set()
    model = poptorch.inferenceModel(NoRepeat(2))
    assert banned_on_device(model, [0, 3, 0]) == {3}
    assert banned_on_device(model, [3]) == set()


def test_u30_the_parity_check_names_the_token_that_optimum_graphcore_bans_too_much():
    pytest.importorskip("optimum.version")
    # Fewer tokens than an n-gram has: nothing can repeat, yet the filling zeros look like a history.
    assert differences(OfOptimum, 2, [[0]]) == {(0,): ({0}, set())}
