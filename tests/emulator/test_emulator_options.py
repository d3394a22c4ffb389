# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

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
    ("setAvailableMemoryProportion", {"IPU3": 0.5}, "available_memory_proportion", {3: 0.5}),
    ("disableModuleNamescope", None, "module_namescope_enabled", False),
    ("enableSyntheticData", True, "synthetic_data_mode", 2),
    ("maxRepeatLogs", 7, "max_repeat_logs", 7),
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
    arguments = () if argument is None else (argument,)
    assert getattr(options, setter)(*arguments) is options
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
        ("updatableNamedBuffers", "a"),
        ("broadcastBuffers", 1),
        ("useIpuModel", 1),
        ("useIpuId", 1.0),
        ("syncPattern", 0),
        ("modelName", 3),
        ("maxRepeatLogs", 1.5),
        ("enableSyntheticData", 1),
        ("logCycleCount", 1),
        ("enableStableNorm", 1),
        ("showCompilationProgressBar", 1),
        ("relaxOptimizerAttributesChecks", 1),
        ("useOfflineIpuTarget", "2"),
        ("setAvailableMemoryProportion", 0.5),
    ],
)
def test_a_setter_refuses_another_type_and_names_it(setter, argument):
    options = Options()
    before = repr(options)
    with pytest.raises(AssertionError, match=setter):
        getattr(options, setter)(argument)
    assert repr(options) == before


@pytest.mark.parametrize(
    "setter",
    [Options().deviceIterations, Options().replicationFactor, Options().Training.gradientAccumulation],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_factor_of_the_batch_is_at_least_one(setter, value):
    with pytest.raises(AssertionError, match=f"{setter.__name__} must be at least 1, got {value}"):
        setter(value)


def test_every_n_needs_a_positive_period():
    options = Options()
    for period in (None, 0, -1):
        with pytest.raises(AssertionError, match="EveryN .* output_return_period .* positive integer"):
            options.outputMode(OutputMode.EveryN, period)
    options.outputMode(OutputMode.EveryN, 4)
    assert options.output_return_period == 4


@pytest.mark.parametrize("name", ["GPU0", "IPU", "IPUa", 0])
def test_memory_proportions_are_given_per_ipu(name):
    with pytest.raises(AssertionError, match=f"Invalid key: {name!r}"):
        Options().setAvailableMemoryProportion({name: 0.1})


def test_a_period_is_used_by_every_n_only():
    options = Options().outputMode(OutputMode.All, 4)
    assert options.output_return_period == 1
    options.anchorTensor("a", "Gradient___a", OutputMode.Final, 3).anchorTensor(
        "b", "Gradient___b", OutputMode.EveryN, 3
    )
    options.anchorTensor("c", "Gradient___c")
    assert options.anchored_tensors == {
        "a": ["Gradient___a", False, OutputMode.Final, 1],
        "b": ["Gradient___b", False, OutputMode.EveryN, 3],
        "c": ["Gradient___c", True, None, 1],
    }


def test_the_random_seed_is_the_hosts_as_well():
    Options().randomSeed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_no_limit_of_repeated_lines_is_the_largest_number():
    assert Options().maxRepeatLogs(None).max_repeat_logs == 2**64 - 1


def test_old_names_warn_and_do_what_the_new_ones_do(caplog):
    options = Options().anchorMode(OutputMode.EveryN, 2)
    assert (options.output_mode, options.output_return_period) == (OutputMode.EveryN, 2)
    options.Jit.traceModel(False)
    options.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
    options.Precision.runningStatisticsAlwaysFloat(False)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 4
    for name, text in zip(("anchorMode", "traceModel", "halfFloatCasting", "runningStatisticsAlwaysFloat"), warned):
        assert text.startswith("[Deprecated]")
        assert name in text
    with pytest.raises(ValueError, match=r"traceModel\(True\) is no longer supported"):
        options.Jit.traceModel(True)
    with pytest.raises(ValueError, match="runningStatisticsAlwaysFloat needs to be set to a bool"):
        options.Precision.runningStatisticsAlwaysFloat(1)


@pytest.mark.parametrize(
    ("size", "kind", "text"),
    [
        (2, CommGroupType.All, "cannot be All"),
        (5, CommGroupType.Consecutive, "cannot be larger than replication_factor"),
        (3, CommGroupType.Consecutive, "must be a factor of replication_factor"),
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
    assert training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running
    for reduction in (ReductionType.NoReduction, 1, "Mean"):
        with pytest.raises(ValueError, match="must be set to poptorch.ReductionType.Mean or"):
            training.accumulationAndReplicationReductionType(reduction)


def test_precision_options():
    precision = Options().Precision
    precision.setPartialsType(torch.half).enableStochasticRounding(True).enableFloatingPointExceptions(True)
    assert precision.half_partials
    assert precision.enable_stochastic_rounding
    assert precision.enable_floating_point_exceptions
    precision.setPartialsType(torch.float32)
    assert not precision.half_partials
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
        "patterns": {"TiedGather": True},
        "patterns_level": 1,
    }


def test_clearer_names_set_the_popart_options_that_scripts_also_set_by_hand():
    options = Options().enableStableNorm(True).logCycleCount(True).updatableNamedBuffers(["a"])
    options.Training.setAutomaticLossScaling(True).setConvolutionDithering(True)
    options.Precision.setPartialsType(torch.half).enableStochasticRounding(True).enableFloatingPointExceptions(True)
    assert options._Popart.options == {
        "enableStableNorm": True,
        "instrumentWithHardwareCycleCounter": True,
        "updatableNamedBuffers": ["a"],
        "automaticLossScalingSettings.enabled": True,
        "convolutionOptions": {"enableConvDithering": True, "partialsType": "half"},
        "partialsTypeMatMuls": "half",
        "enableStochasticRounding": True,
        "enableFloatingPointChecks": True,
    }
    by_hand = Options()
    for key, value in options._Popart.options.items():
        by_hand._Popart.set(key, value)
    assert by_hand.Precision.enable_stochastic_rounding
    assert by_hand.Precision.half_partials
    assert by_hand.Training.auto_loss_scaling
    assert by_hand.updatable_named_buffers == ["a"]


def test_executable_caching_is_a_popart_option(monkeypatch):
    options = Options().enableExecutableCaching("cache")
    assert options._Popart.options == {"cachePath": "cache", "enableEngineCaching": True}
    options.enableExecutableCaching(None)
    assert options._Popart.options == {"enableEngineCaching": False}
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "elsewhere")
    assert Options()._Popart.options["cachePath"] == "elsewhere"


def test_profiling_sets_the_report_folder_and_says_that_nothing_is_written(caplog, monkeypatch):
    options = Options()
    options._Popart.setEngineOptions({"target.hostSyncTimeout": "300"})
    assert options.enableProfiling("reports")._Popart.options["engineOptions"] == {
        "target.hostSyncTimeout": "300",
        "autoReport.directory": "reports",
        "autoReport.all": "true",
        "debug.allowOutOfMemory": "true",
    }
    assert "no profile.pop to reports" in caplog.text
    assert "overridden" not in caplog.text
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "false"}')
    Options().enableProfiling()
    assert "overridden by environment variable POPLAR_ENGINE_OPTIONS" in caplog.text


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
        lambda: options.createOrSet(other=2),
        lambda: options.deleteIfExists("random_seed"),
        lambda: options.enableExecutableCaching("cache_b"),
        lambda: options.enableExecutableCaching(None),
        lambda: options.randomSeed(3),
        lambda: options.showCompilationProgressBar(False),
        lambda: options.disableModuleNamescope(),
        lambda: options.appendToLocationExcludes("x"),
        lambda: options.relaxOptimizerAttributesChecks(True),
        lambda: options.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running),
        lambda: options.Training.setAutomaticLossScaling(True),
        lambda: options._Popart.setPatterns({"PadSum": True}),
        lambda: options.from_json('{"deviceIterations": 2}'),
    ]


@pytest.mark.parametrize("index", range(len(touch(Options()))))
def test_used_options_are_frozen(index):
    options = Options()
    poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    before = repr(options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options.*clone"):
        touch(options)[index]()
    assert repr(options) == before


def test_a_model_keeps_the_options_that_it_was_made_with():
    options = Options().enableExecutableCaching("cache_a")
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    for used in (options, model.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            used.enableExecutableCaching("cache_b")
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            used.executable_cache_dir = "cache_b"
        assert used._Popart.options["cachePath"] == "cache_a"


def test_an_attribute_that_is_no_option_is_refused():
    options = Options()
    with pytest.raises(AssertionError, match="Invalid option device_iteration, .*did you mean device_iterations"):
        options.device_iteration = 2
    with pytest.raises(AssertionError, match="Unexpected type.*for option device_iterations"):
        options.device_iterations = 2.5
    with pytest.raises(AssertionError, match="Invalid option Training"):
        options.Training = None
    options.device_iterations = 2
    assert options.device_iterations == 2


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
    assert options.anchored_tensors == {}
    # The parts of the copy belong together.
    clone.Precision.enableStochasticRounding(False)
    assert clone._Popart.options["enableStochasticRounding"] is False


def test_pickled_options_are_the_same_and_as_frozen():
    options = Options().deviceIterations(3).setExecutionStrategy(poptorch.ShardedExecution())
    options.Precision.setPartialsType(torch.half)
    again = pickle.loads(pickle.dumps(options))
    assert repr(again) == repr(options)
    assert type(again._execution_strategy) is poptorch.ShardedExecution
    again.Precision.setPartialsType(torch.float)
    assert again._Popart.options["partialsTypeMatMuls"] == "float"
    options._freeze()
    with pytest.raises(AttributeError, match="frozen"):
        pickle.loads(pickle.dumps(options)).Training.gradientAccumulation(2)


def test_the_class_of_a_part_can_be_replaced():
    class Mine(poptorch.options._DistributedOptions):
        pass

    options = Options()
    options.Distributed.__class__ = Mine
    assert type(options.clone().Distributed) is Mine


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
    with pytest.raises(AttributeError, match="Invalid attribute device_iteration: .*did you mean device_iterations"):
        options.device_iteration  # noqa: B018


def test_an_option_without_a_default_has_a_type_all_the_same():
    options = Options()
    assert not options.exists("random_seed")
    options.set(random_seed=3)
    assert options.exists("random_seed")
    with pytest.raises(AssertionError, match="Unexpected type.*for option model_name"):
        options.set(model_name=3)
    options.deleteIfExists("random_seed")
    assert not options.exists("random_seed")
    options.createOrSet(mine="a")
    with pytest.raises(AssertionError, match="Unexpected type.*for option mine"):
        options.createOrSet(mine=1)


def test_the_listing_is_flat_and_leaves_out_what_is_not_set():
    options = Options()
    with pytest.raises(AssertionError, match="An output mode must be picked before serialisation"):
        options.toDict()
    options.outputMode(OutputMode.All).deviceIterations(7).setExecutionStrategy(poptorch.ShardedExecution())
    options.Training.gradientAccumulation(2)
    options._Popart.set("outlineThreshold", 10.0)
    options.TensorLocations.setOptimizerLocation(TensorLocationSettings().useOnChipStorage(False)).numIOTiles(32)
    assert options.toDict() == {
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "anchored_tensors": {},
        "auto_round_num_ipus": False,
        "available_memory_proportion": {},
        "broadcast_buffers": True,
        "connection_type": 0,
        "device_iterations": 7,
        "distributed_process_id": 0,
        "execution_mode": 1,
        "gradient_accumulation": 2,
        "input_cgt": CommGroupType.Consecutive,
        "input_group_size": 1,
        "location_optimizer": {"onChip": 0},
        "log_dir": ".",
        "max_repeat_logs": 4,
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
        "numIOTiles": 32,
        "num_distributed_processes": 1,
        "outlineThreshold": 10.0,
        "output_mode": 2,
        "output_return_period": 1,
        "replication_factor": 1,
        "sync_pattern": 0,
    }


def test_a_popart_option_that_has_a_method_must_not_be_set_by_hand_as_well():
    options = Options().outputMode(OutputMode.All)
    options._Popart.set("device_iterations", 2)
    with pytest.raises(AssertionError, match="keys in common.*device_iterations"):
        options.toDict()


def test_options_print_their_values_and_no_addresses():
    options = Options().replicationFactor(4)
    options.Training.gradientAccumulation(3)
    shown = str(options)
    assert shown.startswith("Options(")
    assert "replication_factor=4" in shown
    assert "gradient_accumulation=3" in shown
    assert f"{id(options):x}" not in shown
    assert str(Options().replicationFactor(4)) != shown
    assert str(options.clone()) == shown
