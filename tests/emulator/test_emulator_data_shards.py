# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_data_sets import Numbers, Stream, values
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import DataLoader, DataLoaderMode

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def distributed(process, processes, seed=None, **kwargs):
    opts = options(**kwargs)
    opts.Distributed.configureProcessId(process, processes)
    if seed is not None:
        opts.randomSeed(seed)
    return opts


def shares(n, processes, drop_last, batch_size=1, **kwargs):
    loaders = [
        DataLoader(distributed(p, processes, **kwargs), Numbers(n), batch_size, drop_last=drop_last)
        for p in range(processes)
    ]
    return [values(loader) for loader in loaders], [len(loader) for loader in loaders]


def test_processes_get_contiguous_whole_steps():
    # 3 processes, 2 samples a step: 10 // 6 = 1 step each.
    assert shares(10, 3, True, batch_size=2) == ([[0, 1], [2, 3], [4, 5]], [1, 1, 1])
    assert shares(16, 2, True, D=2, batch_size=2) == ([list(range(8)), list(range(8, 16))], [2, 2])


def test_processes_share_a_remainder_when_nothing_is_dropped():
    assert shares(10, 3, False) == ([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]], [4, 3, 3])


def test_a_data_set_that_is_too_small_for_all_is_refused():
    with pytest.raises(poptorch.Error, match=r"10 elements, but one step of all 3 processes takes 12"):
        DataLoader(distributed(0, 3), Numbers(10), batch_size=4)


def test_a_part_counts_as_the_loaders_data_set():
    loader = DataLoader(distributed(1, 3), Numbers(10), batch_size=2)
    assert [int(value) for value in loader.dataset] == [2, 3]
    with pytest.raises(IndexError):
        loader.dataset[2]


def global_order(n, seed, epoch):
    """The permutation of an epoch: one generator, seeded once."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch + 1):
        order = torch.randperm(n, generator=generator)
    return order.tolist()


@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffle_is_one_permutation_cut_among_processes_with_the_rest_swapped_in_every_other_epoch(mode, workers):
    # 2 processes, 3 samples a step: of 20 samples each process gets 9 and 2 are left over.
    loaders = [
        DataLoader(distributed(p, 2, seed=5), Numbers(20), 3, shuffle=True, mode=mode, num_workers=workers)
        for p in range(2)
    ]
    for epoch in range(3):
        order = global_order(20, 5, epoch)
        first = 2 if epoch % 2 == 0 else 0
        assert [values(loader) for loader in loaders] == [order[first : first + 9], order[first + 9 : first + 18]]


def test_another_seed_is_another_order():
    one, other = (values(DataLoader(distributed(0, 2, seed=s), Numbers(40), 2, shuffle=True)) for s in (1, 2))
    assert one != other


def test_a_global_shuffle_needs_a_seed():
    with pytest.raises(AssertionError, match=r"must set poptorch\.Options\.randomSeed\(\)"):
        DataLoader(distributed(0, 2), Numbers(4), shuffle=True)


def test_what_cannot_be_partitioned_says_so():
    with pytest.raises(AssertionError, match="auto_distributed_partitioning not supported for IterableDataset"):
        DataLoader(distributed(0, 2), Stream(4))
    with pytest.raises(AssertionError, match="batch_size=None not allowed when using auto_distributed_partitioning"):
        DataLoader(distributed(0, 2), Numbers(4), batch_size=None)
    order = torch.utils.data.SequentialSampler(Numbers(4))
    with pytest.raises(poptorch.Error, match="`sampler` option is mutually exclusive with auto_distributed"):
        DataLoader(distributed(0, 2), Numbers(4), sampler=order)
    with pytest.raises(poptorch.Error, match="`batch_sampler` option is mutually exclusive with auto_distributed"):
        DataLoader(distributed(0, 2), Numbers(4), batch_sampler=torch.utils.data.BatchSampler(order, 2, True))


def test_partitioning_can_be_left_to_the_user():
    assert values(DataLoader(distributed(1, 2), Stream(4), auto_distributed_partitioning=False)) == [0, 1, 2, 3]
    order = torch.utils.data.SequentialSampler(Numbers(4))
    assert values(DataLoader(distributed(1, 2), Numbers(4), sampler=order, auto_distributed_partitioning=False)) == [
        0,
        1,
        2,
        3,
    ]


def test_elements_are_fetched_together_where_the_data_set_can():
    class Bulk(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(100 + index) for index in indices]

    assert values(DataLoader(distributed(1, 2), Bulk(8), batch_size=2)) == [104, 105, 106, 107]
