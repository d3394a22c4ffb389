# SPDX-License-Identifier: Apache-2.0
"""The shipped IPU configs and our reading of them, held against optimum-graphcore's own `IPUConfig`."""

import json
import subprocess
import sys

import pytest

# optimum-graphcore needs a poptorch; installing the emulator's is for the life of a process, so it gets one of its own.
PROLOGUE = """\
import dataclasses, inspect, json, sys, tempfile, warnings
import ipu_finetune.emulator as e
e.install()
from optimum.graphcore import IPUConfig
from ipu_finetune import ipu_config
warnings.simplefilter("error")
"""

BODY = """\
names = ipu_config.config_names()
loaded = {}
for name in names:
    config = IPUConfig.from_pretrained(str(ipu_config.config_path(name).parent))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = ipu_config.resolve(ipu_config.Ipu(folder))
    ours = ipu_config.resolve(ipu_config.Ipu(name))
    built = IPUConfig(**ours)
    loaded[name] = {
        "theirs": {key: getattr(config, key) for key in ours},
        "ours": ours,
        "built": {key: getattr(built, key) for key in ours},
        "again": {key: again.get(key) for key in ours},
    }
fields = sorted(inspect.signature(IPUConfig.__init__).parameters)
mine = sorted(field.name for field in dataclasses.fields(ipu_config.Ipu))
print(json.dumps({"loaded": loaded, "fields": fields, "mine": mine}))
"""


@pytest.fixture(scope="module")
def compared():
    done = subprocess.run([sys.executable, "-c", PROLOGUE + BODY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_shipped_config_loads_and_resolves_to_what_ipuconfig_makes_of_it(compared):
    assert set(compared["loaded"]) >= {"bert-large", "bert-base", "minilm", "distilbert"}
    for name, views in compared["loaded"].items():
        assert views["ours"] == views["theirs"], name


def test_ipuconfig_takes_the_resolved_settings_as_they_are(compared):
    for name, views in compared["loaded"].items():
        assert views["built"] == views["ours"], name


def test_a_config_that_ipuconfig_saved_reads_back_the_same(compared):
    for name, views in compared["loaded"].items():
        assert views["again"] == views["ours"], name


def test_the_recipes_ipu_section_has_exactly_ipuconfigs_fields(compared):
    theirs = set(compared["fields"]) - {"self", "kwargs", "gradient_accumulation_steps"}
    assert set(compared["mine"]) - {"config", "pod"} == theirs
