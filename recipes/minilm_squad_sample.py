# SPDX-License-Identifier: Apache-2.0
"""MiniLM on the small question-answering set that comes with the package: the demo, with no network and no IPU."""

from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("minilm", checkpoint="sentence-transformers/all-MiniLM-L6-v2", dropout=0.0),
    # Nine rows in ten are at most 200 tokens long; the rest become windows.
    task=QuestionAnswering(dataset="squad-sample", max_length=208, doc_stride=64),
    ipu=Ipu(config="minilm"),
    # A row is one short paragraph that fills it nearly; two seldom fit.
    packing=Packing(enabled=False),
    training=Training(
        epochs=2.5,
        global_batch_size=4,
        micro_batch_size=4,
        learning_rate=1.5e-4,
        warmup_ratio=0.1,
        scheduler="linear",
    ),
)
