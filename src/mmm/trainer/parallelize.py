"""From a model's shapes to this rank's part of it: what all trainers do once their run has begun."""

from __future__ import annotations

from torch import nn

from mmm.models.experts import has_experts
from mmm.models.weights import parameter_count
from mmm.parallel import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Plan, unmatched
from mmm.parallel.techniques import Techniques
from mmm.runtime.process_group import gather_floats
from mmm.trainer.report import held_parameters, sharded_model, stage_table
from mmm.trainer.run import Run


def parallelize(run: Run, model: nn.Module, plan: Plan, techniques: Techniques, partition: Partition) -> ParallelModel:
    """Make the mesh, and on it this rank's part of `model` with its initial weights; log who has what. A collective.

    Args:
        model: on the meta device; it is used up. division: of `mmm.parallel.assemble.partition_model`.
    """
    whole = parameter_count(model)
    run.notes += unmatched(plan, model)  # `ParallelModel` says them
    run.describe(notes=run.notes)
    mesh = build_mesh(run.layout, run.device.type, run.options.timeout, experts=has_experts(model))
    if partition.stages:
        run.log.info(
            "%d micro-batches by %s\n%s",
            partition.microbatches,
            techniques.schedule,
            stage_table(partition.names(), partition.shares()),
        )
        run.describe(stages=partition.names())
    here = ParallelModel(
        model,
        plan,
        mesh,
        run.precision,
        techniques,
        partition,
        device=run.device,
        seed=run.options.seed,
        lap=run.clock.lap,
    )
    run.log.info("%s, %s", techniques.data_parallel, mesh)
    for number, module in here.modules.items():
        run.log.info("%s%s", f"stage {number}\n" if partition.stages else "", sharded_model(module))
    held = gather_floats([float(sum(map(held_parameters, here.modules.values())))], run.device)
    (least,), (most,) = min(held), max(held)
    run.log.info(
        "a rank holds %s to %s of %s parameters (%.1f%% to %.1f%%)",
        f"{least:,.0f}",
        f"{most:,.0f}",
        f"{whole:,}",
        100 * least / whole,
        100 * most / whole,
    )
    run.describe(
        techniques=techniques, microbatches=partition.microbatches, parameters=whole, held=[int(n) for (n,) in held]
    )
    return here
