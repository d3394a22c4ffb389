# SPDX-License-Identifier: Apache-2.0
import json
import os
import re

import pytest
import torch
from emulator_oracle import Regression, data, make, options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import optim


class WithDropout(Regression):
    def __init__(self, width=4, p=0.5):
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(1))
        self.drop = torch.nn.Dropout(p)

    def forward(self, x, y=None):
        self.seen += 1
        return super().forward(self.drop(x), y)


def trained(optimizer=None, steps=2, kind=WithDropout, **settings):
    torch.manual_seed(0)
    model = kind()
    optimizer = optimizer(model.parameters()) if optimizer else None
    training = poptorch.trainingModel(model, options(**settings), optimizer)
    for step in range(steps):
        training(*data(8, seed=step))
    return training


OPTIMIZERS = {
    "poptorch": lambda p: optim.AdamW(p, lr=0.05),
    "torch": lambda p: torch.optim.AdamW(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("detached", [False, True])
def test_a_loaded_training_goes_on_to_the_bit(optimizer, detached, tmp_path):
    training = trained(optimizer, D=2, A=2, randomSeed=3)
    if detached:
        training.detachFromDevice()
    training.save(tmp_path / "here.poptorch")
    loaded = poptorch.load(tmp_path / "here.poptorch")
    assert loaded.isCompiled()
    assert loaded.isAttachedToDevice()
    assert loaded.model is not training.model
    for step in range(2, 5):
        ours, theirs = loaded(*data(8, seed=step)), training(*data(8, seed=step))
        assert torch.equal(ours[1], theirs[1])
    for name, value in training.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_saving_changes_nothing_for_the_running_model(tmp_path):
    one, two = trained(OPTIMIZERS["poptorch"], randomSeed=3), trained(OPTIMIZERS["poptorch"], randomSeed=3)
    one.save(tmp_path / "model")
    assert torch.equal(one(*data(8))[1], two(*data(8))[1])
    assert type(one.model).__name__ == "PoptorchWithDropout"


def test_without_the_random_state_dropout_goes_its_own_way(tmp_path):
    training = trained(randomSeed=3)
    training.save(tmp_path / "with")
    training.save(tmp_path / "without", save_rng_state=False)
    expected = training(*data(8))[1]
    assert torch.equal(poptorch.load(tmp_path / "with")(*data(8))[1], expected)
    assert not torch.equal(poptorch.load(tmp_path / "without")(*data(8))[1], expected)


def test_a_folder_gets_a_file_of_the_usual_name(tmp_path):
    model, _ = make()
    poptorch.inferenceModel(model).compileAndExport(tmp_path, torch.zeros(2, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["model.poptorch"]
    loaded = poptorch.load(tmp_path)
    x = torch.randn(2, 3)
    torch.testing.assert_close(loaded(x), model(x).detach())


def test_the_input_shapes_are_part_of_the_file(tmp_path):
    model, _ = make()
    poptorch.inferenceModel(model).compileAndExport(tmp_path, torch.zeros(2, 3))
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        poptorch.load(tmp_path)(torch.zeros(4, 3))


def test_an_offline_export_loads_for_a_device_and_options_can_be_edited(tmp_path):
    model, _ = make()
    opts = options().useOfflineIpuTarget(2)
    exporter = poptorch.inferenceModel(model, opts)
    exporter.compileAndExport(tmp_path, torch.zeros(2, 3))
    assert not exporter.isAttachedToDevice()
    loaded = poptorch.load(tmp_path, edit_opts_fn=lambda opts: opts.modelName("edited"))
    assert loaded.options.connection_type == poptorch.ConnectionType.Always
    assert loaded.options.model_name == "edited"
    assert loaded(torch.zeros(2, 3)).shape == (2, 2)


def test_pipeline_and_options_survive(tmp_path):
    model, _ = make()
    poptorch.BeginBlock(model.second, "B", ipu_id=1)
    opts = options(A=3)
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    training = poptorch.trainingModel(model, opts)
    training.compileAndExport(tmp_path, *data(6))
    loaded = poptorch.load(tmp_path)
    assert loaded.options.Training.gradient_accumulation == 3
    assert loaded.emulation.layout.forward_stages == training.emulation.layout.forward_stages == 2
    with pytest.raises(AttributeError, match="frozen"):
        loaded.options.deviceIterations(2)


# ---- the executable alone


def test_the_executable_alone_meets_the_models_python_code(tmp_path):
    training = trained(OPTIMIZERS["poptorch"], randomSeed=3)
    training.save(tmp_path / "exe", export_model=False)
    with pytest.raises(AssertionError, match=r"export_model=False[\s\S]*loadExecutable"):
        poptorch.load(tmp_path / "exe")
    model = WithDropout()
    model.load_state_dict(training.state_dict())
    other = poptorch.trainingModel(model, options(), OPTIMIZERS["poptorch"](model.parameters()))
    other.loadExecutable(tmp_path / "exe")
    assert other.isCompiled()
    assert torch.equal(other(*data(8))[1], training(*data(8))[1])


def test_an_executable_of_another_model_or_other_options_is_refused(tmp_path):
    model, _ = make()
    training = poptorch.trainingModel(model, options(A=2))
    training.compileAndExport(tmp_path / "exe", *data(4), export_model=False)
    wide, _ = make(width=5)
    with pytest.raises(poptorch.Error, match="compiled from another model"):
        poptorch.trainingModel(wide, options(A=2)).loadExecutable(tmp_path / "exe")
    with pytest.raises(poptorch.Error, match=r"other options: accumulation 2 \(here 4\)"):
        poptorch.trainingModel(make()[0], options(A=4)).loadExecutable(tmp_path / "exe")
    with pytest.raises(poptorch.Error, match="a training model, and this is an inference model"):
        poptorch.inferenceModel(make()[0]).loadExecutable(tmp_path / "exe")


def test_a_model_that_cannot_be_pickled_is_exported_without_its_code(tmp_path):
    class Local(torch.nn.Module):
        def forward(self, x):
            return x * 2

    executor = poptorch.inferenceModel(Local())
    with pytest.raises(poptorch.Error, match=r"model could not be serialised[\s\S]*export_model=False"):
        executor.compileAndExport(tmp_path, torch.ones(2))
    assert list(tmp_path.iterdir()) == []
    executor.save(tmp_path, export_model=False)
    again = poptorch.inferenceModel(Local())
    again.loadExecutable(tmp_path)
    assert again(torch.ones(2)).tolist() == [2, 2]


def test_only_what_is_compiled_can_be_saved(tmp_path):
    model, _ = make()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        poptorch.inferenceModel(model).save(tmp_path)


# ---- files that are not right


@pytest.fixture
def file(tmp_path):
    model, _ = make()
    poptorch.inferenceModel(model).compileAndExport(tmp_path, torch.zeros(2, 3))
    return tmp_path / "model.poptorch"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"Invalid file .*gone: there is no such file"):
        poptorch.load(tmp_path / "gone")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"\n" * 100])
def test_a_foreign_file_is_told_from_ours(content, tmp_path):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(AssertionError, match="not written by the emulator"):
        poptorch.load(tmp_path / "other")


@pytest.mark.parametrize("damage", ["cut", "flip", "header"])
def test_a_damaged_file_is_refused_before_anything_in_it_runs(damage, file, monkeypatch):
    content = file.read_bytes()
    if damage == "cut":
        content = content[:-10]
    elif damage == "flip":
        content = content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    else:
        content = content.replace(b'{"format"', b'["format"', 1)
    file.write_bytes(content)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled a damaged file"))
    with pytest.raises(AssertionError, match="is damaged"):
        poptorch.load(file)


def test_the_versions_must_match(file):
    magic, header, rest = file.read_bytes().split(b"\n", 2)
    fields = json.loads(header)
    ours, fields["poptorch"] = fields["poptorch"], "0.1"
    file.write_bytes(b"\n".join([magic, json.dumps(fields).encode(), rest]))
    with pytest.raises(
        AssertionError, match=f"version 0.1[\\s\\S]*version {re.escape(ours)}[\\s\\S]*must match exactly"
    ):
        poptorch.load(file)


def test_a_failed_save_leaves_the_old_file(file, monkeypatch):
    before = file.read_bytes()
    executor = poptorch.load(file)

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        executor.save(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# ---- the executable cache


def outcome(model, folder, size=4, lr=0.1, **settings):
    opts = options(**settings)
    opts.enableExecutableCaching(str(folder))
    training = poptorch.trainingModel(model, opts, optim.AdamW(model.parameters(), lr=lr))
    training(*data(size))
    return training.emulation.executable_cache, str(training.emulation.cache_answer)


def test_shapes_miss_a_learning_rate_hits_and_dropout_is_the_reason_of_a_miss(tmp_path):
    # U37
    first, second = outcome(WithDropout(), tmp_path), outcome(WithDropout(), tmp_path, size=6)
    again, dropped = outcome(WithDropout(), tmp_path, lr=0.5, randomSeed=9), outcome(WithDropout(p=0.2), tmp_path)
    assert [each[0] for each in (first, second, again, dropped)] == ["miss", "miss", "hit", "miss"]
    assert "shapes" in second[1]
    assert "dropout" in dropped[1]
    assert "0.5" in dropped[1]
    assert "0.2" in dropped[1]


def test_a_second_run_logs_a_hit_and_the_folder_is_made(tmp_path, caplog):
    # U36
    folder = tmp_path / "new" / "folder"
    with caplog.at_level("INFO", logger="ipu_finetune.emulator"):
        assert outcome(make()[0], folder)[0] == "miss"
        assert outcome(make()[0], folder)[0] == "hit"
    assert "executable cache: miss" in caplog.text
    assert "executable cache: hit" in caplog.text


def test_a_folder_that_cannot_be_used_switches_the_cache_off_with_a_warning(tmp_path, caplog):
    # U36; a file in the folder's place is unusable for root, too
    (tmp_path / "file").write_text("")
    assert outcome(make()[0], tmp_path / "file")[0] == "off"
    assert "executable cache off" in caplog.text


def test_a_cache_folder_cannot_be_set_after_the_model_is_wrapped(tmp_path):
    # U36
    opts = options()
    poptorch.inferenceModel(make()[0], opts)
    with pytest.raises(AttributeError, match="frozen Options"):
        opts.enableExecutableCaching(str(tmp_path))


def test_other_options_and_another_optimizer_are_other_executables(tmp_path):
    assert outcome(make()[0], tmp_path)[0] == "miss"
    assert "accumulation" in outcome(make()[0], tmp_path, A=2)[1]
    model, _ = make()
    opts = options()
    opts.enableExecutableCaching(str(tmp_path))
    training = poptorch.trainingModel(model, opts, optim.SGD(model.parameters(), lr=0.1))
    training.compile(*data(4))
    assert training.emulation.executable_cache == "miss"
    assert "optimizer" in training.emulation.cache_answer.reason


def test_processes_without_a_cache_are_told_of_one(caplog):
    opts = options()
    opts.Distributed.configureProcessId(0, 2)
    poptorch.inferenceModel(make()[0], opts).compile(torch.zeros(2, 3))
    assert "Each of 2 processes compiles the model for itself" in caplog.text
