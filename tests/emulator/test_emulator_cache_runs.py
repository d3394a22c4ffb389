# SPDX-License-Identifier: Apache-2.0
"""The executable cache as a script meets it: what makes a model compile again, and what does not (U37)."""

import pytest
import torch

from ipu_finetune.emulator import poptorch


class Net(torch.nn.Module):
    def __init__(self, width=4, dropout=0.1):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        y = self.dropout(self.linear(x))
        return poptorch.identity_loss((y * y).sum(), reduction="sum")


def compiled(folder, width=4, rows=2, accumulation=1, seed=1, learning_rate=0.1, dropout=0.1):
    options = poptorch.Options()
    options.randomSeed(seed)
    options.Training.gradientAccumulation(accumulation)
    options.enableExecutableCaching(None if folder is None else str(folder))
    model = Net(width, dropout)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=learning_rate, use_combined_accum=False)
    executor = poptorch.trainingModel(model, options=options, optimizer=optimizer)
    executor.compile(torch.ones(rows * accumulation, width))
    outcome = executor.emulation.executable_cache
    executor.destroy()
    return outcome


def test_u37_other_length_misses_other_learning_rate_hits_other_dropout_misses(tmp_path):
    runs = [{"width": 128}, {"width": 384}, {"width": 128, "learning_rate": 0.2}, {"width": 128, "dropout": 0.2}]
    assert [compiled(tmp_path, **run) for run in runs] == ["miss", "miss", "hit", "miss"]


def test_neither_weights_nor_seed_make_a_model_compile_again(tmp_path):
    assert [compiled(tmp_path), compiled(tmp_path), compiled(tmp_path, seed=2)] == ["miss", "hit", "hit"]


@pytest.mark.parametrize("change", [{"width": 8}, {"rows": 3}, {"accumulation": 2}])
def test_another_shape_or_option_is_a_miss(tmp_path, change):
    assert [compiled(tmp_path), compiled(tmp_path, **change), compiled(tmp_path)] == ["miss", "miss", "hit"]


def test_a_damaged_entry_is_made_again(tmp_path):
    compiled(tmp_path)
    (entry,) = tmp_path.glob("*.emulated")
    entry.write_bytes(entry.read_bytes()[:-2])
    assert [compiled(tmp_path), compiled(tmp_path)] == ["miss", "hit"]


def test_without_a_folder_it_is_off():
    assert compiled(None) == "off"


def test_u36_a_folder_that_is_a_file_costs_nothing_but_the_cache(tmp_path):
    (tmp_path / "file").write_text("")
    assert compiled(tmp_path / "file") == "off"
