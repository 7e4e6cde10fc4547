"""HSDP: replicas of a model, each of them sharded. FSDP within a group of ranks, an all-reduce between the groups.

    launch python3 -m mmm.examples.hsdp --replicas 2

N ranks form a mesh of dp_replicate × dp_shard, R × S. Every rank has its own samples::

                        dp_shard: one replica of the model, in S shards
                        ┌─────────┬─────────┬─────────┬─────────┐
       dp_replicate:    │ rank 0  │ rank 1  │ rank 2  │ rank 3  │   replica 0: host 1
       R replicas,      │ shard 0 │ shard 1 │ shard 2 │ shard 3 │
       kept equal       ├─────────┼─────────┼─────────┼─────────┤
                        │ rank 4  │ rank 5  │ rank 6  │ rank 7  │   replica 1: host 2
                        │ shard 0 │ shard 1 │ shard 2 │ shard 3 │
                        └─────────┴─────────┴─────────┴─────────┘

How many elements a rank sends in a step, for P parameters (ring algorithms)::

      in a row        forward: all-gather, backward: all-gather, reduce-scatter     3 (S-1)/S · P
      in a column     after each reduce-scatter: all-reduce of its own shard        2 (R-1)/R · P/S

So the links in a row, ideally within a host, carry most of it, and each rank sends S times less between hosts. FSDP
over all N ranks (R = 1) keeps the least in memory and sends everything between hosts; DDP (S = 1) keeps everything.

Source: Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.examples._support.by_hand import check_difference, replica_spread
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer
from mmm.nn.init import parameter_count
from mmm.parallel import cross_entropy, draw_weights
from mmm.parallel.memory.measure import local_elements
from mmm.runtime.device import Precision


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.PlainTextConfig):
    """HSDP on a small Transformer. Each replica is sharded over the ranks that --replicas leaves."""

    CHOICES: ClassVar = example.SMALL
    BREAKS: ClassVar = {
        "one_axis": "FSDP is given only the axis that shards, not the one that replicates. Nothing is all-reduced "
        "between the replicas: each learns from its own samples, and they drift apart, though each by itself trains "
        "well.",
        "own_weights": "Each rank draws its weights with a seed of its own. Nothing ever makes the replicas equal: a "
        "sum of gradients of different models trains none of them.",
    }
    replicas: int = 2
    """Number of replicas of the model, R."""
    model: example.Model = example.Model(preset="debug")


def shard(model: Transformer, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard over dp_shard, and all-reduce gradients over dp_replicate where the mesh has that axis; in place.

    Args:
        mesh: (dp_replicate, dp_shard) for HSDP, (dp_shard,) for FSDP. The number of its axes is all that differs.
    """
    policy = MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=False)
    # A unit is all-gathered within its row when it computes. The model
    # itself comes last: it takes the parameters that are in no other unit.
    units: list[Any] = [
        model.tok_embeddings,
        *model.layers.values(),
        [model.norm, model.output],
        model,
    ]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    example.sum_gradients(model)


def train(config: Config) -> None:
    if config.replicas < 2:
        raise LayoutError(
            f"--replicas {config.replicas}: with one replica HSDP is FSDP; use at least 2, or mmm.examples.fsdp"
        )
    layout = example.fit(dp_replicate=config.replicas)
    job = example.resolve_own(config, layout, Techniques(data_parallel="hsdp"), batch_size=8)
    with example.start_run("hsdp", config, job) as run:
        sizes = (run.layout.dp_replicate, run.layout.dp_shard)
        mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
        # The groups of ranks along each axis: (dp_replicate, dp_shard) as nested lists, and its transpose.
        rows = mesh.mesh.tolist()
        columns = mesh.mesh.T.tolist()
        run.describe(groups={"dp_shard": rows, "dp_replicate": columns})
        run.log.info("all-gather and reduce-scatter (dp_shard) in: %s", " ".join(map(str, rows)))
        run.log.info("all-reduce (dp_replicate) in: %s", " ".join(map(str, columns)))

        model = job.model.to(run.precision.storage)
        if config.break_ == "one_axis":
            shard(model, mesh["dp_shard"], run.precision)
        else:
            shard(model, mesh, run.precision)
        # Each rank draws its own shard, as a function of the seed: all replicas get the same weights.
        draw_weights(model, run.device, config.run.seed)
        if config.break_ == "own_weights":
            draw_own_weights(model, run.rank.rank)
        run.log.info("%s", example.sharded_model(model))
        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            loss = cross_entropy(model(step.batch.inputs), step.batch.targets, step.batch.count)
            step.log(loss)
            loss.backward()
            optimizer.step()
            if step.last:
                # Counted before zero_grad, while the gradients still exist.
                elements = local_elements(model, optimizer)
            optimizer.zero_grad()

        report(run, model, elements)
        shards = [p.to_local().flatten() for p in model.parameters() if isinstance(p, DTensor)]
        # The ranks of a column hold the same shard, each of its own replica.
        spread = replica_spread(torch.cat(shards), mesh["dp_replicate"].get_group())
        run.log.info(
            "the %d replicas, after %d steps: differ by %.1e at most",
            config.replicas,
            step.index + 1,
            spread,
        )
        run.describe(replicas_differ=spread)
        if config.break_ is None:
            check_difference(run, spread, "the replicas differ")


def draw_own_weights(model: Transformer, seed: int) -> None:
    """The mistake: draw the matrices of this rank from a generator of its own."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            matrix = parameter.data
            nn.init.normal_(matrix.to_local() if isinstance(matrix, DTensor) else matrix, std=0.02)


def report(run: example.Run, model: nn.Module, elements: dict[str, int]) -> None:
    """Log and record what rank 0 holds, and what a rank sends, next to the theory.

    Args:
        elements: number of elements on this rank, by kind.
    """
    full = parameter_count(model)
    # R and S of the formulas above.
    r = run.layout.dp_replicate
    s = run.layout.dp_shard
    local = elements["parameters"]
    run.log.info(
        "rank 0 has %s of %s parameters (1/%d in theory: %.1f)",
        f"{local:,}",
        f"{full:,}",
        s,
        full / s,
    )
    in_row = 3 * (s - 1) / s * full
    in_column = 2 * (r - 1) / r * full / s
    run.log.info(
        "a rank sends in a step, in theory: in its row %.0f elements, in its column %.0f",
        in_row,
        in_column,
    )
    run.describe(local=elements, parameters=full)


if __name__ == "__main__":
    example.main(train, Config, __doc__)
