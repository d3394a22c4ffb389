# SPDX-License-Identifier: Apache-2.0
import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from emulator_oracle import data, make, regression_loss

from ipu_finetune import emulator
from ipu_finetune.errors import IpuFinetuneError, TargetUnavailableError

ROOT = Path(__file__).parents[2]


def run(code, *paths):
    """Run code in a fresh interpreter and return what it prints."""
    header = "import sys\n" + "".join(f"sys.path.insert(0, {str(path)!r})\n" for path in (*paths, ROOT))
    done = subprocess.run(
        [sys.executable, "-c", header + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def fake_sdk(tmp_path):
    for name in ("poptorch", "popart"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("REAL = True\n")
    (tmp_path / "poptorch" / "optim.py").write_text("REAL = True\n")
    return tmp_path


def test_importing_the_emulator_touches_nothing():
    found = run(
        """
        import os, logging
        before = dict(os.environ), set(sys.meta_path), logging.root.level
        from ipu_finetune import emulator
        print(emulator.is_installed(), "poptorch" in sys.modules, "torch" in sys.modules)
        print(before == (dict(os.environ), set(sys.meta_path), logging.root.level))
        """
    )
    assert found == ["False", "False", "False", "True"]


def test_installed_modules_are_found_by_every_name(installed):
    import popart
    import popdist
    import popdist.poptorch
    import poptorch
    import poptorch._impl
    import poptorch._poplar_executor
    import poptorch.optim
    import poptorch.options
    import poptorch.poptorch_core
    from poptorch.optim import AdamW

    assert emulator.is_installed()
    assert poptorch is sys.modules["ipu_finetune.emulator.poptorch"]
    assert poptorch.optim.AdamW is AdamW
    assert poptorch._poplar_executor.PoplarExecutor is poptorch.PoplarExecutor
    assert popart.SubgraphCopyingStrategy.JustInTime == 1
    assert popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized == 3
    assert popdist.getNumInstances() == 1


def test_no_module_exists_twice(installed):
    twice = [
        name
        for name, module in sys.modules.items()
        if name.split(".")[0] in ("poptorch", "popart", "popdist")
        and module is not sys.modules[f"ipu_finetune.emulator.{name}"]
    ]
    assert twice == []


def test_every_public_name_exists_and_is_listed(installed):
    import poptorch

    for name in poptorch.__all__:
        assert hasattr(poptorch, name), name
    assert len(set(poptorch.__all__)) == len(poptorch.__all__)


def test_the_distribution_has_a_version_while_installed():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("poptorch")
    emulator.install()
    try:
        from packaging.version import Version

        assert Version(importlib.metadata.version("poptorch")) >= Version("3.3")
    finally:
        emulator.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("poptorch")


def test_installing_twice_and_again_keeps_the_same_modules():
    emulator.install()
    first = sys.modules["poptorch"]
    emulator.install()
    emulator.uninstall()
    assert "poptorch" not in sys.modules
    assert "poptorch.optim" not in sys.modules
    assert not emulator.is_installed()
    emulator.uninstall()
    emulator.install()
    assert sys.modules["poptorch"] is first
    emulator.uninstall()


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_poptorch_is_never_hidden_unasked(tmp_path, imported):
    found = run(
        f"""
        if {imported}:
            import poptorch
        from ipu_finetune import emulator
        from ipu_finetune.errors import TargetUnavailableError
        try:
            emulator.install()
        except TargetUnavailableError as error:
            print("force=True" in str(error), "poptorch" in str(error))
        import poptorch
        print(poptorch.REAL, emulator.is_installed())
        """,
        fake_sdk(tmp_path),
    )
    assert found == ["True", "True", "True", "False"]
    assert issubclass(TargetUnavailableError, IpuFinetuneError)


def test_a_real_poptorch_is_hidden_by_force_and_comes_back(tmp_path):
    found = run(
        """
        import poptorch.optim
        from ipu_finetune import emulator
        emulator.install(force=True)
        import poptorch, poptorch.optim
        print(hasattr(poptorch, "REAL"), hasattr(poptorch.optim, "REAL"))
        emulator.uninstall()
        import poptorch, poptorch.optim
        print(poptorch.REAL, poptorch.optim.REAL)
        """,
        fake_sdk(tmp_path),
    )
    assert found == ["False", "False", "True", "True"]


def test_only_install_installs_and_a_folder_of_the_name_is_no_poptorch(tmp_path):
    (tmp_path / "poptorch").mkdir()
    found = run(
        """
        import ipu_finetune.emulator.poptorch, ipu_finetune.emulator.popart, ipu_finetune.emulator.popdist.poptorch
        print("poptorch" in sys.modules, "popart" in sys.modules, "popdist" in sys.modules)
        from ipu_finetune import emulator
        emulator.install()
        import poptorch
        print(poptorch.__version__)
        """,
        tmp_path,
    )
    assert found == ["False", "False", "False", "3.3.0+emulated"]


# ---- popdist


@pytest.fixture
def instance(monkeypatch):
    for name, value in {
        "POPDIST_NUM_TOTAL_REPLICAS": "8",
        "POPDIST_NUM_LOCAL_REPLICAS": "2",
        "POPDIST_NUM_IPUS_PER_REPLICA": "4",
        "POPDIST_REPLICA_INDEX_OFFSET": "6",
        "POPDIST_LOCAL_INSTANCE_INDEX": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)


def test_without_poprun_there_is_one_instance(installed, monkeypatch):
    import popdist

    for name in ("OMPI_COMM_WORLD_SIZE", "POPDIST_NUM_TOTAL_REPLICAS"):
        monkeypatch.delenv(name, raising=False)
    assert not popdist.isPopdistEnvSet()
    counts = (popdist.getNumInstances(), popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas())
    assert counts == (1, 1, 1)
    assert (popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (0, 0)
    popdist.init()
    assert popdist.execute_on_instances({0}, max, 3, 4) == 4
    assert popdist.execute_on_instances({1}, max, 3, 4) is None


def test_poprun_tells_an_instance_where_it_is(installed, instance):
    import popdist

    assert popdist.isPopdistEnvSet()
    counts = (popdist.getNumInstances(), popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas())
    assert counts == (4, 8, 2)
    assert (popdist.getInstanceIndex(), popdist.getLocalInstanceIndex(), popdist.getNumIpusPerReplica()) == (3, 1, 4)
    assert popdist.getReplicaIndexOffset() == 6
    assert popdist.checkNumIpusPerReplica(4)
    assert not popdist.checkNumIpusPerReplica(2)


def test_popdists_options_take_replicas_and_process_from_poprun(installed, instance):
    from popdist.poptorch import Options

    options = Options(ipus_per_replica=4)
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    for call in (
        lambda: options.useIpuId(1),
        lambda: options.replicationFactor(2),
        lambda: options.Distributed.disable(),
        lambda: options.Distributed.setEnvVarNames("a", "b"),
        lambda: options.Distributed.configureProcessId(0, 1),
    ):
        with pytest.raises(RuntimeError, match=r"Cannot call `.*` with popdist\.poptorch\.Options"):
            call()


def test_popdists_options_can_be_listed_cloned_and_used_while_frozen(installed, instance):
    import poptorch
    from popdist.poptorch import Options

    options = Options().outputMode(poptorch.OutputMode.All)
    options._freeze()
    assert options.toDict()["replication_factor"] == 2
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(2)
    assert options.clone().deviceIterations(2).replication_factor == 2


def test_training_with_several_processes_needs_a_process_group(installed, instance):
    import poptorch
    import torch
    from popdist.poptorch import Options

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return poptorch.identity_loss(self.w * x, "sum")

    with pytest.raises(poptorch.Error, match=r"popdist\.init\(\)"):
        poptorch.trainingModel(Model(), Options())(torch.ones(2))


def test_processes_reduce_gradients_over_all_of_their_replicas():
    import socket

    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import torch
    torch.set_num_threads(1)
    from ipu_finetune import emulator
    emulator.install()
    import popdist, popdist.poptorch, poptorch
    from emulator_oracle import make, data
    popdist.init()
    mine = slice(12 * popdist.getInstanceIndex(), 12 * popdist.getInstanceIndex() + 12)
    x, y = data(24)
    for reduction in (poptorch.ReductionType.Mean, poptorch.ReductionType.Sum):
        options = popdist.poptorch.Options()
        options.Training.gradientAccumulation(2).accumulationAndReplicationReductionType(reduction)
        model, _ = make()
        poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))(x[mine], y[mine])
        print(*model.second.weight.flatten().tolist())
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMPI_COMM_WORLD_SIZE": "2",
        "POPDIST_NUM_TOTAL_REPLICAS": "4",
        "POPDIST_NUM_LOCAL_REPLICAS": "2",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, **environment, "OMPI_COMM_WORLD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    found = [torch.tensor([float(value) for value in out.split()]) for out, _ in results]

    expected = []
    for divisor in (8, 1):
        _, twin = make()
        x, y = data(24)
        # Processes are outermost: each has its own combined batch of 2 x 2 micro-batches of 3 rows.
        total = sum(regression_loss(twin, x[k : k + 3], y[k : k + 3]) for k in range(0, 24, 3)) / divisor
        total.backward()
        expected.append((twin.second.weight - 0.1 * twin.second.weight.grad).detach().flatten())
    for weights in found:
        torch.testing.assert_close(weights, torch.cat(expected))
