# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_oracle import data, make, options

from ipu_finetune.emulator import poptorch

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


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ((ONE,), (torch.ones(3),), r"Shape mismatch for x: expected torch.Size\(\[2\]\) but got torch.Size\(\[3\]\)"),
        ((ONE,), (torch.ones(2, dtype=torch.int64),), "for x: expected torch.float32 but got torch.int64"),
        ((ONE,), (ONE, ONE), "Unexpected arguments: y"),
        ((ONE, ONE), (ONE,), "Missing arguments: y"),
        ((ONE, None, 5), (ONE, None, 3), "Value mismatch for factor: expected 5 but got 3"),
        ((ONE, (ONE, ONE)), (ONE, (ONE,)), "mismatch for y"),
        ((ONE, (ONE,)), (ONE, [ONE]), "Type mismatch for y"),
        ((ONE, {"t": ONE}), (ONE, {"t": torch.ones(1)}), r"Shape mismatch for y\['t'\]"),
        ((ONE, {"t": ONE}), (ONE, {"t": ONE, "u": ONE}), "mismatch for y"),
        ((ONE, ONE), (ONE, 3), "Type mismatch for y: expected a tensor but got 3"),
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
    with pytest.raises(poptorch.Error, match="Missing arguments"):
        model(ONE, ONE, a=ONE, b=ONE)


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
    assert model.compilationTime() > 0


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
