# SPDX-License-Identifier: Apache-2.0
"""BERT-large on SQuAD v1.1, in the pipeline of four IPUs that is published for it."""

from ipu_finetune.recipe import Goal, Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("bert-large", checkpoint="bert-large-uncased"),
    task=QuestionAnswering(dataset="squad", max_length=384, doc_stride=128),
    ipu=Ipu(config="bert-large"),
    packing=Packing(max_sequences=6),
    training=Training(
        epochs=2,
        global_batch_size=256,
        micro_batch_size=1,
        learning_rate=6e-5,
        weight_decay=0.01,
    ),
    goal=Goal("f1", 90.9, source="arXiv 1810.04805, table 2: BERT-large, single model, SQuAD v1.1 dev"),
)
