# SPDX-License-Identifier: Apache-2.0
"""BERT-large on SQuAD v2.0, where questions may have no answer."""

from ipu_finetune.recipe import Goal, Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("bert-large", checkpoint="bert-large-uncased"),
    task=QuestionAnswering(dataset="squad_v2", max_length=384, doc_stride=128, version_2=True),
    ipu=Ipu(config="bert-large"),
    packing=Packing(max_sequences=6),
    training=Training(
        epochs=2,
        global_batch_size=256,
        micro_batch_size=1,
        learning_rate=6e-5,
        weight_decay=0.01,
    ),
    goal=Goal("f1", 81.9, source="arXiv 1810.04805, table 3: BERT-large, single model, SQuAD v2.0 dev"),
)
