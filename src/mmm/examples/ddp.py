"""DDP: every rank has the whole model and its own samples, and the gradients are all-reduced.

    launch python3 -m mmm.examples.ddp --accumulate 2

A step, on two ranks; g₀ and g₁ are the gradients of each rank's own samples::

                     rank 0                rank 1
      parameters     w                     w              the same on both
      samples        0 … b-1               b … 2b-1       b: --batch_size
      backward       g₀                    g₁
                      └──── all-reduce ────┘              in buckets of layers, while backward goes on to earlier ones
      gradient       g₀ + g₁               g₀ + g₁        the same on both
      optimizer      w' = w - lr (g₀+g₁)   w'             and so the parameters stay the same: none is ever sent

A ring all-reduce of P numbers over N ranks sends 2 (N-1)/N · P from each, hardly more for many ranks than for few
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

With --accumulate K a step's samples go through the model in K micro-batches. Only the last backward all-reduces
(``sync_gradients``); the others add to this rank's own gradient. Same losses, activations of b/K samples, one
all-reduce a step.

Before training, one gradient is worked out by hand (backward, then ``dist.all_reduce``) and compared with DDP's; after
it, the parameters of all ranks are compared.

Source: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from mmm.data import Batch
from mmm.errors import ConfigError
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize, sync_gradients
from mmm.parallel.data.replicas import Replicas
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.techniques import Techniques
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import parse
from mmm.trainer.report import print_once
from mmm.trainer.run import Run, start_run
from mmm.trainer.text import TextProgramOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions):
    """DDP on a small Transformer."""

    preset: Literal["debug", "small", "medium"] = "debug"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    accumulate: int = 1
    """Micro-batches of a step; one all-reduce for all of them."""


def train(config: Config) -> None:
    layout = Layout().fit(whoami().world_size)
    resolved = resolve(config, layout, default_batch=8)
    batch, global_batch, steps, tokens = resolved.batch, resolved.global_batch, resolved.steps, resolved.tokens
    model: nn.Module = resolved.model
    if config.accumulate < 1 or batch % config.accumulate:
        raise ConfigError(
            f"--accumulate {config.accumulate} does not divide the batch of {batch} a rank into equal "
            f"micro-batches: use a divisor of {batch}"
        )
    if config.summary:
        print_once(resolved.summary())
        return

    holds = footprint(model, config.optimizer, Techniques(data_parallel="ddp"))
    with start_run("ddp", config, layout, resolved.about_data, holds) as run:
        run.describe(**resolved.describe())
        mesh = build_mesh(layout, run.device.type, config.timeout)
        model = apply(model, mesh, transformer_plan(), run.precision, data_parallel="ddp", compile=config.compile)
        materialize(model, run.device, config.seed)  # the same weights on every rank: they come from the seed
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)

        mine = layout.dp_coordinate(run.rank.rank) * batch  # this rank's first sample of each global batch
        micro = batch // config.accumulate
        apart = compare_by_hand(run, model, tokens.batch(0, global_batch, mine, batch).to(run.device))
        run.log.info("all-reduce by hand and DDP: gradients differ by %.1e of the largest", apart)
        run.describe(by_hand_difference=apart)
        for step in range(steps):
            run.clock.start()
            total = torch.zeros((), device=run.device)  # this rank's share of the loss
            for i in range(config.accumulate):
                part = tokens.batch(step, global_batch, mine + i * micro, micro).to(run.device)
                run.clock.lap("dtd")
                sync_gradients(model, i == config.accumulate - 1)
                loss = cross_entropy(model(part.inputs), part.targets, part.count)
                total = total + loss.detach()
                run.clock.lap("dtf")
                loss.backward()
                run.clock.lap("dtb")
            optimizer.step()
            optimizer.zero_grad()
            run.clock.lap("dto")
            run.step(step, total, samples=global_batch, tokens=part.count, last=step == steps - 1)
        spread = parameter_spread(model)
        run.log.info("parameters of all ranks, after %d steps: differ by %.1e at most", steps, spread)
        run.describe(parameter_spread=spread)


def compare_by_hand(run: Run, model: nn.Module, part: Batch) -> float:
    """DDP's gradient against one summed by hand: their largest difference, over the largest number. A collective."""
    assert isinstance(model, Replicas)
    parameters = list(model.parameters())
    with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
        logits = model.module(part.inputs)  # the model inside: nothing talks
    own = torch.autograd.grad(cross_entropy(logits, part.targets, part.count), parameters)
    for gradient in own:
        dist.all_reduce(gradient)  # in place: the sum over the ranks
    cross_entropy(model(part.inputs), part.targets, part.count).backward()  # DDP: talks by itself
    summed = [p.grad for p in parameters if p.grad is not None]
    apart = max(float((a - b).abs().max()) for a, b in zip(summed, own, strict=True))
    largest = max(float(by_hand.abs().max()) for by_hand in own)
    model.zero_grad()
    return apart / largest


@torch.no_grad()
def parameter_spread(model: nn.Module) -> float:
    """The largest difference of a parameter between two ranks. A collective."""
    numbers = torch.cat([p.flatten() for p in model.parameters()])
    highest, lowest = numbers.clone(), numbers.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return float((highest - lowest).max())


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
