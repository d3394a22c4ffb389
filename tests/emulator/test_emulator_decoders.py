# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch

# ---- an oracle: every alignment, enumerated


def every_path(log_probs, blank):
    """{labels: probability} of one sample, by summing over all alignments."""
    steps, classes = log_probs.shape
    found = {}
    for alignment in itertools.product(range(classes), repeat=steps):
        labels = tuple(label for label, _ in itertools.groupby(alignment) if label != blank)
        score = math.exp(sum(log_probs[step, label].item() for step, label in enumerate(alignment)))
        found[labels] = found.get(labels, 0.0) + score
    return found


def ranked(log_probs, blank, top):
    found = every_path(log_probs, blank)
    return sorted(found.items(), key=lambda item: -item[1])[:top]


def random_log_probs(steps, batch, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, batch, classes, generator=generator).mul(2).log_softmax(-1)


@pytest.mark.parametrize(("seed", "blank"), [(0, 0), (1, 0), (2, 2), (3, 1)])
def test_the_best_sequences_are_those_of_an_exhaustive_search(seed, blank):
    log_probs = random_log_probs(5, 2, 3, seed)
    lengths = torch.tensor([5, 4], dtype=torch.int32)
    scores, sizes, paths = poptorch.ctc_beam_search_decoder(log_probs, lengths, blank, beam_width=200, top_paths=4)
    for sample, steps in enumerate(lengths.tolist()):
        for rank, (labels, probability) in enumerate(ranked(log_probs[:steps, sample], blank, 4)):
            assert sizes[sample, rank] == len(labels)
            assert tuple(paths[sample, rank, : len(labels)].tolist()) == labels
            assert (paths[sample, rank, len(labels) :] == blank).all()
            assert scores[sample, rank].exp().item() == pytest.approx(probability, rel=1e-4)


def test_repeated_labels_need_a_blank_between_them():
    certain = torch.full((3, 1, 2), -30.0)
    certain[0, 0, 1] = certain[1, 0, 0] = certain[2, 0, 1] = 0.0
    _, sizes, paths = poptorch.ctc_beam_search_decoder(certain, torch.tensor([3]))
    assert paths[0, 0, : sizes[0, 0]].tolist() == [1, 1]
    certain[1, 0] = torch.tensor([-30.0, 0.0])
    _, sizes, paths = poptorch.ctc_beam_search_decoder(certain, torch.tensor([3]))
    assert paths[0, 0, : sizes[0, 0]].tolist() == [1]


def test_a_narrow_beam_may_miss_the_best_sequence():
    # Alone, each step's best class is the blank; together the alignments of (1,) weigh more.
    log_probs = torch.tensor([[[0.4, 0.35, 0.25]], [[0.4, 0.35, 0.25]]]).log()
    wide = poptorch.ctc_beam_search_decoder(log_probs, torch.tensor([2]), beam_width=50)
    assert wide[2][0, 0, : wide[1][0, 0]].tolist() == [1]
    narrow = poptorch.ctc_beam_search_decoder(log_probs, torch.tensor([2]), beam_width=1)
    assert narrow[1][0, 0] == 0


def test_missing_sequences_are_marked():
    scores, sizes, _ = poptorch.ctc_beam_search_decoder(torch.zeros(1, 1, 2), torch.tensor([1]), top_paths=3)
    assert scores[0].tolist() == [0.0, 0.0, -math.inf]
    assert sorted(sizes[0].tolist()) == [0, 0, 1]


class Decoder(torch.nn.Module):
    def forward(self, log_probs, lengths):
        return poptorch.ctc_beam_search_decoder(log_probs * 1.0, lengths, top_paths=2)


def test_a_compiled_model_decodes_each_call_with_its_own_values():
    model = poptorch.inferenceModel(Decoder())
    for seed in (4, 5):
        log_probs, lengths = random_log_probs(4, 3, 3, seed), torch.tensor([4, 3, 4], dtype=torch.int32)
        for found, expected in zip(
            model(log_probs, lengths), poptorch.ctc_beam_search_decoder(log_probs, lengths, top_paths=2)
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], torch.tensor([1])), "probs must be a torch.tensor"),
        ((torch.zeros(1, 1, 2), [1]), "lengths must be a torch.tensor"),
        ((torch.zeros(1, 2), torch.tensor([1])), "rank-3"),
        ((torch.zeros(1, 1, 2), torch.tensor([1, 1])), "one for each sample"),
        ((torch.zeros(1, 1, 2), torch.tensor([1]), 2), "blank must be one of the 2 classes"),
        ((torch.zeros(1, 1, 2), torch.tensor([1]), 0, 1, 2), "at most beam_width"),
    ],
)
def test_the_decoder_names_a_wrong_argument(arguments, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.ctc_beam_search_decoder(*arguments)


# ---- farthest points


def plain_fps(points, count):
    chosen = [0]
    while len(chosen) < count:
        nearest = [min(math.dist(p, points[c].tolist()) for c in chosen) for p in points.tolist()]
        chosen.append(max(range(len(points)), key=lambda i: nearest[i]))
    return chosen


@pytest.mark.parametrize("ptr", [[0, 9], [0, 4, 9], [0, 1, 3, 9]])
@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
def test_farthest_points_are_taken_set_by_set(ptr, ratio):
    points = torch.randn(9, 3)
    expected = []
    for first, last in zip(ptr, ptr[1:]):
        expected += [first + i for i in plain_fps(points[first:last], math.ceil((last - first) * ratio))]
    found = poptorch.fps(points, ptr, ratio)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


class Sampler(torch.nn.Module):
    def forward(self, points, random_start):
        return poptorch.fps(points + 0.0, [0, 4, 9], 0.5, random_start)


def test_farthest_points_in_a_compiled_model():
    model = poptorch.inferenceModel(Sampler())
    for _ in range(2):
        points = torch.randn(9, 2)
        assert model(points, False).tolist() == poptorch.fps(points, [0, 4, 9], 0.5).tolist()


def test_a_random_start_stays_in_its_set_and_varies():
    opts = options()
    opts.randomSeed(7)
    model = poptorch.inferenceModel(Sampler(), opts)
    points = torch.randn(9, 2)
    starts = {tuple(model(points, True)[[0, 2]].tolist()) for _ in range(20)}
    assert len(starts) > 1
    assert all(first < 4 <= second for first, second in starts)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], [0, 1]), "must take a torch.tensor"),
        ((torch.ones(2, 2), torch.tensor([0, 2])), "list of integers"),
        ((torch.ones(2, 2), [0]), "at least 2 elements"),
        ((torch.ones(2, 2), [0, 2], 1), "float type"),
        ((torch.ones(2, 2), [0, 2], 1.5), r"has to be in range \(0.0, 1.0>"),
        ((torch.ones(2, 2), [0, 2], 0.5, 1), "bool type"),
        ((torch.ones(2), [0, 2]), "supposed to be 2d"),
        ((torch.ones(2, 2), [0, 3]), "at most the 2 points"),
    ],
)
def test_farthest_points_name_a_wrong_argument(arguments, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.fps(*arguments)


# ---- nearest points

X = torch.tensor([[-1.0, -1], [-1, 1], [1, 1], [1, -1], [-2, -2], [-2, 2], [2, 2], [2, -2]])
Y = torch.tensor([[-1.0, 0], [1, 0], [-2, 0], [2, 0]])


def plain_nearest(x, y, batch_x, batch_y):
    return [
        min(
            (j for j in range(len(y)) if batch_y[j] == batch_x[i]),
            key=lambda j, i=i: math.dist(x[i].tolist(), y[j].tolist()),
        )
        for i in range(len(x))
    ]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_nearest_point_belongs_to_the_same_sample(as_tensor, dtype):
    batch_x, batch_y = [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1]
    expected = plain_nearest(X, Y, batch_x, batch_y)

    class Model(torch.nn.Module):
        def forward(self, x, y, bx, by):
            return poptorch.nearest(x, y, bx, by)

    if as_tensor:
        batch_x, batch_y = torch.tensor(batch_x), torch.tensor(batch_y)
    model = poptorch.inferenceModel(Model())
    found = model(X.to(dtype), Y.to(dtype), batch_x, batch_y)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_without_samples_every_point_counts():
    assert poptorch.nearest(X, Y).tolist() == plain_nearest(X, Y, [0] * 8, [0] * 4)
    assert poptorch.nearest(X, Y, [0] * 8).tolist() == poptorch.nearest(X, Y).tolist()
    assert poptorch.nearest(torch.tensor([0.2, 3.0]), torch.tensor([1.0, 0.0])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("batch_x", "batch_y", "text"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0], "do not occur"),
        ([0, 0, 0, 0, 1, 1, 1, 1], None, "do not occur"),
        ([0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1], "not sorted"),
        ([0] * 7, [0] * 4, "one number for each"),
    ],
)
def test_samples_must_fit(batch_x, batch_y, text):
    with pytest.raises(ValueError, match=text):
        poptorch.nearest(X, Y, batch_x, batch_y)
    with pytest.raises(poptorch.Error, match="must take a torch.tensor `y`"):
        poptorch.nearest(X, [1])
