# SPDX-License-Identifier: Apache-2.0
"""BERT-large at its real size through the recipe's own 4-stage pipeline, on short sequences.

At the recipe's length of 384 it is a benchmark (`benchmarks/bert_large_memory.py`).
"""

import json
import os
import shutil
import subprocess
import sys

from tests.conftest import ROOT


def test_bert_large_makes_two_updates_in_bounded_memory(tiny_data, tmp_path):
    command = [sys.executable, "-m", "ipu_finetune", "bert-large", "squad", "--data", str(tiny_data)]
    command += ["--target", "emulator", "--max-steps", "2", "--output", str(tmp_path / "run"), "--quiet"]
    settings = ["model.init=config", "training.global_batch_size=8", "task.max_length=40", "task.doc_stride=8"]
    settings += ["task.validate_every=9", "ipu.executable_cache_dir=disabled"]
    command += [part for setting in settings for part in ("--set", setting)]
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(command, cwd=str(ROOT), env=environ, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["hardware"]["layers_per_ipu"] == [3, 7, 7, 7]
    assert record["batch"]["updates"] == 2
    assert record["peak_memory_bytes"] < 12 * 2**30
    # Drawn weights and 40 positions: the loss of a guess is ln 40 = 3.7.
    assert 3 < record["loss"]["first"] < 5
    shutil.rmtree(tmp_path / "run")  # 5 GB that nobody will look at
