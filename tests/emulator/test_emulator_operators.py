# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_finetune.emulator.device.operators import (
    base_name,
    call_verdict,
    function_verdict,
    operators,
    unsupported_message,
    verdict,
)

# ---- the table


def test_every_entry_is_complete():
    for name, entry in operators().items():
        assert entry["supported"] in (True, False, "partly"), name
        assert set(entry) <= {"supported", "source", "note", "replacement"}, name
        assert entry["source"] in ("handler", "guide", "composed", "kernel", "refused", "no handler"), name
        if entry["supported"] == "partly":
            assert entry["note"], name


def test_names_of_pytorch_are_spelt_as_pytorch_spells_them():
    known = {name.partition(".")[0] for name in dir(torch.ops.aten)}
    known |= {
        schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten")
    }
    # Operators of PyTorch 2.0 that later versions lack.
    gone = {"convolution_overrideable", "mkldnn_linear", "numpy_T", "_prelu_kernel", "unsafe_chunk"}
    missing = [name for name in operators() if name not in known and f"{name}_" not in known and name not in gone]
    # A handful may come and go between versions of PyTorch; a misspelt table would miss far more.
    assert len(missing) <= 12, missing


# ---- names


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("aten.add_.Tensor", "add"),
        ("aten::add.out", "add"),
        ("add", "add"),
        ("aten.__iand__.Tensor", "__and__"),
        ("aten.__and__.Scalar", "__and__"),
        ("aten.normal_.default", "normal_"),
        ("aten.relu_.default", "relu"),
    ],
)
def test_an_overload_or_an_in_place_form_is_the_same_operator(name, base):
    assert base_name(name) == base


# ---- verdicts on aten operators


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def refused_by(function):
    with _Seen() as seen:
        function()
    return sorted(name for name in seen.names if verdict(name).supported is not True)


def test_a_transformer_layer_with_its_backward_pass_is_supported():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    embedding = torch.nn.Embedding(10, 8, padding_idx=0)

    def run():
        x = embedding(torch.tensor([[1, 2, 0]]))
        loss = torch.nn.functional.cross_entropy(layer(x).flatten(0, 1), torch.tensor([1, 2, -100]))
        loss.backward()

    assert refused_by(run) == []


def test_a_convolutional_network_with_its_backward_pass_is_supported():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 4),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(4, 2),
    )
    assert (
        refused_by(lambda: torch.nn.functional.mse_loss(net(torch.randn(2, 3, 8, 8)), torch.ones(2, 2)).backward())
        == []
    )


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.nan_to_num(x), ["aten.nan_to_num.default"]),
        (lambda x: torch.cummax(x, 0), ["aten._cummax_helper.default", "aten.cummax.default"]),
        (lambda x: torch.linalg.svd(x), ["aten._linalg_svd.default"]),
        (lambda x: torch.lgamma(x), ["aten.lgamma.default"]),
        (lambda x: x.nonzero(), ["aten.nonzero.default"]),
        (lambda x: x.sum().item(), ["aten._local_scalar_dense.default"]),
        (lambda x: torch.unique(x), ["aten._unique2.default"]),
        (lambda x: torch.masked_select(x, x > 0), ["aten.masked_select.default"]),
        (lambda x: torch.fft.rfft(x), ["aten._fft_r2c.default"]),
    ],
)
def test_what_an_ipu_lacks_is_refused(function, named):
    refused = refused_by(lambda: function(torch.rand(3, 3)))
    assert set(refused) & set(named)
    assert all(verdict(name).why for name in refused)


@pytest.mark.parametrize("name", ["baddbmm", "erf", "scatter_reduce", "index_put", "bernoulli_", "triu", "cumprod"])
def test_what_has_a_lowering_is_supported(name):
    assert verdict(name).supported is True


def test_unknown_names_are_unlisted_and_kernels_of_the_backward_pass_supported():
    assert verdict("aten.of_the_future.default").supported is None
    assert verdict("mine::operator").supported is None
    assert verdict("aten.native_layer_norm_backward.default").supported is True


# ---- verdicts on functions


class _Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.refused = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = call_verdict(resolve_name(func) or "", args, kwargs)
        if found.supported is False:
            self.refused.append(found)
        return func(*args, **(kwargs or {}))


def calls(function):
    with _Called() as called:
        function()
    return called.refused


SEQUENCE = torch.randn(3, 2, 4)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: torch.nn.LSTM(4, 4, bidirectional=True)(SEQUENCE), "bidirectional LSTM not supported"),
        (lambda: torch.nn.GRU(4, 4, bidirectional=True)(SEQUENCE), "bidirectional GRU not supported"),
        (lambda: torch.nn.RNN(4, 4, bidirectional=True)(SEQUENCE), "bidirectional RNN not supported"),
        (lambda: torch.nn.LSTM(4, 4, bias=False)(SEQUENCE), "LSTM without biases not supported"),
        (lambda: torch.nn.LSTM(4, 4, num_layers=2)(SEQUENCE), "Only LSTM with 1 layer supported"),
        (
            lambda: torch.nn.functional.ctc_loss(
                SEQUENCE.log_softmax(-1), torch.tensor([[1], [2]]), [3, 3], [1, 1], reduction="none"
            ),
            "CTCLoss with reduction",
        ),
        (lambda: torch.linalg.matrix_norm(SEQUENCE[0], 2), "Matrix 2-norm is not supported"),
        (lambda: torch.linalg.norm(SEQUENCE[0], 2), "Matrix 2-norm is not supported"),
        (lambda: torch.linalg.norm(SEQUENCE, "nuc", dim=(0, 1)), "nuclear norm is not supported"),
        (lambda: torch.topk(SEQUENCE, 2, sorted=False), "sorted=False"),
        (lambda: torch.nn.functional.one_hot(torch.tensor([1, 2])), "num classes must be specified"),
        (lambda: torch.bincount(torch.tensor([1, 2])), "minlength"),
        (lambda: SEQUENCE[SEQUENCE > 0], "nonzero are unsupported"),
        (lambda: torch.where(SEQUENCE > 0), "nonzero are unsupported"),
        (lambda: bool(SEQUENCE.sum() > 0), "not known when the graph is made"),
        (lambda: SEQUENCE.sum().item(), "not known when the graph is made"),
        (lambda: SEQUENCE.tolist(), "not known when the graph is made"),
        (lambda: torch.unique(SEQUENCE), "depends on the values"),
        (lambda: torch.repeat_interleave(torch.ones(2), torch.tensor([1, 2])), "number of repeats"),
        (lambda: torch.nn.functional.max_pool1d(SEQUENCE, 2, return_indices=True), "indices are not returned"),
        (
            lambda: torch.nn.functional.cross_entropy(SEQUENCE[0], torch.tensor([0, 1]), weight=torch.ones(4)),
            "weight",
        ),
        (lambda: SEQUENCE.nan_to_num(), "no lowering"),
    ],
)
def test_a_call_that_an_ipu_refuses_is_named_by_its_arguments(function, text):
    assert text in " ".join(found.why for found in calls(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.nn.LSTM(4, 4)(SEQUENCE),
        lambda: torch.nn.GRU(4, 4, bias=False)(SEQUENCE),
        lambda: torch.nn.functional.ctc_loss(SEQUENCE.log_softmax(-1), torch.tensor([[1], [2]]), [3, 3], [1, 1]),
        lambda: torch.linalg.norm(SEQUENCE[0, 0], 2),
        lambda: torch.norm(SEQUENCE[0], 2),
        lambda: torch.linalg.norm(SEQUENCE[0], 1),
        lambda: torch.topk(SEQUENCE, 2),
        lambda: torch.nn.functional.one_hot(torch.tensor([1, 2]), 4),
        lambda: torch.bincount(torch.tensor([1, 2]), minlength=4),
        lambda: SEQUENCE[torch.tensor([0, 1])],
        lambda: SEQUENCE.clone().__setitem__(SEQUENCE > 0, 0.0),
        lambda: torch.where(SEQUENCE > 0, SEQUENCE, 0),
        lambda: torch.repeat_interleave(torch.ones(2), 3),
        lambda: torch.nn.functional.max_pool1d(SEQUENCE, 2),
        lambda: torch.nn.functional.cross_entropy(SEQUENCE[0], torch.tensor([0, 1])),
    ],
)
def test_the_same_calls_within_the_limits_are_not_refused(function):
    assert calls(function) == []


def test_a_finding_says_what_to_write_instead():
    assert "torch.where" in function_verdict("torch.nan_to_num").replacement
    assert "poptorch.cond" in function_verdict("torch.Tensor.__bool__").replacement
    text = unsupported_message([(verdict("aten.nan_to_num.default"), "encoder.layer.0 (model.py:7)")] * 2)
    assert text.startswith("Unsupported ops found in compiled model: [aten::nan_to_num].")
    assert text.count("encoder.layer.0 (model.py:7)") == 1
    assert "instead: torch.where" in text
