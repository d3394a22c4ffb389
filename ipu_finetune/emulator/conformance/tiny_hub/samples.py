# SPDX-License-Identifier: Apache-2.0
"""Generated sound and pictures in place of those that optimum-graphcore's tests download."""

import math
from pathlib import Path
from typing import Any, Dict, List

from .layout import HubFolder

__all__ = ["picture", "sound", "write_datasets"]

_RATE = 16_000


def sound(index: int, seconds: float) -> List[float]:
    """Return a rising tone at 16 kHz, with values in [-0.5, 0.5]; `index` sets its pitch."""
    count = int(seconds * _RATE)
    pitch = 110.0 + 11.0 * index
    return [0.5 * math.sin(2 * math.pi * pitch * t * (1 + t / count) / _RATE) for t in range(count)]


def picture(mode: str = "RGB", width: int = 64, height: int = 48) -> Any:
    """Return a `PIL.Image` of crossing gradients in one of PIL's modes, such as `RGBA`, `LA` or `L`."""
    from PIL import Image

    image = Image.new("RGB", (width, height))
    image.putdata(
        [(255 * x // width, 255 * y // height, (7 * x * y) % 256) for y in range(height) for x in range(width)]
    )
    return image.convert(mode)


def _pictures(folder: Path) -> List[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for mode in ("RGBA", "LA", "L"):
        path = folder / f"{mode.lower()}.png"
        picture(mode).save(str(path))
        paths.append(str(path.resolve()))
    return paths


def write_datasets(hub: HubFolder) -> None:
    """Write the data sets that the tests load by name.

    Sound is stored as plain lists of samples, not as files: decoding files takes packages that the tests do not need.
    """
    # Some tests take row 40 of the sorted set; only the first two and that one are as long as a spoken word.
    clips: List[Dict[str, Any]] = [
        {"array": sound(row, 1.0 if row in (0, 1, 40) else 0.05), "sampling_rate": _RATE, "path": f"{row}.flac"}
        for row in range(41)
    ]
    hub.dataset(
        "hf-internal-testing/librispeech_asr_dummy",
        "clean",
        "validation",
        {
            "id": [f"0000-{row:04d}" for row in range(41)],
            "file": [clip["path"] for clip in clips],
            "audio": clips,
            "text": [f"TONE {row}" for row in range(41)],
        },
    )
    hub.dataset(
        "anton-l/superb_dummy",
        "ic",
        "test",
        {"speech": [sound(0, 1.0), sound(1, 1.0)], "label": [0, 1]},
    )
    files = _pictures(hub.home / "pictures")
    hub.dataset("hf-internal-testing/fixtures_image_utils", "image", "test", {"file": files})
