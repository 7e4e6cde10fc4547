"""The same bits on any number of ranks: gradients are summed in one fixed order, and a hash of all weights shows it.

    launch -n 1 --device cpu python3 -m mmm.examples.same_bits
    launch -n 4 --device cpu python3 -m mmm.examples.same_bits               # the same SHA-256
    launch -n 4 --device cpu python3 -m mmm.examples.same_bits --ordinary    # another one

Floating-point numbers are rounded after every addition, so the last bits of a sum depend on its order. Usually that
order follows from the number of ranks: a rank adds up the gradients of its own samples, and an all-reduce or a
reduce-scatter adds up the ranks. Here the samples of a step are split into a fixed number of *lanes*. A rank computes
its lanes one after the other, and one tree adds them up. With four lanes, whose gradients are g₀ to g₃::

      ranks    their lanes           --ordinary                   by the tree
        1      g₀ g₁ g₂ g₃           ((g₀ + g₁) + g₂) + g₃        (g₀ + g₂) + (g₁ + g₃)
        2      g₀ g₁ | g₂ g₃         (g₀ + g₁) + (g₂ + g₃)        (g₀ + g₂) + (g₁ + g₃)
        4      g₀ | g₁ | g₂ | g₃     in the backend's order       (g₀ + g₂) + (g₁ + g₃)

The tree adds lanes that are far apart first. So the sums over ranks come first, in each lane's backward, and then those
over a rank's lanes. FSDP's reduce-scatter becomes an all-to-all, which only moves bytes, and this rank adds.
Another number of lanes (--lanes), another data type, kind of device or version of PyTorch gives other bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmm.errors import ConfigError, LayoutError
from mmm.examples import _support as example
from mmm.parallel import cross_entropy, draw_weights
from mmm.run import options
from mmm.runtime.device import refuse_faults
from mmm.units import counted


@dataclass(frozen=True, kw_only=True)
class Config(example.PlainTextConfig):
    """FSDP on a small Transformer, with the same weights, to the last bit, on any number of ranks."""

    # --global_batch_size stays: with --batch_size the number of ranks would decide what a step trains on.
    LEFT_OUT: ClassVar = (*example.PlainTextConfig.LEFT_OUT, "batch_size")
    CHOICES: ClassVar = {**example.SMALL, "optimizer": ("adamw",)}
    lanes: int = 4
    """Number of lanes that the samples of a step are split into: a power of 2."""
    ordinary: bool = False
    """Sum gradients as FSDP usually does, to see that the bits then depend on the number of ranks."""
    model: example.Model = example.Model(preset="debug")
    run: options.RunFlags = options.RunFlags(plots=True, global_batch_size=16)

    def check(self) -> None:
        """Raises ConfigError if the lanes cannot be added up in pairs; DeviceError: this PyTorch's FSDP has one sum."""
        if self.lanes < 1 or self.lanes.bit_count() != 1:
            raise ConfigError(f"--lanes {self.lanes}: the tree adds pairs, so give a power of 2, such as 4 or 8")
        if not self.ordinary:
            refuse_faults("exact")


def tree_sum(summands: Sequence[Tensor]) -> Tensor:
    """Add up 2ᵏ tensors of one shape in pairs, those that are farthest apart first: of four 0 + 2 and 1 + 3."""
    while len(summands) > 1:
        half = len(summands) // 2
        pairs = zip(summands[:half], summands[half:], strict=True)
        summands = [a + b for a, b in pairs]
    return summands[0]


class TreeReduceScatter:
    """FSDP's reduce-scatter, in which the collective only moves bytes, and a tree adds."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum of this rank's shard, (shard,), to `output_tensor`. `input_tensor` is (ranks · shard,)."""
        assert op == dist.ReduceOp.SUM
        # Chunk r goes to rank r. Each rank then has its own shard from every rank, in the order of the ranks.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        chunks = received.chunk(group.size())
        output_tensor.copy_(tree_sum(chunks))


def train(config: Config) -> None:
    layout = example.fit()
    ranks = layout.dp
    lanes = config.lanes
    if lanes % ranks:
        raise LayoutError(f"--lanes {lanes} does not divide over {ranks} ranks: start 1, 2, 4, …, at most {lanes}")
    job = example.resolve_own(config, layout)
    samples = job.global_batch_size
    if samples % lanes:
        raise ConfigError(f"--global_batch_size {samples} does not divide over --lanes {lanes}: give a multiple of it")
    with example.start_run("same_bits", config, job) as run:
        mesh = init_device_mesh(run.device.type, (ranks,), mesh_dim_names=("dp_shard",))
        dtype = run.precision.storage
        model = job.model.to(dtype)
        # Gradients are summed in float32 at least, also where the model computes in bf16.
        policy = MixedPrecisionPolicy(run.precision.compute, reduce_dtype=dtype, cast_forward_inputs=False)
        for unit in (*model.layers.values(), model):
            fsdp = fully_shard(unit, mesh=mesh, mp_policy=policy)
            if not config.ordinary:
                fsdp.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
        example.sum_gradients(model)
        draw_weights(model, run.device, config.run.seed)
        parameters = list(model.parameters())
        # Not fused: that kernel may round the last elements of a shard otherwise, and each mesh has other shards.
        optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, foreach=True)
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            # This rank's lanes. Each has (samples / lanes, seq) tokens on every mesh, so its kernels add alike.
            own_lanes = step.batch.split(lanes // ranks)
            gradients = []
            for lane in own_lanes:
                # The usual way: add up this rank's lanes as they come, and reduce-scatter once, after the last one.
                is_last = lane is own_lanes[-1]
                model.set_requires_gradient_sync(is_last or not config.ordinary)
                loss = cross_entropy(model(lane.inputs), lane.targets, step.count)
                step.log(loss)
                loss.backward()
                run.clock.lap("dtb")
                if not config.ordinary:
                    gradients.append([p.grad for p in parameters])
                    optimizer.zero_grad()
            if not config.ordinary:
                # Each lane is summed over the ranks already. The rest of the tree is over the lanes of this rank.
                for p, *by_lane in zip(parameters, *gradients, strict=True):
                    p.grad = tree_sum(by_lane)
            optimizer.step()
            optimizer.zero_grad()

        weights = hashlib.sha256()
        for p in parameters:
            # All ranks gather the full tensor.
            full = p.full_tensor().detach()
            bits = full.cpu().numpy()
            weights.update(bits.tobytes())
        digest = weights.hexdigest()
        run.log.info("weights after %s on %s: sha256 %s", counted(job.steps, "step"), counted(ranks, "rank"), digest)
        run.describe(sha256=digest)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
