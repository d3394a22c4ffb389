# SPDX-License-Identifier: Apache-2.0
"""What executes: batches, weights, layout, losses, updates and random numbers of the emulated IPU."""
