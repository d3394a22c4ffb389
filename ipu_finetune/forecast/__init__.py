# SPDX-License-Identifier: Apache-2.0
"""What a job should need, before anything is compiled; every figure is a forecast, none is measured."""
