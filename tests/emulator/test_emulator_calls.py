# SPDX-License-Identifier: Apache-2.0
import datetime
import logging

import pytest
import torch
from emulator_oracle import data, make, options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device import tracing

RECOMPILE = r"[\s\S]*don't match the inputs used to compile the model[\s\S]*destroy\(\)"


class Takes(torch.nn.Module):
    def forward(self, x, y=None, factor=1, *, scale=None):
        out = x * factor
        if y is not None:
            out = out + (y[0] if isinstance(y, (list, tuple)) else y["t"] if isinstance(y, dict) else y)
        return out if scale is None else out * scale


def compiled(*args, **kwargs):
    model = poptorch.inferenceModel(Takes())
    model.compile(*args, **kwargs)
    return model


ONE = torch.ones(2)
TEN = torch.full((2,), 10.0)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ((ONE,), (torch.ones(3),), r"Shape mismatch for x: expected torch.Size\(\[2\]\) but got torch.Size\(\[3\]\)"),
        ((ONE,), (torch.ones(2, dtype=torch.int64),), "for x: expected torch.float32 but got torch.int64"),
        ((ONE,), (ONE, ONE), "Type mismatch for y: expected .*NoneType.* but got .*Tensor"),
        ((ONE, ONE), (ONE,), "Type mismatch for y: expected .*Tensor.* but got .*NoneType"),
        ((ONE, None, 5), (ONE, None, 3), "Value mismatch for factor: expected 5 but got 3"),
        ((ONE, (ONE, ONE)), (ONE, (ONE,)), "mismatch for y"),
        ((ONE, (ONE,)), (ONE, [ONE]), "Type mismatch for y"),
        ((ONE, {"t": ONE}), (ONE, {"t": torch.ones(1)}), r"Shape mismatch for y\['t'\]"),
        ((ONE, {"t": ONE}), (ONE, {"t": ONE, "u": ONE}), "of y mismatch.* Unexpected arguments: u."),
        ((ONE, {"t": ONE, "u": ONE}), (ONE, {"t": ONE}), "of y mismatch.* Missing arguments: u."),
        ((ONE, ONE), (ONE, 3), "Type mismatch for y: expected .*Tensor.* but got .*int"),
    ],
)
def test_a_call_must_look_like_the_compiled_one(first, second, text):
    model = compiled(*first)
    model(*first)
    with pytest.raises(poptorch.Error, match=text + RECOMPILE):
        model(*second)
    model.destroy()
    model(*second)


def test_constants_and_equal_shapes_pass():
    model = compiled(ONE, (ONE, "text"), 2)
    assert model(ONE * 3, (ONE, "text"), 2).tolist() == [7, 7]


def test_keywords_and_positions_are_the_same_arguments():
    model = compiled(ONE, factor=2)
    assert model(factor=2, x=ONE).tolist() == [2, 2]
    assert model(ONE, None, 2).tolist() == [2, 2]


def test_keyword_only_arguments_are_passed_by_name():
    assert compiled(ONE, scale=torch.tensor([3.0]))(ONE, scale=torch.tensor([4.0])).tolist() == [4, 4]


def test_open_argument_lists_are_passed_on():
    class Open(torch.nn.Module):
        def forward(self, first, *more, **named):
            return first + sum(more) + named["a"] * named["b"]

    model = poptorch.inferenceModel(Open())
    assert model(ONE, ONE, ONE, a=ONE * 2, b=ONE * 3).tolist() == [9, 9]
    with pytest.raises(poptorch.Error, match="positional arguments mismatch: expected 3 arguments but got 2"):
        model(ONE, ONE, a=ONE, b=ONE)
    with pytest.raises(poptorch.Error, match="Missing arguments: b"):
        model(ONE, ONE, ONE, a=ONE)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((ONE, ONE, 1, 2), {}, AssertionError, r"Too many arguments.*\(3\) but got 4"),
        ((ONE,), {"z": ONE}, AssertionError, "z is not a valid parameter"),
        ((ONE,), {"x": ONE}, AssertionError, "Parameter x was passed more than once"),
        ((), {"y": ONE}, poptorch.Error, "Mandatory parameter x missing"),
    ],
)
def test_a_call_must_fit_the_signature(args, kwargs, error, text):
    with pytest.raises(error, match=text):
        poptorch.inferenceModel(Takes())(*args, **kwargs)


def test_the_compiled_inputs_can_be_looked_at():
    model = poptorch.inferenceModel(Takes(), options(D=2))
    assert model._executable_inputs is None
    model(torch.ones(4), factor=3)
    assert model._executable_inputs.args[0].shape == (4,)
    assert model._executable_inputs.args[1:] == [None, 3]
    assert model._executable_inputs.kwargs == {"scale": None}
    model.destroy()
    assert model._executable_inputs is None


def test_a_second_compile_is_ignored(caplog):
    model = compiled(ONE)
    model.compile(torch.ones(3))
    assert "executable is already compiled" in caplog.text
    model(ONE)


def test_an_input_that_requires_grad_is_detached(caplog):
    assert not poptorch.inferenceModel(Takes())(torch.ones(2, requires_grad=True)).requires_grad
    assert "requires_grad" in caplog.text


def test_a_function_can_be_a_model():
    assert poptorch.inferenceModel(lambda x: x * 2)(ONE).tolist() == [2, 2]


def test_an_executor_can_be_a_model():
    model, _ = make()
    training = poptorch.trainingModel(model)
    assert poptorch.inferenceModel(training)(torch.zeros(1, 3)).shape == (1, 2)


def test_inference_refuses_gradient_accumulation():
    model, _ = make()
    with pytest.raises(poptorch.Error, match="gradientAccumulation to 1.*deviceIterations"):
        poptorch.inferenceModel(model, options(A=2))


def test_options_must_be_options():
    model, _ = make()
    with pytest.raises(poptorch.Error, match="Invalid type: 'options'"):
        poptorch.trainingModel(model, options="fast")


def test_an_executor_forwards_to_the_module():
    model, _ = make()
    executor = poptorch.inferenceModel(model)
    assert executor.first is model.first
    with pytest.raises(AttributeError, match="missing"):
        executor.missing  # noqa: B018


def test_an_offline_model_compiles_but_does_not_run():
    model, _ = make()
    opts = options()
    opts.useOfflineIpuTarget()
    executor = poptorch.trainingModel(model, opts)
    executor.compile(*data(2))
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match=r"offline device \(ConnectionType\.Never\)"):
        executor(*data(2))


def test_hooks_run_around_each_compilation():
    seen = []
    before = poptorch.registerPreCompileHook(lambda: seen.append("before"))
    after = poptorch.registerPostCompileHook(lambda: seen.append("after"))
    model = compiled(ONE)
    model(ONE)
    before.remove()
    after.remove()
    compiled(ONE)
    assert seen == ["before", "after"]
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


# ---- figures


def test_compilation_time_is_known_after_compilation():
    model = poptorch.inferenceModel(Takes())
    with pytest.raises(poptorch.Error, match="Please compile the model"):
        model.compilationTime()
    model(ONE)
    assert datetime.timedelta(0) < model.compilationTime() < datetime.timedelta(minutes=1)
    silent = poptorch.inferenceModel(Takes(), options(showCompilationProgressBar=False))
    silent(ONE)
    with pytest.raises(poptorch.Error, match="set showCompilationProgressBar"):
        silent.compilationTime()


@pytest.mark.parametrize(
    ("mode", "outputs"),
    [(poptorch.OutputMode.All, 8), (poptorch.OutputMode.Final, 2), (poptorch.OutputMode.Sum, 2)],
)
def test_perf_counters_have_an_entry_per_micro_batch(mode, outputs):
    opts = options(D=4, R=2)
    opts.outputMode(mode)
    model = poptorch.inferenceModel(Takes(), opts)
    assert model.getPerfCounters() == {key: [[]] for key in ("input", "input_complete", "output", "output_complete")}
    assert model.getLatency() == (0, 0, 0)
    model(torch.ones(8), torch.ones(8))
    counters = model.getPerfCounters()
    assert [len(entry) for entry in counters["input"]] == [8, 8]
    assert [len(entry) for entry in counters["output"]] == [outputs]
    shortest, longest, mean = model.getLatency()
    assert 0 < shortest <= mean <= longest


def test_cycles_are_counted_by_hardware_only():
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        compiled(ONE).cycleCount()
    model = poptorch.inferenceModel(Takes(), options(logCycleCount=True))
    with pytest.raises(poptorch.Error, match="at least once"):
        model.cycleCount()
    model(ONE)
    with pytest.raises(poptorch.Error, match="actual IPU hardware"):
        model.cycleCount()
    with pytest.raises(poptorch.Error, match="actual IPU hardware"):
        poptorch.inferenceModel(Takes(), options(logCycleCount=True, useIpuModel=True))(ONE)


def test_synthetic_data_is_not_counted():
    model = poptorch.inferenceModel(Takes(), options(D=4, enableSyntheticData=True))
    model(torch.ones(8), torch.ones(8))
    assert [len(entry) for entry in model.getPerfCounters()["input"]] == [0, 0]
    assert [len(entry) for entry in model.getPerfCounters()["output"]] == [0]
    assert model.getLatency() == (0, 0, 0)


# ---- compiling


def test_u38_stages_are_named_and_timed(caplog):
    with caplog.at_level(logging.INFO, logger="ipu_finetune.emulator"):
        model = compiled(ONE)
    text = caplog.text
    names = ["tracing", "placing", "looking up the executable"]
    starts = [text.index(f"compiling: {name} ...") for name in names]
    ends = [text.index(f"compiling: {name} took 0.") for name in names]
    assert sorted(starts + ends) == [position for pair in zip(starts, ends) for position in pair]
    assert list(model.emulation.stages) == names


class Widens(torch.nn.Module):
    def __init__(self, *shape, dtype=torch.float16):
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, x):
        return x[:, None, None].expand(*self.shape).to(self.dtype) * 1


def test_u38_large_outputs_are_remarked_on_when_the_model_is_compiled(caplog):
    # 8 * 512 * 30522 * 2 bytes
    model = poptorch.inferenceModel(Widens(8, 512, 30522))
    model.compile(torch.ones(8, dtype=torch.float16))
    assert "output to host 238 MiB per step" in caplog.text
    assert "return only the loss, or the logits that are needed?" in caplog.text


@pytest.mark.parametrize(
    ("mode", "settings", "told"),
    [
        ("All", {"D": 4}, None),
        ("All", {"R": 2}, "72 MiB"),
        ("Final", {"R": 2, "D": 4}, "72 MiB"),
        ("Sum", {"D": 4}, None),
    ],
)
def test_the_size_of_outputs_is_that_of_one_step(mode, settings, told, caplog):
    # 36 MiB per micro-batch
    opts = options(**settings)
    opts.outputMode(poptorch.OutputMode[mode])
    batches = settings.get("D", 1) * settings.get("R", 1)
    poptorch.inferenceModel(Widens(2, 18, 2**19), opts).compile(torch.ones(2 * batches, dtype=torch.float16))
    assert ("output to host" in caplog.text) == bool(told)
    assert told is None or told in caplog.text


def test_u55_an_error_of_our_own_machinery_names_stage_and_versions(monkeypatch):
    # int() stands for a part of the compiler that fails on what it is given
    monkeypatch.setattr(tracing, "LayoutTracer", int)
    expected = r"stage 'tracing': TypeError: int\(\) argument .*PopTorch 3\.\S+, torch 2\.\S+, Python 3"
    with pytest.raises(poptorch.Error, match=expected) as caught:
        compiled(ONE)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_error_of_the_models_code_is_left_as_it_is():
    class Breaks(torch.nn.Module):
        def forward(self, x):
            return x.view(7)

    with pytest.raises(RuntimeError, match="invalid for input of size 2") as caught:
        poptorch.inferenceModel(Breaks())(ONE)
    assert not isinstance(caught.value, poptorch.Error)


def test_options_are_checked_when_the_model_is_compiled():
    opts = options()
    opts._Popart.set("noSuchOption", True)
    with pytest.raises(poptorch.Error, match="Unknown bool option noSuchOption"):
        poptorch.inferenceModel(Takes(), opts)(ONE)


# ---- text


def test_blocks_are_shown_where_they_begin():
    model, _ = make()
    assert repr(model) == poptorch.module_repr(model)
    poptorch.BeginBlock(model.second, "B", ipu_id=1)
    expected = repr(model).replace("(second): ", "(second): BeginBlock(user_id=B, ipu_id=1) ")
    assert poptorch.module_repr(model) == expected
    assert expected in repr(poptorch.inferenceModel(model))
    executor = poptorch.trainingModel(model)
    assert expected in repr(executor)


def test_print_shows_blocks_too(capsys):
    model, _ = make()
    poptorch.BeginBlock(model.first, ipu_id=0)
    poptorch.print(model)
    poptorch.print("text")
    assert capsys.readouterr().out == poptorch.module_repr(model) + "\ntext\n"


def test_names_of_poptorchs_own_machinery():
    error = poptorch.createPoptorchError("broken")
    assert isinstance(error, poptorch.Error)
    assert (error.type, error.message) == ("poptorch_py_error", "broken")
    assert poptorch.accessAttributes('{"a": [1]}') == {"a": [1]}
    for wrong in (3, "a"):
        with pytest.raises(ValueError, match="attribute_id_str"):
            poptorch.accessAttributes(wrong)
    with pytest.raises(poptorch.Error, match="not on an IPU"):
        poptorch.getIpuTensorId(ONE)
    seen = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            seen.append((poptorch.getIpuTensorId(x), poptorch.getIpuTensorId(y)))
            return y

    poptorch.inferenceModel(Asks())(ONE)
    assert seen[0][0] < seen[0][1]


def test_dictionaries_may_come_in_another_order():
    class Divides(torch.nn.Module):
        def forward(self, d):
            return d["x"] / d["inner"]["y"]

    model = poptorch.inferenceModel(Divides())
    one, two, four = (torch.tensor([value]) for value in (1.0, 2.0, 4.0))
    assert model({"x": one, "inner": {"y": two, "z": four}}).item() == 0.5
    assert model({"inner": {"z": four, "y": two}, "x": one}).item() == 0.5


def test_a_default_that_is_a_tensor_is_an_input_like_any_other():
    class Defaults(torch.nn.Module):
        def forward(self, x, y=TEN):
            return x + y

    model = poptorch.inferenceModel(Defaults())
    assert model(ONE).tolist() == [11, 11]
    assert model(ONE, ONE).tolist() == [2, 2]
    assert model(y=ONE * 3, x=ONE).tolist() == [4, 4]


# ---- the copy that runs


class Halves(torch.nn.Module):
    """Returns a loss only in training, as the user guide's models do."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x, target=None):
        y = self.fc(x)
        return (y, torch.nn.functional.mse_loss(y, target)) if self.training else y


def test_a_training_model_stays_in_training_whatever_becomes_of_the_module():
    module = Halves()
    training = poptorch.trainingModel(module)
    module.eval()
    inference = poptorch.inferenceModel(module)
    x = torch.ones(1, 2)
    for _ in range(2):
        before = inference(x)
        _, loss = training(x, torch.zeros(1, 2))
        assert loss.shape == ()
        assert not torch.equal(inference(x), before)  # they share the weights all the same


def test_an_inference_model_stays_in_evaluation_when_the_module_goes_back_to_training():
    module = Halves().eval()
    inference = poptorch.inferenceModel(module)
    module.train()
    training = poptorch.trainingModel(module)
    x = torch.ones(1, 2)
    training(x, torch.zeros(1, 2))
    assert torch.equal(inference(x), module.fc(x))
    assert module.training
