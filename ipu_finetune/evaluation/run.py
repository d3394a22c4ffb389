# SPDX-License-Identifier: Apache-2.0
"""`finetune`: one recipe, trained and evaluated on one target, with a folder that describes itself."""

import contextlib
import dataclasses
import importlib
import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Union

import torch
import transformers
from tqdm.auto import tqdm

from ipu_finetune import _environment, ipu_config, targets, tasks
from ipu_finetune import recipe as recipes
from ipu_finetune.batching import BatchPlan, gradient_accumulation
from ipu_finetune.errors import CheckpointError, RecipeError
from ipu_finetune.evaluation import record, run_folder
from ipu_finetune.evaluation.rows import Rows
from ipu_finetune.models import families, hub, pretrained
from ipu_finetune.training import checkpoint, loop
from ipu_finetune.training.compilation import watched
from ipu_finetune.training.engine import Engine
from ipu_finetune.training.order import host_batches, order_hash, read_batch

__all__ = ["Run", "finetune"]

logger = logging.getLogger(__name__)

# Settings that may differ between a run and its continuation: they do not change what an update computes.
_FREE_TO_CHANGE = {
    "training.max_steps",
    "training.save_steps",
    "training.eval_steps",
    "training.logging_steps",
    "training.keep_checkpoints",
    "training.stop_after_nonfinite",
    "training.report_to",
    "training.eval_batch_size",
    "model.push_to_hub",
    "ipu.executable_cache_dir",
    "packing.verify",
}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        output: its folder.
        target: where it executed.
        emulated: whether its figures are emulated ones.
        metrics: of the evaluation at its end.
        record: path of its `record.json`.
        summary: a few lines for the terminal.
    """

    output: str
    target: str
    emulated: bool
    metrics: Dict[str, Any]
    record: str
    summary: str


def finetune(
    recipe: recipes.Recipe,
    *,
    target: Union[str, targets.Target] = "auto",
    output: Optional[str] = None,
    resume: Union[bool, str, None] = None,
    overwrite: bool = False,
    progress: bool = False,
    compile_timeout: Optional[float] = None,
) -> Run:
    """Train and evaluate a recipe.

    Args:
        recipe: what to run.
        target: ``auto``, ``ipu``, ``emulator``, ``cuda`` or ``cpu``; or one that `targets.choose` has chosen.
        output: folder of the run; None gives one below ``runs/``.
        resume: continue the last checkpoint of `output`, of the recipe's newest run (True) or of the folder named.
        overwrite: replace a run that `output` holds.
        progress: say on stderr what is going on, with bars.
        compile_timeout: seconds after which a compilation is stopped; None for as long as it takes.

    Raises:
        IpuFinetuneError: one of its kinds, see `ipu_finetune.errors`.
    """
    recipes.check(recipe)
    targets.require_hub_token(recipe.model.push_to_hub)
    say = _speaker(progress)
    if isinstance(target, str):
        chosen = targets.choose(target)
        say(chosen.announcement)
        for note in _environment.require_versions(chosen.name):
            say(note)
    else:
        chosen = target
    started = time.time()
    if resume:
        folder = run_folder.to_resume(resume, output, recipe.name)
    else:
        folder = run_folder.prepare(output, recipe.name, chosen.name, overwrite)
    job = _Job(recipe, chosen, folder, say, progress, compile_timeout)
    return job.run(bool(resume), overwrite, started)


class _Job:
    """The steps of a run; each leaves its part of the folder behind."""

    def __init__(
        self,
        recipe: recipes.Recipe,
        target: targets.Target,
        folder: Path,
        say: Any,
        bars: bool,
        compile_timeout: Optional[float],
    ) -> None:
        self.recipe, self.target, self.folder, self.say, self.bars = recipe, target, folder, say, bars
        self.compile_timeout = compile_timeout
        self.seconds: Dict[str, float] = {}

    def run(self, resume: bool, overwrite: bool, started: float) -> Run:
        recipe = self.recipe
        with self._clock("load"):
            source = pretrained.find_checkpoint(
                recipe.model.checkpoint,
                recipe.model.revision,
                init=recipe.model.init,
                allow_pickle=recipe.model.allow_pickle,
            )
            config = pretrained.load_config(source, recipe.model.dropout)
            self._check_positions(config)
            layout = self._layout(config)
            tokenizer = pretrained.load_tokenizer(source)
            task = tasks.create(recipe.task, tokenizer)
            splits = task.load()
            if recipe.packing.enabled:
                families.family_of(config)  # refuses what cannot be packed
            rows = self._training_rows(task, splits)
            validation = self._features(task, splits.validation, "validation")
            validation_rows = self._rows(task, validation)
            self._say_packing(rows)
            plan = self._plan(rows, layout)
        identity = self._identity(rows.fingerprint, plan)
        last = self._last_checkpoint(identity) if resume else None
        if not resume and overwrite:
            _clear(self.folder)
        checkpoint.remove_unfinished(self.folder)
        self._describe(layout, splits, rows, validation_rows, plan)
        with self._clock("load"):
            model, drawn = pretrained.build_model(
                source,
                config,
                task.auto_class,
                init=recipe.model.init,
                seed=recipe.training.seed,
                allow_pickle=recipe.model.allow_pickle,
            )
            if last is not None:
                model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in last.model.items()})
        self.say(f"model: {recipe.model.checkpoint} ({source.source})" + _drawn(drawn, recipe.model.init))
        model_class = type(model)
        verified = self._verify(model, rows)
        engine = self._engine(model, layout, plan, task, rows)
        del model  # the engine holds its own layout of it; large models would otherwise be in memory twice
        counters = checkpoint.Progress()
        if last is not None:
            engine.load_training_state(last.training)
            counters = last.progress
            counters.restarts += 1
        try:
            self._compile(engine, plan, rows)

            def evaluate() -> Dict[str, Any]:
                outputs = validation_rows.restore(engine.predict(validation_rows.data.columns))
                answers = task.answers(splits.validation, validation, *outputs)
                return task.metrics(splits.validation, answers)

            outcome = loop.train(
                engine,
                plan,
                rows.data,
                recipe.training,
                self.folder,
                identity,
                progress=counters,
                evaluate=evaluate,
                show_bar=self.bars,
            )
            with self._clock("evaluate"):
                metrics = evaluate()
            with self._clock("save"):
                state = engine.plain_state()
                run_folder.save_model(self.folder, model_class, config, state, tokenizer, layout, recipe.task)
            facts = engine.facts
        finally:
            engine.close()
        content = record.build(
            recipe,
            self.target,
            plan,
            outcome,
            metrics,
            facts,
            splits.source,
            rows,
            validation_rows,
            started,
            self.seconds,
            verified,
        )
        path = self.folder / "record.json"
        run_folder.write_json(path, content)
        if recipe.model.push_to_hub is not None:
            self.say(f"pushed to {hub.push_folder(self.folder / 'model', recipe.model.push_to_hub)}")
        summary = record.summary(self.folder, self.target, recipe, metrics, content)
        return Run(str(self.folder), self.target.name, self.target.emulated, metrics, str(path), summary)

    # --- what is known before anything heavy -------------------------------------------------------------------

    def _check_positions(self, config: transformers.PretrainedConfig) -> None:
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and self.recipe.task.max_length > positions:
            raise RecipeError(
                [f"task.max_length={self.recipe.task.max_length}: the model has {positions} positions; use no more"]
            )

    def _layout(self, config: transformers.PretrainedConfig) -> Dict[str, Any]:
        """Resolve the IPU config for this model; the replicas it gives also set the batch of the other targets."""
        known = ipu_config.Facts(config.model_type, config.num_hidden_layers, getattr(config, "vocab_size", None))
        section, announcement = ipu_config.settle(self.recipe.ipu, self.recipe.model.checkpoint, known)
        if announcement:
            self.say(announcement)
        layout = ipu_config.resolve(section, model_layers=known.layers, vocab_size=known.vocab_size)
        if self.target.name in ("ipu", "emulator"):
            for note in ipu_config.notes(layout):
                self.say(f"note: {note}")
            table = " · ".join(f"IPU{i}: {n}" for i, n in enumerate(layout["layers_per_ipu"]))
            replicas = layout["replication_factor"]
            self.say(f"layout: {table} layers · {replicas} replica{'s' if replicas > 1 else ''}")
        return layout

    def _features(self, task: Any, questions: Any, what: str) -> Any:
        with tqdm(total=len(questions), desc=f"loading {what}", unit="q", disable=not self.bars) as bar:
            return task.features(
                questions, training=what == "training", progress=lambda done, total: bar.update(done - bar.n)
            )

    def _rows(self, task: Any, features: Any) -> Rows:
        recipe = self.recipe
        return Rows.of(task, features, recipe.packing, recipe.task.max_length, recipe.training.seed)

    def _training_rows(self, task: Any, splits: Any) -> Rows:
        recipe = self.recipe
        if not recipe.packing.enabled:
            return self._rows(task, self._features(task, splits.train, "training"))
        with tqdm(total=len(splits.train), desc="packing training", unit="q", disable=not self.bars) as bar:
            rows, kept = Rows.streamed(
                task,
                splits.train,
                splits.source.sha256,
                recipe.packing,
                recipe.training.seed,
                lambda done: bar.update(done - bar.n),
            )
            bar.update(bar.total - bar.n)
        self.say(f"packs {kept}")
        return rows

    def _say_packing(self, rows: Rows) -> None:
        if rows.packed is None:
            return
        plan = rows.packed.packs.plan
        padded = rows.real_tokens / (rows.features * self.recipe.task.max_length)
        self.say(
            f"packing: {plan.describe()}, {padded:.2%} without packing; {plan.wasted_positions:,} positions wasted; "
            f"at most {plan.speed_up:.2f} × as fast (from the counts, not measured); isolation: on"
        )

    def _verify(self, model: Any, rows: Rows) -> Optional[Dict[str, Any]]:
        if not self.recipe.packing.verify or rows.packed is None:
            return None
        report = rows.packed.verify(model)
        self.say(f"packing verified: {report}")
        return {**dataclasses.asdict(report), "isolation": report.isolation}

    def _plan(self, rows: Rows, layout: Dict[str, Any]) -> BatchPlan:
        training = self.recipe.training
        per_pack = None if rows.sequences is None else rows.sequences / len(rows)
        plan = BatchPlan(
            rows=len(rows),
            sequences=rows.sequences,
            micro_batch_size=training.micro_batch_size,
            gradient_accumulation=gradient_accumulation(
                training.global_batch_size, training.micro_batch_size, layout["replication_factor"], per_pack
            ),
            replicas=layout["replication_factor"],
            device_iterations=layout["device_iterations"],
            drop_last=training.drop_last,
            epochs=training.epochs,
            max_steps=training.max_steps,
        )
        for line in plan.lines(training.global_batch_size):
            self.say(line)
        plan.check()
        return plan

    def _identity(self, features: str, plan: BatchPlan) -> Dict[str, Any]:
        settings = {
            f"{part}.{key}": value
            for part, section in recipes.to_dict(self.recipe).items()
            for key, value in section.items()
        }
        kept = {key: value for key, value in settings.items() if key not in _FREE_TO_CHANGE and key != "ipu.pod"}
        engine = "reference" if self.target.name in ("cpu", "cuda") else "ipu"
        return {**kept, "engine": engine, "replicas": plan.replicas, "features": features}

    def _last_checkpoint(self, identity: Dict[str, Any]) -> checkpoint.Checkpoint:
        last, damaged = checkpoint.latest(self.folder)
        for note in damaged:
            self.say(f"note: {note}; going back to the one before")
        if last is None:
            raise CheckpointError(f"--resume {self.folder}: the run has no checkpoint; start again with --overwrite")
        differences = [
            f"{key} was {last.identity.get(key)!r}, is {identity.get(key)!r}"
            for key in sorted({*identity, *last.identity})
            if last.identity.get(key) != identity.get(key)
        ]
        if differences:
            raise CheckpointError(
                f"--resume {self.folder}: this would not continue the same run: {'; '.join(differences)}"
            )
        self.say(f"resuming from {last.path.name}")
        return last

    def _describe(self, layout: Dict[str, Any], splits: Any, rows: Rows, validation: Rows, plan: BatchPlan) -> None:
        write = run_folder.write_json
        write(self.folder / "recipe.json", recipes.to_dict(self.recipe))
        write(
            self.folder / "ipu_config.json",
            {**layout, "gradient_accumulation_steps": plan.gradient_accumulation},
        )
        write(self.folder / "environment.json", record.environment())
        write(
            self.folder / "data.json",
            {
                **dataclasses.asdict(splits.source),
                "features": {
                    part: {
                        "rows": each.features,
                        "sha256": each.fingerprint,
                        "real_tokens": each.real_tokens,
                        **each.counts,
                    }
                    for part, each in (("train", rows), ("validation", validation))
                },
                "order_sha256": order_hash(plan, self.recipe.training.seed),
            },
        )
        unanswerable = rows.counts.get("questions_whose_answer_no_window_holds")
        if unanswerable:
            self.say(f"note: no window holds the whole answer of {unanswerable} training questions")

    # --- the work ----------------------------------------------------------------------------------------------

    def _engine(self, model: Any, layout: Dict[str, Any], plan: BatchPlan, task: Any, rows: Rows) -> Engine:
        training = self.recipe.training
        loss, labels, outputs = rows.element_loss, rows.label_names, task.output_names
        if self.target.name in ("cpu", "cuda"):
            from ipu_finetune.training.reference import ReferenceEngine

            return ReferenceEngine(model, plan, loss, labels, outputs, training, self.target.name, rows.wrap)
        if self.target.emulated:
            from ipu_finetune import emulator

            emulator.install()
        # Only now is it certain which poptorch these modules will find.
        ipu = importlib.import_module("ipu_finetune.training.ipu")
        ipu_model = importlib.import_module("ipu_finetune.inference.ipu_model")
        settings = ipu_model.build_ipu_config(
            {**layout, "output_mode": "all"}, gradient_accumulation_steps=plan.gradient_accumulation, seed=training.seed
        )
        return ipu.IpuEngine(model, settings, plan, loss, labels, outputs, training, rows.wrap)

    def _compile(self, engine: Engine, plan: BatchPlan, rows: Rows) -> None:
        first = next(host_batches(plan, self.recipe.training.seed, 0))
        batch, weights = read_batch(rows.data, first, plan)
        with tqdm(total=1, desc="compiling", bar_format="{desc}: {elapsed}{postfix}", disable=not self.bars) as bar:
            with self._clock("compile"), watched(self.say, self.compile_timeout):
                engine.compile(batch, weights)
            bar.set_postfix_str(f"executable cache: {engine.facts.get('executable_cache', 'none')}")
            bar.update()

    @contextlib.contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun


def _speaker(progress: bool) -> Any:
    def say(line: str) -> None:
        if progress:
            print(line, file=sys.stderr, flush=True)
        else:
            logger.info(line)

    return say


def _drawn(names: List[str], init: str) -> str:
    if init == "config":
        return "; every weight drawn from the config"
    return f"; new: {', '.join(names)}" if names else ""


def _clear(folder: Path) -> None:
    """Remove an earlier run, so that none of its files is taken for this one's."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("record.json", "metrics.jsonl", "recipe.json", "data.json", "environment.json", "ipu_config.json"):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
