# SPDX-License-Identifier: Apache-2.0
"""Models behind one static shape: any number of rows goes in, as many come out, in order."""

import abc
import warnings
from typing import List, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import nn

from ipu_finetune.errors import DataError, UsageError

__all__ = ["Predictor", "TorchPredictor"]


class Predictor(abc.ABC):
    """Runs rows through a model whose shapes were fixed when it was compiled.

    Args:
        input_names: columns that the model takes.
        batch: rows per call; a smaller last batch is filled up and the filling is cut off again.
        length: tokens per row; shorter rows are padded with zeros (and the attention mask with them), the outputs are
            cut back. None takes it from the first call.
        too_long: what happens to rows of more than `length` tokens: ``error``, or ``truncate`` with one warning.
    """

    def __init__(
        self, input_names: Sequence[str], batch: int, length: Optional[int] = None, too_long: str = "error"
    ) -> None:
        if too_long not in ("error", "truncate"):
            raise UsageError(f"too_long={too_long!r}: 'error' or 'truncate'")
        self.input_names = list(input_names)
        self.batch = batch
        self.length = length
        self.too_long = too_long
        self._warned = False

    def __call__(self, columns: Mapping[str, np.ndarray]) -> List[np.ndarray]:
        """Return each output for all rows, float32, [rows, ...].

        Raises:
            DataError: a row has more tokens than the compiled shape and `too_long` is ``error``.
        """
        inputs = {name: np.asarray(columns[name]) for name in self.input_names if name in columns}
        rows, given = inputs[self.input_names[0]].shape[:2]
        if rows == 0:
            raise DataError("there is no row to predict")
        if self.length is None:
            self.length = given
        inputs = {name: self._fit_length(column, given) for name, column in inputs.items()}
        pieces: List[List[np.ndarray]] = []
        for first in range(0, rows, self.batch):
            index = np.minimum(np.arange(first, first + self.batch), rows - 1)
            outputs = self.run({name: torch.from_numpy(column[index]) for name, column in inputs.items()})
            kept = min(self.batch, rows - first)
            pieces.append([self._cut(output[:kept], given) for output in outputs])
        return [np.concatenate(parts) for parts in zip(*pieces)]

    @abc.abstractmethod
    def run(self, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one full batch, each input [batch, length]."""

    def close(self) -> None:  # noqa: B027 - most predictors hold nothing that must be given back
        """Give the device back."""

    def _fit_length(self, column: np.ndarray, given: int) -> np.ndarray:
        assert self.length is not None
        if column.ndim < 2 or given == self.length:
            return column
        if given < self.length:
            return np.pad(column, [(0, 0), (0, self.length - given)] + [(0, 0)] * (column.ndim - 2))
        if self.too_long == "error":
            raise DataError(
                f"{len(column)} rows of {given} tokens do not fit the compiled length {self.length}; split them, "
                "compile for a longer shape, or ask for truncation (too_long='truncate')"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(f"rows of {given} tokens are cut to the compiled length {self.length}", stacklevel=3)
        return column[:, : self.length]

    def _cut(self, output: torch.Tensor, given: int) -> np.ndarray:
        array = output.detach().float().cpu().numpy()
        if array.ndim > 1 and array.shape[1] == self.length and given < self.length:
            array = array[:, :given]
        return array


class TorchPredictor(Predictor):
    """A plain Transformers model on a CPU or CUDA device.

    Args:
        model: already on its device.
        output_names: attributes of the model's answer.
        dtype: of autocast; None computes in the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        input_names: Sequence[str],
        output_names: Sequence[str],
        batch: int,
        length: Optional[int] = None,
        too_long: str = "error",
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(input_names, batch, length, too_long)
        self.model = model
        self.output_names = list(output_names)
        self.dtype = dtype

    def run(self, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one full batch in evaluation mode; the model's mode is as before afterwards."""
        device = next(self.model.parameters()).device
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), torch.autocast(
                device.type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None
            ):
                outputs = self.model(**{name: tensor.to(device) for name, tensor in batch.items()})
        finally:
            self.model.train(training)
        return [outputs[name] for name in self.output_names]
