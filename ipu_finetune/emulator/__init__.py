# SPDX-License-Identifier: Apache-2.0
"""An emulated IPU: stand-ins for `poptorch`, `popart`, `popdist` and `horovod`, and the device behind them.

```python
from ipu_finetune import emulator

emulator.install()
import poptorch  # the look-alike; unmodified optimum-graphcore works with it
```

Nothing is put into `sys.modules` before `install()`, and a real PopTorch is never hidden unless asked by name with
`install(force=True)`. The environment variable IPU_FINETUNE_EMULATED_HARDWARE names the IPU generation that
`poptorch.ipuHardwareVersion()` claims: 2 (the default), 21 for Bow, 1, or 0 for a machine without an IPU.

An emulated run proves numerics, layout and plumbing. Its speed says nothing about an IPU's.

The rooms: `poptorch/`, `popart/`, `popdist/` and `horovod/` hold the names that scripts use; `device/` is what
executes. Only `device/execution.py` knows how a micro-batch is run, so that another way of running it needs no change
elsewhere.
"""

from ._install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
