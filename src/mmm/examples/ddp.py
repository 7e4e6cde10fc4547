"""DDP: every rank has the whole model and its own samples, and the gradients are all-reduced.

    launch python3 -m mmm.examples.ddp --accumulate 2

One step on two ranks. g₀ and g₁ are the gradients that each rank computes from its own samples::

                     rank 0                rank 1
      parameters     w                     w              the same on both
      samples        0 … b-1               b … 2b-1       b: --batch_size
      backward       g₀                    g₁
                      └──── all-reduce ────┘              in buckets of layers, while backward works on earlier layers
      gradient       g₀ + g₁               g₀ + g₁        the same on both
      optimizer      w' = w - lr (g₀+g₁)   w'             so the parameters stay the same, and are never sent

In a ring all-reduce of P numbers over N ranks each rank sends 2 (N-1)/N · P numbers: hardly more for many ranks than
for few (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

With --accumulate K the samples of a step go through the model in K micro-batches. Only the last backward all-reduces;
the others add to this rank's own gradient (PyTorch's ``no_sync``). The losses are the same, the activations in memory
are those of b/K samples, and there is still one all-reduce a step.

Before training, the example sums one gradient by hand (backward, then ``dist.all_reduce``) and compares it with DDP's.
After training, it compares the parameters of all ranks.

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

    CHOICES: ClassVar = example.SMALL
    BREAKS: ClassVar = {
        "no_all_reduce": "The backward pass does not call all-reduce: each rank updates its replica with the gradient "
        "of its own samples. The loss of the first step is right, because the weights still are. From then on the "
        "replicas drift apart.",
        "same_samples": "Every rank takes the first rank's samples, as if the data did not depend on the rank. All "
        "compute the same gradient: N ranks learn from the samples of one.",
    }
    accumulate: int = 1
    """Number of micro-batches in a step. There is one all-reduce for all of them."""
    model: example.Model = example.Model(preset="debug")


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
        # The weights are a function of the seed, so they are the same on every rank and nobody sends them.
        draw_weights(model, run.device, config.run.seed)
        ddp = DDP(model, gradient_as_bucket_view=True)
        optimizer = config.optimizer.make(model.parameters())
        global_tokens = job.global_batch_size * config.data.seq_length

        def local_loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            # inputs, targets: (micro-batch, seq)
            with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
                logits = module(inputs)
            # The sum over this rank's tokens, divided by the tokens of *all* ranks: local losses add up to the global
            # one, so their gradients have to be summed.
            return cross_entropy(logits, targets, global_tokens)

        batch = job.local_batch(job.data.train, 0, run.rank.rank).to(run.device)
        difference = compare_by_hand(ddp, lambda module: local_loss(module, batch.inputs, batch.targets))
        run.log.info("all-reduce by hand and DDP: gradients differ by %.1e of the largest", difference)
        run.describe(by_hand_difference=difference)
        check_difference(run, difference, "DDP's gradients and those summed by hand differ")

        coordinate = run.rank.rank
        if config.break_ == "same_samples":
            coordinate = 0
        run.state(model=ddp, optimizer=optimizer)
        for step in example.text_steps(run, job, coordinate=coordinate):
            micro_inputs = step.batch.inputs.chunk(config.accumulate)
            micro_targets = step.batch.targets.chunk(config.accumulate)
            for i, (inputs, targets) in enumerate(zip(micro_inputs, micro_targets, strict=True)):
                is_last = i == config.accumulate - 1
                # This is what `with ddp.no_sync():` sets. Only the backward of the last micro-batch all-reduces.
                ddp.require_backward_grad_sync = is_last and config.break_ != "no_all_reduce"
                loss = local_loss(ddp, inputs, targets)
                step.log(loss)
                # DDP averages the gradients over the ranks. The factor turns its mean into the sum that we need.
                (loss * layout.dp).backward()
                run.clock.lap("dtb")
            optimizer.step()
            optimizer.zero_grad()

        # Nobody has sent a parameter, yet all replicas should still be equal, bit by bit.
        replica = torch.cat([p.flatten() for p in model.parameters()])
        spread = replica_spread(replica, group=None)
        run.log.info(
            "parameters of all ranks, after %d steps: differ by %.1e at most",
            step.index + 1,
            spread,
        )
        run.describe(parameter_spread=spread)
        if config.break_ is None:
            check_difference(run, spread, "the ranks' parameters differ")


def compare_by_hand(ddp: DDP, local_loss: Callable[[nn.Module], Tensor]) -> float:
    """Compare DDP's gradients with gradients that are summed by hand. A collective of all ranks.

    Returns:
        The largest difference of an element, divided by the largest element of all gradients.
    """
    parameters = list(ddp.parameters())
    # The model inside of DDP does not communicate: this is the gradient of this rank's samples.
    by_hand = torch.autograd.grad(local_loss(ddp.module), parameters)
    for gradient in by_hand:
        # In place, by all ranks: what was this rank's gradient becomes the sum over the ranks.
        dist.all_reduce(gradient)

    # The same with DDP: its hooks all-reduce bucket by bucket, during backward.
    (local_loss(ddp) * dist.get_world_size()).backward()
    differences = []
    for p, gradient in zip(parameters, by_hand, strict=True):
        if p.grad is None:
            differences.append(math.inf)
        else:
            differences.append(float((p.grad - gradient).abs().max()))
    ddp.zero_grad()
    largest = worst(float(gradient.abs().max()) for gradient in by_hand)
    return worst(differences) / largest


if __name__ == "__main__":
    example.main(train, Config, __doc__)
