# SPDX-License-Identifier: Apache-2.0
"""The file that `compileAndExport` and `save` write.

```
ipu-finetune emulated executable     a first line that tells it from any other file
{"format": 1, "poptorch": ...}       one line of JSON: versions, and the length and SHA-256 of each section
<section>...                         `executable`, and `model` unless export_model=False
```
Each section is what `torch.save` writes. Versions and hashes are checked before anything is unpickled.
"""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Union

import torch

from ..device.errors import Error
from ._version import __version__

__all__ = ["DEFAULT_NAME", "ExecutableFile", "write_file"]

#: what a file is called when only its folder is given
DEFAULT_NAME = "model.poptorch"

_MAGIC = b"ipu-finetune emulated executable\n"
_FORMAT = 1

PathLike = Union[str, "os.PathLike[str]"]


def _resolve(filename: PathLike) -> Path:
    path = Path(filename)
    return path / DEFAULT_NAME if path.is_dir() else path


def write_file(filename: PathLike, sections: Mapping[str, Any]) -> Path:
    """Write sections; the file appears whole or not at all.

    Args:
        filename: a file, or a folder that gets `model.poptorch`.
        sections: name -> what `torch.save` can store.

    Raises:
        Error: a section cannot be pickled.
    """
    path = _resolve(filename)
    stored = {name: _pickled(name, value) for name, value in sections.items()}
    header = {
        "format": _FORMAT,
        "poptorch": __version__,
        "torch": torch.__version__,
        "sections": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in stored.items()
        ],
    }
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(aside, "wb") as stream:
            stream.write(_MAGIC)
            stream.write(json.dumps(header).encode() + b"\n")
            for content in stored.values():
                stream.write(content)
        os.replace(str(aside), str(path))
    finally:
        if aside.exists():
            aside.unlink()
    return path


def _pickled(name: str, value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # whatever the user's own __reduce__ and __getstate__ raise
        raise Error(
            f"The {name} could not be serialised ({type(error).__name__}: {error}). A model's class must be importable "
            "by name: defined in a module, not in a function. To export the executable alone use export_model=False, "
            "and load it with PoplarExecutor.loadExecutable()."
        ) from error
    return stream.getvalue()


class ExecutableFile:
    """A file that was opened and found whole.

    Args:
        filename: a file, or a folder that has `model.poptorch`.

    Raises:
        AssertionError: there is no such file, it is another kind of file, it is damaged, or another version wrote it.
    """

    def __init__(self, filename: PathLike) -> None:
        self.path = _resolve(filename)
        if not self.path.is_file():
            raise AssertionError(f"Invalid file {self.path}: there is no such file")
        with open(self.path, "rb") as stream:
            if stream.readline(len(_MAGIC)) != _MAGIC:
                raise self._invalid("it was not written by the emulator's compileAndExport() or save()")
            header = self._header(stream.readline())
            self._sections: Dict[str, bytes] = {}
            for section in header["sections"]:
                content = stream.read(section["bytes"])
                if hashlib.sha256(content).hexdigest() != section["sha256"]:
                    raise self._invalid(f"it is damaged: section '{section['name']}' is not what was written")
                self._sections[section["name"]] = content

    def _invalid(self, why: str) -> AssertionError:
        return AssertionError(f"Invalid file {self.path}: {why}. Export the model again.")

    def _header(self, line: bytes) -> Dict[str, Any]:
        try:
            header = json.loads(line)
            known = (header["format"], header["poptorch"], header["sections"])
        except (ValueError, KeyError, TypeError):
            raise self._invalid("it is damaged: its header cannot be read") from None
        if known[:2] != (_FORMAT, __version__):
            raise AssertionError(
                f"Invalid file {self.path}: it was written by version {known[1]} (format {known[0]}), and this is "
                f"version {__version__} (format {_FORMAT}). The versions must match exactly: export the model again."
            )
        return header

    def has(self, section: str) -> bool:
        """Whether the file has the section."""
        return section in self._sections

    def read(self, section: str) -> Any:
        """Return what a section holds. This runs code that is in the file, as every unpickling does."""
        return torch.load(io.BytesIO(self._sections[section]), weights_only=False)
