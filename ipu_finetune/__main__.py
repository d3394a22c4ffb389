# SPDX-License-Identifier: Apache-2.0
"""`python -m ipu_finetune` is the command line."""

import sys

from ipu_finetune.cli import main

if __name__ == "__main__":
    sys.exit(main())
