# SPDX-License-Identifier: Apache-2.0
"""MiniLM on the small question-answering set that comes with the package: the demo, with no network and no IPU."""

from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("minilm", checkpoint="sentence-transformers/all-MiniLM-L6-v2", dropout=0.0),
    task=QuestionAnswering(dataset="squad-sample", max_length=256, doc_stride=64),
    ipu=Ipu(config="minilm"),
    packing=Packing(),
    training=Training(
        epochs=2,
        global_batch_size=8,
        micro_batch_size=4,
        learning_rate=3e-4,
    ),
)
