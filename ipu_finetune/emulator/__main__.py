# SPDX-License-Identifier: Apache-2.0
"""`python -m ipu_finetune.emulator SCRIPT ARGS...` runs an unmodified script on the emulator."""

import sys

from ipu_finetune.emulator.script import command
from ipu_finetune.errors import IpuFinetuneError

_PROG = "python -m ipu_finetune.emulator"


def _main() -> int:
    try:
        return command(sys.argv[1:], _PROG)
    except IpuFinetuneError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_main())
