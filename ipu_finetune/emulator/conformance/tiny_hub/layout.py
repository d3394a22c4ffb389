# SPDX-License-Identifier: Apache-2.0
"""The folders that `from_pretrained` and `load_dataset` look into when there is no network.

Models, below `HF_HOME/hub` (huggingface_hub: "Understand caching"):

```
models--<owner>--<name>/refs/main                 the revision, 40 hex digits
models--<owner>--<name>/snapshots/<revision>/…    the files
```

Data sets, below `HF_HOME/datasets` (datasets: what the builder `cache` reads):

```
<owner>___<name>/<config>/0.0.0/<revision>/dataset_info.json
<owner>___<name>/<config>/0.0.0/<revision>/<name>-<split>.arrow
```
"""

import hashlib
from pathlib import Path
from typing import Any, Dict, List

__all__ = ["HubFolder"]

_VERSION = "0.0.0"


def _revision(name: str) -> str:
    # A revision is a git commit's name; any 40 hex digits do, and the same ones each time keep a rebuild identical.
    return hashlib.sha1(name.encode("utf-8")).hexdigest()


class HubFolder:
    """A folder to point `HF_HOME` to.

    Args:
        home: the folder; made when it does not exist.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repositories: List[str] = []
        self.datasets: List[str] = []

    def repository(self, name: str) -> Path:
        """Return the folder for the files of the model repository `owner/name` (or `name`), ready to be written to."""
        folder = self.home / "hub" / ("models--" + name.replace("/", "--"))
        snapshot = folder / "snapshots" / _revision(name)
        snapshot.mkdir(parents=True, exist_ok=True)
        refs = folder / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(_revision(name), encoding="utf-8")
        if name not in self.repositories:
            self.repositories.append(name)
        return snapshot

    def dataset(self, name: str, config: str, split: str, columns: Dict[str, List[Any]]) -> Path:
        """Write one split of a data set as if it had been downloaded and prepared before.

        Args:
            name: `owner/name`.
            config: the configuration's name, the second argument of `load_dataset`.
            split: such as `validation`.
            columns: the values of each column, of the same length.

        Returns:
            the folder of the prepared data set.
        """
        import datasets
        from datasets.arrow_writer import ArrowWriter
        from datasets.naming import camelcase_to_snakecase

        owner, _, short = name.rpartition("/")
        snake = camelcase_to_snakecase(short)
        folder = self.home / "datasets" / "___".join(filter(None, [owner, snake])) / config / _VERSION / _revision(name)
        folder.mkdir(parents=True, exist_ok=True)
        rows = datasets.Dataset.from_dict(columns)
        with ArrowWriter(features=rows.features, path=str(folder / f"{snake}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            count, size = writer.finalize()
        info = datasets.DatasetInfo(
            features=rows.features,
            builder_name="cache",
            dataset_name=snake,
            config_name=config,
            version=_VERSION,
            splits={split: {"name": split, "num_bytes": size, "num_examples": count, "dataset_name": snake}},
        )
        info.write_to_directory(str(folder))
        if name not in self.datasets:
            self.datasets.append(name)
        return folder
