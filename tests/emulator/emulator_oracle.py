# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one host call, written out in plain PyTorch: what the emulator is compared with."""

import torch

from ipu_finetune.emulator import poptorch


def options(D=1, A=1, R=1, **settings):
    """poptorch.Options with the batch arithmetic set."""
    opts = poptorch.Options()
    opts.deviceIterations(D).replicationFactor(R)
    opts.Training.gradientAccumulation(A)
    for name, value in settings.items():
        getattr(opts, name)(value)
    return opts


def rows(d, a, r, D, A, R, B):
    """Rows of micro-batch (d, a, r) in a combined batch: replica innermost."""
    start = ((d * A + a) * R + r) * B
    return slice(start, start + B)


def plain_step(model, loss_of, inputs, optimizer, D=1, A=1, R=1, mean=True, clip=None):
    """D weight updates by a hand-written loop; return the loss of every micro-batch in [D, A, R] order."""
    B = inputs[0].shape[0] // (D * A * R)
    losses = []
    for d in range(D):
        optimizer.zero_grad()
        total = 0.0
        for a in range(A):
            for r in range(R):
                piece = [tensor[rows(d, a, r, D, A, R, B)] for tensor in inputs]
                loss = loss_of(model, *piece)
                losses.append(loss.detach())
                total = total + loss
        (total / (A * R) if mean else total).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.stack(losses)


class Regression(torch.nn.Module):
    """Two layers and a squared error."""

    def __init__(self, width=4):
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.second = torch.nn.Linear(width, 2)

    def forward(self, x, y=None):
        out = self.second(torch.tanh(self.first(x)))
        if y is None:
            return out
        return out, torch.nn.functional.mse_loss(out, y)


def regression_loss(model, x, y):
    """The loss of `Regression`, for `plain_step`."""
    return torch.nn.functional.mse_loss(model.second(torch.tanh(model.first(x))), y)


def make(seed=0, width=4):
    """A seeded `Regression` and a twin with the same weights."""
    torch.manual_seed(seed)
    model = Regression(width)
    twin = Regression(width)
    twin.load_state_dict(model.state_dict())
    return model, twin


def data(n, seed=1):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)
