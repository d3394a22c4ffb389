# SPDX-License-Identifier: Apache-2.0
"""A look-alike of Horovod, of which scripts for IPUs use `horovod.torch` to exchange values between instances.

Gradients are not its business: the IPUs reduce them. A real Horovod that is installed is left in its place.
"""
