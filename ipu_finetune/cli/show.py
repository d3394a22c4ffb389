# SPDX-License-Identifier: Apache-2.0
"""Print a resolved recipe: every field, the IPU config it leads to, the layers on each IPU and the batch."""

import argparse
import json
from typing import Any, Dict, List, Optional

from ipu_finetune import ipu_config
from ipu_finetune._discovery import load_recipe
from ipu_finetune._fields import render
from ipu_finetune._overrides import apply
from ipu_finetune.batching import gradient_accumulation
from ipu_finetune.cli._parser import add_recipe_options, overrides
from ipu_finetune.models.known import KNOWN
from ipu_finetune.recipe import Recipe, check, fingerprint, to_dict

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("model", metavar="MODEL|FILE.py", help="model of a recipe, or a recipe file")
    parser.add_argument("dataset", metavar="DATASET", nargs="?", help="data set of the recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_recipe_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Resolve and print."""
    recipe, changes = apply(load_recipe(arguments.model, arguments.dataset), overrides(arguments))
    known = ipu_config.facts(recipe.model.checkpoint) or _public_facts(recipe.model.checkpoint)
    check(recipe, known)
    ipu, announcement = ipu_config.settle(recipe.ipu, recipe.model.checkpoint, known)
    settings = ipu_config.resolve(
        ipu, model_layers=known.layers if known else None, vocab_size=known.vocab_size if known else None
    )
    batch = _batch(recipe, settings)
    if arguments.json:
        content = {
            "recipe": to_dict(recipe),
            "ipu_config": settings,
            "batch": batch,
            "fingerprint": fingerprint(recipe),
        }
        print(json.dumps(content))
    else:
        print("\n".join(_lines(recipe, settings, batch, changes, announcement)))
    return 0


def _public_facts(checkpoint: str) -> Optional[ipu_config.Facts]:
    """Return the facts of a public checkpoint whose sizes this package knows without asking the hub."""
    known = KNOWN.get(checkpoint)
    if known is None or known.config is None:
        return None
    return ipu_config.Facts(known.config["model_type"], known.config["num_hidden_layers"], known.config["vocab_size"])


def _batch(recipe: Recipe, settings: Dict[str, Any]) -> Dict[str, Any]:
    training, replicas = recipe.training, settings["replication_factor"]
    known = {
        "micro_batch_size": training.micro_batch_size,
        "replicas": replicas,
        "ipus": replicas * settings["ipus_per_replica"],
    }
    if recipe.packing.enabled:
        # How many sequences share a pack is known once the data are; these are the two ends.
        ends = [
            max(1, round(training.global_batch_size / (training.micro_batch_size * replicas * per_pack)))
            for per_pack in (1, recipe.packing.max_sequences)
        ]
        return {
            **known,
            "gradient_accumulation": None,
            "accumulation_range": ends[::-1],
            "global_batch": training.global_batch_size,
        }
    accumulation = gradient_accumulation(training.global_batch_size, training.micro_batch_size, replicas)
    global_batch = training.micro_batch_size * accumulation * replicas
    return {**known, "gradient_accumulation": accumulation, "global_batch": global_batch}


def _batch_line(recipe: Recipe, batch: Dict[str, Any]) -> str:
    if recipe.packing.enabled:
        least, most = batch["accumulation_range"]
        micro = f"{batch['micro_batch_size']} pack{'s' if batch['micro_batch_size'] > 1 else ''}"
        return (
            f"global batch = {batch['global_batch']} sequences per update, from micro-batch {micro} × replicas "
            f"{batch['replicas']} × accumulation, which follows from the data ({most} at 1 sequence in a pack, "
            f"{least} at {recipe.packing.max_sequences}), on {batch['ipus']} IPUs"
        )
    return (
        f"global batch = micro-batch {batch['micro_batch_size']} × accumulation {batch['gradient_accumulation']} × "
        f"replicas {batch['replicas']} = {batch['global_batch']} sequences per update, on {batch['ipus']} IPUs"
    )


def _lines(
    recipe: Recipe, settings: Dict[str, Any], batch: Dict[str, Any], changes: List[str], announcement: Optional[str]
) -> List[str]:
    lines = [f"recipe {recipe.name} ({fingerprint(recipe)[:12]})"]
    for section, values in to_dict(recipe).items():
        if section == "ipu":  # what is not set comes from the config, which follows
            values = {key: value for key, value in values.items() if value is not None}
        lines += ["", f"[{section}]"] + [f"{key} = {render(value)}" for key, value in values.items()]
    lines += ["", f"[ipu config {recipe.ipu.config}, resolved]"]
    lines += [announcement] if announcement else []
    lines += [f"{key} = {render(settings[key])}" for key in sorted(settings)]
    if -1 not in settings["layers_per_ipu"]:
        lines += ["", "[pipeline]", *ipu_config.layer_table(settings["layers_per_ipu"])]
    lines += [
        "",
        "[batch]",
        _batch_line(recipe, batch),
    ]
    lines += [f"note: {note}" for note in ipu_config.notes(settings)]
    lines += ["", "[changed]", *changes] if changes else []
    return lines
