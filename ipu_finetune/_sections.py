# SPDX-License-Identifier: Apache-2.0
"""The sections of a recipe, except `ipu`: each option with its type, default, help, range and command-line flag."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from ipu_finetune._fields import field

__all__ = ["Goal", "Model", "Packing", "QuestionAnswering", "Training"]


@dataclass(frozen=True)
class Model:
    """Which model is fine-tuned."""

    name: str = field(help="short name, the first word on the command line")
    checkpoint: str = field(help="a folder, or a name on the Hugging Face hub", flag="--model")
    init: str = field(
        "pretrained", help="load the weights, or draw them from the config", choices=("pretrained", "config")
    )
    revision: Optional[str] = field(None, help="commit, branch or tag on the hub")
    dropout: Optional[float] = field(
        None, help="hidden and attention dropout; none keeps the checkpoint's", low=0, below=1
    )
    allow_pickle: bool = field(
        False, help="also load weights that exist only as a pickle (weights_only)", flag="--allow-pickle"
    )
    push_to_hub: Optional[str] = field(None, help="repository on the hub that gets the model after the run")


@dataclass(frozen=True)
class QuestionAnswering:
    """Extractive question answering on SQuAD-like data."""

    kind: ClassVar[str] = "question-answering"

    dataset: str = field(help="name of the data set, the second word on the command line")
    data: Optional[str] = field(
        None, help="local file in place of the data set: SQuAD JSON, CSV, JSONL or Parquet", flag="--data"
    )
    validation_data: Optional[str] = field(None, help="local file to validate on")
    validate_every: int = field(
        5, help="without validation data, every n-th article of `data` validates instead of training", low=2
    )
    max_length: int = field(384, help="tokens of a window, question and special tokens included", low=8)
    doc_stride: int = field(128, help="tokens that neighbouring windows of a context share", low=0)
    max_answer_length: int = field(30, help="longest answer that is predicted, tokens", low=1)
    n_best: int = field(20, help="best spans that share an answer's probability", low=1)
    version_2: bool = field(False, help="questions may have no answer (SQuAD v2)")
    null_threshold: float = field(
        0.0, help="how much better than the best answer the null answer must score (SQuAD v2)"
    )


@dataclass(frozen=True)
class Packing:
    """Several sequences in one row, each blind to the others."""

    enabled: bool = field(True, help="pack the rows, in training and in evaluation")
    max_sequences: int = field(6, help="most sequences in one pack", low=1)
    algorithm: str = field("best", help="how packs are filled", choices=("best", "lpfhp", "spfhp"))
    verify: bool = field(False, help="prove on this model, before training, that nothing leaks within a pack")


@dataclass(frozen=True)
class Training:
    """How the model is trained; the global batch is in sequences, whatever the machine."""

    global_batch_size: int = field(help="sequences of one weight update, over all replicas", low=1)
    learning_rate: float = field(help="peak learning rate", above=0)
    epochs: float = field(2.0, help="passes over the data; the schedule is planned over them", above=0)
    max_steps: Optional[int] = field(
        None,
        help="stop after so many weight updates; the schedule stays planned over the epochs",
        flag="--max-steps",
        low=1,
    )
    micro_batch_size: int = field(1, help="rows, or packs, that a replica sees at once", low=1)
    eval_batch_size: Optional[int] = field(
        None, help="rows or packs at once in evaluation; none: the micro-batch", low=1
    )
    optimizer: str = field("adamw", help="optimizer", choices=("adamw", "adam", "sgd", "lamb"))
    scheduler: str = field("linear", help="learning rate after the warm-up", choices=("linear", "cosine", "constant"))
    warmup_ratio: float = field(0.1, help="share of the updates in which the learning rate rises", low=0, below=1)
    weight_decay: float = field(0.0, help="weight decay, not on biases and layer norms", low=0)
    max_grad_norm: Optional[float] = field(None, help="clip the gradient to this norm; none: no clipping", above=0)
    loss_scaling: float = field(1.0, help="factor of the loss in the backward pass; removed before the update", above=0)
    precision: str = field("fp32", help="type of weights and activations", choices=("fp32", "fp16", "bf16"))
    seed: int = field(42, help="of weights, order and dropout", flag="--seed", low=0, high=2**32 - 1)
    save_steps: Optional[int] = field(None, help="updates between checkpoints; none: after each epoch", low=1)
    eval_steps: Optional[int] = field(None, help="updates between evaluations; none: at the end", low=1)
    logging_steps: int = field(10, help="updates between rows of metrics.jsonl", low=1)
    drop_last: bool = field(True, help="leave the rows that fill no combined batch unused (they are counted)")
    keep_checkpoints: int = field(2, help="newest checkpoints that are kept", low=1)
    stop_after_nonfinite: Optional[int] = field(
        10, help="stop after so many NaN or infinite losses in a row; none: never", low=1
    )
    report_to: str = field("none", help="service that gets the metrics beside the run folder", choices=("none",))


@dataclass(frozen=True)
class Goal:
    """A published figure that the run is held against."""

    metric: str = field(help="name of the metric, e.g. f1")
    value: float = field(help="published value")
    source: str = field(help="where it was published")
