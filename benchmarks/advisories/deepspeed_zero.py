"""DeepSpeed's engine with several settings of ZeRO."""

import deepspeed
import torch.nn.functional as F
from torch import nn, optim, randint, randn, stack

BF16 = {"bf16": {"enabled": True}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


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


def with_engine(parts=1, types=None, **zero):
    sizes = {"train_micro_batch_size_per_gpu": 4 // parts, "gradient_accumulation_steps": parts}  # of 8, on two ranks
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **sizes, **(types or {})}

    def parallelize(model, mesh):
        engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
        return engine, Optimizer(engine)

    return parallelize


zero2 = with_engine(stage=2)
zero2_accumulates = with_engine(stage=2, parts=2)
zero2_in_place = with_engine(stage=2, contiguous_gradients=False, reduce_scatter=False)
bf16_zero0 = with_engine(stage=0, types=BF16)
bf16_zero1 = with_engine(stage=1, types=BF16)
bf16_zero1_sums = with_engine(stage=1, types=BF16 | SUMS)
bf16_zero1_at_once = with_engine(stage=1, types=SUMS | {"bf16": {"enabled": True, "immediate_grad_update": True}})


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
