# SPDX-License-Identifier: Apache-2.0
import copy
import pickle
import socket

import pytest

from ipu_finetune.emulator import popdist, poptorch
from ipu_finetune.emulator.popdist import _peers
from ipu_finetune.emulator.popdist.poptorch import Options

#: What poprun and Open MPI set for instance 3 of 4, the second one on its host.
INSTANCE = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "4",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
FOUND_THEIR_WAY = ("MASTER_ADDR", "MASTER_PORT", *_peers._RUN_NAMES)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*INSTANCE, *FOUND_THEIR_WAY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def instance(monkeypatch):
    for name, value in INSTANCE.items():
        monkeypatch.setenv(name, value)


def where():
    return (
        popdist.getInstanceIndex(),
        popdist.getNumInstances(),
        popdist.getLocalInstanceIndex(),
        popdist.getReplicaIndexOffset(),
        popdist.getNumLocalReplicas(),
        popdist.getNumTotalReplicas(),
        popdist.getNumIpusPerReplica(),
    )


def test_alone_there_is_one_instance_with_one_replica_of_one_ipu():
    assert not popdist.isPopdistEnvSet()
    assert where() == (0, 1, 0, 0, 1, 1, 1)
    assert popdist.getDeviceId() == 0


def test_an_instance_knows_where_it_stands(instance):
    assert popdist.isPopdistEnvSet()
    assert where() == (3, 4, 1, 6, 2, 8, 4)
    assert popdist.getDeviceId(4) == 1


@pytest.mark.parametrize(
    "missing",
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("POPDIST_NUM_LOCAL_REPLICAS",),
        ("POPDIST_REPLICA_INDEX_OFFSET",),
    ],
)
def test_what_is_not_told_follows_from_the_rest(instance, monkeypatch, missing):
    for name in missing:
        monkeypatch.delenv(name)
    assert where() == (3, 4, 1, 6, 2, 8, 4)


def test_instances_of_different_size_cannot_be_counted(instance, monkeypatch):
    monkeypatch.setenv("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "0")
    for count in (popdist.getNumInstances, popdist.getInstanceIndex):
        with pytest.raises(poptorch.Error, match="different numbers of replicas.*--num-replicas"):
            count()


def test_a_number_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "four")
    with pytest.raises(poptorch.Error, match="POPDIST_NUM_IPUS_PER_REPLICA='four' is not a number"):
        popdist.getNumIpusPerReplica()


def test_the_number_of_ipus_can_be_asked_for(monkeypatch):
    assert popdist.checkNumIpusPerReplica(1)
    assert not popdist.checkNumIpusPerReplica(4)
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "4")
    assert popdist.checkNumIpusPerReplica(4)


def test_a_function_runs_on_the_instances_named(instance):
    assert popdist.execute_on_instances({1, 3}, divmod, 7, 2) == (3, 1)
    assert popdist.execute_on_instances({3, 9}, int, "12", base=3) == 5
    assert popdist.execute_on_instances({0}, divmod, 7, 0) is None


def test_options_take_what_poprun_decided(instance):
    options = Options(ipus_per_replica=4)
    assert isinstance(options, poptorch.Options)
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)


def test_options_work_without_poprun():
    options = Options(ipus_per_replica=2)
    assert options.replication_factor == 1
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_a_model_of_another_size_than_poprun_reserved_is_refused(instance):
    with pytest.raises(RuntimeError, match="uses 2 IPUs per replica, .*--ipus-per-replica 4"):
        Options(ipus_per_replica=2)


@pytest.mark.parametrize("changed", [lambda options: options, copy.deepcopy, Options.clone])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("useIpuId", (1,)),
        ("replicationFactor", (2,)),
        ("Distributed.disable", ()),
        ("Distributed.setEnvVarNames", ("a", "b")),
        ("Distributed.configureProcessId", (1,)),
        ("Distributed.configureProcessId", (0, 1)),
    ],
)
def test_what_poprun_decides_cannot_be_set(instance, changed, name, arguments):
    options = changed(Options())
    target = options
    for part in name.split("."):
        target = getattr(target, part)
    with pytest.raises(RuntimeError, match=rf"Cannot call `{name}` with popdist\.poptorch\.Options"):
        target(*arguments)
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)


def test_all_other_options_can_be_set(instance):
    options = Options().deviceIterations(3)
    options.Training.gradientAccumulation(2)
    assert (options.device_iterations, options.Training.gradient_accumulation) == (3, 2)
    assert pickle.loads(pickle.dumps(options)).Distributed.processId == 3


def test_frozen_options_can_be_listed_and_stay_frozen(instance):
    options = Options().outputMode(poptorch.OutputMode.All)
    options.toDict()
    options.checkIsFrozen()
    options._freeze()
    listed = options.toDict()
    assert (listed["replication_factor"], listed["distributed_process_id"]) == (2, 3)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.checkIsFrozen()


# ---- finding each other


def test_the_meeting_point_is_the_one_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "pod-1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    assert _peers._address(1, 2) == "pod-1:1234"


def test_on_one_host_it_follows_from_the_name_of_the_run(monkeypatch):
    assert _peers._address(1, 2) == "127.0.0.1:29500"
    monkeypatch.setenv("OMPI_MCA_ess_base_jobid", "4021289985")
    first = _peers._address(1, 2)
    assert first == _peers._address(0, 2)
    host, port = first.split(":")
    assert host == "127.0.0.1"
    assert 1024 < int(port) < 32768
    monkeypatch.setenv("OMPI_MCA_ess_base_jobid", "4021289986")
    assert _peers._address(1, 2) != first


def test_instances_on_several_hosts_must_be_told(instance):
    with pytest.raises(poptorch.Error, match="process 3 of 4, of which 2 run on this host: set MASTER_ADDR"):
        popdist.init()


def test_a_meeting_point_that_cannot_be_had_is_named(instance, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        with pytest.raises(poptorch.Error, match=rf"Process 0 of 4 could not meet the others at 127\.0\.0\.1:{port}"):
            popdist.init()
    assert not _peers.connected()


def test_alone_nothing_is_connected():
    popdist.init()
    assert not _peers.connected()
    assert _peers.scope().ranks == (0,)
