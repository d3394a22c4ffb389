# SPDX-License-Identifier: Apache-2.0
"""The hub: what lies in its local cache, whether it can be reached, and a snapshot of a model as a folder."""

import os
import socket
import warnings
from pathlib import Path
from typing import Optional
from urllib.parse import urlsplit

from ipu_finetune.errors import DataError

__all__ = ["is_reachable", "model_snapshot", "push_folder"]

# What a plain Transformers model and its tokenizer consist of; other frameworks' weights stay where they are.
_MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_PICKLES = ["pytorch_model*.bin"]


def is_reachable(timeout: float = 3.0) -> bool:
    """Whether the hub answers a connection within `timeout` seconds.

    The hub's own client retries for half a minute before it gives up; a machine without a network should hear at once.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # only the proxy knows
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((endpoint.hostname or "", endpoint.port or 443), timeout=timeout):
            return True
    except OSError:
        return False


def model_snapshot(name: str, revision: Optional[str] = None, allow_pickle: bool = False) -> Path:
    """Return a folder with the model's files: from the cache, else fetched.

    The last part of the folder's name is the commit that was taken.

    Raises:
        DataError: the name is not on the hub, or neither hub nor cache can be had.
    """
    import huggingface_hub

    patterns = _MODEL_FILES + (_PICKLES if allow_pickle else [])
    online = is_reachable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return Path(
                huggingface_hub.snapshot_download(
                    name, revision=revision, allow_patterns=patterns, local_files_only=not online
                )
            )
    # The client raises its own HTTP errors (OSError), ValueError for a bad id, and a cache miss as FileNotFoundError.
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if online else "the hub cannot be reached and the cache lacks it"
        raise DataError(
            f"model.checkpoint={name}: {reason}; give a folder with --model PATH, or make the hub or its cache "
            "(HF_HOME) reachable"
        ) from error


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder to a model repository of the hub, made where it does not exist; return its address.

    Raises:
        DataError: the hub refused it or cannot be reached.
    """
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repository, commit_message="Fine-tuned with ipu-finetune")
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.push_to_hub={repository}: {str(error).strip().splitlines()[0]}; it lies in {folder} and can be "
            "uploaded from there"
        ) from error
    return str(address)
