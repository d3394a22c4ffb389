# SPDX-License-Identifier: Apache-2.0
"""The loop's bookkeeping, with an engine that returns losses from a list and notes what it is fed."""

import dataclasses
import json
import logging
import os
import signal

import numpy as np
import pytest
import torch

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import Interrupted, NonFiniteLossError
from ipu_finetune.recipe import Training
from ipu_finetune.training import checkpoint, loop
from ipu_finetune.training.engine import Engine, StepResult, TrainingState


class ScriptedEngine(Engine):
    """Feeds on any batch; its one weight counts the updates that it applied."""

    def __init__(self, losses=(), skipped=(), plan=None, before_step=None):
        self.losses, self.skipped, self.plan, self.before_step = list(losses), list(skipped), plan, before_step
        self.seen, self.rates, self.count = [], [], torch.zeros(1)

    def compile(self, batch, weights):
        raise AssertionError("the loop does not compile")

    def step(self, batch, weights, learning_rate):
        if self.before_step is not None:
            self.before_step(self)
        self.seen.append(batch["id"].tolist())
        self.rates.append(learning_rate)
        updates = self.plan.device_iterations
        losses = [self.losses.pop(0) if self.losses else 1.0 for _ in range(updates)]
        skipped = [self.skipped.pop(0) if self.skipped else False for _ in range(updates)]
        self.count += updates
        return StepResult(losses, skipped)

    def predict(self, columns):
        raise AssertionError("the loop does not predict")

    def plain_state(self):
        return {"count": self.count.clone()}

    def training_state(self):
        return TrainingState()

    def load_training_state(self, state):
        raise AssertionError("the loop does not load")

    @property
    def facts(self):
        return {}


def settings(**values):
    return Training(**{"global_batch_size": 2, "learning_rate": 1.0, "logging_steps": 1, **values})


def run(tmp_path, plan, engine, training=None, **options):
    engine.plan = plan
    columns = {"id": np.arange(plan.rows)}
    return loop.train(engine, plan, columns, training or settings(), tmp_path, {}, **options)


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_u06_a_nan_loss_is_logged_raw_counted_and_warned_of(tmp_path, caplog):
    nan = float("nan")
    plan = BatchPlan(rows=8, micro_batch_size=2)
    with caplog.at_level(logging.WARNING):
        outcome = run(tmp_path, plan, ScriptedEngine([2.0, nan, nan, 1.5]))
    assert [row["loss"] for row in rows_of(tmp_path)] == [2.0, "nan", "nan", 1.5]
    assert outcome.progress.nonfinite_steps == 2
    assert "update 2: the loss is nan (1 non-finite so far, 1 in a row)" in caplog.text
    from ipu_finetune.evaluation.record import status

    assert status(outcome.progress, complete=True) == "nonfinite_losses"


def test_u06_a_window_that_holds_a_nan_shows_it(tmp_path):
    plan = BatchPlan(rows=8, micro_batch_size=2)
    run(tmp_path, plan, ScriptedEngine([2.0, float("inf"), 1.0, 3.0]), settings(logging_steps=2))
    rows = rows_of(tmp_path)
    assert [(row["loss"], row["nonfinite"]) for row in rows] == [("inf", 1), (2.0, 0)]


def test_u06_training_stops_after_so_many_in_a_row_and_saves_none_of_them(tmp_path):
    plan = BatchPlan(rows=100, micro_batch_size=2)
    engine = ScriptedEngine([1.0, 1.0, *[float("nan")] * 50])
    with pytest.raises(NonFiniteLossError, match="update 5: the loss is nan"):
        run(tmp_path, plan, engine, settings(stop_after_nonfinite=3, save_steps=1))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def test_u48_steps_are_updates_and_the_schedule_counts_them(tmp_path):
    plan = BatchPlan(rows=256, micro_batch_size=2, replicas=2, gradient_accumulation=4, device_iterations=2)
    engine = ScriptedEngine()
    outcome = run(tmp_path, plan, engine, settings(warmup_ratio=0.0))
    assert len(engine.seen) == 8
    assert all(len(ids) == 32 for ids in engine.seen)
    assert sorted(row for ids in engine.seen for row in ids) == list(range(256))
    assert outcome.progress.step == outcome.progress.applied == 16
    assert engine.rates == pytest.approx([1 - 2 * call / 16 for call in range(8)])


def test_u46_a_skipped_update_does_not_advance_the_learning_rate(tmp_path):
    plan = BatchPlan(rows=8, micro_batch_size=2)
    engine = ScriptedEngine(skipped=[False, True, False, False])
    outcome = run(tmp_path, plan, engine, settings(warmup_ratio=0.0))
    assert engine.rates == pytest.approx([1.0, 0.75, 0.75, 0.5])
    assert (outcome.progress.step, outcome.progress.applied, outcome.progress.skipped_steps) == (4, 3, 1)


def test_u10_a_resumed_run_reads_the_rows_of_the_unbroken_one(tmp_path):
    plan = BatchPlan(rows=10, micro_batch_size=2, epochs=3)
    unbroken = ScriptedEngine()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a", plan, unbroken)
    first = ScriptedEngine()
    run(tmp_path / "b", dataclasses.replace(plan, max_steps=7), first)
    last, _ = checkpoint.latest(tmp_path / "b")
    assert (last.progress.step, last.progress.epoch, last.progress.host_batch) == (7, 1, 2)
    second = ScriptedEngine()
    outcome = run(tmp_path / "b", plan, second, progress=last.progress)
    assert first.seen + second.seen == unbroken.seen
    assert first.rates + second.rates == unbroken.rates
    assert outcome.progress.step == 15
    steps = [row["step"] for row in rows_of(tmp_path / "b")]
    assert steps == list(range(1, 16))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_at_the_step_that_was_running(tmp_path, number):
    plan = BatchPlan(rows=20, micro_batch_size=2)
    before = signal.getsignal(number)

    def kill(engine):
        if len(engine.seen) == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped after update 4 of 10; continue with --resume"):
        run(tmp_path, plan, ScriptedEngine(before_step=kill))
    last, _ = checkpoint.latest(tmp_path)
    assert (last.progress.step, last.model["count"].item()) == (4, 4.0)
    assert signal.getsignal(number) is before


def test_evaluation_comes_each_eval_steps_and_is_logged(tmp_path):
    plan = BatchPlan(rows=12, micro_batch_size=2)
    scores = iter([10.0, 20.0, 30.0])
    outcome = run(tmp_path, plan, ScriptedEngine(), settings(eval_steps=2), evaluate=lambda: {"f1": next(scores)})
    assert outcome.evaluations == [{"step": 2, "f1": 10.0}, {"step": 4, "f1": 20.0}]
    assert [row["f1"] for row in rows_of(tmp_path) if row["kind"] == "evaluation"] == [10.0, 20.0]
