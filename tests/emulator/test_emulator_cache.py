# SPDX-License-Identifier: Apache-2.0
"""The executable cache: the same graph with the same options is a hit, anything else a miss."""

import pytest
import torch

from ipu_finetune.emulator import poptorch


class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return poptorch.identity_loss((y * y).sum(), reduction="sum")


def compiled(folder, width=4, rows=2, accumulation=1, seed=1):
    options = poptorch.Options()
    options.randomSeed(seed)
    options.Training.gradientAccumulation(accumulation)
    options.enableExecutableCaching(None if folder is None else str(folder))
    executor = poptorch.trainingModel(Net(width), options=options)
    executor.compile(torch.ones(rows * accumulation, width))
    answer = executor.emulation.executable_cache
    executor.destroy()
    return answer


def test_the_second_compilation_is_a_hit_whatever_weights_and_seed(tmp_path):
    assert [compiled(tmp_path), compiled(tmp_path), compiled(tmp_path, seed=2)] == ["miss", "hit", "hit"]


@pytest.mark.parametrize("change", [{"width": 8}, {"rows": 3}, {"accumulation": 2}])
def test_another_shape_graph_or_option_is_a_miss(tmp_path, change):
    assert [compiled(tmp_path), compiled(tmp_path, **change), compiled(tmp_path)] == ["miss", "miss", "hit"]


def test_a_damaged_entry_is_a_miss_and_is_written_again(tmp_path):
    compiled(tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_text("{")
    assert [compiled(tmp_path), compiled(tmp_path)] == ["miss", "hit"]
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_without_a_folder_it_is_off():
    assert compiled(None) == "off"
