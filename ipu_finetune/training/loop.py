# SPDX-License-Identifier: Apache-2.0
"""The training loop: the same for every engine."""

import contextlib
import json
import logging
import math
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import numpy as np
from tqdm.auto import tqdm

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import CheckpointError, Interrupted, NonFiniteLossError
from ipu_finetune.training import checkpoint
from ipu_finetune.training.checkpoint import Progress
from ipu_finetune.training.engine import Engine, StepResult
from ipu_finetune.training.order import TrainingRows, host_batches, read_batch
from ipu_finetune.training.schedule import learning_rate_schedule

__all__ = ["MetricsLog", "Outcome", "train"]

logger = logging.getLogger(__name__)

WARM_UP_CALLS = 2  # host calls after each start that the throughput leaves out
KEPT_TIMES = 5000  # newest host calls whose time is kept for the percentiles


@dataclass
class Outcome:
    """What training left behind.

    Attributes:
        progress: final counters.
        evaluations: `{"step": …, metric: …}` of each evaluation that training made.
        first_loss: of the first update of this process; None where none was made.
        last_loss: of the last one.
    """

    progress: Progress
    evaluations: List[Dict[str, Any]] = field(default_factory=list)
    first_loss: Optional[float] = None
    last_loss: Optional[float] = None


class MetricsLog:
    """`metrics.jsonl`: a row per logging step and evaluation.

    A NaN or infinity is written as the string ``"nan"``, ``"inf"`` or ``"-inf"``, since JSON has no number for it.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Open the file; rows after the step that a run resumes from are dropped, they will be written again."""
        kept = []
        if resumed_at and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= resumed_at]
        self._path = path
        try:
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error}); give another --output") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        safe = {key: _json_number(value) for key, value in row.items()}
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(safe) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error}); make room, then continue with --resume"
            ) from error


def train(
    engine: Engine,
    plan: BatchPlan,
    data: Union[TrainingRows, Mapping[str, np.ndarray]],
    training: Any,
    folder: Path,
    identity: Dict[str, Any],
    *,
    progress: Optional[Progress] = None,
    evaluate: Optional[Callable[[], Dict[str, Any]]] = None,
    show_bar: bool = False,
) -> Outcome:
    """Train until the plan's last update.

    Args:
        engine: compiled; holds the weights.
        plan: the batch arithmetic.
        data: the rows, or their columns, each [rows, ...].
        training: the recipe's training section.
        folder: of the run; checkpoints and `metrics.jsonl` go there.
        identity: what a run must share to continue this one; stored in each checkpoint.
        progress: of the checkpoint that the run resumes from.
        evaluate: returns metrics with the present weights; called each `eval_steps`.
        show_bar: draw a progress bar on stderr.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after a checkpoint.
        NonFiniteLossError: `stop_after_nonfinite` losses in a row were NaN or infinite.
        CheckpointError: a checkpoint could not be written.
    """
    data = TrainingRows.of(data)
    progress = progress or Progress()
    outcome = Outcome(progress)
    rate = learning_rate_schedule(
        training.scheduler, training.learning_rate, plan.planned_updates, training.warmup_ratio
    )
    log = MetricsLog(folder / "metrics.jsonl", progress.step)
    window: List[float] = []
    bad_in_a_row = 0
    calls = 0

    def save() -> None:
        with _clock(progress, "checkpoint"):
            checkpoint.save(
                folder, engine.plain_state(), engine.training_state(), progress, identity, training.keep_checkpoints
            )

    bar = tqdm(total=plan.total_updates, initial=progress.step, desc="training", unit="update", disable=not show_bar)
    saved_at = progress.step if progress.restarts else -1
    with _stop_signals() as stop, bar:
        while progress.step < plan.total_updates:
            for rows in host_batches(plan, training.seed, progress.epoch, progress.host_batch):
                with _clock(progress, "data_wait"):
                    batch, weights = read_batch(data, rows, plan)
                learning_rate = rate(progress.applied)
                started = time.perf_counter()
                result = engine.step(batch, weights, learning_rate)
                seconds = time.perf_counter() - started
                calls += 1
                before = progress.step
                _count(progress, result, seconds, data.counts(rows), warm=calls > WARM_UP_CALLS)
                epoch_ends = progress.host_batch + 1 == plan.host_batches
                progress.epoch += int(epoch_ends)
                progress.host_batch = 0 if epoch_ends else progress.host_batch + 1
                finished = progress.step >= plan.total_updates
                if outcome.first_loss is None:
                    outcome.first_loss = result.losses[0]
                outcome.last_loss = result.losses[-1]
                window += result.losses
                bar.update(progress.step - before)
                bar.set_postfix(loss=f"{result.losses[-1]:.3f}")
                if finished or _crosses(before, progress.step, training.logging_steps):
                    log.write(_row(progress, plan, window, learning_rate, result, seconds))
                    window = []
                bad_in_a_row = _bad_in_a_row(bad_in_a_row, result)
                if bad_in_a_row:
                    _report_nonfinite(progress, result, bad_in_a_row, training)
                if evaluate is not None and not finished and _crosses(before, progress.step, training.eval_steps):
                    with _clock(progress, "evaluate"):
                        metrics = evaluate()
                    outcome.evaluations.append({"step": progress.step, **metrics})
                    log.write({"kind": "evaluation", "step": progress.step, **metrics})
                stopping = stop.is_set()
                due = (
                    epoch_ends if training.save_steps is None else _crosses(before, progress.step, training.save_steps)
                )
                # Weights that a non-finite loss may have reached are not written over good ones.
                if (due or stopping or finished) and not bad_in_a_row and progress.step != saved_at:
                    save()
                    saved_at = progress.step
                if stopping:
                    raise Interrupted(
                        f"stopped after update {progress.step} of {plan.total_updates}; continue with "
                        f"--resume {folder} (last checkpoint: step {saved_at})"
                    )
                if finished:
                    break
    return outcome


def _count(progress: Progress, result: StepResult, seconds: float, counts: Tuple[int, int], warm: bool) -> None:
    progress.step += len(result.losses)
    progress.applied += result.skipped.count(False)
    progress.skipped_steps += result.skipped.count(True)
    progress.nonfinite_steps += sum(not math.isfinite(loss) for loss in result.losses)
    progress.sequences += counts[0]
    progress.real_tokens += counts[1]
    progress.seconds["train"] = progress.seconds.get("train", 0.0) + seconds
    if warm:
        progress.step_seconds = [*progress.step_seconds[1 - KEPT_TIMES :], seconds]


def _bad_in_a_row(before: int, result: StepResult) -> int:
    for loss in result.losses:
        before = 0 if math.isfinite(loss) else before + 1
    return before


def _report_nonfinite(progress: Progress, result: StepResult, in_a_row: int, training: Any) -> None:
    message = (
        f"update {progress.step}: the loss is {result.losses[-1]} ({progress.nonfinite_steps} non-finite so far, "
        f"{in_a_row} in a row)"
    )
    if training.stop_after_nonfinite is not None and in_a_row >= training.stop_after_nonfinite:
        raise NonFiniteLossError(
            f"{message}; stopped; the checkpoints before it are kept. Lower training.learning_rate, or with "
            "training.precision=fp16 set training.loss_scaling or ipu.auto_loss_scaling=true"
        )
    logger.warning(message)


def _row(
    progress: Progress, plan: BatchPlan, window: List[float], learning_rate: float, result: StepResult, seconds: float
) -> Dict[str, Any]:
    return {
        "kind": "training",
        "step": progress.step,
        "epoch": round(progress.step / plan.updates_per_epoch, 4),
        "loss": sum(window) / len(window),
        "nonfinite": sum(not math.isfinite(loss) for loss in window),
        "learning_rate": learning_rate,
        "loss_scale": result.loss_scale,
        "skipped": progress.skipped_steps,
        "sequences": progress.sequences,
        "real_tokens": progress.real_tokens,
        "seconds": round(progress.seconds["train"], 4),
        "seconds_per_update": round(seconds / len(result.losses), 4),
    }


def _crosses(before: int, after: int, every: Optional[int]) -> bool:
    return every is not None and after // every > before // every


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


@contextlib.contextmanager
def _clock(progress: Progress, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        progress.seconds[phase] = progress.seconds.get(phase, 0.0) + time.perf_counter() - started


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Turn the first SIGINT or SIGTERM into an event that the loop sees between two host calls.

    A second one acts at once. Python takes signals in the main thread only; elsewhere they stay as they are.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        logger.warning("stopping after the update that is running, with a checkpoint; once more stops at once, without")

    for number in before:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
