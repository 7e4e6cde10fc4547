"""Space: every field is sharded over the ranks by its rows, for samples that are too large for one of them.

    launch python3 -m mmm.examples.space
    launch -n 2 --device cpu python3 -m mmm.examples.space --break halo

All ranks have the same samples, and each has a strip of their rows. A convolution also needs the rows next to
its own, the halo. Each rank sends its first row up and its last row down, so that with 3 ranks rank 1 computes::

                          rank 0        rank 1        rank 2
      rows of the field   0 1 2 3       4 5 6 7       8 9 10 11
      forward             · 0 1 2 3 4   3 4 5 6 7 8   7 8 9 10 11 ·     ·: zeros, the convolution's padding
                                    └──────┘     └───────┘
      backward            the gradient of a halo goes home to the rank that has the row, and is added to its own

A U-Net looks at a field, and says how high it will be at each place after a wind has moved it by some rows. In it

- convolutions of 3 × 3 take a row above and a row below: `Halo`;
- a convolution and a transposed one that halve and double the field have kernels of 2 × 2 and a stride of 2: each
  rank has whole pairs of rows, so they take none;
- group norms take the mean and the variance over all rows: sums over the ranks, in forward and in backward.

All else treats each place by itself. Parameters are whole on every rank, and their gradients are sums over all ranks.
``mmm.trainer.vit --model swin --cp 2`` does it for a model whose forwards nobody has replaced by hand.

Source: Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism", 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mmm.data import Batch
from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.layout import batch_sizes
from mmm.nn.init import Init
from mmm.parallel import cross_entropy, draw_weights
from mmm.run import options
from mmm.runtime.ranks import whoami

ROWS = 64
COLUMNS = 32
WAVES = 4
# Rows that the wind has moved the field by, where the answer is taken.
WIND = 3
# Channels of the U-Net, and what it tells apart: low, in between, high.
WIDTH = 8
CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions):
    """Fields over all ranks, on a small U-Net."""

    BREAKS: ClassVar = {
        "halo": "The gradients of a halo do not go home: backward drops them, as where rows are received without "
        "autograd. The loss of the first step is right, because only gradients are wrong.",
        "norm": "Each rank normalizes by the mean and the variance of its own rows, as a norm does that knows nothing "
        "of other ranks.",
    }
    optimizer: example.Optimizer = example.Optimizer()
    duration: options.Duration = options.Duration()
    run: options.RunFlags = options.RunFlags(plots=True)

    # There is no end of fields.
    LEFT_OUT: ClassVar = (*example.LEFT_OUT, "epochs")
    CHOICES: ClassVar = {"optimizer": ("adamw", "sgd")}


class UNet(nn.Module):
    """Fields (batch, 1, rows, columns) to logits (batch, rows, columns, `CLASSES`). It knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.first_norm = nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.deep = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.deep_norm = nn.GroupNorm(2, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, width, rows, columns)
        fine = F.silu(self.first_norm(self.first(x)))
        # (batch, 2 · width, rows / 2, columns / 2)
        deep = F.silu(self.deep_norm(self.deep(self.down(fine))))
        # (batch, 2 · width, rows, columns)
        both = torch.cat((self.up(deep), fine), dim=1)
        return self.head(F.silu(self.last(both))).permute(0, 2, 3, 1)

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn. Norms are 1, biases 0."""
        if name.endswith("bias"):
            return Init("constant", 0.0)
        if "norm" in name:
            return Init("constant", 1.0)
        return Init("normal", 0.2)


def exchange(up: Tensor, down: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Send rows to the rank above and to the rank below; return what comes from above and from below, else zeros."""
    # torch.distributed addresses a message by the rank in the world, not in the group.
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank(group)
    from_above = torch.zeros_like(up)
    from_below = torch.zeros_like(down)
    messages = []
    for other, sent, received in ((own - 1, up, from_above), (own + 1, down, from_below)):
        # The field's first and last rank have one neighbour.
        if 0 <= other < len(ranks):
            messages.append(dist.P2POp(dist.isend, sent.contiguous(), ranks[other], group))
            messages.append(dist.P2POp(dist.irecv, received, ranks[other], group))
    # All at once: if every rank first sent and then received, all could wait for each other.
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return from_above, from_below


class Halo(torch.autograd.Function):
    """This rank's strip with a row of each neighbour: (batch, channels, rows, columns) to rows + 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, goes_home: bool = True) -> Tensor:
        ctx.group = group
        ctx.goes_home = goes_home
        above, below = exchange(x[:, :, :1], x[:, :, -1:], group)
        return torch.cat((above, x, below), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient[:, :, 1:-1].clone()
        if ctx.goes_home:
            # What forward took from the rank above is that rank's last row. Its gradient goes back up.
            from_above, from_below = exchange(gradient[:, :, :1], gradient[:, :, -1:], ctx.group)
            own[:, :, :1] += from_above
            own[:, :, -1:] += from_below
        # One gradient for each argument of forward: group and goes_home have none.
        return own, None, None


class Sum(torch.autograd.Function):
    """The sum over the ranks. The loss of every rank depends on it, so backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(gradient, ctx.group), None


def convolve(conv: Any, group: ProcessGroup, goes_home: bool, x: Tensor) -> Tensor:
    """The forward of a convolution of 3 × 3 on this rank's strip."""
    # Above and below the halo stands in for the padding; left and right each rank pads its rows itself.
    return F.conv2d(Halo.apply(x, group, goes_home), conv.weight, conv.bias, padding=(0, 1))


def normalize(norm: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    """The forward of a group norm on this rank's strip, (batch, channels, rows, columns)."""
    # (batch, groups, elements)
    grouped = x.unflatten(1, (norm.num_groups, -1)).flatten(2)
    elements = grouped.shape[2] * group.size()
    mean = Sum.apply(grouped.sum(2, keepdim=True), group) / elements
    centered = grouped - mean
    variance = Sum.apply(centered.square().sum(2, keepdim=True), group) / elements
    normalized = (centered * (variance + norm.eps).rsqrt()).view_as(x)
    return normalized * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)


def shard_rows(model: nn.Module, group: ProcessGroup, mistake: str | None = None) -> None:
    """Have a model compute with this rank's strip, in place: the forwards of what mixes rows are replaced."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.padding == (1, 1):
            module.forward = partial(convolve, module, group, mistake != "halo")  # type: ignore[method-assign]
        if isinstance(module, nn.GroupNorm) and mistake != "norm":
            module.forward = partial(normalize, module, group)  # type: ignore[method-assign]


def fields(run: example.Run, step: int, rows: Tensor) -> Batch:
    """Some rows of a step's fields: sums of waves sin(2π (m · row / ROWS + n · column / COLUMNS + phase)).

    Args:
        rows: which rows, (local rows,).

    Returns:
        Fields (samples, 1, local rows, COLUMNS) and classes (samples, local rows, COLUMNS), on the run's device.
    """
    samples = run.job.local_batch_size
    generator = torch.Generator().manual_seed(1000 * run.seed + step)
    # (2, samples, waves, 1, 1): m and n.
    m, n = torch.randint(-3, 4, (2, samples, WAVES, 1, 1), generator=generator)
    phase = torch.rand(samples, WAVES, 1, 1, generator=generator)
    across = n * torch.arange(COLUMNS) / COLUMNS + phase
    # The wind moves a field down. Now, and after it: (samples, local rows, COLUMNS) each.
    now, later = (torch.sin(2 * math.pi * (m * r[:, None] / ROWS + across)).sum(1) for r in (rows, rows - WIND))
    classes = torch.bucketize(later, torch.tensor([-0.5, 0.5]))
    return Batch(now[:, None].to(run.precision.storage), classes, samples * ROWS * COLUMNS).to(run.device)


def train(config: Config) -> None:
    config = example.for_a_mistake(config)
    ranks = whoami().world_size
    layout = example.fit(cp=ranks)
    if ROWS % (2 * ranks):
        raise LayoutError(f"{ROWS} rows over {ranks} ranks: each has whole pairs of rows; start 1, 2, 4, … {ROWS // 2}")
    # All ranks share the samples: dp is 1.
    samples, _ = batch_sizes(config.run.batch_size, config.run.global_batch_size, layout.dp, 8)
    steps = config.duration.steps(steps_per_epoch=0)
    with torch.device("meta"):
        model = UNet()
        sample = torch.zeros(samples, 1, ROWS, COLUMNS)
    job = example.Job(layout=layout, model=model, sample=sample, steps=steps)
    all_rows = torch.arange(ROWS)
    with example.start_run("space", config, job, lambda run, step: fields(run, step, all_rows)) as run:
        model.to(run.precision.storage)
        # The weights are a function of the seed: the same on every rank.
        draw_weights(model, run.device, config.run.seed)
        shard_rows(model, dist.group.WORLD, config.break_)  # type: ignore[arg-type]
        own_rows = all_rows.chunk(ranks)[run.rank.rank]
        batches = (fields(run, step, own_rows) for step in range(steps))
        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in run.steps(batches, steps, samples=samples):
            with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
                logits = model(step.batch.inputs)
            # The sum over this rank's places, divided by those of all ranks: local losses add up to the global one.
            loss = cross_entropy(logits, step.batch.targets, step.count)
            step.log(loss)
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    example.main(train, Config, __doc__)
