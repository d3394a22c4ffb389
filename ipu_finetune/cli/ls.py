# SPDX-License-Identifier: Apache-2.0
"""List what there is: recipes (default), models, tasks, configs or pods."""

import argparse
import json
from typing import Any, Callable, Dict, List

from ipu_finetune._discovery import list_recipes
from ipu_finetune.errors import UsageError, did_you_mean
from ipu_finetune.hardware import PODS
from ipu_finetune.ipu_config import config_names, read
from ipu_finetune.recipe import TASKS

__all__ = ["configure", "run"]

Row = Dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("kind", metavar="|".join(KINDS), nargs="?", default="recipes", help="what to list")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or its rows as JSON."""
    if arguments.kind not in KINDS:
        raise UsageError(f"cannot list '{arguments.kind}'{did_you_mean(arguments.kind, KINDS)}")
    rows = KINDS[arguments.kind]()
    if arguments.json:
        print(json.dumps({arguments.kind: rows}))
    else:
        print("\n".join(_table(rows)))
    return 0


def _recipes() -> List[Row]:
    return [
        {
            "model": recipe.model.name,
            "dataset": recipe.task.dataset,
            "task": recipe.task.kind,
            "config": recipe.ipu.config,
            "global_batch": recipe.training.global_batch_size,
            "goal": f"{recipe.goal.metric} {recipe.goal.value}" if recipe.goal else None,
        }
        for recipe, _ in list_recipes()
    ]


def _models() -> List[Row]:
    rows: Dict[str, Row] = {}
    for recipe, _ in list_recipes():
        model = recipe.model
        row = rows.setdefault(model.name, {"model": model.name, "checkpoint": model.checkpoint, "datasets": []})
        row["datasets"].append(recipe.task.dataset)
    return list(rows.values())


def _tasks() -> List[Row]:
    return [{"task": kind, "what": (cls.__doc__ or "").splitlines()[0]} for kind, cls in TASKS.items()]


def _configs() -> List[Row]:
    rows = []
    for name in config_names():
        config = read(name)
        layers = config.values.get("layers_per_ipu")
        ipus = config.values.get("ipus_per_replica", len(layers or [-1]))
        models = list(config.architectures)
        rows.append({"config": name, "ipus_per_replica": ipus, "layers_per_ipu": layers, "for": models})
    return rows


def _pods() -> List[Row]:
    return [
        {
            "pod": pod.name,
            "ipus": pod.ipus,
            "chip": pod.chip.name,
            "peak_fp16_petaflops": round(pod.fp16_petaflops, 2),
            "memory_gb": round(pod.memory_gb, 1),
        }
        for pod in PODS.values()
    ]


KINDS: Dict[str, Callable[[], List[Row]]] = {
    "recipes": _recipes,
    "models": _models,
    "tasks": _tasks,
    "configs": _configs,
    "pods": _pods,
}


def _table(rows: List[Row]) -> List[str]:
    if not rows:
        return ["(none)"]
    lines = [[key.replace("_", " ") for key in rows[0]]] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return str(value)
