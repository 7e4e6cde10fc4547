"""ZeRO, stages 1, 2 and 3: the same training, and what each stage no longer keeps on every rank.

    launch python3 -m mmm.examples.zero

DDP (stage 0) keeps N replicas of everything. Each stage shards one thing more over the N ranks; with P parameters and
AdamW, which has two numbers of state for each::

                parameters   gradients   optimizer state    a rank sends in a step
      stage 0       P            P            2P            2P    all-reduce
      stage 1       P            P            2P/N          3P    all-reduce, all-gather of the updated parameters
      stage 2       P            P/N          2P/N          2P    reduce-scatter, all-gather
      stage 3       P/N          P/N          2P/N          3P    all-gather twice, reduce-scatter (this is FSDP)

(Sent: times (N-1)/N.) Stages 1 and 2 are by hand: each rank updates its slice of each parameter. Each stage trains for
5 steps, from the same weights to the same losses; a table says what the rank that holds most holds (MB: 10⁶ bytes).
With offload, and with communication during backward: ``mmm.trainer.lm --parallel zero2``.
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

    CHOICES: ClassVar = {"preset": example.SMALL, "optimizer": ("adamw",)}  # SGD has no state to shard
    BREAKS: ClassVar = {
        "no_gather": "Stages 1 and 2 leave out the all-gather after the optimizer's step. Each rank has updated its "
        "own slices alone: the rest of its parameters stays as it was, and from the second step on no two ranks agree."
    }
    model: example.TransformerOptions = example.TransformerOptions(preset="debug")


class Slices(nn.Module):
    """ZeRO-1 or 2 by hand: every rank has all parameters of `module`, and updates its slice of each. `parameters()` are
    those slices: views of the parameters, so that what an optimizer does to a slice, it does to the parameter."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, stage: int) -> None:
        super().__init__()
        self.forward = module.forward
        self.mesh = mesh
        self.ranks = mesh.size()
        self.stage = stage
        self.slices: dict[str, nn.Parameter] = {}
        self.memory: list[Tensor] = []  # of each parameter, padded
        for name, p in module.named_parameters():
            memory = F.pad(p.detach().flatten(), (0, -p.numel() % self.ranks))  # N equal slices
            p.data = memory[: p.numel()].view(p.shape)
            self.memory.append(memory)
            own = self.slices[name] = nn.Parameter(self.own(memory))
            p.register_post_accumulate_grad_hook(lambda p, own=own: self.reduce(own, p))

    def own(self, full: Tensor) -> DTensor:
        return DTensor.from_local(full.chunk(self.ranks)[self.mesh.get_local_rank()], self.mesh, [Shard(0)])

    def reduce(self, own: nn.Parameter, p: Tensor) -> None:
        """As soon as backward has made the gradient of this rank's samples: sum it over the ranks, keep the slice."""
        gradient = F.pad(p.grad.flatten(), (0, -p.numel() % self.ranks))  # type: ignore[union-attr]
        p.grad = None
        if self.stage == 1:
            dist.all_reduce(gradient)
            own.grad = self.own(gradient)  # a view: the full gradient stays in memory
        else:
            local = gradient.new_empty(len(gradient) // self.ranks)
            dist.reduce_scatter(local, list(gradient.chunk(self.ranks)))
            own.grad = DTensor.from_local(local, self.mesh, [Shard(0)])

    def gather(self) -> None:
        """The optimizer has updated this rank's slices: fill in those of the others."""
        for memory in self.memory:
            dist.all_gather(list(memory.chunk(self.ranks)), self.own(memory).to_local().clone())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.slices.items()


def train_stage(
    run: example.Run, config: Config, mesh: DeviceMesh, job: example.Job, stage: int
) -> tuple[dict[str, int], list[float]]:
    """A few steps from the initial weights: the most numbers that any rank holds, and the loss of each step."""
    with torch.device("meta"):
        full = Transformer(job.sizes).to(run.precision.storage)
    if stage == 3:  # all parameters are sharded; a unit is gathered for its forward and its backward
        for unit in (full.tok_embeddings, *full.layers.values(), [full.norm, full.output], full):
            fully_shard(unit, mesh=mesh)  # type: ignore[arg-type]
        example.sum_gradients(full)
    draw_weights(full, run.device, run.seed)
    for p in full.parameters() if stage == 0 else ():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # type: ignore[arg-type]
    model = Slices(full, mesh, stage) if stage in (1, 2) else full
    losses = []
    optimizer = example.make_optimizer("adamw", model.parameters(), config.optimizer.lr)
    run.state(model=model, optimizer=optimizer)
    for step in example.text_steps(run, job, place={"stage": stage}):
        with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
            logits = model(step.batch.inputs)
        loss = cross_entropy(logits, step.batch.targets, step.batch.count)
        step.log(loss)
        loss.backward()
        optimizer.step()
        if isinstance(model, Slices) and config.break_ is None:
            model.gather()
        elements = most_elements(model, optimizer, run.device)  # while there are gradients
        step.row |= elements
        optimizer.zero_grad()
        losses.append(step.local_loss)
    return elements, run.global_sums(torch.stack(losses))


def train(config: Config) -> bool:
    """Every stage, and the table. Whether the losses of all stages are the same."""
    techniques = Techniques(data_parallel="ddp")  # stage 0, which holds most
    job = example.resolve_own(config, example.fit(), techniques, batch_size=2, max_iters=5)
    with example.start_run("zero", config, job) as run:
        mesh = init_device_mesh(run.device.type, (run.layout.dp,), mesh_dim_names=("dp_shard",))
        stages = [train_stage(run, config, mesh, job, stage) for stage in range(4)]
        return report_stages(run, stages, job.model)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
