"""DeepSpeed's engine: ZeRO 2 with accumulation, and bf16 without ZeRO."""

import deepspeed
import torch.nn.functional as F
from torch import nn, optim, randint, randn, stack


class Optimizer:  # the engine clears gradients itself
    def __init__(self, engine):
        self.step = engine.step
        self.zero_grad = int


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batch():
    return randn(8, 8), randint(4, (8,))


def make_optimizer(parameters):
    return optim.SGD(parameters, lr=0.1, foreach=False)


def with_engine(stage, parts=1, bf16=False):
    """A function parallelize(model, mesh) for these settings."""
    config = {
        "train_micro_batch_size_per_gpu": 4 // parts,  # of 8, on two ranks
        "gradient_accumulation_steps": parts,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
    }

    def parallelize(model, mesh):
        engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
        return engine, Optimizer(engine)

    return parallelize


zero2 = with_engine(2)
zero2_accumulates = with_engine(2, parts=2)
bf16_zero0 = with_engine(0, bf16=True)
bf16_zero1 = with_engine(1, bf16=True)


def step(program, batch, mesh):
    if mesh is None:
        return F.cross_entropy(program(batch[0]), batch[1])
    engine, _ = program
    losses = []
    parts = engine.gradient_accumulation_steps()
    for inputs, targets in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        if losses:
            engine.step()  # between micro-batches: it only counts
        losses.append(F.cross_entropy(engine(inputs), targets))
        engine.backward(losses[-1])
    return stack(losses).detach().mean()
