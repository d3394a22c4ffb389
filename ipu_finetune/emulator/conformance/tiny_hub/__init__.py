# SPDX-License-Identifier: Apache-2.0
"""A local hub of tiny random models, with which optimum-graphcore's test suite runs without a network.

```
python -m ipu_finetune.emulator.conformance.tiny_hub DIR
HF_HOME=DIR HF_HUB_OFFLINE=1 python -m pytest -p ipu_finetune.emulator.pytest_plugin …
```

What the suite asks of a hub is that names resolve, that architectures, layouts and tokenizers go together, and that
weights are some weights; it is what is written here. Tests that state what the published weights answer ("LABEL_0" with
0.504) fail with these, and have to.
"""

import os
from pathlib import Path
from typing import Union

from .layout import HubFolder
from .layouts import LAYOUTS, write_layout
from .models import MODELS, write_model, write_whisper_generation
from .samples import write_datasets

__all__ = ["HubFolder", "build"]


def build(folder: Union[str, "os.PathLike[str]"]) -> HubFolder:
    """Write the hub into `folder`, over an earlier one.

    `import poptorch` has to work: one architecture is optimum-graphcore's own.

    Args:
        folder: what `HF_HOME` will point to.

    Returns:
        what was written.
    """
    hub = HubFolder(Path(folder))
    for name in MODELS:
        write_model(name, hub.repository(name))
    for name in LAYOUTS:
        write_layout(name, hub.repository(name))
    # The speech tests read the generation's settings from the layout's repository.
    write_whisper_generation(hub.repository("openai/whisper-tiny"), hub.repository("Graphcore/whisper-tiny-ipu"))
    write_datasets(hub)
    return hub
