# SPDX-License-Identifier: Apache-2.0
"""BERT-base on SQuAD v2.0, with the epochs and learning rate that the BERT paper used there for BERT-large."""

from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("bert-base", checkpoint="bert-base-uncased"),
    task=QuestionAnswering(dataset="squad_v2", max_length=384, doc_stride=128, version_2=True),
    ipu=Ipu(config="bert-base"),
    packing=Packing(max_sequences=6),
    training=Training(
        epochs=2,
        global_batch_size=48,
        micro_batch_size=1,
        learning_rate=5e-5,
        weight_decay=0.01,
    ),
)
