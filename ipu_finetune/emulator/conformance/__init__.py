# SPDX-License-Identifier: Apache-2.0
"""How far the emulator is PopTorch: other people's test suites, run on it and counted.

```
python -m ipu_finetune.emulator.conformance --tests CHECKOUT/tests
```

The suites are obtained outside this repository and run as they are. `suites.py` says which there are, `runner.py` runs
them file by file, `recorder.py` takes down outcomes within pytest, `reasons.py` classes the failures by evidence and
`report.py` writes the table.
"""
