# SPDX-License-Identifier: Apache-2.0
"""U66: a model above 2 GB is noticed before it is compiled; its weights stay outside of the graph, or it is refused."""

import pytest
import torch

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device import size
from ipu_finetune.emulator.device.size import check_graph_size, weight_bytes
from ipu_finetune.emulator.poptorch import Error


def model_of(count, dtype):
    # No memory is needed to know a size.
    return torch.nn.Linear(count // 1000, 1000, bias=False, device="meta", dtype=dtype)


def test_u66_six_hundred_million_float_parameters_use_external_weights():
    weights = weight_bytes(model_of(600_000_000, torch.float32).parameters())
    assert weights == 2_400_000_000
    assert check_graph_size(weights, "weights.onnx") == "2.4 GB > 2 GB: using external weights"


def test_u66_without_a_file_for_them_the_model_is_refused_with_the_option_to_set():
    with pytest.raises(Error, match=r"2\.4 GB > 2 GB.*protobuf.*saveInitializersToFile"):
        check_graph_size(2_400_000_000, None)


def test_u66_the_same_model_in_half_precision_goes_into_the_graph():
    weights = weight_bytes(model_of(600_000_000, torch.float16).parameters())
    assert weights == 1_200_000_000
    assert check_graph_size(weights, None) is None


@pytest.mark.parametrize(("weights", "inside"), [(2**31 - 1, True), (2**31, False)])
def test_u66_the_limit_is_that_of_a_protobuf_message(weights, inside):
    assert (check_graph_size(weights, "weights.onnx") is None) is inside


def test_tied_weights_are_counted_once():
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    assert weight_bytes([*embedding.parameters(), *head.parameters()]) == 10 * 4 * 4


@pytest.mark.parametrize("file", [None, "weights.onnx"])
def test_u66_compiling_checks_the_size_first(file, monkeypatch, caplog):
    monkeypatch.setattr(size, "MESSAGE_LIMIT", 4 * 11)  # bytes; the model has 12 float32 weights
    options = poptorch.Options()
    if file:
        options._Popart.set("saveInitializersToFile", file)
    model = poptorch.inferenceModel(torch.nn.Linear(3, 4, bias=False), options)
    if file:
        with caplog.at_level("INFO", logger="ipu_finetune.emulator"):
            model.compile(torch.ones(1, 3))
        assert "using external weights" in caplog.text
    else:
        with pytest.raises(Error, match="do not fit into the graph"):
            model.compile(torch.ones(1, 3))
        assert not model.isCompiled()
