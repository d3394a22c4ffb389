# SPDX-License-Identifier: Apache-2.0
"""`ctc_beam_search_decoder`: the most likely label sequences of a connectionist temporal classification."""

import dataclasses
from typing import Any, Dict, List, Tuple

import numpy as np
import torch

from ..device.errors import Error
from ..device.state import current
from ._recording import record

__all__ = ["ctc_beam_search_decoder"]

Path = Tuple[int, ...]
_NONE = -np.inf


def _search(log_probs: "np.ndarray[Any, Any]", blank: int, width: int, top: int) -> List[Tuple[float, Path]]:
    """Return the most likely label sequences of one sample with their log probabilities, best first.

    A beam is a label sequence. For each one the probability of all alignments that end in a blank is kept apart from
    that of those that end in its last label: the same label again continues the latter and lengthens the former only.

    Args:
        log_probs: (steps, classes).
        blank: the class that stands for no label.
        width: number of beams that survive a step.
        top: number of sequences returned.
    """
    beams: List[Path] = [()]
    ends_blank = np.zeros(1)
    ends_label = np.full(1, _NONE)
    for frame in log_probs:
        total = np.logaddexp(ends_blank, ends_label)
        last = np.array([beam[-1] if beam else blank for beam in beams])
        rows = np.flatnonzero(last != blank)
        stay_blank = total + frame[blank]
        stay_label = np.full(len(beams), _NONE)
        stay_label[rows] = ends_label[rows] + frame[last[rows]]
        longer = total[:, None] + frame[None, :]
        longer[rows, last[rows]] = ends_blank[rows] + frame[last[rows]]
        longer[:, blank] = _NONE
        _merge(beams, longer, stay_label)
        beams, ends_blank, ends_label = _best(beams, stay_blank, stay_label, longer, width)
    total = np.logaddexp(ends_blank, ends_label)
    return [(float(total[index]), beams[index]) for index in np.argsort(-total, kind="stable")[:top]]


def _merge(beams: List[Path], longer: "np.ndarray[Any, Any]", stay_label: "np.ndarray[Any, Any]") -> None:
    """Add a beam that another one grows into to that other one."""
    known: Dict[Path, int] = {beam: index for index, beam in enumerate(beams)}
    for index, beam in enumerate(beams):
        parent = known.get(beam[:-1]) if beam else None
        if parent is not None:
            stay_label[index] = np.logaddexp(stay_label[index], longer[parent, beam[-1]])
            longer[parent, beam[-1]] = _NONE


def _best(
    beams: List[Path],
    stay_blank: "np.ndarray[Any, Any]",
    stay_label: "np.ndarray[Any, Any]",
    longer: "np.ndarray[Any, Any]",
    width: int,
) -> Tuple[List[Path], "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    count, classes = longer.shape
    scores = np.concatenate([np.logaddexp(stay_blank, stay_label), longer.reshape(-1)])
    chosen = [index for index in np.argsort(-scores, kind="stable")[:width] if scores[index] > _NONE]
    paths: List[Path] = []
    blanks, labels = np.full(len(chosen), _NONE), np.full(len(chosen), _NONE)
    for position, index in enumerate(chosen):
        if index < count:
            paths.append(beams[index])
            blanks[position], labels[position] = stay_blank[index], stay_label[index]
        else:
            row, label = divmod(int(index) - count, classes)
            paths.append((*beams[row], label))
            labels[position] = longer[row, label]
    return paths, blanks, labels


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """The node of the graph that decodes a batch."""

    blank: int
    beam_width: int
    top_paths: int
    __name__ = "ctc_beam_search_decoder"

    def examples(self, probs: torch.Tensor) -> List[torch.Tensor]:
        """Return tensors that look like the results; those of a batch, before decoding."""
        steps, batch = probs.shape[:2]
        return [
            torch.full((batch, self.top_paths), _NONE, dtype=probs.dtype),
            torch.zeros((batch, self.top_paths), dtype=torch.int32),
            torch.full((batch, self.top_paths, steps), self.blank, dtype=torch.int32),
        ]

    def __call__(self, probs: torch.Tensor, lengths: torch.Tensor) -> List[torch.Tensor]:
        """Decode real tensors."""
        scores, sizes, paths = results = self.examples(probs)
        frames = probs.detach().to(torch.float64).numpy()
        for sample, steps in enumerate(lengths.tolist()):
            found = _search(frames[: int(steps), sample], self.blank, self.beam_width, self.top_paths)
            for rank, (score, path) in enumerate(found):
                scores[sample, rank] = score
                sizes[sample, rank] = len(path)
                paths[sample, rank, : len(path)] = torch.tensor(path, dtype=torch.int32)
        return results


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> List[torch.Tensor]:
    """Return the most likely label sequences.

    Args:
        probs: log probabilities, of shape (input_length, batch_size, num_classes).
        lengths: how many steps of each sample count, of shape (batch_size,).
        blank: the class that stands for no label.
        beam_width: sequences that are followed; at least `top_paths`.
        top_paths: sequences that are returned.

    Returns:
        Log probabilities (batch_size, top_paths), best first; lengths (batch_size, top_paths), int32; and labels
        (batch_size, top_paths, input_length), int32, filled up with `blank`. Where there are fewer sequences than were
        asked for, the log probability is minus infinity.

    Raises:
        Error: an argument of the wrong type, shape or size.
    """
    for name, value in (("probs", probs), ("lengths", lengths)):
        if not isinstance(value, torch.Tensor):
            raise Error(
                f"ctc_beam_search_decoder: {name} must be a torch.tensor argument. {type(value).__name__} is not "
                "supported."
            )
    if probs.dim() != 3:
        raise Error(
            "Input probabilities tensor must be rank-3 for `ctc_beam_search_decoder`, got the shape "
            f"{tuple(probs.shape)}"
        )
    if tuple(lengths.shape) != (probs.shape[1],) or lengths.is_floating_point():
        raise Error(
            f"ctc_beam_search_decoder: lengths must hold {probs.shape[1]} integers, one for each sample, got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    if not 0 <= blank < probs.shape[2]:
        raise Error(f"ctc_beam_search_decoder: blank must be one of the {probs.shape[2]} classes, got {blank}")
    if not 1 <= top_paths <= beam_width:
        raise Error(
            f"ctc_beam_search_decoder: top_paths must be at least 1 and at most beam_width, got {top_paths} and "
            f"{beam_width}"
        )
    decoder = _Decoder(blank, beam_width, top_paths)
    if current.recorder is None:
        return decoder(probs, lengths)
    return record(decoder, (probs, lengths), decoder.examples(probs))
