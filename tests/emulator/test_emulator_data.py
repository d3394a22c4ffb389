# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import AsynchronousDataAccessor, DataLoader, DataLoaderMode

SYNC, ASYNC, REBATCHED = DataLoaderMode.Sync, DataLoaderMode.Async, DataLoaderMode.AsyncRebatched

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    """Yields 0..n-1, cut into contiguous parts among workers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        workers, index = (info.num_workers, info.id) if info else (1, 0)
        share = -(-self.n // workers)
        return iter(torch.tensor(i) for i in range(index * share, min(self.n, (index + 1) * share)))


def batches(loader):
    return [batch.tolist() for batch in loader]


def distributed(process, processes, seed=None, **kwargs):
    opts = options(**kwargs)
    opts.Distributed.configureProcessId(process, processes)
    if seed is not None:
        opts.randomSeed(seed)
    return opts


def test_an_item_is_a_combined_batch():
    loader = DataLoader(options(D=2, A=3, R=2), Numbers(50), batch_size=2)
    assert loader.combinedBatchSize == 24
    assert batches(loader) == [list(range(24)), list(range(24, 48))]
    assert len(loader) == 2


def test_replica_groups_need_less_data():
    opts = options(R=4)
    opts.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    assert DataLoader(opts, Numbers(8), batch_size=3).combinedBatchSize == 6


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_mode_yields_the_same_batches_in_every_epoch(mode, workers):
    loader = DataLoader(options(D=2), Numbers(13), batch_size=3, mode=mode, num_workers=workers)
    expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert batches(loader) == expected
    assert batches(loader) == expected
    loader.terminate()


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
def test_an_incomplete_last_batch_is_kept_on_request_and_reported(mode, caplog):
    loader = DataLoader(options(D=2), Numbers(13), batch_size=3, drop_last=False, mode=mode)
    assert batches(loader)[-1] == [12]
    assert len(loader) == 3
    assert "1 samples instead of 6" in caplog.text
    loader.terminate()


def test_an_incomplete_batch_does_not_fit_the_compiled_model():
    loader = DataLoader(options(D=2), Numbers(9), batch_size=3, drop_last=False)
    model = poptorch.inferenceModel(lambda x: x * 1, options(D=2))
    first, last = loader
    model(first)
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(last)


def test_rebatching_loses_no_workers_remainder():
    def full_and_rest(mode, drop_last):
        loader = DataLoader(
            options(), Stream(101), batch_size=6, mode=mode, num_workers=7, drop_last=drop_last, worker_init_fn=int
        )
        sizes = [len(batch) for batch in loader]
        loader.terminate()
        return sizes.count(6), [size for size in sizes if size != 6]

    assert full_and_rest(SYNC, True) == (13, [])
    assert full_and_rest(REBATCHED, True) == (16, [])
    assert full_and_rest(REBATCHED, False) == (16, [5])


def test_rebatching_keeps_every_sample_once():
    loader = DataLoader(
        options(D=2),
        Stream(20),
        batch_size=2,
        mode=REBATCHED,
        num_workers=3,
        rebatched_worker_size=3,
        worker_init_fn=int,
    )
    found = [value for batch in loader for value in batch.tolist()]
    assert sorted(found) == list(range(20))
    loader.terminate()


def test_a_workers_piece_fits_the_combined_batch():
    with pytest.raises(AssertionError, match="at most the combined batch size 4, got 5"):
        DataLoader(options(D=2), Stream(8), batch_size=2, mode=REBATCHED, rebatched_worker_size=5)


def test_shuffling_covers_everything_in_a_new_order_each_epoch():
    loader = DataLoader(options(), Numbers(40), batch_size=40, shuffle=True)
    one, other = batches(loader)[0], batches(loader)[0]
    assert sorted(one) == sorted(other) == list(range(40))
    assert one != other


def test_a_batch_sampler_is_joined():
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Numbers(11)), 2, drop_last=True)
    loader = DataLoader(options(D=2), Numbers(11), batch_sampler=sampler)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2
    whole = DataLoader(options(D=2), Numbers(11), batch_sampler=sampler, drop_last=False)
    assert batches(whole)[-1] == [8, 9]
    with pytest.raises(poptorch.Error, match="mutually exclusive"):
        DataLoader(options(), Numbers(11), batch_sampler=sampler, batch_size=2)
    with pytest.raises(poptorch.Error, match="mutually exclusive"):
        DataLoader(options(), Numbers(11), batch_sampler=sampler, shuffle=True)


def test_batching_can_be_switched_off():
    loader = DataLoader(options(D=2), Numbers(3), batch_size=None)
    assert [int(item) for item in loader] == [0, 1, 2]
    assert loader.combinedBatchSize is None


def test_collate_and_structure_pass_through():
    def collate(items):
        return {"x": torch.stack(items), "pair": (torch.stack(items), torch.stack(items) * 2)}

    loader = DataLoader(options(), Stream(10), batch_size=4, collate_fn=collate, mode=REBATCHED)
    first = next(iter(loader))
    assert first["x"].tolist() == [0, 1, 2, 3]
    assert first["pair"][1].tolist() == [0, 2, 4, 6]
    loader.terminate()


# ---- several processes


def shares(n, processes, drop_last, batch_size=1, **kwargs):
    return [
        [
            v
            for b in DataLoader(distributed(p, processes, **kwargs), Numbers(n), batch_size, drop_last=drop_last)
            for v in b.tolist()
        ]
        for p in range(processes)
    ]


def test_processes_get_contiguous_whole_steps():
    # 3 processes, 2 samples a step: 10 // 6 = 1 step each.
    assert shares(10, 3, True, batch_size=2) == [[0, 1], [2, 3], [4, 5]]


def test_processes_share_a_remainder_when_nothing_is_dropped():
    assert shares(10, 3, False) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_global_shuffle_is_one_permutation_cut_among_processes():
    loaders = [DataLoader(distributed(p, 2, seed=5), Numbers(20), batch_size=2, shuffle=True) for p in range(2)]
    epochs = [[[v for b in loader for v in b.tolist()] for loader in loaders] for _ in range(2)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(20))
    assert epochs[0] != epochs[1]
    assert len(loaders[0]) == 5


def test_a_global_shuffle_needs_a_seed():
    with pytest.raises(AssertionError, match=r"must set poptorch\.Options\.randomSeed\(\)"):
        DataLoader(distributed(0, 2), Numbers(4), shuffle=True)


def test_a_stream_is_not_partitioned():
    with pytest.raises(AssertionError, match="not supported for IterableDataset"):
        DataLoader(distributed(0, 2), Stream(4))
    DataLoader(distributed(0, 2), Stream(4), auto_distributed_partitioning=False)


def test_a_stream_without_worker_init_is_reported(caplog):
    DataLoader(options(), Stream(4), num_workers=2)
    assert "each worker will yield every sample" in caplog.text


# ---- the accessor


def test_an_accessor_hands_out_a_loader_in_order():
    accessor = AsynchronousDataAccessor(DataLoader(options(), Numbers(6), batch_size=2), buffer_size=1)
    assert [batch.tolist() for batch in accessor] == [[0, 1], [2, 3], [4, 5]]
    assert len(accessor) == 3
    accessor.terminate()


def test_an_epoch_that_is_left_early_starts_anew():
    loader = DataLoader(options(), Numbers(6), batch_size=2, mode=ASYNC)
    assert next(iter(loader)).tolist() == [0, 1]
    assert batches(loader) == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()


def test_an_error_in_the_data_reaches_the_caller():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise KeyError("no such sample")

    loader = DataLoader(options(), Broken(4), mode=ASYNC)
    with pytest.raises(KeyError, match="no such sample"):
        next(iter(loader))
    loader.terminate()


def test_an_asynchronous_loader_is_not_wrapped_again():
    loader = DataLoader(options(), Numbers(4), mode=ASYNC, async_options={"buffer_size": 2})
    with pytest.raises(poptorch.Error, match="already asynchronous"):
        AsynchronousDataAccessor(loader)
    loader.terminate()


def test_arguments_are_checked():
    with pytest.raises(AssertionError, match=r"poptorch\.Options"):
        DataLoader({}, Numbers(4))
    with pytest.raises(poptorch.Error, match="DataLoaderMode"):
        DataLoader(options(), Numbers(4), mode="async")
