# SPDX-License-Identifier: Apache-2.0
"""Training: one loop, driven by an engine for IPUs (real or emulated) or by the reference engine (CPU, CUDA).

Both targets share the loop, the order of the data, the batch arithmetic, the loss, the schedule and the checkpoints, so
that two runs of a recipe differ in their engine and in nothing else. optimum-graphcore's own `IPUTrainer` is not that
loop: it keeps its remainder rows and non-finite losses to itself, rebuilds layers under its optimizer when it switches
to evaluation, and has no counterpart on a GPU.
"""
