# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import (
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
    Options,
    OutputMode,
    ReductionType,
    SyncPattern,
    TensorLocationSettings,
)

# setter, argument, attribute, value
PLAIN = [
    ("deviceIterations", 3, "device_iterations", 3),
    ("replicationFactor", 3, "replication_factor", 3),
    ("autoRoundNumIPUs", True, "auto_round_num_ipus", True),
    ("broadcastBuffers", False, "broadcast_buffers", False),
    ("connectionType", ConnectionType.OnDemand, "connection_type", ConnectionType.OnDemand),
    ("syncPattern", SyncPattern.SinglePipeline, "sync_pattern", SyncPattern.SinglePipeline),
    ("setAvailableMemoryProportion", {"IPU0": 0.5}, "available_memory_proportion", {"IPU0": 0.5}),
    ("outputMode", OutputMode.Sum, "output_mode", OutputMode.Sum),
    ("randomSeed", 42, "random_seed", 42),
    ("useIpuModel", True, "use_model", True),
    ("useIpuId", 3, "ipu_id", 3),
    ("updatableNamedBuffers", ["a"], "updatable_named_buffers", ["a"]),
    ("modelName", "bert", "model_name", "bert"),
    ("logCycleCount", True, "log_cycle_count", True),
    ("logDir", "logs", "log_dir", "logs"),
    ("enableStableNorm", True, "stable_norm", True),
    ("showCompilationProgressBar", False, "show_compilation_progress_bar", False),
    ("relaxOptimizerAttributesChecks", True, "relax_optimizer_checks", True),
    ("sourceLocationExcludes", ["x"], "source_location_excludes", ["x"]),
]


@pytest.mark.parametrize(("setter", "argument", "attribute", "value"), PLAIN)
def test_a_setter_sets_its_attribute_and_can_be_chained(setter, argument, attribute, value):
    options = Options()
    assert getattr(options, attribute) != value
    assert getattr(options, setter)(argument) is options
    assert getattr(options, attribute) == value


@pytest.mark.parametrize(
    ("setter", "argument"),
    [
        ("deviceIterations", 1.5),
        ("deviceIterations", True),
        ("replicationFactor", "2"),
        ("autoRoundNumIPUs", 1),
        ("connectionType", "Never"),
        ("outputMode", 2),
        ("randomSeed", 1.0),
        ("setExecutionStrategy", "pipelined"),
        ("updatableNamedBuffers", [1]),
    ],
)
def test_a_setter_refuses_another_type_and_names_it(setter, argument):
    with pytest.raises(AssertionError, match=setter):
        getattr(Options(), setter)(argument)


def test_every_n_needs_a_positive_period():
    options = Options()
    for period in (None, 0, -1):
        with pytest.raises(AssertionError, match="positive output_return_period"):
            options.outputMode(OutputMode.EveryN, period)
    options.outputMode(OutputMode.EveryN, 4)
    assert options.output_return_period == 4


def test_memory_proportions_are_given_per_ipu():
    with pytest.raises(AssertionError, match="'GPU0'"):
        Options().setAvailableMemoryProportion({"GPU0": 0.1})


@pytest.mark.parametrize(
    ("size", "kind", "text"),
    [
        (2, CommGroupType.All, "All"),
        (5, CommGroupType.Consecutive, "above the replication factor"),
        (3, CommGroupType.Consecutive, "not a factor"),
    ],
)
def test_replica_groups_must_divide_the_replicas(size, kind, text):
    with pytest.raises(ValueError, match=text):
        Options().replicationFactor(4).inputReplicaGrouping(size, kind)


def test_no_grouping_is_groups_of_one():
    options = Options().replicationFactor(4).inputReplicaGrouping(2, CommGroupType.NoGrouping)
    assert (options.input_group_size, options.input_group_type) == (1, CommGroupType.Consecutive)


def test_training_options():
    training = Options().Training
    training.gradientAccumulation(8).accumulationAndReplicationReductionType(ReductionType.Sum)
    training.setAutomaticLossScaling(True)
    training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    assert training.gradient_accumulation == 8
    assert training.accumulation_and_replication_reduction_type == ReductionType.Sum
    assert training.auto_loss_scaling
    with pytest.raises(ValueError, match="NoReduction"):
        training.accumulationAndReplicationReductionType(ReductionType.NoReduction)


def test_precision_options():
    precision = Options().Precision
    precision.setPartialsType(torch.half).enableStochasticRounding(True).enableFloatingPointExceptions(True)
    assert precision.half_partials
    assert precision.enable_stochastic_rounding
    with pytest.raises(ValueError, match="float64"):
        precision.setPartialsType(torch.float64)
    with pytest.raises(AssertionError, match="enableFloatingPointExceptions"):
        precision.enableFloatingPointExceptions(1)


def test_tensor_locations():
    locations = Options().TensorLocations
    settings = TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    locations.setOptimizerLocation(settings.minElementsForOffChip(8))
    assert locations.toDict()["location_optimizer"] == {
        "onChip": False,
        "useReplicatedTensorSharding": True,
        "minElementsForOffChip": 8,
    }
    with pytest.raises(AssertionError, match="TensorLocationSettings"):
        locations.setWeightLocation("chip")
    locations.numIOTiles(64)
    for tiles in (30, 33, 194):
        with pytest.raises(AssertionError, match="even number between 32 and 192"):
            locations.numIOTiles(tiles)


def test_popart_options_are_kept_as_they_are():
    options = Options()
    options._Popart.set("outlineThreshold", 10.0)
    options._popart.set("enableExplicitIR", True)
    options._Popart.setEngineOptions({"opt.useAutoloader": "true"})
    options._Popart.setPatterns({"TiedGather": True}, level=1)
    assert options._Popart.options == {
        "outlineThreshold": 10.0,
        "enableExplicitIR": True,
        "engineOptions": {"opt.useAutoloader": "true"},
    }
    assert options._Popart.patterns == {"TiedGather": True}


def test_executable_caching_is_a_popart_option(monkeypatch):
    options = Options().enableExecutableCaching("cache")
    assert options._Popart.options == {"cachePath": "cache", "enableEngineCaching": True}
    options.enableExecutableCaching(None)
    assert options._Popart.options == {"enableEngineCaching": False}
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "elsewhere")
    assert Options()._Popart.options["cachePath"] == "elsewhere"


def test_profiling_sets_the_report_folder():
    engine = Options().enableProfiling("reports")._Popart.options["engineOptions"]
    assert engine["autoReport.directory"] == "reports"


def test_processes_come_from_the_environment(monkeypatch):
    assert Options().Distributed.numProcesses == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (2, 4)
    distributed.disable()
    assert (distributed.processId, distributed.numProcesses) == (0, 1)
    with pytest.raises(AssertionError, match="must lie in"):
        distributed.configureProcessId(3, 3)


def test_offline_compilation_never_connects():
    assert Options().useOfflineIpuTarget().connection_type == ConnectionType.Never


# ---- freezing and copying


def touch(options):
    return [
        lambda: options.deviceIterations(2),
        lambda: options.outputMode(OutputMode.All),
        lambda: options.setExecutionStrategy(poptorch.ShardedExecution()),
        lambda: options.Training.gradientAccumulation(2),
        lambda: options.Precision.enableStochasticRounding(True),
        lambda: options.TensorLocations.setOptimizerLocation(TensorLocationSettings()),
        lambda: options.Distributed.disable(),
        lambda: options._Popart.set("a", 1),
        lambda: options.anchorTensor("a", "b"),
        lambda: setattr(options, "device_iterations", 2),
        lambda: options.set(device_iterations=2),
    ]


@pytest.mark.parametrize("index", range(11))
def test_used_options_are_frozen(index):
    options = Options()
    poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        touch(options)[index]()


@pytest.mark.parametrize("copied", [copy.deepcopy, Options.clone])
def test_a_copy_is_open_and_apart(copied):
    options = Options().deviceIterations(2)
    options._freeze()
    clone = copied(options)
    for change in touch(clone):
        change()
    assert clone.device_iterations == 2
    assert options.Training.gradient_accumulation == 1
    assert options._Popart.options == {}


def test_a_data_loader_freezes_its_options():
    options = Options()
    poptorch.DataLoader(options, [1, 2])
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)


def test_set_knows_its_options_and_their_types():
    options = Options()
    options.set(device_iterations=5)
    assert options.device_iterations == 5
    with pytest.raises(AssertionError, match="Invalid option iterations, valid options are"):
        options.set(iterations=5)
    with pytest.raises(AssertionError, match="Unexpected type.*for option device_iterations"):
        options.set(device_iterations="5")
    with pytest.raises(AttributeError, match="has no option 'device_iteration'"):
        options.device_iteration  # noqa: B018


def test_listing_needs_an_output_mode():
    options = Options()
    with pytest.raises(AssertionError, match="output mode must have been picked"):
        options.toDict()
    listed = options.outputMode(OutputMode.All).deviceIterations(7).toDict()
    assert listed["device_iterations"] == 7
    assert listed["Training"]["gradient_accumulation"] == 1


# ---- files


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


@pytest.mark.parametrize(
    ("line", "text"), [("deviceIterations(", "SyntaxError at line 2"), ("device(1)", "AttributeError at line 2")]
)
def test_a_bad_line_is_named(tmp_path, line, text):
    path = tmp_path / "options.txt"
    path.write_text(f"deviceIterations(4)\n{line}\n")
    with pytest.raises(poptorch.options.ConfigFileError, match=f"{text} of .*options.txt"):
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


# ---- hardware and logging


@pytest.mark.parametrize(("value", "version"), [(None, 2), ("2", 2), ("21", 21), ("1", 1)])
def test_the_generation_is_two_unless_the_environment_names_another(monkeypatch, value, version):
    monkeypatch.delenv("IPU_FINETUNE_EMULATED_HARDWARE", raising=False)
    if value is not None:
        monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", value)
    assert poptorch.ipuHardwareVersion() == version
    assert poptorch.ipuHardwareIsAvailable()


@pytest.mark.parametrize("variable", ["IPU_FINETUNE_EMULATED_HARDWARE=0", "POPTORCH_IPU_MODEL=1"])
def test_a_machine_without_an_ipu_can_be_claimed(monkeypatch, variable):
    monkeypatch.setenv(*variable.split("="))
    assert not poptorch.ipuHardwareIsAvailable()
    assert poptorch.poptorch_core.ipuHardwareVersion() == 0
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()


def test_an_unknown_generation_is_refused(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", "3")
    with pytest.raises(poptorch.Error, match="=3: expected 1, 2 or 21"):
        poptorch.ipuHardwareVersion()


def test_log_levels():
    import logging

    logger = logging.getLogger("ipu_finetune.emulator")
    before = logger.level
    try:
        poptorch.setLogLevel("ERR")
        assert logger.level == logging.ERROR
        poptorch.setLogLevel(1)
        assert logger.level == logging.DEBUG
        with pytest.raises(ValueError, match="Unknown log level LOUD"):
            poptorch.setLogLevel("LOUD")
        with pytest.raises(ValueError, match="Invalid log level integer 5"):
            poptorch.setLogLevel(5)
    finally:
        logger.setLevel(before)


def test_errors_are_runtime_errors_and_part_of_our_tree():
    from ipu_finetune.errors import IpuFinetuneError

    error = poptorch.Error("text")
    assert isinstance(error, RuntimeError)
    assert isinstance(error, IpuFinetuneError)
    assert (error.message, error.type) == ("text", "poptorch_py_error")
    assert poptorch.poptorch_core.Error is poptorch.Error
    assert poptorch.RecoverableError("x", recovery_action="LINK_RESET").recovery_action == "LINK_RESET"
