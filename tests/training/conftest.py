# SPDX-License-Identifier: Apache-2.0
"""Engines around a toy model, for the rules that both targets must keep."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def emulated():
    """The emulator stands in for poptorch; stays for the session, since optimum-graphcore binds to it at import."""
    from ipu_finetune import emulator

    emulator.install()


@pytest.fixture(params=["cpu", "emulator"])
def build_engine(request, emulated):
    """Return a function (model, plan, element_loss, labels, outputs, training) -> engine, for each target."""
    from ipu_finetune.recipe import Training

    def build(model, plan, element_loss, labels, outputs, **training):
        settings = Training(
            **{
                "global_batch_size": plan.global_batch,
                "learning_rate": 0.1,
                "micro_batch_size": plan.micro_batch_size,
                "optimizer": "sgd",
                "warmup_ratio": 0.0,
                "scheduler": "constant",
                **training,
            }
        )
        if request.param == "cpu":
            from ipu_finetune.training.reference import ReferenceEngine

            return ReferenceEngine(model, plan, element_loss, labels, outputs, settings, "cpu")
        from optimum.graphcore import IPUConfig

        from ipu_finetune.training.ipu import IpuEngine

        config = IPUConfig(
            layers_per_ipu=[1],
            gradient_accumulation_steps=plan.gradient_accumulation,
            replication_factor=plan.replicas,
            device_iterations=plan.device_iterations,
            output_mode="all",
        )
        return IpuEngine(model, config, plan, element_loss, labels, outputs, settings)

    build.target = request.param
    return build


@pytest.fixture
def toy_model(emulated):
    """Return a function that builds a linear model with fixed weights, usable on both targets."""
    import torch
    from optimum.graphcore.modeling_utils import PipelineMixin

    class Toy(torch.nn.Module, PipelineMixin):
        config = None

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)
            with torch.no_grad():
                self.linear.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
                self.linear.bias.fill_(0.1)

        def forward(self, x):
            return {"y": self.linear(x).squeeze(-1)}

    return Toy
