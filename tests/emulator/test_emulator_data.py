# SPDX-License-Identifier: Apache-2.0
import functools

import pytest
import torch
from emulator_data_sets import Growing, Numbers, Stream, batches, to_four, to_sizes, values
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import DataLoader, DataLoaderMode

SYNC, ASYNC, REBATCHED = DataLoaderMode.Sync, DataLoaderMode.Async, DataLoaderMode.AsyncRebatched

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_an_item_is_a_combined_batch():
    loader = DataLoader(options(D=2, A=3, R=2), Numbers(50), batch_size=2)
    assert loader.combinedBatchSize == 24
    assert batches(loader) == [list(range(24)), list(range(24, 48))]
    assert len(loader) == 2


def test_replica_groups_need_less_data():
    opts = options(R=4)
    opts.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    assert DataLoader(opts, Numbers(8), batch_size=3).combinedBatchSize == 6


def test_the_loader_freezes_and_keeps_its_options():
    opts = options(D=2)
    loader = DataLoader(opts, Numbers(4), batch_size=None)
    assert loader.options is opts
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(3)


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_mode_yields_the_same_batches_in_every_epoch(mode, workers):
    loader = DataLoader(options(D=2), Numbers(13), batch_size=3, mode=mode, num_workers=workers)
    expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert batches(loader) == expected
    assert batches(loader) == expected
    assert len(loader) == 2


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
def test_an_incomplete_last_batch_is_kept_on_request_and_reported(mode, caplog):
    loader = DataLoader(options(D=2), Numbers(13), batch_size=3, drop_last=False, mode=mode)
    expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
    assert batches(loader) == expected
    assert batches(loader) == expected
    assert len(loader) == 3
    assert "(13) is not divisible by the number of elements processed per step (6)" in caplog.text
    assert "will have a batch size of 1" in caplog.text


def test_1003_records_give_31_batches_or_32_with_the_rest():
    opts = options(D=4, R=2)
    loader = DataLoader(opts, Numbers(1003), batch_size=4)
    assert loader.combinedBatchSize == 32
    assert (len(loader), len(values(loader))) == (31, 1003 - 11)
    whole = DataLoader(opts, Numbers(1003), batch_size=4, drop_last=False)
    assert len(whole) == 32
    assert [len(batch) for batch in batches(whole)] == [32] * 31 + [11]
    assert values(whole) == list(range(1003))


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
def test_u64_four_replicas_of_one_process_see_each_of_64_records_once(mode):
    opts = options(R=4, outputMode=poptorch.OutputMode.All)
    loader = DataLoader(opts, Numbers(64), batch_size=2, mode=mode, shuffle=True)
    model = poptorch.inferenceModel(lambda ids: ids + 0, opts)
    seen = [value for batch in loader for value in model(batch).tolist()]
    assert sorted(seen) == list(range(64))
    assert len(loader) == 64 // (2 * 4)


def test_an_incomplete_batch_does_not_fit_the_compiled_model():
    loader = DataLoader(options(D=2), Numbers(9), batch_size=3, drop_last=False)
    model = poptorch.inferenceModel(lambda x: x * 1, options(D=2))
    first, last = loader
    model(first)
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(last)


def test_shuffling_covers_everything_in_a_new_order_each_epoch():
    loader = DataLoader(options(), Numbers(40), batch_size=40, shuffle=True)
    one, other = batches(loader)[0], batches(loader)[0]
    assert sorted(one) == sorted(other) == list(range(40))
    assert one != other


def test_batching_can_be_switched_off():
    loader = DataLoader(options(D=2), Numbers(3), batch_size=None)
    assert [int(item) for item in loader] == [0, 1, 2]
    assert loader.combinedBatchSize is None


# ---- rebatching


def test_rebatching_loses_no_workers_remainder():
    # Seven workers hold 15, the last 11 of 101 samples: 6 * (15 // 6) + 11 // 6 = 13 whole batches of 6 in all, and
    # 101 // 6 = 16 with a rest of 5 once they are put together.
    def full_and_rest(mode, drop_last):
        loader = DataLoader(
            options(), Stream(101), batch_size=6, mode=mode, num_workers=7, drop_last=drop_last, worker_init_fn=int
        )
        return [
            (sizes.count(6), [size for size in sizes if size != 6], len(loader))
            for sizes in [[len(batch) for batch in loader] for _ in range(2)]
        ]

    assert full_and_rest(SYNC, True) == [(13, [], 16)] * 2
    assert full_and_rest(REBATCHED, True) == [(16, [], 16)] * 2
    assert full_and_rest(REBATCHED, False) == [(16, [5], 17)] * 2
    assert full_and_rest(ASYNC, False) == [(16, [5], 17)] * 2


@pytest.mark.parametrize("piece", [1, 3, 4])
def test_rebatching_keeps_every_sample_once_whatever_the_pieces(piece):
    loader = DataLoader(
        options(D=2),
        Stream(21),
        batch_size=2,
        mode=REBATCHED,
        num_workers=3,
        rebatched_worker_size=piece,
        drop_last=False,
        worker_init_fn=int,
    )
    found = batches(loader)
    assert [len(batch) for batch in found] == [4, 4, 4, 4, 4, 1]
    assert sorted(value for batch in found for value in batch) == list(range(21))


def test_workers_load_pieces_of_the_size_asked_for():
    loader = DataLoader(
        options(D=2), Numbers(10), batch_size=3, mode=REBATCHED, rebatched_worker_size=4, collate_fn=to_sizes
    )
    # Pieces of 4, 4 and 2; batches of 6.
    assert batches(loader) == [[4, 4, 4, 4, 4, 4]]
    whole = DataLoader(options(D=2), Numbers(10), batch_size=3, mode=REBATCHED, drop_last=False, collate_fn=to_sizes)
    assert batches(whole) == [[6] * 6, [4] * 4]


@pytest.mark.parametrize("piece", [0, 5])
def test_a_workers_piece_fits_the_combined_batch(piece):
    with pytest.raises(AssertionError, match=rf"rebatched_worker_size \({piece}\) .* combined batch size \(4\)"):
        DataLoader(options(D=2), Stream(8), batch_size=2, mode=REBATCHED, rebatched_worker_size=piece)


def test_a_combined_batch_of_one_cannot_be_put_together():
    with pytest.raises(AssertionError, match="rebatched_size must be None or greater than 1, got 1"):
        DataLoader(options(), Numbers(8), mode=REBATCHED)


def test_a_worker_size_above_the_batch_is_of_no_matter_where_nothing_is_put_together():
    assert batches(DataLoader(options(), Numbers(4), batch_size=2, rebatched_worker_size=9)) == [[0, 1], [2, 3]]


# ---- batch samplers


def sampler(n, size):
    return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Numbers(n)), size, drop_last=False)


def test_a_batch_samplers_micro_batches_are_joined(caplog):
    loader = DataLoader(options(D=2), Numbers(11), batch_sampler=sampler(11, 2))
    assert loader.combinedBatchSize == 4
    # Micro-batches of 2, 2, 2, 2, 2, 1: six of them are three whole steps.
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len(loader) == 3
    assert batches(DataLoader(options(D=4), Numbers(11), batch_sampler=sampler(11, 2))) == [list(range(8))]
    assert not caplog.records
    whole = DataLoader(options(D=4), Numbers(11), batch_sampler=sampler(11, 2), drop_last=False)
    assert batches(whole) == [list(range(8)), [8, 9, 10]]
    assert len(whole) == 2
    assert "(6) is not divisible by the number of batches processed per step (4)" in caplog.text


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
@pytest.mark.parametrize("drop_last", [True, False])
def test_each_micro_batch_of_a_sampler_is_collated_by_itself(mode, drop_last):
    loader = DataLoader(
        options(D=2), Numbers(10), batch_sampler=Growing(10), collate_fn=to_four, mode=mode, drop_last=drop_last
    )
    # Batches of 1, 2, 3 and 4 samples, padded to 4, two per call.
    expected = [[0, -1, -1, -1, 1, 2, -1, -1], [3, 4, 5, -1, 6, 7, 8, 9]]
    assert batches(loader) == expected
    assert batches(loader) == expected


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
def test_a_samplers_last_step_may_be_short(mode):
    loader = DataLoader(
        options(D=3), Numbers(10), batch_sampler=Growing(10), collate_fn=to_four, mode=mode, drop_last=False
    )
    assert [len(batch) for batch in loader] == [12, 4]


@pytest.mark.parametrize("mode", [SYNC, ASYNC, REBATCHED])
def test_a_batch_sampler_may_have_neither_length_nor_batch_size(mode, caplog):
    lists = [[0, 1], [2, 3], [4, 5]]
    loader = DataLoader(options(D=2), Numbers(6), batch_sampler=Endless(lists), mode=mode, drop_last=False)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5]]
    assert loader.combinedBatchSize is None
    assert "`batch_sampler` __len__ method is not implemented" in caplog.text
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader)


class Endless:
    def __init__(self, lists):
        self.lists = lists

    def __iter__(self):
        return iter(self.lists)


def test_a_batch_sampler_excludes_what_it_decides():
    for more in ({"batch_size": 2}, {"shuffle": True}):
        with pytest.raises(poptorch.Error, match="mutually exclusive with batch_size, shuffle"):
            DataLoader(options(), Numbers(11), batch_sampler=sampler(11, 2), **more)


# ---- iterable data sets


def test_a_stream_has_a_length_only_if_it_says_so():
    class Unsized(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([torch.tensor(1), torch.tensor(2)])

    assert len(DataLoader(options(), Stream(7), batch_size=2)) == 3
    loader = DataLoader(options(), Unsized(), batch_size=2)
    with pytest.raises(TypeError, match=r"'Unsized' has no len\(\)"):
        len(loader)


def test_a_stream_without_worker_init_is_reported(caplog):
    DataLoader(options(), Stream(4), num_workers=1)
    DataLoader(options(), Stream(4), num_workers=2, worker_init_fn=int)
    assert not caplog.records
    DataLoader(options(), Stream(4), num_workers=2)
    assert "num_workers=2 but no worker_init_fn specified" in caplog.text


# ---- arguments


def test_arguments_are_checked():
    with pytest.raises(AssertionError, match=r"poptorch\.Options"):
        DataLoader({}, Numbers(4))
    with pytest.raises(poptorch.Error, match=r"DataLoaderMode.*got 'async'"):
        DataLoader(options(), Numbers(4), mode="async")
    with pytest.raises(poptorch.Error, match=r"Unknown async_options \['depth'\]"):
        DataLoader(options(), Numbers(4), mode=ASYNC, async_options={"depth": 1})
    with pytest.raises(AssertionError, match="manually specify the rebatched_size"):
        DataLoader(options(), Numbers(4), batch_size=2, mode=REBATCHED, async_options={"rebatched_size": 2})
    with pytest.raises(poptorch.Error, match="buffer_size must be at least 1, got 0"):
        DataLoader(options(), Numbers(4), mode=ASYNC, async_options={"buffer_size": 0})


def test_options_without_effect_are_reported(caplog):
    DataLoader(options(), Numbers(4), async_options={"buffer_size": 2})
    assert "async_options have no effect in DataLoaderMode.Sync: ['buffer_size']" in caplog.text


def test_a_trainer_may_put_its_own_arguments_in_front_for_a_while(monkeypatch):
    # optimum-graphcore builds Transformers' loaders this way.
    put = functools.partialmethod(DataLoader.__init__, options(D=2), drop_last=True, mode=ASYNC, worker_init_fn=int)
    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "__init__", put)
        patch.setattr(torch.utils.data, "DataLoader", DataLoader)
        data = Numbers(9)
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, sampler=torch.utils.data.SequentialSampler(data), pin_memory=True
        )
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
