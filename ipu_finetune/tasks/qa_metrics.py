# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of answers, by the definition of the SQuAD evaluation (Rajpurkar et al., 2016 and 2018).

Two texts are compared after lower-casing, removing ASCII punctuation, removing the words a, an and the, and
collapsing white space. *Exact match* asks whether the results are equal. *F1* is the harmonic mean of precision and
recall over the two multisets of words. Each answer is scored against every reference answer and keeps the best.

Where no word is left on either side, F1 is 1 if both are empty and 0 otherwise. That is SQuAD 2.0's rule (the 1.1
script scores 0 even for an exact match); it only matters for references such as "The", and keeps F1 >= exact match.
"""

import re
import string
from collections import Counter
from typing import Dict, List, Sequence, Tuple

from ipu_finetune.errors import IpuFinetuneError

__all__ = ["exact_match", "f1", "normalize", "score"]

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return `text` in the form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROP_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """Return 1.0 if both texts are the same after `normalize`, else 0.0."""
    return float(normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words of `prediction` against those of `reference`, from 0.0 to 1.0."""
    predicted, expected = normalize(prediction).split(), normalize(reference).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    # 2PR / (P + R) with P = common/len(predicted) and R = common/len(expected)
    return 2.0 * common / (len(predicted) + len(expected))


def score(references: Sequence[Sequence[str]], predictions: Sequence[str], version_2: bool = False) -> Dict[str, float]:
    """Score one prediction per question.

    Args:
        references: the acceptable answers of each question; none for a question without an answer.
        predictions: the answer given to each question, in the same order; "" for no answer.
        version_2: whether questions may have no answer. It adds `HasAns_exact`, `HasAns_f1`, `HasAns_total` and the
            same three for `NoAns`, the names of SQuAD 2.0's script; a group without questions is left out.

    Returns:
        `f1` and `exact_match` in percent, and `examples`, the number of questions scored.

    Raises:
        IpuFinetuneError: nothing to score, a prediction missing, or a question without reference in a v1.1 run.
    """
    if len(references) != len(predictions):
        raise IpuFinetuneError(
            f"{len(predictions):,} answers for {len(references):,} questions; each needs exactly one"
        )
    if not references:
        raise IpuFinetuneError("no question to score")
    pairs: List[Tuple[float, float]] = []
    answerable: List[bool] = []
    for golden, prediction in zip(references, predictions):
        answerable.append(bool(golden))
        if version_2:
            # An answer of articles or punctuation alone counts as none, as in SQuAD 2.0's script.
            golden = [text for text in golden if normalize(text)] or [""]
        elif not golden:
            raise IpuFinetuneError("a question without reference answer cannot be scored unless task.version_2=true")
        pairs.append(
            (max(exact_match(prediction, text) for text in golden), max(f1(prediction, text) for text in golden))
        )
    result = {**dict(zip(("exact_match", "f1"), _percent(pairs))), "examples": len(pairs)}
    if version_2:
        for name, wanted in (("HasAns", True), ("NoAns", False)):
            group = [pair for pair, has_answer in zip(pairs, answerable) if has_answer is wanted]
            result[f"{name}_total"] = len(group)
            if group:
                result[f"{name}_exact"], result[f"{name}_f1"] = _percent(group)
    return result


def _percent(pairs: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
    return 100.0 * sum(pair[0] for pair in pairs) / len(pairs), 100.0 * sum(pair[1] for pair in pairs) / len(pairs)
