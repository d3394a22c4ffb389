# SPDX-License-Identifier: Apache-2.0
"""MiniLM (6 layers, hidden size 384) on SQuAD v2.0, on a single IPU."""

from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("minilm", checkpoint="sentence-transformers/all-MiniLM-L6-v2", dropout=0.0),
    task=QuestionAnswering(dataset="squad_v2", max_length=384, doc_stride=128, version_2=True),
    ipu=Ipu(config="minilm"),
    packing=Packing(max_sequences=6),
    training=Training(
        epochs=4,
        global_batch_size=8,
        micro_batch_size=2,
        learning_rate=2e-4,
        warmup_ratio=0.1,
        scheduler="linear",
    ),
)
