# SPDX-License-Identifier: Apache-2.0
"""U61: one compiled shape, any number of rows, and a policy for rows that are too long; on both targets."""

import warnings

import numpy as np
import pytest
import torch
import transformers

from ipu_finetune.errors import DataError, UsageError

INPUTS = ["input_ids", "attention_mask", "token_type_ids"]
OUTPUTS = ["start_logits", "end_logits"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return transformers.BertForQuestionAnswering.from_pretrained(str(tiny_model)).eval()


@pytest.fixture(params=["cpu", "emulator"])
def build(request, model):
    """Return a function that builds a predictor compiled for 4 rows of 128 tokens."""
    made = []

    def make(length=128, too_long="error"):
        if request.param == "cpu":
            from ipu_finetune.inference.predictor import TorchPredictor

            made.append(TorchPredictor(model, INPUTS, OUTPUTS, 4, length, too_long))
        else:
            from ipu_finetune import emulator

            emulator.install()
            from ipu_finetune.inference.ipu_model import IpuPredictor, build_ipu_config

            config = build_ipu_config({"layers_per_ipu": [2], "inference_layers_per_ipu": [2]})
            made.append(IpuPredictor(model, config, INPUTS, OUTPUTS, 4, length, too_long))
        return made[-1]

    yield make
    for predictor in made:
        predictor.close()


def columns(rows, length):
    generator = np.random.default_rng(rows)
    return {
        "input_ids": generator.integers(1000, 2000, size=(rows, length)),
        "attention_mask": np.ones((rows, length), dtype=np.int64),
        "token_type_ids": np.zeros((rows, length), dtype=np.int64),
    }


def expected(model, given):
    with torch.no_grad():
        answer = model(**{name: torch.from_numpy(column) for name, column in given.items()})
    return [answer.start_logits.numpy(), answer.end_logits.numpy()]


def test_u61_one_four_and_seven_rows_give_as_many_results(build, model):
    predictor = build()
    for rows in (1, 4, 7):
        given = columns(rows, 128)
        got = predictor(given)
        assert [output.shape for output in got] == [(rows, 128)] * 2
        for ours, theirs in zip(got, expected(model, given)):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_u61_shorter_rows_are_padded_and_their_outputs_cut_back(build, model):
    given = columns(5, 40)
    for ours, theirs in zip(build()(given), expected(model, given)):
        assert ours.shape == (5, 40)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_u61_longer_rows_are_an_error_that_says_what_to_do(build):
    with pytest.raises(DataError, match="1 rows of 130 tokens do not fit the compiled length 128; split them"):
        build()(columns(1, 130))


def test_u61_longer_rows_are_cut_with_one_warning_where_that_is_asked_for(build):
    predictor = build(too_long="truncate")
    with pytest.warns(UserWarning, match="rows of 130 tokens are cut to the compiled length 128"):
        assert [output.shape for output in predictor(columns(1, 130))] == [(1, 128)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictor(columns(1, 130))


def test_no_row_and_an_unknown_policy_are_errors(build):
    with pytest.raises(DataError, match="there is no row"):
        build()(columns(0, 128))
    with pytest.raises(UsageError, match="too_long='cut'"):
        build(too_long="cut")


def test_u01_evaluation_gives_exactly_1003_predictions_in_order(model):
    from ipu_finetune import emulator

    emulator.install()
    from ipu_finetune.inference.ipu_model import IpuPredictor, build_ipu_config

    config = build_ipu_config(
        {
            "layers_per_ipu": [2],
            "inference_layers_per_ipu": [2],
            "inference_device_iterations": 4,
            "inference_replication_factor": 2,
        }
    )
    predictor = IpuPredictor(model, config, INPUTS, OUTPUTS, 4)
    assert predictor.batch == 32
    given = columns(1003, 8)
    for ours, theirs in zip(predictor(given), expected(model, given)):
        assert ours.shape == (1003, 8)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    predictor.close()
