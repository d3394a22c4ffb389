# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch

from ipu_finetune.emulator import popart, poptorch
from ipu_finetune.emulator.popart import _session_options as table
from ipu_finetune.emulator.poptorch import Options, OutputMode
from ipu_finetune.emulator.poptorch._session_options import check_session_options, note_device_only_options


def picked(**popart_options):
    options = Options().outputMode(OutputMode.All)
    for key, value in popart_options.items():
        options._Popart.set(key, value)
    return options


def with_key(key, value):
    options = picked()
    options._Popart.set(key, value)
    return options


# Every key that optimum-graphcore 0.7.1 and Graphcore's public examples set, with a value as they write it.
USED = {
    "accumulateOuterFragmentSettings.excludedVirtualGraphs": ["0"],
    "accumulateOuterFragmentSettings.schedule": int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized),
    "autoRecomputation": popart.RecomputationType.RecomputeAll,
    "batchSerializationSettings.batchSchedule": int(popart.BatchSerializationBatchSchedule.Isomorphic),
    "convolutionOptions": {"partialsType": "half"},
    "decomposeGradSum": True,
    "defaultBufferingDepth": 4,
    "defaultPrefetchBufferingDepth": 3,
    "disableGradAccumulationTensorStreams": True,
    "disableOptimizerStateTensorStreams": True,
    "enableExplicitIR": True,
    "enableGradientAccumulation": True,
    "enableOutlining": True,
    "enableStochasticRounding": True,
    "engineOptions": {"opt.useAutoloader": "true"},
    "explicitRecomputation": True,
    "groupNormStridedChannelGrouping": False,
    "outlineThreshold": 10.0,
    "partialsTypeMatMuls": "half",
    "replicatedCollectivesSettings.mergeAllReduceCollectives": True,
    "replicatedCollectivesSettings.prepareScheduleForMergingCollectives": True,
    "saveInitializersToFile": "weights.bin",
    "scheduleNonWeightUpdateGradientConsumersEarly": True,
    "subgraphCopyingStrategy": int(popart.SubgraphCopyingStrategy.JustInTime),
    "syntheticDataMode": int(popart.SyntheticDataMode.RandomNormal),
    "timeLimitScheduler": float(120),
    "virtualGraphMode": int(popart.VirtualGraphMode.Manual),
}


def test_the_table_has_every_key_of_the_sdk_once():
    # Counted in the SDK's source: 102 that PopART has and 25 of PopTorch's own.
    own = [name for names in table.POPTORCH.values() for name in names]
    assert (len(table.TYPES), len(own)) == (127, 25)
    assert sum(len(names) for part in (table._POPART, table.POPTORCH) for names in part.values()) == len(table.TYPES)
    for names in (table.ENUMERATIONS, table.NUMBERED_ITEMS, table.EFFECTIVE):
        assert set(names) <= set(table.TYPES)


@pytest.mark.parametrize("key", USED)
def test_what_scripts_set_is_accepted(key):
    check_session_options(with_key(key, USED[key]))


def test_everything_that_options_can_set_is_accepted():
    options = Options().deviceIterations(2).replicationFactor(4).outputMode(OutputMode.EveryN, 2).randomSeed(1)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal).anchorTensor("a", "b").modelName("m")
    options.setAvailableMemoryProportion({"IPU0": 0.1}).useOfflineIpuTarget(21).useIpuModel(True).useIpuId(1)
    options.updatableNamedBuffers(["a"]).enableStableNorm(True).logCycleCount(True).maxRepeatLogs(None)
    options.enableExecutableCaching("c").enableProfiling("p").enableSyntheticData(True)
    options.setExecutionStrategy(poptorch.SerialPhasedExecution("a", "b"))
    options.Training.gradientAccumulation(2).setAutomaticLossScaling(True).setConvolutionDithering(True)
    options.Precision.setPartialsType(torch.half).enableStochasticRounding(True).enableFloatingPointExceptions(True)
    settings = poptorch.TensorLocationSettings().minElementsForOffChip(4).useOnChipStorage(True).useIOTilesToLoad()
    settings.useIOTilesToStore(False).useReplicatedTensorSharding().minElementsForReplicatedTensorSharding(3)
    options.TensorLocations.setActivationLocation(settings).setWeightLocation(settings).numIOTiles(32)
    options.TensorLocations.setOptimizerLocation(settings).setAccumulatorLocation(settings)
    options._Popart.setPatterns({"PadSum": True}, 0)
    poptorch.poptorch_core._validateOptions(options.toDict())


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("enableOutlinng", True, "Unknown bool option enableOutlinng: .*did you mean enableOutlining"),
        ("asdfasdf", 1, "Unknown uint64 option asdfasdf: PopART has no session option of that name$"),
        ("asdfasdf", 1.0, "Unknown floating point option asdfasdf"),
        ("asdfasdf", "x", "Unknown string option asdfasdf"),
        ("asdfasdf", ["x"], "Unknown set / vector option asdfasdf"),
        ("asdfasdf", {"x": "y"}, "Unknown map option asdfasdf"),
        ("outlineThreshold", 10, "Unknown uint64 option outlineThreshold.*floating point, got 10; write 10.0"),
        ("autoRecomputation", True, "Unknown bool option autoRecomputation.*uint64, got True"),
        ("enableOutlining", 1, "Unknown uint64 option enableOutlining.*bool, got 1"),
        ("engineOptions", ["a"], "Unknown set / vector option engineOptions.*map"),
        ("dotChecks", torch.empty(1), r"Unknown value type torch\.Tensor for option dotChecks"),
        ("cachePath", None, "Unknown value type builtins.NoneType for option cachePath"),
        ("autoRecomputation", 5, "Value for RecomputationType out of range.*4 RecomputeAll, got 5"),
        ("firstDotOp", -1, "Value for firstDotOp out of range: -1"),
        ("firstDotOp", 2**64, "Value for firstDotOp out of range"),
        ("hardwareInstrumentations", {0, 2}, "Value for Instrumentation out of range.*got 2"),
        ("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["a"], "container of numbers, got 'a'"),
    ],
)
def test_an_option_that_popart_refuses_is_refused(key, value, text):
    with pytest.raises(poptorch.Error, match=text):
        check_session_options(with_key(key, value))


def test_patterns_need_a_level_and_bools():
    with pytest.raises(poptorch.Error, match="'patterns' should not be set without 'patterns_level'"):
        check_session_options(picked(patterns={"PadSum": True}))
    for patterns, level, text in (({"PadSum": 1}, 2, "'PadSum': 1"), ({"PadSum": True}, 4, "level 4")):
        options = picked()
        options._Popart.setPatterns(patterns, level)
        with pytest.raises(poptorch.Error, match=text):
            check_session_options(options)


def test_a_share_of_memory_is_a_number():
    with pytest.raises(poptorch.Error, match="got 'half' for IPU1"):
        check_session_options(picked().setAvailableMemoryProportion({"IPU1": "half"}))


def test_an_unknown_setting_of_a_location_is_refused():
    with pytest.raises(poptorch.Error, match="Unknown option 'onchip' for tensor location location_weight.*onChip"):
        poptorch.poptorch_core._validateOptions({"location_weight": {"onchip": 1}})


def test_a_negative_seed_cannot_be_given_to_a_device():
    with pytest.raises(poptorch.Error, match="random_seed out of range: -3"):
        check_session_options(picked().randomSeed(-3))


def test_every_option_is_logged_at_debug_level(caplog):
    options = picked(enableOutlining=True, hardwareInstrumentations={1}, outlineThreshold=1.5)
    options._Popart.setEngineOptions({"debug.allowOutOfMemory": "true"}).setPatterns({"PadSum": False})
    options.deviceIterations(3).useIpuModel(True)
    with caplog.at_level(logging.DEBUG, "ipu_finetune.emulator"):
        check_session_options(options)
    lines = {record.getMessage() for record in caplog.records}
    assert {
        "poptorch.Options set enableOutlining to value true",
        "poptorch.Options set outlineThreshold to value 1.5",
        "poptorch.Options added 1 to hardwareInstrumentations",
        "poptorch.Options set engineOptions[debug.allowOutOfMemory] to true",
        "poptorch.Options set patterns[PadSum] to False",
        "poptorch.Options set device_iterations to value 3",
        "poptorch.Options set output_mode to value 2",
        "From the user configuration: Ipu model: Enabled",
    } <= lines


def noted(options, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, "ipu_finetune.emulator"):
        note_device_only_options(options)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_what_only_a_real_ipu_uses_is_named_in_one_line(caplog):
    assert noted(Options(), caplog) == []
    options = picked(outlineThreshold=1.0, enableStochasticRounding=True, cachePath="c").deviceIterations(2)
    options.Precision.setPartialsType(torch.half)
    options.setAvailableMemoryProportion({"IPU0": 0.1}).syncPattern(poptorch.SyncPattern.SinglePipeline)
    options.TensorLocations.numIOTiles(32).setWeightLocation(poptorch.TensorLocationSettings())
    options._Popart.setPatterns({"PadSum": True})
    (line,) = noted(options, caplog)
    assert line.split(": ")[1].split(", ") == [
        "available_memory_proportion",
        "location_weight",
        "numIOTiles",
        "outlineThreshold",
        "patterns",
        "sync_pattern",
    ]
    options.Training.setConvolutionDithering(True)
    assert "convolutionOptions" in noted(options, caplog)[0]


def test_a_graph_that_cannot_be_exported_is_a_warning(caplog, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", "model.proto")
    note_device_only_options(Options())
    assert "POPTORCH_EXPORT_PROTO_FILE is set, but" in caplog.text


def test_the_enumerations_have_the_numbers_of_the_sdk():
    assert popart.RecomputationType.Pipeline == 3
    assert popart.SyntheticDataMode.RandomNormal == 2
    assert popart.VirtualGraphMode.ExecutionPhases == 3
    assert popart.MergeVarUpdateType.Off == 0
    assert popart.RecomputationType.NoRecompute == 0
    assert popart.PatternsLevel.Default == 2
    for name in popart.__all__:
        assert [int(member) for member in getattr(popart, name)] == list(range(len(getattr(popart, name))))
