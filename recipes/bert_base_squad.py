# SPDX-License-Identifier: Apache-2.0
"""BERT-base on SQuAD v1.1, with the batch, learning rate and epochs of the BERT paper."""

from ipu_finetune.recipe import Goal, Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("bert-base", checkpoint="bert-base-uncased"),
    task=QuestionAnswering(dataset="squad", max_length=384, doc_stride=128),
    ipu=Ipu(config="bert-base"),
    packing=Packing(max_sequences=6),
    training=Training(
        epochs=3,
        global_batch_size=32,
        micro_batch_size=1,
        learning_rate=5e-5,
        weight_decay=0.01,
    ),
    goal=Goal("f1", 88.5, source="arXiv 1810.04805, table 2: BERT-base, single model, SQuAD v1.1 dev"),
)
