# SPDX-License-Identifier: Apache-2.0
"""From a recipe's `ipu` section to the settings of optimum-graphcore's `IPUConfig`, checked before anything heavy.

The settings are those of the config file with the section's own on top. Training and inference are each checked against
their own number of IPUs.
"""

from typing import Any, Dict, List, Optional, Tuple

from ipu_finetune._ipu_fields import Ipu
from ipu_finetune._ipu_files import (
    AUTO,
    SETTINGS,
    Facts,
    IpuConfigFile,
    config_names,
    config_path,
    facts,
    match,
    read,
    setting_problem,
    settle,
)
from ipu_finetune._layers import WILDCARD, expand_layers, layer_table, length_problem
from ipu_finetune.errors import DoesNotFitError, RecipeError, UsageError
from ipu_finetune.hardware import pod, pods_by_size

__all__ = [
    "Facts",
    "Ipu",
    "IpuConfigFile",
    "config_names",
    "config_path",
    "expand_layers",
    "facts",
    "layer_table",
    "match",
    "notes",
    "problems",
    "read",
    "replicas",
    "resolve",
    "settle",
]

_MODES = ("", "inference_")
# optimum-graphcore's own value where neither the file nor the recipe gives one.
_MATMUL_PROPORTION = 0.2
_LAYOUT = ("config", *(f"{mode}{key}" for mode in _MODES for key in ("layers_per_ipu", "ipus_per_replica")))


def resolve(ipu: Ipu, *, model_layers: Optional[int] = None, vocab_size: Optional[int] = None) -> Dict[str, Any]:
    """Return the arguments of `IPUConfig` for a recipe's `ipu` section.

    Wildcards are expanded and the replicas counted. Gradient accumulation is not among them: it follows from the
    global batch.

    Args:
        ipu: the section; its config must be named (see `settle` for ``auto``).
        model_layers: encoder layers of the model; None leaves wildcards in place and the sum unchecked.
        vocab_size: rows of the model's embedding; None leaves the serialization factor unchecked.

    Raises:
        RecipeError: the section, the file or the model contradict each other; holds every problem.
        DoesNotFitError: the pod has too few IPUs, or a number that the replicas do not divide.
    """
    if ipu.config == AUTO:
        raise RecipeError(["ipu.config=auto: the model must be known to choose one"], where="ipu config")
    settings, found = _settings(ipu, model_layers, vocab_size)
    if found:
        raise RecipeError(found, where=f"ipu config {ipu.config}")
    if ipu.pod is not None:
        for mode in _MODES:
            asked = getattr(ipu, f"{mode}replication_factor") or ipu.replication_factor
            per_replica = settings[f"{mode}ipus_per_replica"]
            settings[f"{mode}replication_factor"] = _fitting(ipu.pod, per_replica, asked, mode)
    return settings


def problems(ipu: Ipu, *, model_layers: Optional[int] = None, vocab_size: Optional[int] = None) -> List[str]:
    """Return every problem of the section with itself, its file and, where they are given, the model's facts."""
    if ipu.config == AUTO:
        return list(_own_problems(ipu).values())
    return _settings(ipu, model_layers, vocab_size)[1]


def replicas(pod_name: str, ipus_per_replica: int) -> int:
    """Return how many replicas a pod holds, e.g. 4 of 4 IPUs each on a pod16.

    Raises:
        DoesNotFitError: the pod is too small, or not a multiple; the message says what works.
    """
    place = pod(pod_name)
    if place.ipus % ipus_per_replica == 0:
        return place.ipus // ipus_per_replica
    if ipus_per_replica > place.ipus:
        fix = f"use {_larger_pod(place.chip, ipus_per_replica)}a layout on at most {place.ipus} IPUs"
        raise DoesNotFitError(
            f"{ipus_per_replica} IPUs per replica do not fit {place.name}, which has {place.ipus}; {fix}"
        )
    below, above = _nearest_divisors(place.ipus, ipus_per_replica)
    raise DoesNotFitError(
        f"{place.name} has {place.ipus} IPUs, which {ipus_per_replica} IPUs per replica do not divide; lay the model "
        f"out on {below} or {above} IPUs, or set ipu.replication_factor={place.ipus // ipus_per_replica} and leave "
        f"{place.ipus % ipus_per_replica} unused"
    )


def notes(settings: Dict[str, Any]) -> List[str]:
    """Return a line for each resolved setting that has no effect in this combination."""
    lines = []
    if settings.get("replicated_tensor_sharding") and settings.get("replication_factor", 1) == 1:
        lines.append("ipu.replicated_tensor_sharding has no effect with 1 replica; a larger --pod gives more")
    return lines


def _own_problems(ipu: Ipu) -> Dict[str, str]:
    """Return what is wrong with single fields, by their names."""
    found = {}
    for key, value in _given(ipu).items():
        for problem in setting_problem(key, value, label="ipu."):
            found[key] = problem
    if not isinstance(ipu.config, str) or not ipu.config:
        found["config"] = f"ipu.config={ipu.config!r}: must be the name or path of an IPU config"
    if ipu.pod is not None:
        try:
            pod(str(ipu.pod))
        except UsageError as error:
            found["pod"] = f"ipu.pod={ipu.pod}: {error}"
    return found


def _given(ipu: Ipu) -> Dict[str, Any]:
    values = {key: getattr(ipu, key) for key in SETTINGS}
    return {key: value for key, value in values.items() if value is not None}


def _settings(ipu: Ipu, model_layers: Optional[int], vocab_size: Optional[int]) -> Tuple[Dict[str, Any], List[str]]:
    """Merge file and section; return the settings and every problem found on the way."""
    broken = _own_problems(ipu)
    found = list(broken.values())
    base: Dict[str, Any] = {}
    try:
        if "config" not in broken:
            base = read(ipu.config).values
    except RecipeError as error:
        broken["config"] = ""
        found += error.problems
    given = {key: value for key, value in _given(ipu).items() if key not in broken}
    settings = {**_without_contradicted(base, given), **given}
    # Everything else is held against the layout: without a sound one there is nothing more to say.
    if broken.keys().isdisjoint(_LAYOUT):
        _Checks(settings, given, ipu.config, found).run(model_layers, vocab_size)
    for mode in _MODES:
        settings.setdefault(f"{mode}replication_factor", 1)
        settings.setdefault(f"{mode}device_iterations", 1)
    return settings, found


def _without_contradicted(base: Dict[str, Any], given: Dict[str, Any]) -> Dict[str, Any]:
    """Drop the file's other way of saying what the section says itself."""
    rest = dict(base)
    for mode in _MODES:
        if f"{mode}layers_per_ipu" in given:
            rest.pop(f"{mode}ipus_per_replica", None)
        for part in ("embedding", "projection"):
            factor, splits = f"{mode}{part}_serialization_factor", f"{mode}serialized_{part}_splits_per_ipu"
            if factor in given:
                rest.pop(splits, None)
            if splits in given:
                rest.pop(factor, None)
    return rest


class _Checks:
    """The merged settings on their way to being complete and consistent."""

    def __init__(self, settings: Dict[str, Any], given: Dict[str, Any], config: str, found: List[str]) -> None:
        self.settings = settings
        self.given = given
        self.config = config
        self.found = found
        self.stated = set(settings)

    def run(self, model_layers: Optional[int], vocab_size: Optional[int]) -> None:
        self._complete()
        for mode in _MODES:
            ipus = self.settings[f"{mode}ipus_per_replica"]
            self._layers(mode, ipus, model_layers)
            self._matmul_proportion(mode, ipus)
            for part in ("embedding", "projection"):
                self._splits(mode, part, ipus)
            self._vocabulary(mode, vocab_size)

    def _name(self, key: str) -> str:
        if key in self.given:
            return f"ipu.{key}"
        return f"{key} (of config {self.config})" if key in self.stated else f"{key} (as in training)"

    def _show(self, key: str) -> str:
        return f"{self._name(key)}={self.settings[key]}"

    def _repeats_training(self, mode: str, key: str) -> bool:
        """Whether inference only repeats what training was already checked for."""
        same = self.settings["inference_ipus_per_replica"] == self.settings["ipus_per_replica"]
        return bool(mode) and same and f"{mode}{key}" not in self.stated

    def _complete(self) -> None:
        """Fill in the layout as `IPUConfig` would: the counts from the lists, inference from training."""
        every = self.settings
        layers = every.setdefault("layers_per_ipu", [WILDCARD])
        every.setdefault("ipus_per_replica", len(layers))
        inference = every.setdefault("inference_layers_per_ipu", list(layers))
        spread = every["ipus_per_replica"] != len(layers) and inference == [WILDCARD]
        follows = spread or "inference_layers_per_ipu" not in self.stated
        every.setdefault("inference_ipus_per_replica", every["ipus_per_replica"] if follows else len(inference))

    def _layers(self, mode: str, ipus: int, model_layers: Optional[int]) -> None:
        key = f"{mode}layers_per_ipu"
        layers = self.settings[key]
        problem = length_problem(layers, ipus, key)
        found = [problem] if problem else []
        if model_layers is not None:
            try:
                self.settings[key] = expand_layers(layers, model_layers, ipus, key)
            except RecipeError as error:
                found = error.problems
        self.found += found if not self._repeats_training(mode, "layers_per_ipu") else []

    def _matmul_proportion(self, mode: str, ipus: int) -> None:
        key = f"{mode}matmul_proportion"
        training = self.settings.setdefault("matmul_proportion", _MATMUL_PROPORTION)
        value = self.settings.setdefault(key, training)
        if not isinstance(value, list):
            return
        if len(value) == 1:
            self.settings[key] = value[0]
        elif len(value) != ipus and not self._repeats_training(mode, "matmul_proportion"):
            needed = f"1 or {ipus} values" if ipus > 1 else "1 value"
            self.found.append(
                f"{self._show(key)} has {len(value)} values: needs {needed} ({mode}ipus_per_replica={ipus}); "
                f"set ipu.{key}"
            )

    def _splits(self, mode: str, part: str, ipus: int) -> None:
        factor, key = f"{mode}{part}_serialization_factor", f"{mode}serialized_{part}_splits_per_ipu"
        splits = self.settings.get(key)
        if splits is None:
            return
        if factor in self.settings:
            self.found.append(f"{self._show(key)} and {self._show(factor)}: give one of the two")
        if len(splits) != ipus:
            self.found.append(f"{self._show(key)} has {len(splits)} values: needs {ipus}, one per IPU")
        used = [index for index, count in enumerate(splits) if count]
        if not used:
            self.found.append(f"{self._show(key)}: at least one IPU must hold a part")
        elif used[-1] - used[0] + 1 != len(used):
            self.found.append(f"{self._show(key)}: the parts must lie on consecutive IPUs, with no 0 between them")

    def _vocabulary(self, mode: str, vocab_size: Optional[int]) -> None:
        key = f"{mode}embedding_serialization_factor"
        factor = self.settings.get(key, 1)
        if vocab_size is None or vocab_size % factor == 0:
            return
        below, above = _nearest_divisors(vocab_size, factor)
        self.found.append(f"{self._show(key)} does not divide the vocabulary of {vocab_size}; use {below} or {above}")


def _fitting(pod_name: str, per_replica: int, asked: Optional[int], mode: str) -> int:
    """Return the replicas: those asked for, which must fit, else as many as the pod holds."""
    if asked is None:
        return replicas(pod_name, per_replica)
    place = pod(pod_name)
    needed = asked * per_replica
    if needed > place.ipus:
        most = place.ipus // per_replica
        smaller = f"at most {most} replicas" if most else f"a layout on at most {place.ipus} IPUs"
        raise DoesNotFitError(
            f"ipu.{mode}replication_factor={asked} × {per_replica} IPUs per replica = {needed} IPUs, but {place.name} "
            f"has {place.ipus}; use {_larger_pod(place.chip, needed)}{smaller}"
        )
    return asked


def _larger_pod(chip: Any, ipus: int) -> str:
    """Name the smallest pod that holds so many IPUs, as the start of a list of ways out; empty where none does."""
    large_enough = [each.name for each in pods_by_size(chip) if each.ipus >= ipus]
    return f"{large_enough[0]}, or " if large_enough else ""


def _nearest_divisors(number: int, wanted: int) -> Tuple[int, int]:
    """Return the divisors of `number` next below and above `wanted` (the number itself divides it)."""
    below = next(each for each in range(min(wanted, number), 0, -1) if number % each == 0)
    above = next((each for each in range(wanted, number + 1) if number % each == 0), number)
    return below, above
