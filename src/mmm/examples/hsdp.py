"""HSDP: replicas of a model, each of them sharded: FSDP within a group of ranks, an all-reduce between the groups.

    launch python3 -m mmm.examples.hsdp --replicas 2

N ranks stand on a mesh of dp_replicate × dp_shard, R × S. Every rank has its own samples::

                        dp_shard: one replica of the model, in S shards
                        ┌─────────┬─────────┬─────────┬─────────┐
       dp_replicate:    │ rank 0  │ rank 1  │ rank 2  │ rank 3  │   replica 0: host 1
       R replicas,      │ shard 0 │ shard 1 │ shard 2 │ shard 3 │
       kept equal       ├─────────┼─────────┼─────────┼─────────┤
                        │ rank 4  │ rank 5  │ rank 6  │ rank 7  │   replica 1: host 2
                        │ shard 0 │ shard 1 │ shard 2 │ shard 3 │
                        └─────────┴─────────┴─────────┴─────────┘

What a rank sends in a step, of P parameters (ring algorithms)::

      in a row        forward: all-gather, backward: all-gather, reduce-scatter     3 (S-1)/S · P
      in a column     after each reduce-scatter: all-reduce of its own shard        2 (R-1)/R · P/S

So the links in a row, ideally within a host, carry most, and those between hosts S times less for each rank. FSDP over
all N ranks (R = 1) keeps the least in memory and sends everything between hosts; DDP (S = 1) keeps everything.

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
from mmm.nn.draw import parameter_count
from mmm.parallel import cross_entropy, draw_weights
from mmm.parallel.memory.measure import local_elements
from mmm.runtime.device import Precision


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions, example.PlainTextConfig):
    """HSDP on a small Transformer. Each replica is sharded over the ranks that --replicas leaves."""

    CHOICES: ClassVar = {"preset": example.SMALL}
    BREAKS: ClassVar = {
        "one_axis": "FSDP gets the mesh's row alone. Nothing is all-reduced between the rows: each replica learns from "
        "its own samples, and the replicas drift apart, though each by itself trains well.",
        "own_weights": "Each rank draws its weights by normal_, seeded with its rank. Nothing ever makes the replicas "
        "equal: sums of gradients of different models train none of them.",
    }
    replicas: int = 2
    """Replicas of the model: R."""
    model: example.TransformerOptions = example.TransformerOptions(preset="debug")


def shard(model: Transformer, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard over dp_shard, and all-reduce gradients over dp_replicate where the mesh has it; in place."""
    policy = MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=False)
    units: list[Any] = [model.tok_embeddings, *model.layers.values(), [model.norm, model.output], model]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    example.sum_gradients(model)


def train(config: Config) -> None:
    if config.replicas < 2:
        one = f"--replicas {config.replicas}: with one replica HSDP is FSDP"
        raise LayoutError(f"{one}; use at least 2, or mmm.examples.fsdp")
    layout = example.fit(dp_replicate=config.replicas)
    job = example.resolve_own(config, layout, Techniques(data_parallel="hsdp"), batch_size=8)
    with example.start_run("hsdp", config, job) as run:
        sizes = (run.layout.dp_replicate, run.layout.dp_shard)
        mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
        rows = mesh.mesh.tolist()  # the groups of ranks along each axis
        columns = mesh.mesh.T.tolist()
        run.describe(groups={"dp_shard": rows, "dp_replicate": columns})
        run.log.info("all-gather and reduce-scatter (dp_shard) in: %s", " ".join(map(str, rows)))
        run.log.info("all-reduce (dp_replicate) in: %s", " ".join(map(str, columns)))

        model = job.model.to(run.precision.storage)
        shard(model, mesh["dp_shard"] if config.break_ == "one_axis" else mesh, run.precision)
        draw_weights(model, run.device, config.run.seed)  # each rank its own shard; the replicas are equal
        if config.break_ == "own_weights":
            torch.manual_seed(run.rank.rank)
            for matrix in (p.data for p in model.parameters() if p.ndim > 1):
                nn.init.normal_(matrix.to_local() if isinstance(matrix, DTensor) else matrix, std=0.02)
        run.log.info("%s", example.sharded_model(model))
        optimizer = config.optimizer.make(model.parameters())
        run.state(model=model, optimizer=optimizer)
        for step in example.text_steps(run, job):
            loss = cross_entropy(model(step.batch.inputs), step.batch.targets, step.batch.count)
            step.log(loss)
            loss.backward()
            optimizer.step()
            if step.last:
                elements = local_elements(model, optimizer)  # while there are gradients
            optimizer.zero_grad()

        full = parameter_count(model)
        r, s = sizes
        text = f"rank 0 has {elements['parameters']:,} of {full:,} parameters (1/{s} in theory: {full / s:.1f})"
        run.log.info("%s", text)
        in_row = 3 * (s - 1) / s * full
        in_column = 2 * (r - 1) / r * full / s
        run.log.info(
            "a rank sends in a step, in theory: in its row %.0f elements, in its column %.0f", in_row, in_column
        )
        shards = [p.to_local().flatten() for p in model.parameters() if isinstance(p, DTensor)]
        spread = replica_spread(torch.cat(shards), mesh["dp_replicate"].get_group())
        run.log.info("the %d replicas, after %d steps: differ by %.1e at most", r, step.number + 1, spread)
        run.describe(local=elements, parameters=full, replicas_differ=spread)
        if config.break_ is None:
            check_difference(run, spread, "the replicas differ")


if __name__ == "__main__":
    example.main(train, Config, __doc__)
