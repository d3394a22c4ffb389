# SPDX-License-Identifier: Apache-2.0
"""Chips and pods: facts, each with its source, and the figures that follow from them.

Peaks are computed from tiles, clock and the work of a tile per cycle, and agree with the datasheets' own. They say what
the silicon could do, not what a model reaches.
"""

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping

from ipu_finetune.errors import UsageError, did_you_mean

__all__ = ["CHIPS", "PODS", "Chip", "Pod", "pod"]


@dataclass(frozen=True)
class Chip:
    """One IPU.

    Attributes:
        name: as the vendor calls it.
        tiles: processor tiles.
        clock_ghz: clock of a tile; the value that the datasheet's peaks are made of.
        sram_kib_per_tile: memory of a tile, KiB.
        memory_mb: in-processor memory as the vendor rounds it, MB; the tiles hold `sram_mib`.
        fp16_flop_per_tile_cycle: of the matrix unit with float16 partials.
        fp32_flop_per_tile_cycle: of the matrix unit in float32.
        exchange_bytes_per_tile_cycle: what a tile receives over the exchange.
        sources: where each of these figures comes from.
    """

    name: str
    tiles: int
    clock_ghz: float
    sram_kib_per_tile: int
    memory_mb: int
    fp16_flop_per_tile_cycle: int
    fp32_flop_per_tile_cycle: int
    exchange_bytes_per_tile_cycle: int
    sources: Mapping[str, str]

    @property
    def fp16_teraflops(self) -> float:
        """Peak float16 TFLOP/s of one IPU."""
        return self.tiles * self.clock_ghz * self.fp16_flop_per_tile_cycle / 1e3

    @property
    def fp32_teraflops(self) -> float:
        """Peak float32 TFLOP/s of one IPU."""
        return self.tiles * self.clock_ghz * self.fp32_flop_per_tile_cycle / 1e3

    @property
    def exchange_terabytes_per_second(self) -> float:
        """Bandwidth between the tiles of one IPU, TB/s in one direction."""
        return self.tiles * self.clock_ghz * self.exchange_bytes_per_tile_cycle / 1e3

    @property
    def sram_mib(self) -> float:
        """In-processor memory of one IPU as its tiles add up, MiB."""
        return self.tiles * self.sram_kib_per_tile / 1024


@dataclass(frozen=True)
class Pod:
    """IPUs that one job may use.

    Attributes:
        name: as `--pod` takes it.
        chip: which IPU it holds.
        ipus: how many.
    """

    name: str
    chip: Chip
    ipus: int

    @property
    def fp16_petaflops(self) -> float:
        """Peak float16 PFLOP/s of the pod."""
        return self.ipus * self.chip.fp16_teraflops / 1e3

    @property
    def memory_gb(self) -> float:
        """In-processor memory of the pod, GB, as the vendor rounds it."""
        return self.ipus * self.chip.memory_mb / 1e3


_POD64_DATASHEET = "https://docs.graphcore.ai/projects/ipu-pod64-datasheet/en/latest/product-description.html"
_BOW256_DATASHEET = "https://docs.graphcore.ai/projects/bow-pod256-datasheet/en/latest/product-description.html"
_TARGET = "poplar::Target getters of IPU21, as recorded in a public repository's target constants"
_PROFILE = "Poplar profile output in a public repository: 1472 tiles, 624.0 kB per tile, 897.0 MB in total"

GC200 = Chip(
    name="GC200",
    tiles=1472,
    # MLPerf submissions state 1.33 GHz; the datasheet's 15.978 PFLOPS of 64 IPUs is made of 1.325.
    clock_ghz=1.325,
    sram_kib_per_tile=624,
    memory_mb=900,
    fp16_flop_per_tile_cycle=128,
    fp32_flop_per_tile_cycle=32,
    exchange_bytes_per_tile_cycle=4,
    sources={
        "tiles": _PROFILE,
        "clock_ghz": f"15.978 PFLOPS / 64 IPUs / (1472 tiles × 128 flop), {_POD64_DATASHEET}",
        "sram_kib_per_tile": _PROFILE,
        "memory_mb": "MLPerf training v1.0 to v2.0, Graphcore/systems/*.json",
        "fp16_flop_per_tile_cycle": _TARGET,
        "fp32_flop_per_tile_cycle": _TARGET,
        "exchange_bytes_per_tile_cycle": _TARGET,
    },
)

BOW = Chip(
    name="Bow",
    tiles=1472,
    clock_ghz=1.85,
    sram_kib_per_tile=624,
    memory_mb=900,
    fp16_flop_per_tile_cycle=128,
    fp32_flop_per_tile_cycle=32,
    exchange_bytes_per_tile_cycle=4,
    sources={
        "tiles": "https://electronicsforu.com/special/truly-innovative-tech/"
        "first-wow-processor-for-ultra-intelligent-ai-supercomputer",
        "clock_ghz": "MLPerf training v2.0, Graphcore/systems/*.json",
        "sram_kib_per_tile": _PROFILE,
        "memory_mb": "MLPerf training v2.0, Graphcore/systems/*.json",
        "fp16_flop_per_tile_cycle": f"89.23 PFLOPS / 256 IPUs / (1472 tiles × 1.85 GHz), {_BOW256_DATASHEET}",
        "fp32_flop_per_tile_cycle": f"22.31 PFLOPS / 256 IPUs / (1472 tiles × 1.85 GHz), {_BOW256_DATASHEET}",
        "exchange_bytes_per_tile_cycle": _TARGET,
    },
)

CHIPS: Dict[str, Chip] = {chip.name: chip for chip in (GC200, BOW)}

_SIZES = (4, 16, 64, 128, 256)
PODS: Dict[str, Pod] = {
    each.name: each
    for each in [Pod(f"pod{size}", GC200, size) for size in _SIZES]
    + [Pod(f"bow-pod{size}", BOW, size) for size in _SIZES]
}


def pod(name: str) -> Pod:
    """Return the pod of that name; the vendor's spelling (``IPU-POD16``, ``Bow-POD16``) serves as well.

    Raises:
        UsageError: there is no such pod; the message names the nearest.
    """
    plain = re.sub(r"^ipu-", "", name.strip().lower())
    if plain not in PODS:
        near = did_you_mean(plain, PODS)
        # The list, not three equally near names, where the number is what is wrong.
        raise UsageError(f"unknown pod '{name}'{near}; there are {', '.join(PODS)}")
    return PODS[plain]


def pods_by_size(chip: Chip) -> List[Pod]:
    """Return the pods of one chip, smallest first."""
    return sorted((each for each in PODS.values() if each.chip == chip), key=lambda each: each.ipus)
