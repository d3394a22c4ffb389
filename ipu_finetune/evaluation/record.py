# SPDX-License-Identifier: Apache-2.0
"""The run record: what was run, where, how well and how fast. Figures only; no text of the data set."""

import dataclasses
import datetime
import math
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipu_finetune import recipe as recipes
from ipu_finetune.batching import BatchPlan
from ipu_finetune.targets import Target
from ipu_finetune.training.checkpoint import Progress
from ipu_finetune.training.loop import Outcome
from ipu_finetune.training.order import order_hash

__all__ = ["SCHEMA_VERSION", "build", "environment", "status", "summary"]

SCHEMA_VERSION = 1

_PACKAGES = (
    "ipu-finetune",
    "optimum-graphcore",
    "optimum",
    "transformers",
    "tokenizers",
    "torch",
    "poptorch",
    "accelerate",
    "datasets",
    "numpy",
    "safetensors",
)


def environment() -> Dict[str, Any]:
    """Return versions, hardware and the commit of this project, where it runs from a checkout."""
    versions: Dict[str, Optional[str]] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "git_commit": _git_commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def batch_section(plan: BatchPlan, progress: Progress) -> Dict[str, Any]:
    """Return every factor of the batch arithmetic, and what the run made of them."""
    return {
        "rows": plan.rows,
        "micro_batch_size": plan.micro_batch_size,
        "device_iterations": plan.device_iterations,
        "gradient_accumulation": plan.gradient_accumulation,
        "replicas": plan.replicas,
        "global_batch": plan.global_batch,
        "sequences_per_update": round(plan.sequences_per_update, 4),
        "combined_batch": plan.combined_batch,
        "updates_per_epoch": plan.updates_per_epoch,
        "planned_updates": plan.planned_updates,
        "updates": progress.step,
        "skipped_updates": progress.skipped_steps,
        "unused_rows_per_epoch": plan.unused_rows,
        "filler_rows_per_epoch": plan.filler_rows,
        "sequences": progress.sequences,
        "real_tokens": progress.real_tokens,
    }


def throughput(plan: BatchPlan, progress: Progress, emulated: bool) -> Dict[str, Any]:
    """Return the rate of the host calls after warm-up; None where there was none.

    A rate is sequences (or tokens) per host call over the call's seconds: median and 10th and 90th percentile of calls.
    """
    kind = "emulated" if emulated else "measured"
    seconds = np.asarray(progress.step_seconds)
    if not len(seconds) or not progress.sequences:
        return {"kind": kind, "calls": 0, "sequences_per_second": None, "real_tokens_per_second": None}
    rates = plan.combined_batch * plan.sequences_per_row / seconds
    tokens = progress.real_tokens / progress.sequences

    def spread(values: np.ndarray) -> Dict[str, float]:
        low, median, high = np.percentile(values, [10, 50, 90])
        return {"p10": round(float(low), 3), "median": round(float(median), 3), "p90": round(float(high), 3)}

    return {
        "kind": kind,
        "calls": len(seconds),
        "sequences_per_second": spread(rates),
        "real_tokens_per_second": spread(rates * tokens),
    }


def peak_memory_bytes() -> int:
    """Return the largest resident size that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def without_non_numbers(content: Any) -> Any:
    """Replace NaN and infinities, for which JSON has no number, by None."""
    if isinstance(content, Mapping):
        return {key: without_non_numbers(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [without_non_numbers(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def status(progress: Progress, complete: bool) -> str:
    """Return ``ok``, or what keeps the run from being that."""
    flaws: List[str] = []
    if progress.nonfinite_steps:
        flaws.append("nonfinite_losses")
    if not complete:
        flaws.append("stopped_early")
    return "+".join(flaws) or "ok"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _git_commit() -> Optional[str]:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def build(
    recipe: recipes.Recipe,
    target: Target,
    plan: BatchPlan,
    outcome: Outcome,
    metrics: Mapping[str, Any],
    facts: Mapping[str, Any],
    source: Any,
    train: Any,
    validation: Any,
    started: float,
    phases: Mapping[str, float],
    verified: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """Return the content of `record.json`.

    Args:
        recipe: that was run.
        target: where.
        plan: the batch arithmetic.
        outcome: of the training loop.
        metrics: of the evaluation at the end.
        facts: of the engine.
        source: of the data.
        train: rows.
        validation: rows.
        started: seconds since the epoch.
        phases: seconds spent outside of the loop.
        verified: what `packing.verify` has shown; None where it was not asked for.
    """
    progress = outcome.progress
    seconds = {**phases, **progress.seconds}
    seconds["evaluate"] = phases.get("evaluate", 0.0) + progress.seconds.get("evaluate", 0.0)
    content = {
        "schema_version": SCHEMA_VERSION,
        "recipe": recipe.name,
        "recipe_sha256": recipes.fingerprint(recipe),
        "data_sha256": source.sha256,
        "features_sha256": {"train": train.fingerprint, "validation": validation.fingerprint},
        "order_sha256": order_hash(plan, recipe.training.seed),
        "started": datetime.datetime.fromtimestamp(started).astimezone().isoformat(timespec="seconds"),
        "target": target.name,
        "emulated": target.emulated,
        "hardware": facts,
        "status": status(progress, complete=progress.step >= plan.planned_updates),
        "batch": batch_section(plan, progress),
        "metrics": metrics,
        "evaluations": outcome.evaluations,
        "goal": dataclasses.asdict(recipe.goal) if recipe.goal else None,
        "loss": {"first": outcome.first_loss, "last": outcome.last_loss},
        "nonfinite_steps": progress.nonfinite_steps,
        "skipped_steps": progress.skipped_steps,
        "restarts": progress.restarts,
        "manual_interventions": [],
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "throughput": throughput(plan, progress, target.emulated),
        "real_token_share": round(train.real_tokens / max(1, train.features * recipe.task.max_length), 4),
        "packing": None if train.packed is None else {**train.packed.facts(), "verified": verified},
        "peak_memory_bytes": peak_memory_bytes(),
    }
    return without_non_numbers(content)


def summary(
    folder: Path, target: Target, recipe: recipes.Recipe, metrics: Mapping[str, Any], content: Mapping[str, Any]
) -> str:
    """Return the few lines that the terminal shows at the end of a run."""
    quality = " · ".join(f"{name} {value:.2f}" for name, value in _shown_metrics(metrics))
    lines = [f"{recipe.name} on {target.name}: {quality} ({metrics.get('examples', 0):,} examples)"]
    rate = content["throughput"]["sequences_per_second"]
    label = " (emulated: this is not IPU speed)" if target.emulated else ""
    if rate is not None:
        tokens = content["throughput"]["real_tokens_per_second"]["median"]
        lines.append(f"throughput {rate['median']:.1f} sequences/s, {tokens:,.0f} real tokens/s{label}")
    if content["nonfinite_steps"]:
        lines.append(f"WARNING: {content['nonfinite_steps']} updates had a non-finite loss (nonfinite_steps)")
    if recipe.goal is not None and recipe.goal.metric in metrics:
        lines.append(f"goal: {recipe.goal.metric} {recipe.goal.value} ({recipe.goal.source})")
    lines.append(f"run folder: {folder}")
    return "\n".join(lines)


def _shown_metrics(metrics: Mapping[str, Any]) -> List[Tuple[str, float]]:
    shown = [name for name in ("f1", "exact_match") if name in metrics]
    return [(name, float(metrics[name])) for name in shown]
