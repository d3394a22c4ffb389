# SPDX-License-Identifier: Apache-2.0
"""`horovod.torch` with two real processes, against numbers worked out by hand; and alone."""

import io
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
import zlib
from pathlib import Path

import pytest
import torch

from ipu_finetune import emulator
from ipu_finetune.emulator import popdist, poptorch
from ipu_finetune.emulator.horovod import torch as hvd
from ipu_finetune.emulator.popdist import _peers

ROOT = Path(__file__).parents[2]
PLACES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "HOROVOD_SIZE", "HOROVOD_RANK", "POPDIST_NUM_TOTAL_REPLICAS")


def model_of(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(seed + 1):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def reductions(rank):
    value = torch.tensor([[1.0, -2.0]]) if rank == 0 else torch.tensor([[3.0, 6.0]])
    untouched = value.clone()
    found = {
        "default": hvd.allreduce(value, name="loss"),
        "average": hvd.allreduce(value, average=True),
        "no average": hvd.allreduce(value, average=False),
        **{name: hvd.allreduce(value, op=getattr(hvd, name)) for name in ("Average", "Sum", "Min", "Max", "Product")},
        "scaled": hvd.allreduce(value, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "scalar": hvd.allreduce(torch.tensor(float(rank))),
        "int mean": hvd.allreduce(torch.tensor([2 + 3 * rank, -2 - 3 * rank])),
        "half mean": hvd.allreduce(torch.full((1,), 60000.0, dtype=torch.float16)),
        "half sum": hvd.allreduce(torch.full((1,), 60000.0, dtype=torch.float16), op=hvd.Sum),
        "bfloat16": hvd.allreduce(torch.tensor([1.0 + rank], dtype=torch.bfloat16)),
        "strided": hvd.allreduce(torch.arange(4.0).reshape(2, 2).t(), op=hvd.Sum),
        "group": torch.cat(hvd.grouped_allreduce([value[:, 0], value[:, 1]], op=hvd.Sum)),
        "graded": hvd.allreduce(value.clone().requires_grad_()),
    }
    found["untouched"] = torch.equal(value, untouched)
    hvd.allreduce_(value, op=hvd.Sum)
    found["in place"] = value
    pair = [torch.ones(1) * rank, torch.ones(2)]
    hvd.grouped_allreduce_(pair, op=hvd.Sum)
    found["group in place"] = torch.cat(pair)
    return found


def exchanges(rank):
    found = {
        "gathered": hvd.allgather(torch.arange(2.0 * (rank + 1)).reshape(-1, 2) + 10 * rank),
        "objects": hvd.allgather_object({"rank": rank}),
        "object": hvd.broadcast_object(["from", rank], root_rank=1),
    }
    for name, value in {
        "bool": torch.tensor([rank == 0, True]),
        "int64": torch.tensor([2**40 + rank]),
        "bfloat16": torch.tensor([1.5 + rank], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0 + rank),
        "empty": torch.empty(0, 2),
    }.items():
        found[f"broadcast {name}"] = hvd.broadcast(value, root_rank=1)
    strided = torch.zeros(2, 2)
    hvd.broadcast_(strided.t(), root_rank=0) if rank else hvd.broadcast_(torch.tensor([[1.0, 2], [3, 4]]), root_rank=0)
    found["broadcast in place"] = strided
    for name, wrong in {
        "root": lambda: hvd.broadcast(torch.ones(1), root_rank=2),
        "columns": lambda: hvd.allgather(torch.ones(1, rank + 1)),
    }.items():
        try:
            wrong()
        except ValueError as error:
            found[f"wrong {name}"] = str(error)
    return found


def models(rank):
    model, optimizer = model_of(rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    named, _ = model_of(rank)
    hvd.broadcast_parameters(named.named_parameters(), root_rank=1)
    state = optimizer.state_dict()
    return {
        "weights": model.weight.detach(),
        "named": named.weight.detach(),
        "learning rate": state["param_groups"][0]["lr"],
        "step": float(state["state"][0]["step"]),
        "moment": state["state"][0]["exp_avg"],
    }


def parts(rank):
    return {
        "one": popdist.execute_on_instances({1}, hvd.allreduce, torch.tensor([5.0 + rank])),
        "one gathers": popdist.execute_on_instances({0}, hvd.allgather_object, "me"),
        "both": popdist.execute_on_instances({0, 1}, hvd.allreduce, torch.tensor([5.0 + rank])),
        "after": hvd.allreduce(torch.tensor([5.0 + rank])),
    }


def instance(rank, environment, queue):
    """What each of the two processes does."""
    try:
        os.environ.update(environment, OMPI_COMM_WORLD_RANK=str(rank))
        torch.set_num_threads(1)
        popdist.init()
        hvd.init()
        hvd.init()
        found = {
            "place": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.is_initialized()),
            "reductions": reductions(rank),
            "exchanges": exchanges(rank),
            "models": models(rank),
            "parts": parts(rank),
        }
        hvd.barrier()
        hvd.shutdown()
        found["popdist stays connected"] = _peers.connected()
        _peers.leave("popdist")
        found["left"] = not _peers.connected()
        # As bytes: shared memory would be gone with this process.
        packed = io.BytesIO()
        torch.save(found, packed)
        queue.put((rank, packed.getvalue()))
    except Exception:
        queue.put((rank, traceback.format_exc()))


def free_run():
    """Return the name of a run whose meeting point, which follows from the name, is free."""
    for name in map(str, range(os.getpid(), os.getpid() + 50)):
        port = _peers._FIRST_PORT + zlib.crc32(name.encode()) % _peers._PORTS
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return name
    raise AssertionError("no free port")


@pytest.fixture(scope="module")
def results():
    environment = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "POPDIST_NUM_TOTAL_REPLICAS": "2",
        _peers._RUN_NAMES[0]: free_run(),
        "OMP_NUM_THREADS": "1",
    }
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    workers = [spawn.Process(target=instance, args=(rank, environment, queue), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        found = dict(queue.get(timeout=120) for _ in workers)
    finally:
        for worker in workers:
            worker.join(10)
    for value in found.values():
        assert isinstance(value, bytes), value
    return {rank: torch.load(io.BytesIO(value), weights_only=False) for rank, value in found.items()}


@pytest.fixture(params=[0, 1])
def rank(request):
    return request.param


def same(found, expected, **tolerance):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), **tolerance)


def test_both_find_each_other_by_the_name_of_the_run(results, rank):
    assert results[rank]["place"] == (rank, 2, 0, 2, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", [[2.0, 2.0]]),
        ("average", [[2.0, 2.0]]),
        ("no average", [[4.0, 4.0]]),
        ("Average", [[2.0, 2.0]]),
        ("Sum", [[4.0, 4.0]]),
        ("Min", [[1.0, -2.0]]),
        ("Max", [[3.0, 6.0]]),
        ("Product", [[3.0, -12.0]]),
        ("scaled", [[4.0, 4.0]]),
        ("scalar", 0.5),
        ("int mean", [3, -3]),  # 7 / 2, cut
        ("half mean", [60000.0]),  # the sum alone is above the range of float16
        ("half sum", [float("inf")]),
        ("bfloat16", [1.5]),
        ("strided", [[0.0, 4.0], [2.0, 6.0]]),
        ("group", [4.0, 4.0]),
        ("graded", [[2.0, 2.0]]),
        ("in place", [[4.0, 4.0]]),
        ("group in place", [1.0, 2.0, 2.0]),
    ],
)
def test_reductions(results, rank, name, expected):
    same(results[rank]["reductions"][name], expected)


def test_a_reduction_leaves_its_argument_and_has_no_gradient(results, rank):
    assert results[rank]["reductions"]["untouched"]
    assert not results[rank]["reductions"]["graded"].requires_grad


def test_a_reduction_keeps_the_dtype(results, rank):
    found = results[rank]["reductions"]
    assert found["half mean"].dtype == torch.float16
    assert found["bfloat16"].dtype == torch.bfloat16
    assert found["int mean"].dtype == torch.int64


def test_gathered_tensors_may_differ_in_length(results, rank):
    same(results[rank]["exchanges"]["gathered"], [[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]])


def test_objects(results, rank):
    assert results[rank]["exchanges"]["objects"] == [{"rank": 0}, {"rank": 1}]
    assert results[rank]["exchanges"]["object"] == ["from", 1]


@pytest.mark.parametrize(
    ("name", "expected", "dtype"),
    [
        ("bool", [False, True], torch.bool),
        ("int64", [2**40 + 1], torch.int64),
        ("bfloat16", [2.5], torch.bfloat16),
        ("scalar", 4.0, torch.float32),
        ("empty", torch.empty(0, 2), torch.float32),
    ],
)
def test_broadcasts_of_every_dtype_and_shape(results, rank, name, expected, dtype):
    found = results[rank]["exchanges"][f"broadcast {name}"]
    assert found.dtype == dtype
    same(found, expected)


def test_a_broadcast_in_place_writes_through_a_view(results):
    same(results[1]["exchanges"]["broadcast in place"], [[1.0, 3.0], [2.0, 4.0]])


def test_wrong_calls_are_refused_by_all(results, rank):
    assert results[rank]["exchanges"]["wrong root"] == "root_rank 2 is not among the processes [0, 1]"
    assert (
        "dimension 0 only, got (1, 1) torch.float32, (1, 2) torch.float32"
        in results[rank]["exchanges"]["wrong columns"]
    )


def test_parameters_and_optimizer_state_are_the_roots(results, rank):
    first, optimizer = model_of(0)
    second, _ = model_of(1)
    found = results[rank]["models"]
    same(found["weights"], first.weight.detach())
    same(found["named"], second.weight.detach())
    assert (found["learning rate"], found["step"]) == (0.1, 1.0)
    same(found["moment"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_collective_calls_of_some_instances_span_these_only(results):
    assert results[0]["parts"]["one"] is None
    same(results[1]["parts"]["one"], [6.0])
    assert results[0]["parts"]["one gathers"] == ["me"]
    for found in results.values():
        same(found["parts"]["both"], [5.5])
        same(found["parts"]["after"], [5.5])


def test_leaving_horovod_keeps_popdists_connection(results, rank):
    assert results[rank]["popdist stays connected"]
    assert results[rank]["left"]


# ---- alone


@pytest.fixture
def alone(monkeypatch):
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def test_one_process_needs_no_environment(alone):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    value = torch.tensor([1.0, 2.0])
    for found in (hvd.allreduce(value), hvd.allgather(value), hvd.broadcast(value, 0)):
        assert torch.equal(found, value)
        assert found.data_ptr() != value.data_ptr()
    assert hvd.allreduce_(value, op=hvd.Sum) is value
    assert (hvd.allgather_object("a"), hvd.broadcast_object("a")) == (["a"], "a")
    hvd.barrier()
    assert not _peers.connected()


def test_wrong_arguments_are_refused(alone):
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op must be one of"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(ValueError, match="rank-zero tensor"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(ValueError, match="root_rank 1"):
        hvd.broadcast_object("a", 1)
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(3, 0)


def test_before_init_nothing_is_known():
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
            call()


def test_a_part_of_the_processes_cannot_be_asked_for():
    with pytest.raises(poptorch.Error, match="process sets are not supported"):
        hvd.init(process_sets=[[0]])
    assert not hvd.is_initialized()


def test_an_optimizer_for_gradients_on_the_host_is_refused():
    with pytest.raises(poptorch.Error, match="reduce the gradients.*poptorch.trainingModel"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))


# ---- installing


def test_installing_gives_horovod_too_and_takes_it_away_again():
    before = sys.modules.get("horovod")
    emulator.install()
    try:
        import horovod.torch as given

        assert given is hvd
    finally:
        emulator.uninstall()
    assert sys.modules.get("horovod") is before


def test_a_real_horovod_stays_in_its_place_even_by_force(tmp_path):
    (tmp_path / "horovod").mkdir()
    for name in ("__init__", "torch"):
        (tmp_path / "horovod" / f"{name}.py").write_text("REAL = True\n")
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
from ipu_finetune import emulator
for force in (False, True):
    emulator.install(force=force)
    import horovod.torch, poptorch
    emulator.uninstall()
    print(horovod.torch.REAL, "horovod" in sys.modules, "poptorch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "False"] * 2, done.stderr
