# SPDX-License-Identifier: Apache-2.0
"""The CUDA target, where there is one."""

import json

import pytest
import torch

from ipu_finetune.evaluation.run import finetune

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which this machine has not"),
]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_cuda_trains_as_the_cpu_does(tiny_recipe, tmp_path):
    recipe = tiny_recipe(training__optimizer="sgd", training__learning_rate=0.1)
    for name in ("cpu", "cuda"):
        run = finetune(recipe, target=name, output=str(tmp_path / name))
        assert run.metrics["examples"] == 12
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_cuda_trains_in_half_precisions(tiny_recipe, tmp_path, precision):
    recipe = tiny_recipe(training__precision=precision)
    finetune(recipe, target="cuda", output=str(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["nonfinite_steps"] == 0
    assert record["loss"]["last"] < record["loss"]["first"]
