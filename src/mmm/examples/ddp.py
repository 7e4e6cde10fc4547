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
(``no_sync``); the others add to this rank's own gradient. Same losses, activations of b/K samples, one
all-reduce a step.

Before training, one gradient is summed by hand (backward, then ``dist.all_reduce``) and compared with DDP's; after
it, the parameters of all ranks are compared.

Source: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mmm.comparison import worst
from mmm.errors import ConfigError
from mmm.examples import _support as example
from mmm.examples._support.by_hand import check_difference, replica_spread
from mmm.layout import Techniques
from mmm.parallel import cross_entropy, draw_weights


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.PlainTextConfig):
    """DDP on a small Transformer."""

    CHOICES: ClassVar = {"preset": example.SMALL}
    BREAKS: ClassVar = {
        "no_all_reduce": "No backward all-reduces: each rank updates its replica with the gradient of its own samples. "
        "The loss of the first step is right, since the weights still are; from then on the replicas drift apart.",
        "same_samples": "Every rank takes the first rank's samples, as where the data does not depend on the rank. All "
        "compute the same gradient: N ranks learn from the samples of one.",
    }
    accumulate: int = 1
    """Micro-batches of a step; one all-reduce for all of them."""
    model: example.TransformerOptions = example.TransformerOptions(preset="debug")


def train(config: Config) -> None:
    layout = example.fit()
    job = example.resolve_own(config, layout, Techniques(data_parallel="ddp"), batch_size=8)
    if config.accumulate < 1 or job.local_batch_size % config.accumulate:
        raise ConfigError(
            f"--accumulate {config.accumulate} does not divide the batch of {job.local_batch_size} a rank into "
            f"equal micro-batches: use a divisor of {job.local_batch_size}"
        )
    with example.start_run("ddp", config, job) as run:
        model = job.model.to(run.precision.storage)
        draw_weights(model, run.device, config.run.seed)  # the same weights on every rank: they come from the seed
        ddp = DDP(model, gradient_as_bucket_view=True)
        optimizer = config.optimizer.make(model.parameters())

        def local_loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
                logits = module(inputs)
            return cross_entropy(logits, targets, job.global_batch_size * config.data.seq_length)

        batch = job.local_batch(job.data.train, 0, run.rank.rank).to(run.device)
        difference = compare_by_hand(ddp, lambda module: local_loss(module, batch.inputs, batch.targets))
        run.log.info("all-reduce by hand and DDP: gradients differ by %.1e of the largest", difference)
        run.describe(by_hand_difference=difference)
        check_difference(run, difference, "DDP's gradients and those summed by hand differ")
        coordinate = 0 if config.break_ == "same_samples" else run.rank.rank
        run.state(model=ddp, optimizer=optimizer)
        for step in example.text_steps(run, job, coordinate=coordinate):
            micro = (tensor.chunk(config.accumulate) for tensor in (step.batch.inputs, step.batch.targets))
            for i, (inputs, targets) in enumerate(zip(*micro, strict=True)):
                last = i == config.accumulate - 1
                ddp.require_backward_grad_sync = last and config.break_ != "no_all_reduce"  # what ddp.no_sync() sets
                loss = local_loss(ddp, inputs, targets)
                step.log(loss)
                (loss * layout.dp).backward()  # DDP averages; local losses are divided by the global count: sum
                run.clock.lap("dtb")
            optimizer.step()
            optimizer.zero_grad()
        spread = replica_spread(torch.cat([p.flatten() for p in model.parameters()]), group=None)
        run.log.info("parameters of all ranks, after %d steps: differ by %.1e at most", step.number + 1, spread)
        run.describe(parameter_spread=spread)
        if config.break_ is None:
            check_difference(run, spread, "the ranks' parameters differ")


def compare_by_hand(ddp: DDP, local_loss: Callable[[nn.Module], Tensor]) -> float:
    """DDP's gradient against one summed by hand: their largest difference, over the largest element. A collective."""
    parameters = list(ddp.parameters())
    by_hand = torch.autograd.grad(local_loss(ddp.module), parameters)  # the model inside: no communication
    for gradient in by_hand:
        dist.all_reduce(gradient)  # in place: the sum over the ranks
    (local_loss(ddp) * dist.get_world_size()).backward()
    differences = []
    for p, gradient in zip(parameters, by_hand, strict=True):
        differences.append(math.inf if p.grad is None else float((p.grad - gradient).abs().max()))
    ddp.zero_grad()
    return worst(differences) / worst(float(gradient.abs().max()) for gradient in by_hand)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
