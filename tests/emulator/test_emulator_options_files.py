# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import ConnectionType, Options, OutputMode


def test_options_from_a_file(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text(
        "# a comment\n\ndeviceIterations(4)\noutputMode(poptorch.OutputMode.Sum)\n"
        "Training.gradientAccumulation(8)\nsetExecutionStrategy(poptorch.ShardedExecution())\n"
    )
    options = Options().loadFromFile(str(path))
    assert options.device_iterations == 4
    assert options.output_mode == OutputMode.Sum
    assert options.Training.gradient_accumulation == 8
    assert type(options._execution_strategy) is poptorch.ShardedExecution


def test_a_line_that_is_no_python_is_named_and_nothing_is_applied(tmp_path):
    path = tmp_path / "options.conf"
    path.write_text("deviceIterations(4)\n\n# a comment\noutputMode(poptorch.OutputMode.All\n")
    options = Options()
    with pytest.raises(poptorch.options.ConfigFileError) as raised:
        options.loadFromFile(str(path))
    assert str(raised.value) == (
        "SyntaxError at line 2 of options.conf: unexpected EOF while parsing\n"
        "> options.outputMode(poptorch.OutputMode.All\n(line 4 when all lines are counted)"
    )
    assert options.device_iterations == 1
    path.write_text("deviceIterations(4))\n")
    with pytest.raises(poptorch.options.ConfigFileError, match="SyntaxError at line 1 of options.conf: .*unmatched"):
        options.loadFromFile(str(path))


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("device(1)", AttributeError, "Invalid attribute device"),
        ("deviceIterations(1.5)", AssertionError, "Unexpected type"),
        ("Precision.setPartialsType(torch.half)", NameError, "torch"),
    ],
)
def test_what_a_line_raises_comes_through_and_the_line_is_named(tmp_path, line, kind, text):
    path = tmp_path / "options.conf"
    path.write_text(f"replicationFactor(2)\n{line}\n")
    with pytest.raises(kind, match=rf"(?s){text}.*\(at line 2 of options.conf\n> options.{re.escape(line)}"):
        Options().loadFromFile(str(path))


def test_options_from_the_environment(monkeypatch):
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS",
        '{"deviceIterations": 4, "Training.gradientAccumulation": 8, "connectionType": "ConnectionType.OnDemand"}',
    )
    options = Options()
    assert options.device_iterations == 4
    assert options.Training.gradient_accumulation == 8
    assert options.connection_type == ConnectionType.OnDemand


def test_a_list_in_json_holds_the_arguments():
    options = Options().from_json(
        '{"_Popart.set": ["saveInitializersToFile", "weights.onnx"], "outputMode": ["OutputMode.EveryN", 2], '
        '"modelName": "a.b", "deviceIterations": 4, "Training.gradientAccumulation": 2}'
    )
    assert options._Popart.options == {"saveInitializersToFile": "weights.onnx"}
    assert (options.output_mode, options.output_return_period) == (OutputMode.EveryN, 2)
    assert options.model_name == "a.b"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", ValueError, "POPTORCH_DEFAULT_OPTIONS is not JSON"),
        ("[1]", ValueError, "POPTORCH_DEFAULT_OPTIONS must be a JSON object"),
        ('{"deviceIteration": 1}', AttributeError, "did you mean deviceIterations"),
        (
            '{"connectionType": "ConnectionType.Sometimes"}',
            AssertionError,
            "connectionType.*'ConnectionType.Sometimes'",
        ),
    ],
)
def test_a_bad_default_in_the_environment_is_named(monkeypatch, text, kind, message):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
    with pytest.raises(kind, match=message):
        Options()
