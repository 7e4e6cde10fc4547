"""HSDP: copies of a model, each of them cut: FSDP within a group of ranks, an all-reduce between the groups.

    launch python3 -m mmm.examples.hsdp --replicas 2

N ranks stand on a mesh of dp_replicate × dp_shard, R × S. Every rank has its own samples::

                          dp_shard: one copy of the model, cut in S parts
                        ┌────────┬────────┬────────┬────────┐
       dp_replicate:    │ rank 0 │ rank 1 │ rank 2 │ rank 3 │   copy 0: host 1
       R copies,        │ part 0 │ part 1 │ part 2 │ part 3 │
       kept equal       ├────────┼────────┼────────┼────────┤
                        │ rank 4 │ rank 5 │ rank 6 │ rank 7 │   copy 1: host 2
                        │ part 0 │ part 1 │ part 2 │ part 3 │
                        └────────┴────────┴────────┴────────┘

What a rank sends in a step, of P parameters (ring algorithms)::

      in a row        forward: all-gather, backward: all-gather, reduce-scatter     3 (S-1)/S · P
      in a column     after each reduce-scatter: all-reduce of its own part         2 (R-1)/R · P/S

So the links in a row, ideally within a host, carry most, and those between hosts S times less for each rank. FSDP over
all N ranks (R = 1) keeps the least in memory and sends everything between hosts; DDP (S = 1) keeps everything.

Source: Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.analysis.local_elements import local_elements
from mmm.errors import LayoutError
from mmm.models.weights import parameter_count
from mmm.parallel import Layout, Mesh, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.local import to_local
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.techniques import Techniques
from mmm.runtime.ranks import whoami
from mmm.trainer.fits import footprint
from mmm.trainer.flags import run_main
from mmm.trainer.optimizer import make_optimizer
from mmm.trainer.options import parse
from mmm.trainer.report import print_once, sharded_model
from mmm.trainer.run import start_run
from mmm.trainer.text import TextProgramOptions, resolve


@dataclass(frozen=True, kw_only=True)
class Config(TextProgramOptions):
    """HSDP on a small Transformer. Each copy is cut over the ranks that --replicas leaves."""

    preset: Literal["debug", "small", "medium"] = "debug"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    replicas: int = 2
    """Copies of the model: R."""


def train(config: Config) -> None:
    if config.replicas < 2:
        raise LayoutError(
            f"--replicas {config.replicas}: with one copy HSDP is FSDP; use at least 2, or mmm.examples.fsdp"
        )
    layout = Layout(dp_replicate=config.replicas).fit(whoami().world_size)
    resolved = resolve(config, layout, default_batch=8)
    model, batch, global_batch, steps = resolved.model, resolved.batch, resolved.global_batch, resolved.steps
    if config.summary:
        print_once(resolved.summary())
        return

    holds = footprint(model, config.optimizer, Techniques(data_parallel="hsdp"))
    with start_run("hsdp", config, layout, resolved.about_data, holds) as run:
        run.describe(**resolved.describe())
        mesh = build_mesh(layout, run.device.type, config.timeout)  # ("dp_replicate", "dp_shard")
        everyone: list[Any] = [None] * run.rank.world_size
        dist.all_gather_object(everyone, groups_of(mesh.device_mesh))
        rows, columns = (sorted({groups[axis] for groups in everyone}) for axis in ("dp_shard", "dp_replicate"))
        run.describe(groups={"dp_shard": rows, "dp_replicate": columns})
        run.log.info("all-gather and reduce-scatter (dp_shard) in: %s", " ".join(str(list(row)) for row in rows))
        run.log.info("all-reduce (dp_replicate) in: %s", " ".join(str(list(column)) for column in columns))

        apply(model, mesh, transformer_plan(), run.precision, data_parallel="hsdp", compile=config.compile)
        materialize(model, run.device, config.seed)
        run.log.info("%s", sharded_model(model))
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr)
        mine = layout.dp_coordinate(run.rank.rank) * batch  # this rank's first sample of each global batch
        for step in range(steps):
            run.clock.start()
            part = resolved.tokens.batch(step, global_batch, mine, batch).to(run.device)
            run.clock.lap("dtd")
            loss = cross_entropy(model(part.inputs), part.targets, part.count)
            run.clock.lap("dtf")
            loss.backward()
            run.clock.lap("dtb")
            optimizer.step()
            held = local_elements(model, optimizer)
            optimizer.zero_grad()
            run.clock.lap("dto")
            run.step(step, loss, samples=global_batch, tokens=part.count, last=step == steps - 1)

        whole = parameter_count(model)
        shards, copies = layout.dp_shard, layout.dp_replicate
        run.log.info(
            "rank 0 holds %s of %s parameters (1/%d in theory: %.1f)",
            f"{held['parameters']:,}",
            f"{whole:,}",
            shards,
            whole / shards,
        )
        run.log.info(
            "a rank sends in a step, in theory: in its row %.0f numbers, in its column %.0f",
            3 * (shards - 1) / shards * whole,
            2 * (copies - 1) / copies * whole / shards,
        )
        spread = copies_spread(model, mesh)
        run.log.info("the %d copies, after %d steps: differ by %.1e at most", copies, steps, spread)
        run.describe(held=held, whole=whole, copies_spread=spread)


def groups_of(mesh: DeviceMesh) -> dict[str, tuple[int, ...]]:
    """The ranks that this rank talks to, itself among them, along each axis."""
    return {axis: tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in mesh.mesh_dim_names or ()}


@torch.no_grad()
def copies_spread(model: nn.Module, mesh: Mesh) -> float:
    """The largest difference of a parameter between two copies. A collective."""
    numbers = torch.cat([to_local(p).flatten() for p in model.parameters()])
    highest, lowest = numbers.clone(), numbers.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh["dp_replicate"].get_group())
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh["dp_replicate"].get_group())
    apart = (highest - lowest).max() if len(numbers) else numbers.new_zeros(())
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart)


def main() -> None:
    train(parse(Config, __doc__))


if __name__ == "__main__":
    run_main(main)
