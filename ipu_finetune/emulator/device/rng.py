# SPDX-License-Identifier: Apache-2.0
"""The random numbers of the device: one state per replica, apart from the host's generator.

Replica r starts from seed + r, so dropout differs between replicas; a further generator, equal on all replicas, serves
stochastic rounding, so that the replicas' weights stay the same bit for bit.
"""

import contextlib
import random
from typing import Iterator, List, Optional

import torch

from .errors import Error

__all__ = ["DeviceRandom"]

_LIMIT = 2**63 - 1


def _state_of(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed & _LIMIT).get_state()


class DeviceRandom:
    """Random state of all replicas.

    Args:
        seed: `Options.randomSeed`, or None to draw one from the operating system.
        replicas: R.
    """

    def __init__(self, seed: Optional[int], replicas: int) -> None:
        self.seed = random.SystemRandom().randrange(2**32) if seed is None else int(seed)
        self._states: List[torch.Tensor] = [_state_of(self.seed + replica) for replica in range(replicas)]
        self.rounding = torch.Generator().manual_seed(self.seed & _LIMIT)
        self._active: Optional[int] = None

    @contextlib.contextmanager
    def session(self) -> Iterator["DeviceRandom"]:
        """Within the block torch draws from the device's state; the host's state is untouched afterwards."""
        host = torch.get_rng_state()
        try:
            yield self
        finally:
            self._store()
            self._active = None
            torch.set_rng_state(host)

    def _store(self) -> None:
        if self._active is not None:
            self._states[self._active] = torch.get_rng_state()

    def use(self, replica: int) -> None:
        """Make torch draw from this replica's state from here on."""
        if replica != self._active:
            self._store()
            torch.set_rng_state(self._states[replica])
            self._active = replica

    @property
    def state(self) -> List[int]:
        """The seed and the whole state, as plain integers: exact to the bit and easy to store."""
        words = [self.seed]
        for state in [*self._states, self.rounding.get_state()]:
            words += state.view(torch.int64).tolist()
        return words

    @state.setter
    def state(self, words: List[int]) -> None:
        length = self.rounding.get_state().numel() // 8
        if len(words) != 1 + length * (len(self._states) + 1):
            raise Error(
                f"This random state has {len(words)} numbers; a model with {len(self._states)} replicas has "
                f"{1 + length * (len(self._states) + 1)}. It can only be restored with the same replication factor."
            )
        self.seed = int(words[0])
        states = [
            torch.tensor(words[1 + index * length : 1 + (index + 1) * length], dtype=torch.int64).view(torch.uint8)
            for index in range(len(self._states) + 1)
        ]
        self._states, rounding = states[:-1], states[-1]
        self.rounding.set_state(rounding)
