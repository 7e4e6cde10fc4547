"""ZeRO, stages 1, 2 and 3: the same training, and what each stage no longer keeps on every rank.

    launch python3 -m mmm.examples.zero

DDP (stage 0) keeps N replicas of everything. Each stage shards one thing more over the N ranks. With P parameters and
AdamW, which keeps two numbers of state for each parameter, a rank holds::

                parameters   gradients   optimizer state    a rank sends in a step
      stage 0       P            P            2P            2P    all-reduce
      stage 1       P            P            2P/N          3P    all-reduce, all-gather of the updated parameters
      stage 2       P            P/N          2P/N          2P    reduce-scatter, all-gather
      stage 3       P/N          P/N          2P/N          3P    all-gather twice, reduce-scatter (this is FSDP)

(What is sent is to be multiplied by (N-1)/N.) Stages 1 and 2 are written by hand: each rank updates its own slice of
each parameter. Each stage trains for 5 steps from the same weights, and has the same losses. A table shows what the
rank that holds most holds (1 MB is 10⁶ bytes). For ZeRO with offload, and with communication during backward, see
``mmm.trainer.lm --parallel zero2``.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from mmm.examples import _support as example
from mmm.examples._support.zero_stages import most_elements, report_stages
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer
from mmm.parallel import cross_entropy, draw_weights


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.PlainTextConfig):
    """ZeRO stages 0 to 3 on a Transformer, one after the other; --max_iters steps (5 unless given) of each."""

    # SGD is not offered: it has no state to shard.
    CHOICES: ClassVar = {**example.SMALL, "optimizer": ("adamw",)}
    BREAKS: ClassVar = {
        "no_gather": "ZeRO's stages 1 and 2 leave out the all-gather after the optimizer's step. Each rank has "
        "updated only its own slices, and the rest of its parameters stays as it was: from the second step on no two "
        "ranks agree.",
    }
    model: example.Model = example.Model(preset="debug")


class Slices(nn.Module):
    """ZeRO-1 or 2 by hand: every rank has all parameters of `module`, and updates only its own slice of each.

    `parameters()` are those slices. They are views of the parameters, so what an optimizer does to a slice, it does to
    the parameter.

    Args:
        module: the model, with its weights; the same on every rank.
        mesh: a mesh with one axis of N ranks.
        stage: 1 keeps the full gradient in memory, 2 keeps only this rank's slice.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, stage: int) -> None:
        super().__init__()
        self.forward = module.forward
        self.mesh = mesh
        self.ranks = mesh.size()
        self.stage = stage
        self.slices: dict[str, nn.Parameter] = {}
        # Each parameter, flat, padded with zeros so that N equal slices make it up: (N · slice,).
        self.memory: list[Tensor] = []
        for name, p in module.named_parameters():
            memory = F.pad(p.detach().flatten(), (0, -p.numel() % self.ranks))
            p.data = memory[: p.numel()].view(p.shape)
            self.memory.append(memory)
            own_slice = nn.Parameter(self.slice_of(memory))
            self.slices[name] = own_slice
            p.register_post_accumulate_grad_hook(lambda p, own_slice=own_slice: self.reduce(own_slice, p))

    def slice_of(self, full: Tensor) -> DTensor:
        """This rank's slice of a flat tensor, as a view: a DTensor, so that it knows that it is a shard."""
        local = full.chunk(self.ranks)[self.mesh.get_local_rank()]
        return DTensor.from_local(local, self.mesh, [Shard(0)])

    def reduce(self, own_slice: nn.Parameter, p: Tensor) -> None:
        """Sum a gradient over the ranks, and keep this rank's slice of it. A collective of all ranks.

        Autograd calls it in backward, as soon as it has the gradient of this rank's samples.
        """
        gradient = F.pad(p.grad.flatten(), (0, -p.numel() % self.ranks))  # type: ignore[union-attr]
        p.grad = None
        if self.stage == 1:
            dist.all_reduce(gradient)
            # A view: the full gradient stays in memory.
            own_slice.grad = self.slice_of(gradient)
        else:
            # Each rank gets only the sum of its own slice; the full gradient is freed.
            local = gradient.new_empty(len(gradient) // self.ranks)
            dist.reduce_scatter(local, list(gradient.chunk(self.ranks)))
            own_slice.grad = DTensor.from_local(local, self.mesh, [Shard(0)])

    def gather(self) -> None:
        """Fill in the slices that the other ranks' optimizers have updated. A collective of all ranks."""
        for memory in self.memory:
            # A copy, because all_gather writes to the memory that this slice is a view of.
            own_slice = self.slice_of(memory).to_local().clone()
            dist.all_gather(list(memory.chunk(self.ranks)), own_slice)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.slices.items()


def shard_everything(model: Transformer, mesh: DeviceMesh) -> None:
    """Stage 3 is FSDP: a unit is all-gathered for its forward and its backward, and freed after each."""
    units: list[Any] = [
        model.tok_embeddings,
        *model.layers.values(),
        [model.norm, model.output],
        model,
    ]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    example.sum_gradients(model)


def train_stage(
    run: example.Run,
    config: Config,
    mesh: DeviceMesh,
    job: example.Job,
    stage: int,
) -> tuple[dict[str, int], list[float]]:
    """Train for a few steps from the initial weights. A collective of all ranks.

    Returns:
        The elements of each kind on the rank that holds most, and the loss of each step.
    """
    with torch.device("meta"):
        full = Transformer(job.sizes).to(run.precision.storage)
    if stage == 3:
        shard_everything(full, mesh)
    draw_weights(full, run.device, run.seed)

    model: nn.Module = full
    if stage == 0:
        for p in full.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # type: ignore[arg-type]
    elif stage < 3:
        model = Slices(full, mesh, stage)
    losses = []
    optimizer = example.make_optimizer("adamw", model.parameters(), config.optimizer.lr)
    run.state(model=model, optimizer=optimizer)
    for step in example.text_steps(run, job, place={"stage": stage}):
        with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
            logits = model(step.batch.inputs)
        loss = cross_entropy(logits, step.batch.targets, step.batch.count)
        step.log(loss)
        # The gradients are reduced in here, by the hooks.
        loss.backward()
        optimizer.step()
        if isinstance(model, Slices) and config.break_ is None:
            model.gather()
        # Counted before zero_grad, while the gradients still exist.
        elements = most_elements(model, optimizer, run.device)
        step.row |= elements
        optimizer.zero_grad()
        losses.append(step.local_loss)
    return elements, run.global_sums(torch.stack(losses))


def train(config: Config) -> bool:
    """Train with every stage, and log the table. Returns whether all stages have the same losses."""
    # The checks before the start assume stage 0, which holds most.
    techniques = Techniques(data_parallel="ddp")
    job = example.resolve_own(config, example.fit(), techniques, batch_size=2, max_iters=5)
    with example.start_run("zero", config, job) as run:
        mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
        stages = [train_stage(run, config, mesh, job, stage) for stage in range(4)]
        return report_stages(run, stages, job.model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
